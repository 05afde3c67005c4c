/*
 * Extensions of parameters as work of streams: a gather moves the caller's own bytes instead of a shard. See
 * fsdp_extension in model.h.
 */
#include "runtime/group/group_internal.h"

typedef struct extension_args {
    const fsdp_param *param;
    void *data; /* post: the parameter that it makes */
    unsigned char *inputs;
    size_t stride;
} extension_args;

/* Addresses of the inputs, which lie one behind the other. */
static void find_inputs(const extension_args *work, void **inputs)
{
    const fsdp_extension *extension = work->param->extension;
    unsigned char *at = work->inputs;
    for (size_t i = 0; i < extension->count; i++) {
        inputs[i] = at;
        at += extension->sizes[i];
    }
}

static fsdp_status run_pre(void *args, fsdp_error *err)
{
    const extension_args *work = args;
    const fsdp_extension *extension = work->param->extension;
    void *inputs[FSDP_MAX_EXTENSION_INPUTS];
    find_inputs(work, inputs);
    return extension->pre(extension->context, work->param, work->param->shard, inputs, err);
}

static fsdp_status run_post(void *args, fsdp_error *err)
{
    const extension_args *work = args;
    const fsdp_extension *extension = work->param->extension;
    void *inputs[FSDP_MAX_EXTENSION_INPUTS];
    find_inputs(work, inputs);
    return extension->post(extension->context, work->param, (const void *const *)inputs,
                           work->stride, work->data, err);
}

void fsdp_work_pre_extension(fsdp_stream *stream, const fsdp_param *param, void *to)
{
    const extension_args args = {.param = param, .inputs = to};
    fsdp_work_uses(stream, param->shard);
    fsdp_work_uses(stream, to);
    stream->device->ops->submit(stream, run_pre, &args, sizeof args);
}

void fsdp_work_post_extension(fsdp_stream *stream, const fsdp_param *param, const void *from,
                              size_t stride)
{
    const extension_args args = {
        .param = param, .data = param->data, .inputs = (void *)from, .stride = stride};
    fsdp_work_uses(stream, from);
    fsdp_work_uses(stream, param->data);
    stream->device->ops->submit(stream, run_post, &args, sizeof args);
}

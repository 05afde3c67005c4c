/*
 * Reduces gradients to sharded gradients. In docs/flow_step.md: steps 9 to 12.
 *
 *   part            what it does                                                                stream
 *   chunk-cat       per rank, its rows of every gradient, padded, in the reduce dtype           compute
 *   reduce-scatter  every rank gets the sum of its own rows                                     reduce
 *   all-reduce      over replicas (HSDP), when it is wanted now                                 all_reduce
 *   view-out        divided, in the parameter's dtype: installed, or added to what is there     the last
 *
 * On device cpu the first two may be one, without the copy (group_direct.c).
 */
#include "runtime/group/group_internal.h"

#include <string.h>

#include "base/core/mem.h"

/* --- reduce-scatter --------------------------------------------------------------------------- */

static fsdp_collective call_of(const fsdp_group *group, const fsdp_reduced *reduced,
                               const fsdp_block *input, const fsdp_divide *divide)
{
    return (fsdp_collective){.kind = FSDP_REDUCE_SCATTER,
                             .dtype = reduced->dtype,
                             .in = input->data,
                             .out = reduced->block->data,
                             .count = fsdp_reduced_count(reduced),
                             .op = divide->scatter_op,
                             .factor = divide->premul,
                             .unit = group->name};
}

static void scatter(fsdp_group *group, const fsdp_reduced *reduced, const fsdp_block *input,
                    const fsdp_divide *divide, fsdp_stream *stream)
{
    int64_t count = fsdp_reduced_count(reduced);
    const fsdp_collective call = call_of(group, reduced, input, divide);
    fsdp_work_divide(stream, input->data, reduced->dtype, count * group->shard_size,
                     divide->before);
    if (group->shard_size > 1) {
        fsdp_work_collective(stream, group->reduce, &call, group->settings->custom_reduce);
        fsdp_trace_collective(group, group->reduce, &call, stream->name);
    } else {
        fsdp_work_cast(stream, reduced->block->data, reduced->dtype, input->data, reduced->dtype,
                       count);
        fsdp_work_divide(stream, reduced->block->data, reduced->dtype, count, divide->alone);
    }
}

static fsdp_status scatter_directly(fsdp_group *group, const fsdp_reduced *reduced,
                                    const fsdp_block *input, const fsdp_divide *divide,
                                    fsdp_stream *stream, fsdp_error *err)
{
    fsdp_collective call = call_of(group, reduced, input, divide);
    FSDP_TRY(fsdp_group_add_up(group, reduced, divide, &call, err));
    fsdp_trace_collective(group, group->reduce, &call, stream->name);
    return FSDP_OK;
}

static fsdp_status reduce_scatter(fsdp_group *group, fsdp_reduced *reduced,
                                  const fsdp_divide *divide, fsdp_error *err)
{
    fsdp_context *context = group->context;
    fsdp_stream *stream = fsdp_group_stream(group, FSDP_STREAM_REDUCE);
    fsdp_block *input;
    const fsdp_memory_request output = {
        .class = FSDP_MEMORY_REDUCE,
        .stream = stream,
        .allocator = fsdp_group_allocator(group, group->settings->custom_reduce, group->reduce),
        .size = fsdp_reduced_bytes(reduced),
        .owner = group->name};
    bool is_direct = fsdp_reduced_is_direct(group, reduced, divide);
    FSDP_TRY(is_direct ? fsdp_group_list_grads(group, reduced, &input, err)
                       : fsdp_group_chunk_cat(group, reduced, &input, err));
    fsdp_stream_follow(stream, fsdp_group_stream(group, FSDP_STREAM_COMPUTE));
    FSDP_TRY(fsdp_memory_take(&context->memory, &output, &reduced->block, err));
    if (is_direct)
        FSDP_TRY(scatter_directly(group, reduced, input, divide, stream, err));
    else
        scatter(group, reduced, input, divide, stream);
    context->inputs[context->input_count - 1].event = fsdp_stream_now(stream);
    return FSDP_OK;
}

/* --- replicas --------------------------------------------------------------------------------- */

static void all_reduce(fsdp_group *group, const fsdp_reduced *reduced, const fsdp_divide *divide,
                       fsdp_stream *stream)
{
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = reduced->dtype,
                                  .in = reduced->block->data,
                                  .out = reduced->block->data,
                                  .count = fsdp_reduced_count(reduced),
                                  .op = divide->all_op,
                                  .unit = group->name};
    fsdp_stream_follow(stream, fsdp_group_stream(group, FSDP_STREAM_REDUCE));
    fsdp_work_collective(stream, group->replicate, &call, group->settings->custom_all_reduce);
    fsdp_trace_collective(group, group->replicate, &call, stream->name);
}

/* --- view-out --------------------------------------------------------------------------------- */

/* The list has room for the block. */
static void note_grads(fsdp_group *group, fsdp_block *block)
{
    group->grads[group->grad_count++] = block;
    if (block->class != FSDP_MEMORY_GRAD)
        fsdp_memory_move(&group->context->memory, block, FSDP_MEMORY_GRAD);
}

static bool all_have_dtype(const fsdp_reduced *reduced, fsdp_dtype dtype)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (reduced->parts[i].param->dtype != dtype)
            return false;
    return true;
}

/* New gradients are added to those of an earlier reduction. */
static bool all_have_grads(const fsdp_reduced *reduced)
{
    for (size_t i = 0; i < reduced->count; i++)
        if (!reduced->parts[i].param->shard_grad)
            return false;
    return true;
}

static size_t grad_bytes(const fsdp_reduced *reduced)
{
    size_t bytes = 0;
    for (size_t i = 0; i < reduced->count; i++)
        bytes += (size_t)reduced->parts[i].count * fsdp_dtype_size(reduced->parts[i].param->dtype);
    return bytes;
}

/* Casts each run of parts with one dtype. *block_out holds all, and becomes gradients in host memory. */
static fsdp_status cast_grads(fsdp_group *group, const fsdp_reduced *reduced, bool to_host,
                              fsdp_stream *stream, fsdp_block **block_out, fsdp_error *err)
{
    const fsdp_memory_request request = {.class = FSDP_MEMORY_GRAD,
                                         .stream = stream,
                                         .is_staging = to_host,
                                         .size = grad_bytes(reduced),
                                         .owner = group->name};
    FSDP_TRY(fsdp_memory_take(&group->context->memory, &request, block_out, err));
    unsigned char *to = (*block_out)->data;
    for (size_t i = 0; i < reduced->count;) {
        const fsdp_reduced_part *first = &reduced->parts[i];
        fsdp_dtype dtype = first->param->dtype;
        int64_t count = 0;
        for (; i < reduced->count && reduced->parts[i].param->dtype == dtype; i++)
            count += reduced->parts[i].count;
        fsdp_work_cast(stream, to, dtype, fsdp_reduced_at(reduced, first), reduced->dtype, count);
        to += (size_t)count * fsdp_dtype_size(dtype);
    }
    return FSDP_OK;
}

/* Makes new gradients the parameters', or adds them to those of earlier reductions. Is the block used? */
static bool install(const fsdp_reduced *reduced, fsdp_block *block, fsdp_stream *stream)
{
    unsigned char *at = block->data;
    bool is_used = false;
    for (size_t i = 0; i < reduced->count; i++) {
        fsdp_param *param = reduced->parts[i].param;
        int64_t count = fsdp_param_local_count(param);
        if (param->shard_grad)
            fsdp_work_add(stream, param->shard_grad, param->dtype, at, param->dtype, count);
        else
            param->shard_grad = at;
        param->is_reduced = true;
        is_used = is_used || param->shard_grad == at;
        at += (size_t)reduced->parts[i].count * fsdp_dtype_size(param->dtype);
    }
    return is_used;
}

static fsdp_status view_out(fsdp_group *group, fsdp_reduced *reduced, bool is_all_reduced,
                            fsdp_stream *stream, fsdp_error *err)
{
    fsdp_context *context = group->context;
    fsdp_block *block = reduced->block;
    if (!fsdp_grow(&group->grads, &group->grad_room, group->grad_count + 1, sizeof *group->grads))
        return fsdp_fail_memory(err, group->name);
    bool to_host = group->settings->offloads && !all_have_grads(reduced);
    if (to_host || !all_have_dtype(reduced, reduced->dtype)) {
        FSDP_TRY(cast_grads(group, reduced, to_host, stream, &block, err));
        fsdp_context_give_all_reduced(context);
        const fsdp_used_block used = {.block = reduced->block, .event = fsdp_stream_now(stream)};
        if (is_all_reduced)
            context->all_reduced = used;
        else
            fsdp_memory_give(&context->memory, used.block, used.event);
    }
    if (install(reduced, block, stream))
        note_grads(group, block);
    else
        fsdp_group_give(group, block, fsdp_stream_now(stream));
    reduced->block = NULL;
    group->reduced = fsdp_stream_now(stream);
    return FSDP_OK;
}

/* --- the whole -------------------------------------------------------------------------------- */

static fsdp_status run_hook(const fsdp_group *group, const fsdp_reduced *reduced,
                            fsdp_stream *stream, fsdp_error *err)
{
    const fsdp_group_settings *settings = group->settings;
    if (!settings->all_reduce_hook)
        return FSDP_OK;
    if (!stream->device->ops->is_host)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: an all-reduce hook computes on the host, but device %s has its "
                         "own memory; use a custom reduce-scatter, which gets the stream",
                         group->name, stream->device->ops->name);
    fsdp_work_all_reduce_hook(stream, settings->all_reduce_hook, settings->all_reduce_hook_context,
                              reduced->block->data, reduced->dtype, fsdp_reduced_count(reduced));
    return FSDP_OK;
}

static fsdp_status reduce(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    const fsdp_group_settings *settings = group->settings;
    bool is_new = reduced->count > 0; /* otherwise only partial sums are due */
    const fsdp_divide divide =
        fsdp_divide_for(group, is_new ? reduced->dtype : group->partial.dtype);
    bool has_replicas = group->replicate_size > 1;
    fsdp_stream *last =
        fsdp_group_stream(group, has_replicas ? FSDP_STREAM_ALL_REDUCE : FSDP_STREAM_REDUCE);
    if (is_new)
        FSDP_TRY(reduce_scatter(group, reduced, &divide, err));
    FSDP_TRY(fsdp_group_add_partial(group, reduced, err));
    if (has_replicas && !settings->all_reduces) {
        group->partial = *reduced;
        *reduced = (fsdp_reduced){0};
        /* after a view-out of an earlier backward, which is on that stream */
        fsdp_stream_follow(last, fsdp_group_stream(group, FSDP_STREAM_REDUCE));
        group->reduced = fsdp_stream_now(last);
        return FSDP_OK;
    }
    if (has_replicas)
        all_reduce(group, reduced, &divide, last);
    FSDP_TRY(run_hook(group, reduced, last, err));
    fsdp_work_divide(last, reduced->block->data, reduced->dtype, fsdp_reduced_count(reduced),
                     divide.after);
    return view_out(group, reduced, has_replicas, last, err);
}

fsdp_status fsdp_group_reduce(fsdp_group *group, fsdp_error *err)
{
    fsdp_reduced reduced;
    FSDP_TRY(fsdp_reduced_list(group, &reduced, err));
    bool is_due = group->partial.block && group->settings->all_reduces;
    fsdp_status status = reduced.count > 0 || is_due ? reduce(group, &reduced, err) : FSDP_OK;
    fsdp_group_give(group, reduced.block,
                    fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_REDUCE)));
    fsdp_free(reduced.parts);
    return status;
}

void fsdp_group_wait_reduced(fsdp_group *group)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    compute->device->ops->wait(compute, group->reduced);
    group->reduced = (fsdp_event){0};
}

fsdp_status fsdp_group_await_offloaded(const fsdp_group *group, fsdp_error *err)
{
    return group->settings->offloads ? group->context->device->ops->sync(group->reduced, err)
                                     : FSDP_OK;
}

void fsdp_group_drop_grads(fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++) {
        group->params[i]->shard_grad = NULL;
        group->params[i]->is_reduced = false;
    }
    for (size_t i = 0; i < group->grad_count; i++)
        fsdp_group_give(group, group->grads[i],
                        fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_COMPUTE)));
    group->grad_count = 0;
}

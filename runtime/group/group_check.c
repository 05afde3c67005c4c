/*
 * With --check: gathered parameters that the program changed, since the change is lost, and values that look
 * like numbers where there are none. 0xff in every byte is NaN in all floating types but the two FNUZ ones.
 * See launch.h; docs/runtime.md, "Checks".
 */
#include "runtime/group/group_internal.h"

#include <string.h>

#include "base/core/mem.h"

enum { NO_VALUE = 0xff };

fsdp_status fsdp_group_begin_check(fsdp_group *group, fsdp_error *err)
{
    const fsdp_world *world = group->context->world;
    if (!world->parts.check || !group->context->device->ops->is_host)
        return FSDP_OK;
    group->gathered = fsdp_alloc(group->count, sizeof *group->gathered);
    return group->gathered ? FSDP_OK : fsdp_fail_memory(err, group->name);
}

static size_t data_bytes(const fsdp_param *param)
{
    return (size_t)fsdp_param_count(param) * fsdp_dtype_size(param->data_dtype);
}

typedef struct check_args {
    void *data;
    size_t size;
    fsdp_hash *hash_out;
} check_args;

static void submit(fsdp_stream *stream, fsdp_work work, const check_args *args)
{
    fsdp_work_uses(stream, args->data);
    stream->device->ops->submit(stream, work, args, sizeof *args);
}

/* --- gathered parameters ------------------------------------------------------------------------ */

static fsdp_status hash(void *args, fsdp_error *err)
{
    const check_args *work = args;
    (void)err;
    *work->hash_out = fsdp_kernels_get()->hash(work->data, work->size);
    return FSDP_OK;
}

void fsdp_group_note_gathered(fsdp_group *group)
{
    for (size_t i = 0; i < group->count && group->gathered; i++) {
        const fsdp_param *param = group->params[i];
        const check_args args = {
            .data = param->data, .size = data_bytes(param), .hash_out = &group->gathered[i]};
        submit(fsdp_group_stream(group, FSDP_STREAM_COMPUTE), hash, &args);
    }
}

fsdp_status fsdp_group_check_gathered(const fsdp_group *group, fsdp_error *err)
{
    if (!group->gathered)
        return FSDP_OK;
    FSDP_TRY(fsdp_context_sync(group->context, err));
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        const fsdp_hash now = fsdp_kernels_get()->hash(param->data, data_bytes(param));
        if (memcmp(&now, &group->gathered[i], sizeof now) != 0)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "unit %s: '%s' was written to while it was gathered, which resharding "
                             "drops; between steps fsdp_param_shard gives the rows that stay",
                             group->name, param->name);
    }
    return FSDP_OK;
}

/* --- no values ---------------------------------------------------------------------------------- */

static fsdp_status spoil(void *args, fsdp_error *err)
{
    const check_args *work = args;
    (void)err;
    memset(work->data, NO_VALUE, work->size);
    return FSDP_OK;
}

void fsdp_group_spoil_gathered(const fsdp_group *group)
{
    if (!group->gathered || !group->unsharded)
        return;
    const check_args args = {.data = group->unsharded->data, .size = group->unsharded->room};
    submit(fsdp_group_stream(group, FSDP_STREAM_COMPUTE), spoil, &args);
}

void fsdp_param_spoil_grad(const fsdp_param *param)
{
    if (param->group->gathered)
        memset(param->grad->data, NO_VALUE, param->grad->size);
}

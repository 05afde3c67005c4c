/*
 * With --check: reports gathered parameters that the program changed, since a reshard drops the change, and
 * fills memory without values with NaN, so that a read of it shows. 0xff in every byte is NaN in all floating
 * types but the two FNUZ ones. See launch.h; docs/runtime.md, "Checks".
 */
#include "runtime/group/group_internal.h"

#include <string.h>

#include "base/core/mem.h"

enum { NO_VALUE = 0xff };

fsdp_status fsdp_group_begin_check(fsdp_group *group, fsdp_error *err)
{
    const fsdp_world *world = group->context->world;
    fsdp_device *device = group->context->device;
    if (!world->parts.check || !device->ops->is_host)
        return FSDP_OK;
    group->gathered = device->ops->alloc_staging(device, group->count * sizeof *group->gathered);
    group->gathered_spans = fsdp_alloc(group->count, sizeof *group->gathered_spans);
    if (!group->gathered || !group->gathered_spans)
        return fsdp_fail_memory(err, group->name);
    return FSDP_OK;
}

void fsdp_group_end_check(fsdp_group *group)
{
    fsdp_device *device = group->context ? group->context->device : NULL;
    if (group->gathered)
        device->ops->dealloc_staging(device, group->gathered,
                                     group->count * sizeof *group->gathered);
    fsdp_free(group->gathered_spans);
    group->gathered = NULL;
    group->gathered_spans = NULL;
}

static size_t data_bytes(const fsdp_param *param)
{
    return (size_t)fsdp_param_count(param) * fsdp_dtype_size(param->data_dtype);
}

/* --- gathered parameters ------------------------------------------------------------------------ */

void fsdp_group_note_gathered(fsdp_group *group)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    if (!group->gathered)
        return;
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        fsdp_work_uses(compute, param->data);
        group->gathered_spans[i] = (fsdp_span){param->data, FSDP_U8, data_bytes(param)};
    }
    compute->device->ops->kernels->hashes(compute, group->gathered_spans, group->count,
                                          group->gathered);
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
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "unit %s: '%s' was changed while it was gathered, and resharding drops the change; "
                "change the rows of fsdp_param_shard between steps instead",
                group->name, param->name);
    }
    return FSDP_OK;
}

/* --- no values ---------------------------------------------------------------------------------- */

void fsdp_group_spoil_gathered(const fsdp_group *group)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    const fsdp_block *block = group->unsharded;
    if (!group->gathered || !block)
        return;
    fsdp_work_uses(compute, block->data);
    compute->device->ops->kernels->fill(compute, block->data, NO_VALUE, block->room);
}

void fsdp_param_spoil_grad(const fsdp_param *param)
{
    fsdp_stream *compute = fsdp_group_stream(param->group, FSDP_STREAM_COMPUTE);
    if (param->group->gathered)
        compute->device->ops->kernels->fill(compute, param->grad->data, NO_VALUE,
                                            param->grad->size);
}

/*
 * Memory for a group's buffers and whole gradients: the device's, the communicator's, or that of a custom
 * collective.
 */
#include "runtime/group/group_internal.h"
#include "base/core/mem.h"

/* === gradients that are kept ================================================================== */

/*
 * Gradients of backwards that do not reduce: kept whole, in the reduce dtype, and added up until a backward
 * that reduces. In docs/flow_step.md: step 8.
 */

fsdp_dtype fsdp_param_reduce_dtype(const fsdp_param *param)
{
    fsdp_dtype dtype = param->group->settings->reduce_dtype;
    return dtype != FSDP_DTYPE_NONE ? dtype : param->dtype;
}

static fsdp_status begin_kept(fsdp_param *param, fsdp_error *err)
{
    const fsdp_group *group = param->group;
    int64_t count = fsdp_param_count(param);
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    param->kept_dtype = fsdp_param_reduce_dtype(param);
    if (param->kept_dtype == param->grad_dtype) {
        param->kept = param->grad;
        param->grad = NULL;
        param->has_grad = false;
        return FSDP_OK;
    }
    const fsdp_memory_request request = {.class = FSDP_MEMORY_GRAD,
                                         .stream = compute,
                                         .allocator = fsdp_group_grad_allocator(group),
                                         .size = (size_t)count * fsdp_dtype_size(param->kept_dtype),
                                         .owner = param->name};
    FSDP_TRY(fsdp_memory_take(&group->context->memory, &request, &param->kept, err));
    fsdp_work_cast(compute, param->kept->data, param->kept_dtype, param->grad->data,
                   param->grad_dtype, count);
    fsdp_param_drop_grad(param);
    return FSDP_OK;
}

/* The gradient of this backward is added to that of earlier ones. */
static void add_to_kept(fsdp_param *param)
{
    fsdp_work_add(fsdp_group_stream(param->group, FSDP_STREAM_COMPUTE), param->kept->data,
                  param->kept_dtype, param->grad->data, param->grad_dtype, fsdp_param_count(param));
    fsdp_param_drop_grad(param);
}

fsdp_status fsdp_group_keep_grads(fsdp_group *group, fsdp_error *err)
{
    for (size_t i = 0; i < group->count; i++) {
        fsdp_param *param = group->params[i];
        if (!param->has_grad)
            continue;
        if (param->kept)
            add_to_kept(param);
        else
            FSDP_TRY(begin_kept(param, err));
    }
    return FSDP_OK;
}

void fsdp_group_add_to_kept(fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++)
        if (group->params[i]->has_grad && group->params[i]->kept)
            add_to_kept(group->params[i]);
}

void fsdp_group_drop_kept(fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++) {
        fsdp_param_drop_grad(group->params[i]);
        fsdp_param_drop_kept(group->params[i]);
    }
    fsdp_group_give(group, group->partial.block,
                    fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_REDUCE)));
    fsdp_free(group->partial.parts);
    group->partial = (fsdp_reduced){0};
}

/* === memory =================================================================================== */

fsdp_allocator fsdp_group_allocator(const fsdp_group *group, const fsdp_custom_collective *custom,
                                    const fsdp_ordered_comm *ordered)
{
    if (custom && custom->alloc)
        return fsdp_allocator_of_custom(custom);
    bool has_memory = group->context->device->ops->is_host ||
                      (ordered && fsdp_comm_abilities(ordered->comm) & FSDP_COMM_DEVICE_MEMORY);
    bool uses_comm = group->settings->takes_comm_memory && ordered && has_memory;
    return fsdp_allocator_of_comm(uses_comm ? ordered->comm : NULL);
}

bool fsdp_group_may_be_direct(const fsdp_group *group)
{
    const fsdp_group_settings *settings = group->settings;
    const fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    return compute->device->ops->is_at_once && settings->takes_comm_memory &&
           !settings->custom_reduce && !settings->reduces_unused && group->shard_size > 1 &&
           (fsdp_comm_abilities(group->reduce->comm) & FSDP_COMM_POOL);
}

fsdp_allocator fsdp_group_grad_allocator(const fsdp_group *group)
{
    return fsdp_allocator_of_comm(fsdp_group_may_be_direct(group) ? group->reduce->comm : NULL);
}

fsdp_status fsdp_param_take_grad(fsdp_param *param, fsdp_error *err)
{
    const fsdp_group *group = param->group;
    const fsdp_memory_request request = {.class = FSDP_MEMORY_GRAD,
                                         .stream = fsdp_group_stream(group, FSDP_STREAM_COMPUTE),
                                         .allocator = fsdp_group_grad_allocator(group),
                                         .size = (size_t)fsdp_param_count(param) *
                                                 fsdp_dtype_size(param->grad_dtype),
                                         .owner = param->name};
    return fsdp_memory_take(&group->context->memory, &request, &param->grad, err);
}

/* The block's last use is what the compute stream has so far. */
static void give(const fsdp_group *group, fsdp_block *block)
{
    fsdp_group_give(group, block, fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_COMPUTE)));
}

void fsdp_param_drop_grad(fsdp_param *param)
{
    give(param->group, param->grad);
    param->grad = NULL;
    param->has_grad = false;
}

void fsdp_param_drop_kept(fsdp_param *param)
{
    give(param->group, param->kept);
    param->kept = NULL;
}

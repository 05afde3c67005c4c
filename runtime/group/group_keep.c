/*
 * Gradients of backwards that do not reduce: kept whole, in the reduce dtype, and added up until a backward
 * that reduces. In docs/flow_step.md: step 8.
 */
#include "runtime/group/group_internal.h"

#include "base/core/mem.h"

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

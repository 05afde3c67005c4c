/*
 * Gradients without synchronisation: kept whole, in the dtype they will be reduced in, until a backward that
 * reduces. In docs/flow_step.md: step "reduce".
 */
#include "runtime/group/group_reduce.h"
#include "runtime/context/work.h"

#include "base/mem.h"

void fsdp_param_drop_grad(fsdp_param *param)
{
    const fsdp_group *group = param->group;
    fsdp_group_give(group, param->grad,
                    fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_COMPUTE)));
    param->grad = NULL;
    param->has_grad = false;
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
    const fsdp_lender lender = fsdp_group_grad_lender(group);
    FSDP_TRY(fsdp_memory_take(&fsdp_group_context(group)->memory, FSDP_MEMORY_GRAD, compute,
                              &lender, (size_t)count * fsdp_dtype_size(param->kept_dtype), 0,
                              param->name, &param->kept, err));
    fsdp_work_cast(compute, param->kept->data, param->kept_dtype, param->grad->data,
                   param->grad_dtype, count);
    fsdp_param_drop_grad(param);
    return FSDP_OK;
}

/* What this backward gave is added to what earlier ones left. */
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
        fsdp_param *param = group->params[i];
        fsdp_param_drop_grad(param);
        fsdp_group_give(group, param->kept,
                        fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_COMPUTE)));
        param->kept = NULL;
    }
    fsdp_group_give(group, group->partial.block,
                    fsdp_stream_now(fsdp_group_stream(group, FSDP_STREAM_REDUCE)));
    fsdp_free(group->partial.parts);
    group->partial = (fsdp_reduced){0};
}

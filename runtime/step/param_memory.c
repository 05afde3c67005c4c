/*
 * The pointers to shards, data and gradients of parameters that callers get, and the reason when one is NULL.
 * See unit.h.
 */
#include "runtime/step/step_internal.h"

#include <string.h>

#include "base/core/given.h"

fsdp_status fsdp_param_set_requires_grad(fsdp_param *param, bool requires_grad, fsdp_error *err)
{
    FSDP_NEED(err, param);
    const fsdp_root *root = param->model->root;
    if (requires_grad && (param->is_buffer || !fsdp_dtype_describe(param->dtype)->is_float))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' cannot have a gradient: it is %s", param->name,
                         param->is_buffer ? "a buffer" : fsdp_dtype_name(param->dtype));
    if (root && (root->is_in_forward || root->is_in_backward))
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot freeze or unfreeze '%s' inside a step",
                         param->name);
    if (param->flat)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot freeze '%s': it is in a flat parameter; freeze it before fsdp_wrap_create",
            param->name);
    param->requires_grad = requires_grad;
    return FSDP_OK;
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Returns NULL, and keeps the reason for the next call on the root. */
static void *refuse(fsdp_param *param, const char *what, const char *when)
{
    static const char *const states[] = {"sharded", "sharded again after forward", "gathered"};
    fsdp_root *root = param->model->root;
    if (!root || root->pending.status != FSDP_OK)
        return NULL;
    if (param->group)
        (void)fsdp_fail(&root->pending, FSDP_ERR_USAGE,
                        "%s of '%s' was requested while unit %s is %s; %s", what, param->name,
                        param->unit->name, states[param->group->state], when);
    else
        (void)fsdp_fail(&root->pending, FSDP_ERR_USAGE, "%s of '%s' was requested; %s", what,
                        param->name, when);
    return NULL;
}

fsdp_status fsdp_param_error(const fsdp_param *param, fsdp_error *err)
{
    FSDP_NEED(err, param);
    fsdp_root *root = param->model->root;
    if (!root)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has no memory: fsdp_root_create, or fsdp_wrap_create, gives it",
                         param->name);
    return fsdp_root_ready(root, err);
}

/* The part of a flat parameter's memory that belongs to a parameter in it. */
static void *within(const fsdp_param *param, void *flat_data, fsdp_dtype dtype)
{
    size_t offset = (size_t)param->flat_at * fsdp_dtype_size(dtype);
    return flat_data ? (unsigned char *)flat_data + offset : NULL;
}

static void *flat_data(const fsdp_param *param)
{
    fsdp_param *flat = param->flat;
    if (flat->model->root->is_summoned && flat->group)
        return within(param, flat->summoned, flat->dtype);
    return within(param, fsdp_param_data(flat), flat->data_dtype);
}

/* This rank's run in the flat parameter's shard, or in its gradient. */
static void *flat_shard(const fsdp_param *param, void *shard)
{
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    bool has_any = shard && (run.count > 0 || !param->flat->group);
    return has_any ? (unsigned char *)shard + (size_t)run.at * fsdp_dtype_size(param->flat->dtype)
                   : NULL;
}

void *fsdp_param_shard(fsdp_param *param, fsdp_box *box_out)
{
    if (!param)
        return NULL;
    if (param->flat && param->flat->group) {
        if (box_out) {
            const fsdp_flat_run run = fsdp_param_flat_run(param);
            *box_out = (fsdp_box){.ndim = 1, .lo = {run.first}, .len = {run.count}};
        }
        return flat_shard(param, param->flat->shard);
    }
    if (box_out)
        *box_out = param->mesh ? param->shard_box : fsdp_box_whole(param->ndim, param->shape);
    param->lacks_value = false; /* the caller may write it */
    return param->shard;
}

void fsdp_param_data_box(const fsdp_param *param, fsdp_box *box_out)
{
    if (!param || !box_out)
        return;
    *box_out = param->mesh ? param->data_box : fsdp_box_whole(param->ndim, param->shape);
}

void *fsdp_param_data(fsdp_param *param)
{
    if (!param)
        return NULL;
    if (param->flat)
        return flat_data(param);
    if (!param->group)
        return param->shard;
    if (param->group->state != FSDP_IS_UNSHARDED)
        return refuse(param, "the data",
                      "it is valid between pre_forward and post_forward, and "
                      "pre_backward and post_backward");
    return param->data;
}

/* The host may write to the gradient when this returns. */
static fsdp_status take_grad(fsdp_param *param, bool zeroed, fsdp_error *err)
{
    fsdp_stream *compute = fsdp_group_stream(param->group, FSDP_STREAM_COMPUTE);
    FSDP_TRY(fsdp_param_take_grad(param, err));
    if (zeroed)
        compute->device->ops->kernels->fill(compute, param->grad->data, 0, param->grad->size);
    else
        fsdp_param_spoil_grad(param);
    return fsdp_context_sync(param->group->context, err);
}

static void *grad(fsdp_param *param, bool zeroed)
{
    fsdp_error err = {0};
    if (!param->requires_grad)
        return refuse(param, "the gradient", "it is frozen, or of a kind without gradients");
    if (param->flat && param->flat->model->root->is_summoned)
        return within(param, param->flat->summoned_grad, param->flat->dtype);
    param->had_grad = true;
    if (param->flat)
        return within(param, grad(param->flat, true), param->flat->grad_dtype);
    if (param->is_ignored)
        return refuse(param, "the gradient", "units ignore it, so its gradient is the caller's");
    if (!param->group || param->group->phase != FSDP_PRE_BACKWARD)
        return refuse(param, "the gradient", "it is valid between pre_backward and post_backward");
    if (!param->grad && take_grad(param, zeroed, &err) != FSDP_OK) {
        if (param->model->root->pending.status == FSDP_OK)
            param->model->root->pending = err;
        return NULL;
    }
    param->has_grad = true;
    return param->grad->data;
}

void *fsdp_param_grad(fsdp_param *param)
{
    if (!param)
        return NULL;
    return grad(param, true);
}

void *fsdp_param_grad_raw(fsdp_param *param)
{
    if (!param)
        return NULL;
    return grad(param, false);
}

void *fsdp_param_shard_grad(fsdp_param *param)
{
    if (!param)
        return NULL;
    if (param->flat)
        return flat_shard(param, param->flat->shard_grad);
    return param->shard_grad;
}

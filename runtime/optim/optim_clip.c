/*
 * The norm of all gradients as one vector, and clipping. Every rank sums over its own rows; of the ranks
 * that hold copies of the same rows, only the first counts them. So one number is summed over all ranks,
 * for every mesh.
 */
#include "runtime/optim/optim_internal.h"
#include "runtime/step/step.h"
#include "statedict/sd/layout_internal.h"

#include <math.h>

#include "base/core/given.h"
#include "base/core/mem.h"

/* --- one number over all ranks ---------------------------------------------------------------- */

fsdp_status fsdp_root_fold(fsdp_root *root, double *value, fsdp_fold fold, const char *what,
                           fsdp_error *err)
{
    fsdp_ordered_comm *ordered;
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F64,
                                  .in = value,
                                  .out = value,
                                  .count = 1,
                                  .op = fold == FSDP_FOLD_SUM ? FSDP_REDUCE_SUM : FSDP_REDUCE_MAX,
                                  .unit = what};
    FSDP_TRY(fsdp_root_widest_comm(root, &ordered, err));
    if (!ordered)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s needs the mesh of all ranks to be connected (fsdp_world_connect)",
                         what);
    return fsdp_comm_run(ordered->comm, &call, err);
}

/* --- gradients as a list ------------------------------------------------------------------------ */

fsdp_status fsdp_grad_list_take(fsdp_root *root, bool (*counts)(const fsdp_param *param),
                                fsdp_grad_list *list_out, fsdp_error *err)
{
    const fsdp_model *model = root->model;
    fsdp_device *device = root->context->device;
    *list_out = (fsdp_grad_list){.device = device, .room = model->count};
    list_out->spans = fsdp_alloc(model->count, sizeof *list_out->spans);
    list_out->sums = device->ops->alloc_staging(device, model->count * sizeof *list_out->sums);
    if (!list_out->spans || !list_out->sums)
        return fsdp_fail_memory(err, "a list of gradients");
    for (size_t i = 0; i < model->count; i++) {
        const fsdp_param *param = model->params[i];
        size_t count = (size_t)fsdp_param_local_count(param);
        if (param->shard_grad && count > 0 && (!counts || counts(param)))
            list_out->spans[list_out->count++] =
                (fsdp_span){param->shard_grad, param->dtype, count};
    }
    return FSDP_OK;
}

void fsdp_grad_list_release(fsdp_grad_list *list)
{
    if (list->sums)
        list->device->ops->dealloc_staging(list->device, list->sums,
                                           list->room * sizeof *list->sums);
    fsdp_free(list->spans);
    *list = (fsdp_grad_list){0};
}

/* --- the norm --------------------------------------------------------------------------------- */

/* True when this rank is the first of those that hold these rows. */
static bool is_first_holder(const fsdp_param *param)
{
    return fsdp_layout_copy(&param->layout, param->model->world->rank, 0) == 0;
}

static double add_up(const double *parts, size_t n, double p)
{
    double all = 0;
    for (size_t i = 0; i < n; i++)
        if (isinf(p))
            all = isnan(all) || all > parts[i] ? all : parts[i];
        else
            all += parts[i];
    return all;
}

static fsdp_status local_norm(fsdp_root *root, double p, double *norm_out, fsdp_error *err)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    fsdp_grad_list list = {0};
    fsdp_status status = fsdp_grad_list_take(root, is_first_holder, &list, err);
    if (status == FSDP_OK) {
        compute->device->ops->kernels->power_sums(compute, list.spans, list.count, p, list.sums);
        status = compute->device->ops->sync(fsdp_stream_now(compute), err);
    }
    if (status == FSDP_OK)
        *norm_out = add_up(list.sums, list.count, p);
    fsdp_grad_list_release(&list);
    return status;
}

static fsdp_status multiply_grads(fsdp_root *root, double factor, fsdp_error *err)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    for (size_t i = 0; i < root->model->count; i++) {
        const fsdp_param *param = root->model->params[i];
        if (param->shard_grad)
            fsdp_group_kernels(param->group)
                ->multiply(compute, param->shard_grad, param->dtype,
                           (size_t)fsdp_param_local_count(param), factor);
    }
    return fsdp_context_sync(root->context, err);
}

static fsdp_status clip(fsdp_root *root, const fsdp_clip_opts *opts, double *norm_out,
                        fsdp_error *err)
{
    double p = opts->norm_type;
    fsdp_fold fold = isinf(p) ? FSDP_FOLD_MAX : FSDP_FOLD_SUM;
    double norm = 0;
    FSDP_TRY(local_norm(root, p, &norm, err));
    FSDP_TRY(fsdp_root_fold(root, &norm, fold, "clip_grad_norm", err));
    if (!isinf(p))
        norm = pow(norm, 1 / p);
    *norm_out = norm;
    if (!isfinite(norm) && opts->error_if_nonfinite)
        return FSDP_OK;
    double factor = opts->max_norm / (norm + 1e-6);
    if (isinf(opts->max_norm))
        return FSDP_OK;
    return multiply_grads(root, factor < 1 || isnan(factor) ? factor : 1, err);
}

fsdp_status fsdp_root_clip_grad_norm(fsdp_root *root, const fsdp_clip_opts *opts, double *norm_out,
                                     fsdp_error *err)
{
    FSDP_NEED(err, root, norm_out);
    fsdp_clip_opts given = opts ? *opts : (fsdp_clip_opts){0};
    FSDP_TRY(fsdp_root_ready(root, err));
    if (given.norm_type == 0)
        given.norm_type = 2;
    if (given.max_norm == 0)
        given.max_norm = INFINITY;
    if (!(given.norm_type > 0) || !(given.max_norm >= 0))
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot clip gradients to %g in the norm %g",
                         given.max_norm, given.norm_type);
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot clip gradients inside a step; call fsdp_root_end_backward first");
    FSDP_TRY(fsdp_root_check_reduced(root, "clip_grad_norm", err));
    FSDP_TRY(
        fsdp_root_done(root, "fsdp_root_clip_grad_norm", clip(root, &given, norm_out, err), err));
    if (!isfinite(*norm_out) && given.error_if_nonfinite)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the norm of the gradients is %g", *norm_out);
    return FSDP_OK;
}

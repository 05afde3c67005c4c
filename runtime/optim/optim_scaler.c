/* Loss scaling for narrow gradients, and schedules. See optim.h. */
#include "runtime/optim/optim_internal.h"

#include <math.h>

#include "base/core/given.h"
#include "base/core/mem.h"

struct fsdp_scaler {
    fsdp_scaler_opts opts;
    double scale;
    int64_t good_steps;
    bool is_finite;
    bool is_to_adapt;      /* the scale changes once all optimizers have stepped */
    const fsdp_root *root; /* the root and the backward whose gradients were divided */
    uint64_t backwards;
};

static fsdp_scaler_opts with_defaults(const fsdp_scaler_opts *given)
{
    fsdp_scaler_opts opts = given ? *given : (fsdp_scaler_opts){0};
    opts.init_scale = opts.init_scale == 0 ? 65536 : opts.init_scale;
    opts.growth_factor = opts.growth_factor == 0 ? 2 : opts.growth_factor;
    opts.backoff_factor = opts.backoff_factor == 0 ? 0.5 : opts.backoff_factor;
    opts.growth_interval = opts.growth_interval == 0 ? 2000 : opts.growth_interval;
    return opts;
}

fsdp_status fsdp_scaler_create(const fsdp_scaler_opts *given, fsdp_scaler **scaler_out,
                               fsdp_error *err)
{
    FSDP_NEED(err, scaler_out);
    const fsdp_scaler_opts opts = with_defaults(given);
    bool fits = opts.init_scale > 0 && opts.growth_factor > 1 && opts.backoff_factor > 0 &&
                opts.backoff_factor < 1 && opts.growth_interval > 0;
    if (!fits)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot make a scaler: it grows by more than 1, backs off by less than 1, "
                         "and begins above 0");
    fsdp_scaler *scaler = fsdp_alloc(1, sizeof *scaler);
    if (!scaler)
        return fsdp_fail_memory(err, "a scaler");
    scaler->opts = opts;
    scaler->scale = opts.init_scale;
    *scaler_out = scaler;
    return FSDP_OK;
}

void fsdp_scaler_free(fsdp_scaler *scaler)
{
    fsdp_free(scaler);
}

double fsdp_scaler_scale(const fsdp_scaler *scaler)
{
    if (!scaler)
        return 0;
    return scaler->scale;
}

static void adapt(fsdp_scaler *scaler)
{
    if (!scaler->is_finite) {
        scaler->scale *= scaler->opts.backoff_factor;
        scaler->good_steps = 0;
    } else if (++scaler->good_steps == scaler->opts.growth_interval) {
        scaler->scale *= scaler->opts.growth_factor;
        scaler->good_steps = 0;
    }
    scaler->is_to_adapt = false;
}

static bool is_unscaled(const fsdp_scaler *scaler, const fsdp_root *root)
{
    return scaler->is_to_adapt && scaler->root == root && scaler->backwards == root->backwards;
}

/* The host waits for the result, so that it may read the gradients, too. */
static fsdp_status unscale_local(const fsdp_scaler *scaler, fsdp_root *root, bool *finite_out,
                                 fsdp_error *err)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_kernels *kernels = compute->device->ops->kernels;
    fsdp_grad_list list = {0};
    fsdp_status status = fsdp_grad_list_take(root, NULL, &list, err);
    int *all_are_finite = (int *)list.sums;
    for (size_t i = 0; i < list.count && status == FSDP_OK; i++)
        kernels->multiply(compute, list.spans[i].data, list.spans[i].dtype, list.spans[i].count,
                          1 / scaler->scale);
    if (status == FSDP_OK) {
        kernels->are_finite(compute, list.spans, list.count, all_are_finite);
        status = compute->device->ops->sync(fsdp_stream_now(compute), err);
    }
    if (status == FSDP_OK)
        *finite_out = *all_are_finite;
    fsdp_grad_list_release(&list);
    return status;
}

static fsdp_status unscale(fsdp_scaler *scaler, fsdp_root *root, fsdp_error *err)
{
    bool is_finite = false;
    FSDP_TRY(unscale_local(scaler, root, &is_finite, err));
    double bad = is_finite ? 0 : 1;
    FSDP_TRY(fsdp_root_fold(root, &bad, FSDP_FOLD_MAX, "loss scaling", err));
    if (scaler->is_to_adapt) /* an optimizer did not step after the last backward */
        adapt(scaler);
    scaler->is_finite = bad == 0;
    scaler->is_to_adapt = true;
    scaler->root = root;
    scaler->backwards = root->backwards;
    return FSDP_OK;
}

fsdp_status fsdp_scaler_unscale(fsdp_scaler *scaler, fsdp_root *root, fsdp_error *err)
{
    FSDP_NEED(err, scaler, root);
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot unscale gradients inside a step; call fsdp_root_end_backward first");
    if (scaler->is_to_adapt && scaler->root != root)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot unscale: the scaler has divided the gradients of another root; "
                         "step its optimizers first");
    if (is_unscaled(scaler, root))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot unscale twice: the gradients were unscaled since the last step");
    FSDP_TRY(fsdp_root_check_reduced(root, "the scaler's unscale", err));
    return fsdp_root_done(root, "fsdp_scaler_unscale", unscale(scaler, root, err), err);
}

fsdp_status fsdp_scaler_step(fsdp_scaler *scaler, fsdp_optim *optim, bool *skipped_out,
                             fsdp_error *err)
{
    FSDP_NEED(err, scaler, optim);
    if (!is_unscaled(scaler, optim->root))
        FSDP_TRY(fsdp_scaler_unscale(scaler, optim->root, err));
    if (skipped_out)
        *skipped_out = !scaler->is_finite;
    if (scaler->is_finite)
        FSDP_TRY(fsdp_optim_step(optim, err));
    else
        fsdp_optim_drop_grads(optim);
    if (!fsdp_root_awaits_step(optim->root, NULL))
        adapt(scaler);
    return FSDP_OK;
}

/* --- schedules -------------------------------------------------------------------------------- */

/* The progress between the end of the warm-up and the last step, 0 to 1. */
static double progress(const fsdp_schedule *schedule, int64_t step)
{
    if (step >= schedule->total || schedule->total <= schedule->warmup)
        return 1;
    return (double)(step - schedule->warmup) / (double)(schedule->total - schedule->warmup);
}

double fsdp_schedule_factor(const fsdp_schedule *schedule, int64_t step)
{
    if (!schedule)
        return 1;
    const double pi = 3.14159265358979323846;
    if (step < schedule->warmup)
        return (double)(step + 1) / (double)schedule->warmup;
    double rest = 1 - progress(schedule, step);
    if (schedule->kind == FSDP_SCHEDULE_CONSTANT)
        return 1;
    if (schedule->kind == FSDP_SCHEDULE_COSINE)
        rest = (1 - cos(pi * rest)) / 2;
    return schedule->end + (1 - schedule->end) * rest;
}

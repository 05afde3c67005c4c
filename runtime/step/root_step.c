/* A step begins, ends, or is reset. See root.h; docs/flow_step.md has the whole step. */
#include "runtime/step/step_internal.h"

#include "base/core/given.h"

/* --- a step ----------------------------------------------------------------------------------- */

/* Gathers wait for the event after the optimizer's step, or for all that the compute stream has so far:
 * copy-ins do, which each gather follows. */
static void begin_streams(fsdp_root *root)
{
    fsdp_context *context = root->context;
    const fsdp_device_ops *ops = context->device->ops;
    fsdp_event event = root->has_post_optim_event
                           ? root->post_optim_event
                           : ops->record(context->streams[FSDP_STREAM_COMPUTE]);
    root->has_post_optim_event = false;
    ops->wait(context->streams[FSDP_STREAM_COPY_IN], event);
}

fsdp_status fsdp_root_check_reduced(const fsdp_root *root, const char *call, fsdp_error *err)
{
    bool is_pending = root->context->finalizing == root;
    for (size_t i = 0; i < root->group_count; i++)
        is_pending = is_pending || root->groups[i]->reduced.stream;
    if (!is_pending)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s came while reductions are under way: fsdp_finalize_wait, or the "
                     "end_backward of a last backward, comes before it",
                     call);
}

static fsdp_status check_finalized(const fsdp_root *root, fsdp_error *err)
{
    if (!root->context->finalizing)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "nothing waited for an asynchronous end of backward: call fsdp_finalize_wait "
                     "before the next forward");
}

fsdp_status fsdp_root_begin_forward(fsdp_root *root, fsdp_error *err)
{
    FSDP_NEED(err, root);
    FSDP_TRY(fsdp_root_ready(root, err));
    FSDP_TRY(check_finalized(root, err));
    if (root->is_in_forward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "begin_forward came twice without end_forward");
    if (root->is_summoned)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "begin_forward came while full parameters are summoned: "
                         "call fsdp_wrap_summon_end before it");
    FSDP_TRY(fsdp_root_check_values(root, NULL, "begin_forward", err));
    root->is_in_forward = true;
    fsdp_trace_step(root->world->parts.trace, root->step);
    FSDP_TRY(fsdp_root_done(root, "fsdp_root_begin_forward",
                            fsdp_root_size_inputs(root, root->context, err), err));
    begin_streams(root);
    return fsdp_root_done(root, "fsdp_root_begin_forward", FSDP_OK, err);
}

static fsdp_status end_forward(fsdp_root *root, fsdp_error *err)
{
    for (size_t i = 0; i < root->unit_count; i++)
        FSDP_TRY(fsdp_unit_complete_forward(root->units[i], err));
    fsdp_context_flush_gather(root->context);
    return root->is_evaluating ? fsdp_root_check_events(root, err) : FSDP_OK;
}

fsdp_status fsdp_root_end_forward(fsdp_root *root, fsdp_error *err)
{
    FSDP_NEED(err, root);
    FSDP_TRY(fsdp_root_ready(root, err));
    if (!root->is_in_forward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "end_forward came without begin_forward");
    root->is_in_forward = false;
    return fsdp_root_done(root, "fsdp_root_end_forward", end_forward(root, err), err);
}

static fsdp_status run_grad_hooks(fsdp_root *root, fsdp_error *err)
{
    const fsdp_model *model = root->model;
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = model->params[i];
        bool is_new = param->is_reduced;
        param->is_reduced = false;
        if (param->hook && is_new && param->shard_grad)
            FSDP_TRY(param->hook(param->hook_context, param, err));
    }
    return FSDP_OK;
}

static fsdp_status finalize(fsdp_root *root, fsdp_error *err)
{
    root->is_unfinished = false;
    for (size_t i = 0; i < root->group_count; i++)
        FSDP_TRY(fsdp_group_await_offloaded(root->groups[i], err));
    fsdp_root_wait_reductions(root);
    FSDP_TRY(fsdp_context_sync(root->context, err));
    return run_grad_hooks(root, err);
}

static fsdp_status complete_backward(fsdp_root *root, fsdp_error *err)
{
    for (size_t i = 0; i < root->unit_count; i++)
        FSDP_TRY(fsdp_unit_complete_backward(root->units[i], err));
    for (size_t i = 0; i < root->unit_count; i++)
        root->units[i]->phase = FSDP_IDLE;
    for (size_t i = 0; i < root->group_count; i++)
        root->groups[i]->phase = FSDP_IDLE;
    return fsdp_root_check_events(root, err);
}

/* The first of the calls that end a backward reports. */
static void leave_backward(fsdp_root *root)
{
    if (root->is_in_backward && root->world->parts.check)
        fsdp_root_report_lacking(root);
    root->is_in_backward = false;
    root->is_unfinished = true;
}

static fsdp_status end_backward(fsdp_root *root, fsdp_error *err)
{
    FSDP_TRY(complete_backward(root, err));
    return root->is_manual || !root->is_last_backward ? FSDP_OK : finalize(root, err);
}

static fsdp_status check_out_of_forward(const fsdp_root *root, const char *call, fsdp_error *err)
{
    if (!root->is_in_forward)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s came before fsdp_root_end_forward", call);
}

fsdp_status fsdp_root_end_backward(fsdp_root *root, fsdp_error *err)
{
    FSDP_NEED(err, root);
    FSDP_TRY(fsdp_root_ready(root, err));
    FSDP_TRY(check_out_of_forward(root, "end_backward", err));
    leave_backward(root);
    root->backwards++;
    return fsdp_root_done(root, "fsdp_root_end_backward", end_backward(root, err), err);
}

fsdp_status fsdp_root_set_evaluating(fsdp_root *root, bool is_evaluating, fsdp_error *err)
{
    FSDP_NEED(err, root);
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "evaluating begins and ends between steps, not inside one");
    root->is_evaluating = is_evaluating;
    return FSDP_OK;
}

fsdp_status fsdp_root_begin_microbatch(fsdp_root *root, int64_t i, int64_t n, fsdp_error *err)
{
    FSDP_NEED(err, root);
    FSDP_TRY(fsdp_root_ready(root, err));
    if (i < 0 || i >= n)
        return fsdp_fail(err, FSDP_ERR_USAGE, "no microbatch %lld of %lld: the first is 0",
                         (long long)i, (long long)n);
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "begin_microbatch came inside a step: end_backward comes before it");
    root->is_last_backward = true; /* one that does not reduce leaves nothing under way */
    return fsdp_unit_set(root->unit, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, i == n - 1, true, err);
}

/* --- finalizing a backward by hand ------------------------------------------------------------ */

void fsdp_root_set_is_last_backward(fsdp_root *root, bool is_last)
{
    if (!root)
        return;
    root->is_last_backward = is_last;
}

void fsdp_root_set_post_optim_event(fsdp_root *root)
{
    if (!root)
        return;
    const fsdp_context *context = root->context;
    root->post_optim_event = context->device->ops->record(context->streams[FSDP_STREAM_COMPUTE]);
    root->has_post_optim_event = true;
}

fsdp_status fsdp_root_set_manual_backward_finalization(fsdp_root *root, bool manual,
                                                       fsdp_error *err)
{
    FSDP_NEED(err, root);
    if (manual != root->is_manual && (root->is_in_backward || root->is_unfinished))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot change how backward ends between its begin and its end: %s",
                         root->is_manual
                             ? "fsdp_root_finalize_backward, and the wait for it, come before"
                             : "the end_backward of a last backward comes before");
    root->is_manual = manual;
    return FSDP_OK;
}

fsdp_status fsdp_root_finalize_backward(fsdp_root *root, bool is_async,
                                        fsdp_finalize_handle **handle_out, fsdp_error *err)
{
    FSDP_NEED(err, root);
    FSDP_TRY(fsdp_root_ready(root, err));
    FSDP_TRY(check_finalized(root, err));
    if (!root->is_manual)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "finalize_backward needs fsdp_root_set_manual_backward_finalization");
    FSDP_TRY(check_out_of_forward(root, "finalize_backward", err));
    leave_backward(root);
    FSDP_TRY(
        fsdp_root_done(root, "fsdp_root_finalize_backward", complete_backward(root, err), err));
    root->handle.was_reset = false;
    if (handle_out)
        *handle_out = &root->handle;
    root->context->finalizing = root;
    return is_async ? FSDP_OK : fsdp_finalize_wait(&root->handle, err);
}

fsdp_status fsdp_finalize_wait(fsdp_finalize_handle *handle, fsdp_error *err)
{
    FSDP_NEED(err, handle);
    fsdp_root *root = handle->root;
    FSDP_TRY(fsdp_root_ready(root, err));
    if (handle->was_reset)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "fsdp_root_reset discarded the backward of this handle");
    if (root->context->finalizing != root)
        return FSDP_OK;
    root->context->finalizing = NULL;
    return fsdp_root_done(root, "fsdp_finalize_wait", finalize(root, err), err);
}

/* --- reset ------------------------------------------------------------------------------------ */

void fsdp_root_zero_grad(fsdp_root *root)
{
    if (!root)
        return;
    for (size_t i = 0; i < root->group_count; i++)
        fsdp_group_drop_grads(root->groups[i]);
}

static void forget_finalizing(fsdp_root *root)
{
    root->is_unfinished = false;
    if (root->context->finalizing != root)
        return;
    root->context->finalizing = NULL;
    root->handle.was_reset = true;
}

fsdp_status fsdp_root_reset(fsdp_root *root, fsdp_error *err)
{
    FSDP_NEED(err, root);
    const fsdp_root *other = root->context->finalizing;
    root->pending = (fsdp_error){0};
    FSDP_TRY(fsdp_root_ready(root, err));
    if (other && other != root)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "another root on this context ends its backward asynchronously: its "
                         "fsdp_finalize_wait, or its reset, comes before this one");
    fsdp_root_wait_reductions(root);
    fsdp_root_drop_all(root);
    for (size_t i = 0; i < root->unit_count; i++) {
        fsdp_unit *unit = root->units[i];
        unit->phase = FSDP_IDLE;
        unit->to_run_count = unit->to_return_count = 0;
    }
    root->is_in_forward = root->is_in_backward = false;
    forget_finalizing(root);
    return fsdp_root_done(root, "fsdp_root_reset", fsdp_context_sync(root->context, err), err);
}

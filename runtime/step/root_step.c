/*
 * The hooks of units, and the step of a root, which begins, ends, or is reset. See unit.h and root.h;
 * docs/flow_step.md has the whole step.
 */
#include "runtime/step/step_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"

/* === the hooks of a unit ====================================================================== */

/*
 * The hooks around what a unit computes. They keep the phase of the unit, and decide when its groups are
 * gathered, resharded and reduced, and which units are gathered ahead. In docs/flow_step.md: steps 2 to 8.
 */

static fsdp_context *context_of(const fsdp_unit *unit)
{
    return unit->root->context;
}

/* --- prefetch --------------------------------------------------------------------------------- */

/* Gathers a group ahead, as if it were in that phase, unless the limit of gathers is reached. */
static fsdp_status prefetch(fsdp_group *group, fsdp_phase phase, fsdp_error *err)
{
    const fsdp_context *context = context_of(group->unit);
    if (context->limits_gathers && context->gather_count >= FSDP_MOST_GATHERS)
        return FSDP_OK;
    fsdp_phase own = group->phase;
    group->phase = phase;
    fsdp_status status = fsdp_group_unshard(group, group->unit->is_async, err);
    group->phase = own;
    return status;
}

/* The groups of each unit in the order in which the pass needs them. */
static fsdp_status prefetch_units(const fsdp_unit_list *list, fsdp_phase phase, fsdp_error *err)
{
    for (size_t i = 0; i < list->count; i++) {
        fsdp_unit *unit = list->units[i];
        for (size_t g = 0; g < unit->group_count; g++) {
            size_t at = phase == FSDP_FORWARD ? g : unit->group_count - 1 - g;
            FSDP_TRY(prefetch(&unit->groups[at], phase, err));
        }
    }
    return FSDP_OK;
}

/* The place of the unit's last forward without a backward in the order of forwards. */
static size_t take_place(fsdp_unit *unit)
{
    size_t place = 0;
    for (size_t g = unit->group_count; g-- > 0;) {
        fsdp_group *group = &unit->groups[g];
        if (group->order_count > 0)
            place = group->order[--group->order_count];
    }
    return place;
}

/* Prefetches the unit whose forward came before this one's: its backward is likely to come next. */
static fsdp_status prefetch_previous(fsdp_unit *unit, fsdp_error *err)
{
    fsdp_group *const *order = context_of(unit)->order;
    size_t place = take_place(unit);
    fsdp_group *previous = place > 0 ? order[place - 1] : NULL;
    if (unit->group_count > 0)
        unit->groups[0].next_gather =
            unit->backward_prefetch_time == FSDP_PREFETCH_AFTER ? previous : NULL;
    if (!previous || unit->backward_prefetch_time != FSDP_PREFETCH_BEFORE)
        return FSDP_OK;
    while (place > 0 && order[place - 1]->unit == previous->unit)
        FSDP_TRY(prefetch(order[--place], FSDP_PRE_BACKWARD, err));
    return FSDP_OK;
}

/* Skips a group whose backward has come in the meantime. */
static fsdp_status prefetch_next(fsdp_group *group, fsdp_error *err)
{
    fsdp_group *next = group->next_gather;
    group->next_gather = NULL;
    return next && next->phase == FSDP_IDLE ? prefetch(next, FSDP_PRE_BACKWARD, err) : FSDP_OK;
}

/* The first forwards record the next unit of each unit that prefetches its next one. */
static fsdp_status note_first_forward(fsdp_unit *unit, fsdp_error *err)
{
    fsdp_unit *before = unit->root->last_seen;
    if (unit->was_seen)
        return FSDP_OK;
    unit->was_seen = true;
    unit->root->last_seen = unit;
    if (!before || !before->prefetches_next || before->forward_prefetch.count > 0)
        return FSDP_OK;
    return fsdp_unit_set_prefetch(before, FSDP_HOOK_PRE_FORWARD, &unit, 1, err);
}

static fsdp_status note_forward(fsdp_group *group, fsdp_error *err)
{
    fsdp_context *context = context_of(group->unit);
    if (group->unit->root->is_evaluating)
        return FSDP_OK;
    if (!fsdp_grow(&context->order, &context->order_room, context->order_count + 1,
                   sizeof *context->order) ||
        !fsdp_grow(&group->order, &group->order_room, group->order_count + 1, sizeof *group->order))
        return fsdp_fail_memory(err, "the order of forwards");
    group->order[group->order_count++] = context->order_count;
    context->order[context->order_count++] = group;
    return FSDP_OK;
}

/* --- forward ---------------------------------------------------------------------------------- */

static fsdp_status gather_now(fsdp_group *group, fsdp_error *err)
{
    FSDP_TRY(fsdp_group_unshard(group, group->unit->is_async, err));
    return fsdp_group_wait_unshard(group, err);
}

/* A forward inside a backward computes activations again: those of this unit, or of one around it. */
static bool is_computed_again(const fsdp_unit *unit)
{
    return unit->phase == FSDP_PRE_BACKWARD ||
           (unit->root->is_in_backward && !unit->root->is_in_forward);
}

/* Gathers parameters that are not gathered, and changes nothing else; also for a hook that comes twice. A
 * unit whose own backward has not begun is gathered as in forward, but its flat buffer goes back at once. */
static fsdp_status gather_again(fsdp_unit *unit, fsdp_error *err)
{
    for (size_t i = 0; i < unit->group_count; i++) {
        fsdp_group *group = &unit->groups[i];
        fsdp_phase own = group->phase;
        group->phase = own == FSDP_PRE_BACKWARD ? own : FSDP_FORWARD;
        fsdp_status status = gather_now(group, err);
        group->phase = own;
        FSDP_TRY(status);
    }
    fsdp_context_flush_gather(context_of(unit));
    return fsdp_context_sync(context_of(unit), err);
}

static fsdp_status pre_forward(fsdp_unit *unit, fsdp_error *err)
{
    if (is_computed_again(unit) || unit->phase == FSDP_FORWARD)
        return gather_again(unit, err);
    FSDP_TRY(note_first_forward(unit, err));
    unit->phase = FSDP_FORWARD;
    for (size_t i = 0; i < unit->member_count && unit->has_run; i++)
        unit->has_run[i] = false;
    for (size_t i = 0; i < unit->group_count; i++) {
        unit->groups[i].phase = FSDP_FORWARD;
        FSDP_TRY(gather_now(&unit->groups[i], err));
    }
    FSDP_TRY(prefetch_units(&unit->forward_prefetch, FSDP_FORWARD, err));
    return fsdp_context_sync(context_of(unit), err);
}

static fsdp_status post_forward(fsdp_unit *unit, fsdp_error *err)
{
    if (is_computed_again(unit))
        return FSDP_OK;
    for (size_t i = 0; i < unit->group_count; i++) {
        fsdp_group *group = &unit->groups[i];
        FSDP_TRY(fsdp_group_reshard(group, err));
        FSDP_TRY(note_forward(group, err));
        group->phase = FSDP_IDLE;
    }
    unit->phase = FSDP_IDLE;
    return FSDP_OK;
}

/* --- backward --------------------------------------------------------------------------------- */

static fsdp_status pre_backward(fsdp_unit *unit, fsdp_error *err)
{
    unit->phase = FSDP_PRE_BACKWARD;
    for (size_t i = 0; i < unit->group_count; i++) {
        unit->groups[i].phase = FSDP_PRE_BACKWARD;
        FSDP_TRY(gather_now(&unit->groups[i], err));
    }
    if (unit->backward_prefetch.count == 0)
        FSDP_TRY(prefetch_previous(unit, err));
    FSDP_TRY(prefetch_units(&unit->backward_prefetch, FSDP_PRE_BACKWARD, err));
    return fsdp_context_sync(context_of(unit), err);
}

/* Parameters go back before gradients are packed, so that memory never holds both. */
static fsdp_status reduce_group(fsdp_group *group, const fsdp_group_settings *settings,
                                fsdp_error *err)
{
    group->phase = FSDP_POST_BACKWARD;
    if (settings->reduces)
        fsdp_group_add_to_kept(group);
    if (settings->reshards_after_backward)
        FSDP_TRY(fsdp_group_reshard(group, err));
    FSDP_TRY(prefetch_next(group, err));
    return settings->reduces ? fsdp_group_reduce(group, err) : fsdp_group_keep_grads(group, err);
}

static fsdp_status post_backward(fsdp_unit *unit, fsdp_error *err)
{
    unit->phase = FSDP_POST_BACKWARD;
    for (size_t i = unit->group_count; i-- > 0;) {
        FSDP_TRY(reduce_group(&unit->groups[i], &unit->settings, err));
        fsdp_trace_group(&unit->groups[i], "post_backward");
    }
    return FSDP_OK;
}

/* For end_backward: of a unit whose post_backward did not come. */
static fsdp_status unit_complete_backward(fsdp_unit *unit, fsdp_error *err)
{
    unit->to_return_count = 0;
    return unit->phase == FSDP_POST_BACKWARD ? FSDP_OK : post_backward(unit, err);
}

/* For end_forward: of a unit whose members ran in part. */
static fsdp_status unit_complete_forward(fsdp_unit *unit, fsdp_error *err)
{
    unit->to_run_count = 0;
    return unit->phase == FSDP_FORWARD ? post_forward(unit, err) : FSDP_OK;
}

/* --- the calls -------------------------------------------------------------------------------- */

typedef enum step_pass { ANY_PASS, FORWARD_PASS, BACKWARD_PASS } step_pass;

/* Checks that the hook may be called now. */
static fsdp_status begin(fsdp_unit *unit, const char *hook, step_pass pass, fsdp_error *err)
{
    const fsdp_root *root = unit->root;
    if (!root)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s of unit %s came before fsdp_root_create", hook,
                         unit->name);
    FSDP_TRY(fsdp_root_ready(unit->root, err));
    if (pass == BACKWARD_PASS && root->is_in_forward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s of unit %s came before fsdp_root_end_forward",
                         hook, unit->name);
    if (pass == FORWARD_PASS && !root->is_in_forward && !is_computed_again(unit))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s of unit %s came before fsdp_root_begin_forward",
                         hook, unit->name);
    return FSDP_OK;
}

static fsdp_status run(fsdp_unit *unit, const char *call,
                       fsdp_status (*hook)(fsdp_unit *unit, fsdp_error *err), fsdp_error *err)
{
    return fsdp_root_done(unit->root, call, hook(unit, err), err);
}

fsdp_status fsdp_unit_pre_forward(fsdp_unit *unit, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    FSDP_TRY(begin(unit, "pre_forward", FORWARD_PASS, err));
    return run(unit, "fsdp_unit_pre_forward", pre_forward, err);
}

fsdp_status fsdp_unit_post_forward(fsdp_unit *unit, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    FSDP_TRY(begin(unit, "post_forward", FORWARD_PASS, err));
    if (unit->phase != FSDP_FORWARD && !is_computed_again(unit))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "post_forward of unit %s came without its pre_forward", unit->name);
    return run(unit, "fsdp_unit_post_forward", post_forward, err);
}

fsdp_status fsdp_unit_pre_backward(fsdp_unit *unit, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    FSDP_TRY(begin(unit, "pre_backward", BACKWARD_PASS, err));
    if (unit->root->is_evaluating)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "pre_backward of unit %s came while the root is evaluating "
                         "(fsdp_root_set_evaluating)",
                         unit->name);
    unit->root->is_in_backward = true;
    return unit->phase == FSDP_PRE_BACKWARD
               ? FSDP_OK
               : run(unit, "fsdp_unit_pre_backward", pre_backward, err);
}

fsdp_status fsdp_unit_post_backward(fsdp_unit *unit, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    FSDP_TRY(begin(unit, "post_backward", BACKWARD_PASS, err));
    unit->root->is_in_backward = true;
    return run(unit, "fsdp_unit_post_backward", post_backward, err);
}

/* --- members ---------------------------------------------------------------------------------- */

static fsdp_status check_member(const fsdp_unit *unit, size_t member, fsdp_error *err)
{
    if (member >= unit->member_count)
        return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s has %zu members; member %zu does not exist",
                         unit->name, unit->member_count, member);
    return FSDP_OK;
}

static void expect_all(bool *expected, size_t *count, size_t members)
{
    for (size_t i = 0; i < members; i++)
        expected[i] = true;
    *count = members;
}

/* Backward ends with the last post_backward of the members that ran in the last forward. */
static void expect_those_that_ran(fsdp_unit *unit)
{
    for (size_t i = 0; i < unit->member_count; i++) {
        unit->to_return[i] = unit->has_run[i];
        unit->to_return_count += unit->has_run[i];
    }
    if (unit->to_return_count == 0)
        expect_all(unit->to_return, &unit->to_return_count, unit->member_count);
}

/* Returns whether it was the last expected member. */
static bool tick_off(bool *expected, size_t *count, size_t member)
{
    if (*count > 0 && expected[member]) {
        expected[member] = false;
        --*count;
    }
    return *count == 0;
}

static fsdp_status pre_forward_member(fsdp_unit *unit, size_t member, fsdp_error *err)
{
    if (unit->to_run_count > 0) {
        FSDP_TRY(begin(unit, "pre_forward", FORWARD_PASS, err));
    } else {
        FSDP_TRY(fsdp_unit_pre_forward(unit, err));
        expect_all(unit->to_run, &unit->to_run_count, unit->member_count);
    }
    unit->has_run[member] = true;
    return FSDP_OK;
}

static fsdp_status post_forward_member(fsdp_unit *unit, size_t member, fsdp_error *err)
{
    if (!tick_off(unit->to_run, &unit->to_run_count, member))
        return begin(unit, "post_forward", FORWARD_PASS, err);
    return fsdp_unit_post_forward(unit, err);
}

static fsdp_status pre_backward_member(fsdp_unit *unit, fsdp_error *err)
{
    if (unit->to_return_count == 0)
        expect_those_that_ran(unit);
    return fsdp_unit_pre_backward(unit, err);
}

static fsdp_status post_backward_member(fsdp_unit *unit, size_t member, fsdp_error *err)
{
    if (!tick_off(unit->to_return, &unit->to_return_count, member))
        return begin(unit, "post_backward", BACKWARD_PASS, err);
    return fsdp_unit_post_backward(unit, err);
}

static fsdp_status hook_of_all(fsdp_unit *unit, fsdp_hook hook, fsdp_error *err)
{
    switch (hook) {
    case FSDP_HOOK_PRE_FORWARD: return fsdp_unit_pre_forward(unit, err);
    case FSDP_HOOK_POST_FORWARD: return fsdp_unit_post_forward(unit, err);
    case FSDP_HOOK_PRE_BACKWARD: return fsdp_unit_pre_backward(unit, err);
    case FSDP_HOOK_POST_BACKWARD: return fsdp_unit_post_backward(unit, err);
    }
    return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s has no hook %d", unit->name, (int)hook);
}

fsdp_status fsdp_unit_member_hook(fsdp_unit *unit, size_t member, fsdp_hook hook, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    FSDP_TRY(check_member(unit, member, err));
    bool is_forward = hook == FSDP_HOOK_PRE_FORWARD || hook == FSDP_HOOK_POST_FORWARD;
    if (unit->member_count == 1 || (is_forward && is_computed_again(unit)))
        return hook_of_all(unit, hook, err);
    switch (hook) {
    case FSDP_HOOK_PRE_FORWARD: return pre_forward_member(unit, member, err);
    case FSDP_HOOK_POST_FORWARD: return post_forward_member(unit, member, err);
    case FSDP_HOOK_PRE_BACKWARD: return pre_backward_member(unit, err);
    case FSDP_HOOK_POST_BACKWARD: return post_backward_member(unit, member, err);
    }
    return hook_of_all(unit, hook, err);
}

/* --- by hand ---------------------------------------------------------------------------------- */

static fsdp_status unshard(fsdp_unit *unit, bool is_async, fsdp_error *err)
{
    for (size_t i = 0; i < unit->group_count; i++) {
        FSDP_TRY(fsdp_group_unshard(&unit->groups[i], is_async, err));
        if (!is_async)
            FSDP_TRY(fsdp_group_wait_unshard(&unit->groups[i], err));
    }
    return is_async ? FSDP_OK : fsdp_context_sync(context_of(unit), err);
}

fsdp_status fsdp_unit_unshard(fsdp_unit *unit, bool is_async, fsdp_unshard_handle **handle_out,
                              fsdp_error *err)
{
    FSDP_NEED(err, unit);
    FSDP_TRY(begin(unit, "unshard", ANY_PASS, err));
    if (unit->root->is_summoned)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unshard of unit %s came while full parameters are summoned; call "
                         "fsdp_wrap_summon_end first",
                         unit->name);
    FSDP_TRY(fsdp_root_check_values(unit->root, unit, "unshard", err));
    if (handle_out)
        *handle_out = &unit->handle;
    return fsdp_root_done(unit->root, "fsdp_unit_unshard", unshard(unit, is_async, err), err);
}

static fsdp_status wait_unshard(fsdp_unit *unit, fsdp_error *err)
{
    for (size_t i = 0; i < unit->group_count; i++)
        FSDP_TRY(fsdp_group_wait_unshard(&unit->groups[i], err));
    return fsdp_context_sync(context_of(unit), err);
}

fsdp_status fsdp_unshard_wait(fsdp_unshard_handle *handle, fsdp_error *err)
{
    FSDP_NEED(err, handle);
    FSDP_TRY(begin(handle->unit, "unshard", ANY_PASS, err));
    return run(handle->unit, "fsdp_unshard_wait", wait_unshard, err);
}

static fsdp_status reshard(fsdp_unit *unit, fsdp_error *err)
{
    for (size_t i = 0; i < unit->group_count; i++)
        FSDP_TRY(fsdp_group_reshard(&unit->groups[i], err));
    return FSDP_OK;
}

fsdp_status fsdp_unit_reshard(fsdp_unit *unit, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    FSDP_TRY(begin(unit, "reshard", ANY_PASS, err));
    return run(unit, "fsdp_unit_reshard", reshard, err);
}

/* === the step of a root ======================================================================= */

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
                     "%s came while reductions are under way; call fsdp_finalize_wait, or the "
                     "end_backward of a last backward, first",
                     call);
}

static fsdp_status check_finalized(const fsdp_root *root, fsdp_error *err)
{
    if (!root->context->finalizing)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "nothing waited for an asynchronous end of backward; call fsdp_finalize_wait "
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
                         "begin_forward came while full parameters are summoned; call "
                         "fsdp_wrap_summon_end first");
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
        FSDP_TRY(unit_complete_forward(root->units[i], err));
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
        FSDP_TRY(unit_complete_backward(root->units[i], err));
    for (size_t i = 0; i < root->unit_count; i++)
        root->units[i]->phase = FSDP_IDLE;
    for (size_t i = 0; i < root->group_count; i++)
        root->groups[i]->phase = FSDP_IDLE;
    return fsdp_root_check_events(root, err);
}

/* Frozen, ignored and unused ones that the unit expects are right. */
static bool lacks_grad(fsdp_param *param)
{
    const fsdp_param *held = param->flat ? param->flat : param;
    bool lacks = param->requires_grad && held->group && !param->had_grad && !param->was_reported &&
                 !held->group->settings->reduces_unused;
    param->had_grad = false;
    return lacks;
}

/* For --check, at the end of a backward: on standard error, trainable parameters whose gradient nobody has
 * asked for, each one once. */
static void report_lacking(const fsdp_root *root)
{
    const fsdp_model *declared = root->declared;
    fsdp_text text = {0};
    for (size_t i = 0; i < declared->count; i++) {
        fsdp_param *param = declared->params[i];
        if (!lacks_grad(param))
            continue;
        param->was_reported = true;
        fsdp_text_addf(&text, "%s'%s'", text.size > 0 ? ", " : "", param->name);
    }
    if (text.size > 0 && !text.failed)
        fsdp_launch_note(root->world->rank, "trainable parameters got no gradient in a backward",
                         text.data);
    fsdp_text_release(&text);
}

/* The first of the calls that end a backward reports. */
static void leave_backward(fsdp_root *root)
{
    if (root->is_in_backward && root->world->parts.check)
        report_lacking(root);
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
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "microbatch %lld of %lld does not exist: the first is 0", (long long)i,
                         (long long)n);
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "begin_microbatch came inside a step; call end_backward first");
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
                         "cannot change how backward ends between its begin and its end; %s",
                         root->is_manual
                             ? "call fsdp_root_finalize_backward, and wait for it, first"
                             : "call the end_backward of a last backward first");
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
    root->clipping.is_pending = false;
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
                         "another root on this context ends its backward asynchronously; call its "
                         "fsdp_finalize_wait, or reset it, first");
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

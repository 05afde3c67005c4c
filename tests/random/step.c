/* See trainer.h: one microbatch, forward and backward, in an order that dice decide. */
#include "tests/random/trainer.h"

/* The reduction of a backward's gradients. */
typedef enum sync_mode {
    SYNC_ALL,   /* over all ranks */
    SYNC_NONE,  /* kept */
    SYNC_SHARDS /* reduced to shards, not yet over the replicas */
} sync_mode;

static fsdp_unit *any_unit(trainer *t)
{
    return t->net->units[dice_below(&t->dice, t->c->unit_count)];
}

/* --- before ------------------------------------------------------------------------------------- */

static sync_mode draw_mode(trainer *t, bool is_last)
{
    if (is_last || !t->c->accumulates)
        return SYNC_ALL;
    return (sync_mode)dice_below(&t->dice, t->c->is_flat ? 2 : 3);
}

static fsdp_status set_sync(trainer *t, sync_mode mode, bool is_last, fsdp_error *err)
{
    bool is_said_last = dice_hits(&t->dice, 50) || is_last;
    if (t->c->is_flat)
        return fsdp_wrap_set_accumulating(t->net->toy.wrap, mode == SYNC_NONE, err);
    for (int i = 0; i < t->c->unit_count; i++) {
        fsdp_unit *unit = t->net->units[i];
        if (t->c->units[i].reshards_last || t->c->units[i].reshards_never)
            FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_RESHARD_AFTER_BACKWARD,
                                   is_last && !t->c->units[i].reshards_never, false, err));
        FSDP_TRY(
            fsdp_unit_set(unit, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, mode != SYNC_NONE, false, err));
        if (mode != SYNC_NONE)
            FSDP_TRY(
                fsdp_unit_set(unit, FSDP_UNIT_REQUIRES_ALL_REDUCE, mode == SYNC_ALL, false, err));
    }
    fsdp_root_set_is_last_backward(t->net->toy.root, is_said_last);
    return FSDP_OK;
}

fsdp_status trainer_gather_something(trainer *t, fsdp_error *err)
{
    fsdp_unshard_handle *handle = NULL;
    fsdp_unit *unit = any_unit(t);
    FSDP_TRY(fsdp_unit_unshard(unit, dice_hits(&t->dice, 50), &handle, err));
    if (dice_hits(&t->dice, 50) && handle)
        FSDP_TRY(fsdp_unshard_wait(handle, err));
    return dice_hits(&t->dice, 40) ? fsdp_unit_reshard(unit, err) : FSDP_OK;
}

/* --- forward ------------------------------------------------------------------------------------ */

static fsdp_status pre_forward(trainer *t, const trainer_visit *visit, fsdp_error *err)
{
    fsdp_unit *unit = t->net->units[visit->unit];
    return t->c->units[visit->unit].is_list
               ? fsdp_unit_member_hook(unit, (size_t)visit->layer, FSDP_HOOK_PRE_FORWARD, err)
               : fsdp_unit_pre_forward(unit, err);
}

static fsdp_status post_forward(trainer *t, const trainer_visit *visit, fsdp_error *err)
{
    fsdp_unit *unit = t->net->units[visit->unit];
    return t->c->units[visit->unit].is_list
               ? fsdp_unit_member_hook(unit, (size_t)visit->layer, FSDP_HOOK_POST_FORWARD, err)
               : fsdp_unit_post_forward(unit, err);
}

static fsdp_status forward_layer(trainer *t, int layer, fsdp_error *err)
{
    const trainer_visit visit = {.layer = layer, .unit = t->c->layer_unit[layer]};
    int inner = t->c->inner_unit[layer];
    t->visits[t->visit_count++] = visit;
    FSDP_TRY(pre_forward(t, &visit, err));
    FSDP_TRY(trainer_see_unit(t, visit.unit, err));
    if (inner >= 0) {
        FSDP_TRY(fsdp_unit_pre_forward(t->net->units[inner], err));
        FSDP_TRY(trainer_see_unit(t, inner, err));
        FSDP_TRY(fsdp_unit_post_forward(t->net->units[inner], err));
    }
    if (!t->c->is_flat && dice_hits(&t->dice, 8)) { /* ahead of its time, and nobody waits for it */
        fsdp_unshard_handle *handle = NULL;
        FSDP_TRY(fsdp_unit_unshard(any_unit(t), true, &handle, err));
    }
    return post_forward(t, &visit, err);
}

static int draw_order(trainer *t, int *order)
{
    int n = 0;
    for (int layer = 0; layer < t->c->layers; layer++)
        if (t->c->layer_unit[layer] >= 0)
            order[n++] = layer;
    if (!dice_hits(&t->dice, 25))
        return n;
    for (int i = n - 1; i > 0; i--) {
        int other = dice_below(&t->dice, i + 1), layer = order[i];
        order[i] = order[other];
        order[other] = layer;
    }
    return n;
}

static fsdp_status forward(trainer *t, bool is_last, fsdp_error *err)
{
    fsdp_unit *root = t->net->units[CASE_ROOT_UNIT];
    int order[CASE_LAYERS], n = draw_order(t, order);
    t->visit_count = 0;
    t->has_root_run = dice_hits(&t->dice, 85) || t->c->is_flat;
    FSDP_TRY(fsdp_root_begin_forward(t->net->toy.root, err));
    if (t->has_root_run) {
        FSDP_TRY(fsdp_unit_pre_forward(root, err));
        FSDP_TRY(trainer_see_unit(t, CASE_ROOT_UNIT, err));
    }
    for (int i = 0; i < n; i++) {
        if (dice_hits(&t->dice, is_last ? 2 : 8)) /* this time it takes no part */
            continue;
        int times = t->c->repeats && dice_hits(&t->dice, 20) ? 2 : 1;
        for (int k = 0; k < times; k++)
            FSDP_TRY(forward_layer(t, order[i], err));
    }
    if (t->has_root_run)
        FSDP_TRY(fsdp_unit_post_forward(root, err));
    return fsdp_root_end_forward(t->net->toy.root, err);
}

static fsdp_status evaluate(trainer *t, bool is_last, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_set_evaluating(t->net->toy.root, true, err));
    FSDP_TRY(forward(t, is_last, err));
    return fsdp_root_set_evaluating(t->net->toy.root, false, err);
}

/* Some have no backward. */
static fsdp_status forwards(trainer *t, bool is_last, fsdp_error *err)
{
    if (dice_hits(&t->dice, 10))
        FSDP_TRY(evaluate(t, is_last, err));
    if (t->step > 0 && dice_hits(&t->dice, 5))
        FSDP_TRY(forward(t, is_last, err));
    return forward(t, is_last, err);
}

/* --- backward ----------------------------------------------------------------------------------- */

static fsdp_status backward_inner(trainer *t, int inner, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(t->net->units[inner], err));
    FSDP_TRY(trainer_give_grads(t, inner, err));
    return dice_hits(&t->dice, 5) ? FSDP_OK : fsdp_unit_post_backward(t->net->units[inner], err);
}

static fsdp_status backward_list(trainer *t, const trainer_visit *visit, fsdp_error *err)
{
    fsdp_unit *unit = t->net->units[visit->unit];
    FSDP_TRY(fsdp_unit_member_hook(unit, (size_t)visit->layer, FSDP_HOOK_PRE_BACKWARD, err));
    FSDP_TRY(trainer_give_grads(t, visit->unit, err));
    return fsdp_unit_member_hook(unit, (size_t)visit->layer, FSDP_HOOK_POST_BACKWARD, err);
}

/* may_end_late: end_backward does what is left out. */
static fsdp_status backward_layer(trainer *t, const trainer_visit *visit, bool may_end_late,
                                  fsdp_error *err)
{
    fsdp_unit *unit = t->net->units[visit->unit];
    int inner = t->c->inner_unit[visit->layer];
    if (t->c->units[visit->unit].is_list)
        return backward_list(t, visit, err);
    FSDP_TRY(fsdp_unit_pre_backward(unit, err));
    if (!t->c->is_flat && dice_hits(&t->dice, 6)) { /* computed again, as with checkpointing */
        FSDP_TRY(fsdp_unit_pre_forward(unit, err));
        FSDP_TRY(fsdp_unit_post_forward(unit, err));
    }
    FSDP_TRY(trainer_give_grads(t, visit->unit, err));
    if (inner >= 0)
        FSDP_TRY(backward_inner(t, inner, err));
    if (may_end_late && dice_hits(&t->dice, 5))
        return FSDP_OK;
    return fsdp_unit_post_backward(unit, err);
}

static fsdp_status finish_by_hand(trainer *t, fsdp_error *err)
{
    fsdp_finalize_handle *handle = NULL;
    bool is_async = dice_hits(&t->dice, 50);
    FSDP_TRY(fsdp_root_finalize_backward(t->net->toy.root, is_async, &handle, err));
    return is_async && handle ? fsdp_finalize_wait(handle, err) : FSDP_OK;
}

static fsdp_status backward(trainer *t, bool is_last, fsdp_error *err)
{
    fsdp_unit *root = t->net->units[CASE_ROOT_UNIT];
    t->gives = 0;
    for (int i = 0; i < t->c->param_count; i++)
        t->grads[i].is_touched = false;
    if (t->has_root_run) {
        FSDP_TRY(fsdp_unit_pre_backward(root, err));
        FSDP_TRY(trainer_give_grads(t, CASE_ROOT_UNIT, err));
    }
    if (t->visit_count > 1 && dice_hits(&t->dice, 10)) { /* not quite the forward's order */
        int i = dice_below(&t->dice, t->visit_count - 1);
        trainer_visit visit = t->visits[i];
        t->visits[i] = t->visits[i + 1];
        t->visits[i + 1] = visit;
    }
    for (int i = t->visit_count - 1; i >= 0; i--)
        FSDP_TRY(backward_layer(t, &t->visits[i], i == 0, err));
    if (t->has_root_run && dice_hits(&t->dice, 70))
        FSDP_TRY(fsdp_unit_post_backward(root, err));
    FSDP_TRY(fsdp_root_end_backward(t->net->toy.root, err));
    return is_last && t->c->is_finalized_by_hand ? finish_by_hand(t, err) : FSDP_OK;
}

/* --- both --------------------------------------------------------------------------------------- */

/* Alone, the microbatches of all ranks come one after the other, and the last of them reduces. */
fsdp_status trainer_run_microbatch(trainer *t, int microbatch, bool is_last, fsdp_error *err)
{
    const training_case *c = t->c;
    bool is_whole = !c->is_alone || t->as_rank == c->ranks - 1;
    t->microbatch = microbatch;
    t->dice = dice_for(mix(c->seed, (uint64_t)c->ranks), DICE_STEP,
                       (uint64_t)(t->step * 16 + microbatch));
    sync_mode mode = draw_mode(t, is_last);
    FSDP_TRY(set_sync(t, is_whole ? mode : SYNC_NONE, is_last && is_whole, err));
    if (dice_hits(&t->dice, 20))
        FSDP_TRY(trainer_gather_something(t, err));
    FSDP_TRY(forwards(t, is_last, err));
    return backward(t, is_last && is_whole, err);
}

fsdp_status trainer_evaluate(trainer *t, fsdp_error *err)
{
    t->dice = dice_for(t->c->seed, DICE_DETOURS, 200);
    if (dice_hits(&t->dice, 50))
        FSDP_TRY(trainer_gather_something(t, err));
    return evaluate(t, true, err);
}

/* --- abandoned steps ------------------------------------------------------------------------------ */

static fsdp_status leave_forward(trainer *t, fsdp_error *err)
{
    int order[CASE_LAYERS], n = draw_order(t, order), done = dice_below(&t->dice, n + 1);
    t->visit_count = 0;
    FSDP_TRY(fsdp_root_begin_forward(t->net->toy.root, err));
    FSDP_TRY(fsdp_unit_pre_forward(t->net->units[CASE_ROOT_UNIT], err));
    for (int i = 0; i < done; i++)
        FSDP_TRY(forward_layer(t, order[i], err));
    if (done == n || dice_hits(&t->dice, 50))
        return FSDP_OK;
    const trainer_visit next = {.layer = order[done], .unit = t->c->layer_unit[order[done]]};
    return pre_forward(t, &next, err);
}

static fsdp_status leave_backward(trainer *t, fsdp_error *err)
{
    FSDP_TRY(forward(t, false, err));
    t->gives = 0;
    for (int i = 0; i < t->c->param_count; i++)
        t->grads[i].is_touched = false;
    int left = dice_below(&t->dice, t->visit_count + 1);
    for (int i = t->visit_count - 1; i >= left; i--)
        FSDP_TRY(backward_layer(t, &t->visits[i], false, err));
    if (left == 0 || t->c->units[t->visits[left - 1].unit].is_list)
        return FSDP_OK;
    FSDP_TRY(fsdp_unit_pre_backward(t->net->units[t->visits[left - 1].unit], err));
    return trainer_give_grads(t, t->visits[left - 1].unit, err);
}

fsdp_status trainer_abandon_microbatch(trainer *t, fsdp_error *err)
{
    t->dice = dice_for(t->c->seed, DICE_DETOURS, 100 + (uint64_t)t->step);
    t->microbatch = 0;
    t->as_rank = t->rank;
    FSDP_TRY(set_sync(t, draw_mode(t, false), false, err));
    int how = dice_below(&t->dice, 3);
    if (how == 2) {
        FSDP_TRY(forward(t, false, err));
        FSDP_TRY(backward(t, false, err));
    } else {
        FSDP_TRY(how == 0 ? leave_forward(t, err) : leave_backward(t, err));
    }
    return fsdp_root_reset(t->net->toy.root, err);
}

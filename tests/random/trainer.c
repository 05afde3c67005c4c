/* See trainer.h: the loop of steps, and what is printed. */
#include "tests/random/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

fsdp_status trainer_create(trainer *t, random_net *net, fsdp_error *err)
{
    t->net = net;
    t->c = net->c;
    t->rank = fsdp_world_rank(net->toy.world);
    for (int i = 0; i < t->c->param_count; i++) {
        size_t count = (size_t)t->c->params[i].count;
        random_grad *grad = &t->grads[i];
        grad->data = calloc(3 * count, sizeof *grad->data);
        if (!grad->data)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for what gradients must be");
        grad->sum = grad->data + count;
        grad->size = grad->sum + count;
    }
    return FSDP_OK;
}

void trainer_release(trainer *t)
{
    for (int i = 0; i < CASE_PARAMS; i++)
        free(t->grads[i].data);
}

/* --- between steps ------------------------------------------------------------------------------ */

static fsdp_status print_state(trainer *t, fsdp_error *err)
{
    uint64_t hash = 0;
    size_t count = 0;
    FSDP_TRY(net_hash_state(t->net, &hash, &count, err));
    printf("same state after step %d: %zu %016" PRIx64 "\n", t->step, count, hash);
    return FSDP_OK;
}

/* Whole parameters, as one rank would see them. */
static fsdp_status summon(trainer *t, bool rank0_only, fsdp_error *err)
{
    const fsdp_wrap_summon_opts opts = {.discard_changes = true, .rank0_only = rank0_only};
    uint64_t hash = 0;
    FSDP_TRY(fsdp_wrap_summon_full_params(t->net->toy.wrap, NULL, &opts, err));
    for (int i = 0; i < t->c->param_count; i++) {
        const void *data = fsdp_param_data(t->net->params[i]);
        size_t size = (size_t)t->c->params[i].count * fsdp_dtype_size(t->c->params[i].dtype);
        if (data)
            hash = hash_bytes(hash, data, size);
        else if (!rank0_only || t->rank == 0)
            t->wrong += printf("wrong: rank %d, step %d: %s was not summoned\n", t->rank, t->step,
                               t->c->params[i].name);
    }
    if (!rank0_only || t->rank == 0)
        printf("same summoned after step %d: %016" PRIx64 "\n", t->step, hash);
    return fsdp_wrap_summon_end(t->net->toy.wrap, err);
}

static fsdp_status between_steps(trainer *t, fsdp_error *err)
{
    random_dice dice =
        dice_for(mix(t->c->seed, (uint64_t)t->c->ranks), DICE_BETWEEN, (uint64_t)t->step);
    random_dice pools = dice_for(t->c->seed, DICE_POOLS, 1 + (uint64_t)t->step);
    if (dice_hits(&dice, 20))
        fsdp_root_set_post_optim_event(t->net->toy.root);
    if (dice_hits(&dice, 10))
        FSDP_TRY(print_state(t, err));
    if (t->c->is_flat && dice_hits(&dice, 40))
        FSDP_TRY(summon(t, dice_hits(&dice, 30), err));
    return t->pools == POOLS_MIXED ? net_choose_pools(t->net, POOLS_MIXED, &pools, err) : FSDP_OK;
}

/* State dicts got and set, microbatches begun and left. */
static fsdp_status make_detours(trainer *t, fsdp_error *err)
{
    random_dice dice = dice_for(t->c->seed, DICE_DETOURS, (uint64_t)t->step);
    uint64_t forward_hash = t->forward_hash;
    if (t->step > 0 && dice_hits(&dice, 40))
        FSDP_TRY(net_set_own_state(t->net, &dice, err));
    if (dice_hits(&dice, 40))
        FSDP_TRY(trainer_abandon_microbatch(t, err));
    t->forward_hash = forward_hash;
    return FSDP_OK;
}

/* --- steps -------------------------------------------------------------------------------------- */

static fsdp_status run_microbatches(trainer *t, fsdp_error *err)
{
    random_dice dice =
        dice_for(mix(t->c->seed, (uint64_t)t->c->ranks), DICE_STEP, 1000000 + (uint64_t)t->step);
    int count = 1 + dice_below(&dice, 3);
    for (int m = 0; m < count; m++) {
        int first = t->c->is_alone ? 0 : t->rank, last = t->c->is_alone ? t->c->ranks - 1 : t->rank;
        for (t->as_rank = first; t->as_rank <= last; t->as_rank++)
            FSDP_TRY(trainer_run_microbatch(t, m, m == count - 1, err));
    }
    return FSDP_OK;
}

/* The norm adds up in another order where tensors are cut otherwise: near, not the same. */
static fsdp_status clip(trainer *t, fsdp_error *err)
{
    const fsdp_clip_opts opts = {.max_norm = t->c->clip == CLIP_CUTS ? 0.5 : INFINITY,
                                 .norm_type = t->c->seed % 3 == 0 ? INFINITY : 2};
    double norm = 0;
    if (t->c->clip == CLIP_NEVER)
        return FSDP_OK;
    FSDP_TRY(fsdp_root_clip_grad_norm(t->net->toy.root, &opts, &norm, err));
    printf("near norm of step %d: %.17g\n", t->step, norm);
    return FSDP_OK;
}

static fsdp_status run_step(trainer *t, fsdp_error *err)
{
    if (t->has_detours)
        FSDP_TRY(make_detours(t, err));
    trainer_forget_grads(t);
    FSDP_TRY(run_microbatches(t, err));
    trainer_check_grads(t);
    uint64_t grads = trainer_hash_grads(t);
    FSDP_TRY(clip(t, err));
    if (dice_hits(&t->dice, 15))
        FSDP_TRY(trainer_gather_something(t, err));
    FSDP_TRY(fsdp_optim_step(t->net->toy.optim, err));
    printf("part of rank %d, gradients of step %d: %016" PRIx64 "\n", t->rank, t->step, grads);
    printf("part of rank %d, weights of step %d: %016" PRIx64 "\n", t->rank, t->step,
           trainer_hash_weights(t));
    return between_steps(t, err);
}

fsdp_status trainer_run(trainer *t, fsdp_error *err)
{
    random_dice pools = dice_for(t->c->seed, DICE_POOLS, 0);
    FSDP_TRY(net_choose_pools(t->net, t->pools, &pools, err));
    for (t->step = 0; t->step < t->c->steps; t->step++)
        FSDP_TRY(run_step(t, err));
    printf("same forwards: %016" PRIx64 "\n", t->forward_hash);
    return FSDP_OK;
}

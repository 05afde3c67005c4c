/*
 * Scenario C16: units of several members. Their names are joined, each group is gathered before the
 * next one is reduced, and a group with a member that never runs is completed at the end of
 * forward, and still trains.
 */
#include "tests/support/nets/toy_mlp.h"
#include "tests/unit/runtime/expect_toy.h"

#include <string.h>

enum { RANKS = 2, STEPS = 3 };

static void expect_on_devices(world_body body)
{
    expect_body(RANKS, body, NULL);
}

/* Autograd calls the pre_backward of a layer before the layer above has finished. A unit that was
 * completed at the end of forward is last in the order of forwards, so no prefetch finds it. */
static fsdp_status begin_backward_early(toy *net, fsdp_error *err)
{
    if (!net->plan->is_skipped[1])
        return FSDP_OK;
    FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit(net->root), err));
    FSDP_TRY(fsdp_unit_member_hook(net->unit[2], 0, FSDP_HOOK_PRE_BACKWARD, err));
    return fsdp_unit_member_hook(net->unit[0], 0, FSDP_HOOK_PRE_BACKWARD, err);
}

/* One step of both; any difference is the failure. */
static fsdp_status step_both(toy *net, mlp_replica *replica, world_rank *rank, int step,
                             const char *forward, const char *backward, fsdp_error *err)
{
    uint64_t microbatch = (uint64_t)(step * RANKS + fsdp_world_rank(rank->world));
    FSDP_TRY(mlp_replica_backward(replica, rank->world, net, microbatch, NULL, err));
    for (int i = 0; i < net->plan->layers; i++)
        mlp_replica_divide(replica, i, RANKS);
    FSDP_TRY(mlp_forward(net, microbatch, err));
    FSDP_TRY(expect_events(rank, forward, err));
    double loss = fsdp_mlp_loss(net->mlp);
    if (step == 0 && loss != replica->loss)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "loss %.17g, not %.17g", loss, replica->loss);
    FSDP_TRY(begin_backward_early(net, err));
    FSDP_TRY(fsdp_mlp_backward(net->mlp, err));
    FSDP_TRY(expect_events(rank, backward, err));
    FSDP_TRY(mlp_expect_grads(net, &replica->grads, step == 0 ? 0 : 1e-5, err));
    FSDP_TRY(fsdp_optim_step(net->optim, err));
    for (int i = 0; i < net->plan->layers; i++)
        if (net->plan->is_skipped[i]) /* without a gradient there is no step, and no decay */
            return FSDP_OK;
    mlp_plain_adamw(&replica->values, &replica->grads, &replica->moments);
    return mlp_expect(net, &replica->values, 1e-6, err);
}

/* --- all members run -------------------------------------------------------------------------- */

static mlp_plan transformer_like(void)
{
    static const char *const names[] = {"tok", "pos", "L0",   "L1",     "L2",
                                        "L3",  "L4",  "norm", "output", "keep"};
    static const int groups[] = {0, 0, 1, 2, 2, 3, 3, 4, 4, 4};
    mlp_plan plan = mlp_plan_default(10, RANKS);
    memcpy(plan.names, names, sizeof names);
    memcpy(plan.groups, groups, sizeof groups);
    return plan;
}

static const char groups_forward[] = "U tok, pos|R tok, pos|U L0|R L0|U L1, L2|R L1, L2|"
                                     "U L3, L4|R L3, L4|U norm, output, keep";
static const char groups_backward[] = "U L3, L4|R norm, output, keep|post norm, output, keep|"
                                      "U L1, L2|R L3, L4|post L3, L4|U L0|R L1, L2|post L1, L2|"
                                      "U tok, pos|R L0|post L0|R tok, pos|post tok, pos";

static fsdp_status train_groups(world_rank *rank, fsdp_error *err)
{
    const mlp_plan plan = transformer_like();
    toy net;
    mlp_replica replica = {0};
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    mlp_values_init(&plan, &replica.values);
    FSDP_TRY(fsdp_unit_set(net.unit[9], FSDP_UNIT_RESHARD_AFTER_FORWARD, false, false, err));
    fsdp_status status = mlp_add_adamw(&net, err);
    for (int step = 0; step < STEPS && status == FSDP_OK; step++)
        status = step_both(&net, &replica, rank, step, groups_forward, groups_backward, err);
    toy_free(&net);
    return status;
}

Test(scenarios_groups, c16_each_group_is_gathered_before_the_one_behind_it_is_reduced)
{
    expect_on_devices(train_groups);
}

/* --- a member that never runs ----------------------------------------------------------------- */

static mlp_plan with_unused(void)
{
    static const int64_t widths[] = {5, 6, 6, 4, 3};
    static const char *const names[] = {"a", "unused", "b", "own"};
    mlp_plan plan = mlp_plan_default(4, RANKS);
    memcpy(plan.widths, widths, sizeof widths);
    memcpy(plan.names, names, sizeof names);
    plan.groups[0] = plan.groups[1] = 0;
    plan.groups[3] = MLP_ROOT;
    plan.is_skipped[1] = true;
    return plan;
}

static bool is_changed(const mlp_values *before, const mlp_values *after, int layer)
{
    return memcmp(before->weight[layer], after->weight[layer], sizeof before->weight[layer]) != 0;
}

static fsdp_status train_without_one(world_rank *rank, fsdp_error *err)
{
    const mlp_plan plan = with_unused();
    toy net;
    mlp_replica replica = {0};
    mlp_values before, after = {0};
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    fsdp_status status = mlp_add_adamw(&net, err);
    for (int step = 0; step < STEPS && status == FSDP_OK; step++) {
        status = mlp_gather(&net, &before, err);
        replica.values = before;
        forget_events(rank);
        if (status == FSDP_OK)
            status = step_both(&net, &replica, rank, step, "U root|U a, unused|U b|R b|R a, unused",
                               "U b|U a, unused|R b|post b|R a, unused|post a, unused|"
                               "R root|post root",
                               err);
        if (status == FSDP_OK)
            status = mlp_gather(&net, &after, err);
        for (int i = 0; i < plan.layers && status == FSDP_OK; i++)
            if (is_changed(&before, &after, i) == plan.is_skipped[i])
                status = fsdp_fail(err, FSDP_ERR_INTERNAL, "layer %d: wrongly %strained", i,
                                   plan.is_skipped[i] ? "" : "not ");
    }
    toy_free(&net);
    return status;
}

Test(scenarios_groups, c16_a_group_whose_member_never_runs_is_completed_at_the_end)
{
    expect_on_devices(train_without_one);
}

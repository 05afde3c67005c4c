/*
 * fsdp_root_reset after the caller's own error at any point of a step: nothing of that step is left, and the
 * next steps equal those of a root without the error. Also the begin of the gathers of a step.
 */
#include "tests/support/nets/toy_mlp.h"
#include "tests/support/nets/state_net.h"

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <time.h>

enum { LAYERS = 3, RANKS = 4 };

/* The point at which a step is abandoned. */
typedef enum stop_at {
    IN_FORWARD,
    AFTER_FORWARD,
    IN_BACKWARD,
    WITH_KEPT_GRADIENTS,
    WITH_PARTIAL_SUMS,
    AFTER_BACKWARD,
    STOPS
} stop_at;

typedef struct reset_case {
    stop_at stop;
    bool has_replicas;
    int reshard;
} reset_case;

static mlp_plan plan_of(const reset_case *what)
{
    mlp_plan plan = mlp_plan_default(LAYERS, RANKS);
    if (what->has_replicas) {
        plan.mesh_ndim = 2;
        plan.mesh_shape[0] = plan.mesh_shape[1] = RANKS / 2;
        plan.mesh_names[0] = "rep";
        plan.mesh_names[1] = "dp";
    }
    plan.opts.reshard_after_forward = what->reshard;
    return plan;
}

static fsdp_status stop_in_forward(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_set_prefetch(net->unit[0], FSDP_HOOK_PRE_FORWARD, &net->unit[1], 1, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[0], err));
    return fsdp_unit_set_prefetch(net->unit[0], FSDP_HOOK_PRE_FORWARD, NULL, 0, err);
}

/* One layer was reduced, the next is prefetched and has an incomplete gradient. */
static fsdp_status stop_in_backward(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_mlp_backward_layer(net->mlp, 2, err));
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[1], err));
    EXPECT(fsdp_param_grad(net->weight[1]));
    return FSDP_OK;
}

static fsdp_status stop_with_sums(toy *net, bool are_partial, fsdp_error *err)
{
    fsdp_unit *top = fsdp_root_unit(net->root);
    FSDP_TRY(fsdp_unit_set(top, FSDP_UNIT_REQUIRES_ALL_REDUCE, !are_partial, true, err));
    if (!are_partial)
        FSDP_TRY(fsdp_unit_set(top, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, false, true, err));
    FSDP_TRY(fsdp_mlp_backward(net->mlp, err));
    FSDP_TRY(fsdp_unit_set(top, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, true, true, err));
    return FSDP_OK;
}

static fsdp_status begin_and_stop(toy *net, stop_at stop, fsdp_error *err)
{
    if (stop == IN_FORWARD)
        return stop_in_forward(net, err);
    FSDP_TRY(mlp_forward(net, 99, err));
    (void)fsdp_mlp_loss(net->mlp);
    switch (stop) {
    case IN_BACKWARD: return stop_in_backward(net, err);
    case WITH_KEPT_GRADIENTS: return stop_with_sums(net, false, err);
    case WITH_PARTIAL_SUMS: return stop_with_sums(net, true, err);
    case AFTER_BACKWARD: return fsdp_mlp_backward(net->mlp, err);
    default: return FSDP_OK;
    }
}

static fsdp_status expect_only_shards(const toy *net, fsdp_error *err)
{
    const fsdp_memory memory = fsdp_root_memory(net->root);
    EXPECT(memory.total_now == memory.now[FSDP_MEMORY_SHARD] + memory.now[FSDP_MEMORY_OPTIM]);
    return FSDP_OK;
}

static fsdp_status train(toy *net, world_rank *rank, int steps, fsdp_error *err)
{
    for (int step = 0; step < steps; step++) {
        double loss;
        uint64_t microbatch = (uint64_t)(step * RANKS + fsdp_world_rank(rank->world));
        FSDP_TRY(mlp_microbatch(net, microbatch, &loss, err));
        FSDP_TRY(fsdp_optim_step(net->optim, err));
    }
    return FSDP_OK;
}

static fsdp_status train_with_resets(toy *net, world_rank *rank, const reset_case *what,
                                     fsdp_error *err)
{
    FSDP_TRY(begin_and_stop(net, what->stop, err));
    FSDP_TRY(fsdp_root_reset(net->root, err));
    FSDP_TRY(expect_only_shards(net, err));
    FSDP_TRY(train(net, rank, 1, err));
    FSDP_TRY(begin_and_stop(net, what->stop, err));
    FSDP_TRY(fsdp_root_reset(net->root, err));
    return expect_only_shards(net, err);
}

/* Two nets train the same step; one of them abandons two other steps, before and after it. */
static fsdp_status reset_and_compare(world_rank *rank, fsdp_error *err)
{
    const reset_case *what = rank->user;
    const mlp_plan plan = plan_of(what);
    toy given_up = {0}, plain = {0};
    mlp_values values;
    fsdp_status status = mlp_create(&given_up, rank->world, &plan, err);
    if (status == FSDP_OK)
        status = mlp_create(&plain, rank->world, &plan, err);
    if (status == FSDP_OK)
        status = mlp_add_adamw(&given_up, err);
    if (status == FSDP_OK)
        status = mlp_add_adamw(&plain, err);
    if (status == FSDP_OK)
        status = train_with_resets(&given_up, rank, what, err);
    if (status == FSDP_OK)
        status = train(&plain, rank, 1, err);
    if (status == FSDP_OK)
        status = mlp_gather(&plain, &values, err);
    if (status == FSDP_OK)
        status = mlp_expect(&given_up, &values, 0, err);
    toy_free(&given_up);
    toy_free(&plain);
    return status;
}

static void expect_resets(const char *device, reset_case what)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(RANKS, device, reset_and_compare, &what, &err), FSDP_OK,
                 "%s, stop %d, replicas %d, reshard %d: %s", device, what.stop, what.has_replicas,
                 what.reshard, err.text);
}

Test(unit_reset, a_step_that_was_given_up_leaves_nothing)
{
    for (int stop = 0; stop < STOPS; stop++) {
        expect_resets("cpu", (reset_case){(stop_at)stop, true, FSDP_RESHARD_ALWAYS});
        expect_resets("cpu-async", (reset_case){(stop_at)stop, true, FSDP_RESHARD_NEVER});
        expect_resets("cpu-async", (reset_case){(stop_at)stop, false, 2});
    }
}

/* A prefetch from slices (reshard to two ranks) is running when the state is requested. */
static fsdp_status get_state_over_gather(world_rank *rank, fsdp_error *err)
{
    const reset_case what = {IN_BACKWARD, false, 2};
    const mlp_plan plan = plan_of(&what);
    fsdp_sd *sd = NULL;
    toy net;
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    FSDP_TRY(fsdp_unit_set(fsdp_root_unit(net.root), FSDP_UNIT_RESHARD_AFTER_BACKWARD, false, true,
                           err));
    fsdp_root_set_is_last_backward(net.root, false);
    fsdp_status status = mlp_forward(&net, 99, err);
    if (status == FSDP_OK)
        status = fsdp_mlp_backward_layer(net.mlp, 2, err);
    if (status == FSDP_OK)
        status = fsdp_root_end_backward(net.root, err);
    if (status == FSDP_OK)
        status = fsdp_root_get_state(net.root, NULL, &sd, err);
    fsdp_sd_free(sd);
    toy_free(&net);
    return status;
}

Test(unit_reset, so_does_a_state_dict_that_comes_while_gathers_are_under_way)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(RANKS, "cpu-async", get_state_over_gather, NULL, &err), FSDP_OK, "%s",
                 err.text);
}

/* --- begin of gathers --------------------------------------------------------------------------- */

/* Work of the compute stream that waits for the host, with a limit. */
typedef struct gate {
    atomic_bool is_open;
    bool was_late;
} gate;

static fsdp_status wait_at_gate(void *args, fsdp_error *err)
{
    gate *at = *(gate **)args;
    const struct timespec moment = {0, 1000000};
    (void)err;
    for (int i = 0; i < 2000 && !atomic_load(&at->is_open); i++)
        (void)nanosleep(&moment, NULL);
    at->was_late = !atomic_load(&at->is_open);
    return FSDP_OK;
}

/* Expects that a unit is gathered while the compute stream is still busy. */
static fsdp_status gather_beside(toy *net, gate *at, bool has_event, fsdp_error *err)
{
    const fsdp_context *context = net->root->context;
    const fsdp_device_ops *ops = context->device->ops;
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    fsdp_group *group = &net->unit[0]->groups[0];
    if (has_event)
        fsdp_root_set_post_optim_event(net->root);
    ops->submit(compute, wait_at_gate, &at, sizeof at);
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    group->phase = FSDP_FORWARD;
    FSDP_TRY(fsdp_group_unshard(group, false, err));
    FSDP_TRY(ops->sync(group->gather.event, err));
    atomic_store(&at->is_open, true);
    FSDP_TRY(ops->sync(ops->record(compute), err));
    FSDP_TRY(fsdp_group_wait_unshard(group, err));
    group->phase = FSDP_IDLE;
    return fsdp_root_end_forward(net->root, err);
}

static fsdp_status begin_twice(world_rank *rank, fsdp_error *err)
{
    const mlp_plan plan = mlp_plan_default(LAYERS, RANKS);
    gate early = {0}, late = {0};
    toy net;
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    fsdp_status status = gather_beside(&net, &early, true, err);
    if (status == FSDP_OK)
        status = gather_beside(&net, &late, false, err); /* the event counts for one step */
    toy_free(&net);
    FSDP_TRY(status);
    EXPECT(!early.was_late);
    return FSDP_OK;
}

Test(unit_reset, gathers_wait_for_the_optimizers_event_alone)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(RANKS, "cpu-async", begin_twice, NULL, &err), FSDP_OK, "%s", err.text);
}

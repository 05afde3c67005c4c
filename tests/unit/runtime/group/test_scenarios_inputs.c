/*
 * Scenario C10: the number of reduction inputs in flight changes no bit, in bf16, on meshes with and
 * without replicas; units of one root share the largest number, and each keeps its own setting.
 */
#include "tests/support/ranks/forked_ranks.h"
#include "tests/support/nets/toy_mlp.h"
#include "tests/support/ranks/worlds.h"

#include <criterion/criterion.h>
#include <string.h>

enum { LAYERS = 4, RANKS = 4, STEPS = 3 };

/* The state of every rank at the end. */
typedef struct rank_state {
    double losses[STEPS];
    unsigned char shards[LAYERS][256];
} rank_state;

typedef struct inputs_case {
    int inputs[LAYERS]; /* 0: the default */
    mlp_plan plan;
    rank_state ranks[RANKS];
} inputs_case;

static void keep(toy *net, rank_state *state)
{
    for (int i = 0; i < LAYERS; i++) {
        fsdp_box box;
        const void *shard = fsdp_param_shard(net->weight[i], &box);
        size_t bytes = (size_t)fsdp_box_count(&box) * fsdp_dtype_size(FSDP_BF16);
        if (bytes > 0)
            memcpy(state->shards[i], shard, bytes);
    }
}

static fsdp_status train(toy *net, world_rank *rank, fsdp_error *err)
{
    inputs_case *what = rank->user;
    int me = fsdp_world_rank(rank->world), most = 1;
    FSDP_TRY(mlp_add_adamw(net, err));
    for (int i = 0; i < LAYERS; i++)
        if (what->inputs[i] > 0) {
            FSDP_TRY(fsdp_unit_set(net->unit[i], FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS,
                                   what->inputs[i], false, err));
            most = what->inputs[i] > most ? what->inputs[i] : most;
        }
    for (int step = 0; step < STEPS; step++) {
        uint64_t microbatch = (uint64_t)(step * RANKS + me);
        FSDP_TRY(mlp_microbatch(net, microbatch, &what->ranks[me].losses[step], err));
        FSDP_TRY(fsdp_optim_step(net->optim, err));
    }
    keep(net, &what->ranks[me]);
    for (int i = 0; i < LAYERS; i++)
        if (what->inputs[i] > 0 && net->unit[i]->max_inputs != what->inputs[i])
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "unit %d has %d", i, net->unit[i]->max_inputs);
    if (net->root->context->max_inputs != most)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "%d inputs in flight, not %d",
                         net->root->context->max_inputs, most);
    return FSDP_OK;
}

static fsdp_status run_case(world_rank *rank, fsdp_error *err)
{
    toy net;
    inputs_case *what = rank->user;
    FSDP_TRY(mlp_create(&net, rank->world, &what->plan, err));
    fsdp_status status = train(&net, rank, err);
    toy_free(&net);
    return status;
}

static mlp_plan plan_of(bool replicated, int reshard)
{
    mlp_plan plan = mlp_plan_default(LAYERS, RANKS);
    plan.dtype = FSDP_BF16;
    plan.opts.reshard_after_forward = reshard;
    if (replicated) {
        plan.mesh_ndim = 2;
        plan.mesh_shape[0] = plan.mesh_shape[1] = 2;
        plan.mesh_names[0] = "rep";
        plan.mesh_names[1] = "dp";
    }
    return plan;
}

static void run(inputs_case *what, const char *device)
{
    fsdp_error err = {0};
    memset(what->ranks, 0, sizeof what->ranks);
    cr_assert_eq(run_worlds(RANKS, device, run_case, what, &err), FSDP_OK, "%s: %s", device,
                 err.text);
}

Test(scenarios_inputs, c10_no_number_of_inputs_changes_a_bit)
{
    static const int numbers[][LAYERS] = {{1, 1, 1, 1}, {2, 2, 2, 2}, {1, 3, 2, 1}};
    static const char *const devices[] = {"cpu", "cpu-async"};
    inputs_case *usual = share_memory(sizeof *usual), *other = share_memory(sizeof *other);
    for (int kind = 0; kind < 4; kind++) {
        usual->plan = other->plan = plan_of(kind / 2 == 1, kind % 2);
        run(usual, "cpu");
        cr_assert_neq(usual->ranks[0].losses[0], usual->ranks[0].losses[STEPS - 1]);
        for (size_t n = 0; n < 3; n++)
            for (size_t d = 0; d < 2; d++) {
                memcpy(other->inputs, numbers[n], sizeof other->inputs);
                run(other, devices[d]);
                cr_assert_arr_eq(other->ranks, usual->ranks, sizeof usual->ranks);
            }
    }
}

static fsdp_status ask_for_none(world_rank *rank, fsdp_error *err)
{
    toy net;
    const mlp_plan plan = mlp_plan_default(2, 1);
    fsdp_error found = {0};
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    fsdp_status status =
        fsdp_unit_set(net.unit[0], FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS, 0, false, &found);
    toy_free(&net);
    if (status != FSDP_ERR_USAGE || !strstr(found.text, "at least 1"))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "status %d: %s", (int)status, found.text);
    return FSDP_OK;
}

Test(scenarios_inputs, c10_there_is_at_least_one)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(1, "cpu", ask_for_none, NULL, &err), FSDP_OK, "%s", err.text);
}

static fsdp_status ask_for_fewer(world_rank *rank, fsdp_error *err)
{
    static const int numbers[] = {4, 2, 3, 1};
    toy net;
    const mlp_plan plan = mlp_plan_default(2, 1);
    double loss;
    FSDP_TRY(mlp_create(&net, rank->world, &plan, err));
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < 4 && status == FSDP_OK; i++) {
        status = fsdp_unit_set(net.unit[0], FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS, numbers[i],
                               false, err);
        if (status == FSDP_OK)
            status = mlp_microbatch(&net, 0, &loss, err);
        if (status == FSDP_OK && net.root->context->max_inputs != numbers[i])
            status = fsdp_fail(err, FSDP_ERR_INTERNAL, "%d in flight, not %d",
                               net.root->context->max_inputs, numbers[i]);
    }
    toy_free(&net);
    return status;
}

Test(scenarios_inputs, c10_fewer_may_follow_more)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(1, "cpu", ask_for_fewer, NULL, &err), FSDP_OK, "%s", err.text);
}

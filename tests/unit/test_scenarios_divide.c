/*
 * Scenarios C9 and C22: what divides gradients. A factor of the root's goes to the root's own
 * parameters only, on every mesh, for ten steps as a replica does that adds up and divides by
 * itself; and the trace says with which operation, of how many elements, units are reduced.
 */
#include "tests/support/mlp.h"
#include "tests/support/worlds.h"

#include <criterion/criterion.h>
#include <string.h>

enum { RANKS = 4, LAYERS = 3, STEPS = 10 };

static mlp_plan plan_on(int64_t rows, int64_t columns)
{
    mlp_plan plan = mlp_plan_default(LAYERS, RANKS);
    if (columns > 0) {
        plan.mesh_ndim = 2;
        plan.mesh_shape[0] = rows;
        plan.mesh_shape[1] = columns;
        plan.mesh_names[0] = "rep";
        plan.mesh_names[1] = "dp";
    }
    return plan;
}

static void expect_on_devices(world_body body, void *user)
{
    static const char *const devices[] = {"cpu", "cpu-async"};
    for (size_t i = 0; i < 2; i++) {
        fsdp_error err = {0};
        cr_assert_eq(run_worlds(RANKS, devices[i], body, user, &err), FSDP_OK, "%s: %s", devices[i],
                     err.text);
    }
}

/* --- C9: a factor of the root's
 * ----------------------------------------------------------------- */

typedef struct factor_case {
    mlp_plan plan;
    double factor;
} factor_case;

/* Losses and gradients bit for bit; what AdamW makes of them, but for its own rounding. */
static fsdp_status step_both(mlp *net, mlp_replica *replica, world_rank *rank, int step,
                             fsdp_error *err)
{
    const factor_case *what = rank->user;
    static _Thread_local mlp_values gathered;
    uint64_t microbatch = (uint64_t)(step * RANKS + fsdp_world_rank(rank->world));
    double loss;
    FSDP_TRY(mlp_gather(net, &gathered, err));
    FSDP_TRY(mlp_replica_backward(replica, rank->world, net, microbatch, &gathered, err));
    for (int i = 0; i < LAYERS; i++)
        mlp_replica_divide(replica, i, what->plan.groups[i] == MLP_ROOT ? what->factor : RANKS);
    FSDP_TRY(mlp_microbatch(net, microbatch, &loss, err));
    if (loss != replica->loss)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "step %d: loss %.17g, not %.17g", step, loss,
                         replica->loss);
    FSDP_TRY(mlp_expect_grads(net, &replica->grads, 0, err));
    FSDP_TRY(fsdp_optim_step(net->optim, err));
    mlp_plain_adamw(&replica->values, &replica->grads, &replica->moments);
    return mlp_expect(net, &replica->values, 1e-6, err);
}

static fsdp_status train_both(world_rank *rank, fsdp_error *err)
{
    const factor_case *what = rank->user;
    mlp net;
    mlp_replica replica = {0};
    FSDP_TRY(mlp_create(&net, rank->world, &what->plan, err));
    mlp_values_init(&what->plan, &replica.values);
    fsdp_status status = mlp_add_adamw(&net, err);
    if (status == FSDP_OK)
        status = fsdp_unit_set_gradient_divide_factor(fsdp_root_unit(net.root), what->factor, err);
    for (int step = 0; step < STEPS && status == FSDP_OK; step++)
        status = step_both(&net, &replica, rank, step, err);
    mlp_free(&net);
    return status;
}

Test(scenarios_divide, c9_a_factor_goes_to_the_roots_own_parameters)
{
    static const int64_t meshes[][2] = {{RANKS, 0}, {RANKS / 2, 2}, {RANKS, 1}};
    for (size_t m = 0; m < 3; m++)
        for (int kind = 0; kind < 4; kind++) {
            factor_case what = {plan_on(meshes[m][0], meshes[m][1]),
                                kind % 2 == 0 ? 2 * RANKS : RANKS};
            what.plan.groups[LAYERS - 1] = MLP_ROOT;
            if (kind / 2 == 1) {
                what.plan.opts.param_dtype = FSDP_BF16;
                what.plan.opts.reduce_dtype = FSDP_F32;
            }
            expect_on_devices(train_both, &what);
        }
}

/* --- C22: what the trace says
 * ------------------------------------------------------------------- */

typedef struct traced_case {
    mlp_plan plan;
    const char *usual, *forced, *divided;
} traced_case;

static void note_reduction(void *user, const fsdp_trace_event *event)
{
    static const char *const ops[] = {"sum", "avg", "max", "premul_sum"};
    fsdp_text *seen = user;
    if (event->call && event->call->kind != FSDP_ALL_GATHER)
        fsdp_text_addf(seen, "%s%s %s %lld", seen->size > 0 ? "|" : "", event->event,
                       ops[event->call->op], (long long)event->call->count);
}

static fsdp_status expect_reductions(mlp *net, fsdp_text *seen, const char *expected,
                                     fsdp_error *err)
{
    double loss;
    seen->size = 0;
    FSDP_TRY(mlp_microbatch(net, 0, &loss, err));
    fsdp_root_zero_grad(net->root);
    if (seen->data && strcmp(seen->data, expected) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s', not '%s'", seen->data, expected);
}

static fsdp_status reduce_three_ways(mlp *net, const traced_case *what, fsdp_text *seen,
                                     fsdp_error *err)
{
    FSDP_TRY(expect_reductions(net, seen, what->usual, err));
    fsdp_unit_set_force_sum_reduction_for_comms(net->unit[0], true);
    FSDP_TRY(expect_reductions(net, seen, what->forced, err));
    fsdp_unit_set_force_sum_reduction_for_comms(net->unit[0], false);
    FSDP_TRY(fsdp_unit_set_gradient_divide_factor(net->unit[0], 3, err));
    return expect_reductions(net, seen, what->divided, err);
}

static fsdp_status trace_reductions(world_rank *rank, fsdp_error *err)
{
    const traced_case *what = rank->user;
    mlp net;
    fsdp_text seen = {0};
    FSDP_TRY(mlp_create(&net, rank->world, &what->plan, err));
    fsdp_trace_set_listener(rank->world->parts.trace, note_reduction, &seen);
    fsdp_status status = reduce_three_ways(&net, what, &seen, err);
    fsdp_text_release(&seen);
    mlp_free(&net);
    return status;
}

/* One layer of 8 x 8 weights and 8 biases. */
static mlp_plan even_plan(int64_t rows, int64_t columns)
{
    mlp_plan plan = plan_on(rows, columns);
    plan.layers = 1;
    plan.widths[0] = plan.widths[1] = 8;
    return plan;
}

Test(scenarios_divide, c22_sums_are_forced_in_shards)
{
    traced_case what = {even_plan(RANKS, 0), "reduce_scatter avg 18", "reduce_scatter sum 18",
                        "reduce_scatter premul_sum 18"};
    expect_on_devices(trace_reductions, &what);
}

Test(scenarios_divide, c22_sums_are_forced_in_shards_and_replicas)
{
    traced_case what = {even_plan(2, 2), "reduce_scatter avg 36|all_reduce avg 36",
                        "reduce_scatter sum 36|all_reduce sum 36",
                        "reduce_scatter premul_sum 36|all_reduce sum 36"};
    expect_on_devices(trace_reductions, &what);
}

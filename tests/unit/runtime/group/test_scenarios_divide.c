/*
 * Scenarios C9, C17 and C22: the division of gradients. The root's factor applies to the root's own
 * parameters only: on every mesh, ten steps equal those of a replica that adds up and divides by
 * itself. One rank alone divides once, and only by a factor that is not 1. The trace contains the
 * operation and the number of elements of each reduction.
 */
#include "tests/support/nets/toy_mlp.h"
#include "tests/unit/runtime/expect_toy.h"

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
    expect_body(RANKS, body, user);
}

/* --- C9: a factor of the root's --------------------------------------------------------------- */

typedef struct factor_case {
    mlp_plan plan;
    double factor;
} factor_case;

/* Compares losses and gradients bit for bit, and parameters up to the rounding of AdamW. */
static fsdp_status step_both(toy *net, mlp_replica *replica, world_rank *rank, int step,
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
    toy net;
    mlp_replica replica = {0};
    FSDP_TRY(mlp_create(&net, rank->world, &what->plan, err));
    mlp_values_init(&what->plan, &replica.values);
    fsdp_status status = mlp_add_adamw(&net, err);
    if (status == FSDP_OK)
        status = fsdp_unit_set_gradient_divide_factor(fsdp_root_unit(net.root), what->factor, err);
    for (int step = 0; step < STEPS && status == FSDP_OK; step++)
        status = step_both(&net, &replica, rank, step, err);
    toy_free(&net);
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

/* --- C17: one rank alone ---------------------------------------------------------------------- */

typedef struct alone_case {
    int mesh_ndim;
    int64_t shape[2];
    double factor; /* 0: none */
    bool forces_sum;
    fsdp_dtype reduce_dtype;
} alone_case;

typedef struct alone_net {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_unit *unit;
    fsdp_param *weight;
} alone_net;

/* Three rows of ones, then whole numbers that every dtype represents, and their halves. */
static float grad_alone(const alone_case *what, int64_t element)
{
    return what->shape[0] == 1 ? 3 : (float)(element % 255 - 127);
}

static fsdp_status build_alone(alone_net *net, world_rank *rank, fsdp_error *err)
{
    const alone_case *what = rank->user;
    FSDP_TRY(fsdp_world_mesh(rank->world, what->mesh_ndim, (const int64_t[]){1, 1},
                             (const char *[]){"rep", "dp"}, &net->mesh, err));
    FSDP_TRY(fsdp_model_create(rank->world, &net->model, err));
    FSDP_TRY(fsdp_model_add(
        net->model,
        &(fsdp_param_spec){.name = "L.w", .dtype = FSDP_F32, .ndim = 2, .shape = what->shape},
        &net->weight, err));
    fsdp_unit_opts opts = {.mesh = net->mesh};
    opts.reduce_dtype = what->reduce_dtype;
    FSDP_TRY(fsdp_unit_create(net->model, "L", &opts, &net->unit, err));
    FSDP_TRY(fsdp_root_create(net->model, &opts, &net->root, err));
    FSDP_TRY(fsdp_unit_set(net->unit, FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, what->forces_sum,
                           false, err));
    return what->factor > 0 ? fsdp_unit_set_gradient_divide_factor(net->unit, what->factor, err)
                            : FSDP_OK;
}

static fsdp_status expect_divisions(const alone_net *net, const alone_case *what, fsdp_error *err)
{
    fsdp_dtype dtype = what->reduce_dtype == FSDP_DTYPE_NONE ? FSDP_F32 : what->reduce_dtype;
    const fsdp_divide divide = fsdp_divide_for(&net->unit->groups[0], dtype);
    int divisions = (divide.before != 1) + (divide.after != 1) + (divide.alone != 1);
    if (divisions == (what->factor == 2) && divide.all_op == FSDP_REDUCE_SUM)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "%d divisions, all-reduced by %d", divisions,
                     (int)divide.all_op);
}

static fsdp_status backward_alone(alone_net *net, const alone_case *what, fsdp_error *err)
{
    int64_t count = what->shape[0] * what->shape[1];
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit, err));
    FSDP_TRY(fsdp_unit_post_forward(net->unit, err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_backward(net->unit, err));
    float *grad = fsdp_param_grad_raw(net->weight);
    for (int64_t e = 0; grad && e < count; e++)
        grad[e] = grad_alone(what, e);
    FSDP_TRY(fsdp_unit_post_backward(net->unit, err));
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    const float *reduced = fsdp_param_shard_grad(net->weight);
    double divisor = what->factor > 0 ? what->factor : 1;
    for (int64_t e = 0; e < count; e++)
        if (!reduced || reduced[e] != (float)(grad_alone(what, e) / divisor))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "element %lld is %.9g, divided by %g",
                             (long long)e, reduced ? (double)reduced[e] : 0.0, divisor);
    return FSDP_OK;
}

static fsdp_status divide_alone(world_rank *rank, fsdp_error *err)
{
    const alone_case *what = rank->user;
    alone_net net = {0};
    rank->notes_collectives = true;
    fsdp_status status = build_alone(&net, rank, err);
    if (status == FSDP_OK)
        status = expect_divisions(&net, what, err);
    if (status == FSDP_OK)
        status = backward_alone(&net, what, err);
    if (status == FSDP_OK && count_events(rank, "RS") + count_events(rank, "AR") > 0)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "collectives of one: %s", rank->events.data);
    fsdp_root_free(net.root);
    fsdp_model_free(net.model);
    fsdp_mesh_free(net.mesh);
    return status;
}

Test(scenarios_divide, c17_one_rank_divides_once)
{
    static const int64_t shapes[][2] = {{1, 5}, {1024, 1025}};
    static const double factors[] = {0, 1, 2};
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_NONE, FSDP_F16, FSDP_BF16};
    for (int kind = 0; kind < 2 * 2 * 2 * 3 * 3; kind++) {
        const int64_t *shape = shapes[kind / 4 % 2];
        alone_case what = {.mesh_ndim = 1 + kind % 2,
                           .shape = {shape[0], shape[1]},
                           .factor = factors[kind / 8 % 3],
                           .forces_sum = kind / 2 % 2 == 1,
                           .reduce_dtype = dtypes[kind / 24]};
        fsdp_error err = {0};
        const char *device = kind % 5 == 0 ? "cpu-async" : "cpu";
        if (is_repeated(device))
            continue;
        cr_assert_eq(run_worlds(1, device, divide_alone, &what, &err), FSDP_OK,
                     "factor %g%s in %s: %s", what.factor, what.forces_sum ? ", sum" : "",
                     fsdp_dtype_name(what.reduce_dtype), err.text);
    }
}

/* --- C22: what the trace says ----------------------------------------------------------------- */

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

static fsdp_status expect_reductions(toy *net, fsdp_text *seen, const char *expected,
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

static fsdp_status reduce_three_ways(toy *net, const traced_case *what, fsdp_text *seen,
                                     fsdp_error *err)
{
    FSDP_TRY(expect_reductions(net, seen, what->usual, err));
    FSDP_TRY(
        fsdp_unit_set(net->unit[0], FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, true, false, err));
    FSDP_TRY(expect_reductions(net, seen, what->forced, err));
    FSDP_TRY(
        fsdp_unit_set(net->unit[0], FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, false, false, err));
    FSDP_TRY(fsdp_unit_set_gradient_divide_factor(net->unit[0], 3, err));
    return expect_reductions(net, seen, what->divided, err);
}

static fsdp_status trace_reductions(world_rank *rank, fsdp_error *err)
{
    const traced_case *what = rank->user;
    toy net;
    fsdp_text seen = {0};
    FSDP_TRY(mlp_create(&net, rank->world, &what->plan, err));
    fsdp_trace_set_listener(rank->world->parts.trace, note_reduction, &seen);
    fsdp_status status = reduce_three_ways(&net, what, &seen, err);
    fsdp_text_release(&seen);
    toy_free(&net);
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

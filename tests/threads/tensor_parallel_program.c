/*
 * An MLP whose layers are cut over a tensor-parallel dim, by columns and by rows in turn, and whose
 * parts are cut again over ranks of their own, with and without replicas: 20 steps of SGD. Losses
 * and weights are those of one rank that has all, to 1e-5; sums have another order. Plain program,
 * so that ThreadSanitizer sees it.
 */
#include "tests/support/nets/toy_mlp.h"
#include "tests/support/sample_state.h"
#include "tests/support/nets/tensors.h"
#include "tests/support/ranks/worlds.h"

#include <stdio.h>
#include <string.h>

enum { LAYERS = 4, STEPS = 20, MOST_DATA_RANKS = 8, USUAL_SAMPLE = 3 };

static const double rate = 0.1, tolerance = 1e-5;

typedef struct parallel_case {
    mlp_plan plan;
    int64_t data_ranks;
    double losses[STEPS][MOST_DATA_RANKS];
    mlp_values values; /* at the end */
} parallel_case;

/* --- one rank that has all -------------------------------------------------------------------- */

static void add_scaled(mlp_values *to, const mlp_values *from, double factor)
{
    float *x = (float *)to;
    const float *y = (const float *)from;
    for (size_t i = 0; i < sizeof *to / sizeof *x; i++)
        x[i] = (float)((double)x[i] + factor * (double)y[i]);
}

static uint64_t microbatch_of(const parallel_case *what, int step, int64_t data_rank)
{
    return (uint64_t)(step * what->data_ranks + data_rank);
}

static void train_alone(parallel_case *what)
{
    mlp_values_init(&what->plan, &what->values);
    for (int step = 0; step < STEPS; step++) {
        mlp_values sum = {0}, grads;
        for (int64_t r = 0; r < what->data_ranks; r++) {
            what->losses[step][r] = mlp_plain_microbatch(&what->plan, &what->values,
                                                         microbatch_of(what, step, r), &grads);
            add_scaled(&sum, &grads, 1 / (double)what->data_ranks);
        }
        add_scaled(&what->values, &sum, -rate);
    }
}

/* --- steps ------------------------------------------------------------------------------------ */

/* Not is_close of toy_mlp.h: losses are compared relative to themselves. */
static bool is_near(double a, double b)
{
    return a - b <= tolerance * b && b - a <= tolerance * b;
}

static fsdp_status train(world_rank *rank, toy *net, fsdp_error *err)
{
    const parallel_case *what = rank->user;
    int64_t tensor_ranks = what->plan.mesh_shape[what->plan.mesh_ndim - 1];
    int64_t data_rank = fsdp_world_rank(rank->world) / tensor_ranks;
    fsdp_sgd_opts opts = {0};
    opts.lr = rate;
    FSDP_TRY(toy_add_sgd(net, &opts, err));
    for (int step = 0; step < STEPS; step++) {
        double loss, expected = what->losses[step][data_rank];
        FSDP_TRY(mlp_microbatch(net, microbatch_of(what, step, data_rank), &loss, err));
        if (!is_near(loss, expected))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "step %d: loss %.9g, not %.9g", step, loss,
                             expected);
        FSDP_TRY(fsdp_optim_step(net->optim, err));
    }
    return mlp_expect(net, &what->values, tolerance, err);
}

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    const parallel_case *what = rank->user;
    toy net;
    FSDP_TRY(mlp_create(&net, rank->world, &what->plan, err));
    fsdp_status status = train(rank, &net, err);
    toy_free(&net);
    return status;
}

/* --- cases ------------------------------------------------------------------------------------ */

static bool try_mesh(int ndim, const int64_t *shape, int reshard, const char *device)
{
    static const char *const names[] = {"rep", "dp", "tp"};
    parallel_case what = {.plan = mlp_plan_default(LAYERS, 1), .data_ranks = 1};
    mlp_plan *plan = &what.plan;
    fsdp_error err = {0};
    plan->mesh_ndim = ndim;
    plan->tensor_dim = "tp";
    plan->opts.shard_dims = "dp";
    plan->opts.replicate_dims = ndim == 3 ? "rep" : "";
    plan->opts.reshard_after_forward = reshard;
    for (int i = 0; i < ndim; i++) {
        plan->mesh_shape[i] = shape[i];
        plan->mesh_names[i] = names[i + 3 - ndim];
        what.data_ranks *= i + 1 < ndim ? shape[i] : 1;
    }
    train_alone(&what);
    int ranks = (int)(what.data_ranks * shape[ndim - 1]);
    if (what.losses[STEPS - 1][0] < what.losses[0][0] &&
        run_worlds(ranks, device, run_rank, &what, &err) == FSDP_OK)
        return true;
    printf("%d ranks, %d dims, reshard %d, on %s: %s\n", ranks, ndim, reshard, device, err.text);
    return false;
}

int main(void)
{
    static const char *const devices[] = {"cpu", "cpu-async"};
    static const int64_t flat[][2] = {{2, 2}, {1, 3}, {3, 2}, {4, 1}, {2, 4}};
    static const int64_t deep[][3] = {{2, 2, 2}, {2, 1, 2}, {1, 2, 3}};
    test_sampler sampler = {.every = test_sample(USUAL_SAMPLE)};
    int tried = 0, failed = 0;
    for (size_t i = 0; i < sizeof flat / sizeof *flat; i++)
        for (int kind = 0; kind < 4; kind++)
            if (test_sampler_takes(&sampler)) {
                tried++;
                failed += !try_mesh(2, flat[i], kind % 2, devices[kind / 2]);
            }
    for (size_t i = 0; i < sizeof deep / sizeof *deep; i++)
        for (int kind = 0; kind < 4; kind++)
            if (test_sampler_takes(&sampler)) {
                tried++;
                failed += !try_mesh(3, deep[i], kind % 2, devices[kind / 2]);
            }
    printf("%d runs, %d failed\n", tried, failed);
    return failed > 0;
}

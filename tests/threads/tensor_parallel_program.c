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

/* --- a layer's part --------------------------------------------------------------------------- */

typedef struct layer_part {
    int out, in; /* of this rank's part */
    const float *w, *b;
} layer_part;

static layer_part part_of(toy *net, int i)
{
    fsdp_box box;
    fsdp_param_data_box(net->weight[i], &box);
    return (layer_part){.out = (int)box.len[0],
                        .in = (int)box.len[1],
                        .w = fsdp_param_data(net->weight[i]),
                        .b = fsdp_param_data(net->bias[i])};
}

static fsdp_status add_up(const toy *net, float *x, int count, fsdp_error *err)
{
    int dim = fsdp_mesh_ndim(net->mesh) - 1;
    const fsdp_collective call = {
        .kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .in = x, .out = x, .count = count};
    return fsdp_comm_run(fsdp_world_comm(net->world, net->mesh, dim, dim), &call, err);
}

static void multiply(float *y, const float *x, const layer_part *part)
{
    for (int r = 0; r < MLP_ROWS; r++)
        for (int o = 0; o < part->out; o++) {
            float sum = 0;
            for (int k = 0; k < part->in; k++)
                sum += x[r * part->in + k] * part->w[o * part->in + k];
            y[r * part->out + o] = sum;
        }
}

/* By rows, every rank has a part of the sums. */
static fsdp_status compute_layer(toy *net, int i, fsdp_error *err)
{
    const layer_part part = part_of(net, i);
    float *y = net->x[i + 1];
    multiply(y, net->x[i], &part);
    if (i % 2 == 1)
        FSDP_TRY(add_up(net, y, MLP_ROWS * part.out, err));
    for (int k = 0; k < MLP_ROWS * part.out; k++) {
        y[k] += part.b[k % part.out];
        if (i + 1 < LAYERS && y[k] < 0)
            y[k] = 0;
    }
    return FSDP_OK;
}

static fsdp_status add_layer_grads(toy *net, int i, fsdp_error *err)
{
    float dx[MLP_ROWS * MLP_WIDTH] = {0};
    const layer_part part = part_of(net, i);
    float *dw = fsdp_param_grad(net->weight[i]), *db = fsdp_param_grad(net->bias[i]);
    for (int r = 0; r < MLP_ROWS; r++)
        for (int o = 0; o < part.out; o++) {
            bool is_off = i + 1 < LAYERS && net->x[i + 1][r * part.out + o] <= 0;
            float e = is_off ? 0 : net->dy[r * part.out + o];
            db[o] += e;
            for (int k = 0; k < part.in; k++) {
                dx[r * part.in + k] += e * part.w[o * part.in + k];
                dw[o * part.in + k] += e * net->x[i][r * part.in + k];
            }
        }
    if (i % 2 == 0)
        FSDP_TRY(add_up(net, dx, MLP_ROWS * part.in, err));
    memcpy(net->dy, dx, sizeof dx);
    return FSDP_OK;
}

/* --- steps ------------------------------------------------------------------------------------ */

static fsdp_status run_step(toy *net, uint64_t microbatch, double *loss_out, fsdp_error *err)
{
    mlp_fill_rows(net->plan, microbatch, net->x[0]);
    FSDP_TRY(toy_forward(net, compute_layer, err));
    *loss_out = mlp_loss(net, microbatch);
    return toy_backward(net, add_layer_grads, err);
}

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
        FSDP_TRY(run_step(net, microbatch_of(what, step, data_rank), &loss, err));
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

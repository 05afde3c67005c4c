/*
 * Units over ranks that are threads: a small MLP is trained by W ranks in every mode, on both devices, and
 * must give the bits of one rank that runs the W microbatches one after the other. Plain program, so that
 * ThreadSanitizer sees it.
 */
#include "tests/support/worlds.h"
#include <fsdp/optim.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 3, ROWS = 4, IN = 5, HIDDEN = 7, OUT = 3, STEPS = 4, MOST = 8, KINDS = 7 };

/* What a run is like; the result must not depend on it. */
typedef struct unit_mode {
    int reshard, prefetch, inputs;
    bool replicated; /* HSDP: two replicas */
    bool from_comm, separate, keeps, is_async, offloads;
} unit_mode;

typedef struct mlp_run {
    const unit_mode *mode;
    int microbatches; /* of one rank */
    float weights[LAYERS][HIDDEN * HIDDEN + HIDDEN];
    double losses[STEPS][MOST];
} mlp_run;

static const int widths[LAYERS + 1] = {IN, HIDDEN, HIDDEN, OUT};

typedef struct mlp_net {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_optim *optim;
    fsdp_param *weight[LAYERS], *bias[LAYERS];
    fsdp_unit *unit[LAYERS];
} mlp_net;

static void free_net(mlp_net *net)
{
    fsdp_optim_free(net->optim);
    fsdp_root_free(net->root);
    fsdp_model_free(net->model);
    fsdp_mesh_free(net->mesh);
}

static fsdp_status declare(mlp_net *net, const fsdp_unit_opts *opts, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        char name[32];
        const int64_t out = widths[i + 1], in = widths[i];
        snprintf(name, sizeof name, "layers.%d.weight", i);
        FSDP_TRY(fsdp_model_add_param(net->model, name, FSDP_F32, 2, (int64_t[]){out, in},
                                      &net->weight[i], err));
        snprintf(name, sizeof name, "layers.%d.bias", i);
        FSDP_TRY(fsdp_model_add_param(net->model, name, FSDP_F32, 1, &out, &net->bias[i], err));
        snprintf(name, sizeof name, "layers.%d", i);
        FSDP_TRY(fsdp_unit_create(net->model, name, opts, &net->unit[i], err));
    }
    return FSDP_OK;
}

static fsdp_status set_modes(mlp_net *net, const unit_mode *mode, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        fsdp_unit *unit = net->unit[i];
        fsdp_unit *ahead[2], *behind[2];
        size_t n = 0, m = 0;
        for (int d = 1; d <= mode->prefetch; d++) {
            if (i + d < LAYERS)
                ahead[n++] = net->unit[i + d];
            if (i - d >= 0)
                behind[m++] = net->unit[i - d];
        }
        FSDP_TRY(fsdp_unit_set_modules_to_forward_prefetch(unit, ahead, n, err));
        FSDP_TRY(fsdp_unit_set_modules_to_backward_prefetch(unit, behind, m, err));
        FSDP_TRY(fsdp_unit_set_reduce_scatter_max_input_buffers(unit, mode->inputs, false, err));
        FSDP_TRY(
            fsdp_unit_set_allocate_memory_from_process_group_for_comm(unit, mode->from_comm, err));
        fsdp_unit_set_keep_unsharded_storage(unit, mode->keeps, false);
        fsdp_unit_set_unshard_async_op(unit, mode->is_async, false);
        FSDP_TRY(fsdp_unit_set_separate_reduce_scatter_group(unit, mode->separate, false, err));
    }
    return FSDP_OK;
}

static fsdp_status build(mlp_net *net, world_rank *rank, fsdp_error *err)
{
    const mlp_run *run = rank->user;
    const fsdp_adamw_opts adam = fsdp_adamw_opts_default();
    int64_t size = fsdp_world_size(rank->world);
    bool two = run->mode->replicated && size % 2 == 0;
    FSDP_TRY(fsdp_world_mesh(rank->world, two ? 2 : 1, two ? (int64_t[]){2, size / 2} : &size,
                             two ? (const char *[]){"rep", "dp"} : (const char *[]){"dp"},
                             &net->mesh, err));
    FSDP_TRY(fsdp_model_create(rank->world, &net->model, err));
    fsdp_unit_opts opts = fsdp_unit_opts_default(net->mesh);
    opts.reshard_after_forward = run->mode->reshard;
    opts.offload = run->mode->offloads;
    if (run->mode->reshard > 1 && (two ? size / 2 : size) % run->mode->reshard != 0)
        opts.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    FSDP_TRY(declare(net, &opts, err));
    FSDP_TRY(set_modes(net, run->mode, err));
    opts = fsdp_unit_opts_default(net->mesh);
    FSDP_TRY(fsdp_root_create(net->model, &opts, &net->root, err));
    FSDP_TRY(fsdp_root_init_uniform(net->root, 1, err));
    return fsdp_adamw_create(net->root, &adam, &net->optim, err);
}

static void multiply(float *y, const float *x, const float *w, const float *b, int rows, int out,
                     int in)
{
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < out; o++) {
            float sum = b[o];
            for (int k = 0; k < in; k++)
                sum += x[r * in + k] * w[o * in + k];
            y[r * out + o] = sum;
        }
}

static fsdp_status forward(mlp_net *net, float x[LAYERS + 1][ROWS * HIDDEN], fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(fsdp_unit_pre_forward(net->unit[i], err));
        multiply(x[i + 1], x[i], fsdp_param_data(net->weight[i]), fsdp_param_data(net->bias[i]),
                 ROWS, widths[i + 1], widths[i]);
        FSDP_TRY(fsdp_unit_post_forward(net->unit[i], err));
    }
    return fsdp_root_end_forward(net->root, err);
}

static fsdp_status backward(mlp_net *net, float x[LAYERS + 1][ROWS * HIDDEN], float *dy,
                            fsdp_error *err)
{
    float dx[ROWS * HIDDEN];
    for (int i = LAYERS - 1; i >= 0; i--) {
        int out = widths[i + 1], in = widths[i];
        FSDP_TRY(fsdp_unit_pre_backward(net->unit[i], err));
        const float *w = fsdp_param_data(net->weight[i]);
        float *dw = fsdp_param_grad(net->weight[i]), *db = fsdp_param_grad(net->bias[i]);
        memset(dx, 0, sizeof dx);
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < out; o++) {
                float e = dy[r * out + o];
                db[o] += e;
                for (int k = 0; k < in; k++) {
                    dx[r * in + k] += e * w[o * in + k];
                    dw[o * in + k] += e * x[i][r * in + k];
                }
            }
        memcpy(dy, dx, sizeof dx);
        FSDP_TRY(fsdp_unit_post_backward(net->unit[i], err));
    }
    return fsdp_root_end_backward(net->root, err);
}

static fsdp_status microbatch(mlp_net *net, int step, int number, double *loss_out, fsdp_error *err)
{
    float x[LAYERS + 1][ROWS * HIDDEN], dy[ROWS * HIDDEN];
    uint64_t row = (uint64_t)(step * MOST + number) * ROWS;
    for (int i = 0; i < ROWS * IN; i++)
        x[0][i] = (float)fsdp_uniform(2, "x", row * IN + (uint64_t)i);
    FSDP_TRY(forward(net, x, err));
    *loss_out = 0;
    for (int i = 0; i < ROWS * OUT; i++) {
        float e = x[LAYERS][i] - (float)fsdp_uniform(2, "t", row * OUT + (uint64_t)i);
        *loss_out += (double)(e * e) / (ROWS * OUT);
        dy[i] = 2 * e / (ROWS * OUT);
    }
    return backward(net, x, dy, err);
}

/* All ranks gather, one keeps. */
static fsdp_status keep_weights(mlp_net *net, mlp_run *run, bool keeps, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        size_t weights = (size_t)(widths[i] * widths[i + 1]), biases = (size_t)widths[i + 1];
        FSDP_TRY(fsdp_unit_unshard(net->unit[i], false, NULL, err));
        const float *weight = fsdp_param_data(net->weight[i]),
                    *bias = fsdp_param_data(net->bias[i]);
        if (keeps) {
            memcpy(run->weights[i], weight, weights * sizeof(float));
            memcpy(run->weights[i] + weights, bias, biases * sizeof(float));
        }
        FSDP_TRY(fsdp_unit_reshard(net->unit[i], err));
    }
    return FSDP_OK;
}

static fsdp_status train(mlp_net *net, world_rank *rank, fsdp_error *err)
{
    mlp_run *run = rank->user;
    int me = fsdp_world_rank(rank->world);
    for (int step = 0; step < STEPS; step++) {
        for (int m = 0; m < run->microbatches; m++) {
            bool is_last = m == run->microbatches - 1;
            fsdp_unit_set_requires_gradient_sync(fsdp_root_unit(net->root), is_last, true);
            fsdp_root_set_is_last_backward(net->root, is_last);
            if (run->microbatches > 1)
                for (int i = 0; i < LAYERS; i++)
                    FSDP_TRY(
                        fsdp_unit_set_gradient_divide_factor(net->unit[i], run->microbatches, err));
            FSDP_TRY(microbatch(net, step, me + m, &run->losses[step][me + m], err));
        }
        FSDP_TRY(fsdp_optim_step(net->optim, err));
    }
    return keep_weights(net, run, me == 0, err);
}

static fsdp_status train_rank(world_rank *rank, fsdp_error *err)
{
    mlp_net net = {0};
    fsdp_status status = build(&net, rank, err);
    if (status == FSDP_OK)
        status = train(&net, rank, err);
    const fsdp_memory memory = net.root ? fsdp_root_memory(net.root) : (fsdp_memory){0};
    int64_t left = memory.total_now - memory.now[FSDP_MEMORY_SHARD] - memory.now[FSDP_MEMORY_OPTIM];
    const mlp_run *run = rank->user;
    if (status == FSDP_OK && left != 0 && !run->mode->keeps)
        status =
            fsdp_fail(err, FSDP_ERR_INTERNAL, "%lld bytes are left after a step", (long long)left);
    free_net(&net);
    return status;
}

static bool is_equal(const mlp_run *a, const mlp_run *b)
{
    return memcmp(a->weights, b->weights, sizeof a->weights) == 0 &&
           memcmp(a->losses, b->losses, sizeof a->losses) == 0;
}

static bool is_near(double a, double b)
{
    return fabs(a - b) <= 1e-5 * fmax(fabs(a), fabs(b)) + 1e-7;
}

/* Replicas are added up in another order. */
static bool is_close(const mlp_run *a, const mlp_run *b)
{
    bool near = true;
    for (int i = 0; i < LAYERS; i++)
        for (int j = 0; j < HIDDEN * HIDDEN + HIDDEN; j++)
            near = near && is_near(a->weights[i][j], b->weights[i][j]);
    for (int step = 0; step < STEPS; step++)
        for (int r = 0; r < MOST; r++)
            near = near && is_near(a->losses[step][r], b->losses[step][r]);
    return near;
}

static bool try_mode(int ranks, const char *device, const unit_mode *mode)
{
    static const unit_mode plain = {.reshard = FSDP_RESHARD_ALWAYS, .inputs = 1};
    static mlp_run alone, together;
    fsdp_error err = {0};
    alone = (mlp_run){.mode = &plain, .microbatches = ranks};
    together = (mlp_run){.mode = mode, .microbatches = 1};
    if (run_worlds(1, "cpu", train_rank, &alone, &err) != FSDP_OK ||
        run_worlds(ranks, device, train_rank, &together, &err) != FSDP_OK) {
        printf("%d ranks on %s: %s\n", ranks, device, err.text);
        return false;
    }
    if (mode->replicated ? is_close(&alone, &together) : is_equal(&alone, &together))
        return true;
    printf("%d ranks on %s, reshard %d, prefetch %d, inputs %d%s%s%s%s%s%s: other bits\n", ranks,
           device, mode->reshard, mode->prefetch, mode->inputs, mode->from_comm ? ", pool" : "",
           mode->separate ? ", separate" : "", mode->keeps ? ", keeps" : "",
           mode->is_async ? ", async" : "", mode->offloads ? ", offload" : "",
           mode->replicated ? ", replicas" : "");
    return false;
}

int main(void)
{
    static const int ranks[] = {1, 2, 3, 4, 8};
    static const int reshards[] = {FSDP_RESHARD_ALWAYS, FSDP_RESHARD_NEVER, FSDP_RESHARD_AUTO, 2};
    static const char *const devices[] = {"cpu", "cpu-async"};
    int tried = 0, failed = 0;
    for (size_t r = 0; r < sizeof ranks / sizeof *ranks; r++)
        for (size_t d = 0; d < 2; d++)
            for (size_t s = 0; s < 4; s++)
                for (int prefetch = 0; prefetch < 3; prefetch++) {
                    int kind = (tried + tried / 12) % KINDS;
                    const unit_mode mode = {.reshard = reshards[s],
                                            .prefetch = prefetch,
                                            .inputs = 1 + kind % 2,
                                            .from_comm = kind == 1,
                                            .separate = kind == 2,
                                            .keeps = kind == 3,
                                            .is_async = kind == 4,
                                            .replicated = kind == 5,
                                            .offloads = kind == 6};
                    failed += !try_mode(ranks[r], devices[d], &mode);
                    tried++;
                }
    printf("%d runs, %d failed\n", tried, failed);
    return failed > 0;
}

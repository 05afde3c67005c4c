/* See v1_net.h. */
#include "tests/support/v1_net.h"
#include <fsdp/root_init.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

static const int widths[NET_LAYERS + 1] = {NET_IN, NET_HIDDEN, NET_HIDDEN, NET_OUT};

net_setup net_setup_default(void)
{
    return (net_setup){.steps = 4, .microbatches = 1};
}

/* --- building --------------------------------------------------------------------------------- */

fsdp_status net_declare(v1_net *net, fsdp_world *world, fsdp_error *err)
{
    net->world = world;
    FSDP_TRY(fsdp_model_create(world, &net->model, err));
    for (int i = 0; i < NET_LAYERS; i++) {
        char name[32];
        const int64_t out = widths[i + 1], in = widths[i];
        snprintf(name, sizeof name, "layers.%d.weight", i);
        FSDP_TRY(fsdp_model_add_param(net->model, name, FSDP_F32, 2, (int64_t[]){out, in},
                                      &net->weight[i], err));
        snprintf(name, sizeof name, "layers.%d.bias", i);
        FSDP_TRY(fsdp_model_add_param(net->model, name, FSDP_F32, 1, &out, &net->bias[i], err));
    }
    const int64_t out = NET_OUT;
    FSDP_TRY(fsdp_model_add_param(net->model, "bias", FSDP_F32, 1, &out, &net->root_bias, err));
    return fsdp_model_add_buffer(net->model, "count", FSDP_F32, 0, NULL, true, &net->count, err);
}

static fsdp_status make_mesh(v1_net *net, const net_setup *setup, fsdp_error *err)
{
    int64_t size = fsdp_world_size(net->world), replicas = setup->replicas;
    bool two = replicas > 0;
    const int64_t shape[] = {two ? replicas : size, two ? size / replicas : 0};
    const char *const *names =
        two ? (const char *const[]){"rep", "dp"} : (const char *const[]){"dp"};
    int ranks[16];
    if (!setup->is_backwards)
        return fsdp_world_mesh(net->world, 1 + two, shape, names, &net->mesh, err);
    for (int i = 0; i < size; i++)
        ranks[i] = (int)size - 1 - i;
    FSDP_TRY(fsdp_mesh_create(1 + two, shape, names, ranks, &net->mesh, err));
    return fsdp_world_connect(net->world, net->mesh, err);
}

static fsdp_status set_units(v1_net *net, const net_units *units, fsdp_error *err)
{
    for (int i = 0; i < NET_LAYERS; i++) {
        fsdp_unit_set_keep_unsharded_storage(net->unit[i], units->keeps, false);
        fsdp_unit_set_unshard_async_op(net->unit[i], units->is_async, false);
    }
    return tune_row(net->unit, NET_LAYERS, &units->tuning, err);
}

static fsdp_status wrap_plain(v1_net *net, const net_units *units, fsdp_error *err)
{
    const fsdp_unit_opts usual = fsdp_unit_opts_default(net->mesh);
    fsdp_unit_opts opts = usual;
    if (units) {
        opts.reshard_after_forward = units->reshard;
        opts.offload = units->offloads;
    }
    for (int i = 0; i < NET_LAYERS; i++) {
        char name[32];
        snprintf(name, sizeof name, "layers.%d", i);
        FSDP_TRY(fsdp_unit_create(net->model, name, &opts, &net->unit[i], err));
    }
    if (units)
        FSDP_TRY(set_units(net, units, err));
    FSDP_TRY(fsdp_root_create(net->model, &usual, &net->root, err));
    return fsdp_root_init_uniform(net->root, 1, err);
}

static bool wants_layer(void *user, const fsdp_v1_module *module, fsdp_v1_unit_opts *opts)
{
    const net_setup *setup = user;
    if (strncmp(module->name, "layers.", 7) != 0)
        return false;
    if (setup->has_layer_opts)
        *opts = setup->layer;
    return true;
}

static fsdp_status wrap(v1_net *net, const net_setup *setup, fsdp_error *err)
{
    fsdp_v1_opts opts = setup->v1;
    opts.mesh = net->mesh;
    opts.policy = (fsdp_v1_policy){
        .kind = FSDP_V1_WRAP_CUSTOM, .context = (void *)setup, .wants = wants_layer};
    FSDP_TRY(fsdp_v1_create(net->model, &opts, &net->v1, err));
    net->root = fsdp_v1_root(net->v1);
    for (int i = 0; i < NET_LAYERS; i++) {
        char name[32];
        snprintf(name, sizeof name, "layers.%d", i);
        net->unit[i] = fsdp_v1_unit(net->v1, name);
    }
    if (setup->hook)
        FSDP_TRY(fsdp_v1_register_comm_hook(net->v1, setup->hook, setup->hook_context, err));
    return fsdp_root_init_uniform(net->root, 1, err);
}

static fsdp_status make_optim(v1_net *net, const net_setup *setup, fsdp_error *err)
{
    fsdp_adamw_opts adam = fsdp_adamw_opts_default();
    fsdp_sgd_opts sgd = fsdp_sgd_opts_default();
    sgd.lr = 0.05;
    sgd.momentum = 0.9;
    adam.groups = sgd.groups = setup->groups;
    adam.group_count = sgd.group_count = setup->group_count;
    if (setup->is_sgd)
        return fsdp_sgd_create(net->root, &sgd, &net->optim, err);
    return fsdp_adamw_create(net->root, &adam, &net->optim, err);
}

fsdp_status net_build(v1_net *net, fsdp_world *world, const net_setup *setup, fsdp_error *err)
{
    *net = (v1_net){0};
    FSDP_TRY(net_declare(net, world, err));
    FSDP_TRY(make_mesh(net, setup, err));
    FSDP_TRY(setup->is_plain ? wrap_plain(net, setup->units, err) : wrap(net, setup, err));
    for (int i = 0; i < NET_LAYERS && setup->divide > 0; i++)
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(net->unit[i], setup->divide, err));
    if (setup->divide > 0)
        FSDP_TRY(
            fsdp_unit_set_gradient_divide_factor(fsdp_root_unit(net->root), setup->divide, err));
    return make_optim(net, setup, err);
}

void net_free(v1_net *net)
{
    fsdp_optim_free(net->optim);
    if (net->v1)
        fsdp_v1_free(net->v1);
    else
        fsdp_root_free(net->root);
    fsdp_model_free(net->model);
    fsdp_mesh_free(net->mesh);
}

/* --- a step ----------------------------------------------------------------------------------- */

typedef float net_rows[NET_ROWS * NET_HIDDEN];

static void multiply(float *y, const float *x, const float *w, const float *b, int out, int in)
{
    for (int r = 0; r < NET_ROWS; r++)
        for (int o = 0; o < out; o++) {
            float sum = b[o];
            for (int k = 0; k < in; k++)
                sum += x[r * in + k] * w[o * in + k];
            y[r * out + o] = sum;
        }
}

static fsdp_status forward(v1_net *net, net_rows *x, fsdp_error *err)
{
    fsdp_unit *root = fsdp_root_unit(net->root);
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(root, err));
    for (int i = 0; i < NET_LAYERS; i++) {
        FSDP_TRY(fsdp_unit_pre_forward(net->unit[i], err));
        multiply(x[i + 1], x[i], fsdp_param_data(net->weight[i]), fsdp_param_data(net->bias[i]),
                 widths[i + 1], widths[i]);
        FSDP_TRY(fsdp_unit_post_forward(net->unit[i], err));
    }
    const float *bias = fsdp_param_data(net->root_bias);
    for (int i = 0; i < NET_ROWS * NET_OUT; i++)
        x[NET_LAYERS][i] += bias[i % NET_OUT];
    FSDP_TRY(fsdp_unit_post_forward(root, err));
    return fsdp_root_end_forward(net->root, err);
}

static fsdp_status layer_backward(v1_net *net, int i, net_rows *x, float *dy, fsdp_error *err)
{
    net_rows dx = {0};
    int out = widths[i + 1], in = widths[i];
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[i], err));
    const float *w = fsdp_param_data(net->weight[i]);
    float *dw = fsdp_param_grad(net->weight[i]), *db = fsdp_param_grad(net->bias[i]);
    for (int r = 0; r < NET_ROWS; r++)
        for (int o = 0; o < out; o++) {
            float e = dy[r * out + o];
            db[o] += e;
            for (int k = 0; k < in; k++) {
                dx[r * in + k] += e * w[o * in + k];
                dw[o * in + k] += e * x[i][r * in + k];
            }
        }
    memcpy(dy, dx, sizeof dx);
    return fsdp_unit_post_backward(net->unit[i], err);
}

static fsdp_status backward(v1_net *net, net_rows *x, float *dy, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit(net->root), err));
    float *bias = fsdp_param_grad(net->root_bias);
    for (int i = 0; i < NET_ROWS * NET_OUT; i++)
        bias[i % NET_OUT] += dy[i];
    for (int i = NET_LAYERS - 1; i >= 0; i--)
        FSDP_TRY(layer_backward(net, i, x, dy, err));
    return fsdp_root_end_backward(net->root, err);
}

fsdp_status net_microbatch(v1_net *net, int step, int number, double *loss_out, fsdp_error *err)
{
    net_rows x[NET_LAYERS + 1], dy = {0};
    uint64_t row = (uint64_t)(step * 64 + number) * NET_ROWS;
    for (int i = 0; i < NET_ROWS * NET_IN; i++)
        x[0][i] = (float)fsdp_uniform(2, "x", row * NET_IN + (uint64_t)i);
    FSDP_TRY(forward(net, x, err));
    *loss_out = 0;
    for (int i = 0; i < NET_ROWS * NET_OUT; i++) {
        float e = x[NET_LAYERS][i] - (float)fsdp_uniform(2, "t", row * NET_OUT + (uint64_t)i);
        *loss_out += (double)(e * e) / (NET_ROWS * NET_OUT);
        dy[i] = 2 * e / (NET_ROWS * NET_OUT);
    }
    return backward(net, x, dy, err);
}

/* --- training --------------------------------------------------------------------------------- */

static fsdp_status set_accumulating(v1_net *net, bool is_accumulating, fsdp_error *err)
{
    if (net->v1)
        return fsdp_v1_set_accumulating(net->v1, is_accumulating, err);
    fsdp_unit_set_requires_gradient_sync(fsdp_root_unit(net->root), !is_accumulating, true);
    fsdp_root_set_is_last_backward(net->root, !is_accumulating);
    return FSDP_OK;
}

static fsdp_status clip(v1_net *net, double most, double *norm, fsdp_error *err)
{
    const fsdp_clip_opts opts = {.max_norm = most};
    return most > 0 ? fsdp_root_clip_grad_norm(net->root, &opts, norm, err) : FSDP_OK;
}

fsdp_status net_train(v1_net *net, const net_setup *setup, int begin, int steps, net_result *result,
                      fsdp_error *err)
{
    int me = fsdp_world_rank(net->world), each = setup->microbatches;
    double norm = 0;
    for (int step = begin; step < begin + steps; step++) {
        for (int m = 0; m < each; m++) {
            bool is_kept = m < each - 1 && !setup->all_reduce_each;
            int number = me * each + m;
            FSDP_TRY(set_accumulating(net, is_kept, err));
            FSDP_TRY(net_microbatch(net, step, number, &result->losses[step][number], err));
        }
        FSDP_TRY(clip(net, setup->clip, &norm, err));
        if (me == 0)
            result->norms[step] = norm;
        FSDP_TRY(fsdp_optim_step(net->optim, err));
    }
    return FSDP_OK;
}

/* All ranks gather, the first keeps. */
fsdp_status net_keep_weights(v1_net *net, net_result *result, fsdp_error *err)
{
    bool keeps = fsdp_world_rank(net->world) == 0;
    for (int i = 0; i < NET_LAYERS; i++) {
        size_t weights = (size_t)(widths[i] * widths[i + 1]), biases = (size_t)widths[i + 1];
        FSDP_TRY(fsdp_unit_unshard(net->unit[i], false, NULL, err));
        if (keeps) {
            memcpy(result->weights[i], fsdp_param_data(net->weight[i]), weights * sizeof(float));
            memcpy(result->weights[i] + weights, fsdp_param_data(net->bias[i]),
                   biases * sizeof(float));
        }
        FSDP_TRY(fsdp_unit_reshard(net->unit[i], err));
    }
    FSDP_TRY(fsdp_unit_unshard(fsdp_root_unit(net->root), false, NULL, err));
    if (keeps)
        memcpy(result->root_bias, fsdp_param_data(net->root_bias), sizeof result->root_bias);
    return fsdp_unit_reshard(fsdp_root_unit(net->root), err);
}

fsdp_status net_work(v1_net *net, fsdp_world *world, const net_setup *setup, net_result *result,
                     fsdp_error *err)
{
    FSDP_TRY(net_build(net, world, setup, err));
    FSDP_TRY(net_train(net, setup, 0, setup->steps, result, err));
    return net_keep_weights(net, result, err);
}

typedef struct net_job {
    const net_setup *setup;
    net_result *result;
} net_job;

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    const net_job *job = rank->user;
    v1_net net;
    fsdp_status status = net_work(&net, rank->world, job->setup, job->result, err);
    net_free(&net);
    return status;
}

fsdp_status net_run(int ranks, const char *device, const net_setup *setup, net_result *result,
                    fsdp_error *err)
{
    net_job job = {.setup = setup, .result = result};
    memset(result, 0, sizeof *result);
    return run_worlds(ranks, device, run_rank, &job, err);
}

bool net_equal(const net_result *a, const net_result *b)
{
    return memcmp(a->losses, b->losses, sizeof a->losses) == 0 &&
           memcmp(a->weights, b->weights, sizeof a->weights) == 0 &&
           memcmp(a->root_bias, b->root_bias, sizeof a->root_bias) == 0;
}

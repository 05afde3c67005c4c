/* See training.h. */
#include "tests/support/nets/training.h"
#include <fsdp/root_init.h>

#include <stdio.h>
#include <string.h>

#include "tests/support/nets/toy_mlp.h"

static const mlp_plan net_plan = {.layers = NET_LAYERS,
                                  .widths = {NET_IN, NET_HIDDEN, NET_HIDDEN, NET_OUT},
                                  .names = {"layers.0", "layers.1", "layers.2"},
                                  .is_linear = true,
                                  .has_root_bias = true};

net_setup net_setup_default(void)
{
    return (net_setup){.steps = 4, .microbatches = 1};
}

/* --- building --------------------------------------------------------------------------------- */

static fsdp_status begin(toy *net, fsdp_world *world, const net_setup *setup, fsdp_error *err)
{
    int64_t size = fsdp_world_size(world), replicas = setup->replicas;
    bool two = replicas > 0;
    const int64_t shape[] = {two ? replicas : size, two ? size / replicas : 0};
    const char *const *names =
        two ? (const char *const[]){"rep", "dp"} : (const char *const[]){"dp"};
    *net = (toy){.plan = &net_plan, .runs_root = true};
    if (setup->is_backwards)
        return toy_begin_backwards(net, world, 1 + two, shape, names, err);
    return toy_begin_in(net, world, 1 + two, shape, names, err);
}

static fsdp_status declare(toy *net, fsdp_error *err)
{
    FSDP_TRY(mlp_declare(net, err));
    return fsdp_model_add(net->model,
                          &(fsdp_param_spec){.name = "count", .dtype = FSDP_F32, .is_buffer = true},
                          NULL, err);
}

static fsdp_status set_units(toy *net, const net_units *units, fsdp_error *err)
{
    for (int i = 0; i < NET_LAYERS; i++) {
        FSDP_TRY(fsdp_unit_set(net->unit[i], FSDP_UNIT_KEEP_UNSHARDED_STORAGE, units->keeps, false,
                               err));
        FSDP_TRY(
            fsdp_unit_set(net->unit[i], FSDP_UNIT_UNSHARD_ASYNC_OP, units->is_async, false, err));
    }
    return tune_row(net->unit, NET_LAYERS, &units->tuning, err);
}

static fsdp_status wrap_plain(toy *net, const net_units *units, fsdp_error *err)
{
    const fsdp_unit_opts usual = {.mesh = net->mesh};
    fsdp_unit_opts opts = usual;
    if (units) {
        opts.reshard_after_forward = units->reshard;
        opts.offload = units->offloads;
    }
    for (int i = 0; i < NET_LAYERS; i++)
        FSDP_TRY(fsdp_unit_create(net->model, net_plan.names[i], &opts, &net->unit[i], err));
    if (units)
        FSDP_TRY(set_units(net, units, err));
    FSDP_TRY(fsdp_root_create(net->model, &usual, &net->root, err));
    return fsdp_root_init_uniform(net->root, 1, err);
}

static bool wants_layer(void *user, const fsdp_wrap_module *module, fsdp_wrap_unit_opts *opts)
{
    const net_setup *setup = user;
    if (strncmp(module->name, "layers.", 7) != 0)
        return false;
    if (setup->has_layer_opts)
        *opts = setup->layer;
    return true;
}

static fsdp_status wrap(toy *net, const net_setup *setup, fsdp_error *err)
{
    fsdp_wrap_opts opts = setup->wrap;
    opts.mesh = net->mesh;
    opts.policy = (fsdp_wrap_policy){
        .kind = FSDP_POLICY_CUSTOM, .context = (void *)setup, .wants = wants_layer};
    FSDP_TRY(fsdp_wrap_create(net->model, &opts, &net->wrap, err));
    net->root = fsdp_wrap_root(net->wrap);
    for (int i = 0; i < NET_LAYERS; i++)
        net->unit[i] = fsdp_wrap_unit(net->wrap, net_plan.names[i]);
    if (setup->hook)
        FSDP_TRY(fsdp_wrap_register_comm_hook(net->wrap, setup->hook, setup->hook_context, err));
    return fsdp_root_init_uniform(net->root, 1, err);
}

static fsdp_status make_optim(toy *net, const net_setup *setup, fsdp_error *err)
{
    fsdp_adamw_opts adam = {.weight_decay = 0.01};
    fsdp_sgd_opts sgd = {0};
    sgd.lr = 0.05;
    sgd.momentum = 0.9;
    adam.groups = sgd.groups = setup->groups;
    adam.group_count = sgd.group_count = setup->group_count;
    return setup->is_sgd ? toy_add_sgd(net, &sgd, err) : toy_add_adamw(net, &adam, err);
}

fsdp_status net_build(toy *net, fsdp_world *world, const net_setup *setup, fsdp_error *err)
{
    FSDP_TRY(begin(net, world, setup, err));
    FSDP_TRY(declare(net, err));
    FSDP_TRY(setup->is_plain ? wrap_plain(net, setup->units, err) : wrap(net, setup, err));
    FSDP_TRY(mlp_set_root(net, err));
    for (int i = 0; i <= NET_LAYERS && setup->divide > 0; i++)
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(net->unit[i], setup->divide, err));
    return make_optim(net, setup, err);
}

/* --- a step ----------------------------------------------------------------------------------- */

fsdp_status net_microbatch(toy *net, int step, int number, double *loss_out, fsdp_error *err)
{
    return mlp_microbatch(net, (uint64_t)(step * 64 + number), loss_out, err);
}

/* --- training --------------------------------------------------------------------------------- */

static fsdp_status begin_microbatch(toy *net, int i, int n, fsdp_error *err)
{
    return net->wrap ? fsdp_wrap_set_accumulating(net->wrap, i < n - 1, err)
                     : fsdp_root_begin_microbatch(net->root, i, n, err);
}

static fsdp_status clip(toy *net, double most, double *norm, fsdp_error *err)
{
    const fsdp_clip_opts opts = {.max_norm = most};
    return most > 0 ? fsdp_root_clip_grad_norm(net->root, &opts, norm, err) : FSDP_OK;
}

fsdp_status net_train(toy *net, const net_setup *setup, int begin, int steps, net_result *result,
                      fsdp_error *err)
{
    int me = fsdp_world_rank(net->world), each = setup->microbatches;
    double norm = 0;
    for (int step = begin; step < begin + steps; step++) {
        for (int m = 0; m < each; m++) {
            bool is_alone = setup->all_reduce_each;
            int number = me * each + m;
            FSDP_TRY(begin_microbatch(net, is_alone ? 0 : m, is_alone ? 1 : each, err));
            FSDP_TRY(net_microbatch(net, step, number, &result->losses[step][number], err));
        }
        FSDP_TRY(clip(net, setup->clip, &norm, err));
        if (me == 0)
            result->norms[step] = norm;
        FSDP_TRY(fsdp_optim_step(net->optim, err));
    }
    return FSDP_OK;
}

/* All ranks gather the weights, and the first keeps them. */
fsdp_status net_keep_weights(toy *net, net_result *result, fsdp_error *err)
{
    bool keeps = fsdp_world_rank(net->world) == 0;
    for (int i = 0; i < NET_LAYERS; i++) {
        const int64_t *widths = net_plan.widths;
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
        memcpy(result->root_bias, fsdp_param_data(net->own), sizeof result->root_bias);
    return fsdp_unit_reshard(fsdp_root_unit(net->root), err);
}

fsdp_status net_work(toy *net, fsdp_world *world, const net_setup *setup, net_result *result,
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
    toy net;
    fsdp_status status = net_work(&net, rank->world, job->setup, job->result, err);
    toy_free(&net);
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

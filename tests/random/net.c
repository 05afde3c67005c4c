/* See net.h. Built in the order of a program's: model, units from inside out, root, values, optimizer. */
#include "tests/random/net.h"

#include <stdlib.h>
#include <string.h>

/* --- model -------------------------------------------------------------------------------------- */

static fsdp_status begin(random_net *net, fsdp_world *world, fsdp_error *err)
{
    const int64_t size = fsdp_world_size(world), replicas = net->c->replicas;
    FSDP_TRY(toy_begin_in(&net->toy, world, 1, &size, (const char *[]){"dp"}, err));
    if (replicas == 0)
        return FSDP_OK;
    return fsdp_world_mesh(world, 2, (int64_t[]){replicas, size / replicas},
                           (const char *[]){"rep", "shard"}, &net->toy.other_mesh, err);
}

static fsdp_status add_alias(random_net *net, int i, fsdp_error *err)
{
    char name[] = "tied.a00";
    name[6] = (char)('0' + i / 10);
    name[7] = (char)('0' + i % 10);
    return fsdp_model_add_alias(net->toy.model, name, net->params[i], err);
}

static fsdp_status declare(random_net *net, fsdp_error *err)
{
    for (int i = 0; i < net->c->param_count; i++) {
        const case_param *param = &net->c->params[i];
        FSDP_TRY(fsdp_model_add(net->toy.model,
                                &(fsdp_param_spec){.name = param->name,
                                                   .dtype = param->dtype,
                                                   .ndim = param->ndim,
                                                   .shape = param->shape},
                                &net->params[i], err));
        if (param->has_alias)
            FSDP_TRY(add_alias(net, i, err));
        FSDP_TRY(fsdp_param_set_requires_grad(net->params[i], !param->is_frozen, err));
        if (param->grad_dtype)
            FSDP_TRY(fsdp_param_set_grad_dtype(net->params[i], param->grad_dtype, err));
    }
    return fsdp_model_add(net->toy.model,
                          &(fsdp_param_spec){.name = "stat",
                                             .dtype = FSDP_F32,
                                             .ndim = 1,
                                             .shape = (int64_t[]){5},
                                             .is_buffer = true},
                          NULL, err);
}

/* --- units -------------------------------------------------------------------------------------- */

static void place_param(void *user, const fsdp_param *param, fsdp_param_place *place)
{
    const random_net *net = user;
    for (int i = 0; i < net->c->param_count; i++)
        if (net->params[i] == param) {
            place->dim = net->c->params[i].dim;
            if (net->c->params[i].on_flat_mesh)
                place->mesh = net->toy.mesh;
        }
}

static fsdp_unit_opts opts_of(random_net *net, const case_unit *unit)
{
    fsdp_unit_opts opts = {.mesh = net->toy.other_mesh ? net->toy.other_mesh : net->toy.mesh};
    opts.context = net;
    opts.placement = place_param;
    if (unit->cut == CUT_ALL && net->toy.other_mesh) {
        opts.shard_dims = "rep,shard";
        opts.replicate_dims = "";
    }
    if (unit->cut == CUT_NONE) {
        opts.shard_dims = "";
        opts.replicate_dims = net->toy.other_mesh ? "rep,shard" : "dp";
    }
    opts.reshard_after_forward = unit->reshard;
    opts.param_dtype = unit->param_dtype;
    opts.reduce_dtype = unit->reduce_dtype;
    opts.offload = unit->offloads;
    return opts;
}

static fsdp_status make_unit(random_net *net, int i, fsdp_error *err)
{
    const case_unit *unit = &net->c->units[i];
    const fsdp_unit_opts opts = opts_of(net, unit);
    if (unit->is_list)
        return fsdp_unit_create_list(net->toy.model, (const char *[]){"layers.0", "layers.1"}, 2,
                                     &opts, &net->units[i], err);
    return fsdp_unit_create(net->toy.model, unit->name, &opts, &net->units[i], err);
}

/* Inner units come after theirs, and take their parameters first. */
static fsdp_status make_units(random_net *net, fsdp_error *err)
{
    for (int i = net->c->unit_count - 1; i > CASE_ROOT_UNIT; i--)
        FSDP_TRY(make_unit(net, i, err));
    const fsdp_unit_opts opts = opts_of(net, &net->c->units[CASE_ROOT_UNIT]);
    FSDP_TRY(fsdp_root_create(net->toy.model, &opts, &net->toy.root, err));
    net->units[CASE_ROOT_UNIT] = fsdp_root_unit(net->toy.root);
    return fsdp_root_init_uniform(net->toy.root, net->c->seed, err);
}

static bool wants_module(void *user, const fsdp_wrap_module *module, fsdp_wrap_unit_opts *opts)
{
    const training_case *c = user;
    for (int i = CASE_ROOT_UNIT + 1; i < c->unit_count; i++)
        if (strcmp(c->units[i].name, module->name) == 0) {
            *opts = c->units[i].wrap;
            return true;
        }
    return false;
}

static fsdp_status wrap(random_net *net, fsdp_error *err)
{
    const training_case *c = net->c;
    const char *names[CASE_UNITS];
    fsdp_wrap_opts opts = {0};
    opts.mesh = net->toy.other_mesh ? net->toy.other_mesh : net->toy.mesh;
    opts.unit = c->units[CASE_ROOT_UNIT].wrap;
    opts.use_orig_params = c->uses_orig;
    opts.unlimited_gathers = c->is_unlimited;
    opts.policy = (fsdp_wrap_policy){
        .kind = FSDP_POLICY_CUSTOM, .context = (void *)(uintptr_t)c, .wants = wants_module};
    for (int i = 1; i < c->unit_count; i++)
        names[i - 1] = c->units[i].name;
    if (c->wraps_by_name)
        opts.policy = (fsdp_wrap_policy){
            .kind = FSDP_POLICY_NAMES, .names = names, .name_count = (size_t)c->unit_count - 1};
    FSDP_TRY(fsdp_wrap_create(net->toy.model, &opts, &net->toy.wrap, err));
    net->toy.root = fsdp_wrap_root(net->toy.wrap);
    net->units[CASE_ROOT_UNIT] = fsdp_root_unit(net->toy.root);
    for (int i = 1; i < c->unit_count; i++)
        net->units[i] = fsdp_wrap_unit(net->toy.wrap, c->units[i].name);
    if (c->hook)
        FSDP_TRY(fsdp_wrap_register_comm_hook(net->toy.wrap, c->hook, NULL, err));
    return fsdp_root_init_uniform(net->toy.root, c->seed, err);
}

/* --- optimizer ---------------------------------------------------------------------------------- */

/* The second group: every third parameter, across flat ones. */
static bool is_third(void *context, const fsdp_param *param)
{
    const random_net *net = context;
    for (int i = 0; i < net->c->param_count; i += 3)
        if (net->params[i] == param)
            return true;
    return false;
}

/* A net that loads begins with other hyper-parameters: the checkpoint has to bring each of them. */
static fsdp_status make_optim(random_net *net, fsdp_error *err)
{
    const training_case *c = net->c;
    const double by = net->is_to_load ? 0.5 : 1;
    const fsdp_optim_group groups[] = {
        {.match = is_third, .context = net, .lr = 0.02 * by, .weight_decay = 0.03 * by},
        {.lr = 0.01 * by, .weight_decay = 0.01 * by}};
    fsdp_adamw_opts adamw = {.lr = 0.01 * by, .weight_decay = 0.01 * by};
    fsdp_sgd_opts sgd = {.lr = 0.05 * by, .weight_decay = 0.01 * by};
    adamw.groups = sgd.groups = c->has_groups ? groups : NULL;
    adamw.group_count = sgd.group_count = c->has_groups ? 2 : 0;
    if (c->has_own_hypers || net->is_to_load) {
        adamw.beta1 = 0.8 * by;
        adamw.beta2 = 0.95 * by;
        adamw.eps = 1e-6 * by;
    }
    adamw.maximize = sgd.maximize = c->maximizes != net->is_to_load;
    sgd.momentum = c->momentum * by;
    sgd.nesterov = c->momentum > 0 && c->is_nesterov != net->is_to_load;
    sgd.dampening = c->momentum > 0 && !sgd.nesterov ? 0.25 * by : 0;
    adamw.step_in_param_dtype = sgd.step_in_param_dtype = !c->has_master;
    if (c->is_adamw)
        return fsdp_adamw_create(net->toy.root, &adamw, &net->toy.optim, err);
    return fsdp_sgd_create(net->toy.root, &sgd, &net->toy.optim, err);
}

fsdp_status net_create(random_net *net, fsdp_world *world, const training_case *c, fsdp_error *err)
{
    net->c = c;
    FSDP_TRY(begin(net, world, err));
    FSDP_TRY(declare(net, err));
    FSDP_TRY(c->is_flat ? wrap(net, err) : make_units(net, err));
    float *stat = fsdp_param_shard(fsdp_model_find(net->toy.model, "stat"), NULL);
    for (int i = 0; i < 5; i++)
        stat[i] = (float)i + 0.5f;
    return make_optim(net, err);
}

/* --- unit settings ------------------------------------------------------------------------------ */

static fsdp_status tune_prefetch(random_net *net, int i, fsdp_error *err)
{
    const case_unit *unit = &net->c->units[i];
    fsdp_unit *ahead[2][CASE_AHEAD];
    for (int d = 0; d < 2; d++)
        for (int k = 0; k < unit->ahead_count[d]; k++)
            ahead[d][k] = net->units[unit->ahead[d][k]];
    FSDP_TRY(fsdp_unit_set_prefetch(net->units[i], FSDP_HOOK_PRE_FORWARD, ahead[0],
                                    (size_t)unit->ahead_count[0], err));
    return fsdp_unit_set_prefetch(net->units[i], FSDP_HOOK_PRE_BACKWARD, ahead[1],
                                  (size_t)unit->ahead_count[1], err);
}

static fsdp_status tune_unit_of(random_net *net, int i, fsdp_error *err)
{
    const case_unit *unit = &net->c->units[i];
    fsdp_unit *u = net->units[i];
    FSDP_TRY(
        fsdp_unit_set(u, FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, unit->forces_sum, false, err));
    FSDP_TRY(
        fsdp_unit_set(u, FSDP_UNIT_REDUCE_SCATTER_UNUSED_PARAMS, unit->takes_unused, false, err));
    FSDP_TRY(fsdp_unit_set(u, FSDP_UNIT_KEEP_UNSHARDED_STORAGE, unit->keeps_storage, false, err));
    FSDP_TRY(fsdp_unit_set(u, FSDP_UNIT_UNSHARD_ASYNC_OP, unit->gathers_async, false, err));
    FSDP_TRY(fsdp_unit_set(u, FSDP_UNIT_UNSHARD_IN_BACKWARD, !unit->stays_sharded_in_backward,
                           false, err));
    FSDP_TRY(fsdp_unit_set(u, FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP, unit->has_separate_comm,
                           false, err));
    if (unit->input_buffers)
        FSDP_TRY(fsdp_unit_set(u, FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS, unit->input_buffers,
                               false, err));
    return tune_prefetch(net, i, err);
}

fsdp_status net_tune(random_net *net, fsdp_error *err)
{
    const training_case *c = net->c;
    for (int i = 0; i < c->unit_count; i++) {
        if (c->units[i].divide > 0)
            FSDP_TRY(fsdp_unit_set_gradient_divide_factor(net->units[i], c->units[i].divide, err));
        if (!c->is_flat)
            FSDP_TRY(tune_unit_of(net, i, err));
    }
    if (!c->is_finalized_by_hand)
        return FSDP_OK;
    return fsdp_root_set_manual_backward_finalization(net->toy.root, true, err);
}

fsdp_status net_choose_pools(random_net *net, net_pools pools, random_dice *dice, fsdp_error *err)
{
    for (int i = 0; i < net->c->unit_count && !net->c->hook; i++) {
        bool on = pools == POOLS_MIXED ? dice_hits(dice, 50) : pools == POOLS_ON;
        if (pools == POOLS_MIXED && dice_hits(dice, 50))
            continue;
        FSDP_TRY(fsdp_unit_set(net->units[i], FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP, on,
                               false, err));
    }
    return FSDP_OK;
}

/* State dicts of a root, and checkpoints of them. See state.h. */
#include "runtime/optim_internal.h"
#include <fsdp/state.h>

#include <string.h>

#include "base/mem.h"
#include <fsdp/text.h>

/* --- names ------------------------------------------------------------------------------------ */

typedef struct state_names {
    const char *model, *optim;
} state_names;

static state_names names_of(const fsdp_state_opts *opts)
{
    return (state_names){.model = opts && opts->model_prefix ? opts->model_prefix : "model.",
                         .optim = opts && opts->optim_prefix ? opts->optim_prefix : "optim."};
}

/* PREFIX + part + "." + what; what may be NULL. */
static fsdp_status spell(fsdp_text *name, const char *prefix, const char *group, const char *part,
                         const char *what, fsdp_error *err)
{
    name->size = 0;
    fsdp_text_addf(name, "%s%s%s", prefix, group, part);
    if (what)
        fsdp_text_addf(name, ".%s", what);
    return name->failed ? fsdp_fail_memory(err, part) : FSDP_OK;
}

/* --- entries ---------------------------------------------------------------------------------- */

typedef struct state_build {
    fsdp_root *root;
    fsdp_optim *optim;
    const fsdp_state_opts *opts;
    state_names names;
    fsdp_sd *sd;
    fsdp_text name;
} state_build;

/* Whole on every rank: buffers, and what units ignored. */
static fsdp_layout whole_layout(const fsdp_root *root)
{
    return (fsdp_layout){.kind = FSDP_LAYOUT_MESH, .mesh = root->unit->opts.mesh};
}

static fsdp_status add_tensor(state_build *build, const fsdp_param *param, fsdp_dtype dtype,
                              void *data, fsdp_error *err)
{
    const fsdp_layout whole = whole_layout(build->root);
    const fsdp_layout *layout = param->mesh ? &param->layout : &whole;
    bool is_empty = param->mesh && fsdp_box_count(&param->shard_box) == 0;
    return fsdp_sd_add_tensor(build->sd, build->name.data, build->name.size, dtype, param->ndim,
                              param->shape, layout, is_empty ? NULL : data, err);
}

static fsdp_status add_aliases(state_build *build, const fsdp_param *param, fsdp_error *err)
{
    fsdp_text target = {0};
    fsdp_status status = spell(&target, build->names.model, "", param->name, NULL, err);
    for (size_t i = 0; i < param->alias_count && status == FSDP_OK; i++) {
        status = spell(&build->name, build->names.model, "", param->aliases[i], NULL, err);
        if (status == FSDP_OK)
            status = fsdp_sd_add_alias(build->sd, build->name.data, build->name.size, target.data,
                                       target.size, err);
    }
    fsdp_text_release(&target);
    return status;
}

static bool is_left_out(const state_build *build, const fsdp_param *param)
{
    if (param->is_buffer)
        return !param->is_persistent;
    return build->opts && build->opts->ignore_frozen && !param->requires_grad;
}

static fsdp_status add_model(state_build *build, bool buffers, fsdp_error *err)
{
    const fsdp_model *model = build->root->model;
    for (size_t i = 0; i < model->count; i++) {
        const fsdp_param *param = model->params[i];
        if (param->is_buffer != buffers || is_left_out(build, param))
            continue;
        FSDP_TRY(spell(&build->name, build->names.model, "", param->name, NULL, err));
        FSDP_TRY(add_tensor(build, param, param->dtype, param->shard, err));
        FSDP_TRY(add_aliases(build, param, err));
    }
    return FSDP_OK;
}

/* --- the optimizer ---------------------------------------------------------------------------- */

static fsdp_status add_step(state_build *build, fsdp_optim_state *state, fsdp_error *err)
{
    const fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = state->param->mesh};
    FSDP_TRY(spell(&build->name, build->names.optim, "state.", state->param->name, "step", err));
    return fsdp_sd_add_tensor(build->sd, build->name.data, build->name.size, FSDP_F32, 0, NULL,
                              &layout, &state->step, err);
}

static fsdp_status add_state(state_build *build, fsdp_optim_state *state, fsdp_error *err)
{
    const fsdp_param *param = state->param;
    FSDP_TRY(add_step(build, state, err));
    for (int m = 0; m < FSDP_MOMENTS; m++) {
        const char *name = fsdp_optim_moment_name(build->optim, m);
        if (!name)
            continue;
        FSDP_TRY(spell(&build->name, build->names.optim, "state.", param->name, name, err));
        FSDP_TRY(add_tensor(build, param, state->moment_dtype, state->moments[m], err));
    }
    if (!state->master)
        return FSDP_OK;
    FSDP_TRY(spell(&build->name, build->names.optim, "state.", param->name, "master", err));
    return add_tensor(build, param, FSDP_F32, state->master, err);
}

/* Hyper-parameters of a group: name and place. */
typedef struct hyper {
    const char *name;
    double *value; /* NULL: a flag */
    bool *flag;
} hyper;

enum { HYPERS = 7 };

static size_t list_hypers(fsdp_optim *optim, size_t group, hyper *hypers)
{
    fsdp_optim_params *params = &optim->groups[group];
    size_t n = 0;
    hypers[n++] = (hyper){.name = "lr", .value = &params->lr};
    hypers[n++] = (hyper){.name = "weight_decay", .value = &params->weight_decay};
    if (optim->kind == FSDP_OPTIM_ADAMW) {
        hypers[n++] = (hyper){.name = "beta1", .value = &optim->adamw.beta1};
        hypers[n++] = (hyper){.name = "beta2", .value = &optim->adamw.beta2};
        hypers[n++] = (hyper){.name = "eps", .value = &optim->adamw.eps};
        hypers[n++] = (hyper){.name = "maximize", .flag = &optim->adamw.maximize};
    } else {
        hypers[n++] = (hyper){.name = "momentum", .value = &optim->sgd.momentum};
        hypers[n++] = (hyper){.name = "dampening", .value = &optim->sgd.dampening};
        hypers[n++] = (hyper){.name = "nesterov", .flag = &optim->sgd.nesterov};
        hypers[n++] = (hyper){.name = "maximize", .flag = &optim->sgd.maximize};
    }
    return n;
}

static fsdp_status add_hypers(state_build *build, const fsdp_optim_state *state, fsdp_error *err)
{
    hyper hypers[HYPERS];
    size_t n = list_hypers(build->optim, state->group, hypers);
    for (size_t i = 0; i < n; i++) {
        fsdp_value value = {.kind = FSDP_VALUE_BOOL};
        if (hypers[i].value)
            value = (fsdp_value){.kind = FSDP_VALUE_F64, .as.f64 = *hypers[i].value};
        else
            value.as.boolean = *hypers[i].flag;
        FSDP_TRY(spell(&build->name, build->names.optim, "param_groups.", state->param->name,
                       hypers[i].name, err));
        FSDP_TRY(fsdp_sd_add_value(build->sd, build->name.data, build->name.size, &value, err));
    }
    return FSDP_OK;
}

static fsdp_status add_optim(state_build *build, fsdp_error *err)
{
    for (size_t i = 0; i < build->optim->count; i++)
        FSDP_TRY(add_state(build, &build->optim->states[i], err));
    for (size_t i = 0; i < build->optim->count; i++)
        FSDP_TRY(add_hypers(build, &build->optim->states[i], err));
    return FSDP_OK;
}

/* --- state dicts ------------------------------------------------------------------------------ */

static fsdp_status add_all(state_build *build, fsdp_error *err)
{
    const fsdp_state_opts *opts = build->opts;
    if (!opts || !opts->no_model) {
        FSDP_TRY(add_model(build, false, err));
        FSDP_TRY(add_model(build, true, err));
    }
    return build->optim && (!opts || !opts->no_optim) ? add_optim(build, err) : FSDP_OK;
}

static fsdp_status check_idle(fsdp_root *root, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the state of a root is taken between steps");
    return fsdp_context_sync(root->context, err);
}

fsdp_status fsdp_root_state(fsdp_root *root, fsdp_optim *optim, const fsdp_state_opts *opts,
                            fsdp_sd **sd_out, fsdp_error *err)
{
    state_build build = {.root = root, .optim = optim, .opts = opts, .names = names_of(opts)};
    FSDP_TRY(check_idle(root, err));
    FSDP_TRY(fsdp_sd_create(&build.sd, err));
    fsdp_status status = add_all(&build, err);
    fsdp_text_release(&build.name);
    if (status == FSDP_OK)
        *sd_out = build.sd;
    else
        fsdp_sd_free(build.sd);
    return status;
}

/* One hyper-parameter of one parameter's group; of a group's parameters, the first one's counts. */
static void take_hyper(const hyper *to, const fsdp_value *value)
{
    if (to->value && value->kind == FSDP_VALUE_F64)
        *to->value = value->as.f64;
    else if (to->flag && value->kind == FSDP_VALUE_BOOL)
        *to->flag = value->as.boolean;
}

static fsdp_status take_hypers(fsdp_optim *optim, const fsdp_optim_state *state,
                               const state_names *names, const fsdp_sd *sd, fsdp_error *err)
{
    hyper hypers[HYPERS];
    size_t n = list_hypers(optim, state->group, hypers);
    fsdp_text name = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < n && status == FSDP_OK; i++) {
        status =
            spell(&name, names->optim, "param_groups.", state->param->name, hypers[i].name, err);
        int64_t at = status == FSDP_OK ? fsdp_sd_find(sd, name.data, name.size) : -1;
        if (at >= 0)
            take_hyper(&hypers[i], &fsdp_sd_at(sd, (size_t)at)->value);
    }
    fsdp_text_release(&name);
    return status;
}

fsdp_status fsdp_root_take_state(fsdp_root *root, fsdp_optim *optim, const fsdp_state_opts *opts,
                                 const fsdp_sd *sd, fsdp_error *err)
{
    const state_names names = names_of(opts);
    FSDP_TRY(check_idle(root, err));
    if (!optim)
        return FSDP_OK;
    for (size_t i = optim->count; i-- > 0;)
        FSDP_TRY(take_hypers(optim, &optim->states[i], &names, sd, err));
    if (opts && opts->no_optim)
        fsdp_optim_refresh_masters(optim);
    return FSDP_OK;
}

/* --- checkpoints ------------------------------------------------------------------------------ */

fsdp_status fsdp_root_save(fsdp_root *root, fsdp_optim *optim, const char *dir, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    fsdp_sd *sd = NULL;
    fsdp_status status = fsdp_root_state(root, optim, NULL, &sd, err);
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_sd_save(sd, ctl, dir, NULL, err);
    fsdp_sd_free(sd);
    return status;
}

fsdp_status fsdp_root_load(fsdp_root *root, fsdp_optim *optim, const char *path, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    const fsdp_load_opts without = {.exclude = "^optim\\."};
    fsdp_sd *sd = NULL;
    fsdp_status status = fsdp_root_state(root, optim, NULL, &sd, err);
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_sd_load(sd, ctl, path, optim ? NULL : &without, err);
    if (status == FSDP_OK)
        status = fsdp_root_take_state(root, optim, NULL, sd, err);
    fsdp_sd_free(sd);
    return status;
}

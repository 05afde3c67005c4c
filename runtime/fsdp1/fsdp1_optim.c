/*
 * The FSDP1 face: optimizers. State is kept per flat parameter; with use_orig_params a flat parameter's shard
 * is stepped run by run, each with the hyper-parameters of the group that the declared parameter is in.
 */
#include "runtime/fsdp1/fsdp1_internal.h"

#include <string.h>

#include "base/mem.h"

/* --- runs ------------------------------------------------------------------------------------- */

/* Which group steps a declared parameter. */
static bool find_group(const fsdp_optim_group *groups, size_t n, const fsdp_param *param,
                       size_t *group_out)
{
    for (*group_out = 0; *group_out < n; ++*group_out)
        if (!groups[*group_out].match || groups[*group_out].match(groups[*group_out].user, param))
            return true;
    return false;
}

/* One run per declared parameter that is stepped, in the order of the flat one; those that this rank has
 * nothing of are empty, so that all ranks count steps alike. */
static fsdp_status make_runs(const fsdp_v1_flat *flat, const fsdp_optim_group *groups, size_t n,
                             fsdp_optim_state *state, fsdp_error *err)
{
    state->runs = fsdp_alloc(flat->view_count, sizeof *state->runs);
    if (!state->runs)
        return fsdp_fail_memory(err, flat->param->name);
    for (size_t i = 0; i < flat->view_count; i++) {
        const fsdp_param *param = flat->views[i];
        const fsdp_flat_run run = fsdp_param_flat_run(param);
        fsdp_optim_run *own = &state->runs[state->run_count];
        if (!param->requires_grad || !find_group(groups, n, param, &own->group))
            continue;
        own->view = param;
        own->first = run.at;
        own->count = run.count;
        state->run_count++;
    }
    return FSDP_OK;
}

static fsdp_status make_all_runs(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_optim_group *groups,
                                 size_t n, fsdp_error *err)
{
    for (size_t i = 0; i < optim->count; i++)
        for (size_t f = 0; f < v1->flat_count; f++)
            if (v1->flats[f].param == optim->states[i].param)
                FSDP_TRY(make_runs(&v1->flats[f], groups, n, &optim->states[i], err));
    return FSDP_OK;
}

/* --- creating --------------------------------------------------------------------------------- */

/* Groups as the caller gave them, but every flat parameter has a state: runs say which group steps what. */
static fsdp_status open_groups(const fsdp_optim_group *groups, size_t n,
                               fsdp_optim_group **open_out, fsdp_error *err)
{
    *open_out = fsdp_alloc(n, sizeof **open_out);
    if (!*open_out)
        return fsdp_fail_memory(err, "an optimizer");
    for (size_t i = 0; i < n; i++) {
        (*open_out)[i] = groups[i];
        (*open_out)[i].match = NULL;
    }
    return FSDP_OK;
}

static fsdp_status finish(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_optim_group *groups, size_t n,
                          fsdp_optim **optim_out, fsdp_error *err)
{
    fsdp_status status = make_all_runs(v1, optim, groups, n, err);
    if (status == FSDP_OK)
        *optim_out = optim;
    else
        fsdp_optim_free(optim);
    return status;
}

fsdp_status fsdp_v1_adamw_create(fsdp_v1 *v1, const fsdp_adamw_opts *opts, fsdp_optim **optim_out,
                                 fsdp_error *err)
{
    const fsdp_optim_group all = {.lr = opts->lr, .weight_decay = opts->weight_decay};
    const fsdp_optim_group *groups = opts->groups ? opts->groups : &all;
    size_t n = opts->groups ? opts->group_count : 1;
    fsdp_optim_group *open;
    fsdp_optim *optim;
    if (!v1->use_orig_params)
        return fsdp_adamw_create(v1->root, opts, optim_out, err);
    FSDP_TRY(open_groups(groups, n, &open, err));
    fsdp_adamw_opts inner = *opts;
    inner.groups = open;
    inner.group_count = n;
    fsdp_status status = fsdp_adamw_create(v1->root, &inner, &optim, err);
    fsdp_free(open);
    return status == FSDP_OK ? finish(v1, optim, groups, n, optim_out, err) : status;
}

fsdp_status fsdp_v1_sgd_create(fsdp_v1 *v1, const fsdp_sgd_opts *opts, fsdp_optim **optim_out,
                               fsdp_error *err)
{
    const fsdp_optim_group all = {.lr = opts->lr, .weight_decay = opts->weight_decay};
    const fsdp_optim_group *groups = opts->groups ? opts->groups : &all;
    size_t n = opts->groups ? opts->group_count : 1;
    fsdp_optim_group *open;
    fsdp_optim *optim;
    if (!v1->use_orig_params)
        return fsdp_sgd_create(v1->root, opts, optim_out, err);
    FSDP_TRY(open_groups(groups, n, &open, err));
    fsdp_sgd_opts inner = *opts;
    inner.groups = open;
    inner.group_count = n;
    fsdp_status status = fsdp_sgd_create(v1->root, &inner, &optim, err);
    fsdp_free(open);
    return status == FSDP_OK ? finish(v1, optim, groups, n, optim_out, err) : status;
}

/* --- asking ----------------------------------------------------------------------------------- */

size_t fsdp_v1_slots(const fsdp_optim *optim, const fsdp_optim_state *state,
                     fsdp_v1_slot *slots_out)
{
    size_t n = 0;
    for (int m = 0; m < FSDP_MOMENTS; m++)
        if (fsdp_optim_moment_name(optim, m))
            slots_out[n++] = (fsdp_v1_slot){.name = fsdp_optim_moment_name(optim, m),
                                            .own = state->moments[m],
                                            .dtype = state->moment_dtype};
    if (state->master)
        slots_out[n++] = (fsdp_v1_slot){.name = "master", .own = state->master, .dtype = FSDP_F32};
    return n;
}

fsdp_optim_state *fsdp_v1_state_of(const fsdp_optim *optim, const fsdp_param *flat)
{
    for (size_t i = 0; i < optim->count; i++)
        if (optim->states[i].param == flat)
            return &optim->states[i];
    return NULL;
}

bool fsdp_v1_group_of(const fsdp_optim *optim, const fsdp_param *param, size_t *group_out)
{
    const fsdp_optim_state *state = fsdp_v1_state_of(optim, param->flat);
    if (!state)
        return false;
    *group_out = state->group;
    for (size_t i = 0; i < state->run_count; i++)
        if (state->runs[i].view == param) {
            *group_out = state->runs[i].group;
            return true;
        }
    return !state->runs;
}

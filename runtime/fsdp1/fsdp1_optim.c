/*
 * The FSDP1 face: optimizers. State is kept per flat parameter; with use_orig_params a flat parameter's shard
 * is stepped run by run, each with the hyper-parameters of the group that the declared parameter is in.
 */
#include "runtime/fsdp1/fsdp1_internal.h"

#include "base/core/mem.h"

/* --- runs ------------------------------------------------------------------------------------- */

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
        if (!param->requires_grad || !fsdp_optim_find_group(groups, n, param, &own->group))
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

/* Groups as the caller gave them; and open to every flat parameter, which all have a state: runs say which
 * group steps what. */
typedef struct run_groups {
    fsdp_optim_group all; /* in place of none */
    const fsdp_optim_group *given;
    fsdp_optim_group *open;
    size_t count;
} run_groups;

static fsdp_status open_groups(run_groups *groups, const fsdp_optim_group *given, size_t count,
                               fsdp_error *err)
{
    groups->given = given ? given : &groups->all;
    groups->count = given ? count : 1;
    groups->open = fsdp_alloc(groups->count, sizeof *groups->open);
    if (!groups->open)
        return fsdp_fail_memory(err, "an optimizer");
    for (size_t i = 0; i < groups->count; i++) {
        groups->open[i] = groups->given[i];
        groups->open[i].match = NULL;
    }
    return FSDP_OK;
}

/* status: of making the optimizer with the open groups. */
static fsdp_status close_groups(fsdp_v1 *v1, run_groups *groups, fsdp_status status,
                                fsdp_optim *optim, fsdp_optim **optim_out, fsdp_error *err)
{
    fsdp_free(groups->open);
    if (status == FSDP_OK)
        status = make_all_runs(v1, optim, groups->given, groups->count, err);
    if (status == FSDP_OK)
        *optim_out = optim;
    else
        fsdp_optim_free(optim);
    return status;
}

fsdp_status fsdp_v1_adamw_create(fsdp_v1 *v1, const fsdp_adamw_opts *opts, fsdp_optim **optim_out,
                                 fsdp_error *err)
{
    run_groups groups = {.all = {.lr = opts->lr, .weight_decay = opts->weight_decay}};
    fsdp_adamw_opts inner = *opts;
    fsdp_optim *optim = NULL;
    if (!v1->use_orig_params)
        return fsdp_adamw_create(v1->root, opts, optim_out, err);
    FSDP_TRY(open_groups(&groups, opts->groups, opts->group_count, err));
    inner.groups = groups.open;
    inner.group_count = groups.count;
    fsdp_status status = fsdp_adamw_create(v1->root, &inner, &optim, err);
    return close_groups(v1, &groups, status, optim, optim_out, err);
}

fsdp_status fsdp_v1_sgd_create(fsdp_v1 *v1, const fsdp_sgd_opts *opts, fsdp_optim **optim_out,
                               fsdp_error *err)
{
    run_groups groups = {.all = {.lr = opts->lr, .weight_decay = opts->weight_decay}};
    fsdp_sgd_opts inner = *opts;
    fsdp_optim *optim = NULL;
    if (!v1->use_orig_params)
        return fsdp_sgd_create(v1->root, opts, optim_out, err);
    FSDP_TRY(open_groups(&groups, opts->groups, opts->group_count, err));
    inner.groups = groups.open;
    inner.group_count = groups.count;
    fsdp_status status = fsdp_sgd_create(v1->root, &inner, &optim, err);
    return close_groups(v1, &groups, status, optim, optim_out, err);
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

/* The FSDP1 face: state dicts of optimizers, with the names and shapes of declared parameters. */
#include "runtime/fsdp1/fsdp1_internal.h"

#include <math.h>
#include <string.h>

#include "base/core/mem.h"

/* --- tensors ---------------------------------------------------------------------------------- */

/* state.NAME.step of every parameter that is stepped: live; NULL: copies. */
static fsdp_status add_steps(fsdp_v1 *v1, const fsdp_v1_piece *piece, float *live,
                             const fsdp_v1_naming *naming, fsdp_sd *sd, fsdp_text *name,
                             fsdp_error *err)
{
    const fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = v1->mesh};
    for (size_t i = 0; i < piece->flat->view_count; i++) {
        if (!fsdp_v1_piece_has(piece, piece->flat->views[i]))
            continue;
        FSDP_TRY(fsdp_v1_spell(name, naming, piece->flat->views[i]->name, err));
        FSDP_TRY(
            fsdp_sd_add_tensor(sd, name->data, name->size, FSDP_F32, 0, NULL, &layout, live, err));
    }
    return FSDP_OK;
}

static fsdp_status fill_steps(const fsdp_v1_piece *piece, float step, const fsdp_v1_naming *naming,
                              fsdp_sd *sd, fsdp_text *name, fsdp_error *err)
{
    for (size_t i = 0; i < piece->flat->view_count; i++) {
        if (!fsdp_v1_piece_has(piece, piece->flat->views[i]))
            continue;
        FSDP_TRY(fsdp_v1_spell(name, naming, piece->flat->views[i]->name, err));
        memcpy(fsdp_v1_find(sd, name)->data, &step, sizeof step);
    }
    return FSDP_OK;
}

/* One way over all tensors of the state: they are declared, or filled. */
typedef struct optim_walk {
    fsdp_v1 *v1;
    fsdp_optim *optim;
    fsdp_sd *sd;
    const fsdp_v1_state_opts *opts;
    bool fills, keeps;
    bool loads; /* steps are copies, NaN until they are loaded; tensors are live */
    fsdp_text prefix, suffix, name;
} optim_walk;

static fsdp_status visit_slot(optim_walk *walk, const fsdp_v1_flat *flat, const fsdp_v1_slot *slot,
                              fsdp_error *err)
{
    const fsdp_v1_piece piece = {
        .flat = flat, .own = slot->own, .dtype = slot->dtype, .optim = walk->optim};
    walk->suffix.size = 0;
    fsdp_text_addf(&walk->suffix, ".%s", slot->name);
    if (walk->suffix.failed)
        return fsdp_fail_memory(err, flat->param->name);
    const fsdp_v1_naming naming = {.prefix = walk->prefix.data, .suffix = walk->suffix.data};
    if (walk->fills)
        return fsdp_v1_fill_runs(walk->sd, &piece, &naming, walk->opts, walk->keeps, err);
    return fsdp_v1_add_runs(walk->v1, walk->sd, &piece, &naming, walk->opts, err);
}

static fsdp_status visit_steps(optim_walk *walk, const fsdp_v1_flat *flat, fsdp_optim_state *state,
                               fsdp_error *err)
{
    const fsdp_v1_piece piece = {.flat = flat, .optim = walk->optim};
    const fsdp_v1_naming naming = {.prefix = walk->prefix.data, .suffix = ".step"};
    bool is_live = fsdp_v1_is_live(walk->opts) && !walk->loads;
    if (!walk->fills)
        return add_steps(walk->v1, &piece, is_live ? &state->step : NULL, &naming, walk->sd,
                         &walk->name, err);
    if (is_live || !walk->keeps)
        return FSDP_OK;
    return fill_steps(&piece, walk->loads ? NAN : state->step, &naming, walk->sd, &walk->name, err);
}

static fsdp_status visit_all(optim_walk *walk, fsdp_error *err)
{
    for (size_t i = 0; i < walk->v1->flat_count; i++) {
        const fsdp_v1_flat *flat = &walk->v1->flats[i];
        fsdp_optim_state *state = flat->param ? fsdp_v1_state_of(walk->optim, flat->param) : NULL;
        fsdp_v1_slot slots[FSDP_V1_SLOTS];
        if (!state)
            continue;
        FSDP_TRY(visit_steps(walk, flat, state, err));
        size_t n = fsdp_v1_slots(walk->optim, state, slots);
        for (size_t s = 0; s < n; s++)
            FSDP_TRY(visit_slot(walk, flat, &slots[s], err));
    }
    return FSDP_OK;
}

static fsdp_status run_walk(optim_walk *walk, fsdp_error *err)
{
    const char *prefix = walk->opts->prefix ? walk->opts->prefix : "";
    fsdp_text_addf(&walk->prefix, "%sstate.", prefix);
    fsdp_status status =
        walk->prefix.failed ? fsdp_fail_memory(err, "a state dict") : visit_all(walk, err);
    fsdp_text_release(&walk->prefix);
    fsdp_text_release(&walk->suffix);
    fsdp_text_release(&walk->name);
    return status;
}

/* --- param_groups ----------------------------------------------------------------------------- */

static bool is_in_group(const fsdp_optim *optim, const fsdp_param *param, size_t group)
{
    size_t own;
    return fsdp_v1_group_of(optim, param, &own) && own == group;
}

static fsdp_status list_names(const fsdp_v1 *v1, const fsdp_optim *optim, size_t group,
                              fsdp_value *names, fsdp_error *err)
{
    const fsdp_model *model = v1->model;
    size_t count = 0, at = 0;
    for (size_t i = 0; i < model->count; i++)
        count += is_in_group(optim, model->params[i], group);
    FSDP_TRY(fsdp_value_set_items(names, FSDP_VALUE_LIST, count, err));
    for (size_t i = 0; i < model->count; i++) {
        const char *name = model->params[i]->name;
        if (is_in_group(optim, model->params[i], group))
            FSDP_TRY(fsdp_state_put_text(name, &names->as.list.items[at++], err));
    }
    return FSDP_OK;
}

static fsdp_status fill_groups(const fsdp_v1 *v1, fsdp_optim *optim, fsdp_value *groups,
                               fsdp_error *err)
{
    FSDP_TRY(fsdp_value_set_items(groups, FSDP_VALUE_LIST, optim->group_count, err));
    for (size_t g = 0; g < optim->group_count; g++) {
        const fsdp_v1_hypers hypers = fsdp_v1_hypers_get(optim, g);
        fsdp_value names = {0};
        fsdp_status status = list_names(v1, optim, g, &names, err);
        if (status == FSDP_OK)
            status =
                fsdp_v1_hypers_to_value(optim, &hypers, &names, &groups->as.list.items[g], err);
        fsdp_value_release(&names);
        FSDP_TRY(status);
    }
    return FSDP_OK;
}

static fsdp_status add_groups(const fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts,
                              fsdp_sd *sd, fsdp_error *err)
{
    fsdp_value groups = {0};
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%sparam_groups", opts->prefix ? opts->prefix : "");
    fsdp_status status =
        name.failed ? fsdp_fail_memory(err, "a state dict") : fill_groups(v1, optim, &groups, err);
    if (status == FSDP_OK)
        status = fsdp_sd_add_value(sd, name.data, name.size, &groups, err);
    fsdp_value_release(&groups);
    fsdp_text_release(&name);
    return status;
}

/* --- live state -------------------------------------------------------------------------------- */

fsdp_status fsdp_v1_add_optim(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts,
                              fsdp_sd *sd, fsdp_error *err)
{
    optim_walk add = {.v1 = v1, .optim = optim, .sd = sd, .opts = opts};
    FSDP_TRY(run_walk(&add, err));
    return fsdp_v1_add_flat_hypers(v1, optim, opts->prefix, sd, err);
}

fsdp_status fsdp_v1_add_optim_to_load(fsdp_v1 *v1, fsdp_optim *optim,
                                      const fsdp_v1_state_opts *opts, fsdp_sd *sd, fsdp_error *err)
{
    optim_walk add = {.v1 = v1, .optim = optim, .sd = sd, .opts = opts, .loads = true};
    FSDP_TRY(run_walk(&add, err));
    return fsdp_v1_add_flat_hypers(v1, optim, opts->prefix, sd, err);
}

fsdp_status fsdp_v1_unset_steps(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts,
                                fsdp_sd *sd, fsdp_error *err)
{
    optim_walk fill = {.v1 = v1, .optim = optim, .sd = sd, .opts = opts, .loads = true};
    fill.fills = fill.keeps = true;
    return run_walk(&fill, err);
}

fsdp_status fsdp_v1_check_step(const char *first, double first_step, const char *name, double step,
                               fsdp_error *err)
{
    if (!first || step == first_step)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' was stepped %g times and '%s' %g times: they lie in one flat parameter",
                     first, first_step, name, step);
}

/* What did not come stays as it is. */
static fsdp_status take_step(const fsdp_v1_piece *piece, const fsdp_v1_naming *naming,
                             const fsdp_sd *sd, fsdp_text *name, float *step, fsdp_error *err)
{
    const char *first = NULL;
    for (size_t i = 0; i < piece->flat->view_count; i++) {
        const fsdp_param *param = piece->flat->views[i];
        float own;
        if (!fsdp_v1_piece_has(piece, param))
            continue;
        FSDP_TRY(fsdp_v1_spell(name, naming, param->name, err));
        memcpy(&own, fsdp_v1_find(sd, name)->data, sizeof own);
        if (isnan(own))
            continue;
        FSDP_TRY(fsdp_v1_check_step(first, *step, param->name, own, err));
        first = param->name;
        *step = own;
    }
    return FSDP_OK;
}

fsdp_status fsdp_v1_take_steps(fsdp_v1 *v1, fsdp_optim *optim, const char *prefix,
                               const fsdp_sd *sd, fsdp_error *err)
{
    fsdp_text begin = {0}, name = {0};
    fsdp_text_addf(&begin, "%sstate.", prefix);
    fsdp_status status = begin.failed ? fsdp_fail_memory(err, "a state dict") : FSDP_OK;
    const fsdp_v1_naming naming = {.prefix = begin.data, .suffix = ".step"};
    for (size_t i = 0; i < v1->flat_count && status == FSDP_OK; i++) {
        const fsdp_v1_piece piece = {.flat = &v1->flats[i], .optim = optim};
        fsdp_param *flat = v1->flats[i].param;
        fsdp_optim_state *state = flat ? fsdp_v1_state_of(optim, flat) : NULL;
        if (state)
            status = take_step(&piece, &naming, sd, &name, &state->step, err);
    }
    fsdp_text_release(&begin);
    fsdp_text_release(&name);
    return status;
}

/* --- the dict --------------------------------------------------------------------------------- */

static fsdp_status make(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts, bool keeps,
                        fsdp_sd *sd, fsdp_error *err)
{
    optim_walk add = {.v1 = v1, .optim = optim, .sd = sd, .opts = opts};
    optim_walk fill = add;
    fill.fills = true;
    fill.keeps = keeps;
    if (keeps) {
        FSDP_TRY(run_walk(&add, err));
        FSDP_TRY(add_groups(v1, optim, opts, sd, err));
    }
    FSDP_TRY(fsdp_sd_allocate(sd, v1->root->world->rank, err));
    return run_walk(&fill, err);
}

fsdp_status fsdp_v1_optim_state_dict(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts,
                                     fsdp_sd **sd_out, fsdp_error *err)
{
    return fsdp_v1_make_dict(v1, optim, "fsdp_v1_optim_state_dict", make, opts, sd_out, err);
}

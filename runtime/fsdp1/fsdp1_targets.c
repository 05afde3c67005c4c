/*
 * The FSDP1 face: what an optimizer was given, parameter by parameter, and what a dict of state has for it.
 */
#include "runtime/fsdp1/fsdp1_to_load.h"

#include <string.h>

#include "base/core/mem.h"

/* --- what the optimizer was given ------------------------------------------------------------- */

static bool make_target(const fsdp_v1_loading *load, const fsdp_v1_flat *flat,
                        const fsdp_param *param, fsdp_v1_target *target_out)
{
    *target_out = (fsdp_v1_target){.param = param, .flat = flat};
    if (!param) {
        const fsdp_optim_state *state = fsdp_v1_state_of(load->optim, flat->param);
        target_out->name = flat->param->name;
        target_out->count = flat->param->rows;
        target_out->group = state ? state->group : 0;
        return state != NULL;
    }
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    target_out->name = param->name;
    target_out->at = run.at;
    target_out->count = run.count;
    return fsdp_v1_group_of(load->optim, param, &target_out->group);
}

/* The flat parameter that one of the optimizer's lies in, or is. */
static const fsdp_v1_flat *flat_of(const fsdp_v1 *v1, const fsdp_param *param)
{
    const fsdp_param *holder = v1->use_orig_params ? param->flat : param;
    for (size_t i = 0; i < v1->flat_count; i++)
        if (v1->flats[i].param && v1->flats[i].param == holder)
            return &v1->flats[i];
    return NULL;
}

/* All of one group, in the order of the model. */
static void list_group(fsdp_v1_loading *load, size_t group)
{
    const fsdp_v1 *v1 = load->v1;
    const fsdp_model *model = v1->use_orig_params ? v1->model : v1->inner;
    for (size_t i = 0; i < model->count; i++) {
        const fsdp_param *param = model->params[i];
        fsdp_v1_target *target = &load->targets[load->count];
        const fsdp_v1_flat *flat = flat_of(v1, param);
        if (flat && make_target(load, flat, v1->use_orig_params ? param : NULL, target))
            load->count += target->group == group;
    }
}

static fsdp_status find_target(fsdp_v1_loading *load, const char *name, fsdp_error *err)
{
    const fsdp_v1 *v1 = load->v1;
    const fsdp_param *param = fsdp_model_find(v1->use_orig_params ? v1->model : v1->inner, name);
    const fsdp_v1_flat *flat = param ? flat_of(v1, param) : NULL;
    fsdp_v1_target *target = &load->targets[load->count];
    if (!flat || !make_target(load, flat, v1->use_orig_params ? param : NULL, target))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the optimizer steps no parameter '%s'%s", name,
                         v1->use_orig_params ? "" : ": without use_orig_params it has flat ones");
    load->count++;
    return FSDP_OK;
}

fsdp_status fsdp_v1_list_targets(fsdp_v1_loading *load, fsdp_error *err)
{
    const fsdp_v1_optim_input *input = load->opts.input;
    size_t most = load->v1->model->count + load->v1->flat_count + (input ? input->count : 0);
    load->targets = fsdp_alloc(most + 1, sizeof *load->targets);
    if (!load->targets)
        return fsdp_fail_memory(err, "the parameters of an optimizer");
    for (size_t g = 0; g < load->optim->group_count && !input; g++)
        list_group(load, g);
    for (size_t i = 0; input && i < input->count; i++)
        FSDP_TRY(find_target(load, input->names[i], err));
    return FSDP_OK;
}

/* state.KEY.WHAT */
fsdp_status fsdp_v1_spell_key(fsdp_v1_loading *load, size_t target, const char *what,
                              fsdp_error *err)
{
    load->name.size = 0;
    if (load->opts.is_named)
        fsdp_text_addf(&load->name, "state.%s.%s", load->targets[target].name, what);
    else
        fsdp_text_addf(&load->name, "state.%zu.%s", target, what);
    return load->name.failed ? fsdp_fail_memory(err, "a state dict") : FSDP_OK;
}

const fsdp_entry *fsdp_v1_find_source(fsdp_v1_loading *load, const fsdp_param *param,
                                      const char *what)
{
    load->name.size = 0;
    fsdp_text_addf(&load->name, "state.%s.%s", param->name, what);
    return load->name.failed ? NULL : fsdp_v1_find(load->sd, &load->name);
}

bool fsdp_v1_is_stepped(const fsdp_v1_loading *load, const fsdp_param *param)
{
    size_t group;
    return fsdp_v1_group_of(load->optim, param, &group);
}

/* --- steps and hyper-parameters of the source ------------------------------------------------- */

fsdp_v1_source *fsdp_v1_source_of(const fsdp_v1_loading *load, const fsdp_v1_flat *flat)
{
    return &load->sources[flat - load->v1->flats];
}

/* PyTorch's SGD counts no steps: where there is a momentum buffer, at least one was made. */
static fsdp_status find_step(fsdp_v1_loading *load, const fsdp_param *param, bool *is_there_out,
                             double *step_out, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_v1_find_source(load, param, "step");
    *is_there_out = true;
    *step_out = 1;
    if (entry && !fsdp_state_number(entry, step_out))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is no number", entry->name);
    if (!entry)
        *is_there_out = load->optim->kind == FSDP_OPTIM_SGD &&
                        fsdp_v1_find_source(load, param, "momentum_buffer");
    return FSDP_OK;
}

/* Parameters of one flat parameter are stepped together. */
static fsdp_status read_step(fsdp_v1_loading *load, const fsdp_v1_flat *flat, double *step_out,
                             fsdp_error *err)
{
    const char *first = NULL;
    *step_out = 0;
    for (size_t i = 0; i < flat->view_count; i++) {
        const fsdp_param *param = flat->views[i];
        bool is_there = false;
        double step;
        if (fsdp_v1_is_stepped(load, param))
            FSDP_TRY(find_step(load, param, &is_there, &step, err));
        if (!is_there)
            continue;
        FSDP_TRY(fsdp_v1_check_step(first, *step_out, param->name, step, err));
        first = param->name;
        *step_out = step;
    }
    return FSDP_OK;
}

static bool lacks_master(fsdp_v1_loading *load, const fsdp_v1_flat *flat)
{
    for (size_t i = 0; i < flat->view_count; i++)
        if (fsdp_v1_is_stepped(load, flat->views[i]) &&
            !fsdp_v1_find_source(load, flat->views[i], "master"))
            return true;
    return false;
}

/* Is one of the target's declared parameters in the list? */
static bool is_listed(const fsdp_v1_target *target, const fsdp_value *params)
{
    for (size_t i = 0; params && params->kind == FSDP_VALUE_LIST && i < params->as.list.count;
         i++) {
        const fsdp_value *name = &params->as.list.items[i];
        if (target->param && fsdp_state_is_text(name, target->param->name))
            return true;
        for (size_t v = 0; !target->param && v < target->flat->view_count; v++)
            if (fsdp_state_is_text(name, target->flat->views[v]->name))
                return true;
    }
    return false;
}

const fsdp_value *fsdp_v1_find_groups(const fsdp_sd *sd)
{
    int64_t at = fsdp_sd_find(sd, "param_groups", strlen("param_groups"));
    const fsdp_entry *entry = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    bool is_list = entry && entry->kind == FSDP_ENTRY_VALUE && entry->value.kind == FSDP_VALUE_LIST;
    return is_list ? &entry->value : NULL;
}

/* A group of the source goes to the live one that has its parameters. */
static void read_hypers(fsdp_v1_loading *load)
{
    const fsdp_value *groups = fsdp_v1_find_groups(load->sd);
    for (size_t g = 0; groups && g < groups->as.list.count; g++) {
        const fsdp_value *dict = &groups->as.list.items[g];
        const fsdp_value *params = fsdp_state_member(dict, "params");
        for (size_t i = 0; i < load->count; i++)
            if (is_listed(&load->targets[i], params)) {
                fsdp_v1_hypers_from_value(load->optim, dict, &load->hypers[load->targets[i].group]);
                break;
            }
    }
}

/* Rank 0 looks at all of its dict before anything is sent. */
static fsdp_status check_whole(fsdp_v1_loading *load, const fsdp_v1_flat *flat, fsdp_error *err)
{
    const fsdp_optim_state *state = fsdp_v1_state_of(load->optim, flat->param);
    fsdp_v1_slot slots[FSDP_V1_SLOTS];
    size_t n = fsdp_v1_slots(load->optim, state, slots);
    for (size_t v = 0; v < flat->view_count; v++)
        for (size_t s = 0; s < n; s++) {
            const fsdp_entry *entry = fsdp_v1_is_stepped(load, flat->views[v])
                                          ? fsdp_v1_find_source(load, flat->views[v], slots[s].name)
                                          : NULL;
            if (entry)
                FSDP_TRY(fsdp_v1_take_whole(flat->views[v], entry, slots[s].dtype, NULL, err));
        }
    return FSDP_OK;
}

bool fsdp_v1_has_state(const fsdp_v1_loading *load, const fsdp_v1_flat *flat)
{
    return flat->param && fsdp_v1_state_of(load->optim, flat->param);
}

fsdp_status fsdp_v1_read_source(fsdp_v1_loading *load, fsdp_error *err)
{
    for (size_t i = 0; i < load->v1->flat_count; i++) {
        const fsdp_v1_flat *flat = &load->v1->flats[i];
        if (!fsdp_v1_has_state(load, flat))
            continue;
        FSDP_TRY(read_step(load, flat, &load->sources[i].step, err));
        load->sources[i].lacks_master = lacks_master(load, flat);
        if (load->scatters)
            FSDP_TRY(check_whole(load, flat, err));
    }
    read_hypers(load);
    return FSDP_OK;
}

/*
 * Puts hyper-parameters into state dicts: per parameter ("param_groups.<name>.lr") or as one list of a dict
 * per group ("param_groups", as Optimizer.state_dict() has it). The inverse is state_groups_take.c.
 */
#include "runtime/state/state_internal.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

/* --- hyper-parameters --------------------------------------------------------------------------- */

size_t fsdp_state_list_hypers(fsdp_optim *optim, size_t group,
                              fsdp_state_hyper hypers_out[FSDP_STATE_HYPERS])
{
    fsdp_optim_params *params = &optim->groups[group];
    fsdp_adamw_opts *adamw = &optim->adamw;
    fsdp_sgd_opts *sgd = &optim->sgd;
    size_t n = 0;
    hypers_out[n++] = (fsdp_state_hyper){"lr", {&params->lr}, NULL, false};
    if (optim->kind == FSDP_OPTIM_ADAMW) {
        hypers_out[n++] = (fsdp_state_hyper){"betas", {&adamw->beta1, &adamw->beta2}, NULL, true};
        hypers_out[n++] = (fsdp_state_hyper){"eps", {&adamw->eps}, NULL, true};
    } else {
        hypers_out[n++] = (fsdp_state_hyper){"momentum", {&sgd->momentum}, NULL, true};
        hypers_out[n++] = (fsdp_state_hyper){"dampening", {&sgd->dampening}, NULL, true};
    }
    hypers_out[n++] = (fsdp_state_hyper){"weight_decay", {&params->weight_decay}, NULL, false};
    if (optim->kind == FSDP_OPTIM_ADAMW) {
        hypers_out[n++] = (fsdp_state_hyper){"maximize", {NULL}, &adamw->maximize, true};
    } else {
        hypers_out[n++] = (fsdp_state_hyper){"nesterov", {NULL}, &sgd->nesterov, true};
        hypers_out[n++] = (fsdp_state_hyper){"maximize", {NULL}, &sgd->maximize, true};
    }
    return n;
}

/* --- putting: values -------------------------------------------------------------------------- */

static fsdp_status hyper_value(const fsdp_state_hyper *from, fsdp_value *value_out, fsdp_error *err)
{
    *value_out = (fsdp_value){0};
    if (from->flag)
        *value_out = fsdp_value_bool(*from->flag);
    else if (!from->numbers[1])
        *value_out = fsdp_value_f64(*from->numbers[0]);
    else
        FSDP_TRY(fsdp_value_set_items(value_out, FSDP_VALUE_LIST, 2, err));
    value_out->is_tuple = value_out->kind == FSDP_VALUE_LIST; /* as PyTorch has betas */
    for (size_t i = 0; value_out->kind == FSDP_VALUE_LIST && i < 2; i++)
        value_out->as.list.items[i] = fsdp_value_f64(*from->numbers[i]);
    return FSDP_OK;
}

fsdp_status fsdp_state_put_text(const char *text, fsdp_value *value_out, fsdp_error *err)
{
    return fsdp_value_set_bytes(value_out, FSDP_VALUE_STRING, text, strlen(text), err);
}

/* --- putting: per parameter ------------------------------------------------------------------- */

static fsdp_status put_hyper(const fsdp_state_naming *naming, const char *name,
                             const fsdp_state_hyper *hyper, fsdp_text *text, fsdp_sd *sd,
                             fsdp_error *err)
{
    fsdp_value value;
    FSDP_TRY(fsdp_state_spell(text, naming, name, err));
    FSDP_TRY(hyper_value(hyper, &value, err));
    fsdp_status status = fsdp_sd_add_value(sd, text->data, text->size, &value, err);
    fsdp_value_release(&value);
    return status;
}

static fsdp_status put_hypers(const fsdp_state_scope *scope, const fsdp_state_param *param,
                              fsdp_text *text, fsdp_sd *sd, fsdp_error *err)
{
    fsdp_state_hyper hypers[FSDP_STATE_HYPERS];
    size_t n = fsdp_state_list_hypers(param->optim, param->group, hypers);
    for (size_t i = 0; i < n; i++) {
        const fsdp_state_naming naming = {scope->opts.optim_prefix, "param_groups.",
                                          hypers[i].name};
        FSDP_TRY(put_hyper(&naming, param->names[0], &hypers[i], text, sd, err));
    }
    return FSDP_OK;
}

static fsdp_status put_flattened(const fsdp_state_scope *scope, fsdp_sd *sd, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < scope->count && status == FSDP_OK; i++) {
        const fsdp_state_param *param = &scope->params[i];
        if (param->state && fsdp_state_has(scope, param))
            status = put_hypers(scope, param, &name, sd, err);
    }
    fsdp_text_release(&name);
    return status;
}

/* --- putting: a list of groups ---------------------------------------------------------------- */

static bool is_member(const fsdp_state_scope *scope, const fsdp_state_param *param,
                      const fsdp_optim *optim, size_t group)
{
    return param->optim == optim && param->group == group && fsdp_state_has(scope, param);
}

static fsdp_status put_members(const fsdp_state_scope *scope, const fsdp_optim *optim, size_t group,
                               fsdp_value *list, fsdp_error *err)
{
    size_t count = 0;
    for (size_t i = 0; i < scope->count; i++)
        count += is_member(scope, &scope->params[i], optim, group);
    FSDP_TRY(fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err));
    for (size_t i = 0, at = 0; i < scope->count; i++)
        if (is_member(scope, &scope->params[i], optim, group))
            FSDP_TRY(
                fsdp_state_put_text(scope->params[i].names[0], &list->as.list.items[at++], err));
    return FSDP_OK;
}

static fsdp_status put_group(const fsdp_state_scope *scope, fsdp_optim *optim, size_t group,
                             fsdp_value *dict, fsdp_error *err)
{
    fsdp_state_hyper hypers[FSDP_STATE_HYPERS];
    size_t n = fsdp_state_list_hypers(optim, group, hypers);
    FSDP_TRY(fsdp_value_set_items(dict, FSDP_VALUE_DICT, 2 * (n + 1), err));
    fsdp_value *items = dict->as.list.items;
    for (size_t i = 0; i < n; i++) {
        FSDP_TRY(fsdp_state_put_text(hypers[i].name, &items[2 * i], err));
        FSDP_TRY(hyper_value(&hypers[i], &items[2 * i + 1], err));
    }
    FSDP_TRY(fsdp_state_put_text("params", &items[2 * n], err));
    return put_members(scope, optim, group, &items[2 * n + 1], err);
}

size_t fsdp_state_count_groups(const fsdp_state_scope *scope, const fsdp_optim *until)
{
    size_t count = 0;
    for (size_t i = 0; i < scope->optim_count && scope->optims[i] != until; i++)
        count += scope->optims[i]->group_count;
    return count;
}

static fsdp_status put_groups(const fsdp_state_scope *scope, fsdp_value *list, fsdp_error *err)
{
    FSDP_TRY(
        fsdp_value_set_items(list, FSDP_VALUE_LIST, fsdp_state_count_groups(scope, NULL), err));
    size_t at = 0;
    for (size_t i = 0; i < scope->optim_count; i++)
        for (size_t g = 0; g < scope->optims[i]->group_count; g++)
            FSDP_TRY(put_group(scope, scope->optims[i], g, &list->as.list.items[at++], err));
    return FSDP_OK;
}

static fsdp_status put_nested(const fsdp_state_scope *scope, fsdp_sd *sd, fsdp_error *err)
{
    static const char last[] = "param_groups";
    const char *prefix = scope->opts.optim_prefix;
    size_t size = strlen(prefix);
    const int32_t path[] = {(int32_t)size - 1, sizeof last - 1};
    fsdp_text name = {0};
    fsdp_value list = {0};
    fsdp_text_addf(&name, "%s%s", prefix, last);
    fsdp_status status = name.failed ? fsdp_fail_memory(err, last) : put_groups(scope, &list, err);
    if (status == FSDP_OK)
        status = fsdp_sd_add_value(sd, name.data, name.size, &list, err);
    if (status == FSDP_OK && size > 1 && prefix[size - 1] == '.')
        status = fsdp_sd_set_path(sd, fsdp_sd_count(sd) - 1, path, 2, err);
    fsdp_value_release(&list);
    fsdp_text_release(&name);
    return status;
}

fsdp_status fsdp_state_put_groups(const fsdp_state_scope *scope, fsdp_sd *sd, fsdp_error *err)
{
    return scope->opts.nested_optim ? put_nested(scope, sd, err) : put_flattened(scope, sd, err);
}

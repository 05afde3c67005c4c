/*
 * Takes hyper-parameters from state dicts, in every form: per parameter, as a list of groups, or that list in
 * pieces. All are checked before any is applied; two values for one group are an error. The inverse is
 * state_groups.c.
 */
#include "runtime/state/state_groups.h"

#include <math.h>
#include <string.h>

#include "base/text.h"

/* --- one hyper-parameter ---------------------------------------------------------------------- */

static bool read_numbers(const fsdp_state_hyper *hyper, const fsdp_value *value,
                         double numbers_out[2])
{
    numbers_out[1] = 0;
    if (!hyper->numbers[1])
        return fsdp_state_value_number(value, &numbers_out[0]);
    return value->kind == FSDP_VALUE_LIST && value->as.list.count == 2 &&
           fsdp_state_value_number(&value->as.list.items[0], &numbers_out[0]) &&
           fsdp_state_value_number(&value->as.list.items[1], &numbers_out[1]);
}

/* The numbers that optim.h accepts. */
static fsdp_status check_range(const fsdp_state_hyper *hyper, const double numbers[2],
                               const fsdp_entry *entry, fsdp_error *err)
{
    bool may_be_negative = strcmp(hyper->name, "dampening") == 0;
    for (int i = 0; i < 2; i++)
        if (!isfinite(numbers[i]) || (numbers[i] < 0 && !may_be_negative) ||
            (hyper->numbers[1] && numbers[i] >= 1))
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' in '%s' cannot be %g", hyper->name,
                             entry->name, numbers[i]);
    return FSDP_OK;
}

/* Keeps a value of a hyper-parameter; another value before it is an error. */
static fsdp_status keep(fsdp_state_taken *taken, const fsdp_state_hyper *hyper,
                        const fsdp_entry *entry, const fsdp_value *value, fsdp_error *err)
{
    double numbers[2];
    if (!read_numbers(hyper, value, numbers))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' in '%s' is %s", hyper->name, entry->name,
                         hyper->numbers[1] ? "no list of two numbers" : "no number");
    FSDP_TRY(check_range(hyper, numbers, entry, err));
    if (taken->entry && memcmp(taken->numbers, numbers, sizeof numbers) != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' differs between '%s' and '%s', and both belong to one %s here",
                         hyper->name, taken->entry->name, entry->name,
                         hyper->is_shared ? "optimizer" : "group");
    taken->entry = entry;
    memcpy(taken->numbers, numbers, sizeof numbers);
    return FSDP_OK;
}

/* --- taking: lists ---------------------------------------------------------------------------- */

static fsdp_status note_unexpected(fsdp_state_groups *groups, const char *name, size_t size,
                                   fsdp_error *err)
{
    return fsdp_names_add(groups->unexpected, name, size)
               ? FSDP_OK
               : fsdp_fail_memory(err, "a list of names");
}

static fsdp_status note_unexpected_group(fsdp_state_groups *groups, const fsdp_entry *entry,
                                         size_t position, const fsdp_value *key, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "%s.%zu", entry->name, position);
    if (key && key->kind == FSDP_VALUE_STRING)
        fsdp_text_addf(&text, ".%s", key->as.bytes.data);
    fsdp_status status = text.failed ? fsdp_fail_memory(err, "a list of names")
                                     : note_unexpected(groups, text.data, text.size, err);
    fsdp_text_release(&text);
    return status;
}

/* Passes over a member that the optimizer here lacks. */
static fsdp_status pass_over_member(fsdp_state_groups *groups, const fsdp_entry *entry,
                                    size_t position, const fsdp_state_group *live,
                                    const fsdp_value *key, fsdp_error *err)
{
    if (key->kind == FSDP_VALUE_STRING)
        fsdp_state_judge(groups, &(fsdp_state_unmatched){entry, key->as.bytes.data,
                                                         key->as.bytes.size, key + 1, *live});
    return note_unexpected_group(groups, entry, position, key, err);
}

static fsdp_status take_group(fsdp_state_groups *groups, const fsdp_entry *entry, size_t position,
                              fsdp_error *err)
{
    const fsdp_value *dict = &entry->value.as.list.items[position];
    const fsdp_value *members = fsdp_state_members(dict);
    fsdp_state_group live;
    FSDP_TRY(fsdp_state_find_group(groups, entry, members, &live, err));
    if (members->as.list.count == 0)
        FSDP_TRY(fsdp_state_find_empty_group(groups, entry, &live, err));
    if (!live.optim)
        return note_unexpected_group(groups, entry, position, NULL, err);
    for (size_t i = 0; i + 1 < dict->as.list.count; i += 2) {
        const fsdp_value *key = &dict->as.list.items[i], *value = key + 1;
        fsdp_state_hyper hyper;
        fsdp_state_taken *taken = NULL;
        if (value == members)
            continue;
        if (key->kind == FSDP_VALUE_STRING)
            taken = fsdp_state_find_hyper(groups, &live, key->as.bytes.data, key->as.bytes.size,
                                          &hyper);
        if (taken)
            FSDP_TRY(keep(taken, &hyper, entry, value, err));
        else
            FSDP_TRY(pass_over_member(groups, entry, position, &live, key, err));
    }
    return FSDP_OK;
}

static fsdp_status check_groups(const fsdp_entry *entry, fsdp_error *err)
{
    bool fits = entry->value.kind == FSDP_VALUE_LIST;
    for (size_t i = 0; fits && i < entry->value.as.list.count; i++)
        fits = fsdp_state_members(&entry->value.as.list.items[i]) != NULL;
    if (fits)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is no list of groups, each with a list 'params'",
                     entry->name);
}

static fsdp_status take_list(fsdp_state_groups *groups, const fsdp_entry *entry, fsdp_error *err)
{
    FSDP_TRY(check_groups(entry, err));
    for (size_t i = 0; i < entry->value.as.list.count; i++)
        FSDP_TRY(fsdp_state_note_numbers(groups, fsdp_state_members(&entry->value.as.list.items[i]),
                                         err));
    for (size_t i = 0; i < entry->value.as.list.count; i++)
        FSDP_TRY(take_group(groups, entry, i, err));
    return FSDP_OK;
}

/* --- taking: names ---------------------------------------------------------------------------- */

/* True for "param_groups.<place>.params": PyTorch's checkpoints have the list of groups in pieces. */
static bool is_members(const fsdp_state_key *key, const fsdp_entry *entry)
{
    return !key->param && key->what_size == 6 && memcmp(key->what, "params", 6) == 0 &&
           entry->kind == FSDP_ENTRY_VALUE && entry->value.kind == FSDP_VALUE_LIST;
}

static bool is_piece_of_members(const fsdp_state_key *key)
{
    return !key->param && key->what_size > 6 && memcmp(key->what, "params.", 7) == 0;
}

static fsdp_status take_name(fsdp_state_groups *groups, const fsdp_entry *entry, const char *rest,
                             size_t size, fsdp_error *err)
{
    fsdp_state_key key;
    fsdp_state_group live = {0};
    fsdp_value value = {0};
    fsdp_state_hyper hyper;
    double number;
    if (!fsdp_state_split(groups->scope, rest, size, &key))
        return note_unexpected(groups, entry->name, entry->name_size, err);
    if (is_members(&key, entry) || is_piece_of_members(&key))
        return FSDP_OK;
    if (!key.param)
        FSDP_TRY(fsdp_state_find_place(groups, key.number, &live, err));
    else if (key.param->state)
        live = (fsdp_state_group){.optim = key.param->optim, .group = key.param->group};
    if (!live.optim)
        return note_unexpected(groups, entry->name, entry->name_size, err);
    if (entry->kind == FSDP_ENTRY_VALUE)
        value = entry->value;
    else if (fsdp_state_number(entry, &number))
        value = fsdp_value_f64(number);
    fsdp_state_taken *taken = fsdp_state_find_hyper(groups, &live, key.what, key.what_size, &hyper);
    if (taken)
        return keep(taken, &hyper, entry, &value, err);
    fsdp_state_judge(groups, &(fsdp_state_unmatched){entry, key.what, key.what_size, &value, live});
    return note_unexpected(groups, entry->name, entry->name_size, err);
}

/* --- taking: all ------------------------------------------------------------------------------ */

static const char *behind_groups(const fsdp_state_groups *groups, const fsdp_entry *entry,
                                 size_t *rest_out)
{
    return fsdp_state_behind(entry->name, entry->name_size, groups->scope->opts.optim_prefix,
                             "param_groups", rest_out);
}

/* The rest of a name after "param_groups."; NULL for other names. */
static const char *behind_dot(const fsdp_state_groups *groups, const fsdp_entry *entry,
                              size_t *rest_out)
{
    const char *name = behind_groups(groups, entry, rest_out);
    if (!name || *rest_out < 2 || name[0] != '.')
        return NULL;
    --*rest_out;
    return name + 1;
}

/* Takes lists of members first, because other names use their numbers. */
static fsdp_status take_lists(fsdp_state_groups *groups, fsdp_error *err)
{
    size_t rest;
    for (size_t i = 0; i < fsdp_sd_count(groups->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(groups->sd, i);
        const char *name = behind_dot(groups, entry, &rest);
        fsdp_state_key key;
        if (name && fsdp_state_split(groups->scope, name, rest, &key) && is_members(&key, entry))
            FSDP_TRY(fsdp_state_note_numbers(groups, &entry->value, err));
        if (!name && behind_groups(groups, entry, &rest) && rest == 0)
            FSDP_TRY(take_list(groups, entry, err));
    }
    return FSDP_OK;
}

static fsdp_status take_names(fsdp_state_groups *groups, fsdp_error *err)
{
    size_t rest;
    for (size_t i = 0; i < fsdp_sd_count(groups->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(groups->sd, i);
        const char *name = behind_dot(groups, entry, &rest);
        if (name)
            FSDP_TRY(take_name(groups, entry, name, rest, err));
    }
    return FSDP_OK;
}

/* The first selected parameter of a group; NULL: none is selected. */
static const fsdp_state_param *first_member(const fsdp_state_scope *scope, const fsdp_optim *optim,
                                            size_t group, bool any_group)
{
    for (size_t i = 0; i < scope->count; i++) {
        const fsdp_state_param *param = &scope->params[i];
        if (param->optim == optim && (any_group || param->group == group) &&
            fsdp_state_has(scope, param))
            return param;
    }
    return NULL;
}

static fsdp_status note_missing(fsdp_state_groups *groups, fsdp_optim *optim, size_t group,
                                fsdp_error *err)
{
    fsdp_state_hyper hypers[FSDP_STATE_HYPERS];
    size_t n = fsdp_state_list_hypers(optim, group, hypers);
    for (size_t i = 0; i < n; i++) {
        const fsdp_state_param *param =
            first_member(groups->scope, optim, group, hypers[i].is_shared);
        if (!param || (hypers[i].is_shared && group > 0) ||
            fsdp_state_place_taken(groups, optim, group, i, hypers[i].is_shared)->entry)
            continue;
        fsdp_text name = {0};
        fsdp_text_addf(&name, "%sparam_groups.%s.%s", groups->scope->opts.optim_prefix,
                       param->names[0], hypers[i].name);
        bool added = !name.failed && fsdp_names_add(groups->missing, name.data, name.size);
        fsdp_text_release(&name);
        if (!added)
            return fsdp_fail_memory(err, "a list of names");
    }
    return FSDP_OK;
}

static fsdp_status fill(fsdp_state_groups *groups, fsdp_error *err)
{
    const fsdp_state_scope *scope = groups->scope;
    size_t count = fsdp_state_count_groups(scope, NULL);
    groups->taken = fsdp_alloc(count * FSDP_STATE_HYPERS, sizeof *groups->taken);
    groups->coupled = fsdp_alloc(count, sizeof(fsdp_entry *));
    if (!groups->taken || !groups->coupled)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    FSDP_TRY(fsdp_state_order_params(groups, err));
    FSDP_TRY(take_lists(groups, err));
    FSDP_TRY(take_names(groups, err));
    for (size_t i = 0; i < scope->optim_count; i++)
        for (size_t g = 0; g < scope->optims[i]->group_count; g++)
            FSDP_TRY(note_missing(groups, scope->optims[i], g, err));
    return fsdp_state_judge_groups(groups, err);
}

fsdp_status fsdp_state_take_groups(const fsdp_state_scope *scope, const fsdp_sd *sd,
                                   fsdp_name_list *missing, fsdp_name_list *unexpected,
                                   fsdp_state_groups **groups_out, fsdp_error *err)
{
    fsdp_state_groups *groups = fsdp_alloc(1, sizeof *groups);
    *groups_out = groups;
    if (!groups)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    groups->scope = scope;
    groups->sd = sd;
    groups->missing = missing;
    groups->unexpected = unexpected;
    return fill(groups, err);
}

void fsdp_state_groups_free(fsdp_state_groups *groups)
{
    if (!groups)
        return;
    fsdp_free(groups->taken);
    fsdp_free(groups->coupled);
    fsdp_free(groups->order);
    fsdp_free(groups->numbers);
    fsdp_free(groups);
}

/* --- applying --------------------------------------------------------------------------------- */

static void apply(const fsdp_state_hyper *hyper, const fsdp_state_taken *taken)
{
    if (!taken->entry)
        return;
    if (hyper->flag)
        *hyper->flag = taken->numbers[0] != 0;
    for (int i = 0; i < 2 && hyper->numbers[i]; i++)
        *hyper->numbers[i] = taken->numbers[i];
}

void fsdp_state_apply_groups(const fsdp_state_groups *groups)
{
    const fsdp_state_scope *scope = groups->scope;
    for (size_t i = 0; i < scope->optim_count; i++)
        for (size_t g = 0; g < scope->optims[i]->group_count; g++) {
            fsdp_state_hyper hypers[FSDP_STATE_HYPERS];
            size_t n = fsdp_state_list_hypers(scope->optims[i], g, hypers);
            for (size_t h = 0; h < n; h++)
                apply(&hypers[h],
                      fsdp_state_place_taken(groups, scope->optims[i], g, h, hypers[h].is_shared));
        }
}

/*
 * Matches numbers in a state dict with parameters, and its groups with those of the root's optimizers, whose
 * hyper-parameters it finds by name. Groups are found by their parameters, in any order. See state_groups.h.
 */
#include "runtime/state/state_groups.h"

#include <inttypes.h>
#include <string.h>

#include "base/text.h"

/* --- numbers ---------------------------------------------------------------------------------- */

fsdp_status fsdp_state_order_params(fsdp_state_groups *groups, fsdp_error *err)
{
    const fsdp_state_scope *scope = groups->scope;
    groups->order = fsdp_alloc(scope->count, sizeof(fsdp_state_param *));
    if (!groups->order)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    for (size_t g = 0; scope->optim_count == 1 && g < scope->optims[0]->group_count; g++)
        for (size_t i = 0; i < scope->count; i++)
            if (scope->params[i].state && scope->params[i].group == g)
                groups->order[groups->order_count++] = &scope->params[i];
    return FSDP_OK;
}

/* The parameter that has this number in the dict; NULL: none. */
static fsdp_state_param *find_numbered(const fsdp_state_groups *groups, int64_t number)
{
    size_t at = 0;
    if (!groups->numbers)
        at = (size_t)number;
    else
        while (at < groups->number_count && groups->numbers[at] != number)
            at++;
    return at < groups->order_count ? groups->order[at] : NULL;
}

fsdp_status fsdp_state_note_numbers(fsdp_state_groups *groups, const fsdp_value *members,
                                    fsdp_error *err)
{
    for (size_t i = 0; i < members->as.list.count; i++) {
        if (members->as.list.items[i].kind != FSDP_VALUE_I64)
            continue;
        if (!fsdp_grow(&groups->numbers, &groups->number_room, groups->number_count + 1,
                       sizeof *groups->numbers))
            return fsdp_fail_memory(err, "the groups of an optimizer");
        groups->numbers[groups->number_count++] = members->as.list.items[i].as.i64;
    }
    return FSDP_OK;
}

fsdp_status fsdp_state_find_state(const fsdp_state_match *match, const fsdp_entry *entry,
                                  const fsdp_state_param **param_out, int64_t *at_out,
                                  fsdp_error *err)
{
    const fsdp_state_scope *scope = match->scope;
    const char *prefix = scope->opts.optim_prefix;
    fsdp_state_key key;
    size_t size;
    const char *rest = fsdp_state_behind(entry->name, entry->name_size, prefix, "state.", &size);
    *param_out = NULL;
    if (!rest || !match->groups || !fsdp_state_split(scope, rest, size, &key))
        return FSDP_OK;
    const fsdp_state_param *param =
        key.param ? key.param : find_numbered(match->groups, key.number);
    if (!param || param->count == 0)
        return FSDP_OK;
    *param_out = param;
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%sstate.%s.", prefix, param->names[0]);
    fsdp_text_add(&name, key.what, key.what_size);
    fsdp_status status = name.failed ? fsdp_fail_memory(err, entry->name) : FSDP_OK;
    if (status == FSDP_OK)
        *at_out = fsdp_sd_find(match->live, name.data, name.size);
    fsdp_text_release(&name);
    return status;
}

/* --- members ---------------------------------------------------------------------------------- */

bool fsdp_state_is_text(const fsdp_value *value, const char *text)
{
    return value->kind == FSDP_VALUE_STRING && value->as.bytes.size == strlen(text) &&
           memcmp(value->as.bytes.data, text, value->as.bytes.size) == 0;
}

const fsdp_value *fsdp_state_member(const fsdp_value *dict, const char *key)
{
    for (size_t i = 0; dict->kind == FSDP_VALUE_DICT && i + 1 < dict->as.list.count; i += 2)
        if (fsdp_state_is_text(&dict->as.list.items[i], key))
            return &dict->as.list.items[i + 1];
    return NULL;
}

const fsdp_value *fsdp_state_members(const fsdp_value *dict)
{
    const fsdp_value *params = fsdp_state_member(dict, "params");
    return params && params->kind == FSDP_VALUE_LIST ? params : NULL;
}

static fsdp_state_param *find_member(const fsdp_state_groups *groups, const fsdp_value *member)
{
    fsdp_state_param *param = NULL;
    if (member->kind == FSDP_VALUE_I64)
        param = find_numbered(groups, member->as.i64);
    else if (member->kind == FSDP_VALUE_STRING)
        param = fsdp_state_find(groups->scope, member->as.bytes.data, member->as.bytes.size);
    return param && param->state ? param : NULL;
}

/* --- groups ----------------------------------------------------------------------------------- */

fsdp_status fsdp_state_find_group(const fsdp_state_groups *groups, const fsdp_entry *entry,
                                  const fsdp_value *members, fsdp_state_group *found_out,
                                  fsdp_error *err)
{
    *found_out = (fsdp_state_group){0};
    for (size_t i = 0; i < members->as.list.count; i++) {
        const fsdp_state_param *param = find_member(groups, &members->as.list.items[i]);
        if (!param)
            continue;
        const fsdp_state_group live = {param->optim, param->group, param->param->name};
        if (found_out->optim && (live.optim != found_out->optim || live.group != found_out->group))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "a group of '%s' has '%s' and '%s', which are in two groups here",
                             entry->name, found_out->member, live.member);
        if (!found_out->optim)
            *found_out = live;
    }
    return FSDP_OK;
}

static bool has_members(const fsdp_state_scope *scope, size_t group)
{
    for (size_t i = 0; i < scope->count; i++)
        if (scope->params[i].state && scope->params[i].group == group)
            return true;
    return false;
}

/* A group without parameters matches one without, if each side has exactly one. */
fsdp_status fsdp_state_find_empty_group(const fsdp_state_groups *groups, const fsdp_entry *entry,
                                        fsdp_state_group *found_out, fsdp_error *err)
{
    const fsdp_state_scope *scope = groups->scope;
    size_t there = 0, here = 0;
    for (size_t i = 0; i < entry->value.as.list.count; i++)
        there += fsdp_state_members(&entry->value.as.list.items[i])->as.list.count == 0;
    for (size_t g = 0; scope->optim_count == 1 && g < scope->optims[0]->group_count; g++)
        if (!has_members(scope, g)) {
            *found_out = (fsdp_state_group){.optim = scope->optims[0], .group = g};
            here++;
        }
    if (there == 1 && here == 1)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' has %zu groups without parameters, of which one is possible, with one "
                     "optimizer that has one such group: here are %zu",
                     entry->name, there, here);
}

static fsdp_status find_members(const fsdp_state_groups *groups, int64_t place,
                                const fsdp_entry **members_out, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%sparam_groups.%" PRId64 ".params", groups->scope->opts.optim_prefix,
                   place);
    if (name.failed)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    int64_t at = fsdp_sd_find(groups->sd, name.data, name.size);
    *members_out = at < 0 ? NULL : fsdp_sd_at(groups->sd, (size_t)at);
    fsdp_text_release(&name);
    return FSDP_OK;
}

fsdp_status fsdp_state_find_place(const fsdp_state_groups *groups, int64_t place,
                                  fsdp_state_group *found_out, fsdp_error *err)
{
    const fsdp_state_scope *scope = groups->scope;
    *found_out = (fsdp_state_group){0};
    const fsdp_entry *members = NULL;
    FSDP_TRY(find_members(groups, place, &members, err));
    if (members && members->kind == FSDP_ENTRY_VALUE && members->value.kind == FSDP_VALUE_LIST &&
        members->value.as.list.count > 0)
        return fsdp_state_find_group(groups, members, &members->value, found_out, err);
    for (size_t i = 0; i < scope->optim_count; i++) {
        fsdp_optim *optim = scope->optims[i];
        if ((size_t)place < optim->group_count) {
            *found_out = (fsdp_state_group){.optim = optim, .group = (size_t)place};
            return FSDP_OK;
        }
        place -= (int64_t)optim->group_count;
    }
    return FSDP_OK;
}

/* --- hyper-parameters -------------------------------------------------------------------------- */

fsdp_state_taken *fsdp_state_place_taken(const fsdp_state_groups *groups, const fsdp_optim *optim,
                                         size_t group, size_t which, bool is_shared)
{
    size_t before = fsdp_state_count_groups(groups->scope, optim);
    return &groups->taken[(before + (is_shared ? 0 : group)) * FSDP_STATE_HYPERS + which];
}

fsdp_state_taken *fsdp_state_find_hyper(const fsdp_state_groups *groups,
                                        const fsdp_state_group *live, const char *what, size_t size,
                                        fsdp_state_hyper *hyper_out)
{
    fsdp_state_hyper hypers[FSDP_STATE_HYPERS];
    size_t n = fsdp_state_list_hypers(live->optim, live->group, hypers);
    for (size_t i = 0; i < n; i++)
        if (strlen(hypers[i].name) == size && memcmp(hypers[i].name, what, size) == 0) {
            *hyper_out = hypers[i];
            return fsdp_state_place_taken(groups, live->optim, live->group, i, hypers[i].is_shared);
        }
    return NULL;
}

size_t fsdp_state_group_number(const fsdp_state_groups *groups, const fsdp_state_group *live)
{
    return fsdp_state_count_groups(groups->scope, live->optim) + live->group;
}

bool fsdp_state_coming(const fsdp_state_groups *groups, const fsdp_state_group *live,
                       const char *name, double *number_out)
{
    fsdp_state_hyper hyper;
    const fsdp_state_taken *taken = fsdp_state_find_hyper(groups, live, name, strlen(name), &hyper);
    if (!taken)
        return false;
    *number_out = taken->entry ? taken->numbers[0] : hyper.flag ? *hyper.flag : *hyper.numbers[0];
    return true;
}

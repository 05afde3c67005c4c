/*
 * The parameters of a universal checkpoint by all their names: see universal.h. Tied names are one parameter,
 * whose folder has the name under which the optimizer has its state.
 */
#include "formats/deepspeed/universal.h"

#include <string.h>

static const char state_prefix[] = "optim.state.";
enum { STATE_PREFIX = sizeof state_prefix - 1 };

bool universal_is_param(const fsdp_target_entry *entry)
{
    return entry->is_model && !entry->value && fsdp_dtype_describe(entry->dtype)->is_float;
}

/* The entry that is named by "optim.state.NAME.KEY", whichever of the tied ones that is. */
static const uint64_t *named_by(const universal_params *params, const fsdp_target_entry *entry,
                                universal_key *key_out)
{
    const char *name = entry->name + STATE_PREFIX;
    if (entry->name_size <= STATE_PREFIX || memcmp(entry->name, state_prefix, STATE_PREFIX) != 0)
        return NULL;
    for (size_t size = entry->name_size - STATE_PREFIX; size-- > 0;) {
        const uint64_t *found =
            name[size] == '.' ? fsdp_name_table_find(&params->table, name, size) : NULL;
        if (!found)
            continue;
        *key_out = (universal_key){name + size + 1, entry->name_size - STATE_PREFIX - size - 1,
                                   UNIVERSAL_KEY_TEXT};
        return found;
    }
    return NULL;
}

/* A program may have a tensor of the model under a name of its own, too, which is stored apart. */
static fsdp_status find_first(const fsdp_target_opts *opts, size_t *first, fsdp_error *err)
{
    size_t *known = fsdp_alloc(opts->entry_count, sizeof *known); /* counted from 1 */
    if (!known)
        return universal_fail_memory(err);
    for (size_t i = 0; i < opts->entry_count; i++) {
        const fsdp_target_entry *entry = &opts->entries[i];
        size_t *name = &known[entry->same_as > 0 ? entry->same_as - 1 : i];
        bool is_tensor_of_model = entry->is_model && !entry->value;
        if (is_tensor_of_model && *name == 0)
            *name = i + 1;
        first[i] = is_tensor_of_model ? *name - 1 : i;
    }
    fsdp_free(known);
    return FSDP_OK;
}

static fsdp_status list_names(universal_params *params, fsdp_error *err)
{
    for (size_t i = 0; i < params->opts->entry_count; i++) {
        const fsdp_target_entry *entry = &params->opts->entries[i];
        params->shown[i] = i;
        if (universal_is_param(entry) &&
            !fsdp_name_table_enter(&params->table, entry->name, entry->name_size, i))
            return universal_fail_memory(err);
    }
    return FSDP_OK;
}

fsdp_status universal_params_find(const fsdp_target_opts *opts, universal_plan *plan,
                                  universal_params *params, fsdp_error *err)
{
    *params = (universal_params){.opts = opts};
    plan->first = fsdp_arena_alloc(&plan->arena, opts->entry_count, sizeof *plan->first);
    params->shown = fsdp_alloc(opts->entry_count, sizeof *params->shown);
    if (!plan->first || !params->shown)
        return universal_fail_memory(err);
    params->first = plan->first;
    FSDP_TRY(find_first(opts, plan->first, err));
    FSDP_TRY(list_names(params, err));
    for (size_t i = opts->entry_count; i-- > 0;) { /* the first name that has a state stays */
        universal_key key;
        const uint64_t *named = named_by(params, &opts->entries[i], &key);
        if (named)
            params->shown[params->first[*named]] = (size_t)*named;
    }
    return FSDP_OK;
}

void universal_params_release(universal_params *params)
{
    fsdp_name_table_release(&params->table);
    fsdp_free(params->shown);
    *params = (universal_params){0};
}

const fsdp_target_entry *universal_param_shown(const universal_params *params,
                                               const fsdp_target_entry *entry)
{
    size_t number = (size_t)(entry - params->opts->entries);
    return &params->opts->entries[params->shown[params->first[number]]];
}

const fsdp_target_entry *universal_param_named(const universal_params *params, const char *name,
                                               size_t size)
{
    const uint64_t *found = fsdp_name_table_find(&params->table, name, size);
    return found ? universal_param_shown(params, &params->opts->entries[*found]) : NULL;
}

const fsdp_target_entry *universal_param_of_state(const universal_params *params,
                                                  const fsdp_target_entry *state,
                                                  universal_key *key_out)
{
    const uint64_t *found = named_by(params, state, key_out);
    return found ? &params->opts->entries[*found] : NULL;
}

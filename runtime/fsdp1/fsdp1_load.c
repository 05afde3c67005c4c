/*
 * The FSDP1 face: state by position or name, of this rank's elements, goes into the optimizer, in place.
 */
#include "runtime/fsdp1/fsdp1_to_load.h"

#include <inttypes.h>
#include <string.h>

/* --- into the optimizer ----------------------------------------------------------------------- */

/* Everything is looked at before anything is `set`. */
static fsdp_status load_slot(fsdp_v1_loading *load, size_t number, const fsdp_v1_slot *slot,
                             bool sets, fsdp_error *err)
{
    const fsdp_v1_target *target = &load->targets[number];
    size_t size = fsdp_dtype_size(slot->dtype);
    FSDP_TRY(fsdp_v1_spell_key(load, number, slot->name, err));
    const fsdp_entry *entry = fsdp_v1_find(load->sd, &load->name);
    if (target->count == 0)
        return FSDP_OK;
    bool fits = entry && entry->kind == FSDP_ENTRY_TENSOR && entry->dtype == slot->dtype &&
                entry->data && fsdp_shape_count(entry->ndim, entry->shape) == target->count;
    if (!fits)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the state dict has no '%s' with %" PRId64
                         " elements of %s, which this rank holds of '%s'",
                         load->name.data, target->count, fsdp_dtype_name(slot->dtype),
                         target->name);
    if (sets)
        memcpy((unsigned char *)slot->own + (size_t)target->at * size, entry->data,
               (size_t)target->count * size);
    return FSDP_OK;
}

static fsdp_status load_target_state(fsdp_v1_loading *load, size_t number, bool sets,
                                     fsdp_error *err)
{
    const fsdp_v1_target *target = &load->targets[number];
    fsdp_optim_state *state = fsdp_v1_state_of(load->optim, target->flat->param);
    fsdp_v1_slot slots[FSDP_V1_SLOTS];
    size_t n = fsdp_v1_slots(load->optim, state, slots);
    double step;
    FSDP_TRY(fsdp_v1_spell_key(load, number, "step", err));
    const fsdp_entry *entry = fsdp_v1_find(load->sd, &load->name);
    if (!entry || !fsdp_state_number(entry, &step))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the state dict has no number '%s'", load->name.data);
    if (sets)
        state->step = (float)step;
    for (size_t s = 0; s < n; s++)
        FSDP_TRY(load_slot(load, number, &slots[s], sets, err));
    return FSDP_OK;
}

static bool is_key(const fsdp_v1_loading *load, size_t number, const fsdp_value *key)
{
    if (load->opts.is_named)
        return fsdp_state_is_text(key, load->targets[number].name);
    return key->kind == FSDP_VALUE_I64 && key->as.i64 == (int64_t)number;
}

/* The group of the first parameter in a list of keys; false: of none. */
static bool find_live_group(const fsdp_v1_loading *load, const fsdp_value *keys, size_t *group_out)
{
    for (size_t k = 0; keys && keys->kind == FSDP_VALUE_LIST && k < keys->as.list.count; k++)
        for (size_t i = 0; i < load->count; i++)
            if (is_key(load, i, &keys->as.list.items[k])) {
                *group_out = load->targets[i].group;
                return true;
            }
    return false;
}

static fsdp_status load_all(fsdp_v1_loading *load, fsdp_error *err)
{
    const fsdp_value *groups = fsdp_v1_find_groups(load->sd);
    FSDP_TRY(fsdp_v1_list_targets(load, err));
    for (int sets = 0; sets < 2; sets++)
        for (size_t i = 0; i < load->count; i++)
            FSDP_TRY(load_target_state(load, i, sets, err));
    for (size_t g = 0; groups && g < groups->as.list.count; g++) {
        const fsdp_value *dict = &groups->as.list.items[g];
        size_t live;
        if (!find_live_group(load, fsdp_state_member(dict, "params"), &live))
            continue;
        fsdp_v1_hypers hypers = fsdp_v1_hypers_get(load->optim, live);
        fsdp_v1_hypers_from_value(load->optim, dict, &hypers);
        fsdp_v1_hypers_set(load->optim, live, &hypers);
    }
    return FSDP_OK;
}

fsdp_status fsdp_v1_optim_load(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_sd *sd,
                               const fsdp_v1_to_load_opts *opts, fsdp_error *err)
{
    fsdp_v1_loading load = fsdp_v1_loading_begin(v1, optim, sd, opts);
    FSDP_TRY(fsdp_v1_check_idle(v1, "fsdp_v1_optim_load", err));
    FSDP_TRY(fsdp_v1_check_given(sd, "fsdp_v1_optim_load", err));
    fsdp_status status = load_all(&load, err);
    fsdp_v1_loading_release(&load);
    return status;
}

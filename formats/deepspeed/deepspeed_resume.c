/*
 * State as PyTorch names it, so that a run continues in FSDP2: DeepSpeed keeps a step and numbers of
 * parameters per group, PyTorch optim.state.NAME.step and names. Listings have only what is stored. See
 * deepspeed.h.
 */
#include "formats/deepspeed/deepspeed.h"

#include "base/data/param_groups.h"

#include <stdlib.h>
#include <string.h>

fsdp_status ds_note_owner(ds_set *set, size_t slot, const ds_param *param, fsdp_error *err)
{
    ds_owner owner = {.slot = slot,
                      .order = set->owner_count,
                      .name_size = param->name_size,
                      .has_step = param->has_step,
                      .step = param->step};
    if (set->is_as_stored || param->is_copy)
        return FSDP_OK;
    for (size_t kind = DS_MASTER + 1; kind < set->kind_count; kind++)
        owner.has_state |= param->tensors[kind] != 0;
    owner.name = fsdp_arena_strndup(&set->arena, param->name, param->name_size);
    if (!owner.name ||
        !fsdp_grow(&set->owners, &set->owner_room, set->owner_count + 1, sizeof *set->owners))
        return fsdp_fail_memory(err, "the parameters of an optimizer");
    set->owners[set->owner_count++] = owner;
    return FSDP_OK;
}

/* In stage 3 the one lane has the parameters of all sub-groups. */
fsdp_status ds_note_owners(ds_set *set, fsdp_error *err)
{
    for (size_t g = 0; g < set->group_count; g++)
        for (size_t i = 0; i < set->groups[g].lane_count; i++) {
            const ds_lane *lane = &set->groups[g].lanes[i];
            size_t slot = g;
            for (size_t p = 0; p < lane->count; p++) {
                while (set->is_split && set->ends[slot] <= p)
                    slot++;
                FSDP_TRY(ds_note_owner(set, slot, &lane->params[p], err));
            }
        }
    return FSDP_OK;
}

/* --- steps ---------------------------------------------------------------------------------------- */

static fsdp_status add_step(ds_set *set, const ds_owner *owner, float step, fsdp_error *err)
{
    static const int64_t none[1];
    const fsdp_source_shape shape = {FSDP_F32, 0, none};
    const fsdp_source_chunk chunk = {
        .lo = none, .len = none, .file = -1, .origin = 0, .stream = FSDP_NO_STREAM};
    const int32_t path[] = {5, 5, (int32_t)owner->name_size, 4};
    fsdp_text name = {0};
    size_t tensor;
    fsdp_text_addf(&name, "optim.state.");
    fsdp_text_add(&name, owner->name, owner->name_size);
    fsdp_text_addf(&name, ".step");
    char *data = fsdp_alloc(1, sizeof step);
    fsdp_status st = name.failed || !data ? fsdp_fail_memory(err, "a step") : FSDP_OK;
    fsdp_source_nest(set->source, path, 4);
    if (st == FSDP_OK)
        st = fsdp_source_add_tensor(set->source, name.data, name.size, &shape, &tensor, err);
    fsdp_source_nest(set->source, NULL, 0);
    fsdp_text_release(&name);
    if (st != FSDP_OK) {
        fsdp_free(data);
        return st;
    }
    memcpy(data, &step, sizeof step);
    FSDP_TRY(torch_memory_keep(set->memory, tensor, data, err));
    return fsdp_source_add_chunk(set->source, tensor, &chunk, err);
}

bool ds_is_number(const fsdp_value *value, float *number_out)
{
    bool is_integer = value->kind == FSDP_VALUE_I64;
    *number_out = is_integer ? (float)value->as.i64 : 0;
    if (value->kind == FSDP_VALUE_F64)
        *number_out = (float)value->as.f64;
    return is_integer || value->kind == FSDP_VALUE_F64;
}

static fsdp_status add_steps(ds_set *set, fsdp_error *err)
{
    for (size_t i = 0; i < set->owner_count; i++) {
        const ds_owner *owner = &set->owners[i];
        if (owner->has_state && owner->has_step)
            FSDP_TRY(add_step(set, owner, owner->step, err));
        if (!owner->has_state || owner->has_step || owner->slot >= set->steps.as.list.count)
            continue;
        float step;
        if (ds_is_number(&set->steps.as.list.items[owner->slot], &step))
            FSDP_TRY(add_step(set, owner, step, err));
    }
    return FSDP_OK;
}

/* --- groups --------------------------------------------------------------------------------------- */

static int compare_owners(const void *a, const void *b)
{
    const ds_owner *x = a, *y = b;
    return x->slot != y->slot ? (x->slot > y->slot) - (x->slot < y->slot)
                              : (x->order > y->order) - (x->order < y->order);
}

/* The first owner with this slot or a higher one. */
static size_t first_owner(const ds_set *set, size_t slot)
{
    size_t low = 0, high = set->owner_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (set->owners[middle].slot < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* True for numbers of states, each there once. Another list stays as it is. */
static bool are_slots(const ds_set *set, const fsdp_group_items *params)
{
    size_t count = 0;
    for (const fsdp_group_item *param = params->first; param; param = param->next) {
        if (param->name || param->value->kind != FSDP_VALUE_I64 || param->value->as.i64 < 0)
            return false;
        size_t slot = (size_t)param->value->as.i64;
        count += first_owner(set, slot + 1) - first_owner(set, slot);
        if (count > set->owner_count)
            return false; /* a number is there twice */
    }
    return true;
}

/* Groups may share a list of numbers, which costs a pickle little, and long names each time. */
static fsdp_status count_bytes(ds_set *set, const ds_owner *owner, fsdp_error *err)
{
    set->named_bytes += owner->name_size + sizeof(fsdp_value);
    return set->named_bytes <= FSDP_SOURCE_NAMES
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_LIMIT,
                           "'%s': the names in the groups of its optimizer take over %d MiB",
                           set->directory, FSDP_SOURCE_NAMES >> 20);
}

/* Replaces the numbers of a group by the names of their parameters. */
static fsdp_status name_params(ds_set *set, fsdp_param_groups *groups, fsdp_param_group *group,
                               fsdp_error *err)
{
    const fsdp_group_items slots = group->params;
    if (!are_slots(set, &slots))
        return FSDP_OK;
    group->params = (fsdp_group_items){0};
    for (const fsdp_group_item *item = slots.first; item; item = item->next) {
        size_t slot = (size_t)item->value->as.i64, end = first_owner(set, slot + 1);
        for (size_t o = first_owner(set, slot); o < end; o++) {
            FSDP_TRY(count_bytes(set, &set->owners[o], err));
            FSDP_TRY(fsdp_group_add(
                groups, &group->params,
                (fsdp_group_item){.name = set->owners[o].name, .size = set->owners[o].name_size},
                err));
        }
    }
    return FSDP_OK;
}

static fsdp_status put_entry(void *context, const fsdp_group_entry *entry, fsdp_error *err)
{
    ds_set *set = context;
    fsdp_value value;
    FSDP_TRY(fsdp_value_copy(entry->value, &value, err));
    fsdp_source_nest(set->source, entry->path, entry->path_count);
    fsdp_status st =
        fsdp_source_add_value(set->source, entry->name, entry->name_size, &value, NULL, err);
    fsdp_source_nest(set->source, NULL, 0);
    fsdp_value_release(&value);
    return st;
}

/* Adds optim.param_groups.N.KEY, as PyTorch's state dicts are flattened. */
static fsdp_status add_groups(ds_set *set, fsdp_param_groups *groups, fsdp_error *err)
{
    static const char prefix[] = "optim.";
    const fsdp_group_source list = {.name = prefix,
                                    .parts = {.prefix_size = sizeof prefix - 1},
                                    .spelling = FSDP_GROUPS_LIST,
                                    .value = &set->param_groups};
    FSDP_TRY(fsdp_groups_read(groups, &list, err));
    for (size_t i = 0; i < groups->count; i++) {
        FSDP_TRY(name_params(set, groups, &groups->items[i], err));
        FSDP_TRY(fsdp_group_put(&groups->items[i], FSDP_GROUPS_PLACES, put_entry, set, err));
    }
    return FSDP_OK;
}

fsdp_status ds_add_resume(ds_set *set, fsdp_error *err)
{
    fsdp_param_groups groups = {0};
    if (set->owner_count == 0)
        return FSDP_OK;
    qsort(set->owners, set->owner_count, sizeof *set->owners, compare_owners);
    FSDP_TRY(add_steps(set, err));
    fsdp_status st = add_groups(set, &groups, err);
    fsdp_groups_release(&groups);
    return st;
}

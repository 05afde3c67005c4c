/* Sets what a unit does: see unit.h. */
#include "runtime/step/step_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"

#include <math.h>
#include <string.h>

/* Is `inner` the unit `outer`, or of a module below it? */
static bool is_within(const fsdp_unit *inner, const fsdp_unit *outer)
{
    if (inner == outer || outer->is_root)
        return true;
    for (size_t i = 0; i < inner->member_count; i++)
        for (size_t o = 0; o < outer->member_count; o++)
            if (fsdp_name_is_below(inner->prefixes[i], outer->prefixes[o]))
                return true;
    return false;
}

typedef struct unit_range {
    fsdp_unit *outer;
    size_t next;
    bool recurse, is_begun;
} unit_range;

/* First the unit itself, then with recurse those below it. */
static fsdp_unit *next_unit(unit_range *range)
{
    const fsdp_model *model = range->outer->model;
    if (!range->is_begun) {
        range->is_begun = true;
        return range->outer;
    }
    while (range->recurse && range->next < model->unit_count) {
        fsdp_unit *unit = model->units[range->next++];
        if (unit != range->outer && is_within(unit, range->outer))
            return unit;
    }
    return NULL;
}

/* Inside a step, collectives under way use the buffers and the communicator that would change. */
static fsdp_status check_outside(const fsdp_unit *unit, const char *what, fsdp_error *err)
{
    const fsdp_root *root = unit->root;
    if (!root || (!root->is_in_forward && !root->is_in_backward))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s: %s cannot change inside a forward or backward",
                     unit->name, what);
}

static fsdp_status check_comm_memory(const fsdp_unit *unit, bool from_comm, fsdp_error *err)
{
    FSDP_TRY(check_outside(unit, "the memory of collectives", err));
    if (from_comm && (unit->settings.custom_gather || unit->settings.custom_reduce))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s has a custom collective, which provides its own memory",
                         unit->name);
    return FSDP_OK;
}

static fsdp_status check_setting(const fsdp_unit *unit, fsdp_unit_setting setting, int value,
                                 fsdp_error *err)
{
    if (setting == FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS && value < 1)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "unit %s: the number of reduce-scatter inputs in flight is at least 1, not %d",
            unit->name, value);
    if (setting == FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP)
        return check_outside(unit, "the group that reduces", err);
    if (setting == FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP)
        return check_comm_memory(unit, value, err);
    return FSDP_OK;
}

static fsdp_status separate_reduce(fsdp_unit *unit, bool is_separate, fsdp_error *err)
{
    unit->settings.is_separate = is_separate;
    for (size_t g = 0; g < unit->group_count; g++)
        FSDP_TRY(fsdp_group_separate_reduce(&unit->groups[g], err));
    return FSDP_OK;
}

static fsdp_status set(fsdp_unit *unit, fsdp_unit_setting setting, int value, fsdp_error *err)
{
    fsdp_group_settings *settings = &unit->settings;
    bool on = value != 0;
    switch (setting) {
    case FSDP_UNIT_REQUIRES_GRADIENT_SYNC:
        settings->reduces = settings->all_reduces = on;
        return FSDP_OK;
    case FSDP_UNIT_REQUIRES_ALL_REDUCE: settings->all_reduces = on; return FSDP_OK;
    case FSDP_UNIT_RESHARD_AFTER_FORWARD:
        settings->reshard_after_forward = on ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER;
        return FSDP_OK;
    case FSDP_UNIT_RESHARD_AFTER_BACKWARD: settings->reshards_after_backward = on; return FSDP_OK;
    case FSDP_UNIT_UNSHARD_IN_BACKWARD: settings->unshards_in_backward = on; return FSDP_OK;
    case FSDP_UNIT_KEEP_UNSHARDED_STORAGE: settings->keeps_storage = on; return FSDP_OK;
    case FSDP_UNIT_UNSHARD_ASYNC_OP: unit->is_async = on; return FSDP_OK;
    case FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS: settings->forces_sum = on; return FSDP_OK;
    case FSDP_UNIT_REDUCE_SCATTER_UNUSED_PARAMS: settings->reduces_unused = on; return FSDP_OK;
    case FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS: unit->max_inputs = value; return FSDP_OK;
    case FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP: return separate_reduce(unit, on, err);
    case FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP:
        settings->takes_comm_memory = on;
        return FSDP_OK;
    }
    return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s has no setting %d", unit->name, (int)setting);
}

fsdp_status fsdp_unit_set(fsdp_unit *unit, fsdp_unit_setting setting, int value, bool recurse,
                          fsdp_error *err)
{
    FSDP_NEED(err, unit);
    unit_range checked = {.outer = unit, .recurse = recurse}, changed = checked;
    for (const fsdp_unit *at; (at = next_unit(&checked)) != NULL;)
        FSDP_TRY(check_setting(at, setting, value, err));
    for (fsdp_unit *at; (at = next_unit(&changed)) != NULL;)
        FSDP_TRY(set(at, setting, value, err));
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_gradient_divide_factor(fsdp_unit *unit, double factor, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    if (!(factor > 0) || isinf(factor))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: a divide factor is a positive number, not %g", unit->name,
                         factor);
    unit->settings.divide_factor = factor;
    return FSDP_OK;
}

/* --- prefetch --------------------------------------------------------------------------------- */

static fsdp_status set_list(fsdp_unit *unit, fsdp_unit *const *units, size_t n,
                            fsdp_unit_list *list, fsdp_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (units[i]->model != unit->model)
            return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s cannot prefetch %s of another model",
                             unit->name, units[i]->name);
    fsdp_unit **copy = fsdp_realloc(list->units, n + 1, sizeof *copy);
    if (!copy)
        return fsdp_fail_memory(err, "a list of units");
    if (n > 0)
        memcpy(copy, units, n * sizeof *copy);
    *list = (fsdp_unit_list){copy, n};
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_prefetch(fsdp_unit *unit, fsdp_hook hook, fsdp_unit *const *units,
                                   size_t n, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    if (n > 0)
        FSDP_NEED(err, units);
    for (size_t i = 0; i < n; i++)
        FSDP_NEED(err, units[i]);
    if (hook == FSDP_HOOK_PRE_FORWARD)
        return set_list(unit, units, n, &unit->forward_prefetch, err);
    if (hook == FSDP_HOOK_PRE_BACKWARD)
        return set_list(unit, units, n, &unit->backward_prefetch, err);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "unit %s: units are gathered ahead by pre_forward or pre_backward only",
                     unit->name);
}

/* --- plug-ins --------------------------------------------------------------------------------- */

fsdp_status fsdp_unit_check_custom(const fsdp_unit *unit, fsdp_error *err)
{
    if (unit->group_count <= 1)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "unit %s has %zu groups of parameters, but a custom collective serves only one", unit->name,
        unit->group_count);
}

static fsdp_status set_custom(fsdp_unit *unit, const fsdp_custom_collective *custom,
                              fsdp_custom_collective **slot, fsdp_error *err)
{
    FSDP_TRY(check_outside(unit, "a custom collective", err));
    FSDP_TRY(fsdp_unit_check_custom(unit, err));
    fsdp_custom_collective *copy = NULL;
    if (custom) {
        copy = fsdp_alloc(1, sizeof *copy);
        if (!copy)
            return fsdp_fail_memory(err, "a custom collective");
        *copy = *custom;
    }
    fsdp_free(*slot);
    *slot = copy;
    if (unit->root) /* no request asks for buffers of the earlier collective again */
        fsdp_memory_return_external(&unit->root->context->memory);
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_custom_collective(fsdp_unit *unit, fsdp_collective_kind kind,
                                            const fsdp_custom_collective *custom, fsdp_error *err)
{
    FSDP_NEED(err, unit);
    if (kind == FSDP_ALL_GATHER)
        return set_custom(unit, custom, &unit->settings.custom_gather, err);
    if (kind == FSDP_REDUCE_SCATTER)
        return set_custom(unit, custom, &unit->settings.custom_reduce, err);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "unit %s: only all-gather and reduce-scatter can be replaced", unit->name);
}

void fsdp_unit_set_all_reduce_hook(fsdp_unit *unit, fsdp_all_reduce_hook hook, void *context)
{
    if (!unit)
        return;
    unit->settings.all_reduce_hook = hook;
    unit->settings.all_reduce_hook_context = context;
}

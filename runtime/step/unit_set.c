/* Setters of units, named as PyTorch's. See unit.h. */
#include "runtime/step/step_internal.h"

#include <math.h>
#include <string.h>

#include "base/core/mem.h"

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

void fsdp_unit_set_requires_gradient_sync(fsdp_unit *unit, bool sync, bool recurse)
{
    unit_range range = {.outer = unit, .recurse = recurse};
    for (fsdp_unit *at; (at = next_unit(&range)) != NULL;)
        at->settings.reduces = at->settings.all_reduces = sync;
}

void fsdp_unit_set_requires_all_reduce(fsdp_unit *unit, bool all_reduce, bool recurse)
{
    unit_range range = {.outer = unit, .recurse = recurse};
    for (fsdp_unit *at; (at = next_unit(&range)) != NULL;)
        at->settings.all_reduces = all_reduce;
}

void fsdp_unit_set_reshard_after_forward(fsdp_unit *unit, bool reshard, bool recurse)
{
    unit_range range = {.outer = unit, .recurse = recurse};
    for (fsdp_unit *at; (at = next_unit(&range)) != NULL;)
        at->settings.reshard_after_forward = reshard ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER;
}

void fsdp_unit_set_reshard_after_backward(fsdp_unit *unit, bool reshard, bool recurse)
{
    unit_range range = {.outer = unit, .recurse = recurse};
    for (fsdp_unit *at; (at = next_unit(&range)) != NULL;)
        at->settings.reshards_after_backward = reshard;
}

void fsdp_unit_set_unshard_in_backward(fsdp_unit *unit, bool unshard)
{
    unit->settings.unshards_in_backward = unshard;
}

void fsdp_unit_set_keep_unsharded_storage(fsdp_unit *unit, bool keep, bool recurse)
{
    unit_range range = {.outer = unit, .recurse = recurse};
    for (fsdp_unit *at; (at = next_unit(&range)) != NULL;)
        at->settings.keeps_storage = keep;
}

void fsdp_unit_set_unshard_async_op(fsdp_unit *unit, bool is_async, bool recurse)
{
    unit_range range = {.outer = unit, .recurse = recurse};
    for (fsdp_unit *at; (at = next_unit(&range)) != NULL;)
        at->is_async = is_async;
}

void fsdp_unit_set_force_sum_reduction_for_comms(fsdp_unit *unit, bool force)
{
    unit->settings.forces_sum = force;
}

void fsdp_unit_set_reduce_scatter_unused_params(fsdp_unit *unit, bool all, bool recurse)
{
    unit_range range = {.outer = unit, .recurse = recurse};
    for (fsdp_unit *at; (at = next_unit(&range)) != NULL;)
        at->settings.reduces_unused = all;
}

fsdp_status fsdp_unit_set_gradient_divide_factor(fsdp_unit *unit, double factor, fsdp_error *err)
{
    if (!(factor > 0) || isinf(factor))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: a divide factor is a positive number, not %g", unit->name,
                         factor);
    unit->settings.divide_factor = factor;
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_reduce_scatter_max_input_buffers(fsdp_unit *unit, int n, bool recurse,
                                                           fsdp_error *err)
{
    unit_range range = {.outer = unit, .recurse = recurse};
    if (n < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: at least one reduce-scatter input is in flight, not %d",
                         unit->name, n);
    for (fsdp_unit *at; (at = next_unit(&range)) != NULL;)
        at->max_inputs = n;
    return FSDP_OK;
}

/* --- prefetch --------------------------------------------------------------------------------- */

static fsdp_status set_list(fsdp_unit *unit, fsdp_unit *const *units, size_t n, fsdp_unit ***list,
                            size_t *count, fsdp_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (units[i]->model != unit->model)
            return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s cannot prefetch %s of another model",
                             unit->name, units[i]->name);
    fsdp_unit **copy = fsdp_realloc(*list, n + 1, sizeof **list);
    if (!copy)
        return fsdp_fail_memory(err, "a list of units");
    if (n > 0)
        memcpy(copy, units, n * sizeof *copy);
    *list = copy;
    *count = n;
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_modules_to_forward_prefetch(fsdp_unit *unit, fsdp_unit *const *units,
                                                      size_t n, fsdp_error *err)
{
    return set_list(unit, units, n, &unit->forward_prefetch, &unit->forward_prefetch_count, err);
}

fsdp_status fsdp_unit_set_modules_to_backward_prefetch(fsdp_unit *unit, fsdp_unit *const *units,
                                                       size_t n, fsdp_error *err)
{
    return set_list(unit, units, n, &unit->backward_prefetch, &unit->backward_prefetch_count, err);
}

/* --- communication ---------------------------------------------------------------------------- */

/* Inside a step, collectives under way use the buffers and the communicator that would change. */
static fsdp_status check_outside(const fsdp_unit *unit, const char *what, fsdp_error *err)
{
    const fsdp_root *root = unit->root;
    if (!root || (!root->is_in_forward && !root->is_in_backward))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s: %s cannot change inside a forward or backward",
                     unit->name, what);
}

fsdp_status fsdp_unit_set_separate_reduce_scatter_group(fsdp_unit *unit, bool separate,
                                                        bool recurse, fsdp_error *err)
{
    unit_range range = {.outer = unit, .recurse = recurse};
    FSDP_TRY(check_outside(unit, "the group that reduces", err));
    for (fsdp_unit *at; (at = next_unit(&range)) != NULL;) {
        at->settings.is_separate = separate;
        for (size_t g = 0; g < at->group_count; g++)
            FSDP_TRY(fsdp_group_separate_reduce(&at->groups[g], err));
    }
    return FSDP_OK;
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

fsdp_status fsdp_unit_set_custom_all_gather(fsdp_unit *unit, const fsdp_custom_collective *custom,
                                            fsdp_error *err)
{
    return set_custom(unit, custom, &unit->settings.custom_gather, err);
}

fsdp_status fsdp_unit_set_custom_reduce_scatter(fsdp_unit *unit,
                                                const fsdp_custom_collective *custom,
                                                fsdp_error *err)
{
    return set_custom(unit, custom, &unit->settings.custom_reduce, err);
}

fsdp_status fsdp_unit_set_allocate_memory_from_process_group_for_comm(fsdp_unit *unit,
                                                                      bool from_comm,
                                                                      fsdp_error *err)
{
    FSDP_TRY(check_outside(unit, "where the memory of collectives comes from", err));
    if (from_comm && (unit->settings.custom_gather || unit->settings.custom_reduce))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s has a custom collective, which brings its own memory",
                         unit->name);
    unit->settings.takes_comm_memory = from_comm;
    return FSDP_OK;
}

fsdp_status fsdp_unit_set_all_reduce_hook(fsdp_unit *unit, fsdp_all_reduce_hook hook, void *user,
                                          fsdp_error *err)
{
    (void)err;
    unit->settings.all_reduce_hook = hook;
    unit->settings.all_reduce_hook_user = user;
    return FSDP_OK;
}

/*
 * Applies a map to a checkpoint: finds the bindings of each rule's variables among the names, follows them
 * through the rule's steps, and makes a derived tensor for each name of the other side. See map.h.
 */
#include "base/data/value_internal.h"
#include "statedict/map/map_rules.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* === bindings ================================================================================= */

/* Sorted bindings of a rule's variables: one per group of tensors that it takes or makes. */
typedef struct binding_list {
    map_binding *items;
    size_t count, room;
} binding_list;

typedef struct map_run {
    const fsdp_map *map;
    map_sizes sizes;
    map_size_value size_values[MAP_SIZES];
    const fsdp_sd *sd; /* of the base */
    fsdp_derivation *derivation;
    fsdp_arena *arena;
    bool *is_taken; /* per entry of the base */
    int64_t made;   /* tensors of steps, which lists of lists would multiply without end */

    /* the rule that is applied */
    const map_rule *rule;
    const map_pattern *from, *to;
    int from_count, to_count;
    bool to_right;
    map_step steps[MAP_STEPS]; /* in the order of this direction */
    int lists[MAP_STEPS + 1];  /* tensors in the list before each step, and after the last */
    binding_list bindings[MAP_STEPS + 1]; /* likewise */
    binding_list
        counted[MAP_STEPS];     /* of a step with counted variables: the keys of its bindings */
    bool counts_all[MAP_STEPS]; /* they are those of a line "numbered" */
} map_run;

static int compare_bindings(const void *a, const void *b)
{
    const map_binding *x = a, *y = b;
    for (int i = 0; i < MAP_VARIABLES; i++)
        if (x->values[i] != y->values[i])
            return x->values[i] < y->values[i] ? -1 : 1;
    return 0;
}

static fsdp_status map_bindings_add(binding_list *list, const map_binding *binding, fsdp_error *err)
{
    if (!fsdp_grow(&list->items, &list->room, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, "a map");
    list->items[list->count++] = *binding;
    return FSDP_OK;
}

/* Sorts, and keeps one of equal ones. */
static void map_bindings_sort(binding_list *list)
{
    size_t kept = 0;
    if (list->count == 0)
        return;
    qsort(list->items, list->count, sizeof *list->items, compare_bindings);
    for (size_t i = 1; i < list->count; i++)
        if (compare_bindings(&list->items[kept], &list->items[i]) != 0)
            list->items[++kept] = list->items[i];
    list->count = kept + 1;
}

static bool map_bindings_have(const binding_list *list, const map_binding *binding)
{
    return list->count > 0 && bsearch(binding, list->items, list->count, sizeof *list->items,
                                      compare_bindings) != NULL;
}

/* Counts the numbers of a variable, from 0 on, in the bindings that are equal but for it. */
static int64_t map_bindings_count(const binding_list *list, const map_binding *binding,
                                  int variable)
{
    map_binding next = *binding;
    for (next.values[variable] = 0; map_bindings_have(list, &next); next.values[variable]++)
        ;
    return next.values[variable];
}

/* --- numbers of several variables together ---------------------------------------------------------- */

static bool is_counted(const map_step *step, int variable)
{
    for (int i = 0; i < step->counted_count; i++)
        if (step->counted[i] == variable)
            return true;
    return false;
}

/* A step that numbers counts keys, which are bindings in another order: first the values of the other
 * variables, which keep counts apart unless it counts all, then those that it counts, in its order. */
static map_binding map_counted_key(const map_step *step, const map_binding *binding,
                                   bool counts_all)
{
    map_binding key = {0};
    int at = 0;
    for (int i = 0; i < MAP_VARIABLES; i++)
        if (!is_counted(step, i))
            key.values[at++] = i == step->variable || counts_all ? -1 : binding->values[i];
    for (int i = 0; i < step->counted_count; i++)
        key.values[at++] = binding->values[step->counted[i]];
    return key;
}

/* The first of the sorted keys that is not less. */
static size_t lower_bound(const binding_list *keys, const map_binding *key)
{
    size_t low = 0, high = keys->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (compare_bindings(&keys->items[middle], key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The place of number 0 next to the key. */
static size_t first_place(const binding_list *keys, const map_step *step, map_binding key)
{
    for (int i = MAP_VARIABLES - step->counted_count; i < MAP_VARIABLES; i++)
        key.values[i] = -1;
    return lower_bound(keys, &key);
}

/* The number of a key among the sorted keys that are not apart from it; and the key of a number, where *key
 * has the values of the other variables. False: there is none. */
static int64_t map_counted_number(const binding_list *keys, const map_step *step,
                                  const map_binding *key)
{
    return (int64_t)(lower_bound(keys, key) - first_place(keys, step, *key));
}

static bool map_counted_find(const binding_list *keys, const map_step *step, int64_t number,
                             map_binding *key)
{
    size_t place = first_place(keys, step, *key) + (size_t)number;
    size_t apart = (size_t)(MAP_VARIABLES - step->counted_count) * sizeof *key->values;
    if (place >= keys->count || memcmp(keys->items[place].values, key->values, apart) != 0)
        return false;
    *key = keys->items[place];
    return true;
}

/* --- names ------------------------------------------------------------------------------------ */

static bool render_rest(const map_binding *binding, fsdp_text *out)
{
    fsdp_text_add(out, binding->rest ? binding->rest : "", binding->rest_size);
    return binding->rest != NULL;
}

static bool render_word(const char *words, int64_t number, fsdp_text *out)
{
    for (; number > 0; number--) {
        words += strcspn(words, "|");
        if (!*words)
            return false;
        words++;
    }
    fsdp_text_add(out, words, strcspn(words, "|"));
    return true;
}

/* The name with the values of the binding. False when one has no value, or a number without a word. */
static bool render_name(const map_pattern *pattern, const map_binding *binding, fsdp_text *out)
{
    for (int i = 0; i < pattern->count; i++) {
        const map_piece *piece = &pattern->pieces[i];
        fsdp_text_add(out, piece->text, piece->text_size);
        if (piece->variable < 0)
            continue;
        int64_t value = binding->values[piece->variable];
        if (value < 0 || (piece->is_rest && !render_rest(binding, out)) ||
            (piece->words && !piece->is_rest && !render_word(piece->words, value, out)))
            return false;
        if (!piece->words)
            fsdp_text_addf(out, "%" PRId64, value);
    }
    return true;
}

/* === steps ==================================================================================== */

/* --- steps in both directions ----------------------------------------------------------------------- */

static void invert_reshape(map_step *step)
{
    const char *sizes[MAP_NAMES];
    int second = step->size_count - step->split_at;
    memcpy(sizes, step->sizes, sizeof sizes);
    memcpy(step->sizes, sizes + step->split_at, (size_t)second * sizeof *sizes);
    memcpy(step->sizes + second, sizes, (size_t)step->split_at * sizeof *sizes);
    step->split_at = second;
}

static void invert_order(map_step *step)
{
    int order[MAP_NAMES] = {0};
    for (int d = 0; d < step->order_count; d++)
        if (step->order[d] < step->order_count)
            order[step->order[d]] = d;
    memcpy(step->order, order, sizeof order);
}

/* The step that undoes it. */
static map_step map_step_inverse(const map_step *step)
{
    map_step inverse = *step;
    switch (step->verb) {
    case MAP_STACK: inverse.verb = MAP_UNSTACK; break;
    case MAP_UNSTACK: inverse.verb = MAP_STACK; break;
    case MAP_GATHER: inverse.verb = MAP_SCATTER; break;
    case MAP_SCATTER: inverse.verb = MAP_GATHER; break;
    case MAP_CONCAT: inverse.verb = MAP_SPLIT; break;
    case MAP_SPLIT: inverse.verb = MAP_CONCAT; break;
    case MAP_FLATTEN: inverse.verb = MAP_UNFLATTEN; break;
    case MAP_UNFLATTEN: inverse.verb = MAP_FLATTEN; break;
    case MAP_PAD: inverse.verb = MAP_UNPAD; break;
    case MAP_UNPAD: inverse.verb = MAP_PAD; break;
    case MAP_TRANSPOSE: break;
    case MAP_PERMUTE: invert_order(&inverse); break;
    case MAP_RESHAPE: invert_reshape(&inverse); break;
    case MAP_SCALE: inverse.factor = 1 / step->factor; break;
    case MAP_ADD: inverse.factor = -step->factor; break;
    case MAP_EXP: inverse.verb = MAP_LOG; break;
    case MAP_LOG: inverse.verb = MAP_EXP; break;
    case MAP_FIRST:
    case MAP_NUMBER: break; /* rules with them are for the way to the right only */
    }
    return inverse;
}

/* --- tensors ---------------------------------------------------------------------------------------- */

static fsdp_status make_stored(map_run *run, int number, const map_binding *binding,
                               const fsdp_derived **out, fsdp_error *err)
{
    fsdp_text name = {0};
    bool is_known = render_name(&run->from[number], binding, &name);
    int64_t entry = name.failed || !is_known
                        ? -1
                        : fsdp_sd_find(run->sd, name.data ? name.data : "", name.size);
    bool is_there = entry >= 0 && fsdp_sd_at(run->sd, (size_t)entry)->kind != FSDP_ENTRY_VALUE;
    fsdp_status st = FSDP_OK;
    if (name.failed)
        st = fsdp_fail_memory(err, "a name");
    else if (!is_known)
        st = fsdp_fail(err, FSDP_ERR_USAGE, "a variable of '%s' has no value",
                       run->from[number].text);
    else if (!is_there)
        st = fsdp_fail(err, FSDP_ERR_USAGE, "the tensor '%.*s' is missing", (int)name.size,
                       name.data);
    else
        st = fsdp_derive_stored(run->arena, fsdp_derivation_base(run->derivation), (size_t)entry,
                                out, err);
    if (st == FSDP_OK)
        run->is_taken[entry] = true;
    fsdp_text_release(&name);
    return st;
}

static fsdp_status check_dim(const fsdp_derived *part, int dim, fsdp_error *err)
{
    char shape[128];
    return dim < part->ndim ? FSDP_OK
                            : fsdp_fail(err, FSDP_ERR_USAGE, "a tensor %s has no dim %d",
                                        fsdp_derived_text(part, shape, sizeof shape), dim);
}

/* Dims at `dim` that are replaced by others over the same elements. */
typedef struct dims_change {
    int dim, old_count, count;
    const int64_t *sizes;
} dims_change;

static fsdp_status replace_dims(map_run *run, const fsdp_derived *part, const dims_change *change,
                                const fsdp_derived **out, fsdp_error *err)
{
    int64_t shape[FSDP_MAX_DIMS];
    int behind = change->dim + change->old_count, after = part->ndim - behind;
    int ndim = change->dim + change->count + after;
    if (after < 0 || ndim > FSDP_MAX_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a tensor of %d dims has no dims %d to %d",
                         part->ndim, change->dim, behind);
    memcpy(shape, part->shape, (size_t)change->dim * sizeof *shape);
    for (int i = 0; i < change->count; i++)
        shape[change->dim + i] = change->sizes[i];
    memcpy(shape + change->dim + change->count, part->shape + behind,
           (size_t)after * sizeof *shape);
    return fsdp_derive_reshape(run->arena, part, ndim, shape, out, err);
}

static fsdp_status compute_sizes(map_run *run, const map_step *step, int64_t *sizes_out,
                                 fsdp_error *err)
{
    for (int i = 0; i < step->size_count; i++)
        FSDP_TRY(map_sizes_compute(&run->sizes, step->sizes[i], &sizes_out[i], err));
    return FSDP_OK;
}

/* Tensor `list` of the list after step `number` of the rule; 0: before the first step. The depth is at most
 * MAP_STEPS. */
static fsdp_status map_make(map_run *run, int number, int list, const map_binding *binding,
                            const fsdp_derived **out, fsdp_error *err);

/* --- steps that make one tensor of several ------------------------------------------------------------ */

/* Part number i of the join: the number of a variable, or a place in the list. */
static fsdp_status make_joined_part(map_run *run, int number, int list, const map_binding *binding,
                                    const fsdp_derived **out, fsdp_error *err)
{
    const map_step *step = &run->steps[number - 1];
    FSDP_TRY(map_make(run, number - 1, list, binding, out, err));
    if (step->verb != MAP_STACK)
        return FSDP_OK;
    const dims_change row = {.dim = step->dim, .count = 1, .sizes = (const int64_t[]){1}};
    return replace_dims(run, *out, &row, out, err);
}

static fsdp_status make_join(map_run *run, int number, int list, const map_binding *binding,
                             const fsdp_derived **out, fsdp_error *err)
{
    const map_step *step = &run->steps[number - 1];
    bool is_list = step->verb == MAP_CONCAT;
    int64_t count = is_list
                        ? run->lists[number - 1]
                        : map_bindings_count(&run->bindings[number - 1], binding, step->variable);
    if (count == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "there is nothing to join in dim %d", step->dim);
    const fsdp_derived **parts = fsdp_alloc((size_t)count, sizeof(void *));
    map_binding one = *binding;
    fsdp_status st = parts ? FSDP_OK : fsdp_fail_memory(err, "a map");
    for (int64_t i = 0; i < count && st == FSDP_OK; i++) {
        if (!is_list)
            one.values[step->variable] = i;
        st = make_joined_part(run, number, is_list ? (int)i : list, &one, &parts[i], err);
    }
    if (st == FSDP_OK)
        st = fsdp_derive_join(run->arena, parts, (size_t)count, step->dim, out, err);
    fsdp_free(parts);
    return st;
}

/* --- steps that make several tensors of one ------------------------------------------------------------ */

/* Number `at[0]` of `at[1]` equal parts of a dim. */
static fsdp_status take_part(map_run *run, const fsdp_derived *part, int dim, const int64_t at[2],
                             const fsdp_derived **out, fsdp_error *err)
{
    char shape[128];
    FSDP_TRY(check_dim(part, dim, err));
    if (at[1] <= 0 || part->shape[dim] % at[1] != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "dim %d of %s cannot be divided into %" PRId64 " equal parts", dim,
                         fsdp_derived_text(part, shape, sizeof shape), at[1]);
    int64_t rows = part->shape[dim] / at[1];
    return fsdp_derive_slice(run->arena, part, dim, (const int64_t[]){at[0] * rows, rows}, out,
                             err);
}

static fsdp_status make_split(map_run *run, int number, int list, const map_binding *binding,
                              const fsdp_derived **out, fsdp_error *err)
{
    const map_step *step = &run->steps[number - 1];
    const fsdp_derived *part = NULL;
    int64_t sizes[MAP_NAMES], lo = 0, all = 0;
    bool is_huge = false;
    char shape[128];
    FSDP_TRY(map_make(run, number - 1, 0, binding, &part, err));
    if (step->size_count == 0)
        return take_part(run, part, step->dim, (const int64_t[]){list, run->lists[number]}, out,
                         err);
    FSDP_TRY(check_dim(part, step->dim, err));
    FSDP_TRY(compute_sizes(run, step, sizes, err));
    for (int i = 0; i < step->size_count; i++) {
        lo = i == list ? all : lo;
        is_huge = is_huge || fsdp_add_overflow(all, sizes[i], &all);
    }
    if (is_huge || all != part->shape[step->dim])
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "dim %d of %s does not have the %" PRId64 " rows of its parts", step->dim,
                         fsdp_derived_text(part, shape, sizeof shape), all);
    return fsdp_derive_slice(run->arena, part, step->dim, (const int64_t[]){lo, sizes[list]}, out,
                             err);
}

/* One row, or one of equal parts, by the number of a variable. */
static fsdp_status make_part(map_run *run, int number, int list, const map_binding *binding,
                             const fsdp_derived **out, fsdp_error *err)
{
    const map_step *step = &run->steps[number - 1];
    map_binding before = *binding;
    const fsdp_derived *part = NULL;
    int64_t at[2] = {binding->values[step->variable], 1};
    before.values[step->variable] = -1;
    FSDP_TRY(map_make(run, number - 1, list, &before, &part, err));
    if (step->verb == MAP_SCATTER) {
        FSDP_TRY(map_sizes_compute(&run->sizes, step->sizes[0], &at[1], err));
        return take_part(run, part, step->dim, at, out, err);
    }
    FSDP_TRY(fsdp_derive_slice(run->arena, part, step->dim, at, &part, err));
    return replace_dims(run, part, &(dims_change){.dim = step->dim, .old_count = 1}, out, err);
}

/* --- steps that choose a tensor ------------------------------------------------------------------------ */

static fsdp_status make_first(map_run *run, int number, int list, const map_binding *binding,
                              const fsdp_derived **out, fsdp_error *err)
{
    const map_step *step = &run->steps[number - 1];
    map_binding before = *binding, key = map_counted_key(step, binding, false);
    if (!map_counted_find(&run->counted[number - 1], step, 0, &key))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the first tensor of a map is lost");
    before.values[step->variable] = key.values[MAP_VARIABLES - 1];
    return map_make(run, number - 1, list, &before, out, err);
}

/* The tensor whose variables together have this number in their order. */
static fsdp_status make_numbered(map_run *run, int number, int list, const map_binding *binding,
                                 const fsdp_derived **out, fsdp_error *err)
{
    const map_step *step = &run->steps[number - 1];
    const binding_list *counted = &run->counted[number - 1];
    map_binding before = *binding;
    map_binding key = map_counted_key(step, binding, run->counts_all[number - 1]);
    if (!map_counted_find(counted, step, binding->values[step->variable], &key))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a number of a map is lost");
    before.values[step->variable] = -1;
    for (int i = 0; i < step->counted_count; i++)
        before.values[step->counted[i]] = key.values[MAP_VARIABLES - step->counted_count + i];
    return map_make(run, number - 1, list, &before, out, err);
}

/* --- steps that change a tensor ------------------------------------------------------------------------ */

static fsdp_status make_padded(map_run *run, const map_step *step, const fsdp_derived *part,
                               const fsdp_derived **out, fsdp_error *err)
{
    int64_t sizes[2], shape[FSDP_MAX_DIMS];
    const fsdp_derived *both[2] = {part};
    FSDP_TRY(check_dim(part, step->dim, err));
    FSDP_TRY(compute_sizes(run, step, sizes, err));
    if (step->verb == MAP_UNPAD)
        return fsdp_derive_slice(run->arena, part, step->dim, (const int64_t[]){0, sizes[0]}, out,
                                 err);
    *out = part;
    if (sizes[1] <= part->shape[step->dim])
        return FSDP_OK;
    memcpy(shape, part->shape, (size_t)part->ndim * sizeof *shape);
    shape[step->dim] = sizes[1] - part->shape[step->dim];
    FSDP_TRY(fsdp_derive_zeros(run->arena, part->dtype, part->ndim, shape, &both[1], err));
    return fsdp_derive_join(run->arena, both, 2, step->dim, out, err);
}

static fsdp_status make_transposed(map_run *run, const map_step *step, const fsdp_derived *part,
                                   const fsdp_derived **out, fsdp_error *err)
{
    int order[FSDP_MAX_DIMS];
    FSDP_TRY(check_dim(part, step->dim, err));
    FSDP_TRY(check_dim(part, step->order[0], err));
    for (int d = 0; d < part->ndim; d++)
        order[d] = d;
    order[step->dim] = step->order[0];
    order[step->order[0]] = step->dim;
    return fsdp_derive_permute(run->arena, part, order, out, err);
}

static fsdp_status make_permuted(map_run *run, const map_step *step, const fsdp_derived *part,
                                 const fsdp_derived **out, fsdp_error *err)
{
    char shape[128];
    if (step->order_count != part->ndim)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a tensor %s does not have %d dims",
                         fsdp_derived_text(part, shape, sizeof shape), step->order_count);
    return fsdp_derive_permute(run->arena, part, step->order, out, err);
}

/* Sizes of dims that lie in one dim; "_" is what the others leave of it. */
static fsdp_status inner_sizes(map_run *run, const map_step *step, int64_t all, int64_t *sizes_out,
                               fsdp_error *err)
{
    int64_t product = 1;
    int open = -1;
    for (int i = 0; i < step->size_count; i++) {
        if (open < 0 && strcmp(step->sizes[i], "_") == 0) {
            open = i;
            continue;
        }
        FSDP_TRY(map_sizes_compute(&run->sizes, step->sizes[i], &sizes_out[i], err));
        if (fsdp_mul_overflow(product, sizes_out[i], &product))
            return fsdp_fail(err, FSDP_ERR_USAGE, "the sizes are too large");
    }
    if (product <= 0 || all % product != 0 || (open < 0 && product != all))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a dim of %" PRId64 " does not have the sizes of its parts, "
                         "%" PRId64 " together",
                         all, product);
    if (open >= 0)
        sizes_out[open] = all / product;
    return FSDP_OK;
}

static fsdp_status make_flat(map_run *run, const map_step *step, const fsdp_derived *part,
                             const fsdp_derived **out, fsdp_error *err)
{
    int64_t sizes[MAP_NAMES], all = 1;
    int count = step->size_count,
        last = step->verb == MAP_FLATTEN ? step->dim + count - 1 : step->dim;
    FSDP_TRY(check_dim(part, last, err));
    for (int d = step->dim; d <= last; d++)
        all *= part->shape[d];
    FSDP_TRY(inner_sizes(run, step, all, sizes, err));
    if (step->verb == MAP_UNFLATTEN)
        return replace_dims(run, part, &(dims_change){step->dim, 1, count, sizes}, out, err);
    if (memcmp(sizes, part->shape + step->dim, (size_t)count * sizeof *sizes) != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the sizes to flatten do not fit the dims");
    return replace_dims(run, part, &(dims_change){step->dim, count, 1, &all}, out, err);
}

static fsdp_status make_reshaped(map_run *run, const map_step *step, const fsdp_derived *part,
                                 const fsdp_derived **out, fsdp_error *err)
{
    int64_t sizes[MAP_NAMES];
    int old = step->split_at;
    char shape[128];
    FSDP_TRY(compute_sizes(run, step, sizes, err));
    if (part->ndim != old || memcmp(sizes, part->shape, (size_t)old * sizeof *sizes) != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a tensor %s does not have the sizes to reshape",
                         fsdp_derived_text(part, shape, sizeof shape));
    return fsdp_derive_reshape(run->arena, part, step->size_count - old, sizes + old, out, err);
}

static fsdp_status make_changed(map_run *run, const map_step *step, const fsdp_derived *part,
                                const fsdp_derived **out, fsdp_error *err)
{
    switch (step->verb) {
    case MAP_PAD:
    case MAP_UNPAD: return make_padded(run, step, part, out, err);
    case MAP_TRANSPOSE: return make_transposed(run, step, part, out, err);
    case MAP_PERMUTE: return make_permuted(run, step, part, out, err);
    case MAP_FLATTEN:
    case MAP_UNFLATTEN: return make_flat(run, step, part, out, err);
    case MAP_RESHAPE: return make_reshaped(run, step, part, out, err);
    case MAP_ADD: return fsdp_derive_add(run->arena, part, step->factor, out, err);
    case MAP_EXP: return fsdp_derive_exp(run->arena, part, out, err);
    case MAP_LOG: return fsdp_derive_log(run->arena, part, out, err);
    default: return fsdp_derive_scale(run->arena, part, step->factor, out, err);
    }
}

enum { MADE_MOST = 1 << 21 };

static fsdp_status map_make(map_run *run, int number, int list, const map_binding *binding,
                            const fsdp_derived **out, fsdp_error *err)
{
    const fsdp_derived *part = NULL;
    if (run->made++ == MADE_MOST)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "the map makes more than %d tensors of steps",
                         MADE_MOST);
    if (number == 0)
        return make_stored(run, list, binding, out, err);
    const map_step *step = &run->steps[number - 1];
    switch (step->verb) {
    case MAP_STACK:
    case MAP_GATHER:
    case MAP_CONCAT: return make_join(run, number, list, binding, out, err);
    case MAP_UNSTACK:
    case MAP_SCATTER: return make_part(run, number, list, binding, out, err);
    case MAP_SPLIT: return make_split(run, number, list, binding, out, err);
    case MAP_FIRST: return make_first(run, number, list, binding, out, err);
    case MAP_NUMBER: return make_numbered(run, number, list, binding, out, err);
    default:
        FSDP_TRY(map_make(run, number - 1, list, binding, &part, err));
        *out = part;
        return step->only < 0 || step->only == list ? make_changed(run, step, part, out, err)
                                                    : FSDP_OK;
    }
}

/* The tensors that step `number`, which takes rows or parts, makes of one. */
static fsdp_status map_count_parts(map_run *run, int number, const map_binding *binding,
                                   int64_t *count_out, fsdp_error *err)
{
    const map_step *step = &run->steps[number];
    const fsdp_derived *part = NULL;
    if (step->verb == MAP_SCATTER)
        return map_sizes_compute(&run->sizes, step->sizes[0], count_out, err);
    FSDP_TRY(map_make(run, number, 0, binding, &part, err));
    FSDP_TRY(check_dim(part, step->dim, err));
    *count_out = part->shape[step->dim];
    return FSDP_OK;
}

/* === rules ==================================================================================== */

/* --- bindings of a rule ------------------------------------------------------------------------------- */

/* A stacked variable counts from 0 without gaps; that of a first tensor may have any numbers. */
static fsdp_status merge_numbers(map_run *run, int number, fsdp_error *err)
{
    const map_step *step = &run->steps[number];
    const binding_list *before = &run->bindings[number];
    binding_list *after = &run->bindings[number + 1];
    for (size_t i = 0; i < before->count; i++) {
        map_binding one = before->items[i], previous = one;
        if (one.values[step->variable] < 0)
            return fsdp_fail(err, FSDP_ERR_USAGE, "no name has {%s}, whose tensors become one",
                             run->rule->variables.names[step->variable]);
        if (step->verb != MAP_FIRST && previous.values[step->variable]-- > 0 &&
            !map_bindings_have(before, &previous))
            return fsdp_fail(err, FSDP_ERR_USAGE, "number %" PRId64 " of {%s} is missing",
                             previous.values[step->variable],
                             run->rule->variables.names[step->variable]);
        one.values[step->variable] = -1;
        FSDP_TRY(map_bindings_add(after, &one, err));
    }
    map_bindings_sort(after);
    return FSDP_OK;
}

enum { PARTS_MOST = 1 << 20 };

static fsdp_status spread_numbers(map_run *run, int number, fsdp_error *err)
{
    const binding_list *before = &run->bindings[number];
    int64_t count = 0;
    for (size_t i = 0; i < before->count; i++) {
        map_binding one = before->items[i];
        FSDP_TRY(map_count_parts(run, number, &one, &count, err));
        if (count > PARTS_MOST - (int64_t)run->bindings[number + 1].count)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "a rule makes more than %d tensors", PARTS_MOST);
        for (int64_t k = 0; k < count; k++) {
            one.values[run->steps[number].variable] = k;
            FSDP_TRY(map_bindings_add(&run->bindings[number + 1], &one, err));
        }
    }
    map_bindings_sort(&run->bindings[number + 1]);
    return FSDP_OK;
}

static fsdp_status copy_bindings(map_run *run, int number, fsdp_error *err)
{
    for (size_t i = 0; i < run->bindings[number].count; i++)
        FSDP_TRY(
            map_bindings_add(&run->bindings[number + 1], &run->bindings[number].items[i], err));
    return FSDP_OK;
}

/* Tensors for which the first one stands are taken, too. */
static fsdp_status take_all(map_run *run, int number, fsdp_error *err)
{
    const fsdp_derived *ignored;
    for (size_t i = 0; i < run->bindings[number].count; i++)
        for (int list = 0; list < run->lists[number]; list++)
            FSDP_TRY(map_make(run, number, list, &run->bindings[number].items[i], &ignored, err));
    return FSDP_OK;
}

/* --- numbers of several variables ------------------------------------------------------------------- */

/* The variables of a line "numbered" that a step counts, by their names there. False: it lacks one. */
static bool find_counted(const map_run *run, const map_step *step, const map_numbered *numbered,
                         int found[MAP_COUNTED])
{
    for (int i = 0; i < step->counted_count; i++) {
        const char *name = run->rule->variables.names[step->counted[i]];
        found[i] = -1;
        for (int k = 0; k < numbered->variables.count; k++)
            if (strcmp(numbered->variables.names[k], name) == 0)
                found[i] = k;
        if (found[i] < 0)
            return false;
    }
    return true;
}

/* The line by which a step counts; NULL: it counts the names of its rule. */
static const map_numbered *find_numbered(const map_run *run, const map_step *step,
                                         int found[MAP_COUNTED])
{
    for (size_t i = 0; i < run->map->numbered_count; i++)
        if (find_counted(run, step, &run->map->numbered[i], found))
            return &run->map->numbered[i];
    return NULL;
}

static fsdp_status count_all(map_run *run, int number, const map_numbered *numbered,
                             const int found[MAP_COUNTED], fsdp_error *err)
{
    const map_step *step = &run->steps[number];
    map_binding there, here = {0};
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE ||
            !map_pattern_matches(&numbered->name, entry->name, entry->name_size, &there))
            continue;
        for (int k = 0; k < step->counted_count; k++)
            here.values[step->counted[k]] = there.values[found[k]];
        map_binding key = map_counted_key(step, &here, true);
        FSDP_TRY(map_bindings_add(&run->counted[number], &key, err));
    }
    return FSDP_OK;
}

/* Adds the keys of the bindings before the step. */
static fsdp_status add_keys(map_run *run, int number, bool counts_all, fsdp_error *err)
{
    const binding_list *before = &run->bindings[number];
    for (size_t i = 0; i < before->count; i++) {
        map_binding key = map_counted_key(&run->steps[number], &before->items[i], counts_all);
        FSDP_TRY(map_bindings_add(&run->counted[number], &key, err));
    }
    map_bindings_sort(&run->counted[number]);
    return FSDP_OK;
}

/* The values of several variables become one number. */
static fsdp_status number_values(map_run *run, int number, fsdp_error *err)
{
    const map_step *step = &run->steps[number];
    const binding_list *before = &run->bindings[number];
    binding_list *counted = &run->counted[number];
    int found[MAP_COUNTED];
    const map_numbered *numbered = find_numbered(run, step, found);
    bool all = run->counts_all[number] = numbered != NULL;
    counted->count = 0;
    if (numbered)
        FSDP_TRY(count_all(run, number, numbered, found, err));
    FSDP_TRY(add_keys(run, number, all, err));
    for (size_t i = 0; i < before->count; i++) {
        map_binding one = before->items[i], key = map_counted_key(step, &one, all);
        for (int k = 0; k < step->counted_count; k++)
            one.values[step->counted[k]] = -1;
        one.values[step->variable] = map_counted_number(counted, step, &key);
        FSDP_TRY(map_bindings_add(&run->bindings[number + 1], &one, err));
    }
    map_bindings_sort(&run->bindings[number + 1]);
    return FSDP_OK;
}

/* Bindings and the length of the list after step `number`. */
static fsdp_status follow_step(map_run *run, int number, fsdp_error *err)
{
    const map_step *step = &run->steps[number];
    map_verb verb = step->verb;
    run->lists[number + 1] = verb == MAP_CONCAT  ? 1
                             : verb != MAP_SPLIT ? run->lists[number]
                             : step->size_count  ? step->size_count
                                                 : run->to_count;
    if (verb == MAP_FIRST) {
        run->counted[number].count = 0;
        FSDP_TRY(add_keys(run, number, false, err));
        FSDP_TRY(take_all(run, number, err));
    }
    if (verb == MAP_STACK || verb == MAP_GATHER || verb == MAP_FIRST)
        return merge_numbers(run, number, err);
    if (verb == MAP_NUMBER)
        return number_values(run, number, err);
    if (verb == MAP_UNSTACK || verb == MAP_SCATTER)
        return spread_numbers(run, number, err);
    return copy_bindings(run, number, err);
}

/* Names of tensors that match the first pattern of the rule. */
static fsdp_status find_bindings(map_run *run, fsdp_error *err)
{
    map_binding binding;
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        if (entry->kind != FSDP_ENTRY_VALUE && !run->is_taken[i] &&
            map_pattern_matches(&run->from[0], entry->name, entry->name_size, &binding))
            FSDP_TRY(map_bindings_add(&run->bindings[0], &binding, err));
    }
    map_bindings_sort(&run->bindings[0]);
    return FSDP_OK;
}

/* --- a rule ------------------------------------------------------------------------------------------- */

static void choose_rule(map_run *run, const map_rule *rule, bool from_right)
{
    int count = rule->step_count;
    run->rule = rule;
    run->to_right = !from_right;
    run->from = from_right ? rule->right : rule->left;
    run->to = from_right ? rule->left : rule->right;
    run->from_count = from_right ? rule->right_count : rule->left_count;
    run->to_count = from_right ? rule->left_count : rule->right_count;
    for (int i = 0; i < count; i++)
        run->steps[i] = from_right ? map_step_inverse(&rule->steps[count - 1 - i]) : rule->steps[i];
    run->lists[0] = run->from_count;
    for (int i = 0; i <= MAP_STEPS; i++)
        run->bindings[i].count = 0;
}

/* Does the other side keep this name of a tensor that has another name there, too? */
static bool keeps_tied(const map_run *run, const char *name)
{
    for (size_t i = 0; i < run->map->tied_count && !run->sizes.call->keeps_tied; i++)
        if (run->map->tied[i].is_right == run->to_right &&
            strcmp(run->map->tied[i].name, name) == 0)
            return false;
    return true;
}

static fsdp_status add_tensor(map_run *run, int number, const map_binding *binding, fsdp_error *err)
{
    const fsdp_derived *tensor = NULL;
    fsdp_text name = {0};
    FSDP_TRY(map_make(run, run->rule->step_count, number, binding, &tensor, err));
    bool is_known = render_name(&run->to[number], binding, &name);
    fsdp_status st = FSDP_OK;
    if (name.failed)
        st = fsdp_fail_memory(err, "a name");
    else if (!is_known)
        st =
            fsdp_fail(err, FSDP_ERR_USAGE, "a variable of '%s' has no value", run->to[number].text);
    else
        st = fsdp_derivation_add_tied(run->derivation, (fsdp_derived_name){name.data, name.size},
                                      tensor, keeps_tied(run, name.data), err);
    fsdp_text_release(&name);
    return st;
}

/* A rule that gives every tensor another name, whatever its "{rest:*}" is. */
static fsdp_status rename_rest(map_run *run, fsdp_error *err)
{
    map_binding binding;
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        fsdp_text name = {0};
        if (entry->kind == FSDP_ENTRY_VALUE || run->is_taken[i] ||
            !map_pattern_matches(&run->from[0], entry->name, entry->name_size, &binding))
            continue;
        bool is_known = render_name(&run->to[0], &binding, &name);
        fsdp_status st = name.failed ? fsdp_fail_memory(err, "a name")
                         : is_known
                             ? fsdp_derivation_rename(run->derivation, i,
                                                      (fsdp_derived_name){name.data, name.size},
                                                      keeps_tied(run, name.data), err)
                             : fsdp_fail(err, FSDP_ERR_USAGE, "a variable of '%s' has no value",
                                         run->to[0].text);
        fsdp_text_release(&name);
        FSDP_TRY(st);
        run->is_taken[i] = true;
    }
    return FSDP_OK;
}

static void leave_out(map_run *run)
{
    map_binding binding;
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        for (int k = 0; k < run->from_count && !run->is_taken[i]; k++)
            run->is_taken[i] =
                map_pattern_matches(&run->from[k], entry->name, entry->name_size, &binding);
    }
}

static fsdp_status apply_rule(map_run *run, fsdp_error *err)
{
    int steps = run->rule->step_count;
    if (run->to_count == 0) {
        leave_out(run);
        return FSDP_OK;
    }
    if (run->rule->has_rest)
        return rename_rest(run, err);
    FSDP_TRY(find_bindings(run, err));
    if (run->bindings[0].count == 0)
        return FSDP_OK;
    for (int i = 0; i < steps; i++)
        FSDP_TRY(follow_step(run, i, err));
    if (run->lists[steps] != run->to_count)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the steps make %d tensors, but the other side has %d names",
                         run->lists[steps], run->to_count);
    for (size_t i = 0; i < run->bindings[steps].count; i++)
        for (int k = 0; k < run->to_count; k++)
            FSDP_TRY(add_tensor(run, k, &run->bindings[steps].items[i], err));
    return FSDP_OK;
}

/* --- the whole ---------------------------------------------------------------------------------------- */

static bool may_stay(const fsdp_map *map, const fsdp_map_call *call, const fsdp_entry *entry)
{
    return map->keeps_others || (call->may_stay && call->may_stay(call->context, entry));
}

/* Values of the other layout mean nothing in one that has values of its own. */
static bool has_own_values(const fsdp_map *map, bool right)
{
    for (size_t i = 0; i < map->number_count; i++)
        if (map->numbers[i].is_right == right)
            return true;
    return strcmp(fsdp_map_layout(map, right), "gguf") == 0;
}

/* Values that the side has, unless the other one brings them. */
static fsdp_status add_values(map_run *run, bool right, fsdp_error *err)
{
    for (size_t i = 0; i < run->map->number_count; i++) {
        const map_number *number = &run->map->numbers[i];
        fsdp_value value = fsdp_value_i64(0);
        bool is_there = run->map->value_count > 0 &&
                        fsdp_sd_find(run->sd, number->name, strlen(number->name)) >= 0;
        if (number->is_right != right || is_there)
            continue;
        fsdp_status st = map_sizes_compute(&run->sizes, number->expression, &value.as.i64, err);
        if (st != FSDP_OK) {
            fsdp_error_prefix(err, "%s, line %d, '%s'", run->map->path, number->line, number->name);
            return st;
        }
        FSDP_TRY(fsdp_derivation_add_value(
            run->derivation, (fsdp_derived_name){number->name, strlen(number->name)}, &value, err));
    }
    return FSDP_OK;
}

/* "values LEFT* = RIGHT*": the beginning of a value's name, and the one that replaces it. NULL: none. */
static const char *find_beginning(const map_run *run, const fsdp_entry *entry, bool from_right,
                                  const char **other_out)
{
    for (size_t i = 0; i < run->map->value_count; i++) {
        const char *from = run->map->values[i][from_right];
        size_t size = strlen(from);
        *other_out = run->map->values[i][!from_right];
        if (entry->name_size >= size && memcmp(entry->name, from, size) == 0)
            return from;
    }
    return NULL;
}

/* A value stays, or gets the name of the other side, where the map has lines for values. An object can only
 * keep its name. */
static fsdp_status keep_value(map_run *run, size_t number, bool from_right, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(run->sd, number);
    const char *other, *from = find_beginning(run, entry, from_right, &other);
    fsdp_text name = {0};
    if (run->map->value_count == 0)
        return fsdp_derivation_keep(run->derivation, number, err);
    if (!from || (strcmp(from, other) != 0 && fsdp_value_is_opaque(&entry->value)))
        return FSDP_OK;
    size_t size = strlen(from);
    fsdp_text_addf(&name, "%s", other);
    fsdp_text_add(&name, entry->name + size, entry->name_size - size);
    fsdp_status st = name.failed
                         ? fsdp_fail_memory(err, "a name")
                         : fsdp_derivation_keep_as(run->derivation, number,
                                                   (fsdp_derived_name){name.data, name.size}, err);
    fsdp_text_release(&name);
    return st;
}

/* Values stay; so do tensors that no rule takes and that may. */
static fsdp_status keep_others(map_run *run, bool from_right, const fsdp_map_call *call,
                               fsdp_error *err)
{
    enum { SHOWN = 3 };
    fsdp_text names = {0};
    size_t count = 0;
    char shown[200];
    bool drops_values = run->map->value_count == 0 &&
                        (has_own_values(run->map, false) || has_own_values(run->map, true));
    for (size_t i = 0; i < fsdp_sd_count(run->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(run->sd, i);
        if (run->is_taken[i] || (entry->kind == FSDP_ENTRY_VALUE && drops_values))
            continue;
        if (entry->kind == FSDP_ENTRY_VALUE) {
            FSDP_TRY(keep_value(run, i, from_right, err));
        } else if (may_stay(run->map, call, entry)) {
            FSDP_TRY(fsdp_derivation_keep(run->derivation, i, err));
        } else if (count++ < SHOWN) {
            fsdp_text_addf(&names, "%s'%s'", count > 1 ? ", " : "",
                           fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
        }
    }
    if (count > 0)
        (void)fsdp_fail(
            err, FSDP_ERR_USAGE,
            "no rule of the map '%s' takes %.*s%s; leave out what is not needed with --drop REGEX",
            run->map->name, (int)names.size, names.data ? names.data : "",
            count > SHOWN ? " and more" : "");
    fsdp_text_release(&names);
    return count > 0 ? FSDP_ERR_USAGE : FSDP_OK;
}

static fsdp_status apply_rules(map_run *run, bool from_right, fsdp_error *err)
{
    for (size_t i = 0; i < run->map->rule_count; i++) {
        const map_rule *rule = run->map->rules[i];
        if (!(rule->directions & (from_right ? MAP_TO_LEFT : MAP_TO_RIGHT)))
            continue;
        choose_rule(run, rule, from_right);
        fsdp_status st = apply_rule(run, err);
        if (st != FSDP_OK) {
            fsdp_error_prefix(err, "%s, line %d, '%s'", run->map->path, rule->line,
                              run->from[0].text);
            return st;
        }
    }
    return FSDP_OK;
}

static void release(map_run *run)
{
    for (int i = 0; i <= MAP_STEPS; i++)
        fsdp_free(run->bindings[i].items);
    for (int i = 0; i < MAP_STEPS; i++)
        fsdp_free(run->counted[i].items);
    fsdp_free(run->is_taken);
    fsdp_free(run);
}

/* The files that decide about the result, besides the checkpoint's own. */
static fsdp_status note_files(map_run *run, const fsdp_map_call *call, fsdp_error *err)
{
    FSDP_TRY(
        fsdp_derivation_note_file(run->derivation, call->config ? call->config->path : NULL, err));
    return fsdp_derivation_note_file(run->derivation, run->map->is_file ? run->map->path : NULL,
                                     err);
}

static fsdp_status derive(map_run *run, bool from_right, const fsdp_map_call *call, fsdp_error *err)
{
    FSDP_TRY(note_files(run, call, err));
    run->is_taken = fsdp_alloc(fsdp_sd_count(run->sd), sizeof *run->is_taken);
    if (!run->is_taken)
        return fsdp_fail_memory(err, "a map");
    FSDP_TRY(apply_rules(run, from_right, err));
    FSDP_TRY(add_values(run, !from_right, err));
    return keep_others(run, from_right, call, err);
}

fsdp_status fsdp_map_apply(const fsdp_map *map, bool from_right, const fsdp_map_call *call,
                           fsdp_checkpoint **checkpoint, fsdp_error *err)
{
    fsdp_checkpoint *base = *checkpoint;
    map_run *run = fsdp_alloc(1, sizeof *run);
    *checkpoint = NULL;
    if (!run) {
        fsdp_checkpoint_close(base);
        return fsdp_fail_memory(err, "a map");
    }
    run->map = map;
    run->sd = base->manifest.sd;
    run->sizes =
        (map_sizes){map->sizes, map->size_count, call, base->manifest.sd, run->size_values};
    fsdp_status st = fsdp_derivation_begin(base, &run->derivation, err);
    if (st == FSDP_OK) {
        run->arena = fsdp_derivation_arena(run->derivation);
        st = derive(run, from_right, call, err);
        if (st == FSDP_OK)
            st = fsdp_derivation_finish(run->derivation, checkpoint, err);
        else
            fsdp_derivation_cancel(run->derivation);
    }
    release(run);
    return st;
}

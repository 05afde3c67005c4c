/* Makes the derived tensors of a rule, from its last step back to the stored tensors. See map_run.h. */
#include "statedict/map/map_run.h"

#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <string.h>

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

map_step map_step_inverse(const map_step *step)
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
    bool is_known = map_pattern_render(&run->from[number], binding, &name);
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
        return fsdp_fail(err, FSDP_ERR_USAGE, "nothing to join in dim %d", step->dim);
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
        return fsdp_fail(err, FSDP_ERR_USAGE, "the sizes to flatten are those of other dims");
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
    default: return fsdp_derive_scale(run->arena, part, step->factor, out, err);
    }
}

enum { MADE_MOST = 1 << 21 };

/* The depth is at most MAP_STEPS. */
fsdp_status map_make(map_run *run, int number, int list, const map_binding *binding,
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

fsdp_status map_count_parts(map_run *run, int number, const map_binding *binding,
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

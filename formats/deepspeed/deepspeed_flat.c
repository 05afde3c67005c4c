/* Flat tensors, split into boxes of the parameters in them, and what files must agree on: see deepspeed.h. */
#include "formats/deepspeed/deepspeed.h"
#include "base/data/box_internal.h"
#include "kernels/kernels.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* === files that agree ========================================================================= */

/*
 * Compares the files of a tag. A save into a tag that was there (`best`) writes one file after the other, and
 * when it is cut short some are of the new step and some of the old one.
 *
 *   numbers    steps, ranks and versions are those of the file before: deepspeed_model.c, deepspeed_optim.c
 *   weights    the rounded weights of the module are those of the masters
 *   ranks      two ranks do not have equal masters and moments: one file is a copy of the other
 */

enum { COMPARED = 1024 }; /* elements of a weight that are compared with its master */

/* --- weights -------------------------------------------------------------------------------------- */

static bool is_contiguous(const torch_tensor *tensor)
{
    int64_t stride = (int64_t)fsdp_dtype_size(tensor->dtype);
    for (int dim = tensor->ndim - 1; dim >= 0; dim--) {
        if (tensor->shape[dim] > 1 && tensor->strides[dim] != stride)
            return false;
        stride *= tensor->shape[dim];
    }
    return tensor->fix == 0;
}

static fsdp_status read_elements(const ds_set *set, const torch_tensor *tensor, int64_t first,
                                 size_t count, void *data, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(tensor->dtype);
    return torch_tensor_pread(set->source, tensor, first * (int64_t)size, data, count * size, err);
}

/* Not a number is equal to itself here: a run that diverged rounds to it. */
static bool same_numbers(const void *a, const void *b, fsdp_dtype dtype, size_t count)
{
    double left[COMPARED], right[COMPARED];
    fsdp_kernels_get()->cast(left, FSDP_F64, a, dtype, count, FSDP_OVERFLOW_INF);
    fsdp_kernels_get()->cast(right, FSDP_F64, b, dtype, count, FSDP_OVERFLOW_INF);
    for (size_t i = 0; i < count; i++)
        if (!(left[i] == right[i] || (isnan(left[i]) && isnan(right[i]))))
            return false;
    return true;
}

fsdp_status ds_rounds_to(const ds_set *set, const torch_tensor *master, const ds_run *run,
                         const torch_tensor *weight, bool *does_out, fsdp_error *err)
{
    char exact[COMPARED * 8], rounded[COMPARED * 8], stored[COMPARED * 8];
    size_t count = run->count < COMPARED ? (size_t)run->count : COMPARED;
    *does_out = true;
    if (!is_contiguous(weight) || !is_contiguous(master) ||
        !fsdp_dtype_describe(weight->dtype)->is_float ||
        !fsdp_dtype_describe(master->dtype)->is_float)
        return FSDP_OK; /* its shape alone must do */
    FSDP_TRY(read_elements(set, master, run->at, count, exact, err));
    FSDP_TRY(read_elements(set, weight, run->first, count, stored, err));
    fsdp_kernels_get()->cast(rounded, weight->dtype, exact, master->dtype, count,
                             FSDP_OVERFLOW_INF);
    *does_out = same_numbers(rounded, stored, weight->dtype, count);
    return FSDP_OK;
}

static const torch_tensor *weight_of(const ds_set *set, const ds_param *param)
{
    const uint64_t *outside = fsdp_name_table_find(&set->outside, param->name, param->name_size);
    return param->weight ? param->weight : outside ? set->weights[*outside] : NULL;
}

/* Compares a run of a parameter's master with its weight in the module, or in a file of its own, if any. */
static fsdp_status agree_weight(const ds_set *set, const ds_param *param, const torch_tensor *flat,
                                const ds_run *run, fsdp_error *err)
{
    const torch_tensor *weight = weight_of(set, param);
    char shown[200];
    if (!weight || run->count == 0)
        return FSDP_OK;
    fsdp_box whole = fsdp_box_whole(weight->ndim, weight->shape);
    bool does = fsdp_box_count(&whole) == param->count;
    if (does)
        FSDP_TRY(ds_rounds_to(set, flat, run, weight, &does, err));
    if (does)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': the weight '%s' of its module differs from that of '%s' rounded to "
                     "%s" FSDP_TWO_SAVES,
                     fsdp_source_file_path(set->source, (size_t)weight->storage.file),
                     fsdp_printable(param->name, param->name_size, shown, sizeof shown),
                     fsdp_source_file_path(set->source, (size_t)flat->storage.file),
                     fsdp_dtype_name(weight->dtype));
}

/* --- ranks ---------------------------------------------------------------------------------------- */

enum { HEAD = 64 << 10 };

fsdp_status ds_print_add(ds_set *set, const torch_tensor *tensor, bool tells, fsdp_error *err)
{
    size_t element = fsdp_dtype_size(tensor->dtype);
    int64_t all = tensor->ndim == 1 ? tensor->shape[0] : 0;
    size_t count = all < (int64_t)(HEAD / element) ? (size_t)all : HEAD / element;
    if (!is_contiguous(tensor) || count == 0)
        return FSDP_OK;
    char *data = fsdp_alloc(count, element);
    if (!data)
        return fsdp_fail_memory(err, "comparing ranks");
    fsdp_status st = read_elements(set, tensor, 0, count, data, err);
    if (st == FSDP_OK) {
        fsdp_hash hash = fsdp_kernels_get()->hash(data, count * element);
        fsdp_text_add(&set->print, (const char *)&hash, sizeof hash);
        fsdp_text_add(&set->print, (const char *)&all, sizeof all);
        set->print_tells |= tells && fsdp_fact_tells(data, count * element, element);
    }
    fsdp_free(data);
    return st;
}

fsdp_status ds_print_end(ds_set *set, const char *what, const torch_archive *archive,
                         fsdp_error *err)
{
    const char *path = ds_path(set, archive), *key = NULL;
    uint64_t *first = NULL;
    if (set->print.failed)
        return fsdp_fail_memory(err, "comparing ranks");
    if (set->print_tells) {
        fsdp_hash hash = fsdp_kernels_get()->hash(set->print.data, set->print.size);
        key = fsdp_arena_strndup(&set->arena, (const char *)&hash, sizeof hash);
    }
    bool tells = set->print_tells;
    set->print.size = 0;
    set->print_tells = false;
    if (!tells)
        return FSDP_OK;
    if (key)
        first =
            fsdp_name_table_enter(&set->prints, key, sizeof(fsdp_hash), (uint64_t)archive->file);
    if (!first)
        return fsdp_fail_memory(err, "comparing ranks");
    if (*first == (uint64_t)archive->file)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' and '%s' have the same %s: one is a copy of the other; put each rank's "
                     "own file there",
                     fsdp_source_file_path(set->source, (size_t)*first), path, what);
}

/* === flat tensors ============================================================================= */

/* A group is padded to a multiple of 2 elements per rank. */
enum { ALIGNMENT = 2 };

fsdp_status ds_group_begin(ds_set *set, ds_group *group, ds_param *params, size_t count,
                           fsdp_error *err)
{
    group->lanes = fsdp_arena_alloc(&set->arena, 1, sizeof *group->lanes);
    if (!group->lanes)
        return fsdp_fail_memory(err, "the parameters of a checkpoint");
    *group->lanes = (ds_lane){.params = params, .count = count};
    group->lane_count = 1;
    return FSDP_OK;
}

/* --- one parameter ------------------------------------------------------------------------------ */

static void spell(const ds_set *set, const ds_param *param, int kind, fsdp_text *name)
{
    if (kind != DS_MASTER)
        fsdp_text_addf(name, "optim.state.");
    fsdp_text_add(name, param->name, param->name_size);
    if (kind != DS_MASTER)
        fsdp_text_addf(name, ".%s", set->kinds[kind]);
}

static fsdp_status declare(ds_set *set, ds_param *param, int kind, fsdp_dtype dtype,
                           size_t *tensor_out, fsdp_error *err)
{
    const fsdp_source_shape shape = {dtype, param->ndim, param->shape};
    const int32_t own = (int32_t)param->name_size;
    const int32_t moment[] = {sizeof "optim" - 1, sizeof "state" - 1, own,
                              (int32_t)strlen(set->kinds[kind])};
    fsdp_text name = {0};
    spell(set, param, kind, &name);
    fsdp_source_nest(set->source, kind == DS_MASTER ? &own : moment, kind == DS_MASTER ? 1 : 4);
    fsdp_status st = name.failed ? fsdp_fail_memory(err, "a name")
                                 : fsdp_source_add_tensor(set->source, name.data ? name.data : "",
                                                          name.size, &shape, tensor_out, err);
    fsdp_source_nest(set->source, NULL, 0);
    fsdp_text_release(&name);
    bool is_kept = st != FSDP_OK || kind != DS_MASTER ||
                   fsdp_name_table_enter(&set->tensors, param->name, param->name_size, *tensor_out);
    return is_kept ? st : fsdp_fail_memory(err, "the names of a checkpoint");
}

fsdp_status ds_param_tensor(ds_set *set, ds_param *param, int kind, fsdp_dtype dtype,
                            size_t *tensor_out, fsdp_error *err)
{
    if (param->tensors[kind] == 0) {
        FSDP_TRY(declare(set, param, kind, dtype, tensor_out, err));
        param->tensors[kind] = *tensor_out + 1;
        return FSDP_OK;
    }
    *tensor_out = param->tensors[kind] - 1;
    if (fsdp_source_tensor_at(set->source, *tensor_out)->dtype == dtype)
        return FSDP_OK;
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': rank %d has '%s' with a different dtype than earlier ranks",
                     set->directory, set->rank,
                     fsdp_printable(param->name, param->name_size, shown, sizeof shown));
}

/* Adds a box whose elements follow one another in the flat tensor. */
static fsdp_status add_box(ds_set *set, size_t tensor, const torch_tensor *flat, int64_t at,
                           const fsdp_box *box, fsdp_error *err)
{
    int64_t strides[FSDP_MAX_DIMS], stride = flat->strides[0];
    for (int dim = box->ndim - 1; dim >= 0; dim--) {
        strides[dim] = stride;
        stride *= box->len[dim];
    }
    const fsdp_source_chunk chunk = {.lo = box->lo,
                                     .len = box->len,
                                     .strides = strides,
                                     .offset = flat->offset + at * flat->strides[0],
                                     .file = flat->storage.file,
                                     .stream = flat->storage.stream,
                                     .fix = flat->fix};
    return fsdp_source_add_chunk(set->source, tensor, &chunk, err);
}

fsdp_status ds_place(ds_set *set, ds_param *param, int kind, const torch_tensor *flat,
                     const ds_run *run, fsdp_error *err)
{
    fsdp_box whole = fsdp_box_whole(param->ndim, param->shape), boxes[FSDP_BOX_PIECES];
    size_t tensor;
    if (param->is_copy || run->count == 0)
        return FSDP_OK;
    FSDP_TRY(ds_param_tensor(set, param, kind, flat->dtype, &tensor, err));
    if (kind == DS_MASTER)
        FSDP_TRY(agree_weight(set, param, flat, run, err));
    int count = fsdp_box_cut(&whole, run->first, run->count, boxes);
    int64_t at = run->at;
    for (int i = 0; i < count; i++) {
        FSDP_TRY(add_box(set, tensor, flat, at, &boxes[i], err));
        at += fsdp_box_count(&boxes[i]);
    }
    return FSDP_OK;
}

/* --- one flat tensor ----------------------------------------------------------------------------- */

/* The elements of a parameter that a flat tensor holds in one piece, and the padding after them. */
typedef struct segment {
    int64_t first, count, gap;
} segment;

static segment segment_of(const ds_set *set, const ds_param *param)
{
    if (!set->is_split)
        return (segment){0, param->count, param->gap};
    int64_t part = param->count / set->world + (param->count % set->world != 0), first;
    if (fsdp_mul_overflow(part, set->rank, &first) || first > param->count)
        first = param->count;
    int64_t left = param->count - first;
    return (segment){first, left < part ? left : part, left < part ? part - left : 0};
}

fsdp_status ds_split(ds_set *set, ds_lane *lane, int kind, const torch_tensor *flat,
                     fsdp_error *err)
{
    ds_cursor *cursor = &lane->cursors[kind];
    int64_t at = 0, size = flat->shape[0];
    cursor->is_used = true;
    while (at < size && cursor->param < lane->count) {
        ds_param *param = &lane->params[cursor->param];
        segment part = segment_of(set, param);
        int64_t elements = part.count - cursor->done, all = elements + part.gap;
        if (elements > size - at)
            elements = size - at;
        if (elements > 0)
            FSDP_TRY(ds_place(set, param, kind, flat,
                              &(ds_run){part.first + cursor->done, at, elements}, err));
        int64_t step = all < size - at ? all : size - at;
        cursor->done = step < all ? cursor->done + step : 0;
        cursor->param += step == all;
        at += step;
    }
    cursor->excess += size - at;
    return FSDP_OK;
}

static fsdp_status fail_size(const ds_set *set, const ds_lane *lane, int kind, fsdp_error *err)
{
    const ds_cursor *cursor = &lane->cursors[kind];
    const char *what = kind == DS_MASTER ? "the master weights" : set->kinds[kind];
    char shown[200];
    if (cursor->param == lane->count)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': %s of its ranks have %" PRId64
                         " more elements than the parameters of param_shapes",
                         set->directory, what, cursor->excess);
    const ds_param *param = &lane->params[cursor->param];
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED, "'%s': %s of its ranks end inside parameter '%s' of param_shapes",
        set->directory, what, fsdp_printable(param->name, param->name_size, shown, sizeof shown));
}

/* Steps over parameters of which nothing is left to come: empty ones, and padding that was cut. */
static void skip_empty(const ds_set *set, const ds_lane *lane, ds_cursor *cursor)
{
    while (cursor->param < lane->count &&
           segment_of(set, &lane->params[cursor->param]).count <= cursor->done) {
        cursor->param++;
        cursor->done = 0;
    }
}

static fsdp_status end_lane(ds_set *set, ds_lane *lane, int kind, fsdp_error *err)
{
    ds_cursor *cursor = &lane->cursors[kind];
    size_t tensor;
    if (!cursor->is_used && (kind != DS_MASTER || lane->count == 0))
        return FSDP_OK;
    skip_empty(set, lane, cursor);
    int64_t most = set->is_split ? 0 : ALIGNMENT * set->world - 1;
    if (cursor->param < lane->count || cursor->excess > most)
        return fail_size(set, lane, kind, err);
    for (size_t i = 0; i < lane->count; i++)
        if (lane->params[i].count == 0 && !lane->params[i].is_copy)
            FSDP_TRY(ds_param_tensor(set, &lane->params[i], kind, FSDP_F32, &tensor, err));
    *cursor = (ds_cursor){0};
    return FSDP_OK;
}

fsdp_status ds_split_end(ds_set *set, fsdp_error *err)
{
    for (size_t g = 0; g < set->group_count; g++)
        for (size_t i = 0; i < set->groups[g].lane_count; i++)
            for (int kind = 0; kind < (int)set->kind_count; kind++)
                FSDP_TRY(end_lane(set, &set->groups[g].lanes[i], kind, err));
    return FSDP_OK;
}

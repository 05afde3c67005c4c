/*
 * Completes a catalog: sorts the chunks by tensor and checks that they cover each tensor exactly
 * once. They do when their element counts add up to the tensor's and no two of them overlap; a
 * sweep along the dim in which the fewest chunks meet finds overlaps.
 */
#include "formats/source/source_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === what is missing ========================================================================== */

/*
 * The missing parts of a source: files that do not exist, and the entries that are incomplete
 * without them. See fsdp_source_opts in source.h.
 */

void fsdp_source_tolerate(fsdp_source *source, const fsdp_source_opts *opts)
{
    if (opts)
        source->tolerance = *opts;
}

bool fsdp_source_tolerates(const fsdp_source *source)
{
    return source->tolerance.may_lack != NULL;
}

static bool may_lack(const fsdp_source *source, const char *name, size_t size)
{
    const fsdp_source_opts *opts = &source->tolerance;
    return opts->may_lack && opts->may_lack(opts->context, name, size);
}

static fsdp_status keep(fsdp_source *source, const char *name, size_t size, fsdp_error *err)
{
    const char *copy = fsdp_arena_strndup(&source->arena, name, size);
    if (!copy || !fsdp_grow(&source->missing, &source->missing_room, source->missing_count + 1,
                            sizeof *source->missing))
        return fsdp_fail_memory(err, "the list of what is missing");
    source->missing[source->missing_count].name = copy;
    source->missing[source->missing_count++].size = size;
    return FSDP_OK;
}

fsdp_status fsdp_source_add_missing(fsdp_source *source, const char *name, size_t name_size,
                                    const char *file, fsdp_error *err)
{
    char shown[FSDP_NAME_SHOWN];
    if (may_lack(source, name, name_size))
        return keep(source, name, name_size, err);
    fsdp_printable(name, name_size, shown, sizeof shown);
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s' is incomplete: '%s' is missing%s%s%s, and --allow-missing does not match its name",
        source->path, file ? file : shown, file ? ", which holds '" : "", file ? shown : "",
        file ? "'" : "");
}

/* Marks an incomplete tensor as missing if the options allow that (*may_out). */
static fsdp_status source_let_go(fsdp_source *source, size_t number, bool *may_out, fsdp_error *err)
{
    fsdp_source_tensor *tensor = &source->tensors[number];
    *may_out = !tensor->is_inner && may_lack(source, tensor->name, tensor->name_size);
    if (!*may_out)
        return FSDP_OK;
    tensor->is_missing = true;
    return keep(source, tensor->name, tensor->name_size, err);
}

static int compare_missing(const void *a, const void *b)
{
    const missing_entry *x = a, *y = b;
    size_t size = x->size < y->size ? x->size : y->size;
    int order = size > 0 ? memcmp(x->name, y->name, size) : 0;
    return order != 0 ? order : (x->size > y->size) - (x->size < y->size);
}

/* Sorts the missing entries by name. */
static void source_sort_missing(fsdp_source *source)
{
    if (source->missing_count > 1)
        qsort(source->missing, source->missing_count, sizeof *source->missing, compare_missing);
}

size_t fsdp_source_missing_count(const fsdp_source *source)
{
    return source->missing_count;
}

const char *fsdp_source_missing_at(const fsdp_source *source, size_t number, size_t *size_out)
{
    *size_out = source->missing[number].size;
    return source->missing[number].name;
}

/* === coverage ================================================================================= */

#define MOST_PAIRS ((int64_t)1 << 31) /* comparisons of pairs: a few seconds */
enum { FEW_CHUNKS = 64, HOLE_CANDIDATES = 300 };

const char *fsdp_box_text(int ndim, const int64_t *lo, const int64_t *len, char *out, size_t room)
{
    size_t used = (size_t)snprintf(out, room, "[");
    for (int dim = 0; dim < ndim && used < room; dim++)
        used += (size_t)snprintf(out + used, room - used, "%s%" PRId64 ":%" PRIu64,
                                 dim > 0 ? ", " : "", lo[dim],
                                 (uint64_t)lo[dim] + (uint64_t)len[dim]); /* may be unchecked */
    if (used + 1 < room)
        snprintf(out + used, room - used, "]");
    return out;
}

const char *fsdp_tensor_text(const fsdp_source_tensor *tensor, char *out, size_t room)
{
    if (tensor->is_inner)
        snprintf(out, room, "inside a value");
    else
        fsdp_printable(tensor->name, tensor->name_size, out, room);
    return out;
}

static int64_t volume(int ndim, const int64_t *len)
{
    int64_t count = 1;
    for (int dim = 0; dim < ndim; dim++)
        count *= len[dim];
    return count;
}

static bool overlaps(const fsdp_source_chunk *a, const fsdp_source_chunk *b, int ndim)
{
    for (int dim = 0; dim < ndim; dim++) {
        if (a->lo[dim] >= b->lo[dim] + b->len[dim] || b->lo[dim] >= a->lo[dim] + a->len[dim])
            return false;
    }
    return true;
}

/* --- the dim of the sweep --------------------------------------------------------------------- */

static int compare_numbers(const void *a, const void *b)
{
    int64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

/* The number of pairs of chunks whose ranges in dim overlap. room holds two numbers a chunk. */
static int64_t pairs_along(const fsdp_source_chunk *chunks, size_t n, int dim, int64_t *room)
{
    int64_t *starts = room, *ends = room + n;
    for (size_t i = 0; i < n; i++) {
        starts[i] = chunks[i].lo[dim];
        ends[i] = starts[i] + chunks[i].len[dim];
    }
    qsort(starts, n, sizeof *starts, compare_numbers);
    qsort(ends, n, sizeof *ends, compare_numbers);
    int64_t pairs = 0;
    for (size_t i = 0, ended = 0; i < n; i++) {
        while (ends[ended] <= starts[i])
            ended++;
        if (__builtin_add_overflow(pairs, (int64_t)(i - ended), &pairs))
            return INT64_MAX;
    }
    return pairs;
}

/* Chooses the dim of the sweep: with few chunks the first dim in which they differ, with many
 * the one with the fewest overlapping pairs. */
static fsdp_status choose_dim(const fsdp_source *source, const fsdp_source_tensor *tensor,
                              int *dim_out, fsdp_error *err)
{
    const fsdp_source_chunk *chunks = tensor->chunks;
    size_t n = tensor->chunk_count;
    *dim_out = 0;
    int64_t *room = n > FEW_CHUNKS ? fsdp_alloc(n, 2 * sizeof *room) : NULL;
    if (n > FEW_CHUNKS && !room)
        return fsdp_fail_memory(err, "the chunks of a tensor");
    int64_t fewest = INT64_MAX;
    for (int dim = 0; dim < tensor->ndim && n > 1; dim++) {
        int64_t pairs =
            room ? pairs_along(chunks, n, dim, room) : chunks[0].lo[dim] == chunks[n - 1].lo[dim];
        if (pairs < fewest) {
            fewest = pairs;
            *dim_out = dim;
        }
    }
    fsdp_free(room);
    char shown[FSDP_NAME_SHOWN];
    if (n > FEW_CHUNKS && fewest > MOST_PAIRS)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s': tensor '%s' is stored in too many pieces (%zu)", source->path,
                         fsdp_tensor_text(tensor, shown, sizeof shown), n);
    return FSDP_OK;
}

static int compare_chunks(const void *a, const void *b, void *dim)
{
    const fsdp_source_chunk *x = a, *y = b;
    int64_t p = x->lo[*(int *)dim], q = y->lo[*(int *)dim];
    return (p > q) - (p < q);
}

/* --- exactly once ----------------------------------------------------------------------------- */

static fsdp_status fail_overlap(const fsdp_source *source, const fsdp_source_tensor *tensor,
                                const fsdp_source_chunk *a, const fsdp_source_chunk *b,
                                fsdp_error *err)
{
    char shown[FSDP_NAME_SHOWN], one[FSDP_NAME_SHOWN], other[FSDP_NAME_SHOWN];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the parts %s and %s of tensor '%s' overlap",
                     source->path, fsdp_box_text(tensor->ndim, a->lo, a->len, one, sizeof one),
                     fsdp_box_text(tensor->ndim, b->lo, b->len, other, sizeof other),
                     fsdp_tensor_text(tensor, shown, sizeof shown));
}

/* active: chunks that begin before the current one and end after its beginning. */
static fsdp_status sweep(const fsdp_source *source, const fsdp_source_tensor *tensor, int dim,
                         uint32_t *active, fsdp_error *err)
{
    const fsdp_source_chunk *chunks = tensor->chunks;
    size_t active_count = 0;
    for (size_t i = 0; i < tensor->chunk_count; i++) {
        size_t kept = 0;
        for (size_t k = 0; k < active_count; k++) {
            const fsdp_source_chunk *other = &chunks[active[k]];
            if (other->lo[dim] + other->len[dim] <= chunks[i].lo[dim])
                continue;
            if (overlaps(other, &chunks[i], tensor->ndim))
                return fail_overlap(source, tensor, other, &chunks[i], err);
            active[kept++] = active[k];
        }
        active[kept] = (uint32_t)i;
        active_count = kept + 1;
    }
    return FSDP_OK;
}

static fsdp_status check_overlaps(const fsdp_source *source, const fsdp_source_tensor *tensor,
                                  int dim, fsdp_error *err)
{
    if (tensor->chunk_count < 2)
        return FSDP_OK;
    if (tensor->ndim == 0)
        return fail_overlap(source, tensor, &tensor->chunks[0], &tensor->chunks[1], err);
    uint32_t few[FEW_CHUNKS];
    uint32_t *active =
        tensor->chunk_count <= FEW_CHUNKS ? few : fsdp_alloc(tensor->chunk_count, sizeof *active);
    if (!active)
        return fsdp_fail_memory(err, "the chunks of a tensor");
    fsdp_status status = sweep(source, tensor, dim, active, err);
    if (active != few)
        fsdp_free(active);
    return status;
}

static bool is_covered(const fsdp_source_tensor *tensor, const int64_t *point)
{
    int64_t one[FSDP_MAX_DIMS];
    for (int dim = 0; dim < tensor->ndim; dim++) {
        if (point[dim] >= tensor->shape[dim])
            return true; /* the tensor has no element */
        one[dim] = 1;
    }
    fsdp_source_chunk element = {.lo = point, .len = one};
    for (size_t i = 0; i < tensor->chunk_count; i++) {
        if (overlaps(&element, &tensor->chunks[i], tensor->ndim))
            return true;
    }
    return false;
}

/* Finds an element that no chunk holds: the first one, or one after the end of a chunk. */
static bool find_hole(const fsdp_source_tensor *tensor, int64_t *point)
{
    memset(point, 0, FSDP_MAX_DIMS * sizeof *point);
    if (!is_covered(tensor, point))
        return true;
    for (size_t i = 0; i < tensor->chunk_count && i < HOLE_CANDIDATES; i++) {
        const fsdp_source_chunk *chunk = &tensor->chunks[i];
        for (int dim = 0; dim < tensor->ndim; dim++) {
            memcpy(point, chunk->lo, (size_t)tensor->ndim * sizeof *point);
            point[dim] += chunk->len[dim];
            if (!is_covered(tensor, point))
                return true;
        }
    }
    return false;
}

static fsdp_status fail_missing(const fsdp_source *source, const fsdp_source_tensor *tensor,
                                int64_t missing, int64_t count, fsdp_error *err)
{
    char shown[FSDP_NAME_SHOWN], where[FSDP_NAME_SHOWN + 40] = "";
    int64_t point[FSDP_MAX_DIMS], ones[FSDP_MAX_DIMS];
    for (int dim = 0; dim < tensor->ndim; dim++)
        ones[dim] = 1;
    if (tensor->chunk_count > 0 && find_hole(tensor, point)) {
        char box[FSDP_NAME_SHOWN];
        snprintf(where, sizeof where, ", among them %s",
                 fsdp_box_text(tensor->ndim, point, ones, box, sizeof box));
    }
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s': %" PRId64 " of the %" PRId64 " elements of tensor '%s' are not stored%s%s",
        source->path, missing, count, fsdp_tensor_text(tensor, shown, sizeof shown), where,
        fsdp_source_tolerates(source) ? ", and --allow-missing does not match its name"
                                      : ": a file may be missing" FSDP_MISSING_HINT);
}

/* --- stored bytes ----------------------------------------------------------------------------- */

/* Bytes between the first and the last byte of a chunk, which was checked before. */
static int64_t chunk_span(const fsdp_source_chunk *chunk, int ndim, size_t element_size)
{
    int64_t span = (int64_t)element_size;
    if (!chunk->strides)
        return span * volume(ndim, chunk->len);
    for (int dim = 0; dim < ndim; dim++) {
        int64_t stride = chunk->strides[dim];
        span += (chunk->len[dim] - 1) * (stride < 0 ? -stride : stride);
    }
    return span;
}

/* Refuses a tensor of gigabytes that is stored in a few bytes: a decompression bomb. Formats
 * with a read function check this themselves. */
static fsdp_status check_ratio(const fsdp_source *source, const fsdp_source_tensor *tensor,
                               int64_t count, fsdp_error *err)
{
    size_t element_size = fsdp_dtype_size(tensor->dtype);
    int64_t size = count * (int64_t)element_size, stored = 0;
    if (size <= FSDP_SOURCE_LARGE)
        return FSDP_OK;
    for (size_t i = 0; i < tensor->chunk_count; i++) {
        const fsdp_source_chunk *chunk = &tensor->chunks[i];
        if (chunk->file < 0 && chunk->stream < 0)
            return FSDP_OK;
        int64_t span = chunk_span(chunk, tensor->ndim, element_size);
        if (chunk->stream >= 0 &&
            fsdp_source_stream_at(source, (size_t)chunk->stream)->stored < span)
            span = fsdp_source_stream_at(source, (size_t)chunk->stream)->stored;
        stored += span;
    }
    if (size / FSDP_SOURCE_RATIO <= stored)
        return FSDP_OK;
    char shown[FSDP_NAME_SHOWN];
    return fsdp_fail(err, FSDP_ERR_REFUSED,
                     "'%s': tensor '%s' has %" PRId64 " bytes, of which only %" PRId64
                     " are stored",
                     source->path, fsdp_tensor_text(tensor, shown, sizeof shown), size, stored);
}

/* --- the whole catalog ------------------------------------------------------------------------ */

static fsdp_status complete_tensor(fsdp_source *source, size_t number, fsdp_error *err)
{
    fsdp_source_tensor *tensor = &source->tensors[number];
    chunk_order *order = &source->orders[number];
    FSDP_TRY(choose_dim(source, tensor, &order->dim, err));
    fsdp_source_chunk *chunks = &source->chunks[tensor->chunks - source->chunks];
    if (tensor->chunk_count > 1 && tensor->ndim > 0)
        qsort_r(chunks, tensor->chunk_count, sizeof *chunks, compare_chunks, &order->dim);
    FSDP_TRY(check_overlaps(source, tensor, order->dim, err));
    int64_t count = volume(tensor->ndim, tensor->shape), stored = 0;
    for (size_t i = 0; i < tensor->chunk_count; i++) {
        stored += volume(tensor->ndim, chunks[i].len);
        if (tensor->ndim > 0 && chunks[i].len[order->dim] > order->longest)
            order->longest = chunks[i].len[order->dim];
    }
    if (stored != count) {
        bool may_lack = false;
        FSDP_TRY(source_let_go(source, number, &may_lack, err));
        return may_lack ? FSDP_OK : fail_missing(source, tensor, count - stored, count, err);
    }
    return check_ratio(source, tensor, count, err);
}

/* Sorts chunks by tensor (counting sort) and keeps the order within each tensor; next: first
 * chunk of each. */
static fsdp_status sort_chunks(fsdp_source *source, size_t *next, fsdp_error *err)
{
    fsdp_source_chunk *sorted = fsdp_alloc(source->chunk_count, sizeof *sorted);
    if (!sorted)
        return fsdp_fail_memory(err, "the chunks of a checkpoint");
    for (size_t i = 0; i < source->chunk_count; i++)
        sorted[next[source->chunk_tensors[i]]++] = source->chunks[i];
    fsdp_free(source->chunks);
    source->chunks = sorted;
    return FSDP_OK;
}

/* Sorts only when chunks did not arrive in order; in most formats they do. */
static fsdp_status order_chunks(fsdp_source *source, fsdp_error *err)
{
    bool in_order = true;
    size_t *next = fsdp_alloc(source->tensor_count, sizeof *next);
    if (!next)
        return fsdp_fail_memory(err, "the chunks of a checkpoint");
    for (size_t i = 0; i < source->chunk_count; i++) {
        source->tensors[source->chunk_tensors[i]].chunk_count++;
        in_order = in_order && (i == 0 || source->chunk_tensors[i - 1] <= source->chunk_tensors[i]);
    }
    for (size_t i = 0, at = 0; i < source->tensor_count; i++) {
        next[i] = at;
        at += source->tensors[i].chunk_count;
    }
    fsdp_status st = in_order ? FSDP_OK : sort_chunks(source, next, err);
    fsdp_free(next);
    return st;
}

static fsdp_status place_chunks(fsdp_source *source, fsdp_error *err)
{
    source->orders = fsdp_alloc(source->tensor_count, sizeof *source->orders);
    if (!source->orders || !fsdp_grow(&source->chunks, &source->chunk_room, 1, /* so not NULL */
                                      sizeof *source->chunks))
        return fsdp_fail_memory(err, "the chunks of a checkpoint");
    FSDP_TRY(order_chunks(source, err));
    for (size_t i = 0, at = 0; i < source->tensor_count; i++) {
        source->tensors[i].chunks = source->chunks + at;
        at += source->tensors[i].chunk_count;
    }
    fsdp_free(source->chunk_tensors);
    source->chunk_tensors = NULL;
    return FSDP_OK;
}

fsdp_status fsdp_source_complete(fsdp_source *source, fsdp_error *err)
{
    if (source->is_complete || source->chunk_count > UINT32_MAX)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the source cannot be completed");
    FSDP_TRY(place_chunks(source, err));
    for (size_t i = 0; i < source->tensor_count; i++)
        FSDP_TRY(complete_tensor(source, i, err));
    source_sort_missing(source);
    source->is_complete = true;
    return FSDP_OK;
}

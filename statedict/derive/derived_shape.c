/*
 * Derived tensors that only move elements: slices, joins, other shapes, other orders of dims, zeros. See
 * derived.h.
 */
#include "statedict/derive/derived.h"

#include "base/data/box_internal.h"
#include "kernels/kernels.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static fsdp_status check_dim(const fsdp_derived *part, int dim, fsdp_error *err)
{
    char shape[128];
    if (dim >= 0 && dim < part->ndim)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s has no dim %d",
                     fsdp_derived_text(part, shape, sizeof shape), dim);
}

/* --- slices --------------------------------------------------------------------------------------- */

static fsdp_status read_slice(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                              void *data, fsdp_error *err)
{
    fsdp_box moved = *box;
    for (int d = 0; d < box->ndim; d++)
        moved.lo[d] += tensor->lo[d];
    return fsdp_derived_read(tensor->parts[0], reader, &moved, data, err);
}

static const fsdp_derived_ops slice_ops = {read_slice, 0};

fsdp_status fsdp_derive_slice(fsdp_arena *arena, const fsdp_derived *part, int dim,
                              const int64_t range[2], const fsdp_derived **out, fsdp_error *err)
{
    char text[128];
    FSDP_TRY(check_dim(part, dim, err));
    if (range[0] < 0 || range[1] < 0 || range[0] > part->shape[dim] - range[1])
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s has no rows %" PRId64 " to %" PRId64 " in dim %d",
                         fsdp_derived_text(part, text, sizeof text), range[0], range[0] + range[1],
                         dim);
    *out = part;
    if (range[1] == part->shape[dim])
        return FSDP_OK;
    int64_t shape[FSDP_MAX_DIMS], *lo = fsdp_arena_alloc(arena, (size_t)part->ndim, sizeof *lo);
    if (!lo)
        return fsdp_fail_memory(err, "a slice");
    memcpy(shape, part->shape, (size_t)part->ndim * sizeof *shape);
    shape[dim] = range[1];
    lo[dim] = range[0];
    fsdp_derived like = {.ops = &slice_ops,
                         .dtype = part->dtype,
                         .ndim = part->ndim,
                         .shape = shape,
                         .parts = &part,
                         .part_count = 1,
                         .lo = lo};
    fsdp_derived *made = NULL;
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}

/* --- other shapes --------------------------------------------------------------------------------- */

/* The runs of a box in the row-major order of the whole tensor. */
typedef struct box_runs {
    const fsdp_box *box;
    int outer;                      /* dims that count runs; the inner ones are in one run */
    int64_t strides[FSDP_MAX_DIMS]; /* of the whole tensor */
    int64_t at[FSDP_MAX_DIMS];      /* the next run, relative to the box */
    int64_t size;                   /* elements of a run */
    bool is_done;
} box_runs;

static box_runs runs_of(const fsdp_derived *tensor, const fsdp_box *box)
{
    box_runs runs = {.box = box, .outer = tensor->ndim, .size = 1};
    fsdp_box_strides(tensor->ndim, tensor->shape, runs.strides);
    while (runs.outer > 0) {
        int d = --runs.outer;
        runs.size *= box->len[d];
        if (box->len[d] != tensor->shape[d])
            break;
    }
    return runs;
}

static bool next_run(box_runs *runs, int64_t *first_out)
{
    const fsdp_box *box = runs->box;
    if (runs->is_done)
        return false;
    *first_out = 0;
    for (int d = 0; d < box->ndim; d++)
        *first_out += (box->lo[d] + runs->at[d]) * runs->strides[d];
    int d = runs->outer - 1;
    for (; d >= 0 && ++runs->at[d] == box->len[d]; d--)
        runs->at[d] = 0;
    runs->is_done = d < 0;
    return true;
}

/* Elements [first, first + count) of the part in its row-major order. */
static fsdp_status read_run(const fsdp_derived *part, fsdp_reader *reader, const int64_t range[2],
                            char *data, fsdp_error *err)
{
    fsdp_box whole = fsdp_box_whole(part->ndim, part->shape), pieces[FSDP_BOX_PIECES];
    int count = fsdp_box_cut(&whole, range[0], range[1], pieces);
    for (int i = 0; i < count; i++) {
        FSDP_TRY(fsdp_derived_read(part, reader, &pieces[i], data, err));
        data += fsdp_box_count(&pieces[i]) * (int64_t)fsdp_dtype_size(part->dtype);
    }
    return FSDP_OK;
}

static fsdp_status read_reshaped(const fsdp_derived *tensor, fsdp_reader *reader,
                                 const fsdp_box *box, void *data, fsdp_error *err)
{
    box_runs runs = runs_of(tensor, box);
    int64_t first;
    for (char *to = data; next_run(&runs, &first);
         to += runs.size * (int64_t)fsdp_dtype_size(tensor->dtype))
        FSDP_TRY(read_run(tensor->parts[0], reader, (const int64_t[]){first, runs.size}, to, err));
    return FSDP_OK;
}

static const fsdp_derived_ops reshape_ops = {read_reshaped, 0};

static bool same_shape(const fsdp_derived *part, int ndim, const int64_t *shape)
{
    return part->ndim == ndim && memcmp(part->shape, shape, (size_t)ndim * sizeof *shape) == 0;
}

fsdp_status fsdp_derive_reshape(fsdp_arena *arena, const fsdp_derived *part, int ndim,
                                const int64_t *shape, const fsdp_derived **out, fsdp_error *err)
{
    fsdp_derived wanted = {.ops = &reshape_ops,
                           .dtype = part->dtype,
                           .ndim = ndim,
                           .shape = shape,
                           .parts = &part,
                           .part_count = 1};
    char old_text[128], new_text[128];
    FSDP_TRY(fsdp_shape_check(ndim, shape, fsdp_dtype_size(part->dtype), err));
    if (fsdp_shape_count(ndim, shape) != fsdp_shape_count(part->ndim, part->shape))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s cannot be reshaped to %s",
                         fsdp_derived_text(part, old_text, sizeof old_text),
                         fsdp_derived_text(&wanted, new_text, sizeof new_text));
    if (part->ops == &reshape_ops)
        part = part->parts[0];
    *out = part;
    if (same_shape(part, ndim, shape))
        return FSDP_OK;
    fsdp_derived *made = NULL;
    FSDP_TRY(fsdp_derived_make(arena, &wanted, &made, err));
    *out = made;
    return FSDP_OK;
}

/* --- other orders of dims --------------------------------------------------------------------------- */

/* Puts a box of the part to its place in a box of the tensor. */
static void put_permuted(const fsdp_derived *tensor, const fsdp_box *box, char *data,
                         const fsdp_box *from_box, const void *from)
{
    int64_t to_strides[FSDP_MAX_DIMS], from_strides[FSDP_MAX_DIMS], by_part[FSDP_MAX_DIMS];
    int64_t size = (int64_t)fsdp_dtype_size(tensor->dtype);
    fsdp_box_strides(box->ndim, box->len, to_strides);
    fsdp_box_strides(from_box->ndim, from_box->len, from_strides);
    for (int d = 0; d < tensor->ndim; d++) {
        int part_dim = tensor->order[d];
        by_part[part_dim] = to_strides[d] * size;
        data += (from_box->lo[part_dim] - box->lo[d]) * to_strides[d] * size;
        from_strides[d] *= size;
    }
    fsdp_copy_box(&(fsdp_strided_copy){data, by_part, from, from_strides, from_box->ndim,
                                       from_box->len, (size_t)size});
}

/* The part is read in the order in which it is stored, and written wherever that leads. */
static fsdp_status read_permuted(const fsdp_derived *tensor, fsdp_reader *reader,
                                 const fsdp_box *box, void *data, fsdp_error *err)
{
    fsdp_box part_box = *box, piece;
    for (int d = 0; d < tensor->ndim; d++) {
        part_box.lo[tensor->order[d]] = box->lo[d];
        part_box.len[tensor->order[d]] = box->len[d];
    }
    int64_t most = FSDP_DERIVED_PIECE / (int64_t)fsdp_dtype_size(tensor->dtype);
    fsdp_derived_pieces pieces = {.box = &part_box, .most = most};
    void *buffer;
    FSDP_TRY(fsdp_derived_take(reader, &buffer, err));
    fsdp_status st = FSDP_OK;
    while (st == FSDP_OK && fsdp_derived_next(&pieces, &piece)) {
        st = fsdp_derived_read(tensor->parts[0], reader, &piece, buffer, err);
        if (st == FSDP_OK)
            put_permuted(tensor, box, data, &piece, buffer);
    }
    fsdp_derived_give(reader);
    return st;
}

static const fsdp_derived_ops permute_ops = {read_permuted, 1};

static bool is_identity(const int *order, int ndim)
{
    for (int d = 0; d < ndim; d++)
        if (order[d] != d)
            return false;
    return true;
}

static bool is_order(const int *order, int ndim)
{
    bool seen[FSDP_MAX_DIMS] = {false};
    for (int d = 0; d < ndim; d++) {
        if (order[d] < 0 || order[d] >= ndim || seen[order[d]])
            return false;
        seen[order[d]] = true;
    }
    return true;
}

fsdp_status fsdp_derive_permute(fsdp_arena *arena, const fsdp_derived *part, const int *order,
                                const fsdp_derived **out, fsdp_error *err)
{
    int64_t shape[FSDP_MAX_DIMS];
    char text[128];
    if (!is_order(order, part->ndim))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s does not have as many dims as this order",
                         fsdp_derived_text(part, text, sizeof text));
    *out = part;
    if (is_identity(order, part->ndim))
        return FSDP_OK;
    int *kept = fsdp_arena_alloc(arena, (size_t)part->ndim, sizeof *kept);
    if (!kept)
        return fsdp_fail_memory(err, "an order of dims");
    for (int d = 0; d < part->ndim; d++) {
        kept[d] = order[d];
        shape[d] = part->shape[order[d]];
    }
    fsdp_derived like = {.ops = &permute_ops,
                         .dtype = part->dtype,
                         .ndim = part->ndim,
                         .shape = shape,
                         .parts = &part,
                         .part_count = 1,
                         .order = kept};
    fsdp_derived *made = NULL;
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}

/* --- joins ---------------------------------------------------------------------------------------- */

/* True when the inner box is one run of the outer box's row-major order. */
static bool is_run_of(const fsdp_box *outer, const fsdp_box *inner)
{
    int d = outer->ndim - 1;
    while (d >= 0 && inner->len[d] == outer->len[d])
        d--;
    for (d--; d >= 0; d--)
        if (inner->len[d] != 1)
            return false;
    return true;
}

/* One read of a join. */
typedef struct join_read {
    const fsdp_derived *tensor;
    fsdp_reader *reader;
    const fsdp_box *box;
    char *data;
} join_read;

/* Fills a part of the box straight, as one run of it. */
static fsdp_status read_run_of(const join_read *read, const fsdp_derived *part,
                               const fsdp_box *shared, int64_t offset, fsdp_error *err)
{
    fsdp_box moved = *shared;
    int64_t lo[FSDP_MAX_DIMS], size = (int64_t)fsdp_dtype_size(part->dtype);
    for (int d = 0; d < shared->ndim; d++)
        lo[d] = shared->lo[d] - read->box->lo[d];
    moved.lo[read->tensor->dim] -= offset;
    char *to = read->data + fsdp_box_position(shared->ndim, read->box->len, lo) * size;
    return fsdp_derived_read(part, read->reader, &moved, to, err);
}

/* Fills a part of the box through a buffer. */
static fsdp_status read_scattered(const join_read *read, const fsdp_derived *part,
                                  const fsdp_box *shared, int64_t offset, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(part->dtype);
    fsdp_derived_pieces pieces = {.box = shared, .most = FSDP_DERIVED_PIECE / (int64_t)size};
    fsdp_box piece;
    void *buffer;
    FSDP_TRY(fsdp_derived_take(read->reader, &buffer, err));
    fsdp_status st = FSDP_OK;
    while (st == FSDP_OK && fsdp_derived_next(&pieces, &piece)) {
        fsdp_box moved = piece;
        moved.lo[read->tensor->dim] -= offset;
        st = fsdp_derived_read(part, read->reader, &moved, buffer, err);
        if (st == FSDP_OK)
            fsdp_copy_shared(read->box, read->data, &piece, buffer, size);
    }
    fsdp_derived_give(read->reader);
    return st;
}

static fsdp_status read_joined(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                               void *data, fsdp_error *err)
{
    const join_read read = {tensor, reader, box, data};
    int64_t offset = 0;
    for (size_t i = 0; i < tensor->part_count; i++) {
        const fsdp_derived *part = tensor->parts[i];
        fsdp_box held = fsdp_box_whole(part->ndim, part->shape), shared;
        held.lo[tensor->dim] = offset;
        if (fsdp_box_intersect(&held, box, &shared)) {
            bool is_run = is_run_of(box, &shared);
            FSDP_TRY((is_run ? read_run_of : read_scattered)(&read, part, &shared, offset, err));
        }
        offset += part->shape[tensor->dim];
    }
    return FSDP_OK;
}

static const fsdp_derived_ops join_ops = {read_joined, 1};

static bool fits_join(const fsdp_derived *first, const fsdp_derived *part, int dim)
{
    if (part->ndim != first->ndim || part->dtype != first->dtype)
        return false;
    for (int d = 0; d < part->ndim; d++)
        if (d != dim && part->shape[d] != first->shape[d])
            return false;
    return true;
}

static fsdp_status refuse_join(const fsdp_derived *first, const fsdp_derived *part, fsdp_error *err)
{
    char one[128], other[128];
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s of %s and %s of %s cannot be joined",
                     fsdp_derived_text(first, one, sizeof one), fsdp_dtype_name(first->dtype),
                     fsdp_derived_text(part, other, sizeof other), fsdp_dtype_name(part->dtype));
}

fsdp_status fsdp_derive_join(fsdp_arena *arena, const fsdp_derived *const *parts, size_t count,
                             int dim, const fsdp_derived **out, fsdp_error *err)
{
    int64_t shape[FSDP_MAX_DIMS];
    FSDP_TRY(check_dim(parts[0], dim, err));
    memcpy(shape, parts[0]->shape, (size_t)parts[0]->ndim * sizeof *shape);
    for (size_t i = 1; i < count; i++)
        if (!fits_join(parts[0], parts[i], dim) ||
            fsdp_add_overflow(shape[dim], parts[i]->shape[dim], &shape[dim]))
            return refuse_join(parts[0], parts[i], err);
    *out = parts[0];
    if (count == 1)
        return FSDP_OK;
    fsdp_derived like = {.ops = &join_ops,
                         .dtype = parts[0]->dtype,
                         .ndim = parts[0]->ndim,
                         .shape = shape,
                         .parts = parts,
                         .part_count = count,
                         .dim = dim};
    fsdp_derived *made = NULL;
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}

/* --- zeros ---------------------------------------------------------------------------------------- */

static fsdp_status read_zeros(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                              void *data, fsdp_error *err)
{
    (void)reader;
    (void)err;
    memset(data, 0, (size_t)fsdp_box_count(box) * fsdp_dtype_size(tensor->dtype));
    return FSDP_OK;
}

static const fsdp_derived_ops zeros_ops = {read_zeros, 0};

fsdp_status fsdp_derive_zeros(fsdp_arena *arena, fsdp_dtype dtype, int ndim, const int64_t *shape,
                              const fsdp_derived **out, fsdp_error *err)
{
    fsdp_derived like = {.ops = &zeros_ops, .dtype = dtype, .ndim = ndim, .shape = shape};
    fsdp_derived *made = NULL;
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}

/* --- constants ------------------------------------------------------------------------------------ */

static fsdp_status read_constant(const fsdp_derived *tensor, fsdp_reader *reader,
                                 const fsdp_box *box, void *data, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(tensor->dtype);
    (void)reader;
    (void)err;
    memcpy(data, (const char *)tensor->more + (size_t)box->lo[0] * size,
           (size_t)box->len[0] * size);
    return FSDP_OK;
}

static const fsdp_derived_ops constant_ops = {read_constant, 0};

fsdp_status fsdp_derive_constant(fsdp_arena *arena, fsdp_dtype dtype, int64_t count,
                                 const void *data, const fsdp_derived **out, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(dtype);
    void *copy = fsdp_arena_alloc(arena, (size_t)count, size);
    fsdp_derived *made = NULL;
    if (!copy)
        return fsdp_fail_memory(err, "a derived tensor");
    memcpy(copy, data, (size_t)count * size);
    fsdp_derived like = {
        .ops = &constant_ops, .dtype = dtype, .ndim = 1, .shape = &count, .more = copy};
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}

/* Boxes: counting, intersecting and cutting. See box.h. Nothing here allocates: planners call it in loops. */
#include "base/data/box_internal.h"
#include <fsdp/box.h>

#include <inttypes.h>
#include <stdio.h>

static const int64_t element_limit = (int64_t)1 << 62;

fsdp_box fsdp_box_whole(int ndim, const int64_t *shape)
{
    fsdp_box box = {.ndim = ndim};
    for (int i = 0; i < ndim && shape; i++)
        box.len[i] = shape[i];
    return box;
}

int64_t fsdp_shape_count(int ndim, const int64_t *shape)
{
    int64_t count = 1;
    for (int i = 0; i < ndim; i++) {
        if (!shape || shape[i] == 0)
            return 0;
        count *= shape[i];
    }
    return count;
}

int64_t fsdp_box_count(const fsdp_box *box)
{
    if (!box)
        return 0;
    return fsdp_shape_count(box->ndim, box->len);
}

bool fsdp_box_equal(const fsdp_box *a, const fsdp_box *b)
{
    if (!a || !b)
        return false;
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++) {
        if (a->lo[i] != b->lo[i] || a->len[i] != b->len[i])
            return false;
    }
    return true;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

bool fsdp_box_intersect(const fsdp_box *a, const fsdp_box *b, fsdp_box *out)
{
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++) {
        int64_t end = smaller(a->lo[i] + a->len[i], b->lo[i] + b->len[i]);
        if (end <= larger(a->lo[i], b->lo[i]))
            return false;
    }
    out->ndim = a->ndim;
    for (int i = 0; i < a->ndim; i++) {
        int64_t lo = larger(a->lo[i], b->lo[i]);
        out->len[i] = smaller(a->lo[i] + a->len[i], b->lo[i] + b->len[i]) - lo;
        out->lo[i] = lo;
    }
    return true;
}

/* Written so that no sum of inner's numbers is formed: they may come from a damaged file. */
bool fsdp_box_contains(const fsdp_box *outer, const fsdp_box *inner)
{
    if (outer->ndim != inner->ndim)
        return false;
    for (int i = 0; i < outer->ndim; i++) {
        if (inner->len[i] < 0 || inner->len[i] > outer->len[i] || inner->lo[i] < outer->lo[i])
            return false;
        if (inner->lo[i] > outer->lo[i] + (outer->len[i] - inner->len[i]))
            return false;
    }
    return true;
}

bool fsdp_box_is_run(const fsdp_box *outer, const fsdp_box *inner, int64_t *at_out)
{
    bool outermost = true; /* no dim with more than one index seen yet */
    int64_t inside[FSDP_MAX_DIMS];
    if (!fsdp_box_contains(outer, inner))
        return false;
    for (int d = 0; d < inner->ndim; d++) {
        inside[d] = inner->lo[d] - outer->lo[d];
        if (!outermost && inner->len[d] != outer->len[d])
            return false;
        outermost = outermost && inner->len[d] == 1;
    }
    *at_out = fsdp_box_position(outer->ndim, outer->len, inside);
    return true;
}

int64_t fsdp_box_position(int ndim, const int64_t *shape, const int64_t *lo)
{
    int64_t position = 0;
    for (int i = 0; i < ndim && shape && lo; i++)
        position = position * shape[i] + lo[i];
    return position;
}

void fsdp_box_strides(int ndim, const int64_t *shape, int64_t *strides_out)
{
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        strides_out[i] = stride;
        stride *= shape[i];
    }
}

/*
 * The largest piece that starts at element `at` of box and holds at most `room` elements: some rows
 * of one dim, one index in every dim before it, everything of the dims after it.
 */
static int64_t first_piece(const fsdp_box *box, const int64_t *strides, int64_t at, int64_t room,
                           fsdp_box *piece)
{
    int split = 0;
    while (split < box->ndim && (at % strides[split] != 0 || room < strides[split]))
        split++;
    int64_t count = 1;
    piece->ndim = box->ndim;
    for (int i = 0; i < box->ndim; i++) {
        int64_t index = i <= split ? at / strides[i] % box->len[i] : 0;
        piece->lo[i] = box->lo[i] + index;
        piece->len[i] = i < split ? 1 : box->len[i];
        if (i == split) {
            piece->len[i] = smaller(room / strides[i], box->len[i] - index);
            count = piece->len[i] * strides[i];
        }
    }
    return count;
}

int fsdp_box_cut(const fsdp_box *box, int64_t first, int64_t count, fsdp_box *pieces_out)
{
    int64_t total = fsdp_box_count(box);
    if (first < 0 || first >= total || count <= 0)
        return 0;
    int64_t end = first + smaller(count, total - first);
    int64_t strides[FSDP_MAX_DIMS] = {0};
    fsdp_box_strides(box->ndim, box->len, strides);
    int pieces = 0;
    for (int64_t at = first; at < end; pieces++)
        at += first_piece(box, strides, at, end - at, &pieces_out[pieces]);
    return pieces;
}

void fsdp_chunk(int64_t n, int64_t parts, int64_t index, int64_t *lo, int64_t *len)
{
    if (!lo || !len)
        return;
    int64_t rows = n / parts + (n % parts != 0);
    int64_t first = index * rows;
    *lo = first < n ? first : n;
    *len = n - *lo < rows ? n - *lo : rows;
}

/* "2x0x5", cut when it does not fit. */
static const char *shape_text(int ndim, const int64_t *shape, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (int i = 0; i < ndim && used < size; i++) {
        int n = snprintf(out + used, size - used, "%s%" PRId64, i ? "x" : "", shape[i]);
        used += n > 0 ? (size_t)n : 0;
    }
    return out;
}

fsdp_status fsdp_shape_check(int ndim, const int64_t *shape, size_t element_size, fsdp_error *err)
{
    if (ndim < 0 || ndim > FSDP_MAX_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the shape has %d dims, 0 to %d are allowed", ndim,
                         FSDP_MAX_DIMS);
    if (ndim > 0 && !shape)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the shape has %d dims but no lengths", ndim);
    bool is_empty = false;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            return fsdp_fail(err, FSDP_ERR_USAGE, "dim %d of the shape cannot have length %" PRId64,
                             i, shape[i]);
        is_empty = is_empty || shape[i] == 0;
    }
    /* Rows of an empty tensor are multiplied, too (strides), so its other lengths count. */
    int64_t bytes = is_empty || element_size == 0 ? 1 : (int64_t)element_size;
    for (int i = 0; i < ndim; i++) {
        bool overflows = shape[i] > 0 && __builtin_mul_overflow(bytes, shape[i], &bytes);
        if (overflows || bytes >= element_limit) {
            char text[200];
            return fsdp_fail(err, FSDP_ERR_USAGE, "the shape %s of %zu-byte elements is too large",
                             shape_text(ndim, shape, text, sizeof text), element_size);
        }
    }
    return FSDP_OK;
}

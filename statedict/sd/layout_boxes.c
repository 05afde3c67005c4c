/*
 * Checks that the explicit boxes of a layout tile the tensor. They come from manifests and callers,
 * up to 65,536 per tensor, so the check must be exact and must not take quadratic time.
 *
 * Equal boxes of different ranks (replicas) are counted once. The others are checked by splitting
 * the tensor in two along a face of some box, again and again. Boxes tile a region when they are
 * disjoint and their volumes add up to it; once the volumes of a region disagree, only a half that
 * disagrees in the same way is followed, so a fault is found on one straight way down.
 */
#include "statedict/sd/layout_internal.h"

#include "base/core/mem.h"
#include "base/data/box_internal.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- sorting ---------------------------------------------------------------------------------- */

static int compare_numbers(const int64_t *a, const int64_t *b, int n)
{
    for (int i = 0; i < n; i++) {
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    }
    return 0;
}

/* By box, equal boxes by rank. */
static int compare_boxes(const void *left, const void *right)
{
    const fsdp_rank_box *a = *(const fsdp_rank_box *const *)left;
    const fsdp_rank_box *b = *(const fsdp_rank_box *const *)right;
    int order = compare_numbers(a->box.lo, b->box.lo, a->box.ndim);
    if (order == 0)
        order = compare_numbers(a->box.len, b->box.len, a->box.ndim);
    return order != 0 ? order : (a->rank > b->rank) - (a->rank < b->rank);
}

static fsdp_status sort_boxes(const fsdp_layout *layout, const fsdp_rank_box ***sorted_out,
                              fsdp_error *err)
{
    const fsdp_rank_box **sorted = fsdp_alloc(layout->box_count, sizeof *sorted);
    if (!sorted)
        return fsdp_fail_memory(err, "a layout");
    for (size_t i = 0; i < layout->box_count; i++)
        sorted[i] = &layout->boxes[i];
    qsort(sorted, layout->box_count, sizeof *sorted, compare_boxes);
    *sorted_out = sorted;
    return FSDP_OK;
}

/* Number of boxes at the front of sorted[0..n) that are equal. */
static size_t equal_boxes(const fsdp_rank_box *const *sorted, size_t n)
{
    size_t equal = 1;
    while (equal < n && fsdp_box_equal(&sorted[0]->box, &sorted[equal]->box))
        equal++;
    return equal;
}

fsdp_status fsdp_layout_count_copies(const fsdp_layout *layout, fsdp_box_copy *copies_out,
                                     fsdp_error *err)
{
    const fsdp_rank_box **sorted = NULL;
    FSDP_TRY(sort_boxes(layout, &sorted, err));
    for (size_t i = 0, equal; i < layout->box_count; i += equal) {
        equal = equal_boxes(sorted + i, layout->box_count - i);
        for (size_t k = 0; k < equal; k++)
            copies_out[sorted[i + k] - layout->boxes] =
                (fsdp_box_copy){.copies = (int)equal, .copy = (int)k};
    }
    fsdp_free(sorted);
    return FSDP_OK;
}

/* --- messages --------------------------------------------------------------------------------- */

enum { BOX_TEXT = 160 };

/* "[0:3, 4:8]", or "[0, 4]" without ends. */
static const char *range_text(int ndim, const int64_t *lo, const int64_t *len, char out[BOX_TEXT])
{
    size_t used = 1;
    out[0] = '[';
    for (int i = 0; i < ndim && used < BOX_TEXT - 50; i++) {
        int n = snprintf(out + used, BOX_TEXT - used, "%s%" PRId64, i ? ", " : "", lo[i]);
        used += (size_t)n;
        if (len)
            used += (size_t)snprintf(out + used, BOX_TEXT - used, ":%" PRId64, lo[i] + len[i]);
    }
    snprintf(out + used, BOX_TEXT - used, "]");
    return out;
}

static const char *box_text(const fsdp_box *box, char out[BOX_TEXT])
{
    return range_text(box->ndim, box->lo, box->len, out);
}

/* --- tiling ----------------------------------------------------------------------------------- */

typedef struct span {
    int64_t lo, end;
} span;

typedef struct tiling {
    int ndim;
    size_t count; /* of distinct boxes */
    const fsdp_rank_box **boxes;
    span *spans;                /* [box * ndim + dim]: small enough to stay in the cache */
    span region[FSDP_MAX_DIMS]; /* the region under test */
    uint32_t *stack;            /* numbers of the boxes that share an element with the region */
    size_t used, capacity;
    int64_t *faces; /* room for one number per box */
    uint64_t seed;
    fsdp_error *err;
} tiling;

typedef struct plane {
    int dim;
    int64_t at;
} plane;

static const span *spans_of(const tiling *tiles, size_t slot)
{
    return tiles->spans + (size_t)tiles->stack[slot] * (size_t)tiles->ndim;
}

static int64_t region_volume(const tiling *tiles)
{
    int64_t volume = 1;
    for (int d = 0; d < tiles->ndim; d++)
        volume *= tiles->region[d].end - tiles->region[d].lo;
    return volume;
}

static int64_t volume_inside(const tiling *tiles, const span *box)
{
    int64_t volume = 1;
    for (int d = 0; d < tiles->ndim; d++) {
        int64_t lo = box[d].lo > tiles->region[d].lo ? box[d].lo : tiles->region[d].lo;
        int64_t end = box[d].end < tiles->region[d].end ? box[d].end : tiles->region[d].end;
        volume *= end - lo;
    }
    return volume;
}

/* -1, 0 or 1: the boxes from slot first on hold less than, exactly or more than the region. */
static int balance_of(const tiling *tiles, size_t first)
{
    int64_t left = region_volume(tiles);
    for (size_t i = first; i < tiles->used; i++) {
        left -= volume_inside(tiles, spans_of(tiles, i));
        if (left < 0)
            return 1;
    }
    return left > 0 ? -1 : 0;
}

static size_t next_random(tiling *tiles, size_t n)
{
    tiles->seed = tiles->seed * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(tiles->seed >> 33) % n;
}

/* Quickselect. Random pivots: the boxes of a hostile file must not make it quadratic. */
static int64_t median(tiling *tiles, size_t n)
{
    int64_t *values = tiles->faces;
    size_t wanted = n / 2, lo = 0, end = n;
    for (;;) {
        int64_t pivot = values[lo + next_random(tiles, end - lo)];
        size_t less = lo, more = end;
        for (size_t i = lo; i < more;) {
            int64_t value = values[i];
            if (value < pivot) {
                values[i++] = values[less];
                values[less++] = value;
            } else if (value > pivot) {
                values[i] = values[--more];
                values[more] = value;
            } else {
                i++;
            }
        }
        if (wanted >= less && wanted < more)
            return pivot;
        if (wanted < less)
            end = less;
        else
            lo = more;
    }
}

/* The median of the low faces inside the region along one dim; false when there is none. */
static bool median_face(tiling *tiles, size_t first, int dim, int64_t *at)
{
    size_t n = 0;
    for (size_t i = first; i < tiles->used; i++) {
        int64_t lo = spans_of(tiles, i)[dim].lo;
        if (lo > tiles->region[dim].lo)
            tiles->faces[n++] = lo;
    }
    if (n == 0)
        return false;
    *at = median(tiles, n);
    return true;
}

/* Picks, among one plane per dim, the one whose fuller side has the fewest boxes. */
static bool find_plane(tiling *tiles, size_t first, plane *best)
{
    size_t best_cost = SIZE_MAX;
    for (int dim = 0; dim < tiles->ndim; dim++) {
        int64_t at;
        if (!median_face(tiles, first, dim, &at))
            continue;
        size_t below = 0, above = 0;
        for (size_t i = first; i < tiles->used; i++) {
            below += spans_of(tiles, i)[dim].lo < at;
            above += spans_of(tiles, i)[dim].end > at;
        }
        size_t cost = below > above ? below : above;
        if (cost < best_cost) {
            best_cost = cost;
            *best = (plane){.dim = dim, .at = at};
        }
    }
    return best_cost != SIZE_MAX;
}

static fsdp_status fail_gap(const tiling *tiles, const int64_t *element)
{
    char text[BOX_TEXT];
    return fsdp_fail(tiles->err, FSDP_ERR_USAGE, "no box holds element %s",
                     range_text(tiles->ndim, element, NULL, text));
}

static fsdp_status fail_overlap(const tiling *tiles, size_t first)
{
    const fsdp_rank_box *a = tiles->boxes[tiles->stack[first]];
    const fsdp_rank_box *b = tiles->boxes[tiles->stack[first + 1]];
    char a_text[BOX_TEXT], b_text[BOX_TEXT];
    return fsdp_fail(tiles->err, FSDP_ERR_USAGE, "box %s of rank %d and box %s of rank %d overlap",
                     box_text(&a->box, a_text), a->rank, box_text(&b->box, b_text), b->rank);
}

/* Checks that the one box of a region fills it. */
static fsdp_status check_single(const tiling *tiles, size_t first)
{
    int64_t element[FSDP_MAX_DIMS] = {0};
    for (int d = 0; d < tiles->ndim; d++)
        element[d] = tiles->region[d].lo;
    if (first == tiles->used)
        return fail_gap(tiles, element);
    const span *box = spans_of(tiles, first);
    for (int d = 0; d < tiles->ndim; d++) {
        if (box[d].lo > tiles->region[d].lo)
            return fail_gap(tiles, element);
        if (box[d].end < tiles->region[d].end) {
            element[d] = box[d].end;
            return fail_gap(tiles, element);
        }
    }
    return FSDP_OK;
}

/* Puts those boxes of slots [first, end) that reach into the region on top of the stack. */
static fsdp_status push_inside(tiling *tiles, size_t first, size_t end, int dim)
{
    if (!fsdp_grow(&tiles->stack, &tiles->capacity, tiles->used + (end - first),
                   sizeof *tiles->stack))
        return fsdp_fail_memory(tiles->err, "a layout check");
    for (size_t i = first; i < end; i++) {
        const span *box = spans_of(tiles, i);
        if (box[dim].lo < tiles->region[dim].end && box[dim].end > tiles->region[dim].lo)
            tiles->stack[tiles->used++] = tiles->stack[i];
    }
    return FSDP_OK;
}

static fsdp_status check_region(tiling *tiles, size_t first, int balance);

/* Checks one side of a plane, and restores the region of both sides before it returns. */
static fsdp_status check_side(tiling *tiles, size_t first, int dim, span side, int balance)
{
    span both = tiles->region[dim];
    size_t end = tiles->used;
    tiles->region[dim] = side;
    fsdp_status status = push_inside(tiles, first, end, dim);
    if (status == FSDP_OK) {
        int side_balance = balance_of(tiles, end);
        if (balance == 0 || side_balance == balance)
            status = check_region(tiles, end, side_balance);
    }
    tiles->region[dim] = both;
    tiles->used = end;
    return status;
}

/*
 * Boxes from slot first on reach into the region. Every split leaves at most half of a dim's low
 * faces inside either side, so the recursion is at most 17 levels deep per dim.
 */
static fsdp_status check_region(tiling *tiles, size_t first, int balance)
{
    if (tiles->used - first <= 1)
        return check_single(tiles, first);
    plane cut = {0};
    if (!find_plane(tiles, first, &cut))
        return fail_overlap(tiles, first); /* all of them hold the region's first element */
    span region = tiles->region[cut.dim];
    FSDP_TRY(check_side(tiles, first, cut.dim, (span){region.lo, cut.at}, balance));
    return check_side(tiles, first, cut.dim, (span){cut.at, region.end}, balance);
}

static fsdp_status tiling_init(tiling *tiles, const int64_t *shape)
{
    size_t ndim = (size_t)tiles->ndim;
    tiles->spans = fsdp_alloc(tiles->count * ndim, sizeof *tiles->spans);
    tiles->faces = fsdp_alloc(tiles->count, sizeof *tiles->faces);
    if (!tiles->spans || !tiles->faces ||
        !fsdp_grow(&tiles->stack, &tiles->capacity, tiles->count, sizeof *tiles->stack))
        return fsdp_fail_memory(tiles->err, "a layout check");
    for (size_t d = 0; d < ndim; d++)
        tiles->region[d].end = shape[d];
    for (size_t i = 0; i < tiles->count; i++) {
        const fsdp_box *box = &tiles->boxes[i]->box;
        for (size_t d = 0; d < ndim; d++)
            tiles->spans[i * ndim + d] = (span){box->lo[d], box->lo[d] + box->len[d]};
        tiles->stack[i] = (uint32_t)i;
    }
    tiles->used = tiles->count;
    return FSDP_OK;
}

static void tiling_release(tiling *tiles)
{
    fsdp_free(tiles->spans);
    fsdp_free(tiles->faces);
    fsdp_free(tiles->stack);
}

/* --- the check -------------------------------------------------------------------------------- */

static fsdp_status check_each_box(const fsdp_layout *layout, int ndim, const int64_t *shape,
                                  fsdp_error *err)
{
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    for (size_t i = 0; i < layout->box_count; i++) {
        const fsdp_rank_box *item = &layout->boxes[i];
        char text[BOX_TEXT];
        if (item->rank < 0 || item->rank == INT_MAX)
            return fsdp_fail(err, FSDP_ERR_USAGE, "box %zu is of rank %d", i, item->rank);
        if (i > 0 && item->rank < layout->boxes[i - 1].rank)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "the boxes are not sorted by rank: box %zu of rank %d follows rank %d",
                             i, item->rank, layout->boxes[i - 1].rank);
        if (item->box.ndim != ndim)
            return fsdp_fail(err, FSDP_ERR_USAGE, "box %zu has %d dims, the tensor has %d", i,
                             item->box.ndim, ndim);
        if (!fsdp_box_contains(&whole, &item->box))
            return fsdp_fail(err, FSDP_ERR_USAGE, "box %zu of rank %d is not inside the tensor", i,
                             item->rank);
        if (fsdp_box_count(&item->box) == 0)
            return fsdp_fail(err, FSDP_ERR_USAGE, "box %s of rank %d is empty: leave it out",
                             box_text(&item->box, text), item->rank);
    }
    return FSDP_OK;
}

/* Keeps one of each set of equal boxes. */
static fsdp_status drop_replicas(const fsdp_rank_box **sorted, size_t n, size_t *distinct_out,
                                 fsdp_error *err)
{
    size_t distinct = 0;
    for (size_t i = 0, equal; i < n; i += equal) {
        equal = equal_boxes(sorted + i, n - i);
        for (size_t k = 1; k < equal; k++) {
            char text[BOX_TEXT];
            if (sorted[i + k]->rank == sorted[i + k - 1]->rank)
                return fsdp_fail(err, FSDP_ERR_USAGE, "rank %d has box %s twice",
                                 sorted[i + k]->rank, box_text(&sorted[i]->box, text));
        }
        sorted[distinct++] = sorted[i];
    }
    *distinct_out = distinct;
    return FSDP_OK;
}

static fsdp_status check_tiling(const fsdp_layout *layout, int ndim, const int64_t *shape,
                                const fsdp_rank_box **sorted, fsdp_error *err)
{
    tiling tiles = {.ndim = ndim, .boxes = sorted, .seed = 1, .err = err};
    FSDP_TRY(drop_replicas(sorted, layout->box_count, &tiles.count, err));
    fsdp_status status = tiling_init(&tiles, shape);
    if (status == FSDP_OK)
        status = check_region(&tiles, 0, balance_of(&tiles, 0));
    tiling_release(&tiles);
    return status;
}

fsdp_status fsdp_layout_check_boxes(const fsdp_layout *layout, int ndim, const int64_t *shape,
                                    fsdp_error *err)
{
    if (layout->box_count > FSDP_MAX_LAYOUT_BOXES)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the layout has %zu boxes, at most %d are allowed",
                         layout->box_count, FSDP_MAX_LAYOUT_BOXES);
    if (layout->box_count > 0 && !layout->boxes)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the layout says it has %zu boxes and has no list of them",
                         layout->box_count);
    FSDP_TRY(check_each_box(layout, ndim, shape, err));
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    if (fsdp_box_count(&whole) == 0)
        return FSDP_OK; /* an empty tensor holds no box */
    const fsdp_rank_box **sorted = NULL;
    FSDP_TRY(sort_boxes(layout, &sorted, err));
    fsdp_status status = check_tiling(layout, ndim, shape, sorted, err);
    fsdp_free(sorted);
    return status;
}

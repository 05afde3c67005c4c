/*
 * Meshes and layouts: from (layout, shape, rank) to boxes. Planners call this millions of times, so
 * nothing there allocates. A layout is checked once, when it enters a state dict
 * (fsdp_layout_check); the check that explicit boxes tile the tensor stands before the layouts.
 */
#include "statedict/sd/layout_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "base/text.h"

#include <inttypes.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === meshes =================================================================================== */

/*
 * Meshes: the coordinates of every world rank. A dense mesh (0, 1, 2, ...) stores no ranks, so a
 * mesh of any size costs nothing; others keep a table sorted by rank to find coordinates.
 */

typedef struct mesh_member {
    int rank;
    int position;
} mesh_member;

struct fsdp_mesh {
    atomic_int holders; /* next to the first owner */
    int ndim;
    int64_t shape[FSDP_MAX_MESH_DIMS];
    char names[FSDP_MAX_MESH_DIMS][FSDP_MAX_MESH_NAME + 1];
    int64_t size;
    int world;
    int *ranks;           /* by position; NULL when dense */
    mesh_member *by_rank; /* NULL when dense */
};

/* --- creating --------------------------------------------------------------------------------- */

static bool is_name_byte(char c)
{
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.' || c == '-';
}

static bool is_mesh_name(const char *name, size_t size)
{
    if (size == 0 || size > FSDP_MAX_MESH_NAME)
        return false;
    for (size_t i = 0; i < size; i++) {
        if (!is_name_byte(name[i]))
            return false;
    }
    return true;
}

static fsdp_status set_names(fsdp_mesh *mesh, const char *const *names, fsdp_error *err)
{
    for (int i = 0; i < mesh->ndim; i++) {
        if (!names || !names[i])
            return fsdp_fail(err, FSDP_ERR_USAGE, "mesh dim %d has no name", i);
        size_t size = strnlen(names[i], FSDP_MAX_MESH_NAME + 1);
        if (!is_mesh_name(names[i], size)) {
            char text[100];
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "mesh dim name '%s': 1 to %d of A-Z a-z 0-9 _ . - are allowed",
                             fsdp_printable(names[i], size, text, sizeof text), FSDP_MAX_MESH_NAME);
        }
        memcpy(mesh->names[i], names[i], size);
        for (int before = 0; before < i; before++) {
            if (strcmp(mesh->names[before], mesh->names[i]) == 0)
                return fsdp_fail(err, FSDP_ERR_USAGE, "two mesh dims are named '%s'", names[i]);
        }
    }
    return FSDP_OK;
}

static fsdp_status set_shape(fsdp_mesh *mesh, int ndim, const int64_t *shape, fsdp_error *err)
{
    if (ndim < 1 || ndim > FSDP_MAX_MESH_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh has %d dims, 1 to %d are allowed", ndim,
                         FSDP_MAX_MESH_DIMS);
    mesh->ndim = ndim;
    mesh->size = 1;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 1)
            return fsdp_fail(err, FSDP_ERR_USAGE, "mesh dim %d cannot have size %lld", i,
                             (long long)shape[i]);
        if (shape[i] > INT_MAX || mesh->size > INT_MAX / shape[i])
            return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh has more than %d ranks", INT_MAX);
        mesh->shape[i] = shape[i];
        mesh->size *= shape[i];
    }
    mesh->world = (int)mesh->size;
    return FSDP_OK;
}

static int compare_ranks(const void *left, const void *right)
{
    const mesh_member *a = left, *b = right;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

static bool counts_up(const int *ranks, int64_t size)
{
    for (int64_t i = 0; i < size; i++) {
        if (ranks[i] != i)
            return false;
    }
    return true;
}

static fsdp_status set_ranks(fsdp_mesh *mesh, const int *ranks, fsdp_error *err)
{
    if (!ranks || counts_up(ranks, mesh->size))
        return FSDP_OK;
    size_t n = (size_t)mesh->size;
    mesh->ranks = fsdp_alloc(n, sizeof *mesh->ranks);
    mesh->by_rank = fsdp_alloc(n, sizeof *mesh->by_rank);
    if (!mesh->ranks || !mesh->by_rank)
        return fsdp_fail_memory(err, "a mesh");
    memcpy(mesh->ranks, ranks, n * sizeof *ranks);
    for (size_t i = 0; i < n; i++)
        mesh->by_rank[i] = (mesh_member){.rank = ranks[i], .position = (int)i};
    qsort(mesh->by_rank, n, sizeof *mesh->by_rank, compare_ranks);
    if (mesh->by_rank[0].rank < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh cannot name rank %d",
                         mesh->by_rank[0].rank);
    for (size_t i = 1; i < n; i++) {
        if (mesh->by_rank[i].rank == mesh->by_rank[i - 1].rank)
            return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh names rank %d twice",
                             mesh->by_rank[i].rank);
    }
    if (mesh->by_rank[n - 1].rank == INT_MAX)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh cannot name rank %d", INT_MAX);
    mesh->world = mesh->by_rank[n - 1].rank + 1;
    return FSDP_OK;
}

fsdp_status fsdp_mesh_create(int ndim, const int64_t *shape, const char *const *names,
                             const int *ranks, fsdp_mesh **mesh_out, fsdp_error *err)
{
    FSDP_NEED(err, mesh_out);
    *mesh_out = NULL;
    FSDP_NEED(err, shape, names);
    fsdp_mesh *mesh = fsdp_alloc(1, sizeof *mesh);
    if (!mesh)
        return fsdp_fail_memory(err, "a mesh");
    fsdp_status status = set_shape(mesh, ndim, shape, err);
    if (status == FSDP_OK)
        status = set_names(mesh, names, err);
    if (status == FSDP_OK)
        status = set_ranks(mesh, ranks, err);
    if (status != FSDP_OK) {
        fsdp_mesh_free(mesh);
        return status;
    }
    *mesh_out = mesh;
    return FSDP_OK;
}

fsdp_mesh *fsdp_mesh_hold(const fsdp_mesh *mesh)
{
    fsdp_mesh *held = (fsdp_mesh *)mesh;
    atomic_fetch_add(&held->holders, 1);
    return held;
}

void fsdp_mesh_free(fsdp_mesh *mesh)
{
    if (!mesh || atomic_fetch_sub(&mesh->holders, 1) > 0)
        return;
    fsdp_free(mesh->ranks);
    fsdp_free(mesh->by_rank);
    fsdp_free(mesh);
}

fsdp_status fsdp_mesh_copy(const fsdp_mesh *mesh, fsdp_mesh **copy_out, fsdp_error *err)
{
    const char *names[FSDP_MAX_MESH_DIMS];
    for (int i = 0; i < mesh->ndim; i++)
        names[i] = mesh->names[i];
    return fsdp_mesh_create(mesh->ndim, mesh->shape, names, mesh->ranks, copy_out, err);
}

/* --- queries ---------------------------------------------------------------------------------- */

int fsdp_mesh_ndim(const fsdp_mesh *mesh)
{
    if (!mesh)
        return 0;
    return mesh->ndim;
}

int64_t fsdp_mesh_dim_size(const fsdp_mesh *mesh, int dim)
{
    if (!mesh)
        return 0;
    return mesh->shape[dim];
}

const char *fsdp_mesh_dim_name(const fsdp_mesh *mesh, int dim)
{
    if (!mesh)
        return NULL;
    return mesh->names[dim];
}

int64_t fsdp_mesh_size(const fsdp_mesh *mesh)
{
    if (!mesh)
        return 0;
    return mesh->size;
}

/* The highest rank plus one. */
static int mesh_world(const fsdp_mesh *mesh)
{
    return mesh->world;
}

bool fsdp_mesh_is_dense(const fsdp_mesh *mesh)
{
    return !mesh->ranks;
}

int fsdp_mesh_rank_at(const fsdp_mesh *mesh, int64_t position)
{
    return mesh->ranks ? mesh->ranks[position] : (int)position;
}

int64_t fsdp_mesh_position(const fsdp_mesh *mesh, int rank)
{
    if (!mesh->ranks)
        return rank >= 0 && rank < mesh->size ? rank : -1;
    int64_t lo = 0, hi = mesh->size;
    while (lo < hi) {
        int64_t middle = lo + (hi - lo) / 2;
        if (mesh->by_rank[middle].rank < rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo < mesh->size && mesh->by_rank[lo].rank == rank ? mesh->by_rank[lo].position : -1;
}

bool fsdp_mesh_coord(const fsdp_mesh *mesh, int rank, int64_t *coord_out)
{
    if (!mesh || !coord_out)
        return false;
    int64_t position = fsdp_mesh_position(mesh, rank);
    if (position < 0)
        return false;
    for (int i = mesh->ndim - 1; i >= 0; i--) {
        coord_out[i] = position % mesh->shape[i];
        position /= mesh->shape[i];
    }
    return true;
}

bool fsdp_mesh_equal(const fsdp_mesh *a, const fsdp_mesh *b)
{
    if (a == b)
        return true;
    if (!a || !b || a->ndim != b->ndim || a->world != b->world || !a->ranks != !b->ranks)
        return false;
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i] || strcmp(a->names[i], b->names[i]) != 0)
            return false;
    }
    return !a->ranks || memcmp(a->ranks, b->ranks, (size_t)a->size * sizeof *a->ranks) == 0;
}

/* === explicit boxes =========================================================================== */

/*
 * Checks that the explicit boxes of a layout tile the tensor. They come from manifests and callers,
 * up to 65,536 per tensor, so the check must be exact and must not take quadratic time.
 *
 * Equal boxes of different ranks (replicas) are counted once. The others are checked by splitting
 * the tensor in two along a face of some box, again and again. Boxes tile a region when they are
 * disjoint and their volumes add up to it; once the volumes of a region disagree, only a half that
 * disagrees in the same way is followed, so a fault is found on one straight way down.
 */

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
    int64_t *faces; /* one number per box */
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
            return fsdp_fail(err, FSDP_ERR_USAGE, "box %zu cannot belong to rank %d", i,
                             item->rank);
        if (i > 0 && item->rank < layout->boxes[i - 1].rank)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "the boxes are not sorted by rank: box %zu of rank %d follows rank %d",
                             i, item->rank, layout->boxes[i - 1].rank);
        if (item->box.ndim != ndim)
            return fsdp_fail(err, FSDP_ERR_USAGE, "box %zu has %d dims, but the tensor has %d", i,
                             item->box.ndim, ndim);
        if (!fsdp_box_contains(&whole, &item->box))
            return fsdp_fail(err, FSDP_ERR_USAGE, "box %zu of rank %d is not inside the tensor", i,
                             item->rank);
        if (fsdp_box_count(&item->box) == 0)
            return fsdp_fail(err, FSDP_ERR_USAGE, "box %s of rank %d is empty; leave it out",
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

/* BOXES: each inside the shape, none twice on a rank, distinct ones disjoint, every element held. */
static fsdp_status layout_check_boxes(const fsdp_layout *layout, int ndim, const int64_t *shape,
                                      fsdp_error *err)
{
    if (layout->box_count > FSDP_MAX_LAYOUT_BOXES)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the layout has %zu boxes, at most %d are allowed",
                         layout->box_count, FSDP_MAX_LAYOUT_BOXES);
    if (layout->box_count > 0 && !layout->boxes)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the layout counts %zu boxes but has no list of them",
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

/* === layouts ================================================================================== */

/* --- mesh layouts ----------------------------------------------------------------------------- */

static void cut_dim(fsdp_box *box, int dim, int64_t parts, int64_t index)
{
    int64_t lo, len;
    fsdp_chunk(box->len[dim], parts, index, &lo, &len);
    box->lo[dim] += lo;
    box->len[dim] = len;
}

static bool cuts(const fsdp_placement *placement, int dim)
{
    return (placement->kind == FSDP_SHARD || placement->kind == FSDP_STRIDED_SHARD) &&
           placement->dim == dim;
}

/*
 * Plain shards cut from left to right, each one the rest of the dim. A strided shard cuts after all
 * mesh dims to its right, so strided shards follow from right to left: the order in which TP, then
 * FSDP cut the tensor.
 */
static void mesh_box_at(const fsdp_layout *layout, int ndim, const int64_t *shape,
                        const int64_t *coord, fsdp_box *box)
{
    const fsdp_placement *placement = layout->placement;
    int mesh_ndim = fsdp_mesh_ndim(layout->mesh);
    box->ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        box->lo[i] = 0;
        box->len[i] = shape[i];
    }
    for (int i = 0; i < mesh_ndim; i++) {
        if (placement[i].kind == FSDP_SHARD)
            cut_dim(box, placement[i].dim, fsdp_mesh_dim_size(layout->mesh, i), coord[i]);
    }
    for (int i = mesh_ndim - 1; i >= 0; i--) {
        if (placement[i].kind == FSDP_STRIDED_SHARD)
            cut_dim(box, placement[i].dim, fsdp_mesh_dim_size(layout->mesh, i), coord[i]);
    }
    for (int i = 0; i < ndim; i++) {
        if (box->len[i] == 0)
            box->lo[i] = shape[i];
    }
}

bool fsdp_layout_mesh_box(const fsdp_layout *layout, int ndim, const int64_t *shape, int rank,
                          fsdp_box *box_out)
{
    if (!layout || (ndim > 0 && !shape) || !box_out)
        return false;
    int64_t coord[FSDP_MAX_MESH_DIMS];
    if (!fsdp_mesh_coord(layout->mesh, rank, coord))
        return false;
    mesh_box_at(layout, ndim, shape, coord, box_out);
    return true;
}

static fsdp_box_copy mesh_copy(const fsdp_layout *layout, int rank)
{
    int64_t coord[FSDP_MAX_MESH_DIMS];
    if (!fsdp_mesh_coord(layout->mesh, rank, coord))
        return (fsdp_box_copy){.copies = 0, .copy = -1};
    int64_t copies = 1, copy = 0;
    for (int i = 0; i < fsdp_mesh_ndim(layout->mesh); i++) {
        if (layout->placement[i].kind != FSDP_REPLICATE)
            continue;
        copies *= fsdp_mesh_dim_size(layout->mesh, i);
        copy = copy * fsdp_mesh_dim_size(layout->mesh, i) + coord[i];
    }
    return (fsdp_box_copy){.copies = (int)copies, .copy = (int)copy};
}

/* --- flat layouts ----------------------------------------------------------------------------- */

/* The elements of the tensor, in its own order, that lie in the chunk of a rank. */
static int64_t flat_range(const fsdp_layout *layout, int64_t count, int rank, int64_t *first)
{
    int64_t position = fsdp_mesh_position(layout->mesh, rank);
    if (position < 0)
        return 0;
    int64_t chunk = layout->flat_count / fsdp_mesh_size(layout->mesh);
    int64_t lo = position * chunk - layout->flat_offset;
    int64_t end = lo + chunk < count ? lo + chunk : count;
    *first = lo > 0 ? lo : 0;
    return end > *first ? end - *first : 0;
}

static int flat_boxes(const fsdp_layout *layout, int ndim, const int64_t *shape, int rank,
                      fsdp_box *pieces)
{
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    int64_t first = 0;
    int64_t count = flat_range(layout, fsdp_box_count(&whole), rank, &first);
    return fsdp_box_cut(&whole, first, count, pieces);
}

int64_t fsdp_layout_flat_start(const fsdp_layout *layout, int64_t count, int rank)
{
    int64_t first = 0;
    if (flat_range(layout, count, rank, &first) == 0)
        return -1;
    int64_t chunk = layout->flat_count / fsdp_mesh_size(layout->mesh);
    return layout->flat_offset + first - fsdp_mesh_position(layout->mesh, rank) * chunk;
}

/* --- box layouts ------------------------------------------------------------------------------ */

/* Number of the first box of a rank, or of a higher one. */
static size_t first_box(const fsdp_layout *layout, int64_t rank)
{
    size_t lo = 0, hi = layout->box_count;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (layout->boxes[middle].rank < rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

static fsdp_box_copy box_copy(const fsdp_layout *layout, int rank, size_t index)
{
    size_t number = first_box(layout, rank) + index;
    fsdp_box_copy found = {.copies = 0, .copy = -1};
    if (number >= layout->box_count || layout->boxes[number].rank != rank)
        return found;
    if (layout->copies)
        return layout->copies[number];
    for (size_t i = 0; i < layout->box_count; i++) {
        if (i == number)
            found.copy = found.copies;
        found.copies += fsdp_box_equal(&layout->boxes[i].box, &layout->boxes[number].box);
    }
    return found;
}

/* --- every kind ------------------------------------------------------------------------------- */

size_t fsdp_layout_box_count(const fsdp_layout *layout, int ndim, const int64_t *shape, int rank)
{
    if (!layout || (ndim > 0 && !shape))
        return 0;
    if (layout->kind == FSDP_LAYOUT_BOXES)
        return first_box(layout, (int64_t)rank + 1) - first_box(layout, rank);
    if (layout->kind == FSDP_LAYOUT_FLAT) {
        fsdp_box pieces[FSDP_BOX_PIECES];
        return (size_t)flat_boxes(layout, ndim, shape, rank, pieces);
    }
    fsdp_box box;
    return fsdp_layout_mesh_box(layout, ndim, shape, rank, &box) && fsdp_box_count(&box) > 0;
}

void fsdp_layout_box_at(const fsdp_layout *layout, int ndim, const int64_t *shape, int rank,
                        size_t index, fsdp_box *box_out)
{
    if (!layout || (ndim > 0 && !shape) || !box_out)
        return;
    if (layout->kind == FSDP_LAYOUT_BOXES) {
        *box_out = layout->boxes[first_box(layout, rank) + index].box;
    } else if (layout->kind == FSDP_LAYOUT_FLAT) {
        fsdp_box pieces[FSDP_BOX_PIECES];
        flat_boxes(layout, ndim, shape, rank, pieces);
        *box_out = pieces[index];
    } else {
        fsdp_layout_mesh_box(layout, ndim, shape, rank, box_out);
    }
}

int fsdp_layout_world(const fsdp_layout *layout)
{
    if (layout->kind != FSDP_LAYOUT_BOXES)
        return mesh_world(layout->mesh);
    return layout->box_count > 0 ? layout->boxes[layout->box_count - 1].rank + 1 : 0;
}

static fsdp_box_copy copy_of(const fsdp_layout *layout, int rank, size_t index)
{
    if (layout->kind == FSDP_LAYOUT_BOXES)
        return box_copy(layout, rank, index);
    if (layout->kind == FSDP_LAYOUT_MESH)
        return mesh_copy(layout, rank);
    bool is_member = fsdp_mesh_position(layout->mesh, rank) >= 0;
    return (fsdp_box_copy){.copies = is_member ? 1 : 0, .copy = is_member ? 0 : -1};
}

int64_t fsdp_layout_copies(const fsdp_layout *layout, int rank, size_t index)
{
    return copy_of(layout, rank, index).copies;
}

int64_t fsdp_layout_copy(const fsdp_layout *layout, int rank, size_t index)
{
    return copy_of(layout, rank, index).copy;
}

/* --- checking --------------------------------------------------------------------------------- */

static fsdp_status check_strided(const fsdp_layout *layout, int mesh_dim, fsdp_error *err)
{
    const fsdp_placement *placement = &layout->placement[mesh_dim];
    int64_t parts = 1;
    for (int i = mesh_dim + 1; i < fsdp_mesh_ndim(layout->mesh); i++) {
        if (cuts(&layout->placement[i], placement->dim))
            parts *= fsdp_mesh_dim_size(layout->mesh, i);
    }
    if (placement->split == parts)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "StridedShard(%d, %" PRId64 ") on mesh dim '%s': the mesh dims to its right "
                     "cut dim %d into %" PRId64 " parts, the split must be that number",
                     placement->dim, placement->split, fsdp_mesh_dim_name(layout->mesh, mesh_dim),
                     placement->dim, parts);
}

static fsdp_status check_placement(const fsdp_layout *layout, int mesh_dim, int ndim,
                                   fsdp_error *err)
{
    const fsdp_placement *placement = &layout->placement[mesh_dim];
    const char *name = fsdp_mesh_dim_name(layout->mesh, mesh_dim);
    switch (placement->kind) {
    case FSDP_REPLICATE: return FSDP_OK;
    case FSDP_PARTIAL:
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "it is Partial on mesh dim '%s': reduce it over that dim before adding it "
                         "to a state dict",
                         name);
    case FSDP_SHARD:
    case FSDP_STRIDED_SHARD:
        if (placement->dim < 0 || placement->dim >= ndim)
            return fsdp_fail(err, FSDP_ERR_USAGE, "mesh dim '%s' shards dim %d of a %d-d tensor",
                             name, placement->dim, ndim);
        return placement->kind == FSDP_SHARD ? FSDP_OK : check_strided(layout, mesh_dim, err);
    }
    return fsdp_fail(err, FSDP_ERR_USAGE, "mesh dim '%s' has the unknown placement %d", name,
                     (int)placement->kind);
}

static fsdp_status check_flat_layout(const fsdp_layout *layout, int ndim, const int64_t *shape,
                                     fsdp_error *err)
{
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    int64_t count = fsdp_box_count(&whole);
    int64_t ranks = fsdp_mesh_size(layout->mesh);
    if (layout->flat_count < 0 || layout->flat_count % ranks != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a flat buffer of %" PRId64 " elements cannot be cut into %" PRId64
                         " equal chunks; pad it",
                         layout->flat_count, ranks);
    if (layout->flat_offset < 0 || layout->flat_offset > layout->flat_count ||
        count > layout->flat_count - layout->flat_offset)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%" PRId64 " elements at offset %" PRId64
                         " do not lie in a flat buffer of %" PRId64,
                         count, layout->flat_offset, layout->flat_count);
    return FSDP_OK;
}

fsdp_status fsdp_layout_check(const fsdp_layout *layout, int ndim, const int64_t *shape,
                              fsdp_error *err)
{
    if (layout->kind == FSDP_LAYOUT_BOXES)
        return layout_check_boxes(layout, ndim, shape, err);
    if (layout->kind != FSDP_LAYOUT_MESH && layout->kind != FSDP_LAYOUT_FLAT)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the layout has the unknown kind %d",
                         (int)layout->kind);
    if (!layout->mesh)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the layout has no mesh");
    if (layout->kind == FSDP_LAYOUT_FLAT)
        return check_flat_layout(layout, ndim, shape, err);
    for (int i = 0; i < fsdp_mesh_ndim(layout->mesh); i++)
        FSDP_TRY(check_placement(layout, i, ndim, err));
    return FSDP_OK;
}

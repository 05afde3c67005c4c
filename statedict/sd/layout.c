/*
 * Layouts: from (layout, shape, rank) to boxes. Planners call this millions of times, so nothing
 * here allocates. A layout is checked once, when it enters a state dict (fsdp_layout_check);
 * explicit boxes are checked in layout_boxes.c.
 */
#include "statedict/sd/layout_internal.h"
#include "base/data/box_internal.h"

#include <inttypes.h>

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
        return fsdp_mesh_world(layout->mesh);
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
                         "it is Partial on mesh dim '%s': reduce it over that dim before it goes "
                         "into a state dict",
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

static fsdp_status check_mesh_layout(const fsdp_layout *layout, int ndim, fsdp_error *err)
{
    for (int i = 0; i < fsdp_mesh_ndim(layout->mesh); i++)
        FSDP_TRY(check_placement(layout, i, ndim, err));
    return FSDP_OK;
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
                         " equal chunks: pad it",
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
        return fsdp_layout_check_boxes(layout, ndim, shape, err);
    if (layout->kind != FSDP_LAYOUT_MESH && layout->kind != FSDP_LAYOUT_FLAT)
        return fsdp_fail(err, FSDP_ERR_USAGE, "unknown kind of layout %d", (int)layout->kind);
    if (!layout->mesh)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the layout has no mesh");
    if (layout->kind == FSDP_LAYOUT_FLAT)
        return check_flat_layout(layout, ndim, shape, err);
    return check_mesh_layout(layout, ndim, err);
}

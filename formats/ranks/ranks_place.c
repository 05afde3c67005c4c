/*
 * Converts placements to boxes. PyTorch has two interpretations of _StridedShard, which agree
 * where sizes divide: the order in which mesh dims cut a tensor (FSDP on top of tensor
 * parallelism), or cuts from left to right, by which every rank gets rows of several pieces. The
 * sizes of pieces show which one a program used. See ranks.h.
 */
#include "formats/ranks/ranks.h"

#include <string.h>

static bool cuts(const rank_placement *placement, int dim)
{
    return placement->kind != RANK_REPLICATE && placement->dim == dim;
}

/* --- cuts in an order ---------------------------------------------------------------------------- */

/* Inserts a mesh dim into the order of a tensor dim, behind those that make `split` parts; false
 * when no position fits. */
static bool insert(rank_layout *layout, int *order, int *count, int mesh_dim, int64_t split)
{
    int64_t parts = 1;
    int at = 0;
    while (at < *count && parts != split)
        if (fsdp_mul_overflow(parts, layout->mesh_shape[order[at++]], &parts))
            return false;
    if (parts != split)
        return false;
    memmove(order + at + 1, order + at, (size_t)(*count - at) * sizeof *order);
    order[at] = mesh_dim;
    ++*count;
    return true;
}

static bool order_dim(rank_layout *layout, int dim, int *order, int *count)
{
    for (int i = layout->mesh_ndim - 1; i >= 0; i--) {
        const rank_placement *placement = &layout->placements[i];
        bool is_strided = placement->kind == RANK_STRIDED;
        if (cuts(placement, dim) &&
            !insert(layout, order, count, i, is_strided ? placement->split : 1))
            return false;
    }
    return true;
}

static bool is_first_of_dim(const rank_layout *layout, int mesh_dim)
{
    for (int i = 0; i < mesh_dim; i++)
        if (cuts(&layout->placements[i], layout->placements[mesh_dim].dim))
            return false;
    return layout->placements[mesh_dim].kind != RANK_REPLICATE;
}

void rank_layout_order(rank_layout *layout)
{
    layout->order_count = 0;
    layout->is_ordered = true;
    for (int i = 0; i < layout->mesh_ndim; i++)
        layout->has_strided |= layout->placements[i].kind == RANK_STRIDED;
    for (int i = 0; i < layout->mesh_ndim; i++) {
        if (!layout->has_strided && layout->placements[i].kind == RANK_SHARD)
            layout->order[layout->order_count++] = i;
        int count = 0;
        if (layout->has_strided && is_first_of_dim(layout, i)) {
            layout->is_ordered &= order_dim(layout, layout->placements[i].dim,
                                            layout->order + layout->order_count, &count);
            layout->order_count += count;
        }
    }
}

void rank_layout_box(const rank_layout *layout, int ndim, const int64_t *shape, fsdp_box *box_out)
{
    *box_out = fsdp_box_whole(ndim, shape);
    for (int i = 0; i < layout->order_count; i++) {
        int mesh_dim = layout->order[i], dim = layout->placements[mesh_dim].dim;
        int64_t lo, len;
        fsdp_chunk(box_out->len[dim], layout->mesh_shape[mesh_dim], layout->coordinate[mesh_dim],
                   &lo, &len);
        box_out->lo[dim] += lo;
        box_out->len[dim] = len;
    }
    for (int dim = 0; dim < ndim; dim++)
        if (box_out->len[dim] == 0)
            box_out->lo[dim] = shape[dim];
}

/* --- from left to right -------------------------------------------------------------------------- */

/* Appends rows [lo, lo + len) of the concatenated runs; false beyond the limit. */
static bool take_rows(const rank_runs *from, int64_t lo, int64_t len, rank_runs *to)
{
    for (size_t i = 0; i < from->count && len > 0; i++) {
        rank_run run = from->items[i];
        if (lo >= run.len) {
            lo -= run.len;
            continue;
        }
        run.lo += lo;
        run.len = run.len - lo < len ? run.len - lo : len;
        lo = 0;
        len -= run.len;
        rank_run *last = to->count > 0 ? &to->items[to->count - 1] : NULL;
        if (last && last->lo + last->len == run.lo) {
            last->len += run.len;
        } else {
            if (to->count == RANK_MOST_RUNS ||
                !fsdp_grow(&to->items, &to->room, to->count + 1, sizeof *to->items))
                return false;
            to->items[to->count++] = run;
        }
    }
    return true;
}

static int64_t rows_of(const rank_runs *runs)
{
    int64_t rows = 0;
    for (size_t i = 0; i < runs->count; i++)
        rows += runs->items[i].len;
    return rows;
}

/* Takes this rank's part of every one of `split` pieces. */
static bool cut_runs(const rank_layout *layout, int mesh_dim, const rank_runs *from, rank_runs *to)
{
    const rank_placement *placement = &layout->placements[mesh_dim];
    int64_t split = placement->kind == RANK_STRIDED ? placement->split : 1, rows = rows_of(from);
    for (int64_t piece = 0, begin, size, lo, len; piece < split; piece++) {
        fsdp_chunk(rows, split, piece, &begin, &size);
        if (size == 0)
            return true;
        if (piece > RANK_MOST_RUNS)
            return false;
        fsdp_chunk(size, layout->mesh_shape[mesh_dim], layout->coordinate[mesh_dim], &lo, &len);
        if (!take_rows(from, begin + lo, len, to))
            return false;
    }
    return true;
}

bool rank_layout_runs(const rank_layout *layout, int dim, int64_t size, rank_runs *runs_out)
{
    *runs_out = (rank_runs){0};
    bool is_done = size == 0;
    if (!is_done && fsdp_grow(&runs_out->items, &runs_out->room, 1, sizeof *runs_out->items)) {
        runs_out->items[runs_out->count++] = (rank_run){0, size};
        is_done = true;
    }
    for (int i = 0; i < layout->mesh_ndim && is_done; i++) {
        rank_runs next = {0};
        if (!cuts(&layout->placements[i], dim))
            continue;
        is_done = cut_runs(layout, i, runs_out, &next);
        fsdp_free(runs_out->items);
        *runs_out = next;
    }
    return is_done;
}

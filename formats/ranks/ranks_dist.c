/*
 * DTensor and ShardedTensor in the file of one rank: computes the boxes of its pieces and
 * compares them with everything else that the pickle states about them. See ranks.h.
 */
#include "formats/ranks/ranks.h"
#include "base/core/bytes.h"
#include "base/data/box_internal.h"

#include <stdlib.h>
#include <string.h>

/* === boxes of a rank ========================================================================== */

/*
 * Converts placements to boxes. PyTorch has two interpretations of _StridedShard, which agree
 * where sizes divide: the order in which mesh dims cut a tensor (FSDP on top of tensor
 * parallelism), or cuts from left to right, by which every rank gets rows of several pieces. The
 * sizes of pieces show which one a program used.
 */

/* The layout of a tensor on a mesh, and the order in which mesh dims cut it (first cut first; only those
 * that cut). */
typedef struct rank_layout {
    int mesh_ndim;
    const int64_t *mesh_shape, *coordinate;
    rank_placement placements[RANK_MESH_DIMS];
    int order[RANK_MESH_DIMS], order_count;
    bool is_ordered; /* false: no order of cuts yields the strided placements */
    bool has_strided;
} rank_layout;

typedef struct rank_runs {
    rank_run *items;
    size_t count, room;
} rank_runs;

enum { RANK_MOST_RUNS = 65536 };

static bool cuts(const rank_placement *placement, int dim)
{
    return placement->kind != RANK_REPLICATE && placement->dim == dim;
}

/* --- cuts in an order ---------------------------------------------------------------------------- */

/* Inserts a mesh dim into the order of a tensor dim, after those that make `split` parts; false
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

/* Computes the order that strided placements imply: _StridedShard(d, s) is cut after the dims that split d
 * into s parts. */
static void rank_layout_order(rank_layout *layout)
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

/* The box of the coordinate, cut in that order. An empty box lies at the end. */
static void rank_layout_box(const rank_layout *layout, int ndim, const int64_t *shape,
                            fsdp_box *box_out)
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

/* The other interpretation of strided placements: dims cut from left to right, each rank taking its part
 * of every one of `split` pieces. False when there are more than RANK_MOST_RUNS runs, or no memory. */
static bool rank_layout_runs(const rank_layout *layout, int dim, int64_t size, rank_runs *runs_out)
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

/* === meshes =================================================================================== */

/*
 * DeviceMesh: the ranks that share a tensor, and the coordinate of one of them. Since PyTorch
 * 2.10 a mesh is a layout (sizes and strides) over the ranks of its root mesh; before, it was a
 * tensor of ranks.
 */

enum { NESTING = 4, MOST_PARTS = 64, MOST_BYTES = 64 << 20 };

/* One size and stride of a dim; most dims have one part. */
typedef struct mesh_part {
    int dim;
    int64_t size, stride;
} mesh_part;

typedef struct mesh_parts {
    const torch_archive *archive;
    int64_t *list; /* the ranks of the mesh, or of its root mesh */
    size_t listed;
    mesh_part items[MOST_PARTS];
    int count, ndim;
} mesh_parts;

static fsdp_status bad_mesh(const torch_archive *archive, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: a device mesh %s", archive->where, why);
}

/* --- tensors of ranks --------------------------------------------------------------------------- */

static int64_t load_int(const torch_tensor *tensor, const uint8_t *data)
{
    bool is_swapped = tensor->fix & FSDP_FIX_SWAP;
    if (tensor->dtype == FSDP_I32) {
        uint32_t bits = fsdp_load_u32(data);
        return (int32_t)(is_swapped ? __builtin_bswap32(bits) : bits);
    }
    uint64_t bits = fsdp_load_u64(data);
    return (int64_t)(is_swapped ? __builtin_bswap64(bits) : bits);
}

/* The elements in row-major order. */
static void gather(const torch_tensor *tensor, const uint8_t *data, int64_t *values, size_t count)
{
    int64_t at[FSDP_MAX_DIMS] = {0};
    for (size_t i = 0; i < count; i++) {
        int64_t offset = 0;
        for (int dim = 0; dim < tensor->ndim; dim++)
            offset += at[dim] * tensor->strides[dim];
        values[i] = load_int(tensor, data + offset);
        for (int dim = tensor->ndim - 1; dim >= 0 && ++at[dim] == tensor->shape[dim]; dim--)
            at[dim] = 0;
    }
}

static fsdp_status gather_ranks(const torch_archive *archive, const torch_tensor *tensor,
                                int64_t **values_out, size_t *count_out, fsdp_error *err)
{
    fsdp_box box = fsdp_box_whole(tensor->ndim, tensor->shape);
    int64_t count = fsdp_box_count(&box), span = torch_tensor_span(tensor);
    if (count < 1 || count > RANK_MESH_LIMIT)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "%s: a device mesh has %lld ranks, 1 to %d are allowed", archive->where,
                         (long long)count, RANK_MESH_LIMIT);
    if (span > MOST_BYTES)
        return bad_mesh(archive, "is spread over more than 64 MiB", err);
    uint8_t *data = fsdp_alloc((size_t)span, 1);
    int64_t *values = fsdp_alloc((size_t)count, sizeof *values);
    fsdp_status st = data && values ? FSDP_OK : fsdp_fail_memory(err, "a device mesh");
    if (st == FSDP_OK)
        st = torch_tensor_pread(archive->source, tensor, 0, data, (size_t)span, err);
    if (st == FSDP_OK)
        gather(tensor, data, values, (size_t)count);
    fsdp_free(data);
    if (st != FSDP_OK) {
        fsdp_free(values);
        return st;
    }
    *values_out = values;
    *count_out = (size_t)count;
    return FSDP_OK;
}

static fsdp_status read_ranks(const torch_archive *archive, fsdp_node node, torch_tensor *tensor,
                              int64_t **values_out, size_t *count_out, fsdp_error *err)
{
    torch_wrapper wrapper;
    torch_kind kind;
    FSDP_TRY(torch_tensor_read(archive, node, &kind, tensor, &wrapper, err));
    fsdp_status st =
        kind == TORCH_KIND_TENSOR && (tensor->dtype == FSDP_I32 || tensor->dtype == FSDP_I64)
            ? gather_ranks(archive, tensor, values_out, count_out, err)
            : bad_mesh(archive, "has no list of ranks", err);
    torch_tensor_release(tensor);
    return st;
}

/* --- layouts ------------------------------------------------------------------------------------ */

/* Adds a size and a stride, or tuples of them. */
static fsdp_status add_parts(mesh_parts *parts, int dim, fsdp_node sizes, fsdp_node strides,
                             int depth, fsdp_error *err)
{
    const torch_archive *archive = parts->archive;
    int64_t size, stride;
    if (fsdp_pickle_int(&archive->pickle, sizes, &size) &&
        fsdp_pickle_int(&archive->pickle, strides, &stride)) {
        if (size < 1 || size > RANK_MESH_LIMIT || stride < 0 || stride > RANK_MESH_LIMIT ||
            (stride == 0 && size > 1) || parts->count == MOST_PARTS)
            return bad_mesh(archive, "has impossible sizes or strides", err);
        parts->items[parts->count++] = (mesh_part){dim, size, stride};
        return FSDP_OK;
    }
    const fsdp_pickle_node *list = torch_node(archive, sizes);
    if (list->kind != FSDP_NODE_TUPLE || torch_node(archive, strides)->kind != FSDP_NODE_TUPLE ||
        torch_node(archive, strides)->count != list->count || depth == NESTING)
        return bad_mesh(archive, "has an unknown layout", err);
    for (uint32_t i = 0; i < list->count; i++)
        FSDP_TRY(add_parts(parts, dim, list->as.items[i], torch_element(archive, strides, i),
                           depth + 1, err));
    return FSDP_OK;
}

static fsdp_status begin_dims(mesh_parts *parts, uint32_t count, fsdp_error *err)
{
    if (count < 1 || count > RANK_MESH_DIMS)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "%s: a device mesh has %u dims, 1 to %d are allowed",
                         parts->archive->where, count, RANK_MESH_DIMS);
    parts->ndim = (int)count;
    return FSDP_OK;
}

/* _MeshLayout: axes, each with a shape and a stride, or one shape and one stride for all dims. */
static fsdp_status read_mesh_layout(mesh_parts *parts, fsdp_node layout, fsdp_error *err)
{
    const torch_archive *archive = parts->archive;
    fsdp_node axes = torch_attribute(archive, layout, "axes");
    fsdp_node shape = torch_attribute(archive, layout, "shape");
    fsdp_node stride = torch_attribute(archive, layout, "stride");
    int64_t number;
    if (axes == 0 && fsdp_pickle_int(&archive->pickle, shape, &number)) {
        FSDP_TRY(begin_dims(parts, 1, err));
        return add_parts(parts, 0, shape, stride, 0, err);
    }
    FSDP_TRY(begin_dims(parts,
                        torch_node(archive, axes != 0 ? axes : shape)->kind == FSDP_NODE_TUPLE
                            ? torch_node(archive, axes != 0 ? axes : shape)->count
                            : 0,
                        err));
    for (int dim = 0; dim < parts->ndim; dim++) {
        fsdp_node axis = torch_element(archive, axes, (size_t)dim);
        FSDP_TRY(axes != 0 ? add_parts(parts, dim, torch_attribute(archive, axis, "shape"),
                                       torch_attribute(archive, axis, "stride"), 0, err)
                           : add_parts(parts, dim, torch_element(archive, shape, (size_t)dim),
                                       torch_element(archive, stride, (size_t)dim), 0, err));
    }
    return FSDP_OK;
}

/* Takes the dims of the tensor, over its elements in row-major order. */
static fsdp_status take_dims(mesh_parts *parts, const torch_tensor *tensor, fsdp_error *err)
{
    int64_t strides[FSDP_MAX_DIMS];
    FSDP_TRY(begin_dims(parts, (uint32_t)tensor->ndim, err));
    fsdp_box_strides(tensor->ndim, tensor->shape, strides);
    parts->count = tensor->ndim;
    for (int dim = 0; dim < tensor->ndim; dim++)
        parts->items[dim] = (mesh_part){dim, tensor->shape[dim], strides[dim]};
    return FSDP_OK;
}

/* --- the rank's coordinate ---------------------------------------------------------------------- */

/* The position of a coordinate in the list. Parts are digits, the first one the most
 * significant. */
static int64_t position_of(const mesh_parts *parts, int64_t number)
{
    int64_t position = 0;
    for (int i = parts->count - 1; i >= 0; i--) {
        position += number % parts->items[i].size * parts->items[i].stride;
        number /= parts->items[i].size;
    }
    return position;
}

static fsdp_status fill_mesh(const mesh_parts *parts, int64_t base, rank_mesh *mesh,
                             fsdp_error *err)
{
    int64_t total = 1;
    for (int i = 0; i < parts->count; i++)
        if (fsdp_mul_overflow(total, parts->items[i].size, &total) ||
            total > (int64_t)parts->listed)
            return bad_mesh(parts->archive, "is larger than its list of ranks", err);
    mesh->ranks = fsdp_alloc((size_t)total, sizeof *mesh->ranks);
    if (!mesh->ranks)
        return fsdp_fail_memory(err, "a device mesh");
    mesh->count = (size_t)total;
    for (int64_t i = 0; i < total; i++) {
        int64_t position = base + position_of(parts, i);
        if (position < 0 || position >= (int64_t)parts->listed)
            return bad_mesh(parts->archive, "points beyond its list of ranks", err);
        mesh->ranks[i] = parts->list[position];
    }
    return FSDP_OK;
}

static int compare_parts(const void *a, const void *b)
{
    const mesh_part *x = a, *y = b;
    return (x->stride > y->stride) - (x->stride < y->stride);
}

/* Digits follow from a position when each stride is a multiple of the extent of the smaller
 * ones. */
static bool is_admissible(const mesh_parts *parts)
{
    mesh_parts sorted = *parts;
    int64_t end = 1;
    qsort(sorted.items, (size_t)sorted.count, sizeof *sorted.items, compare_parts);
    for (int i = 0; i < sorted.count; i++) {
        if (sorted.items[i].size == 1)
            continue;
        if (sorted.items[i].stride % end != 0 || sorted.items[i].stride == 0)
            return false;
        end = sorted.items[i].stride * sorted.items[i].size;
    }
    return true;
}

static fsdp_status find_position(const mesh_parts *parts, int rank, rank_mesh *mesh,
                                 rank_position *out, fsdp_error *err)
{
    int64_t position = 0, base, *coordinate = out->coordinate;
    while (position < (int64_t)parts->listed && parts->list[position] != rank)
        position++;
    out->is_member = position < (int64_t)parts->listed;
    mesh->ndim = parts->ndim;
    for (int dim = 0; dim < parts->ndim; dim++) {
        mesh->shape[dim] = 1;
        coordinate[dim] = 0;
    }
    if (!is_admissible(parts))
        return bad_mesh(parts->archive, "has strides that overlap", err);
    base = out->is_member ? position : 0;
    for (int i = 0; i < parts->count; i++) {
        const mesh_part *part = &parts->items[i];
        int64_t digit = part->size > 1 ? position / part->stride % part->size : 0;
        mesh->shape[part->dim] *= part->size;
        coordinate[part->dim] = coordinate[part->dim] * part->size + digit;
        base -= out->is_member ? digit * part->stride : 0;
    }
    return out->is_member ? fill_mesh(parts, base, mesh, err) : FSDP_OK;
}

/* Compares the coordinate with the one that newer files record. */
static fsdp_status check_position(const torch_archive *archive, fsdp_node node, int rank,
                                  const rank_mesh *mesh, const rank_position *position,
                                  fsdp_error *err)
{
    fsdp_node place = torch_attribute(archive, node, "_coordinate_on_dim");
    int64_t said;
    if (fsdp_pickle_int(&archive->pickle, torch_attribute(archive, node, "_rank"), &said) &&
        said != rank)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s has the name of rank %d but the contents of rank %lld", archive->where,
                         rank, (long long)said);
    const fsdp_pickle_node *list = torch_node(archive, place);
    if (!position->is_member || (list->kind != FSDP_NODE_TUPLE && list->kind != FSDP_NODE_LIST))
        return FSDP_OK;
    for (int dim = 0; dim < mesh->ndim; dim++)
        if (!fsdp_pickle_int(&archive->pickle, torch_element(archive, place, (size_t)dim), &said) ||
            said != position->coordinate[dim])
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "%s: rank %d is not at the coordinate of its device mesh; it may be "
                             "the file of a different rank",
                             archive->where, rank);
    return FSDP_OK;
}

/* Reads a DeviceMesh and the rank's position in it. mesh_out->ranks is freed with fsdp_free.
 * FSDP_ERR_DAMAGED when the mesh contradicts the rank. */
static fsdp_status rank_mesh_read(const torch_archive *archive, fsdp_node node, int rank,
                                  rank_mesh *mesh_out, rank_position *position_out, fsdp_error *err)
{
    fsdp_node layout = torch_attribute(archive, node, "_layout");
    fsdp_node map = torch_attribute(archive, node, "_rank_map");
    mesh_parts parts = {.archive = archive};
    torch_tensor tensor;
    *mesh_out = (rank_mesh){.highest = -1};
    position_out->is_member = false;
    bool is_layout = layout != 0 && map != 0;
    FSDP_TRY(read_ranks(archive, is_layout ? map : torch_attribute(archive, node, "mesh"), &tensor,
                        &parts.list, &parts.listed, err));
    fsdp_status st =
        is_layout ? read_mesh_layout(&parts, layout, err) : take_dims(&parts, &tensor, err);
    if (st == FSDP_OK)
        st = find_position(&parts, rank, mesh_out, position_out, err);
    if (st == FSDP_OK)
        st = check_position(archive, node, rank, mesh_out, position_out, err);
    mesh_out->listed = parts.listed;
    for (size_t i = 0; st == FSDP_OK && i < parts.listed; i++) {
        if (parts.list[i] < 0 || parts.list[i] >= INT32_MAX)
            st = bad_mesh(archive, "names an impossible rank", err);
        mesh_out->highest = parts.list[i] > mesh_out->highest ? parts.list[i] : mesh_out->highest;
    }
    fsdp_free(parts.list);
    if (st != FSDP_OK) {
        fsdp_free(mesh_out->ranks);
        mesh_out->ranks = NULL;
    }
    return st;
}

/* === distributed tensors ====================================================================== */

static fsdp_status bad_piece(const torch_archive *archive, const char *name, size_t name_size,
                             const char *why, fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: distributed tensor '%s' %s", archive->where,
                     fsdp_printable(name, name_size, shown, sizeof shown), why);
}

/* Reads a piece whose elements are in a file. */
static fsdp_status read_piece(const torch_archive *archive, fsdp_node node, const char *name,
                              size_t name_size, torch_tensor *piece, fsdp_error *err)
{
    torch_wrapper wrapper;
    torch_kind kind;
    FSDP_TRY(torch_tensor_read(archive, node, &kind, piece, &wrapper, err));
    bool is_plain = kind == TORCH_KIND_TENSOR && !piece->data;
    torch_tensor_release(piece);
    return is_plain ? FSDP_OK
                    : bad_piece(archive, name, name_size, "has no plain local piece", err);
}

static bool is_empty(int ndim, const int64_t *len)
{
    for (int dim = 0; dim < ndim; dim++)
        if (len[dim] == 0)
            return true;
    return false;
}

/* True for equal shapes; empty pieces may have any empty shape. */
static bool fits(const torch_tensor *piece, int ndim, const int64_t *len)
{
    if (is_empty(ndim, len))
        return is_empty(piece->ndim, piece->shape);
    for (int dim = 0; dim < ndim; dim++)
        if (piece->ndim != ndim || piece->shape[dim] != len[dim])
            return false;
    return piece->ndim == ndim;
}

static fsdp_dtype dtype_of(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *name = torch_node(archive, node);
    bool is_dtype = name->kind == FSDP_NODE_GLOBAL && name->known == FSDP_KNOWN_TORCH_DTYPE;
    return is_dtype ? (fsdp_dtype)name->count : FSDP_DTYPE_NONE;
}

/* --- meshes of the set --------------------------------------------------------------------------- */

static bool same_mesh(const rank_mesh *a, const rank_mesh *b)
{
    return a->ndim == b->ndim && a->count == b->count &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0 &&
           (a->count == 0 || memcmp(a->ranks, b->ranks, a->count * sizeof *a->ranks) == 0);
}

/* Records that the current rank is in the mesh; takes mesh->ranks. */
static fsdp_status join_mesh(rank_files *set, rank_mesh *mesh, bool is_member, size_t *number_out,
                             fsdp_error *err)
{
    size_t number = 0;
    while (number < set->mesh_count && !same_mesh(&set->meshes[number], mesh))
        number++;
    *number_out = number;
    if (number < set->mesh_count) {
        fsdp_free(mesh->ranks);
    } else {
        if (!fsdp_grow(&set->meshes, &set->mesh_room, set->mesh_count + 1, sizeof *set->meshes)) {
            fsdp_free(mesh->ranks);
            return fsdp_fail_memory(err, "device meshes");
        }
        set->meshes[set->mesh_count++] = *mesh;
    }
    if (!is_member)
        return FSDP_OK;
    if (!fsdp_grow(&set->members, &set->member_room, set->member_count + 1, sizeof *set->members))
        return fsdp_fail_memory(err, "device meshes");
    set->members[set->member_count++] = (rank_member){set->rank, number};
    return FSDP_OK;
}

/* --- DTensor: the mesh --------------------------------------------------------------------------- */

static fsdp_status learn_mesh(rank_files *set, const torch_archive *archive, fsdp_node node,
                              fsdp_error *err)
{
    struct seen_mesh seen = {.node = node};
    rank_mesh mesh;
    FSDP_TRY(rank_mesh_read(archive, node, set->rank, &mesh, &seen.position, err));
    fsdp_status st = rank_files_spend(set, mesh.listed + set->mesh_count, err);
    if (st != FSDP_OK) {
        fsdp_free(mesh.ranks);
        return st;
    }
    if (mesh.highest >= set->world)
        set->world = mesh.highest + 1;
    FSDP_TRY(join_mesh(set, &mesh, seen.position.is_member, &seen.mesh, err));
    if (!fsdp_grow(&set->seen, &set->seen_room, set->seen_count + 1, sizeof *set->seen))
        return fsdp_fail_memory(err, "device meshes");
    set->seen[set->seen_count++] = seen;
    return FSDP_OK;
}

/* A pickle holds each mesh once, and tensors refer to it. */
static fsdp_status find_mesh(rank_files *set, const torch_archive *archive, fsdp_node node,
                             const struct seen_mesh **seen_out, fsdp_error *err)
{
    for (size_t i = set->seen_count; i-- > 0;)
        if (set->seen[i].node == node) {
            *seen_out = &set->seen[i];
            return rank_files_spend(set, set->seen_count - i, err);
        }
    FSDP_TRY(learn_mesh(set, archive, node, err));
    *seen_out = &set->seen[set->seen_count - 1];
    return FSDP_OK;
}

/* --- what is stated next to the files ------------------------------------------------------------- */

/*
 * Metadata next to rank files: a tensor that a file holds as a plain one is placed in the whole by what the
 * metadata states, and one that says itself where it belongs must say the same.
 */

/* What a file says of a tensor. */
typedef struct rank_found {
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    const rank_mesh *mesh;
    const rank_placement *placements;
} rank_found;

static const rank_statement *find_stated(const rank_files *set, const torch_item *item)
{
    const rank_statements *stated = set->statements;
    return stated ? stated->find(stated->context, item->name, item->name_size, set->rank) : NULL;
}

static fsdp_status fail_stated(const rank_files *set, const torch_item *item, const char *what,
                               fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "%s and '%s' state a different %s of tensor '%s'" FSDP_TWO_SAVES,
                     set->statements->where, set->path, what,
                     fsdp_printable(item->name, item->name_size, shown, sizeof shown));
}

static bool same_shape(const rank_statement *stated, int ndim, const int64_t *shape)
{
    return stated->ndim == ndim &&
           (ndim == 0 || memcmp(stated->shape, shape, (size_t)ndim * sizeof *shape) == 0);
}

static bool is_cut(const rank_statement *stated)
{
    for (int i = 0; stated->mesh && i < stated->mesh->ndim; i++)
        if (stated->placements[i].kind != RANK_REPLICATE)
            return true;
    return stated->mesh == NULL;
}

static bool same_placements(const rank_statement *stated, const rank_placement *placements)
{
    for (int i = 0; i < stated->mesh->ndim; i++) {
        const rank_placement *a = &stated->placements[i], *b = &placements[i];
        if (a->kind != b->kind || (a->kind != RANK_REPLICATE && a->dim != b->dim) ||
            (a->kind == RANK_STRIDED && a->split != b->split))
            return false;
    }
    return true;
}

static fsdp_status compare_stated(const rank_files *set, const torch_item *item,
                                  const rank_found *found, fsdp_error *err)
{
    const rank_statement *stated = find_stated(set, item);
    if (!stated)
        return FSDP_OK;
    if (stated->dtype != found->dtype)
        return fail_stated(set, item, "dtype", err);
    if (!same_shape(stated, found->ndim, found->shape))
        return fail_stated(set, item, "shape", err);
    if (!stated->mesh)
        return FSDP_OK;
    if (!same_mesh(stated->mesh, found->mesh))
        return fail_stated(set, item, "device mesh", err);
    return same_placements(stated, found->placements) ? FSDP_OK
                                                      : fail_stated(set, item, "placement", err);
}

/* --- DTensor: placements ------------------------------------------------------------------------- */

static fsdp_node argument(const torch_archive *archive, fsdp_node object, const char *name,
                          size_t number)
{
    fsdp_node found = torch_attribute(archive, object, name);
    return found != 0 ? found
                      : fsdp_pickle_argument(&archive->pickle, torch_node(archive, object), number);
}

static fsdp_status read_placement(const torch_archive *archive, fsdp_node node, int ndim,
                                  rank_placement *placement, fsdp_error *err)
{
    const char *class = torch_class_name(archive, node);
    bool is_shard = strcmp(class, "Shard") == 0, is_strided = strcmp(class, "_StridedShard") == 0;
    int64_t dim = -1;
    *placement = (rank_placement){.kind = RANK_REPLICATE};
    if (strcmp(class, "Replicate") == 0)
        return FSDP_OK;
    if (!is_shard && !is_strided)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "%s: the placement '%.60s' is unknown",
                         archive->where, class);
    placement->kind = is_shard ? RANK_SHARD : RANK_STRIDED;
    if (!fsdp_pickle_int(&archive->pickle, argument(archive, node, "dim", 0), &dim) || dim < 0 ||
        dim >= ndim)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s: a placement cuts dim %lld, but its tensor has %d dims",
                         archive->where, (long long)dim, ndim);
    placement->dim = (int)dim;
    if (is_strided &&
        (!fsdp_pickle_int(&archive->pickle, argument(archive, node, "split_factor", 1),
                          &placement->split) ||
         placement->split < 1))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: a _StridedShard has no split factor",
                         archive->where);
    return FSDP_OK;
}

/* ShardOrderEntry(tensor_dim, mesh_dims): the order in which mesh dims cut, where the pickle
 * states it. */
static fsdp_status read_entry(const torch_archive *archive, fsdp_node entry, rank_layout *layout,
                              bool *used, fsdp_error *err)
{
    int64_t dim, mesh_dim;
    fsdp_node list = argument(archive, entry, "mesh_dims", 1);
    bool is_good =
        fsdp_pickle_int(&archive->pickle, argument(archive, entry, "tensor_dim", 0), &dim);
    for (size_t i = 0; is_good && torch_element(archive, list, i) != 0; i++) {
        is_good = fsdp_pickle_int(&archive->pickle, torch_element(archive, list, i), &mesh_dim) &&
                  mesh_dim >= 0 && mesh_dim < layout->mesh_ndim && !used[mesh_dim] &&
                  layout->placements[mesh_dim].kind == RANK_SHARD &&
                  layout->placements[mesh_dim].dim == dim;
        if (is_good) {
            used[mesh_dim] = true;
            layout->order[layout->order_count++] = (int)mesh_dim;
        }
    }
    return is_good ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_DAMAGED,
                               "%s: the shard order of a tensor does not fit its placements",
                               archive->where);
}

static fsdp_status read_order(const torch_archive *archive, fsdp_node spec, rank_layout *layout,
                              fsdp_error *err)
{
    fsdp_node order = torch_attribute(archive, spec, "shard_order");
    bool used[RANK_MESH_DIMS] = {false};
    rank_layout_order(layout);
    if (layout->has_strided || torch_node(archive, order)->kind != FSDP_NODE_TUPLE)
        return FSDP_OK;
    int shards = layout->order_count;
    layout->order_count = 0;
    for (size_t i = 0; torch_element(archive, order, i) != 0; i++)
        FSDP_TRY(read_entry(archive, torch_element(archive, order, i), layout, used, err));
    return layout->order_count == shards
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_DAMAGED,
                           "%s: the shard order of a tensor leaves out a placement",
                           archive->where);
}

static fsdp_status read_layout(const torch_archive *archive, fsdp_node spec, int ndim,
                               rank_layout *layout, fsdp_error *err)
{
    fsdp_node placements = torch_attribute(archive, spec, "placements");
    const fsdp_pickle_node *list = torch_node(archive, placements);
    bool is_list = list->kind == FSDP_NODE_TUPLE || list->kind == FSDP_NODE_LIST;
    if (!is_list || list->count != (uint32_t)layout->mesh_ndim)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s: a tensor does not have one placement per mesh dim", archive->where);
    for (int i = 0; i < layout->mesh_ndim; i++)
        FSDP_TRY(read_placement(archive, torch_element(archive, placements, (size_t)i), ndim,
                                &layout->placements[i], err));
    return read_order(archive, spec, layout, err);
}

/* --- DTensor: pieces ----------------------------------------------------------------------------- */

typedef struct dtensor {
    rank_files *set;
    rank_entry *entry;
    const torch_tensor *piece;
    const rank_layout *layout;
} dtensor;

static fsdp_status add_ordered(const dtensor *at, fsdp_error *err)
{
    rank_chunks *chunks = &at->entry->readings[RANK_ORDERED];
    fsdp_box box;
    rank_layout_box(at->layout, at->entry->ndim, at->entry->shape, &box);
    chunks->fails |= !at->layout->is_ordered || !fits(at->piece, box.ndim, box.len);
    if (chunks->fails || fsdp_box_count(&box) == 0)
        return FSDP_OK;
    fsdp_source_chunk chunk;
    torch_tensor_chunk(at->piece, box.lo, &chunk);
    return rank_files_add_chunk(at->set, chunks, at->set->rank, box.ndim, &chunk, err);
}

/* True when the other interpretation gives the same rows. */
static bool same_as_ordered(const dtensor *at, const rank_runs *runs)
{
    fsdp_box box;
    rank_layout_box(at->layout, at->entry->ndim, at->entry->shape, &box);
    for (int dim = 0; dim < box.ndim; dim++)
        if (box.len[dim] > 0 && (runs[dim].count != 1 || runs[dim].items[0].lo != box.lo[dim] ||
                                 runs[dim].items[0].len != box.len[dim]))
            return false;
    return true;
}

/* Adds one chunk for every combination of runs. */
static fsdp_status add_runs(const dtensor *at, const rank_runs *runs, fsdp_error *err)
{
    int ndim = at->entry->ndim;
    size_t number[FSDP_MAX_DIMS] = {0}, total = 1;
    int64_t lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS], start[FSDP_MAX_DIMS] = {0};
    for (int dim = 0; dim < ndim; dim++)
        total = total > RANK_MOST_RUNS ? total : total * runs[dim].count;
    if (total > RANK_MOST_RUNS)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': a strided piece has over %d boxes",
                         at->set->where, RANK_MOST_RUNS);
    for (size_t i = 0; i < total; i++) {
        fsdp_source_chunk chunk;
        torch_tensor_chunk(at->piece, lo, &chunk);
        chunk.len = len;
        for (int dim = 0; dim < ndim; dim++) {
            lo[dim] = runs[dim].items[number[dim]].lo;
            len[dim] = runs[dim].items[number[dim]].len;
            chunk.offset += start[dim] * at->piece->strides[dim];
        }
        FSDP_TRY(rank_files_add_chunk(at->set, &at->entry->readings[RANK_LEFT_TO_RIGHT],
                                      at->set->rank, ndim, &chunk, err));
        for (int dim = ndim - 1; dim >= 0; dim--) {
            start[dim] += runs[dim].items[number[dim]].len;
            if (++number[dim] < runs[dim].count)
                break;
            number[dim] = 0;
            start[dim] = 0;
        }
    }
    return FSDP_OK;
}

static fsdp_status add_strided(const dtensor *at, fsdp_error *err)
{
    rank_chunks *chunks = &at->entry->readings[RANK_LEFT_TO_RIGHT];
    rank_runs runs[FSDP_MAX_DIMS] = {0};
    int64_t len[FSDP_MAX_DIMS] = {0};
    int ndim = at->entry->ndim;
    for (int dim = 0; dim < ndim && !chunks->fails; dim++) {
        chunks->fails |= !rank_layout_runs(at->layout, dim, at->entry->shape[dim], &runs[dim]);
        for (size_t i = 0; i < runs[dim].count; i++)
            len[dim] += runs[dim].items[i].len;
    }
    chunks->fails = chunks->fails || !fits(at->piece, ndim, len);
    at->entry->readings_differ |= !chunks->fails && !same_as_ordered(at, runs);
    fsdp_status st = chunks->fails || is_empty(ndim, len) ? FSDP_OK : add_runs(at, runs, err);
    for (int dim = 0; dim < ndim; dim++)
        fsdp_free(runs[dim].items);
    return st;
}

static fsdp_status check_fit(const rank_files *set, const rank_entry *entry, fsdp_error *err)
{
    char shown[200];
    if (!entry->readings[RANK_ORDERED].fails || !entry->readings[RANK_LEFT_TO_RIGHT].fails)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': distributed tensor '%s' has a local piece whose shape does not fit its "
                     "placements on this rank",
                     set->path, fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}

/* Adds the piece under both interpretations of its placements. */
static fsdp_status add_boxes(const dtensor *at, fsdp_error *err)
{
    FSDP_TRY(add_ordered(at, err));
    if (at->layout->has_strided)
        FSDP_TRY(add_strided(at, err));
    else
        at->entry->readings[RANK_LEFT_TO_RIGHT].fails = true;
    return check_fit(at->set, at->entry, err);
}

static fsdp_status add_dtensor(rank_files *set, const torch_item *found,
                               const torch_wrapper *wrapper, fsdp_error *err)
{
    torch_archive *archive = found->archive;
    const char *name = found->name;
    size_t name_size = found->name_size;
    fsdp_node spec = torch_state_attribute(archive, wrapper->state, "_spec");
    fsdp_node local = torch_state_attribute(archive, wrapper->state, "_local_tensor");
    fsdp_dtype dtype = dtype_of(archive, torch_element(archive, wrapper->args, 1));
    const struct seen_mesh *seen;
    torch_tensor piece;
    rank_entry *entry;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    FSDP_TRY(torch_dist_check_partial(archive, name, name_size, wrapper, err));
    FSDP_TRY(find_mesh(set, archive, torch_attribute(archive, spec, "mesh"), &seen, err));
    FSDP_TRY(torch_read_sizes(archive, torch_element(archive, wrapper->args, 2), "sizes", &ndim,
                              shape, err));
    FSDP_TRY(read_piece(archive, local, name, name_size, &piece, err));
    if (dtype == FSDP_DTYPE_NONE)
        return bad_piece(archive, name, name_size, "has an unknown dtype", err);
    FSDP_TRY(rank_files_entry(set, name, name_size, &entry, err));
    FSDP_TRY(rank_files_spread(set, entry, dtype, ndim, shape, err));
    if (dtype != piece.dtype && !is_empty(piece.ndim, piece.shape))
        return bad_piece(archive, name, name_size, "has a local piece of a different dtype", err);
    if (!seen->position.is_member)
        return is_empty(piece.ndim, piece.shape)
                   ? FSDP_OK
                   : bad_piece(archive, name, name_size, "lies on a device mesh without this rank",
                               err);
    rank_layout layout = {.mesh_ndim = set->meshes[seen->mesh].ndim,
                          .mesh_shape = set->meshes[seen->mesh].shape,
                          .coordinate = seen->position.coordinate};
    FSDP_TRY(read_layout(archive, spec, ndim, &layout, err));
    const rank_found stated = {dtype, ndim, shape, &set->meshes[seen->mesh], layout.placements};
    FSDP_TRY(compare_stated(set, found, &stated, err));
    dtensor at = {set, entry, &piece, &layout};
    return add_boxes(&at, err);
}

/* --- plain tensors that are parts --------------------------------------------------------------- */

static void find_coordinate(const rank_mesh *mesh, int rank, rank_position *out)
{
    size_t at = 0;
    while (at < mesh->count && mesh->ranks[at] != rank)
        at++;
    *out = (rank_position){.is_member = at < mesh->count};
    for (int dim = mesh->ndim - 1; dim >= 0 && out->is_member; dim--) {
        out->coordinate[dim] = (int64_t)at % mesh->shape[dim];
        at /= (size_t)mesh->shape[dim];
    }
}

/* The rank joins a stated mesh once per file. */
static fsdp_status join_stated(rank_files *set, const rank_mesh *stated,
                               const struct seen_mesh **seen_out, fsdp_error *err)
{
    struct seen_mesh seen = {.stated = stated};
    rank_mesh copy = *stated;
    for (size_t i = set->seen_count; i-- > 0;)
        if (set->seen[i].stated == stated) {
            *seen_out = &set->seen[i];
            return rank_files_spend(set, set->seen_count - i, err);
        }
    FSDP_TRY(rank_files_spend(set, stated->count + set->mesh_count, err));
    find_coordinate(stated, set->rank, &seen.position);
    copy.ranks = fsdp_alloc(stated->count, sizeof *copy.ranks);
    if (!copy.ranks)
        return fsdp_fail_memory(err, "a device mesh");
    memcpy(copy.ranks, stated->ranks, stated->count * sizeof *copy.ranks);
    FSDP_TRY(join_mesh(set, &copy, seen.position.is_member, &seen.mesh, err));
    if (!fsdp_grow(&set->seen, &set->seen_room, set->seen_count + 1, sizeof *set->seen))
        return fsdp_fail_memory(err, "device meshes");
    set->seen[set->seen_count] = seen;
    *seen_out = &set->seen[set->seen_count++];
    return FSDP_OK;
}

static fsdp_status place_on_mesh(rank_files *set, const torch_item *item, rank_entry *entry,
                                 const rank_statement *stated, const torch_tensor *tensor,
                                 fsdp_error *err)
{
    const struct seen_mesh *seen = NULL;
    FSDP_TRY(join_stated(set, stated->mesh, &seen, err));
    if (!seen->position.is_member)
        return fail_stated(set, item, "device mesh", err);
    rank_layout layout = {.mesh_ndim = stated->mesh->ndim,
                          .mesh_shape = stated->mesh->shape,
                          .coordinate = seen->position.coordinate};
    memcpy(layout.placements, stated->placements,
           (size_t)layout.mesh_ndim * sizeof *layout.placements);
    rank_layout_order(&layout);
    const dtensor at = {set, entry, tensor, &layout};
    return add_boxes(&at, err);
}

/* Both corners were checked against the shapes of the statement; the file may hold a smaller tensor. */
static bool holds_piece(const rank_piece *piece, const torch_tensor *tensor)
{
    for (int dim = 0; dim < tensor->ndim; dim++)
        if (piece->local[dim] > tensor->shape[dim] ||
            piece->len[dim] > tensor->shape[dim] - piece->local[dim])
            return false;
    return true;
}

static fsdp_status place_pieces(rank_files *set, const torch_item *item, rank_entry *entry,
                                const rank_statement *stated, const torch_tensor *tensor,
                                fsdp_error *err)
{
    entry->readings[RANK_LEFT_TO_RIGHT].fails = true;
    for (size_t i = 0; i < stated->piece_count; i++) {
        const rank_piece *piece = &stated->pieces[i];
        fsdp_source_chunk chunk;
        if (tensor->ndim != stated->ndim || !holds_piece(piece, tensor))
            return fail_stated(set, item, "local shape", err);
        torch_tensor_chunk(tensor, piece->lo, &chunk);
        chunk.len = piece->len;
        for (int dim = 0; dim < tensor->ndim; dim++)
            chunk.offset += piece->local[dim] * tensor->strides[dim];
        fsdp_box box = fsdp_box_whole(tensor->ndim, piece->len);
        if (fsdp_box_count(&box) > 0)
            FSDP_TRY(rank_files_add_chunk(set, &entry->readings[RANK_ORDERED], set->rank,
                                          tensor->ndim, &chunk, err));
    }
    return FSDP_OK;
}

fsdp_status rank_files_place_stated(rank_files *set, const torch_item *found,
                                    const torch_tensor *tensor, bool *taken_out, fsdp_error *err)
{
    const rank_statement *stated = find_stated(set, found);
    rank_entry *entry;
    *taken_out = stated && is_cut(stated);
    if (!stated)
        return FSDP_OK;
    if (stated->dtype != tensor->dtype)
        return fail_stated(set, found, "dtype", err);
    if (!*taken_out)
        return same_shape(stated, tensor->ndim, tensor->shape)
                   ? FSDP_OK
                   : fail_stated(set, found, "shape", err);
    if (tensor->data)
        return fail_stated(set, found, "kind", err);
    FSDP_TRY(rank_files_entry(set, found->name, found->name_size, &entry, err));
    FSDP_TRY(rank_files_spread(set, entry, stated->dtype, stated->ndim, stated->shape, err));
    return stated->mesh ? place_on_mesh(set, found, entry, stated, tensor, err)
                        : place_pieces(set, found, entry, stated, tensor, err);
}

/* --- ShardedTensor ------------------------------------------------------------------------------- */

static fsdp_status join_world(rank_files *set, int64_t world, fsdp_error *err)
{
    rank_mesh all = {.ndim = 1, .shape = {world}, .count = (size_t)world};
    size_t number;
    all.ranks = fsdp_alloc(all.count, sizeof *all.ranks);
    if (!all.ranks)
        return fsdp_fail_memory(err, "the ranks of a tensor");
    for (size_t i = 0; i < all.count; i++)
        all.ranks[i] = (int64_t)i;
    set->is_placed = true;
    return join_mesh(set, &all, true, &number, err);
}

/* The state of the pickle: (local shards, metadata, group, spec, init_rrefs). */
static fsdp_status check_group(rank_files *set, const torch_archive *archive, fsdp_node state,
                               fsdp_error *err)
{
    fsdp_node group = torch_element(archive, state, 2);
    int64_t rank, world;
    if (fsdp_pickle_int(&archive->pickle, torch_attribute(archive, group, "global_rank"), &rank) &&
        rank != set->rank)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s has the name of rank %d but the contents of rank %lld", archive->where,
                         set->rank, (long long)rank);
    if (!fsdp_pickle_int(&archive->pickle, torch_attribute(archive, group, "global_world_size"),
                         &world) ||
        world < 1 || world > INT32_MAX)
        return FSDP_OK;
    if (world > set->world)
        set->world = world;
    return set->is_placed || world > RANK_MESH_LIMIT ? FSDP_OK : join_world(set, world, err);
}

static fsdp_status read_box(const torch_archive *archive, fsdp_node metadata, int ndim, int64_t *lo,
                            int64_t *len, fsdp_error *err)
{
    int lo_count, len_count;
    FSDP_TRY(torch_read_sizes(archive, torch_attribute(archive, metadata, "shard_offsets"),
                              "offsets", &lo_count, lo, err));
    FSDP_TRY(torch_read_sizes(archive, torch_attribute(archive, metadata, "shard_sizes"), "sizes",
                              &len_count, len, err));
    return lo_count == ndim && len_count == ndim
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_DAMAGED,
                           "%s: a shard and its tensor differ in their number of dims",
                           archive->where);
}

typedef struct shard_box {
    int ndim;
    const int64_t *lo, *len;
} shard_box;

static fsdp_status compare_listed(rank_files *set, const torch_archive *archive, fsdp_node listed,
                                  const shard_box *box, bool *same_out, fsdp_error *err)
{
    enum { STEPS = 128 };
    int64_t lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS];
    size_t bytes = (size_t)box->ndim * sizeof *lo;
    FSDP_TRY(rank_files_spend(set, STEPS, err));
    FSDP_TRY(read_box(archive, listed, box->ndim, lo, len, err));
    *same_out = memcmp(lo, box->lo, bytes) == 0 && memcmp(len, box->len, bytes) == 0;
    return FSDP_OK;
}

/* A local shard must be in the list that every rank has, mostly in the order of ranks. */
static fsdp_status check_listed(rank_files *set, const torch_archive *archive, fsdp_node list,
                                const shard_box *box, bool *listed_out, fsdp_error *err)
{
    fsdp_node usual = torch_element(archive, list, (size_t)set->rank);
    *listed_out = false;
    if (usual != 0)
        FSDP_TRY(compare_listed(set, archive, usual, box, listed_out, err));
    for (size_t i = 0; torch_element(archive, list, i) != 0 && !*listed_out; i++)
        FSDP_TRY(
            compare_listed(set, archive, torch_element(archive, list, i), box, listed_out, err));
    return FSDP_OK;
}

static fsdp_status add_shard(rank_files *set, const torch_archive *archive, rank_entry *entry,
                             fsdp_node shard, fsdp_node list, fsdp_error *err)
{
    int64_t lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS];
    torch_tensor piece;
    bool is_listed;
    FSDP_TRY(
        read_box(archive, torch_attribute(archive, shard, "metadata"), entry->ndim, lo, len, err));
    FSDP_TRY(check_listed(set, archive, list, &(shard_box){entry->ndim, lo, len}, &is_listed, err));
    FSDP_TRY(read_piece(archive, torch_attribute(archive, shard, "tensor"), entry->name,
                        entry->name_size, &piece, err));
    if (!is_listed || !fits(&piece, entry->ndim, len) || piece.dtype != entry->dtype)
        return bad_piece(archive, entry->name, entry->name_size,
                         "has a local shard that is not in its list of shards", err);
    if (is_empty(entry->ndim, len))
        return FSDP_OK;
    fsdp_source_chunk chunk;
    torch_tensor_chunk(&piece, lo, &chunk);
    return rank_files_add_chunk(set, &entry->readings[RANK_ORDERED], set->rank, entry->ndim, &chunk,
                                err);
}

static fsdp_status add_sharded(rank_files *set, const torch_item *found,
                               const torch_wrapper *wrapper, fsdp_error *err)
{
    torch_archive *archive = found->archive;
    const char *name = found->name;
    size_t name_size = found->name_size;
    fsdp_node shards = torch_element(archive, wrapper->state, 0);
    fsdp_node metadata = torch_element(archive, wrapper->state, 1);
    fsdp_node list = torch_attribute(archive, metadata, "shards_metadata");
    fsdp_dtype dtype = dtype_of(archive, torch_element(archive, wrapper->args, 1));
    rank_entry *entry;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    FSDP_TRY(check_group(set, archive, wrapper->state, err));
    FSDP_TRY(torch_read_sizes(archive, torch_attribute(archive, metadata, "size"), "sizes", &ndim,
                              shape, err));
    if (dtype == FSDP_DTYPE_NONE || torch_node(archive, shards)->kind != FSDP_NODE_LIST)
        return bad_piece(archive, name, name_size, "has no dtype, or no list of shards", err);
    FSDP_TRY(rank_files_entry(set, name, name_size, &entry, err));
    FSDP_TRY(rank_files_spread(set, entry, dtype, ndim, shape, err));
    entry->readings[RANK_LEFT_TO_RIGHT].fails = true;
    for (size_t i = 0; torch_element(archive, shards, i) != 0; i++)
        FSDP_TRY(add_shard(set, archive, entry, torch_element(archive, shards, i), list, err));
    return FSDP_OK;
}

fsdp_status rank_files_distributed(void *context, const torch_item *found,
                                   const torch_wrapper *wrapper, fsdp_error *err)
{
    return wrapper->known == FSDP_KNOWN_DTENSOR ? add_dtensor(context, found, wrapper, err)
                                                : add_sharded(context, found, wrapper, err);
}

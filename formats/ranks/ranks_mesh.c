/*
 * DeviceMesh: the ranks that share a tensor, and the coordinate of one of them. Since PyTorch
 * 2.10 a mesh is a layout (sizes and strides) over the ranks of its root mesh; before, it was a
 * tensor of ranks. See ranks.h.
 */
#include "base/core/bytes.h"
#include "base/data/box_internal.h"
#include "formats/ranks/ranks.h"

#include <stdlib.h>
#include <string.h>

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
        return fsdp_fail(err, FSDP_ERR_LIMIT, "%s: a device mesh has %lld ranks, 1 to %d are read",
                         archive->where, (long long)count, RANK_MESH_LIMIT);
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
            return bad_mesh(archive, "has sizes or strides that cannot be", err);
        parts->items[parts->count++] = (mesh_part){dim, size, stride};
        return FSDP_OK;
    }
    const fsdp_pickle_node *list = torch_node(archive, sizes);
    if (list->kind != FSDP_NODE_TUPLE || torch_node(archive, strides)->kind != FSDP_NODE_TUPLE ||
        torch_node(archive, strides)->count != list->count || depth == NESTING)
        return bad_mesh(archive, "has a layout that is not known", err);
    for (uint32_t i = 0; i < list->count; i++)
        FSDP_TRY(add_parts(parts, dim, list->as.items[i], torch_element(archive, strides, i),
                           depth + 1, err));
    return FSDP_OK;
}

static fsdp_status begin_dims(mesh_parts *parts, uint32_t count, fsdp_error *err)
{
    if (count < 1 || count > RANK_MESH_DIMS)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "%s: a device mesh has %u dims, 1 to %d are read",
                         parts->archive->where, count, RANK_MESH_DIMS);
    parts->ndim = (int)count;
    return FSDP_OK;
}

/* _MeshLayout: axes, each with a shape and a stride, or one shape and one stride for all dims. */
static fsdp_status read_layout(mesh_parts *parts, fsdp_node layout, fsdp_error *err)
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
            return bad_mesh(parts->archive, "leads beyond its list of ranks", err);
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
                         "%s is of rank %d by its name and of rank %lld by its contents",
                         archive->where, rank, (long long)said);
    const fsdp_pickle_node *list = torch_node(archive, place);
    if (!position->is_member || (list->kind != FSDP_NODE_TUPLE && list->kind != FSDP_NODE_LIST))
        return FSDP_OK;
    for (int dim = 0; dim < mesh->ndim; dim++)
        if (!fsdp_pickle_int(&archive->pickle, torch_element(archive, place, (size_t)dim), &said) ||
            said != position->coordinate[dim])
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "%s: rank %d is not at the coordinate of its device mesh: is it "
                             "another rank's file?",
                             archive->where, rank);
    return FSDP_OK;
}

fsdp_status rank_mesh_read(const torch_archive *archive, fsdp_node node, int rank,
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
    fsdp_status st = is_layout ? read_layout(&parts, layout, err) : take_dims(&parts, &tensor, err);
    if (st == FSDP_OK)
        st = find_position(&parts, rank, mesh_out, position_out, err);
    if (st == FSDP_OK)
        st = check_position(archive, node, rank, mesh_out, position_out, err);
    mesh_out->listed = parts.listed;
    for (size_t i = 0; st == FSDP_OK && i < parts.listed; i++) {
        if (parts.list[i] < 0 || parts.list[i] >= INT32_MAX)
            st = bad_mesh(archive, "names a rank that cannot be", err);
        mesh_out->highest = parts.list[i] > mesh_out->highest ? parts.list[i] : mesh_out->highest;
    }
    fsdp_free(parts.list);
    if (st != FSDP_OK) {
        fsdp_free(mesh_out->ranks);
        mesh_out->ranks = NULL;
    }
    return st;
}

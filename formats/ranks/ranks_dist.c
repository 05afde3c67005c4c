/*
 * DTensor and ShardedTensor in the file of one rank: computes the boxes of its pieces and
 * compares them with everything else that the pickle states about them. See ranks.h.
 */
#include "formats/ranks/ranks.h"

#include <string.h>

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
    FSDP_TRY(rank_files_join_mesh(set, &mesh, seen.position.is_member, &seen.mesh, err));
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
        return fsdp_fail(err, FSDP_ERR_REFUSED, "%s: a placement '%.60s' is not known",
                         archive->where, class);
    placement->kind = is_shard ? RANK_SHARD : RANK_STRIDED;
    if (!fsdp_pickle_int(&archive->pickle, argument(archive, node, "dim", 0), &dim) || dim < 0 ||
        dim >= ndim)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s: a placement cuts dim %lld of a tensor of %d dims", archive->where,
                         (long long)dim, ndim);
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

static fsdp_status check_fit(const torch_archive *archive, const rank_entry *entry, fsdp_error *err)
{
    if (!entry->readings[RANK_ORDERED].fails || !entry->readings[RANK_LEFT_TO_RIGHT].fails)
        return FSDP_OK;
    return bad_piece(archive, entry->name, entry->name_size,
                     "has a local piece of another shape than its placements give this rank", err);
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
        return bad_piece(archive, name, name_size, "has no dtype that is known", err);
    FSDP_TRY(rank_files_entry(set, name, name_size, &entry, err));
    FSDP_TRY(rank_files_spread(set, entry, dtype, ndim, shape, err));
    if (dtype != piece.dtype && !is_empty(piece.ndim, piece.shape))
        return bad_piece(archive, name, name_size, "has a local piece of another dtype", err);
    if (!seen->position.is_member)
        return is_empty(piece.ndim, piece.shape)
                   ? FSDP_OK
                   : bad_piece(archive, name, name_size,
                               "lies on a device mesh that this rank is not in", err);
    rank_layout layout = {.mesh_ndim = set->meshes[seen->mesh].ndim,
                          .mesh_shape = set->meshes[seen->mesh].shape,
                          .coordinate = seen->position.coordinate};
    FSDP_TRY(read_layout(archive, spec, ndim, &layout, err));
    dtensor at = {set, entry, &piece, &layout};
    FSDP_TRY(add_ordered(&at, err));
    if (layout.has_strided)
        FSDP_TRY(add_strided(&at, err));
    else
        entry->readings[RANK_LEFT_TO_RIGHT].fails = true;
    return check_fit(archive, entry, err);
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
    return rank_files_join_mesh(set, &all, true, &number, err);
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
                         "%s is of rank %d by its name and of rank %lld by its contents",
                         archive->where, set->rank, (long long)rank);
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
                           "%s: a shard has another number of dims than its tensor",
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
                         "has a local shard that its list of shards does not know", err);
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

/*
 * Writes a directory of torch_checkpointing: see target.h, and torch_items.h for its files. The mirror is
 * items_read.c.
 *
 *   names -> items -> a torch.save file per item and rank: pickle, storages -> metadata.pkl, last
 *
 * Each rank's file has all values of its item, so that it is loaded alone, and the parts of tensors that the
 * rank holds; a tensor that is declared once for several copies is written into the file of each.
 */
#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "base/data/name_path.h"
#include "base/data/value_internal.h"
#include "formats/target/nesting.h"
#include "formats/torch/torch_emit.h"
#include "formats/torch_checkpointing/torch_items.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* === pickles: DTensors as PyTorch 2.15 writes them, and metadata.pkl ========================== */

/* The mesh that cuts tensors. */
typedef struct items_mesh {
    int ndim, world;
    int64_t shape[FSDP_TARGET_MESH_DIMS];
    const char *names[FSDP_TARGET_MESH_DIMS]; /* all NULL: no names */
    bool copies[FSDP_TARGET_MESH_DIMS];
    int shard_dim;
} items_mesh;

/* An item, and its entries with names below it. Storages of its files are its tensors, and the ranks of
 * the mesh after the first DTensor: PyTorch computes their offsets in the order of the pickle. */
typedef struct items_out {
    const char *key;
    size_t key_size;
    fsdp_target_entry *entries;
    size_t count, room;
    size_t storages;
    bool has_mesh;
    size_t mesh_storage;
    nesting nesting; /* of its entries */
} items_out;

/* Computes the coordinates of a rank, row-major. */
static void mesh_coordinates(const items_mesh *mesh, int rank, int64_t *out)
{
    int64_t rest = rank;
    for (int i = mesh->ndim - 1; i >= 0; i--) {
        out[i] = rest % mesh->shape[i];
        rest /= mesh->shape[i];
    }
}

/* The tensor dim that the mesh cuts. */
static int mesh_cut(const items_mesh *mesh, const fsdp_target_entry *entry)
{
    return mesh->shard_dim < entry->ndim ? mesh->shard_dim : 0;
}

/* True for a tensor that is a DTensor. Scalars are plain tensors, which every rank has. */
static bool is_spread(const fsdp_target_entry *entry)
{
    return !entry->value && entry->ndim > 0;
}

/* The part of an entry that a rank holds: nested chunks; the whole of what is not spread. */
static fsdp_box part_of(const items_mesh *mesh, const fsdp_target_entry *entry, int rank)
{
    int64_t coordinates[FSDP_TARGET_MESH_DIMS];
    fsdp_box box = fsdp_box_whole(entry->ndim, entry->shape);
    int dim = mesh_cut(mesh, entry);
    mesh_coordinates(mesh, rank, coordinates);
    for (int i = 0; i < mesh->ndim && is_spread(entry); i++) {
        int64_t lo, len;
        if (mesh->copies[i])
            continue;
        fsdp_chunk(box.len[dim], mesh->shape[i], coordinates[i], &lo, &len);
        box.lo[dim] += lo;
        box.len[dim] = len;
    }
    return box;
}

/* --- shapes of a pickle ----------------------------------------------------------------------- */

static void begin_dict(fsdp_pickler *pickler)
{
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_DICT);
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
}

static void begin_list(fsdp_pickler *pickler)
{
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_LIST);
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
}

static void begin_object(fsdp_pickler *pickler, const char *module, const char *name)
{
    fsdp_pickler_global(pickler, module, name);
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_TUPLE);
    fsdp_pickler_op(pickler, FSDP_OP_NEWOBJ);
    begin_dict(pickler);
}

static void end_dict(fsdp_pickler *pickler)
{
    fsdp_pickler_op(pickler, FSDP_OP_SETITEMS);
}

static void end_object(fsdp_pickler *pickler)
{
    end_dict(pickler);
    fsdp_pickler_op(pickler, FSDP_OP_BUILD);
}

/* function(text) */
static void add_call(fsdp_pickler *pickler, const char *module, const char *name, const char *text)
{
    fsdp_pickler_global(pickler, module, name);
    fsdp_pickler_word(pickler, text);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE1);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
}

/* As PyTorch counts: a dim of no elements counts as one. */
static void find_strides(const fsdp_target_entry *entry, int64_t *strides)
{
    int64_t stride = 1;
    for (int dim = entry->ndim - 1; dim >= 0; dim--) {
        strides[dim] = stride;
        stride *= entry->shape[dim] > 0 ? entry->shape[dim] : 1;
    }
}

static void add_strides(fsdp_pickler *pickler, const fsdp_target_entry *entry)
{
    int64_t strides[FSDP_MAX_DIMS];
    find_strides(entry, strides);
    fsdp_pickler_ints(pickler, strides, (size_t)entry->ndim);
}

static void add_list(fsdp_pickler *pickler, const int64_t *items, size_t count)
{
    begin_list(pickler);
    for (size_t i = 0; i < count; i++)
        fsdp_pickler_int(pickler, items[i]);
    fsdp_pickler_op(pickler, FSDP_OP_APPENDS);
}

static void add_names(fsdp_pickler *pickler, const items_mesh *mesh)
{
    if (!mesh->names[0]) {
        fsdp_pickler_op(pickler, FSDP_OP_NONE);
        return;
    }
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    for (int i = 0; i < mesh->ndim; i++)
        fsdp_pickler_text(pickler, mesh->names[i], strlen(mesh->names[i]));
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
}

/* (0, 1, ..., world - 1) */
static void add_ranks(fsdp_pickler *pickler, int world)
{
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    for (int rank = 0; rank < world; rank++)
        fsdp_pickler_int(pickler, rank);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
}

/* --- DeviceMesh ----------------------------------------------------------------------------------- */

/* This pickle holds one item as one rank has it. */
typedef struct emitting {
    fsdp_pickler *pickler;
    const items_out *item;
    const items_mesh *mesh;
    int rank;
    size_t storages; /* so far */
    bool has_mesh, has_parts;
    uint32_t mesh_memo, layout_memo, device_memo;
} emitting;

static const char mesh_module[] = "torch.distributed._mesh_layout";

/* One size and stride per mesh dim; a dim of one rank has none. */
static void add_axes(fsdp_pickler *pickler, const items_mesh *mesh)
{
    int64_t stride = mesh->world;
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    for (int i = 0; i < mesh->ndim; i++) {
        size_t count = mesh->shape[i] > 1;
        stride /= mesh->shape[i];
        begin_object(pickler, mesh_module, "_FlatLayout");
        fsdp_pickler_word(pickler, "shape");
        fsdp_pickler_ints(pickler, &mesh->shape[i], count);
        fsdp_pickler_word(pickler, "stride");
        fsdp_pickler_ints(pickler, &stride, count);
        end_object(pickler);
    }
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
}

static void add_empty(fsdp_pickler *pickler, const char *name, fsdp_opcode op)
{
    fsdp_pickler_word(pickler, name);
    fsdp_pickler_op(pickler, op);
}

static void add_place_in_mesh(emitting *at)
{
    int64_t coordinates[FSDP_TARGET_MESH_DIMS];
    fsdp_pickler *pickler = at->pickler;
    mesh_coordinates(at->mesh, at->rank, coordinates);
    fsdp_pickler_word(pickler, "_rank");
    fsdp_pickler_int(pickler, at->rank);
    fsdp_pickler_word(pickler, "_coordinate_on_dim");
    fsdp_pickler_ints(pickler, coordinates, (size_t)at->mesh->ndim);
    add_empty(pickler, "_hash", FSDP_OP_NONE);
}

/* Process groups have no names that another job could find. */
static fsdp_status add_mesh(emitting *at, fsdp_error *err)
{
    fsdp_pickler *pickler = at->pickler;
    int64_t world = at->mesh->world;
    if (at->has_mesh) {
        fsdp_pickler_get(pickler, at->mesh_memo);
        return FSDP_OK;
    }
    begin_object(pickler, "torch.distributed.device_mesh", "DeviceMesh");
    fsdp_pickler_word(pickler, "_device_type");
    fsdp_pickler_word(pickler, "cpu");
    fsdp_pickler_word(pickler, "_layout");
    begin_object(pickler, mesh_module, "_MeshLayout");
    fsdp_pickler_word(pickler, "axes");
    add_axes(pickler, at->mesh);
    end_object(pickler);
    fsdp_pickler_word(pickler, "_rank_map");
    FSDP_TRY(torch_emit_tensor(pickler, FSDP_I32, 1, &world, at->storages++, err));
    fsdp_pickler_word(pickler, "_mesh_dim_names");
    add_names(pickler, at->mesh);
    add_empty(pickler, "_root_mesh", FSDP_OP_NONE);
    add_empty(pickler, "_preserve_rank_order", FSDP_OP_FALSE);
    fsdp_pickler_word(pickler, "_flatten_rank_map");
    add_ranks(pickler, at->mesh->world);
    add_empty(pickler, "_thread_id", FSDP_OP_NONE);
    add_empty(pickler, "_flatten_mapping", FSDP_OP_EMPTY_DICT);
    add_empty(pickler, "_dim_group_names", FSDP_OP_EMPTY_LIST);
    add_place_in_mesh(at);
    end_object(pickler);
    at->mesh_memo = fsdp_pickler_put(pickler);
    at->has_mesh = true;
    return FSDP_OK;
}

/* --- DTensor -------------------------------------------------------------------------------------- */

static const char spec_module[] = "torch.distributed.tensor._dtensor_spec",
                  placement_module[] = "torch.distributed.tensor.placement_types";

static void add_placements(const emitting *at, int dim)
{
    fsdp_pickler *pickler = at->pickler;
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    for (int i = 0; i < at->mesh->ndim; i++) {
        begin_object(pickler, placement_module, at->mesh->copies[i] ? "Replicate" : "Shard");
        if (!at->mesh->copies[i]) {
            fsdp_pickler_word(pickler, "dim");
            fsdp_pickler_int(pickler, dim);
        }
        end_object(pickler);
    }
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
}

static void add_meta(fsdp_pickler *pickler, const fsdp_target_entry *entry)
{
    fsdp_pickler_global(pickler, spec_module, "TensorMeta");
    fsdp_pickler_size(pickler, entry->shape, (size_t)entry->ndim);
    add_strides(pickler, entry);
    fsdp_pickler_global(pickler, "torch", fsdp_dtype_describe(entry->dtype)->torch);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE3);
    fsdp_pickler_op(pickler, FSDP_OP_NEWOBJ);
}

/* (ShardOrderEntry(dim, mesh dims),), or () where all mesh dims hold copies. */
static void add_order(const emitting *at, int dim)
{
    fsdp_pickler *pickler = at->pickler;
    int64_t cuts[FSDP_TARGET_MESH_DIMS];
    size_t count = 0;
    for (int i = 0; i < at->mesh->ndim; i++)
        if (!at->mesh->copies[i])
            cuts[count++] = i;
    if (count == 0) {
        fsdp_pickler_op(pickler, FSDP_OP_EMPTY_TUPLE);
        return;
    }
    fsdp_pickler_global(pickler, spec_module, "ShardOrderEntry");
    fsdp_pickler_int(pickler, dim);
    fsdp_pickler_ints(pickler, cuts, count);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE2);
    fsdp_pickler_op(pickler, FSDP_OP_NEWOBJ);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE1);
}

static fsdp_status add_spec(emitting *at, const fsdp_target_entry *entry, fsdp_error *err)
{
    fsdp_pickler *pickler = at->pickler;
    int dim = mesh_cut(at->mesh, entry);
    begin_object(pickler, spec_module, "DTensorSpec");
    fsdp_pickler_word(pickler, "mesh");
    FSDP_TRY(add_mesh(at, err));
    fsdp_pickler_word(pickler, "placements");
    add_placements(at, dim);
    fsdp_pickler_word(pickler, "tensor_meta");
    add_meta(pickler, entry);
    fsdp_pickler_word(pickler, "shard_order");
    add_order(at, dim);
    add_empty(pickler, "use_strided_shard_as_shard_order", FSDP_OP_FALSE);
    add_empty(pickler, "_hash", FSDP_OP_NONE);
    end_object(pickler);
    return FSDP_OK;
}

/* torch.strided and the device of the wrapper. */
static void add_parts(emitting *at)
{
    fsdp_pickler *pickler = at->pickler;
    if (at->has_parts) {
        fsdp_pickler_get(pickler, at->layout_memo);
        fsdp_pickler_get(pickler, at->device_memo);
        return;
    }
    add_call(pickler, "torch.serialization", "_get_layout", "torch.strided");
    at->layout_memo = fsdp_pickler_put(pickler);
    add_call(pickler, "torch", "device", "cpu");
    at->device_memo = fsdp_pickler_put(pickler);
    at->has_parts = true;
}

static fsdp_status add_dtensor(emitting *at, const fsdp_target_entry *entry, fsdp_error *err)
{
    fsdp_pickler *pickler = at->pickler;
    const fsdp_box box = part_of(at->mesh, entry, at->rank);
    fsdp_pickler_global(pickler, "torch._tensor", "_rebuild_from_type_v2");
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    fsdp_pickler_global(pickler, "torch._utils", "_rebuild_wrapper_subclass");
    fsdp_pickler_global(pickler, "torch.distributed.tensor", "DTensor");
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    fsdp_pickler_global(pickler, "torch.distributed.tensor", "DTensor");
    fsdp_pickler_global(pickler, "torch", fsdp_dtype_describe(entry->dtype)->torch);
    fsdp_pickler_ints(pickler, entry->shape, (size_t)entry->ndim);
    add_strides(pickler, entry);
    fsdp_pickler_int(pickler, 0);
    add_parts(at);
    fsdp_pickler_op(pickler, FSDP_OP_FALSE); /* requires_grad */
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
    fsdp_pickler_op(pickler, FSDP_OP_NONE);
    begin_dict(pickler);
    fsdp_pickler_word(pickler, "_local_tensor");
    FSDP_TRY(torch_emit_tensor(pickler, entry->dtype, box.ndim, box.len, at->storages++, err));
    fsdp_pickler_word(pickler, "_spec");
    FSDP_TRY(add_spec(at, entry, err));
    end_dict(pickler);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE2);
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
    return FSDP_OK;
}

/* --- an item -------------------------------------------------------------------------------------- */

/* The value as this rank has it. */
static const fsdp_value *own_value(const emitting *at, const fsdp_value *value)
{
    const fsdp_value *list = fsdp_value_per_rank(value);
    return list && list->as.list.count == (size_t)at->mesh->world ? &list->as.list.items[at->rank]
                                                                  : value;
}

static fsdp_status emit_entry(void *context, size_t number, fsdp_error *err)
{
    emitting *at = context;
    const fsdp_target_entry *entry = &at->item->entries[number];
    if (entry->value)
        return torch_blame_entry(
            entry, fsdp_pickler_value(at->pickler, own_value(at, entry->value), err), err);
    if (!torch_holds_dtype(entry->dtype))
        return torch_blame_entry(
            entry,
            fsdp_fail(err, FSDP_ERR_USAGE, "torch has no dtype %s", fsdp_dtype_name(entry->dtype)),
            err);
    return torch_blame_entry(entry,
                             is_spread(entry)
                                 ? add_dtensor(at, entry, err)
                                 : torch_emit_tensor(at->pickler, entry->dtype, entry->ndim,
                                                     entry->shape, at->storages++, err),
                             err);
}

static fsdp_status emit_item(fsdp_pickler *pickler, const items_out *item, const items_mesh *mesh,
                             int rank, fsdp_error *err)
{
    emitting at = {.pickler = pickler, .item = item, .mesh = mesh, .rank = rank};
    const fsdp_target_opts opts = {.entries = item->entries, .entry_count = item->count};
    pickler->weights_only = true;
    fsdp_pickler_begin(pickler);
    FSDP_TRY(torch_emit_tree(pickler, &opts, emit_entry, &at, err));
    fsdp_pickler_op(pickler, FSDP_OP_STOP);
    return pickler->text.failed ? fsdp_fail_memory(err, "a pickle") : FSDP_OK;
}

/* --- metadata.pkl --------------------------------------------------------------------------------- */

/* Memo numbers of repeated parts. */
typedef struct metadata_memo {
    const items_mesh *mesh;
    bool has_mesh, has_world, has_ranks;
    uint32_t mesh_memo, world_memo, ranks_memo;
} metadata_memo;

static void add_mesh_spec(fsdp_pickler *pickler, const items_mesh *mesh)
{
    begin_dict(pickler);
    fsdp_pickler_word(pickler, "device_type");
    fsdp_pickler_word(pickler, "cpu");
    fsdp_pickler_word(pickler, "mesh_shape");
    fsdp_pickler_ints(pickler, mesh->shape, (size_t)mesh->ndim);
    fsdp_pickler_word(pickler, "mesh_data");
    add_ranks(pickler, mesh->world);
    fsdp_pickler_word(pickler, "mesh_dim_names");
    add_names(pickler, mesh);
    end_dict(pickler);
}

static void add_known_mesh(fsdp_pickler *pickler, const items_mesh *mesh, bool *has, uint32_t *memo)
{
    if (*has) {
        fsdp_pickler_get(pickler, *memo);
        return;
    }
    add_mesh_spec(pickler, mesh);
    *memo = fsdp_pickler_put(pickler);
    *has = true;
}

static void state_mesh(fsdp_pickler *pickler, metadata_memo *memo, const fsdp_target_entry *entry)
{
    const items_mesh all = {.ndim = 1, .world = memo->mesh->world, .shape = {memo->mesh->world}};
    if (is_spread(entry))
        add_known_mesh(pickler, memo->mesh, &memo->has_mesh, &memo->mesh_memo);
    else
        add_known_mesh(pickler, &all, &memo->has_world, &memo->world_memo);
}

static void state_placements(fsdp_pickler *pickler, const items_mesh *mesh,
                             const fsdp_target_entry *entry)
{
    int count = is_spread(entry) ? mesh->ndim : 1;
    begin_list(pickler);
    for (int i = 0; i < count; i++) {
        bool is_cut = is_spread(entry) && !mesh->copies[i];
        begin_dict(pickler);
        fsdp_pickler_word(pickler, "type");
        fsdp_pickler_word(pickler, is_cut ? "Shard" : "Replicate");
        if (is_cut) {
            fsdp_pickler_word(pickler, "dim");
            fsdp_pickler_int(pickler, mesh_cut(mesh, entry));
        }
        end_dict(pickler);
    }
    fsdp_pickler_op(pickler, FSDP_OP_APPENDS);
}

static void state_tensor(fsdp_pickler *pickler, metadata_memo *memo, const fsdp_target_entry *entry)
{
    fsdp_text dtype = {0};
    int64_t strides[FSDP_MAX_DIMS];
    begin_dict(pickler);
    fsdp_pickler_word(pickler, "type");
    fsdp_pickler_word(pickler, "DTensorShardingMetadata");
    fsdp_pickler_word(pickler, "data");
    begin_dict(pickler);
    fsdp_pickler_word(pickler, "global_shape");
    add_list(pickler, entry->shape, (size_t)entry->ndim);
    fsdp_pickler_word(pickler, "dtype");
    fsdp_text_addf(&dtype, "torch.%s", fsdp_dtype_describe(entry->dtype)->torch);
    pickler->text.failed = pickler->text.failed || dtype.failed;
    fsdp_pickler_text(pickler, dtype.data ? dtype.data : "", dtype.size);
    fsdp_text_release(&dtype);
    fsdp_pickler_word(pickler, "stride");
    find_strides(entry, strides);
    add_list(pickler, strides, (size_t)entry->ndim);
    fsdp_pickler_word(pickler, "mesh_spec");
    state_mesh(pickler, memo, entry);
    fsdp_pickler_word(pickler, "placements");
    state_placements(pickler, memo->mesh, entry);
    end_dict(pickler);
    end_dict(pickler);
}

/* '["state","layers.0.weight",0]' */
static void state_path(fsdp_pickler *pickler, const fsdp_target_entry *entry, const int32_t *path,
                       size_t count)
{
    fsdp_text text = {0};
    const char *at = entry->name;
    fsdp_text_add(&text, "[", 1);
    for (size_t i = 0; i < count && !fsdp_path_is_whole(path, count); i++) {
        size_t size = fsdp_path_bytes(path[i]);
        bool is_number = path[i] < 0 || path[i] & FSDP_PATH_NUMBER;
        fsdp_text_add(&text, ",", i > 0);
        if (is_number)
            fsdp_text_add(&text, at, size);
        else
            fsdp_text_add_json_string(&text, at, size);
        at += size + 1;
    }
    fsdp_text_add(&text, "]", 1);
    pickler->text.failed = pickler->text.failed || text.failed;
    fsdp_pickler_text(pickler, text.data ? text.data : "", text.size);
    fsdp_text_release(&text);
}

static void state_group(fsdp_pickler *pickler, metadata_memo *memo, const fsdp_target_entry *entry)
{
    begin_list(pickler);
    begin_dict(pickler);
    fsdp_pickler_word(pickler, "sharding_metadata");
    state_tensor(pickler, memo, entry);
    fsdp_pickler_word(pickler, "ranks");
    if (memo->has_ranks) {
        fsdp_pickler_get(pickler, memo->ranks_memo);
    } else {
        add_ranks(pickler, memo->mesh->world);
        memo->ranks_memo = fsdp_pickler_put(pickler);
        memo->has_ranks = true;
    }
    end_dict(pickler);
    fsdp_pickler_op(pickler, FSDP_OP_APPENDS);
}

static void state_item(fsdp_pickler *pickler, metadata_memo *memo, const items_out *item)
{
    fsdp_pickler_text(pickler, item->key, item->key_size);
    begin_dict(pickler);
    fsdp_pickler_word(pickler, "nested_path_to_metadata");
    begin_dict(pickler);
    for (size_t i = 0; i < item->count; i++) {
        if (item->entries[i].value)
            continue;
        state_path(pickler, &item->entries[i], item->nesting.paths[i], item->nesting.counts[i]);
        state_group(pickler, memo, &item->entries[i]);
    }
    end_dict(pickler);
    fsdp_pickler_word(pickler, "rank_to_layout_info");
    begin_dict(pickler);
    for (int rank = 0; rank < memo->mesh->world; rank++) {
        fsdp_pickler_int(pickler, rank);
        fsdp_pickler_op(pickler, FSDP_OP_NONE);
    }
    end_dict(pickler);
    end_dict(pickler);
}

static fsdp_status emit_metadata(fsdp_pickler *pickler, const items_out *items, size_t count,
                                 const items_mesh *mesh, fsdp_error *err)
{
    metadata_memo memo = {.mesh = mesh};
    fsdp_pickler_begin(pickler);
    begin_dict(pickler);
    fsdp_pickler_word(pickler, "metadata");
    begin_dict(pickler);
    for (size_t i = 0; i < count; i++)
        if (items[i].storages > 0)
            state_item(pickler, &memo, &items[i]);
    end_dict(pickler);
    fsdp_pickler_word(pickler, "world_size");
    fsdp_pickler_int(pickler, mesh->world);
    fsdp_pickler_word(pickler, "version");
    fsdp_pickler_word(pickler, "2.0");
    end_dict(pickler);
    fsdp_pickler_op(pickler, FSDP_OP_STOP);
    return pickler->text.failed ? fsdp_fail_memory(err, "the metadata of a checkpoint") : FSDP_OK;
}

/* === planning ================================================================================= */

/* Limit of open files; with more of them every piece opens its file. */
enum { OPEN_MOST = 128 };

/* A rank writes this file of an item. */
typedef struct item_file {
    char *name;
    fsdp_zip_record *records; /* TORCH_FIXED + storages */
    torch_part *parts;        /* per storage */
    int64_t size;
    fsdp_file *file; /* NULL: closed */
} item_file;

/* The place of an entry. */
typedef struct entry_place {
    size_t item, storage; /* the storage of a tensor */
} entry_place;

struct fsdp_target {
    fsdp_target_opts opts;
    items_mesh mesh;
    fsdp_arena arena;
    fsdp_name_table keys;
    items_out *items;
    size_t count, room;
    entry_place *places; /* per entry */
    item_file *files;    /* per item and rank */
    fsdp_pickler metadata;
    char *path;
};

static const int32_t whole[] = {FSDP_PATH_WHOLE};

static item_file *file_of(const fsdp_target *target, size_t item, int rank)
{
    return &target->files[item * (size_t)target->mesh.world + (size_t)rank];
}

static void discard(fsdp_target *target)
{
    size_t files = target->files ? target->count * (size_t)target->mesh.world : 0;
    for (size_t i = 0; i < files; i++) {
        (void)fsdp_io_close(&target->files[i].file, target->path, NULL);
        fsdp_free(target->files[i].name);
        fsdp_free(target->files[i].records);
        fsdp_free(target->files[i].parts);
    }
    for (size_t i = 0; i < target->count; i++) {
        nesting_release(&target->items[i].nesting);
        fsdp_free(target->items[i].entries);
    }
    fsdp_free(target->items);
    fsdp_free(target->places);
    fsdp_free(target->files);
    fsdp_free(target->path);
    fsdp_pickler_release(&target->metadata);
    fsdp_name_table_release(&target->keys);
    fsdp_arena_release(&target->arena);
    fsdp_free(target);
}

/* --- the mesh ----------------------------------------------------------------------------------- */

static void take_mesh(fsdp_target *target)
{
    const fsdp_target_mesh *given = target->opts.mesh;
    int world = target->opts.world > 0 ? target->opts.world : 1;
    items_mesh *mesh = &target->mesh;
    *mesh = (items_mesh){.ndim = 1, .world = world, .shape = {world}};
    for (int i = 0; given && i < given->ndim; i++) {
        mesh->shape[i] = given->shape[i];
        mesh->names[i] = given->names[i];
        mesh->copies[i] = given->copies[i];
    }
    if (given) {
        mesh->ndim = given->ndim;
        mesh->shard_dim = given->shard_dim;
    }
}

/* --- items -------------------------------------------------------------------------------------- */

/* Bytes of the key of an entry's item: the first element of its path, or that up to its first dot, where an
 * item has no such name. 0: no key is valid. */
static size_t find_key(const fsdp_target_entry *entry, const int32_t *path, size_t count)
{
    size_t size = fsdp_path_is_whole(path, count) ? 0 : fsdp_path_bytes(path[0]);
    if (fsdp_name_is_key(entry->name, size))
        return size;
    const char *dot = memchr(entry->name, '.', size);
    size_t before = dot ? (size_t)(dot - entry->name) : 0;
    return before + 1 < size && fsdp_name_is_key(entry->name, before) ? before : 0;
}

static fsdp_status find_item(fsdp_target *target, const char *key, size_t size, size_t *number_out,
                             fsdp_error *err)
{
    const uint64_t *known = fsdp_name_table_find(&target->keys, key, size);
    *number_out = known ? (size_t)*known : target->count;
    if (known)
        return FSDP_OK;
    if (!fsdp_grow(&target->items, &target->room, target->count + 1, sizeof *target->items) ||
        !fsdp_name_table_put(&target->keys, key, size, target->count))
        return fsdp_fail_memory(err, "the items of a checkpoint");
    target->items[target->count++] = (items_out){.key = key, .key_size = size};
    return FSDP_OK;
}

/* Names the entry as it is in its item. False: no memory. */
static bool name_inside(fsdp_target *target, const int32_t *path, size_t count, size_t key,
                        fsdp_target_entry *inner)
{
    bool is_split = key < fsdp_path_bytes(path[0]);
    if (key == inner->name_size) {
        inner->name = "";
        inner->name_size = 0;
        inner->path = whole;
        inner->path_count = 1;
        return true;
    }
    int32_t *rest = fsdp_arena_alloc(&target->arena, count, sizeof *rest);
    if (!rest)
        return false;
    if (is_split)
        rest[0] = (int32_t)(fsdp_path_bytes(path[0]) - key - 1);
    memcpy(rest + is_split, path + 1, (count - 1) * sizeof *rest);
    inner->name += key + 1;
    inner->name_size -= key + 1;
    inner->path = rest;
    inner->path_count = count - 1 + is_split;
    return true;
}

static fsdp_status fail_no_item(const fsdp_target_entry *entry, fsdp_error *err)
{
    char shown[160];
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "'%s' is in no item of torch_checkpointing, whose names have letters, digits, '-' and '_'; "
        "put it into one with --rename, such as 's/^/model./'",
        fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}

static fsdp_status add_entry(fsdp_target *target, size_t i, const int32_t *path, size_t count,
                             fsdp_error *err)
{
    const fsdp_target_entry *entry = &target->opts.entries[i];
    size_t number, key = find_key(entry, path, count);
    if (key == 0)
        return fail_no_item(entry, err);
    FSDP_TRY(find_item(target, entry->name, key, &number, err));
    items_out *item = &target->items[number];
    if (!fsdp_grow(&item->entries, &item->room, item->count + 1, sizeof *item->entries))
        return fsdp_fail_memory(err, "the items of a checkpoint");
    fsdp_target_entry *inner = &item->entries[item->count++];
    *inner = *entry;
    inner->same_as = 0;
    if (!name_inside(target, path, count, key, inner))
        return fsdp_fail_memory(err, "the names of a checkpoint");
    target->places[i].item = number;
    return FSDP_OK;
}

/* An item that is one value or tensor has no other entries. */
static fsdp_status check_item(const items_out *item, fsdp_error *err)
{
    for (size_t i = 0; i < item->count && item->count > 1; i++)
        if (item->entries[i].name_size == 0)
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "item '%.*s' of torch_checkpointing cannot be a value and have entries "
                "below it; give one of them another name with --rename",
                (int)item->key_size, item->key);
    return FSDP_OK;
}

static fsdp_status find_items(fsdp_target *target, fsdp_error *err)
{
    const fsdp_target_opts *opts = &target->opts;
    nesting found = {0};
    fsdp_status st = nesting_find(opts->entries, opts->entry_count, NESTING_TORCH, &found, err);
    for (size_t i = 0; i < opts->entry_count && st == FSDP_OK; i++)
        st = add_entry(target, i, found.paths[i], found.counts[i], err);
    nesting_release(&found);
    for (size_t i = 0; i < target->count && st == FSDP_OK; i++) {
        items_out *item = &target->items[i];
        st = check_item(item, err);
        if (st == FSDP_OK)
            st = nesting_find(item->entries, item->count, NESTING_TORCH, &item->nesting, err);
    }
    return st;
}

/* --- storages ----------------------------------------------------------------------------------- */

/* Storages are numbered as emit_item does: in the order of the tree. */
typedef struct counting {
    items_out *item;
    size_t *storages; /* per entry of the item */
} counting;

static fsdp_status count_storage(void *context, size_t number, fsdp_error *err)
{
    counting *at = context;
    (void)err;
    items_out *item = at->item;
    if (!item->entries[number].value)
        at->storages[number] = item->storages++;
    if (is_spread(&item->entries[number]) && !item->has_mesh) {
        item->has_mesh = true;
        item->mesh_storage = item->storages++;
    }
    return FSDP_OK;
}

/* Walks the tree once, and drops the text. */
static fsdp_status number_item(fsdp_target *target, size_t number, fsdp_error *err)
{
    counting at = {.item = &target->items[number]};
    fsdp_pickler pickler = {0};
    const fsdp_target_opts opts = {.entries = at.item->entries, .entry_count = at.item->count};
    size_t next = 0;
    at.storages = fsdp_alloc(at.item->count, sizeof *at.storages);
    fsdp_status st = at.storages ? torch_emit_tree(&pickler, &opts, count_storage, &at, err)
                                 : fsdp_fail_memory(err, "the items of a checkpoint");
    for (size_t i = 0; i < target->opts.entry_count && st == FSDP_OK; i++)
        if (target->places[i].item == number)
            target->places[i].storage = at.storages[next++];
    fsdp_pickler_release(&pickler);
    fsdp_free(at.storages);
    return st;
}

/* --- files -------------------------------------------------------------------------------------- */

static fsdp_status allocate_file(const fsdp_target *target, size_t number, int rank,
                                 fsdp_error *err)
{
    const items_out *item = &target->items[number];
    item_file *file = file_of(target, number, rank);
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%.*s_%d.pt", (int)item->key_size, item->key, rank);
    file->name = name.data;
    file->records = fsdp_alloc(item->storages + TORCH_FIXED, sizeof *file->records);
    file->parts = fsdp_alloc(item->storages, sizeof *file->parts);
    return !name.failed && file->records && file->parts
               ? FSDP_OK
               : fsdp_fail_memory(err, "the files of a checkpoint");
}

static void size_storage(const fsdp_target *target, size_t i)
{
    const fsdp_target_entry *entry = &target->opts.entries[i];
    const entry_place *place = &target->places[i];
    for (int rank = 0; rank < target->mesh.world && !entry->value; rank++) {
        fsdp_box box = part_of(&target->mesh, entry, rank);
        item_file *file = file_of(target, place->item, rank);
        int64_t size = fsdp_box_count(&box) * (int64_t)fsdp_dtype_size(entry->dtype);
        file->records[TORCH_LEADING + place->storage].size = size;
        atomic_store(&file->parts[place->storage].left, size);
    }
}

/* Pickles the item into the pickler, and places the records of its file. */
static fsdp_status place_file(const fsdp_target *target, size_t number, int rank,
                              fsdp_pickler *pickler, fsdp_error *err)
{
    const items_out *item = &target->items[number];
    item_file *file = file_of(target, number, rank);
    pickler->memo_count = 0;
    pickler->term_count = 0;
    FSDP_TRY(emit_item(pickler, item, &target->mesh, rank, err));
    if (item->has_mesh)
        file->records[TORCH_LEADING + item->mesh_storage].size =
            (int64_t)target->mesh.world * (int64_t)sizeof(int32_t);
    return torch_place_archive(file->records, item->storages, &pickler->text, &file->size, err);
}

static fsdp_status allocate_files(fsdp_target *target, fsdp_error *err)
{
    target->files = fsdp_alloc(target->count * (size_t)target->mesh.world, sizeof *target->files);
    if (!target->files)
        return fsdp_fail_memory(err, "the files of a checkpoint");
    for (size_t i = 0; i < target->count; i++)
        for (int rank = 0; rank < target->mesh.world; rank++)
            FSDP_TRY(allocate_file(target, i, rank, err));
    return FSDP_OK;
}

static fsdp_status make_plan(fsdp_target *target, fsdp_error *err)
{
    target->places = fsdp_alloc(target->opts.entry_count, sizeof *target->places);
    if (!target->places)
        return fsdp_fail_memory(err, "the items of a checkpoint");
    FSDP_TRY(find_items(target, err));
    for (size_t i = 0; i < target->count; i++)
        FSDP_TRY(number_item(target, i, err));
    FSDP_TRY(allocate_files(target, err));
    for (size_t i = 0; i < target->opts.entry_count; i++)
        size_storage(target, i);
    return emit_metadata(&target->metadata, target->items, target->count, &target->mesh, err);
}

static fsdp_status plan(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target = fsdp_alloc(1, sizeof *target);
    if (!target)
        return fsdp_fail_memory(err, "a checkpoint");
    target->opts = *opts;
    take_mesh(target);
    fsdp_status st = make_plan(target, err);
    if (st == FSDP_OK)
        *target_out = target;
    else
        discard(target);
    return st;
}

/* Places the records of each file, and calls visit (may be NULL) with its pickle. */
static fsdp_status each_file(fsdp_target *target,
                             fsdp_status (*visit)(fsdp_target *target, size_t item, int rank,
                                                  const fsdp_text *pickle, fsdp_error *err),
                             fsdp_error *err)
{
    fsdp_pickler pickler = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < target->count && st == FSDP_OK; i++)
        for (int rank = 0; rank < target->mesh.world && st == FSDP_OK; rank++) {
            st = place_file(target, i, rank, &pickler, err);
            if (st == FSDP_OK && visit)
                st = visit(target, i, rank, &pickler.text, err);
        }
    fsdp_pickler_release(&pickler);
    return st;
}

static fsdp_status measure(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err)
{
    fsdp_target *target;
    FSDP_TRY(plan(opts, &target, err));
    fsdp_status st = each_file(target, NULL, err);
    size_t files = target->count * (size_t)target->mesh.world;
    *files_out = (int64_t)files + 1;
    *bytes_out = (int64_t)target->metadata.text.size;
    for (size_t i = 0; i < files && st == FSDP_OK; i++)
        if (fsdp_add_overflow(*bytes_out, target->files[i].size, bytes_out))
            st = fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", opts->path);
    discard(target);
    return st;
}

/* === files ==================================================================================== */

/* A file of the target that is open for one call. */
typedef struct borrowed {
    fsdp_file *file;
    char *path;
    bool is_extra; /* beyond OPEN_MOST: closed after the call */
} borrowed;

static fsdp_status borrow(const fsdp_target *target, const item_file *from, borrowed *out,
                          fsdp_error *err)
{
    *out = (borrowed){.file = from->file, .is_extra = !from->file};
    out->path = fsdp_path_join(target->path, from->name);
    if (!out->path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = FSDP_OK;
    if (out->is_extra)
        st = fsdp_io_open(target->opts.io, out->path, FSDP_IO_WRITE, &out->file, err);
    if (st != FSDP_OK)
        fsdp_free(out->path);
    return st;
}

static fsdp_status give_back(borrowed *file, fsdp_status status, fsdp_error *err)
{
    if (file->is_extra) {
        fsdp_status closed = fsdp_io_close(&file->file, file->path, status == FSDP_OK ? err : NULL);
        status = status == FSDP_OK ? closed : status;
    }
    fsdp_free(file->path);
    return status;
}

/* --- create ------------------------------------------------------------------------------------- */

/* Adds the ranks of the mesh, which are 0, 1, 2, ... */
static void add_mesh_record(const fsdp_target *target, fsdp_zip_record *record, fsdp_text *text)
{
    fsdp_text ranks = {0};
    for (int rank = 0; rank < target->mesh.world; rank++) {
        const uint8_t bytes[4] = {(uint8_t)rank, (uint8_t)(rank >> 8), (uint8_t)(rank >> 16),
                                  (uint8_t)(rank >> 24)};
        fsdp_text_add(&ranks, (const char *)bytes, sizeof bytes);
    }
    text->failed = text->failed || ranks.failed;
    if (!ranks.failed) {
        record->crc = fsdp_zip_crc_part(ranks.data, ranks.size, 0);
        fsdp_zip_add_record(text, record, ranks.data);
    }
    fsdp_text_release(&ranks);
}

static fsdp_status write_records(const fsdp_target *target, size_t number, const item_file *file,
                                 const fsdp_text *pickle, const borrowed *to, fsdp_error *err)
{
    const items_out *item = &target->items[number];
    fsdp_zip_record *mesh = &file->records[TORCH_LEADING + item->mesh_storage];
    fsdp_text leading = {0}, ranks = {0};
    torch_emit_leading(&leading, file->records, pickle);
    if (item->has_mesh)
        add_mesh_record(target, mesh, &ranks);
    fsdp_status st = leading.failed || ranks.failed
                         ? fsdp_fail_memory(err, "a pickle")
                         : fsdp_io_write(to->file, to->path, leading.data, leading.size,
                                         file->records[0].header, err);
    if (st == FSDP_OK && item->has_mesh)
        st = fsdp_io_write(to->file, to->path, ranks.data, ranks.size, mesh->header, err);
    fsdp_text_release(&leading);
    fsdp_text_release(&ranks);
    return st;
}

static fsdp_status create_file(fsdp_target *target, size_t item, int rank, const fsdp_text *pickle,
                               fsdp_error *err)
{
    item_file *file = file_of(target, item, rank);
    borrowed to = {.path = fsdp_path_join(target->path, file->name), .is_extra = true};
    if (!to.path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = fsdp_io_open(target->opts.io, to.path, FSDP_IO_CREATE, &to.file, err);
    if (st == FSDP_OK)
        st = fsdp_io_reserve(to.file, to.path, file->size, err);
    if (st == FSDP_OK)
        st = write_records(target, item, file, pickle, &to, err);
    if (st == FSDP_OK && target->count * (size_t)target->mesh.world <= OPEN_MOST) {
        file->file = to.file;
        to.is_extra = false;
    }
    return give_back(&to, st, err);
}

static fsdp_status create(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target;
    FSDP_TRY(plan(opts, &target, err));
    target->path = fsdp_strndup(opts->path, strlen(opts->path));
    fsdp_status st =
        target->path ? each_file(target, create_file, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK)
        *target_out = target;
    else
        discard(target);
    return st;
}

/* --- write -------------------------------------------------------------------------------------- */

static fsdp_status write_into(const fsdp_target *target, const entry_place *place, int rank,
                              const fsdp_target_piece *elements, fsdp_error *err)
{
    item_file *file = file_of(target, place->item, rank);
    fsdp_zip_record *record = &file->records[TORCH_LEADING + place->storage];
    torch_part *part = &file->parts[place->storage];
    int64_t element = (int64_t)fsdp_dtype_size(target->opts.entries[elements->entry].dtype);
    int64_t end = (elements->first + elements->count) * element;
    torch_piece piece = {.data = elements->data,
                         .size = (size_t)(elements->count * element),
                         .offset = record->data + elements->first * element,
                         .end = record->data + record->size};
    borrowed to;
    FSDP_TRY(borrow(target, file, &to, err));
    if (elements->first == 0)
        fsdp_zip_add_header(&piece.before, record);
    if (torch_part_take(part, piece.data, piece.size, record->size - end)) {
        record->crc = atomic_load(&part->crc);
        fsdp_zip_add_trailer(&piece.behind, record);
    }
    fsdp_status st = torch_write_piece(to.file, to.path, &piece, target->opts.sync, err);
    return give_back(&to, st, err);
}

/* Every rank whose part is this box has it. */
static fsdp_status write(fsdp_target *target, const fsdp_target_piece *elements, fsdp_error *err)
{
    const fsdp_target_entry *entry = &target->opts.entries[elements->entry];
    const fsdp_box declared = fsdp_target_box_at(entry, elements->box);
    if (elements->count == 0)
        return FSDP_OK;
    for (int rank = 0; rank < target->mesh.world; rank++) {
        fsdp_box box = part_of(&target->mesh, entry, rank);
        if (fsdp_box_equal(&box, &declared))
            FSDP_TRY(write_into(target, &target->places[elements->entry], rank, elements, err));
    }
    return FSDP_OK;
}

static fsdp_status place(const fsdp_target *target, size_t entry, size_t box,
                         fsdp_target_place *place_out, fsdp_error *err)
{
    const entry_place *at = &target->places[entry];
    const item_file *file = file_of(target, at->item, target->opts.entries[entry].boxes[box].rank);
    (void)err;
    *place_out = (fsdp_target_place){.file = file->name,
                                     .offset = file->records[TORCH_LEADING + at->storage].data};
    return FSDP_OK;
}

/* --- finish ------------------------------------------------------------------------------------- */

/* The headers of storages without elements, and the records after all storages. */
static fsdp_status close_records(const fsdp_target *target, size_t number, const item_file *file,
                                 const borrowed *to, fsdp_error *err)
{
    const items_out *item = &target->items[number];
    fsdp_text text = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < item->storages && st == FSDP_OK; i++) {
        const fsdp_zip_record *record = &file->records[TORCH_LEADING + i];
        if (atomic_load(&file->parts[i].left) != 0)
            st =
                fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': storage %zu is not complete", to->path, i);
        if (record->size > 0)
            continue;
        text.size = 0;
        fsdp_zip_add_header(&text, record);
        if (st == FSDP_OK && !text.failed)
            st = fsdp_io_write(to->file, to->path, text.data, text.size, record->header, err);
    }
    text.size = 0;
    torch_emit_closing(&text, file->records, item->storages);
    if (st == FSDP_OK)
        st = text.failed ? fsdp_fail_memory(err, "a zip directory")
                         : fsdp_io_write(to->file, to->path, text.data, text.size,
                                         file->records[TORCH_LEADING + item->storages].header, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status close_file(const fsdp_target *target, size_t item, int rank, fsdp_error *err)
{
    item_file *file = file_of(target, item, rank);
    borrowed to;
    FSDP_TRY(borrow(target, file, &to, err));
    fsdp_status st = close_records(target, item, file, &to, err);
    if (st == FSDP_OK && target->opts.sync)
        st = fsdp_io_sync(to.file, to.path, err);
    to.is_extra = true; /* the file is closed here */
    file->file = NULL;
    return give_back(&to, st, err);
}

static fsdp_status write_metadata(const fsdp_target *target, fsdp_error *err)
{
    const fsdp_text *text = &target->metadata.text;
    char *path = fsdp_path_join(target->path, FSDP_ITEMS_METADATA);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    borrowed to = {.path = path, .is_extra = true};
    fsdp_status st = fsdp_io_open(target->opts.io, path, FSDP_IO_CREATE, &to.file, err);
    if (st == FSDP_OK)
        st = fsdp_io_write(to.file, path, text->data, text->size, 0, err);
    if (st == FSDP_OK && target->opts.sync)
        st = fsdp_io_sync(to.file, path, err);
    return give_back(&to, st, err);
}

static fsdp_status finish(fsdp_target *target, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < target->count && st == FSDP_OK; i++)
        for (int rank = 0; rank < target->mesh.world && st == FSDP_OK; rank++)
            st = close_file(target, i, rank, err);
    if (st == FSDP_OK)
        st = write_metadata(target, err);
    discard(target);
    return st;
}

/* --- the format --------------------------------------------------------------------------------- */

/* "metadata.pkl" and "KEY_R.pt". */
static bool owns(const char *name)
{
    size_t size = strlen(name), digits = size;
    if (strcmp(name, FSDP_ITEMS_METADATA) == 0)
        return true;
    if (!fsdp_has_suffix(name, ".pt"))
        return false;
    size -= 3;
    for (digits = size; digits > 0 && isdigit((unsigned char)name[digits - 1]);)
        digits--;
    return digits < size && digits > 1 && name[digits - 1] == '_' &&
           fsdp_name_is_key(name, digits - 1);
}

static const fsdp_target_ops ops = {measure, create, write, finish, discard, place};

const fsdp_format_writer fsdp_items_writer = {
    .ops = &ops, .owns = owns, .holds_dtype = torch_holds_dtype};

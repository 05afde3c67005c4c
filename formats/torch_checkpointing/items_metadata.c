/*
 * Reads metadata.pkl of a directory of torch_checkpointing: per item and tensor the groups of ranks that hold
 * it alike, and per item and rank the file. See torch_items.h; the mirror is items_write.c.
 *
 *     {"metadata": {ITEM: {"nested_path_to_metadata": {'["state","w"]': [{"sharding_metadata":
 *         {"type": ..., "data": {...}}, "ranks": (0, 1)}]}, "rank_to_layout_info": {0: None, ...}}},
 *      "world_size": 2, "version": "2.0"}
 *
 * Version 1.0 has one table of '["ITEM","state","w"]' and, as "rank_to_layout_info_mappings",
 * {RANK: {ITEM: ...}}.
 */
#include "formats/torch_checkpointing/torch_items.h"

#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "base/data/json.h"
#include "base/data/name_path.h"
#include "formats/pickle/pickle.h"

#include <stdio.h>
#include <string.h>

enum { MOST_ELEMENTS = 200, MOST_WORK = 1 << 28, MOST_WORLD = 1 << 20 };
enum { KNOWN_RANKS = 16, KEPT_PER_BYTE = 16, KEPT_LEAST = 1 << 16 };

/* A mesh that was read, by its node: the package shares equal ones. */
typedef struct known_mesh {
    fsdp_node node;
    const rank_mesh *mesh;
} known_mesh;

/* A list of ranks that was kept: most tensors have one of few. */
typedef struct known_ranks {
    const int64_t *ranks;
    size_t count;
} known_ranks;

typedef struct reading {
    items_list *list;
    fsdp_pickle pickle;
    const char *where; /* "'PATH'" */
    const char *item;  /* that is being read, for messages */
    known_mesh *meshes;
    size_t mesh_count, mesh_room;
    known_ranks ranks[KNOWN_RANKS];
    size_t ranks_next;
    int64_t *scratch; /* a list of ranks */
    size_t scratch_room;
    int64_t work, kept, kept_most;
    fsdp_error *err;
} reading;

/* --- nodes ------------------------------------------------------------------------------------ */

static const fsdp_pickle_node *at(const reading *read, fsdp_node node)
{
    return fsdp_pickle_at(&read->pickle, node);
}

static fsdp_status fail(const reading *read, const char *what)
{
    char shown[100];
    if (!read->item)
        return fsdp_fail(read->err, FSDP_ERR_DAMAGED, "%s: %s", read->where, what);
    return fsdp_fail(read->err, FSDP_ERR_DAMAGED, "%s: item '%s': %s", read->where,
                     fsdp_printable(read->item, strlen(read->item), shown, sizeof shown), what);
}

static fsdp_status spend(reading *read, int64_t steps)
{
    read->work += steps;
    return read->work <= MOST_WORK
               ? FSDP_OK
               : fsdp_fail(read->err, FSDP_ERR_LIMIT,
                           "%s: its lists are too long to read, because many are shared",
                           read->where);
}

/* Counts numbers and structs that are kept. Written out they take a byte each at least; a hostile file refers
 * to one list many times. */
static fsdp_status keep(reading *read, int64_t count)
{
    read->kept += count;
    return read->kept <= read->kept_most
               ? spend(read, count)
               : fsdp_fail(read->err, FSDP_ERR_LIMIT, "%s: its lists are far larger than the file",
                           read->where);
}

/* Any member of a dict, which may be large; 0: none. */
static fsdp_node member(const reading *read, fsdp_node dict, const char *key)
{
    const fsdp_pickle_node *node = at(read, dict);
    for (size_t i = 0; node->kind == FSDP_NODE_DICT && i + 1 < node->count; i += 2)
        if (fsdp_pickle_is_text(&read->pickle, node->as.items[i], key))
            return node->as.items[i + 1];
    return 0;
}

static bool is_list(const reading *read, fsdp_node node)
{
    return at(read, node)->kind == FSDP_NODE_LIST || at(read, node)->kind == FSDP_NODE_TUPLE;
}

static bool is_dict(const reading *read, fsdp_node node)
{
    return at(read, node)->kind == FSDP_NODE_DICT;
}

/* Copies a list of `count` numbers, or of any length (SIZE_MAX). None is negative. */
static fsdp_status read_numbers(reading *read, fsdp_node node, size_t count, const char *what,
                                int64_t **out, size_t *count_out)
{
    const fsdp_pickle_node *list = at(read, node);
    char text[120];
    bool is_good = is_list(read, node) && (count == SIZE_MAX || list->count == count);
    *out = NULL;
    if (is_good) {
        FSDP_TRY(keep(read, list->count + 1));
        *out = fsdp_arena_alloc(&read->list->arena, list->count, sizeof **out);
        if (!*out)
            return fsdp_fail_memory(read->err, "the metadata of a checkpoint");
    }
    for (uint32_t i = 0; is_good && i < list->count; i++)
        is_good = fsdp_pickle_int(&read->pickle, list->as.items[i], &(*out)[i]) && (*out)[i] >= 0;
    snprintf(text, sizeof text, "%s is not a list of numbers of the right length", what);
    *count_out = is_good ? list->count : 0;
    return is_good ? FSDP_OK : fail(read, text);
}

/* Only dicts, lists, texts and numbers are written; an object would be the work of someone else. */
static fsdp_status check_plain(reading *read)
{
    for (size_t i = 1; i < read->pickle.count; i++) {
        const fsdp_pickle_node *node = at(read, (fsdp_node)i);
        if (node->kind != FSDP_NODE_GLOBAL && node->kind != FSDP_NODE_CALL &&
            node->kind != FSDP_NODE_PERSISTENT)
            continue;
        char *name = fsdp_pickle_global_name(&read->pickle, (fsdp_node)i), shown[100];
        fsdp_status st = fsdp_fail(
            read->err, FSDP_ERR_REFUSED,
            "%s: it has an object of '%s'; torch_checkpointing writes plain "
            "dicts, lists, texts and numbers",
            read->where,
            fsdp_printable(name ? name : "", name ? strlen(name) : 0, shown, sizeof shown));
        fsdp_free(name);
        return st;
    }
    return FSDP_OK;
}

/* --- names ------------------------------------------------------------------------------------ */

/* The elements of '["state",0,"exp_avg"]', of which the first `skipped` are left out. */
typedef struct spelled_path {
    fsdp_text name, first; /* first: the element that was left out */
    int32_t path[MOST_ELEMENTS];
    size_t count;
    bool is_plain; /* all elements are texts and whole numbers */
} spelled_path;

static void push(spelled_path *out, const char *text, size_t size, bool is_number)
{
    if (out->count == MOST_ELEMENTS || size >= FSDP_PATH_TUPLE) {
        out->is_plain = false;
        return;
    }
    if (out->count > 0)
        fsdp_text_add(&out->name, ".", 1);
    fsdp_text_add(&out->name, text, size);
    out->path[out->count++] = (int32_t)size | (is_number ? FSDP_PATH_NUMBER : 0);
}

static fsdp_status read_element(fsdp_json *json, spelled_path *out, bool is_first, fsdp_error *err)
{
    char digits[24];
    const char *text;
    size_t size;
    int64_t number;
    fsdp_json_kind kind = fsdp_json_peek(json);
    if (kind == FSDP_JSON_STRING) {
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        if (is_first)
            fsdp_text_add(&out->first, text, size);
        else
            push(out, text, size, false);
        return FSDP_OK;
    }
    out->is_plain = out->is_plain && kind == FSDP_JSON_NUMBER && !is_first;
    if (!out->is_plain)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_i64(json, &number, err));
    int length = snprintf(digits, sizeof digits, "%lld", (long long)number);
    push(out, digits, (size_t)length, true);
    return FSDP_OK;
}

static fsdp_status spell(const reading *read, fsdp_node key, bool has_item, spelled_path *out)
{
    const fsdp_pickle_node *node = at(read, key);
    fsdp_json json;
    bool more = true;
    *out = (spelled_path){.is_plain = true};
    if (node->kind != FSDP_NODE_STR)
        return fail(read, "a path is not a text");
    fsdp_json_init(&json, node->as.text, node->count, "a path of " FSDP_ITEMS_METADATA);
    fsdp_status st = fsdp_json_enter_array(&json, read->err);
    for (bool is_first = has_item; st == FSDP_OK && more; is_first = false) {
        st = fsdp_json_next_item(&json, &more, read->err);
        if (st == FSDP_OK && more)
            st = read_element(&json, out, is_first, read->err);
    }
    if (st == FSDP_OK)
        st = fsdp_json_finish(&json, read->err);
    if (st == FSDP_OK && (out->name.failed || out->first.failed))
        st = fsdp_fail_memory(read->err, "the metadata of a checkpoint");
    if (st == FSDP_ERR_DAMAGED)
        fsdp_error_prefix(read->err, "%s", read->where);
    fsdp_json_release(&json);
    return st;
}

static void release_spelled(spelled_path *path)
{
    fsdp_text_release(&path->name);
    fsdp_text_release(&path->first);
}

/* --- meshes ----------------------------------------------------------------------------------- */

static fsdp_status check_mesh(reading *read, const rank_mesh *mesh)
{
    int64_t count = 1;
    for (int i = 0; i < mesh->ndim; i++)
        if (mesh->shape[i] < 1 || fsdp_mul_overflow(count, mesh->shape[i], &count))
            return fail(read, "a device mesh has an impossible shape");
    if (count != (int64_t)mesh->count)
        return fail(read, "a device mesh has another number of ranks than its shape");
    uint8_t *is_seen = fsdp_alloc((size_t)read->list->world, 1);
    if (!is_seen)
        return fsdp_fail_memory(read->err, "a device mesh");
    bool is_good = true;
    for (size_t i = 0; i < mesh->count && is_good; i++) {
        is_good = mesh->ranks[i] < read->list->world && !is_seen[mesh->ranks[i]];
        if (is_good)
            is_seen[mesh->ranks[i]] = 1;
    }
    fsdp_free(is_seen);
    return is_good ? FSDP_OK
                   : fail(read, "a device mesh has a rank twice, or one beyond the world size");
}

static fsdp_status make_mesh(reading *read, fsdp_node spec, rank_mesh *mesh)
{
    int64_t *shape;
    size_t ndim;
    FSDP_TRY(read_numbers(read, member(read, spec, "mesh_shape"), SIZE_MAX,
                          "the shape of a device mesh", &shape, &ndim));
    if (ndim < 1 || ndim > RANK_MESH_DIMS)
        return fail(read, "a device mesh has no dims, or too many");
    *mesh = (rank_mesh){.ndim = (int)ndim, .highest = -1};
    memcpy(mesh->shape, shape, ndim * sizeof *shape);
    FSDP_TRY(read_numbers(read, member(read, spec, "mesh_data"), SIZE_MAX,
                          "the list of ranks of a device mesh", &mesh->ranks, &mesh->count));
    FSDP_TRY(spend(read, read->list->world));
    mesh->listed = mesh->count;
    return check_mesh(read, mesh);
}

static fsdp_status read_mesh(reading *read, fsdp_node spec, const rank_mesh **mesh_out)
{
    for (size_t i = 0; i < read->mesh_count; i++)
        if (read->meshes[i].node == spec) {
            *mesh_out = read->meshes[i].mesh;
            return spend(read, (int64_t)i);
        }
    rank_mesh *mesh = fsdp_arena_alloc(&read->list->arena, 1, sizeof *mesh);
    if (!mesh ||
        !fsdp_grow(&read->meshes, &read->mesh_room, read->mesh_count + 1, sizeof *read->meshes))
        return fsdp_fail_memory(read->err, "device meshes");
    FSDP_TRY(make_mesh(read, spec, mesh));
    read->meshes[read->mesh_count++] = (known_mesh){spec, mesh};
    *mesh_out = mesh;
    return FSDP_OK;
}

/* --- statements ------------------------------------------------------------------------------- */

static fsdp_status read_placement(reading *read, fsdp_node node, int ndim, rank_placement *out)
{
    const fsdp_pickle *pickle = &read->pickle;
    fsdp_node type = member(read, node, "type");
    bool is_strided = fsdp_pickle_is_text(pickle, type, "StridedShard");
    int64_t dim = -1;
    *out = (rank_placement){.kind = RANK_REPLICATE};
    if (fsdp_pickle_is_text(pickle, type, "Replicate"))
        return FSDP_OK;
    if (!is_strided && !fsdp_pickle_is_text(pickle, type, "Shard"))
        return fsdp_fail(read->err, FSDP_ERR_REFUSED,
                         "%s: it has a placement that is neither Shard, StridedShard nor Replicate",
                         read->where);
    out->kind = is_strided ? RANK_STRIDED : RANK_SHARD;
    if (!fsdp_pickle_int(pickle, member(read, node, "dim"), &dim) || dim < 0 || dim >= ndim)
        return fail(read, "a placement cuts a dim that its tensor does not have");
    out->dim = (int)dim;
    if (is_strided && (!fsdp_pickle_int(pickle, member(read, node, "split_factor"), &out->split) ||
                       out->split < 1))
        return fail(read, "a StridedShard has no split factor");
    return FSDP_OK;
}

static fsdp_status read_placements(reading *read, fsdp_node data, rank_statement *stated)
{
    fsdp_node list = member(read, data, "placements");
    int ndim = stated->mesh->ndim;
    rank_placement *placements =
        fsdp_arena_alloc(&read->list->arena, (size_t)ndim, sizeof *placements);
    if (!placements)
        return fsdp_fail_memory(read->err, "the placements of a tensor");
    if (!is_list(read, list) || at(read, list)->count != (uint32_t)ndim)
        return fail(read, "a tensor does not have one placement per mesh dim");
    for (int i = 0; i < ndim; i++)
        FSDP_TRY(read_placement(read, at(read, list)->as.items[i], stated->ndim, &placements[i]));
    stated->placements = placements;
    return spend(read, ndim);
}

static bool is_inside(const rank_statement *stated, const rank_piece *piece)
{
    for (int dim = 0; dim < stated->ndim; dim++)
        if (piece->lo[dim] > stated->shape[dim] ||
            piece->len[dim] > stated->shape[dim] - piece->lo[dim] ||
            piece->local[dim] > INT64_MAX - piece->len[dim])
            return false;
    return true;
}

/* Pieces of a rank: three lists of offsets and lengths. */
static fsdp_status read_pieces(reading *read, fsdp_node data, rank_statement *stated)
{
    static const char *const members[] = {"global_offsets", "local_offsets", "local_sizes"};
    fsdp_node lists[3];
    uint32_t count = 0;
    for (int i = 0; i < 3; i++) {
        lists[i] = member(read, data, members[i]);
        if (!is_list(read, lists[i]) || (i > 0 && at(read, lists[i])->count != count))
            return fail(read, "the lists of the pieces of a tensor differ in length");
        count = at(read, lists[i])->count;
    }
    FSDP_TRY(keep(read, count));
    rank_piece *pieces = fsdp_arena_alloc(&read->list->arena, count, sizeof *pieces);
    if (!pieces)
        return fsdp_fail_memory(read->err, "the pieces of a tensor");
    for (uint32_t i = 0; i < count; i++) {
        int64_t *numbers[3];
        size_t ndim;
        for (int k = 0; k < 3; k++)
            FSDP_TRY(read_numbers(read, at(read, lists[k])->as.items[i], (size_t)stated->ndim,
                                  members[k], &numbers[k], &ndim));
        pieces[i] = (rank_piece){numbers[0], numbers[1], numbers[2]};
        if (!is_inside(stated, &pieces[i]))
            return fail(read, "a piece reaches beyond its tensor");
    }
    stated->pieces = pieces;
    stated->piece_count = count;
    return FSDP_OK;
}

static fsdp_dtype read_dtype(const reading *read, fsdp_node node)
{
    static const char torch[] = "torch.";
    const fsdp_pickle_node *text = at(read, node);
    size_t prefix = sizeof torch - 1;
    if (text->kind != FSDP_NODE_STR || text->count <= prefix ||
        memcmp(text->as.text, torch, prefix) != 0)
        return FSDP_DTYPE_NONE;
    for (int dtype = 1; dtype < FSDP_DTYPE_COUNT; dtype++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe((fsdp_dtype)dtype);
        if (info && info->torch &&
            fsdp_bytes_are(text->as.text + prefix, text->count - prefix, info->torch))
            return (fsdp_dtype)dtype;
    }
    return FSDP_DTYPE_NONE;
}

/* A kind of sharding that the package does not have itself is left to what the files say. */
static fsdp_status read_statement(reading *read, fsdp_node packed, rank_statement *stated,
                                  bool *is_known_out)
{
    fsdp_node type = member(read, packed, "type"), data = member(read, packed, "data");
    bool on_mesh = fsdp_pickle_is_text(&read->pickle, type, "DTensorShardingMetadata");
    int64_t *shape;
    size_t ndim;
    *stated = (rank_statement){.dtype = read_dtype(read, member(read, data, "dtype"))};
    *is_known_out = on_mesh || fsdp_pickle_is_text(&read->pickle, type, "default_tensor_v1");
    if (!*is_known_out)
        return FSDP_OK;
    if (!is_dict(read, data))
        return fail(read, "a tensor has no description");
    FSDP_TRY(read_numbers(read, member(read, data, "global_shape"), SIZE_MAX,
                          "the shape of a tensor", &shape, &ndim));
    if (ndim > FSDP_MAX_DIMS)
        return fsdp_fail(read->err, FSDP_ERR_LIMIT, "%s: a tensor has %zu dims, more than %d",
                         read->where, ndim, FSDP_MAX_DIMS);
    *is_known_out = stated->dtype != FSDP_DTYPE_NONE; /* quantized ones are listed by their kind */
    stated->ndim = (int)ndim;
    stated->shape = shape;
    if (!on_mesh)
        return read_pieces(read, data, stated);
    fsdp_node mesh = member(read, data, "mesh_spec");
    if (!is_dict(read, mesh))
        return fail(read, "a tensor has no device mesh");
    FSDP_TRY(read_mesh(read, mesh, &stated->mesh));
    return read_placements(read, data, stated);
}

static bool same_numbers(const int64_t *a, size_t a_count, const int64_t *b, size_t b_count)
{
    return a_count == b_count && (a_count == 0 || memcmp(a, b, a_count * sizeof *a) == 0);
}

/* Keeps a list of ranks once, unless it was not seen for long. */
static fsdp_status keep_ranks(reading *read, size_t count, items_group *group)
{
    for (size_t i = 0; i < KNOWN_RANKS; i++) {
        const known_ranks *known = &read->ranks[i];
        if (known->ranks && same_numbers(known->ranks, known->count, read->scratch, count)) {
            group->ranks = known->ranks;
            group->rank_count = count;
            return FSDP_OK;
        }
    }
    FSDP_TRY(keep(read, (int64_t)count));
    int64_t *ranks = fsdp_arena_alloc(&read->list->arena, count, sizeof *ranks);
    if (!ranks)
        return fsdp_fail_memory(read->err, "the metadata of a checkpoint");
    if (count > 0)
        memcpy(ranks, read->scratch, count * sizeof *ranks);
    read->ranks[read->ranks_next++ % KNOWN_RANKS] = (known_ranks){ranks, count};
    group->ranks = ranks;
    group->rank_count = count;
    return FSDP_OK;
}

static fsdp_status read_ranks(reading *read, fsdp_node node, items_group *group)
{
    const fsdp_pickle_node *list = at(read, node);
    if (!is_list(read, node))
        return fail(read, "the ranks of a tensor are not a list");
    FSDP_TRY(spend(read, list->count));
    if (!fsdp_grow(&read->scratch, &read->scratch_room, list->count, sizeof *read->scratch))
        return fsdp_fail_memory(read->err, "the metadata of a checkpoint");
    for (uint32_t i = 0; i < list->count; i++)
        if (!fsdp_pickle_int(&read->pickle, list->as.items[i], &read->scratch[i]) ||
            read->scratch[i] < 0 || read->scratch[i] >= read->list->world)
            return fail(read, "a tensor belongs to a rank beyond the world size");
    return keep_ranks(read, list->count, group);
}

static fsdp_status read_group(reading *read, fsdp_node node, items_group *group, bool *is_known_out)
{
    *group = (items_group){0};
    FSDP_TRY(read_ranks(read, member(read, node, "ranks"), group));
    return read_statement(read, member(read, node, "sharding_metadata"), &group->stated,
                          is_known_out);
}

static fsdp_status read_groups(reading *read, fsdp_node list, items_tensor *tensor)
{
    if (!is_list(read, list))
        return fail(read, "a tensor has no list of groups");
    uint32_t count = at(read, list)->count;
    FSDP_TRY(keep(read, count));
    items_group *groups = fsdp_arena_alloc(&read->list->arena, count, sizeof *groups);
    if (!groups)
        return fsdp_fail_memory(read->err, "the metadata of a checkpoint");
    tensor->groups = groups;
    for (uint32_t i = 0; i < count; i++) {
        bool is_known;
        FSDP_TRY(spend(read, 16));
        FSDP_TRY(
            read_group(read, at(read, list)->as.items[i], &groups[tensor->group_count], &is_known));
        tensor->group_count += is_known;
    }
    return FSDP_OK;
}

/* --- asking ----------------------------------------------------------------------------------- */

static bool has_rank(const items_group *group, int rank)
{
    size_t guess = (size_t)rank; /* mostly all ranks, in order */
    if (guess < group->rank_count && group->ranks[guess] == rank)
        return true;
    for (size_t i = 0; i < group->rank_count; i++)
        if (group->ranks[i] == rank)
            return true;
    return false;
}

static const rank_statement *find_statement(void *context, const char *name, size_t size, int rank)
{
    const items_item *item = context;
    const uint64_t *number = fsdp_name_table_find(&item->names, name, size);
    const items_tensor *tensor = number ? &item->tensors[*number] : NULL;
    for (size_t i = 0; tensor && !tensor->is_twice && i < tensor->group_count; i++)
        if (has_rank(&tensor->groups[i], rank))
            return &tensor->groups[i].stated;
    return NULL;
}

/* --- tensors of an item ------------------------------------------------------------------------- */

static fsdp_status keep_tensor(reading *read, items_item *item, const spelled_path *path,
                               items_tensor *tensor)
{
    fsdp_arena *arena = &read->list->arena;
    size_t bytes = path->count * sizeof *tensor->path;
    tensor->name =
        fsdp_arena_strndup(arena, path->name.data ? path->name.data : "", path->name.size);
    tensor->name_size = path->name.size;
    tensor->path = fsdp_arena_alloc(arena, path->count, sizeof *tensor->path);
    tensor->path_count = path->count;
    if (!tensor->name || !tensor->path)
        return fsdp_fail_memory(read->err, "the metadata of a checkpoint");
    if (bytes > 0)
        memcpy(tensor->path, path->path, bytes);
    const uint64_t *known = fsdp_name_table_find(&item->names, tensor->name, tensor->name_size);
    if (known) {
        item->tensors[*known].is_twice = true;
        tensor->is_twice = true;
    } else if (!fsdp_name_table_put(&item->names, tensor->name, tensor->name_size,
                                    item->tensor_count)) {
        return fsdp_fail_memory(read->err, "the metadata of a checkpoint");
    }
    item->tensor_count++;
    return FSDP_OK;
}

/* Adds a tensor to the item, whose array has space for it. */
static fsdp_status read_tensor(reading *read, items_item *item, const spelled_path *path,
                               fsdp_node groups)
{
    items_tensor *tensor = &item->tensors[item->tensor_count];
    if (!path->is_plain)
        return FSDP_OK; /* no reader can find it by its name */
    *tensor = (items_tensor){0};
    FSDP_TRY(read_groups(read, groups, tensor));
    return keep_tensor(read, item, path, tensor);
}

static fsdp_status read_tensors(reading *read, items_item *item, fsdp_node table)
{
    if (!is_dict(read, table))
        return fail(read, "it has no table of tensors");
    const fsdp_pickle_node *pairs = at(read, table);
    FSDP_TRY(keep(read, pairs->count / 2));
    item->tensors = fsdp_arena_alloc(&read->list->arena, pairs->count / 2, sizeof *item->tensors);
    if (!item->tensors)
        return fsdp_fail_memory(read->err, "the metadata of a checkpoint");
    for (uint32_t i = 0; i + 1 < pairs->count; i += 2) {
        spelled_path path;
        fsdp_status st = spell(read, pairs->as.items[i], false, &path);
        if (st == FSDP_OK)
            st = read_tensor(read, item, &path, pairs->as.items[i + 1]);
        release_spelled(&path);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

/* --- files ------------------------------------------------------------------------------------ */

static fsdp_status name_usual(reading *read, const items_item *item, int rank, items_file *file)
{
    fsdp_text path = {0};
    fsdp_text_addf(&path, "%s_%d.pt", item->key, rank);
    file->path = path.failed ? NULL : fsdp_arena_strndup(&read->list->arena, path.data, path.size);
    file->kind = ITEMS_TORCH;
    fsdp_text_release(&path);
    return file->path ? FSDP_OK : fsdp_fail_memory(read->err, "the files of a checkpoint");
}

/* A relative path whose parts are names. */
static bool is_below(const char *path, size_t size)
{
    for (size_t at = 0; at <= size;) {
        const char *slash = at < size ? memchr(path + at, '/', size - at) : NULL;
        size_t part = slash ? (size_t)(slash - path) - at : size - at;
        if (part == 0 || (part <= 2 && memcmp(path + at, "..", part) == 0))
            return false;
        at += part + 1;
    }
    return true;
}

static fsdp_status read_layout(reading *read, fsdp_node layout, items_file *file)
{
    static const struct {
        const char *type;
        items_kind kind;
    } kinds[] = {{"TorchSerialization", ITEMS_TORCH},
                 {"SafetensorsSerialization", ITEMS_SAFETENSORS},
                 {"JsonSerialization", ITEMS_JSON},
                 {"RawSerialization", ITEMS_RAW}};
    const fsdp_pickle_node *path = at(read, member(read, layout, "file_path"));
    fsdp_node type = member(read, member(read, layout, "serialization_format"), "type");
    size_t which = 0;
    while (which < sizeof kinds / sizeof *kinds &&
           !fsdp_pickle_is_text(&read->pickle, type, kinds[which].type))
        which++;
    if (path->kind != FSDP_NODE_STR || path->count == 0 || memchr(path->as.text, 0, path->count))
        return fail(read, "a file has no path");
    if (!is_below(path->as.text, path->count))
        return fsdp_fail(read->err, FSDP_ERR_REFUSED,
                         "%s: item '%s' has a file that is not below the directory", read->where,
                         read->item);
    if (which == sizeof kinds / sizeof *kinds)
        return fsdp_fail(read->err, FSDP_ERR_REFUSED, "%s: item '%s' is written in an unknown form",
                         read->where, read->item);
    file->kind = kinds[which].kind;
    file->path = fsdp_arena_strndup(&read->list->arena, path->as.text, path->count);
    return file->path ? FSDP_OK : fsdp_fail_memory(read->err, "the files of a checkpoint");
}

/* A key of the tables of ranks: a number, or its digits. */
static bool read_rank(const reading *read, fsdp_node node, int64_t *rank)
{
    const fsdp_pickle_node *text = at(read, node);
    if (fsdp_pickle_int(&read->pickle, node, rank))
        return true;
    *rank = 0;
    for (uint32_t i = 0; text->kind == FSDP_NODE_STR && text->count < 10 && i < text->count; i++) {
        if (text->as.text[i] < '0' || text->as.text[i] > '9')
            return false;
        *rank = *rank * 10 + (text->as.text[i] - '0');
    }
    return text->kind == FSDP_NODE_STR && text->count > 0 && text->count < 10;
}

/* Reads the layout of one rank, which has the usual file where the layout is None or 0. */
static fsdp_status take_layout(reading *read, items_item *item, fsdp_node rank_node,
                               fsdp_node layout)
{
    int64_t rank;
    if (!read_rank(read, rank_node, &rank) || rank < 0 || rank >= read->list->world)
        return fail(read, "it has the file of a rank beyond the world size");
    items_file *file = &item->files[rank];
    if (file->path)
        return fail(read, "a rank has two files");
    return layout == 0 || at(read, layout)->kind == FSDP_NODE_NONE
               ? name_usual(read, item, (int)rank, file)
               : read_layout(read, layout, file);
}

static fsdp_status check_layouts(reading *read, const items_item *item)
{
    char text[80];
    for (int rank = 0; rank < read->list->world; rank++) {
        if (item->files[rank].path)
            continue;
        snprintf(text, sizeof text, "it states no file of rank %d, and the world size is %d", rank,
                 read->list->world);
        return fail(read, text);
    }
    return FSDP_OK;
}

/* Each file belongs to one item and rank. */
static fsdp_status check_paths(reading *read)
{
    fsdp_name_table paths = {0};
    fsdp_status st = FSDP_OK;
    read->item = NULL;
    for (size_t i = 0; i < read->list->count; i++)
        for (int rank = 0; rank < read->list->world && st == FSDP_OK; rank++) {
            const char *path = read->list->items[i].files[rank].path;
            char shown[100];
            if (fsdp_name_table_find(&paths, path, strlen(path)))
                st = fsdp_fail(read->err, FSDP_ERR_DAMAGED,
                               "%s: two items or ranks have the file '%s'", read->where,
                               fsdp_printable(path, strlen(path), shown, sizeof shown));
            else if (!fsdp_name_table_put(&paths, path, strlen(path), 0))
                st = fsdp_fail_memory(read->err, "the files of a checkpoint");
        }
    fsdp_name_table_release(&paths);
    return st;
}

/* --- versions --------------------------------------------------------------------------------- */

/* Before memory is allocated for each rank. */
static fsdp_status count_layouts(reading *read, fsdp_node layouts)
{
    char text[100];
    if (!is_dict(read, layouts))
        return fail(read, "it has no table of files");
    size_t count = at(read, layouts)->count / 2;
    snprintf(text, sizeof text, "it states the files of %zu ranks, and the world size is %d", count,
             read->list->world);
    return count == (size_t)read->list->world ? keep(read, read->list->world) : fail(read, text);
}

/* layouts: a dict of as many ranks as the world has. */
static fsdp_status add_item(reading *read, fsdp_node key, fsdp_node layouts, items_item **item_out)
{
    const fsdp_pickle_node *text = at(read, key);
    if (text->kind != FSDP_NODE_STR || !fsdp_name_is_key(text->as.text, text->count))
        return fail(read, "the name of an item has other characters than letters, digits, - and _");
    if (items_list_find(read->list, text->as.text, text->count))
        return fail(read, "an item is there twice");
    FSDP_TRY(count_layouts(read, layouts));
    FSDP_TRY(items_list_add(read->list, text->as.text, text->count, item_out, read->err));
    (*item_out)->statements = (rank_statements){.where = read->where, .find = find_statement};
    read->item = (*item_out)->key;
    return FSDP_OK;
}

static fsdp_status read_item(reading *read, fsdp_node key, fsdp_node dict)
{
    items_item *item = NULL;
    fsdp_node layouts = member(read, dict, "rank_to_layout_info");
    FSDP_TRY(add_item(read, key, layouts, &item));
    const fsdp_pickle_node *pairs = at(read, layouts);
    for (uint32_t i = 0; i + 1 < pairs->count; i += 2)
        FSDP_TRY(take_layout(read, item, pairs->as.items[i], pairs->as.items[i + 1]));
    FSDP_TRY(check_layouts(read, item));
    return read_tensors(read, item, member(read, dict, "nested_path_to_metadata"));
}

static fsdp_status read_items(reading *read, fsdp_node table)
{
    const fsdp_pickle_node *pairs = at(read, table);
    for (uint32_t i = 0; i + 1 < pairs->count; i += 2) {
        read->item = NULL;
        FSDP_TRY(read_item(read, pairs->as.items[i], pairs->as.items[i + 1]));
    }
    return FSDP_OK;
}

/* Takes the files of an item from a table by ranks, as version 1.0 has it. */
static fsdp_status take_old_layouts(reading *read, items_item *item, fsdp_node ranks)
{
    const fsdp_pickle_node *pairs = at(read, ranks);
    for (uint32_t i = 0; i + 1 < pairs->count; i += 2) {
        FSDP_TRY(spend(read, 16));
        FSDP_TRY(take_layout(read, item, pairs->as.items[i],
                             member(read, pairs->as.items[i + 1], item->key)));
    }
    return check_layouts(read, item);
}

static fsdp_status read_old_tensor(reading *read, const spelled_path *path, fsdp_node groups,
                                   size_t most, fsdp_node ranks)
{
    fsdp_arena *arena = &read->list->arena;
    const char *key = path->first.data ? path->first.data : "";
    items_item *item = items_list_find(read->list, key, path->first.size);
    if (!fsdp_name_is_key(key, path->first.size))
        return fail(read, "the name of an item has other characters than letters, digits, - and _");
    if (!item) {
        FSDP_TRY(count_layouts(read, ranks));
        FSDP_TRY(items_list_add(read->list, key, path->first.size, &item, read->err));
        item->statements = (rank_statements){.where = read->where, .find = find_statement};
        read->item = item->key;
        FSDP_TRY(take_old_layouts(read, item, ranks));
        FSDP_TRY(keep(read, (int64_t)most));
        item->tensors = fsdp_arena_alloc(arena, most, sizeof *item->tensors);
        if (!item->tensors)
            return fsdp_fail_memory(read->err, "the metadata of a checkpoint");
    }
    read->item = item->key;
    return read_tensor(read, item, path, groups);
}

static fsdp_status read_old_items(reading *read, fsdp_node table, fsdp_node ranks)
{
    const fsdp_pickle_node *pairs = at(read, table);
    for (uint32_t i = 0; i + 1 < pairs->count; i += 2) {
        spelled_path path;
        fsdp_status st = spell(read, pairs->as.items[i], true, &path);
        if (st == FSDP_OK)
            st = read_old_tensor(read, &path, pairs->as.items[i + 1], pairs->count / 2, ranks);
        release_spelled(&path);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

static fsdp_status read_version(reading *read)
{
    fsdp_node root = read->pickle.root, version = member(read, root, "version");
    fsdp_node table = member(read, root, "metadata");
    const fsdp_pickle_node *text = at(read, version);
    int64_t world;
    bool is_old = version == 0 || fsdp_pickle_is_text(&read->pickle, version, "1.0");
    if (!fsdp_pickle_int(&read->pickle, member(read, root, "world_size"), &world) || world < 1 ||
        world > MOST_WORLD || !is_dict(read, table))
        return fail(read, "it has no table of items, or no world size");
    if (!is_old && !fsdp_pickle_is_text(&read->pickle, version, "2.0"))
        return fsdp_fail(read->err, FSDP_ERR_REFUSED,
                         "%s: it is of version '%.*s'; 1.0 and 2.0 are known", read->where,
                         text->kind == FSDP_NODE_STR ? (int)(text->count > 20 ? 20 : text->count)
                                                     : 0,
                         text->kind == FSDP_NODE_STR ? text->as.text : "");
    read->list->world = (int)world;
    FSDP_TRY(is_old
                 ? read_old_items(read, table, member(read, root, "rank_to_layout_info_mappings"))
                 : read_items(read, table));
    return check_paths(read);
}

fsdp_status items_metadata_read(const char *data, size_t size, const char *path, items_list *list,
                                fsdp_error *err)
{
    fsdp_text where = {0};
    fsdp_text_addf(&where, "'%s'", path);
    list->where = where.failed ? NULL : fsdp_arena_strndup(&list->arena, where.data, where.size);
    fsdp_text_release(&where);
    if (!list->where)
        return fsdp_fail_memory(err, path);
    reading read = {.list = list,
                    .where = list->where,
                    .kept_most = (int64_t)size * KEPT_PER_BYTE + KEPT_LEAST,
                    .err = err};
    const fsdp_pickle_options options = {.where = list->where};
    FSDP_TRY(fsdp_pickle_parse(&options, data, size, &read.pickle, NULL, err));
    fsdp_status st = check_plain(&read);
    if (st == FSDP_OK)
        st = read_version(&read);
    fsdp_pickle_release(&read.pickle);
    fsdp_free(read.meshes);
    fsdp_free(read.scratch);
    return st;
}

/*
 * Rank files as a source: a directory of them, or a pattern. See ranks.h for the order of the
 * files.
 */
#include "base/core/mem.h"
#include "base/data/json.h"
#include "base/data/value_internal.h"
#include "formats/ranks/ranks.h"
#include "formats/source.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* After all files were read, they are merged: checks for missing ranks, chooses the interpretation of
 * placements, drops replicas, and fills the source with tensors and values. */

/* === replicas ================================================================================= */

static void describe(const rank_entry *entry, const fsdp_source_chunk *chunk,
                     torch_tensor *tensor_out)
{
    size_t bytes = (size_t)entry->ndim * sizeof(int64_t);
    *tensor_out = (torch_tensor){.dtype = entry->dtype,
                                 .ndim = entry->ndim,
                                 .storage = {.file = chunk->file, .stream = chunk->stream},
                                 .offset = chunk->offset,
                                 .fix = chunk->fix};
    int64_t stride = (int64_t)fsdp_dtype_size(entry->dtype);
    for (int dim = entry->ndim - 1; dim >= 0; dim--) {
        tensor_out->strides[dim] = stride;
        stride *= chunk->len[dim];
    }
    if (bytes > 0) {
        memcpy(tensor_out->shape, chunk->len, bytes);
        if (chunk->strides)
            memcpy(tensor_out->strides, chunk->strides, bytes);
    }
}

/* Compares the begin of two copies of one box. FSDP_ERR_DAMAGED: they differ. */
static fsdp_status rank_same_replica(rank_files *set, const rank_entry *entry, const rank_chunk *a,
                                     const rank_chunk *b, fsdp_error *err)
{
    torch_tensor one, other;
    bool is_same;
    char shown[200];
    if (a->chunk.file < 0 || b->chunk.file < 0)
        return FSDP_OK;
    describe(entry, &a->chunk, &one);
    describe(entry, &b->chunk, &other);
    FSDP_TRY(rank_files_count_compared(set, &one, TORCH_REPLICA, err));
    FSDP_TRY(torch_same_elements(set->source, &one, &other, TORCH_REPLICA, &is_same, err));
    return is_same ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_DAMAGED,
                               "'%s' and '%s' have different values of a part of '%s' that both "
                               "hold" FSDP_TWO_SAVES,
                               fsdp_source_file_path(set->source, (size_t)a->chunk.file),
                               fsdp_source_file_path(set->source, (size_t)b->chunk.file),
                               fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}

/* === merging ================================================================================== */

static const char *shown_name(const rank_entry *entry, char *out, size_t room)
{
    return fsdp_printable(entry->name, entry->name_size, out, room);
}

/* --- missing ranks ------------------------------------------------------------------------------ */

static bool is_present(const rank_files *set, int64_t rank)
{
    size_t lo = 0, hi = set->group->count;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (set->group->files[middle].rank < rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo < set->group->count && set->group->files[lo].rank == rank;
}

static bool holds(const rank_mesh *mesh, int64_t rank)
{
    for (size_t i = 0; i < mesh->count; i++)
        if (mesh->ranks[i] == rank)
            return true;
    return false;
}

/* Finds a rank that replaces a missing one: it is in all meshes of the missing rank. Every
 * tensor of the missing rank is then known, and must be complete without it. */
static fsdp_status find_peer(rank_files *set, int64_t rank, bool *found_out, fsdp_error *err)
{
    *found_out = false;
    for (size_t from = 0, next; from < set->member_count && !*found_out; from = next) {
        bool is_peer = true;
        for (next = from;
             next < set->member_count && set->members[next].rank == set->members[from].rank;
             next++) {
            const rank_mesh *mesh = &set->meshes[set->members[next].mesh];
            FSDP_TRY(rank_files_spend(set, is_peer ? mesh->count : 1, err));
            is_peer = is_peer && holds(mesh, rank);
        }
        *found_out = is_peer;
    }
    return FSDP_OK;
}

static fsdp_status fail_missing(const rank_files *set, int64_t rank, const char *lost,
                                fsdp_error *err)
{
    const char *pattern = set->group->pattern;
    if (set->expected)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': rank %lld of %lld is missing: there is no '%s'%s" FSDP_MISSING_HINT,
                         set->where, (long long)rank, (long long)set->world, set->expected[rank],
                         lost);
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s': rank %lld of %lld is missing: there is no '%.*s%lld%s'%s" FSDP_MISSING_HINT,
        set->where, (long long)rank, (long long)set->world, (int)set->group->stem, pattern,
        (long long)rank, pattern + set->group->stem + 3, lost);
}

/* The first missing rank without a replacement is an error; *missing_out is the first missing
 * one, or -1. */
static fsdp_status look_for_missing(rank_files *set, int64_t *missing_out, fsdp_error *err)
{
    *missing_out = -1;
    for (int64_t rank = 0; rank < set->world; rank++) {
        bool has_peer;
        if (is_present(set, rank))
            continue;
        FSDP_TRY(find_peer(set, rank, &has_peer, err));
        if (!has_peer && !fsdp_source_tolerates(set->source))
            return fail_missing(set, rank, "", err);
        *missing_out = *missing_out < 0 ? rank : *missing_out;
    }
    return FSDP_OK;
}

static fsdp_status settle_world(rank_files *set, fsdp_error *err)
{
    const rank_group *group = set->group;
    int64_t highest = group->files[group->count - 1].rank;
    if (group->world > 0 && (highest >= group->world || set->world > group->world))
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED, "'%s': the %s %d ranks, but the contents say %lld", set->where,
            set->expected ? "metadata and the files state" : "file names say", group->world,
            (long long)(set->world > highest ? set->world : highest + 1));
    if (group->world > set->world)
        set->world = group->world;
    if (highest >= set->world)
        set->world = highest + 1;
    return FSDP_OK;
}

/* --- boxes -------------------------------------------------------------------------------------- */

static int compare_boxes(const void *a, const void *b, void *context)
{
    const rank_chunk *x = a, *y = b;
    size_t bytes = (size_t)((const rank_entry *)context)->ndim * sizeof(int64_t);
    int order = bytes == 0 ? 0 : memcmp(x->chunk.lo, y->chunk.lo, bytes);
    if (order == 0 && bytes > 0)
        order = memcmp(x->chunk.len, y->chunk.len, bytes);
    return order != 0 ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

static bool same_box(const rank_entry *entry, const rank_chunk *a, const rank_chunk *b)
{
    size_t bytes = (size_t)entry->ndim * sizeof(int64_t);
    return bytes == 0 || (memcmp(a->chunk.lo, b->chunk.lo, bytes) == 0 &&
                          memcmp(a->chunk.len, b->chunk.len, bytes) == 0);
}

/* Keeps one chunk of each box, that of the lowest rank; the others must begin alike. */
static fsdp_status drop_replicas(rank_files *set, rank_entry *entry, rank_chunks *chunks,
                                 fsdp_error *err)
{
    size_t kept = 0;
    if (chunks->count > 1)
        qsort_r(chunks->items, chunks->count, sizeof *chunks->items, compare_boxes, entry);
    for (size_t i = 0; i < chunks->count; i++) {
        bool is_replica = kept > 0 &&
                          same_box(entry, &chunks->items[i], &chunks->items[kept - 1]) &&
                          chunks->items[i].rank != chunks->items[kept - 1].rank;
        if (is_replica)
            FSDP_TRY(
                rank_same_replica(set, entry, &chunks->items[kept - 1], &chunks->items[i], err));
        else
            chunks->items[kept++] = chunks->items[i];
    }
    chunks->count = kept;
    return FSDP_OK;
}

/* Chooses the interpretation that matches the sizes of the pieces. */
static fsdp_status choose_reading(rank_files *set, rank_entry *entry, rank_chunks **chunks_out,
                                  fsdp_error *err)
{
    bool ordered = !entry->readings[RANK_ORDERED].fails;
    bool left_to_right = !entry->readings[RANK_LEFT_TO_RIGHT].fails;
    char shown[200];
    *chunks_out = &entry->readings[ordered ? RANK_ORDERED : RANK_LEFT_TO_RIGHT];
    if (ordered && left_to_right && entry->readings_differ)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s': the strided placements of tensor '%s' are ambiguous: the sizes of "
                         "its pieces fit two readings",
                         set->where, shown_name(entry, shown, sizeof shown));
    if (!ordered && !left_to_right)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s': the shapes of the pieces of tensor '%s' do not fit their placements", set->where,
            shown_name(entry, shown, sizeof shown));
    return FSDP_OK;
}

static fsdp_status check_whole(rank_files *set, const rank_entry *entry, const rank_chunks *chunks,
                               int64_t missing, fsdp_error *err)
{
    fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    int64_t count = 0;
    for (size_t i = 0; i < chunks->count; i++) {
        fsdp_box box = fsdp_box_whole(entry->ndim, chunks->items[i].chunk.len);
        if (fsdp_add_overflow(count, fsdp_box_count(&box), &count))
            return FSDP_OK; /* fsdp_source_complete reports it */
    }
    if (count >= fsdp_box_count(&whole))
        return FSDP_OK;
    char shown[200], lost[260];
    snprintf(lost, sizeof lost, ", and no other rank has its part of '%s'",
             shown_name(entry, shown, sizeof shown));
    return fail_missing(set, missing, lost, err);
}

/* Chooses one interpretation, and keeps one chunk for each box. */
static fsdp_status settle_boxes(rank_files *set, int64_t missing, fsdp_error *err)
{
    for (size_t i = 1; i < set->entry_count; i++) {
        rank_entry *entry = &set->entries[i];
        rank_chunks *chunks;
        if (!entry->is_spread)
            continue;
        FSDP_TRY(choose_reading(set, entry, &chunks, err));
        if (chunks != &entry->readings[RANK_ORDERED]) {
            rank_chunks other = entry->readings[RANK_ORDERED];
            entry->readings[RANK_ORDERED] = *chunks;
            *chunks = other;
        }
        FSDP_TRY(drop_replicas(set, entry, &entry->readings[RANK_ORDERED], err));
        if (missing >= 0 && !fsdp_source_tolerates(set->source)) /* reported later */
            FSDP_TRY(check_whole(set, entry, &entry->readings[RANK_ORDERED], missing, err));
    }
    return FSDP_OK;
}

/* --- into the source ---------------------------------------------------------------------------- */

static fsdp_status add_spread(rank_files *set, const rank_entry *entry, fsdp_error *err)
{
    const rank_chunks *chunks = &entry->readings[RANK_ORDERED];
    size_t number;
    FSDP_TRY(fsdp_source_add_tensor(set->source, entry->name, entry->name_size,
                                    &(fsdp_source_shape){entry->dtype, entry->ndim, entry->shape},
                                    &number, err));
    for (size_t i = 0; i < chunks->count; i++)
        FSDP_TRY(fsdp_source_add_chunk(set->source, number, &chunks->items[i].chunk, err));
    return FSDP_OK;
}

static fsdp_status add_tensor(rank_files *set, const rank_entry *entry, const char *name,
                              torch_tensor *tensor, size_t *number_out, fsdp_error *err)
{
    torch_archive into = {.source = set->source, .memory = set->memory};
    return torch_tensor_add(&into, name, entry->name_size, tensor, number_out, err);
}

/* The item as part of a value; ownership of its data moves there. */
static fsdp_status take_item(rank_files *set, const rank_entry *entry, rank_item *item,
                             fsdp_value *value, fsdp_error *err)
{
    size_t number;
    if (!item->is_tensor) {
        *value = item->value;
        item->value = (fsdp_value){0};
        return FSDP_OK;
    }
    FSDP_TRY(add_tensor(set, entry, NULL, item->tensor, &number, err));
    *value = (fsdp_value){.kind = FSDP_VALUE_TENSOR, .as.tensor = number};
    return FSDP_OK;
}

/* {"per_rank": [...]}: ranks with equal data share the first item. */
static fsdp_status add_differing(rank_files *set, rank_entry *entry, fsdp_value *value,
                                 fsdp_error *err)
{
    FSDP_TRY(rank_files_spend(set, (size_t)set->world, err));
    FSDP_TRY(fsdp_value_set_per_rank(value, (size_t)set->world, err));
    fsdp_value *list = fsdp_value_per_rank(value)->as.list.items;
    const fsdp_value *first = &list[entry->items[0].rank];
    for (size_t i = 0; i < entry->item_count; i++) {
        rank_item *item = &entry->items[i];
        FSDP_TRY(item->is_same ? fsdp_value_copy(first, &list[item->rank], err)
                               : take_item(set, entry, item, &list[item->rank], err));
    }
    return FSDP_OK;
}

static fsdp_status add_plain(rank_files *set, rank_entry *entry, fsdp_error *err)
{
    bool differs = false;
    fsdp_value value = {0};
    for (size_t i = 1; i < entry->item_count; i++)
        differs |= !entry->items[i].is_same;
    if (!differs && entry->items[0].is_tensor) {
        size_t number;
        return add_tensor(set, entry, entry->name, entry->items[0].tensor, &number, err);
    }
    fsdp_status st = differs ? add_differing(set, entry, &value, err)
                             : take_item(set, entry, &entry->items[0], &value, err);
    if (st == FSDP_OK)
        st = fsdp_source_add_value(set->source, entry->name, entry->name_size, &value, NULL, err);
    fsdp_value_release(&value);
    return st;
}

/* Adds the second names, after all tensors and values. */
fsdp_status rank_files_add_ties(rank_files *set, fsdp_error *err)
{
    for (size_t i = 0; i < set->tie_count; i++) {
        const rank_entry *entry = &set->entries[set->ties[i].entry];
        const rank_entry *other = &set->entries[set->ties[i].other];
        size_t count = fsdp_source_tensor_count(set->source), at = 0;
        FSDP_TRY(rank_files_spend(set, count, err));
        for (; at < count; at++) {
            const fsdp_source_tensor *tensor = fsdp_source_tensor_at(set->source, at);
            if (!tensor->is_inner && tensor->name_size == other->name_size &&
                memcmp(tensor->name, other->name, other->name_size) == 0)
                break;
        }
        if (at < count)
            FSDP_TRY(fsdp_source_add_alias(set->source, entry->name, entry->name_size, at, err));
    }
    return FSDP_OK;
}

/* Adds everything to the source, after all files were read; model: as in fsdp_source_opts. */
fsdp_status rank_files_merge(rank_files *set, const fsdp_source_model *model, fsdp_error *err)
{
    int64_t missing;
    FSDP_TRY(settle_world(set, err));
    FSDP_TRY(look_for_missing(set, &missing, err));
    FSDP_TRY(settle_boxes(set, missing, err));
    FSDP_TRY(rank_files_take_apart(set, model, err));
    for (size_t i = 1; i < set->entry_count; i++) {
        rank_entry *entry = &set->entries[i];
        if (entry->is_hidden)
            continue;
        fsdp_source_nest(set->source, entry->path, entry->path_count);
        fsdp_status st =
            entry->is_spread ? add_spread(set, entry, err) : add_plain(set, entry, err);
        fsdp_source_nest(set->source, NULL, 0);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

/* === parts ==================================================================================== */

/*
 * Parts of tensor parallelism whose files do not say how they were cut: Meta's consolidated.00.pth, 01, ...
 * Each file has every name; rules below give the dim in which the parts of a name follow each other,
 * and params.json next to the files gives the length that they have together.
 */

static const char parts_pattern[] = "consolidated.{r}.pth", params_name[] = "params.json";

/* True for the pattern of Meta's files. */
static bool rank_parts_are(const char *pattern)
{
    return strcmp(pattern, parts_pattern) == 0;
}

/* --- params.json -------------------------------------------------------------------------------- */

/* vocab_size is none of them: Llama 2 has -1 there, and Code Llama less than its words. */
enum { DIM, HEADS, KV_HEADS, HEAD_DIM, PARAMS };
static const char *const params[PARAMS] = {"dim", "n_heads", "n_kv_heads", "head_dim"};

enum { PARAMS_BYTES = 1 << 20, PARAM_MOST = 1 << 28 };

static fsdp_status read_members(fsdp_json *json, int64_t out[PARAMS], fsdp_error *err)
{
    fsdp_json_members members = {.names = params, .count = PARAMS};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return fsdp_json_finish(json, err);
        if (fsdp_json_peek(json) == FSDP_JSON_NULL) {
            FSDP_TRY(fsdp_json_null(json, err));
            continue;
        }
        FSDP_TRY(fsdp_json_i64(json, &out[which], err));
        if (out[which] < 1 || out[which] > PARAM_MOST)
            return fsdp_json_fail(json, err, "'%s' is %" PRId64 ", which no model has",
                                  params[which], out[which]);
    }
}

/* One file that has no such numbers next to it is read as it is. */
static fsdp_status take_params(const fsdp_json *json, const int64_t found[PARAMS],
                               rank_parts *parts, fsdp_error *err)
{
    int64_t groups = found[KV_HEADS] > 0 ? found[KV_HEADS] : found[HEADS];
    int64_t width = found[HEAD_DIM];
    if (parts->count == 1 && (found[DIM] < 1 || found[HEADS] < 1)) {
        parts->count = 0;
        return FSDP_OK;
    }
    if (found[DIM] < 1 || found[HEADS] < 1)
        return fsdp_json_fail(json, err, "it has no number '%s', by which the files are joined",
                              params[found[DIM] < 1 ? DIM : HEADS]);
    if (width < 1 && found[DIM] % found[HEADS] != 0)
        return fsdp_json_fail(json, err, "'dim' is not a multiple of 'n_heads'");
    width = width < 1 ? found[DIM] / found[HEADS] : width;
    parts->dim = found[DIM];
    parts->queries = found[HEADS] * width;
    parts->keys = groups * width;
    parts->width = width;
    return FSDP_OK;
}

static fsdp_status read_params(const char *text, size_t size, const char *path, rank_parts *parts,
                               fsdp_error *err)
{
    int64_t found[PARAMS] = {0};
    fsdp_json json;
    fsdp_json_init(&json, text, size, path);
    fsdp_status st = read_members(&json, found, err);
    if (st == FSDP_OK)
        st = take_params(&json, found, parts, err);
    fsdp_json_release(&json);
    return st;
}

/* --- the set ------------------------------------------------------------------------------------ */

/* The name of a file that is not there, with as many digits as its neighbours have. */
static void spell_file(const rank_group *group, size_t rank, char *out, size_t room)
{
    const char *rest = group->pattern + group->stem + 3;
    size_t digits = strlen(group->files[0].name) - group->stem - strlen(rest);
    snprintf(out, room, "%.*s%0*zu%s", (int)group->stem, group->pattern, (int)digits, rank, rest);
}

static fsdp_status check_gaps(const rank_files *set, fsdp_error *err)
{
    char name[64];
    for (size_t i = 0; i < set->group->count; i++) {
        if (set->group->files[i].rank == (int)i)
            continue;
        spell_file(set->group, i, name, sizeof name);
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': '%s' is missing; it holds a part of the tensors", set->where, name);
    }
    return FSDP_OK;
}

/* Reads params.json next to the files, and checks that no file before the last is missing. */
static fsdp_status rank_parts_read(const fsdp_probe *probe, const char *directory, rank_files *set,
                                   fsdp_error *err)
{
    char *path = fsdp_path_join(directory, params_name), *text = NULL;
    size_t size;
    set->parts.count = (int64_t)set->group->count;
    fsdp_status st = path ? check_gaps(set, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK && !fsdp_io_exists(probe->io, path))
        st = fsdp_fail(err, FSDP_ERR_DAMAGED,
                       "'%s' is missing; the files are joined by its numbers; copy it from the "
                       "directory that they came from",
                       path);
    if (st == FSDP_OK)
        st = fsdp_source_read_file(probe->io, path, PARAMS_BYTES, &text, &size, err);
    if (st == FSDP_OK)
        st = read_params(text, size, path, &set->parts, err);
    fsdp_free(text);
    fsdp_free(path);
    return st;
}

/* --- the rules ---------------------------------------------------------------------------------- */

typedef enum part_length { ANY, QUERIES, KEYS } part_length;

/* Names by their end, the dim in which they are cut, and the length of that dim in the whole. */
static const struct part_rule {
    const char *end;
    int dim; /* -1: the shape decides */
    part_length length;
} rules[] = {
    {"tok_embeddings.weight", -1, ANY},  {"output.weight", 0, ANY},
    {"attention.wq.weight", 0, QUERIES}, {"attention.wk.weight", 0, KEYS},
    {"attention.wv.weight", 0, KEYS},    {"attention.wo.weight", 1, QUERIES},
    {"feed_forward.w1.weight", 0, ANY},  {"feed_forward.w2.weight", 1, ANY},
    {"feed_forward.w3.weight", 0, ANY},
};

static const struct part_rule *find_rule(const char *name, size_t size)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        size_t n = strlen(rules[i].end);
        if (fsdp_bytes_end(name, size, rules[i].end) && (size == n || name[size - n - 1] == '.'))
            return &rules[i];
    }
    return NULL;
}

/* A part, and its place in the whole. */
typedef struct placed_part {
    rank_files *set;
    const torch_item *found;
    const torch_tensor *tensor;
    int dim;
    int64_t copies; /* files that hold equal parts: of keys with fewer heads than files */
    int64_t shape[FSDP_MAX_DIMS];
} placed_part;

static fsdp_status fail_length(const placed_part *at, int64_t together, int64_t wanted,
                               fsdp_error *err)
{
    const rank_files *set = at->set;
    const char *lines = at->dim == 0 ? "rows" : "columns";
    char shown[200], next[64];
    fsdp_printable(at->found->name, at->found->name_size, shown, sizeof shown);
    spell_file(set->group, set->group->count, next, sizeof next);
    if (together < wanted)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': '%s' is missing: the files before it hold %" PRId64
                         " of the %" PRId64 " %s that '%s' has according to %s",
                         set->where, next, together, wanted, lines, shown, params_name);
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': '%s' has %" PRId64 " %s according to %s, but the files hold %" PRId64,
                     set->where, shown, wanted, lines, params_name, together);
}

/* One file is whole, also where params.json has other numbers, unless it has an equal part of them. */
static fsdp_status check_length(const placed_part *at, int64_t together, int64_t wanted,
                                fsdp_error *err)
{
    bool is_part = together < wanted && wanted % together == 0;
    bool is_good = together == wanted || (at->set->parts.count == 1 && !is_part);
    return is_good ? FSDP_OK : fail_length(at, together, wanted, err);
}

/* Embeddings are cut in the dim of the model up to Llama 2, and by words since Llama 3. */
static fsdp_status choose_dim(placed_part *at, fsdp_error *err)
{
    const rank_parts *parts = &at->set->parts;
    int64_t columns = at->tensor->shape[1];
    at->dim = columns == parts->dim ? 0 : 1;
    return at->dim == 0 ? FSDP_OK : check_length(at, columns * parts->count, parts->dim, err);
}

static bool is_length(int64_t length)
{
    return length > 0 && length <= PARAM_MOST;
}

/* Heads of keys that are fewer than the files lie in several of them. */
static fsdp_status share_keys(placed_part *at, int64_t *together, fsdp_error *err)
{
    const rank_parts *parts = &at->set->parts;
    int64_t groups = parts->keys / parts->width;
    char shown[200], next[64];
    if (at->tensor->shape[0] != parts->width || parts->count <= groups)
        return FSDP_OK;
    spell_file(at->set->group, at->set->group->count, next, sizeof next);
    if (parts->count % groups != 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': '%s' is missing: %" PRId64 " files cannot share the %" PRId64
                         " heads that '%s' has according to %s",
                         at->set->where, next, parts->count, groups,
                         fsdp_printable(at->found->name, at->found->name_size, shown, sizeof shown),
                         params_name);
    at->copies = parts->count / groups;
    *together /= at->copies;
    return FSDP_OK;
}

static fsdp_status place_part(placed_part *at, const struct part_rule *rule, fsdp_error *err)
{
    const rank_parts *parts = &at->set->parts;
    const torch_tensor *tensor = at->tensor;
    int64_t wanted = rule->length == QUERIES ? parts->queries
                     : rule->length == KEYS  ? parts->keys
                                             : 0;
    int64_t together;
    char shown[200];
    at->copies = 1;
    if (tensor->ndim != 2 || tensor->data || !is_length(tensor->shape[0]) ||
        !is_length(tensor->shape[1]))
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED, "'%s': '%s' is not a part of a matrix", at->set->where,
            fsdp_printable(at->found->name, at->found->name_size, shown, sizeof shown));
    memcpy(at->shape, tensor->shape, 2 * sizeof *at->shape);
    at->dim = rule->dim;
    if (rule->dim < 0)
        FSDP_TRY(choose_dim(at, err));
    together = at->shape[at->dim] * parts->count;
    if (rule->length == KEYS)
        FSDP_TRY(share_keys(at, &together, err));
    if (wanted > 0)
        FSDP_TRY(check_length(at, together, wanted, err));
    at->shape[at->dim] = together;
    return FSDP_OK;
}

static fsdp_status add_part(const placed_part *at, fsdp_error *err)
{
    rank_files *set = at->set;
    const torch_item *found = at->found;
    int64_t lo[FSDP_MAX_DIMS] = {0};
    fsdp_source_chunk chunk;
    rank_entry *entry;
    FSDP_TRY(rank_files_entry(set, found->name, found->name_size, &entry, err));
    FSDP_TRY(rank_files_spread(set, entry, at->tensor->dtype, 2, at->shape, err));
    entry->readings[RANK_LEFT_TO_RIGHT].fails = true;
    lo[at->dim] = set->rank / at->copies * at->tensor->shape[at->dim];
    torch_tensor_chunk(at->tensor, lo, &chunk);
    return rank_files_add_chunk(set, &entry->readings[RANK_ORDERED], set->rank, 2, &chunk, err);
}

/* A tensor without a rule is whole in each file, and equal in all. */
static fsdp_status add_whole(rank_files *set, const torch_item *found, torch_tensor *tensor,
                             fsdp_error *err)
{
    char shown[200];
    FSDP_TRY(rank_files_tensor(set, found, tensor, err));
    const uint64_t *number = fsdp_name_table_find(&set->names, found->name, found->name_size);
    const rank_entry *entry = number ? &set->entries[*number] : NULL;
    if (!entry || entry->item_count < 2 || entry->items[entry->item_count - 1].is_same)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_REFUSED,
                     "'%s': '%s' differs between '%s' and '%s', and no rule says how its parts are "
                     "joined",
                     set->where, fsdp_printable(found->name, found->name_size, shown, sizeof shown),
                     set->group->files[0].name, set->group->files[set->rank].name);
}

/* In place of rank_files_tensor: the place of a part in its tensor. */
static fsdp_status rank_files_part(void *context, const torch_item *found, torch_tensor *tensor,
                                   fsdp_error *err)
{
    placed_part at = {.set = context, .found = found, .tensor = tensor};
    const struct part_rule *rule = find_rule(found->name, found->name_size);
    if (!rule)
        return add_whole(context, found, tensor, err);
    FSDP_TRY(place_part(&at, rule, err));
    return add_part(&at, err);
}

/* === the format =============================================================================== */

enum { BITS_OF_SET = 40, HEAD_BYTES = 64 << 10, PATTERNS_SHOWN = 6 };

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool fsdp_source_is_pattern(const char *path)
{
    return strstr(last_part(path), "{r}") != NULL;
}

/* --- recognition -------------------------------------------------------------------------------- */

static bool holds_word(const char *data, size_t size, const char *word)
{
    return memmem(data, size, word, strlen(word)) != NULL;
}

/* True for a torch.save file whose name states a rank, or whose pickle mentions distributed
 * tensors. */
static bool is_rank_file(fsdp_io *io, const char *path, bool says_rank)
{
    fsdp_file *file = NULL;
    int64_t size = 0;
    char *head = fsdp_alloc(HEAD_BYTES, 1);
    fsdp_file_info info;
    bool is_ours = head && io->ops->info(io, path, &info) == 0 && info.kind == FSDP_FILE_REGULAR &&
                   fsdp_io_open(io, path, FSDP_IO_READ, &file, NULL) == FSDP_OK &&
                   file->ops->size(file, &size) == 0;
    size_t read = size < HEAD_BYTES ? (size_t)size : HEAD_BYTES;
    if (is_ours && fsdp_io_read(file, path, head, read, 0, NULL) == FSDP_OK) {
        is_ours = (read >= 4 && memcmp(head, "PK\3\4", 4) == 0) ||
                  torch_legacy_begins((const uint8_t *)head, read);
        is_ours = is_ours && (says_rank || holds_word(head, read, "DTensor") ||
                              holds_word(head, read, "ShardedTensor"));
    }
    if (file)
        (void)fsdp_io_close(&file, path, NULL); /* read only: a failed close loses nothing */
    fsdp_free(head);
    return is_ours;
}

/* DeepSpeed numbers its shards by rank, too; they have another format. */
static bool is_deepspeed(const rank_group *group)
{
    return strstr(group->pattern, "mp_rank_") || strstr(group->pattern, "zero_pp_rank_");
}

static bool is_set(const fsdp_probe *probe, const rank_group *group)
{
    if (is_deepspeed(group))
        return false;
    char *path = fsdp_path_join(probe->path, group->files[0].name);
    bool is_ours = path && is_rank_file(probe->io, path, group->says_rank);
    fsdp_free(path);
    return is_ours;
}

/* Keeps the groups that are rank files. */
static void keep_sets(const fsdp_probe *probe, rank_names *names)
{
    size_t kept = 0;
    for (size_t i = 0; i < names->count; i++) {
        rank_group group = names->groups[i];
        if (is_set(probe, &group))
            names->groups[kept++] = group;
        else
            fsdp_free(group.files);
    }
    names->count = kept;
}

static int bid(const fsdp_probe *probe)
{
    rank_names names;
    if (!probe->is_directory ||
        rank_names_group(probe->names, probe->name_count, NULL, &names, NULL) != FSDP_OK)
        return 0;
    keep_sets(probe, &names);
    bool is_ours = names.count > 0;
    rank_names_release(&names);
    return is_ours ? BITS_OF_SET : 0;
}

/* --- choosing a group --------------------------------------------------------------------------- */

static fsdp_status fail_several(const fsdp_probe *probe, const char *directory,
                                const rank_names *names, fsdp_error *err)
{
    fsdp_text text = {0};
    for (size_t i = 0; i < names->count && i < PATTERNS_SHOWN; i++)
        fsdp_text_addf(&text, "%s '%s%s%s'", i > 0 ? "," : "", directory,
                       *directory != '\0' && directory[strlen(directory) - 1] != '/' ? "/" : "",
                       names->groups[i].pattern);
    if (names->count > PATTERNS_SHOWN)
        fsdp_text_addf(&text, " and %zu more", names->count - PATTERNS_SHOWN);
    fsdp_status st =
        text.failed
            ? fsdp_fail_memory(err, probe->path)
            : fsdp_fail(err, FSDP_ERR_USAGE,
                        "'%s' matches %zu sets of rank files; give the pattern of one of them:%s",
                        probe->path, names->count, text.data);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status check_group(const rank_group *group, fsdp_error *err)
{
    for (size_t i = 1; i < group->count; i++)
        if (group->files[i].rank == group->files[i - 1].rank)
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' and '%s' both belong to rank %d",
                             group->files[i - 1].name, group->files[i].name, group->files[i].rank);
    return FSDP_OK;
}

static fsdp_status find_set(const fsdp_probe *probe, const char *directory, rank_names *names,
                            fsdp_error *err)
{
    const char *pattern = probe->is_directory ? NULL : last_part(probe->path);
    FSDP_TRY(rank_names_group(probe->names, probe->name_count, pattern, names, err));
    if (!pattern)
        keep_sets(probe, names);
    fsdp_status st = FSDP_OK;
    if (names->count == 0)
        st = fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                       pattern ? "no file has a name that matches '%s'"
                               : "'%s' holds no set of rank files",
                       probe->path);
    else if (names->count > 1)
        st = fail_several(probe, directory, names, err);
    else
        st = check_group(&names->groups[0], err);
    if (st != FSDP_OK)
        rank_names_release(names);
    return st;
}

/* --- the source --------------------------------------------------------------------------------- */

typedef struct ranks_state {
    fsdp_source *source;
    torch_memory *memory;
} ranks_state;

static fsdp_status read_tensor(void *context, size_t tensor, const fsdp_box *box, void *data,
                               fsdp_error *err)
{
    const ranks_state *state = context;
    return torch_memory_read(state->memory, state->source, tensor, box, data, err);
}

static void close_state(void *context)
{
    ranks_state *state = context;
    torch_memory_close(state->memory);
    fsdp_free(state);
}

static const fsdp_source_ops ranks_ops = {.read = read_tensor, .close = close_state};

fsdp_status rank_files_create(const fsdp_probe *probe, const char *format, rank_files *set,
                              fsdp_error *err)
{
    ranks_state *state = fsdp_alloc(1, sizeof *state);
    if (!state)
        return fsdp_fail_memory(err, probe->path);
    fsdp_status st = torch_memory_create(&state->memory, err);
    if (st == FSDP_OK)
        st = fsdp_source_create(probe->io, probe->path, format, &set->source, err);
    if (st != FSDP_OK) {
        close_state(state);
        return st;
    }
    state->source = set->source;
    fsdp_source_tolerate(set->source, probe->opts);
    set->memory = state->memory;
    fsdp_source_set_ops(set->source, &ranks_ops, state);
    return FSDP_OK;
}

typedef fsdp_status (*take_tensor)(void *, const torch_item *, torch_tensor *, fsdp_error *);

static take_tensor take_of(const rank_files *set)
{
    take_tensor own = set->take ? set->take : rank_files_tensor;
    return set->parts.count > 0 ? rank_files_part : own;
}

static fsdp_status walk_file(rank_files *set, int file, fsdp_error *err)
{
    const torch_visitor visitor = {.context = set,
                                   .tensor = take_of(set),
                                   .distributed = rank_files_distributed,
                                   .object = rank_files_object,
                                   .value = rank_files_value};
    torch_archive archive;
    const char *path = set->path;
    fsdp_text where = {0};
    fsdp_text_addf(&where, "'%s'", path);
    if (where.failed)
        return fsdp_fail_memory(err, path);
    torch_opening opening = {.source = set->source,
                             .memory = set->memory,
                             .file = file,
                             .stream = FSDP_NO_STREAM,
                             .where = where.data};
    fsdp_status st = torch_file_open(&opening, &archive, err);
    if (st == FSDP_OK)
        st = torch_walk(&archive, &visitor, err);
    torch_archive_release(&archive);
    fsdp_text_release(&where);
    return st;
}

fsdp_status rank_files_begin(rank_files *set, const char *directory, const rank_file *of,
                             bool beneath, int *file_out, fsdp_error *err)
{
    char *path = fsdp_path_join(directory, of->name);
    if (!path)
        return fsdp_fail_memory(err, of->name);
    set->rank = of->rank;
    set->seen_count = 0;
    set->is_placed = false;
    fsdp_status st = fsdp_source_add_file(set->source, path, beneath, file_out, err);
    if (st == FSDP_OK) {
        set->bytes += fsdp_source_file_size(set->source, (size_t)*file_out);
        set->path = fsdp_source_file_path(set->source, (size_t)*file_out);
    }
    fsdp_free(path);
    return st;
}

fsdp_status rank_files_read(rank_files *set, const char *directory, const rank_file *of,
                            bool beneath, fsdp_error *err)
{
    int file;
    FSDP_TRY(rank_files_begin(set, directory, of, beneath, &file, err));
    return walk_file(set, file, err);
}

static void release_items(rank_entry *entry)
{
    for (size_t i = 0; i < entry->item_count; i++) {
        if (entry->items[i].tensor)
            torch_tensor_release(entry->items[i].tensor);
        fsdp_free(entry->items[i].tensor);
        fsdp_value_release(&entry->items[i].value);
    }
    fsdp_free(entry->items);
    entry->items = NULL;
    entry->item_count = entry->item_room = 0;
}

void rank_files_release(rank_files *set)
{
    for (size_t i = 1; i < set->entry_count; i++) {
        for (int reading = 0; reading < RANK_READINGS; reading++)
            fsdp_free(set->entries[i].readings[reading].items);
        release_items(&set->entries[i]);
    }
    for (size_t i = 0; i < set->mesh_count; i++)
        fsdp_free(set->meshes[i].ranks);
    fsdp_free(set->entries);
    fsdp_free(set->meshes);
    fsdp_free(set->members);
    fsdp_free(set->seen);
    fsdp_free(set->flats);
    fsdp_free(set->ties);
    fsdp_name_table_release(&set->names);
    fsdp_facts_release(&set->facts);
    fsdp_arena_release(&set->arena);
}

static fsdp_status read_set(const fsdp_probe *probe, const char *directory, rank_files *set,
                            fsdp_error *err)
{
    FSDP_TRY(rank_files_create(probe, "ranks", set, err));
    fsdp_status st =
        rank_parts_are(set->group->pattern) ? rank_parts_read(probe, directory, set, err) : FSDP_OK;
    for (size_t i = 0; i < set->group->count && st == FSDP_OK; i++)
        st = rank_files_read(set, directory, &set->group->files[i], probe->is_directory, err);
    if (st == FSDP_OK)
        st = rank_files_merge(set, probe->opts ? probe->opts->model : NULL, err);
    if (st == FSDP_OK)
        st = rank_files_add_ties(set, err);
    if (st == FSDP_OK)
        st = fsdp_source_complete(set->source, err);
    if (st != FSDP_OK) {
        fsdp_source_close(set->source);
        set->source = NULL;
    }
    return st;
}

static fsdp_status open_set(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    size_t stem =
        probe->is_directory ? strlen(probe->path) : (size_t)(last_part(probe->path) - probe->path);
    char *directory = stem > 0 ? fsdp_strndup(probe->path, stem) : fsdp_strndup(".", 1);
    rank_names names;
    *source_out = NULL;
    if (!directory)
        return fsdp_fail_memory(err, probe->path);
    fsdp_status st = find_set(probe, stem > 0 ? directory : "", &names, err);
    if (st == FSDP_OK) {
        rank_files set = {.where = probe->path, .group = &names.groups[0]};
        st = read_set(probe, directory, &set, err);
        *source_out = set.source;
        rank_files_release(&set);
        rank_names_release(&names);
    }
    fsdp_free(directory);
    return st;
}

const fsdp_format fsdp_format_ranks = {
    .name = "ranks",
    .reads_directory = true,
    .caps = {.tuples = true, .patterns = true, .takes_model = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_set}};

/*
 * Merges the files after all were read: checks for missing ranks, chooses the interpretation of
 * placements, drops replicas, and fills the source with tensors and values. See ranks.h.
 */
#include "formats/ranks/ranks.h"
#include "base/data/value_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the names say %d ranks, the contents %lld",
                         set->where, group->world,
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
                         "'%s': the strided placements of tensor '%s' have two readings, and the "
                         "sizes of its pieces fit both",
                         set->where, shown_name(entry, shown, sizeof shown));
    if (!ordered && !left_to_right)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': the pieces of tensor '%s' do not have the shapes that their "
                         "placements give them",
                         set->where, shown_name(entry, shown, sizeof shown));
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

fsdp_status rank_files_merge(rank_files *set, const fsdp_source_model *model, fsdp_error *err)
{
    int64_t missing;
    FSDP_TRY(settle_world(set, err));
    FSDP_TRY(look_for_missing(set, &missing, err));
    FSDP_TRY(settle_boxes(set, missing, err));
    FSDP_TRY(rank_files_like(set, model, err));
    fsdp_status apart = rank_files_take_apart(set, err);
    char shown[200];
    if (apart == FSDP_ERR_DAMAGED && set->unknown != 0)
        fsdp_error_prefix(err, "without the shape of '%s', which the model of --like lacks",
                          shown_name(&set->entries[set->unknown], shown, sizeof shown));
    FSDP_TRY(apart);
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
    return rank_files_add_ties(set, err);
}

/*
 * FSDP1's local state dicts with use_orig_params, saved without FlatParamShardMetadata: each rank has a
 * 1-D piece of the flat tensor under each parameter's name, and no shape. With the shapes of a model that
 * was named, what the metadata would say is computed from the lengths of the pieces. See ranks.h.
 */
#include "formats/ranks/ranks.h"

#include "base/data/box_internal.h"

#include <stdlib.h>
#include <string.h>

static const char flat_name[] = "_flat_param";
static const char unit_place[] = "shard_metadata.";

/* The entry of a parameter, and the flat tensor that holds it. */
typedef struct flat_member {
    size_t flat, entry;
} flat_member;

typedef struct rank_range {
    int rank;
    int64_t lo;
} rank_range;

/* A unit: its flat tensor, the ranks in the order of their ranges, and the parameters in it. */
typedef struct like_unit {
    size_t flat;
    rank_range *ranges;
    size_t range_count;
    rank_flat_param *params; /* first, last: not set */
    size_t *entries;         /* of the parameters */
    size_t count;
    size_t unknown; /* an entry that the model lacks; 0: none */
} like_unit;

typedef struct like_work {
    rank_files *set;
    const fsdp_source_model *model;
    size_t above; /* bytes of the key above the model's names: "model." */
} like_work;

static const char *shown(const rank_entry *entry, char *out, size_t room)
{
    return fsdp_printable(entry->name, entry->name_size, out, room);
}

/* --- members of units ---------------------------------------------------------------------------- */

static bool is_flat(const rank_entry *entry)
{
    const size_t last = sizeof flat_name - 1;
    size_t size = entry->name_size;
    return entry->is_spread && entry->ndim == 1 && size >= last &&
           memcmp(entry->name + size - last, flat_name, last) == 0 &&
           (size == last || entry->name[size - last - 1] == '.');
}

/* Finds the flat tensor of the innermost unit that the name lies in; 0: none. */
static fsdp_status find_flat(rank_files *set, const rank_entry *entry, fsdp_text *name,
                             size_t *flat_out, fsdp_error *err)
{
    *flat_out = 0;
    for (size_t at = entry->name_size; at-- > 0 && *flat_out == 0;) {
        if (at > 0 && entry->name[at - 1] != '.')
            continue;
        FSDP_TRY(rank_files_spend(set, at / 16 + 1, err));
        name->size = 0;
        fsdp_text_add(name, entry->name, at);
        fsdp_text_add(name, flat_name, sizeof flat_name - 1);
        if (name->failed)
            return fsdp_fail_memory(err, "a name");
        const uint64_t *number = fsdp_name_table_find(&set->names, name->data, name->size);
        if (number && is_flat(&set->entries[*number]))
            *flat_out = (size_t)*number;
    }
    return FSDP_OK;
}

static fsdp_status list_members(rank_files *set, flat_member *members, size_t *count_out,
                                fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 1; i < set->entry_count && st == FSDP_OK; i++) {
        size_t flat;
        if (set->entries[i].is_spread || set->entries[i].item_count == 0)
            continue;
        st = find_flat(set, &set->entries[i], &name, &flat, err);
        if (st == FSDP_OK && flat != 0)
            members[(*count_out)++] = (flat_member){flat, i};
    }
    fsdp_text_release(&name);
    return st;
}

static int compare_members(const void *a, const void *b)
{
    const flat_member *x = a, *y = b;
    int order = (x->flat > y->flat) - (x->flat < y->flat);
    return order != 0 ? order : (x->entry > y->entry) - (x->entry < y->entry);
}

/* --- the model's shapes -------------------------------------------------------------------------- */

static bool find_shape(const like_work *work, const rank_entry *entry, fsdp_source_shape *out)
{
    return entry->name_size > work->above &&
           work->model->find(work->model->context, entry->name + work->above,
                             entry->name_size - work->above, out);
}

/* Finds the key above the model's names: the shortest one below which the model has a member. */
static fsdp_status find_key(like_work *work, const flat_member *members, size_t count,
                            fsdp_error *err)
{
    fsdp_source_shape shape;
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < count && best > 0; i++) {
        const rank_entry *entry = &work->set->entries[members[i].entry];
        for (size_t at = 0; at < entry->name_size && at < best; at++) {
            if (at > 0 && entry->name[at - 1] != '.')
                continue;
            FSDP_TRY(rank_files_spend(work->set, entry->name_size / 16 + 1, err));
            work->above = at;
            if (find_shape(work, entry, &shape))
                best = at;
        }
    }
    if (best == SIZE_MAX)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "--like: '%s' has no tensor with a name of '%s'; name the model that was saved",
            work->model->path, work->set->where);
    work->above = best;
    return FSDP_OK;
}

/* --- pieces -------------------------------------------------------------------------------------- */

/* The tensor of the rank, NULL when it has none. An item that equals the first has its tensor. */
static const torch_tensor *tensor_of(const rank_entry *entry, int rank)
{
    size_t lo = 0, hi = entry->item_count;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (entry->items[middle].rank < rank)
            lo = middle + 1;
        else
            hi = middle;
    }
    if (lo == entry->item_count || entry->items[lo].rank != rank)
        return NULL;
    return entry->items[entry->items[lo].is_same ? 0 : lo].tensor;
}

static int64_t piece_of(const rank_entry *entry, int rank)
{
    const torch_tensor *tensor = tensor_of(entry, rank);
    return tensor ? tensor->shape[0] : 0;
}

static bool are_pieces(const rank_entry *entry, fsdp_dtype dtype)
{
    for (size_t i = 0; i < entry->item_count; i++) {
        const rank_item *item = &entry->items[i];
        const torch_tensor *tensor = item->tensor;
        if (!item->is_same && (!item->is_tensor || tensor->ndim != 1 || tensor->dtype != dtype))
            return false;
    }
    return true;
}

/* A buffer is whole on every rank. */
static bool are_whole(const rank_entry *entry, const fsdp_source_shape *shape)
{
    size_t bytes = (size_t)shape->ndim * sizeof *shape->shape;
    for (size_t i = 0; i < entry->item_count; i++) {
        const torch_tensor *tensor = entry->items[i].tensor;
        if (!entry->items[i].is_same &&
            (!tensor || tensor->ndim != shape->ndim ||
             (bytes > 0 && memcmp(tensor->shape, shape->shape, bytes) != 0)))
            return false;
    }
    return true;
}

static bool all_same(const rank_entry *entry)
{
    bool is_same = true;
    for (size_t i = 1; i < entry->item_count; i++)
        is_same &= entry->items[i].is_same;
    return is_same;
}

static fsdp_status sum_pieces(rank_files *set, const like_unit *unit, const rank_entry *entry,
                              int64_t *sum_out, fsdp_error *err)
{
    *sum_out = 0;
    int64_t all = 0;
    FSDP_TRY(rank_files_spend(set, unit->range_count + entry->item_count, err));
    bool fits = true;
    for (size_t i = 0; i < unit->range_count; i++)
        fits &= !fsdp_add_overflow(*sum_out, piece_of(entry, unit->ranges[i].rank), sum_out);
    for (size_t i = 0; i < entry->item_count; i++)
        fits &= !fsdp_add_overflow(all, piece_of(entry, entry->items[i].rank), &all);
    char name[200];
    return fits && all == *sum_out ? FSDP_OK
                                   : fsdp_fail(err, FSDP_ERR_DAMAGED,
                                               "'%s': a rank has a piece of '%s' but no part of "
                                               "the flat parameter" FSDP_TWO_SAVES,
                                               set->where, shown(entry, name, sizeof name));
}

static fsdp_status fail_count(const like_work *work, const rank_entry *entry, int64_t found,
                              int64_t wanted, fsdp_error *err)
{
    char name[200];
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s': the pieces of '%s' have %lld elements together, and in '%s' it has "
        "%lld: a rank's file is from a different save, or --like names a different model",
        work->set->where, shown(entry, name, sizeof name), (long long)found, work->model->path,
        (long long)wanted);
}

static fsdp_status fail_unknown(const like_work *work, const rank_entry *entry, fsdp_error *err)
{
    char name[200];
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "--like: '%s' has no tensor '%s', of which the ranks of '%s' have pieces; "
                     "name the model that was saved",
                     work->model->path, shown(entry, name, sizeof name), work->set->where);
}

/* An entry of the unit that the model lacks: a buffer, or a parameter without a shape. */
static fsdp_status note_unknown(const like_work *work, like_unit *unit, size_t number,
                                bool has_pieces, fsdp_error *err)
{
    const rank_entry *entry = &work->set->entries[number];
    if (!has_pieces || !all_same(entry))
        return has_pieces ? fail_unknown(work, entry, err) : FSDP_OK;
    unit->unknown = unit->unknown == 0 ? number : unit->unknown;
    work->set->unknown = work->set->unknown == 0 ? number : work->set->unknown;
    return FSDP_OK;
}

/* --- units --------------------------------------------------------------------------------------- */

static int compare_ranges(const void *a, const void *b)
{
    const rank_range *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

static fsdp_status list_ranges(rank_files *set, like_unit *unit, fsdp_error *err)
{
    const rank_chunks *chunks = &set->entries[unit->flat].readings[RANK_ORDERED];
    unit->ranges = fsdp_alloc(chunks->count, sizeof *unit->ranges);
    if (!unit->ranges)
        return fsdp_fail_memory(err, "flat parameters");
    for (size_t i = 0; i < chunks->count; i++)
        unit->ranges[i] = (rank_range){chunks->items[i].rank, chunks->items[i].chunk.lo[0]};
    unit->range_count = chunks->count;
    if (chunks->count > 0)
        qsort(unit->ranges, chunks->count, sizeof *unit->ranges, compare_ranges);
    return FSDP_OK;
}

/* A parameter that another of the unit shares its elements with is in the flat tensor once. */
static fsdp_status find_tie(rank_files *set, const like_unit *unit, const rank_entry *entry,
                            size_t *other_out, fsdp_error *err)
{
    const torch_tensor *mine = NULL;
    int rank = -1;
    *other_out = 0;
    for (size_t i = 0; i < unit->range_count && (!mine || mine->shape[0] == 0); i++) {
        rank = unit->ranges[i].rank;
        mine = tensor_of(entry, rank);
    }
    FSDP_TRY(rank_files_spend(set, unit->range_count + unit->count, err));
    for (size_t i = 0; i < unit->count && mine && mine->shape[0] > 0 && *other_out == 0; i++) {
        const torch_tensor *other = tensor_of(&set->entries[unit->entries[i]], rank);
        if (other && other->shape[0] == mine->shape[0] && other->offset == mine->offset &&
            other->storage.file == mine->storage.file && !mine->data &&
            other->storage.stream == mine->storage.stream)
            *other_out = unit->entries[i];
    }
    return FSDP_OK;
}

static fsdp_status add_tie(rank_files *set, size_t entry, size_t other, fsdp_error *err)
{
    if (!fsdp_grow(&set->ties, &set->tie_room, set->tie_count + 1, sizeof *set->ties))
        return fsdp_fail_memory(err, "flat parameters");
    set->ties[set->tie_count++] = (rank_tie){entry, other};
    set->entries[entry].is_hidden = true;
    return FSDP_OK;
}

/* A parameter without elements has no place in the flat tensor. */
static fsdp_status add_empty(rank_files *set, size_t number, fsdp_dtype dtype,
                             const fsdp_source_shape *shape, fsdp_error *err)
{
    const rank_entry *entry = &set->entries[number];
    size_t made;
    FSDP_TRY(rank_files_new_entry(set, entry->name, entry->name_size, &made, err));
    set->entries[number].is_hidden = true;
    return rank_files_spread(set, &set->entries[made], dtype, shape->ndim, shape->shape, err);
}

/* Adds the parameter to the unit, when the entry is one. */
static fsdp_status add_param(const like_work *work, like_unit *unit, size_t number, fsdp_error *err)
{
    rank_files *set = work->set;
    const rank_entry *entry = &set->entries[number], *flat = &set->entries[unit->flat];
    fsdp_source_shape shape;
    bool has_pieces = are_pieces(entry, flat->dtype);
    int64_t sum;
    size_t tied = 0;
    if (has_pieces)
        FSDP_TRY(find_tie(set, unit, entry, &tied, err));
    if (tied != 0)
        return add_tie(set, number, tied, err);
    if (!find_shape(work, entry, &shape))
        return note_unknown(work, unit, number, has_pieces, err);
    fsdp_box whole = fsdp_box_whole(shape.ndim, shape.shape);
    int64_t count = fsdp_box_count(&whole);
    if (!has_pieces)
        return are_whole(entry, &shape) ? FSDP_OK : fail_count(work, entry, 0, count, err);
    FSDP_TRY(sum_pieces(set, unit, entry, &sum, err));
    if (sum != count && are_whole(entry, &shape))
        return FSDP_OK;
    if (sum != count)
        return fail_count(work, entry, sum, count, err);
    if (count == 0)
        return add_empty(set, number, flat->dtype, &shape, err);
    size_t prefix = flat->name_size - (sizeof flat_name - 1);
    rank_flat_param *param = &unit->params[unit->count];
    unit->entries[unit->count++] = number;
    *param = (rank_flat_param){.name = entry->name + prefix,
                               .name_size = entry->name_size - prefix,
                               .ndim = shape.ndim,
                               .count = count};
    memcpy(param->shape, shape.shape, (size_t)shape.ndim * sizeof *shape.shape);
    return FSDP_OK;
}

/* Adds the metadata that the rank lacks. params->first is the first element of each parameter that no
 * earlier rank has. */
static fsdp_status add_flat(rank_files *set, const like_unit *unit, int rank, const char *name,
                            size_t name_size, fsdp_error *err)
{
    size_t count = 0;
    FSDP_TRY(rank_files_spend(set, unit->count, err));
    for (size_t i = 0; i < unit->count; i++)
        count += piece_of(&set->entries[unit->entries[i]], rank) > 0;
    rank_flat flat = {.rank = rank,
                      .name = name,
                      .name_size = name_size,
                      .params = fsdp_arena_alloc(&set->arena, count, sizeof *flat.params)};
    if (!flat.params ||
        !fsdp_grow(&set->flats, &set->flat_room, set->flat_count + 1, sizeof *set->flats))
        return fsdp_fail_memory(err, "flat parameters");
    for (size_t i = 0; i < unit->count; i++) {
        int64_t length = piece_of(&set->entries[unit->entries[i]], rank);
        if (length == 0)
            continue;
        rank_flat_param *param = &flat.params[flat.param_count++];
        *param = unit->params[i];
        param->last = param->first + length - 1;
        unit->params[i].first += length;
    }
    set->flats[set->flat_count++] = flat;
    return FSDP_OK;
}

static fsdp_status add_flats(rank_files *set, const like_unit *unit, fsdp_error *err)
{
    const rank_entry *flat = &set->entries[unit->flat];
    size_t place = sizeof unit_place - 1, size = flat->name_size - (sizeof flat_name - 1);
    size -= size > 0; /* the dot */
    char *name = fsdp_arena_alloc(&set->arena, place + size + 1, 1);
    if (!name)
        return fsdp_fail_memory(err, "a name");
    memcpy(name, unit_place, place);
    memcpy(name + place, flat->name, size);
    for (size_t i = 0; i < unit->range_count; i++)
        FSDP_TRY(add_flat(set, unit, unit->ranges[i].rank, name, place + size, err));
    return FSDP_OK;
}

static fsdp_status add_unit(const like_work *work, const flat_member *members, size_t count,
                            fsdp_error *err)
{
    like_unit unit = {.flat = members[0].flat,
                      .params = fsdp_alloc(count, sizeof *unit.params),
                      .entries = fsdp_alloc(count, sizeof *unit.entries)};
    fsdp_status st = unit.params && unit.entries ? list_ranges(work->set, &unit, err)
                                                 : fsdp_fail_memory(err, "flat parameters");
    for (size_t i = 0; i < count && st == FSDP_OK; i++)
        st = add_param(work, &unit, members[i].entry, err);
    if (st == FSDP_OK && unit.count == 0 && unit.unknown != 0)
        st = fail_unknown(work, &work->set->entries[unit.unknown], err);
    if (st == FSDP_OK && unit.count > 0)
        st = add_flats(work->set, &unit, err);
    fsdp_free(unit.ranges);
    fsdp_free(unit.params);
    fsdp_free(unit.entries);
    return st;
}

static fsdp_status add_units(like_work *work, const flat_member *members, size_t count,
                             fsdp_error *err)
{
    fsdp_source_shape shape;
    FSDP_TRY(find_key(work, members, count, err));
    for (size_t i = 1; i < work->set->entry_count; i++) /* the model counts what was found */
        (void)find_shape(work, &work->set->entries[i], &shape);
    for (size_t from = 0, next; from < count; from = next) {
        for (next = from + 1; next < count && members[next].flat == members[from].flat;)
            next++;
        FSDP_TRY(add_unit(work, members + from, next - from, err));
    }
    return work->model->check(work->model->context, err);
}

fsdp_status rank_files_like(rank_files *set, const fsdp_source_model *model, fsdp_error *err)
{
    like_work work = {set, model, 0};
    size_t count = 0;
    if (!model || set->flat_count > 0) /* the files have the shapes */
        return FSDP_OK;
    flat_member *members = fsdp_alloc(set->entry_count, sizeof *members);
    if (!members)
        return fsdp_fail_memory(err, "flat parameters");
    fsdp_status st = list_members(set, members, &count, err);
    if (st == FSDP_OK && count == 0)
        st = fsdp_fail(err, FSDP_ERR_USAGE,
                       "--like is for FSDP1's local state dicts with use_orig_params, but '%s' has "
                       "no flat parameter with named pieces",
                       set->where);
    if (st == FSDP_OK) {
        qsort(members, count, sizeof *members, compare_members);
        st = add_units(&work, members, count, err);
    }
    fsdp_free(members);
    return st;
}

/* --- pieces and the flat tensor ------------------------------------------------------------------ */

fsdp_status rank_files_check_piece(rank_files *set, size_t number, int rank,
                                   const torch_tensor *held, fsdp_error *err)
{
    const rank_entry *entry = &set->entries[number];
    const torch_tensor *piece = number == 0 || entry->is_spread ? NULL : tensor_of(entry, rank);
    bool is_same = true;
    char name[200];
    if (!piece || held->storage.file < 0)
        return FSDP_OK;
    if (piece->offset == held->offset && piece->storage.file == held->storage.file &&
        piece->storage.stream == held->storage.stream && piece->ndim == 1 &&
        piece->shape[0] == held->shape[0])
        return FSDP_OK;
    FSDP_TRY(rank_files_count_compared(set, held, TORCH_REPLICA, err));
    FSDP_TRY(torch_same_elements(set->source, held, piece, TORCH_REPLICA, &is_same, err));
    return is_same ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_DAMAGED,
                               "'%s': the piece of '%s' on rank %d differs from the flat "
                               "parameter" FSDP_TWO_SAVES,
                               set->where, shown(entry, name, sizeof name), rank);
}

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

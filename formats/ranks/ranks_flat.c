/*
 * FSDP1's local state dicts: one flat tensor per unit, of which each rank has a range, and
 * FlatParamShardMetadata, which lists the parameters in that range and their elements, or is computed from
 * the shapes of a model. Offsets of parameters are not recorded: parameters follow one another, with padding
 * when addresses were aligned, and the offsets must reproduce every rank's range. See ranks.h.
 */
#include "formats/ranks/ranks.h"
#include "base/data/box_internal.h"

#include <stdlib.h>
#include <string.h>

static const char flat_name[] = "_flat_param";
static const char metadata_name[] = "shard_metadata";
enum { ALIGNMENT = 16 };

/* === metadata of flat parameters ============================================================== */

/* The columns of FlatParamShardMetadata; older versions have four of them. */
typedef struct columns {
    fsdp_node names, shapes, strides, contiguous, counts, ranges;
} columns;

static fsdp_status bad_metadata(const torch_archive *archive, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: a FlatParamShardMetadata contradicts itself",
                     archive->where);
}

static fsdp_status read_columns(const torch_archive *archive, fsdp_node node, columns *out,
                                fsdp_error *err)
{
    const fsdp_pickle_node *call = torch_node(archive, node);
    fsdp_node args = call->as.call->args;
    uint32_t count = torch_node(archive, args)->count;
    bool is_old = count == 4;
    if (torch_node(archive, args)->kind != FSDP_NODE_TUPLE || (count != 4 && count != 6))
        return bad_metadata(archive, err);
    *out = (columns){.names = torch_element(archive, args, 0),
                     .shapes = torch_element(archive, args, 1),
                     .strides = is_old ? 0 : torch_element(archive, args, 2),
                     .contiguous = is_old ? 0 : torch_element(archive, args, 3),
                     .counts = torch_element(archive, args, is_old ? 2 : 4),
                     .ranges = torch_element(archive, args, is_old ? 3 : 5)};
    return FSDP_OK;
}

static fsdp_status read_strides(const torch_archive *archive, const columns *from, size_t number,
                                rank_flat_param *param, fsdp_error *err)
{
    const fsdp_pickle_node *contiguous =
        torch_node(archive, torch_element(archive, from->contiguous, number));
    int count;
    param->has_strides = contiguous->kind == FSDP_NODE_BOOL && !contiguous->as.i64;
    if (!param->has_strides)
        return FSDP_OK;
    FSDP_TRY(torch_read_sizes(archive, torch_element(archive, from->strides, number), "strides",
                              &count, param->strides, err));
    return count == param->ndim ? FSDP_OK : bad_metadata(archive, err);
}

static fsdp_status read_param(rank_files *set, const torch_archive *archive, const columns *from,
                              size_t number, rank_flat_param *param, fsdp_error *err)
{
    const fsdp_pickle *pickle = &archive->pickle;
    const fsdp_pickle_node *name = torch_node(archive, torch_element(archive, from->names, number));
    fsdp_node range = torch_element(archive, from->ranges, number);
    if (name->kind != FSDP_NODE_STR)
        return bad_metadata(archive, err);
    param->name = fsdp_arena_strndup(&set->arena, name->as.text, name->count);
    param->name_size = name->count;
    if (!param->name)
        return fsdp_fail_memory(err, "a parameter");
    FSDP_TRY(torch_read_sizes(archive, torch_element(archive, from->shapes, number), "sizes",
                              &param->ndim, param->shape, err));
    FSDP_TRY(torch_check_shape(archive, param->ndim, param->shape, FSDP_U8, err));
    FSDP_TRY(read_strides(archive, from, number, param, err));
    fsdp_box box = fsdp_box_whole(param->ndim, param->shape);
    bool is_good =
        fsdp_pickle_int(pickle, torch_element(archive, from->counts, number), &param->count) &&
        fsdp_pickle_int(pickle, torch_element(archive, range, 0), &param->first) &&
        fsdp_pickle_int(pickle, torch_element(archive, range, 1), &param->last) &&
        param->count == fsdp_box_count(&box) && param->first >= 0 && param->first <= param->last &&
        param->last < param->count;
    return is_good ? FSDP_OK : bad_metadata(archive, err);
}

fsdp_status rank_files_object(void *context, const torch_item *found, bool *taken_out,
                              fsdp_error *err)
{
    rank_files *set = context;
    torch_archive *archive = found->archive;
    columns from = {0};
    *taken_out = strcmp(torch_class_name(archive, found->node), "FlatParamShardMetadata") == 0;
    if (!*taken_out)
        return FSDP_OK;
    FSDP_TRY(read_columns(archive, found->node, &from, err));
    size_t count = torch_node(archive, from.names)->kind == FSDP_NODE_TUPLE
                       ? torch_node(archive, from.names)->count
                       : 0;
    rank_flat flat = {.rank = set->rank,
                      .name = fsdp_arena_strndup(&set->arena, found->name, found->name_size),
                      .name_size = found->name_size,
                      .params = fsdp_arena_alloc(&set->arena, count, sizeof *flat.params),
                      .param_count = count};
    if (!flat.name || !flat.params ||
        !fsdp_grow(&set->flats, &set->flat_room, set->flat_count + 1, sizeof *set->flats))
        return fsdp_fail_memory(err, "flat parameters");
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(read_param(set, archive, &from, i, &flat.params[i], err));
    set->flats[set->flat_count++] = flat;
    return FSDP_OK;
}

/* === pieces without shapes ==================================================================== */

/*
 * With use_orig_params and without FlatParamShardMetadata, each rank has a 1-D piece of the flat tensor under
 * each parameter's name, and no shape. With the shapes of a model that was named, what the metadata would say
 * is computed from the lengths of the pieces.
 */

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

static int compare_begins(const void *a, const void *b)
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
        qsort(unit->ranges, chunks->count, sizeof *unit->ranges, compare_begins);
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

/* Adds the metadata of flat parameters whose pieces have names and no shapes; model NULL: does nothing. */
static fsdp_status add_metadata(rank_files *set, const fsdp_source_model *model, fsdp_error *err)
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

/* === flat tensors in parts ==================================================================== */

/* --- units ----------------------------------------------------------------------------------------- */

/* A unit is named "PLACE.shard_metadata.UNIT"; its flat tensor is "PLACE.ROOT.UNIT._flat_param". */
typedef struct flat_unit {
    const rank_flat *flats; /* of all ranks */
    size_t count;
    fsdp_text place, unit; /* each with a trailing dot unless empty, as ROOT */
    const char *root;
    size_t root_size;
    size_t entry; /* of the flat tensor; 0: none */
} flat_unit;

static int compare_flats(const void *a, const void *b)
{
    const rank_flat *x = a, *y = b;
    size_t size = x->name_size < y->name_size ? x->name_size : y->name_size;
    int order = memcmp(x->name, y->name, size);
    if (order == 0)
        order = (x->name_size > y->name_size) - (x->name_size < y->name_size);
    return order != 0 ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

static bool same_name(const rank_flat *a, const rank_flat *b)
{
    return a->name_size == b->name_size && memcmp(a->name, b->name, a->name_size) == 0;
}

/* Adds the unit's name without the elements of wrappers, which a state dict does not have. */
static void add_clean(const char *unit, size_t size, fsdp_text *text)
{
    static const char wrapper[] = "_fsdp_wrapped_module";
    for (size_t at = 0, end; at < size; at = end + 1) {
        const char *dot = memchr(unit + at, '.', size - at);
        end = dot ? (size_t)(dot - unit) : size;
        if (end - at == sizeof wrapper - 1 && memcmp(unit + at, wrapper, end - at) == 0)
            continue;
        fsdp_text_add(text, unit + at, end - at);
        fsdp_text_add(text, ".", 1);
    }
}

/* False when the metadata is not in a dict of that name. */
static bool split_name(const rank_flat *flat, flat_unit *unit)
{
    const size_t size = sizeof metadata_name - 1;
    for (size_t at = 0; at + size < flat->name_size; at++) {
        bool begins = at == 0 || flat->name[at - 1] == '.';
        if (!begins || memcmp(flat->name + at, metadata_name, size) != 0 ||
            flat->name[at + size] != '.')
            continue;
        fsdp_text_add(&unit->place, flat->name, at);
        add_clean(flat->name + at + size + 1, flat->name_size - at - size - 1, &unit->unit);
        return !unit->place.failed && !unit->unit.failed;
    }
    return false;
}

static size_t find_entry(const rank_files *set, const fsdp_text *name)
{
    const uint64_t *number = name->failed || !name->data
                                 ? NULL
                                 : fsdp_name_table_find(&set->names, name->data, name->size);
    return number ? (size_t)*number : 0;
}

static void spell(fsdp_text *out, const flat_unit *unit, const char *last, size_t last_size)
{
    out->size = 0;
    fsdp_text_add(out, unit->place.data ? unit->place.data : "", unit->place.size);
    fsdp_text_add(out, unit->root, unit->root_size);
    fsdp_text_add(out, unit->unit.data ? unit->unit.data : "", unit->unit.size);
    fsdp_text_add(out, last, last_size);
}

/* Looks up the flat tensor of every unit below the root; false when one has none. */
static bool try_root(const rank_files *set, flat_unit *units, size_t count, const char *root,
                     size_t root_size)
{
    fsdp_text name = {0};
    bool is_found = true;
    for (size_t i = 0; i < count && is_found; i++) {
        units[i].root = root;
        units[i].root_size = root_size;
        spell(&name, &units[i], flat_name, sizeof flat_name - 1);
        units[i].entry = find_entry(set, &name);
        is_found = units[i].entry != 0 && set->entries[units[i].entry].is_spread &&
                   set->entries[units[i].entry].ndim == 1;
    }
    fsdp_text_release(&name);
    return is_found;
}

/* Finds the shortest root below which all units have a flat tensor; false without one. */
static bool find_root(const rank_files *set, flat_unit *units, size_t count)
{
    const char *shortest = "";
    size_t place = units[0].place.size, unit = units[0].unit.size, best = SIZE_MAX;
    const size_t last = sizeof flat_name - 1;
    for (size_t i = 1; i < set->entry_count; i++) {
        const rank_entry *entry = &set->entries[i];
        if (entry->name_size < place + unit + last)
            continue;
        size_t root = entry->name_size - place - unit - last;
        const char *text = entry->name + place;
        bool is_candidate = root < best && (root == 0 || text[root - 1] == '.') &&
                            (place == 0 || memcmp(entry->name, units[0].place.data, place) == 0) &&
                            memcmp(text + root + unit, flat_name, last) == 0;
        if (!is_candidate || !try_root(set, units, count, text, root))
            continue;
        best = root;
        shortest = text;
    }
    return best != SIZE_MAX && try_root(set, units, count, shortest, best);
}

/* --- offsets of parameters ------------------------------------------------------------------------- */

/* A parameter of a unit, and its first element in the flat tensor. */
typedef struct placed_param {
    const rank_flat_param *param;
    int64_t begin;
} placed_param;

/* The range of a rank in the flat tensor. */
static const fsdp_source_chunk *range_of(const rank_entry *flat, int rank)
{
    const rank_chunks *chunks = &flat->readings[RANK_ORDERED];
    for (size_t i = 0; i < chunks->count; i++)
        if (chunks->items[i].rank == rank)
            return &chunks->items[i].chunk;
    return NULL;
}

typedef struct ranged_flat {
    const rank_flat *flat;
    const fsdp_source_chunk *range;
} ranged_flat;

/* A unit's flat tensor: its ranks in the order of their ranges, and its parameters. */
typedef struct flat_layout {
    ranged_flat *ranks;
    size_t rank_count;
    placed_param *params;
    size_t count, room;
} flat_layout;

static int compare_ranges(const void *a, const void *b)
{
    const ranged_flat *x = a, *y = b;
    return (x->range->lo[0] > y->range->lo[0]) - (x->range->lo[0] < y->range->lo[0]);
}

/* Sorts the metadata of ranks with elements by their ranges. */
static fsdp_status sort_ranges(const rank_entry *entry, const flat_unit *unit, flat_layout *layout,
                               fsdp_error *err)
{
    layout->ranks = fsdp_alloc(unit->count, sizeof *layout->ranks);
    if (!layout->ranks)
        return fsdp_fail_memory(err, "flat parameters");
    for (size_t i = 0; i < unit->count; i++) {
        const fsdp_source_chunk *range = range_of(entry, unit->flats[i].rank);
        if (range)
            layout->ranks[layout->rank_count++] = (ranged_flat){&unit->flats[i], range};
    }
    if (layout->rank_count > 0)
        qsort(layout->ranks, layout->rank_count, sizeof *layout->ranks, compare_ranges);
    return FSDP_OK;
}

static bool same_param(const rank_flat_param *a, const rank_flat_param *b)
{
    return a->name_size == b->name_size && memcmp(a->name, b->name, a->name_size) == 0 &&
           a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

/* Lists the parameters in order: the last one of a rank may continue on the next. */
static fsdp_status list_params(flat_layout *layout, fsdp_error *err)
{
    const ranged_flat *ranged = layout->ranks;
    for (size_t i = 0; i < layout->rank_count; i++) {
        if (i > 0 && ranged[i].range->lo[0] == ranged[i - 1].range->lo[0])
            continue; /* a replica */
        for (size_t p = 0; p < ranged[i].flat->param_count; p++) {
            const rank_flat_param *param = &ranged[i].flat->params[p];
            if (layout->count > 0 && p == 0 &&
                same_param(layout->params[layout->count - 1].param, param))
                continue;
            if (!fsdp_grow(&layout->params, &layout->room, layout->count + 1,
                           sizeof *layout->params))
                return fsdp_fail_memory(err, "flat parameters");
            layout->params[layout->count++] = (placed_param){param, 0};
        }
    }
    return FSDP_OK;
}

/* Places each parameter at a multiple of `align` elements; false when they do not fill the flat
 * tensor. */
static bool place_params(flat_layout *layout, int64_t align, int64_t size, int64_t largest)
{
    int64_t at = 0;
    for (size_t i = 0; i < layout->count; i++) {
        at += (align - at % align) % align;
        layout->params[i].begin = at;
        if (fsdp_add_overflow(at, layout->params[i].param->count, &at) || at > size)
            return false;
    }
    /* aligned layouts are padded to a multiple of the world size, others not at all */
    int64_t world = largest > 0 ? (size + largest - 1) / largest : 1;
    return align == 1 ? at == size : size - at < world;
}

/* True when the rank has exactly the elements of the parameters that its metadata lists. */
static bool range_fits(const flat_layout *layout, const ranged_flat *ranged)
{
    int64_t lo = ranged->range->lo[0], end = lo + ranged->range->len[0];
    size_t number = 0;
    for (size_t i = 0; i < layout->count; i++) {
        const placed_param *placed = &layout->params[i];
        int64_t from = placed->begin > lo ? placed->begin : lo;
        int64_t to = placed->begin + placed->param->count;
        to = to < end ? to : end;
        if (from >= to)
            continue;
        const rank_flat_param *said =
            number < ranged->flat->param_count ? &ranged->flat->params[number] : NULL;
        number++;
        if (!said || !same_param(said, placed->param) || said->first != from - placed->begin ||
            said->last != to - 1 - placed->begin)
            return false;
    }
    return number == ranged->flat->param_count;
}

static bool try_alignment(flat_layout *layout, int64_t align, const rank_entry *entry)
{
    const ranged_flat *ranged = layout->ranks;
    int64_t largest = 0;
    for (size_t i = 0; i < layout->rank_count; i++)
        largest = ranged[i].range->len[0] > largest ? ranged[i].range->len[0] : largest;
    bool fits = place_params(layout, align, entry->shape[0], largest);
    for (size_t i = 0; i < layout->rank_count && fits; i++)
        fits = range_fits(layout, &ranged[i]);
    return fits;
}

static fsdp_status find_begins(const rank_entry *entry, flat_layout *layout, fsdp_error *err)
{
    int64_t usual = ALIGNMENT / (int64_t)fsdp_dtype_size(entry->dtype);
    int64_t tries[] = {1, usual, 2, 4, 8, 16};
    for (size_t i = 0; i < sizeof tries / sizeof *tries; i++)
        if (tries[i] > 0 && try_alignment(layout, tries[i], entry))
            return FSDP_OK;
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': the parameters in its shard_metadata do not fill it",
                     fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}

/* --- splitting ------------------------------------------------------------------------------------- */

/* Orders dims by falling stride: the order of a parameter's elements in memory. */
static void memory_order(const rank_flat_param *param, int *order)
{
    for (int dim = 0; dim < param->ndim; dim++) {
        int at = dim;
        for (; param->has_strides && at > 0 && param->strides[order[at - 1]] < param->strides[dim];
             at--)
            order[at] = order[at - 1];
        order[at] = dim;
    }
}

typedef struct flat_piece {
    rank_files *set;
    rank_entry *entry; /* of the parameter */
    const rank_flat_param *param;
    int rank;
    const fsdp_source_chunk *range;
    int64_t at; /* element of the range at which the piece begins */
} flat_piece;

/* Adds a box of the permuted parameter whose elements are contiguous. */
static fsdp_status add_box(const flat_piece *piece, const fsdp_box *box, const int *order,
                           int64_t at, fsdp_error *err)
{
    int64_t lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS], strides[FSDP_MAX_DIMS];
    int64_t element = (int64_t)fsdp_dtype_size(piece->entry->dtype);
    int64_t step = piece->range->strides ? piece->range->strides[0] : element, stride = step;
    for (int i = box->ndim - 1; i >= 0; i--) {
        lo[order[i]] = box->lo[i];
        len[order[i]] = box->len[i];
        strides[order[i]] = stride;
        stride *= box->len[i];
    }
    fsdp_source_chunk chunk = *piece->range;
    chunk.lo = lo;
    chunk.len = len;
    chunk.strides = strides;
    chunk.offset += at * step;
    return rank_files_add_chunk(piece->set, &piece->entry->readings[RANK_ORDERED], piece->rank,
                                box->ndim, &chunk, err);
}

static fsdp_status add_piece(const flat_piece *piece, fsdp_error *err)
{
    int order[FSDP_MAX_DIMS] = {0};
    fsdp_box whole = {.ndim = piece->param->ndim}, boxes[FSDP_BOX_PIECES];
    memory_order(piece->param, order);
    for (int i = 0; i < whole.ndim; i++)
        whole.len[i] = piece->param->shape[order[i]];
    int count = fsdp_box_cut(&whole, piece->param->first,
                             piece->param->last - piece->param->first + 1, boxes);
    int64_t at = piece->at;
    for (int i = 0; i < count; i++) {
        FSDP_TRY(add_box(piece, &boxes[i], order, at, err));
        at += fsdp_box_count(&boxes[i]);
    }
    return FSDP_OK;
}

/* FSDP_ERR_DAMAGED when the piece that the rank lists under entry `number` (0: none) is not `held`. */
static fsdp_status check_piece(rank_files *set, size_t number, int rank, const torch_tensor *held,
                               fsdp_error *err)
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

/* A rank may list the piece under the parameter's name, too. */
static fsdp_status check_held(const flat_piece *piece, size_t listed, fsdp_error *err)
{
    int64_t element = (int64_t)fsdp_dtype_size(piece->entry->dtype);
    int64_t step = piece->range->strides ? piece->range->strides[0] : element;
    torch_tensor held = {.dtype = piece->entry->dtype,
                         .ndim = 1,
                         .shape = {piece->param->last - piece->param->first + 1},
                         .strides = {step},
                         .storage = {.file = piece->range->file, .stream = piece->range->stream},
                         .offset = piece->range->offset + piece->at * step,
                         .fix = piece->range->fix};
    return check_piece(piece->set, listed, piece->rank, &held, err);
}

/* listed: the entry of that name that the files have; 0: none. */
static fsdp_status add_pieces(rank_files *set, size_t number, size_t listed,
                              const placed_param *placed, const flat_layout *layout,
                              fsdp_error *err)
{
    const ranged_flat *ranged = layout->ranks;
    for (size_t i = 0; i < layout->rank_count; i++)
        for (size_t p = 0; p < ranged[i].flat->param_count; p++) {
            const rank_flat_param *param = &ranged[i].flat->params[p];
            flat_piece piece = {set,
                                &set->entries[number],
                                param,
                                ranged[i].flat->rank,
                                ranged[i].range,
                                placed->begin + param->first - ranged[i].range->lo[0]};
            if (!same_param(param, placed->param))
                continue;
            FSDP_TRY(check_held(&piece, listed, err));
            FSDP_TRY(add_piece(&piece, err));
        }
    return FSDP_OK;
}

/* Hides the pieces that a rank lists under the parameter's name, and returns their entry or 0. */
static size_t hide_pieces(rank_files *set, const fsdp_text *name)
{
    size_t number = find_entry(set, name);
    if (number != 0 && !set->entries[number].is_spread)
        set->entries[number].is_hidden = true;
    return number;
}

static fsdp_status take_unit_apart(rank_files *set, const flat_unit *unit,
                                   const flat_layout *layout, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < layout->count && st == FSDP_OK; i++) {
        const placed_param *placed = &layout->params[i];
        size_t number;
        spell(&name, unit, placed->param->name, placed->param->name_size);
        if (name.failed) {
            st = fsdp_fail_memory(err, "a name");
            break;
        }
        size_t listed = hide_pieces(set, &name);
        st = rank_files_new_entry(set, name.data ? name.data : "", name.size, &number, err);
        if (st == FSDP_OK)
            st = rank_files_spread(set, &set->entries[number], set->entries[unit->entry].dtype,
                                   placed->param->ndim, placed->param->shape, err);
        if (st == FSDP_OK)
            st = add_pieces(set, number, listed, placed, layout, err);
    }
    set->entries[unit->entry].is_hidden = true;
    fsdp_text_release(&name);
    return st;
}

static fsdp_status take_unit(rank_files *set, const flat_unit *unit, fsdp_error *err)
{
    const rank_entry *entry = &set->entries[unit->entry];
    flat_layout layout = {0};
    fsdp_status st = sort_ranges(entry, unit, &layout, err);
    if (st == FSDP_OK)
        st = list_params(&layout, err);
    for (size_t i = 0; i < layout.rank_count && st == FSDP_OK; i++) {
        size_t work = layout.count * (layout.ranks[i].flat->param_count + 1);
        st = rank_files_spend(set, work + layout.rank_count, err);
    }
    if (st == FSDP_OK)
        st = find_begins(entry, &layout, err);
    if (st == FSDP_OK)
        st = take_unit_apart(set, unit, &layout, err);
    fsdp_free(layout.params);
    fsdp_free(layout.ranks);
    return st;
}

/* Removes ROOT from the names of its entries: PLACE.ROOT.x becomes PLACE.x. */
static fsdp_status strip_root(rank_files *set, const flat_unit *unit, fsdp_error *err)
{
    size_t place = unit->place.size, root_size = unit->root_size;
    for (size_t i = 1; root_size > 0 && i < set->entry_count; i++) {
        rank_entry *entry = &set->entries[i];
        if (entry->name_size < place + root_size ||
            (place > 0 && memcmp(entry->name, unit->place.data, place) != 0) ||
            memcmp(entry->name + place, unit->root, root_size) != 0)
            continue;
        char *name = fsdp_arena_alloc(&set->arena, entry->name_size - root_size + 1, 1);
        if (!name)
            return fsdp_fail_memory(err, "a name");
        if (place > 0)
            memcpy(name, entry->name, place);
        memcpy(name + place, entry->name + place + root_size, entry->name_size - place - root_size);
        entry->name = name;
        entry->name_size -= root_size;
    }
    return FSDP_OK;
}

/* Lists metadata without a flat tensor as objects. */
static fsdp_status list_objects(rank_files *set, const flat_unit *units, size_t count,
                                fsdp_error *err)
{
    static const char class[] = "torch.distributed.fsdp._flat_param.FlatParamShardMetadata";
    for (size_t i = 0; i < count; i++)
        for (size_t f = 0; f < units[i].count; f++) {
            fsdp_value value = {0};
            set->rank = units[i].flats[f].rank;
            FSDP_TRY(fsdp_value_set_bytes(&value, FSDP_VALUE_CLASS, class, sizeof class - 1, err));
            torch_item named = {.name = units[i].flats[f].name,
                                .name_size = units[i].flats[f].name_size};
            fsdp_status st = rank_files_value(set, &named, &value, err);
            fsdp_value_release(&value);
            FSDP_TRY(st);
        }
    return FSDP_OK;
}

/* Splits the units of one place. */
static fsdp_status take_units(rank_files *set, flat_unit *units, size_t count, bool are_named,
                              fsdp_error *err)
{
    if (!are_named || !find_root(set, units, count))
        return list_objects(set, units, count, err);
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(take_unit(set, &units[i], err));
    return strip_root(set, &units[0], err);
}

static bool same_place(const flat_unit *a, const flat_unit *b)
{
    return a->place.size == b->place.size &&
           (a->place.size == 0 || memcmp(a->place.data, b->place.data, a->place.size) == 0);
}

static fsdp_status take_apart(rank_files *set, fsdp_error *err)
{
    size_t count = 0;
    bool are_named = true;
    flat_unit *units = fsdp_alloc(set->flat_count, sizeof *units);
    if (!units)
        return fsdp_fail_memory(err, "flat parameters");
    if (set->flat_count > 0)
        qsort(set->flats, set->flat_count, sizeof *set->flats, compare_flats);
    for (size_t i = 0; i < set->flat_count; i++) {
        if (i > 0 && same_name(&set->flats[i], &set->flats[i - 1])) {
            units[count - 1].count++;
            continue;
        }
        units[count] = (flat_unit){.flats = &set->flats[i], .count = 1};
        are_named &= split_name(&set->flats[i], &units[count++]);
    }
    fsdp_status st = FSDP_OK;
    for (size_t from = 0, next; from < count && st == FSDP_OK; from = next) {
        for (next = from + 1; next < count && same_place(&units[from], &units[next]);)
            next++;
        st = take_units(set, units + from, next - from, are_named, err);
    }
    for (size_t i = 0; i < count; i++) {
        fsdp_text_release(&units[i].place);
        fsdp_text_release(&units[i].unit);
    }
    fsdp_free(units);
    return st;
}

fsdp_status rank_files_take_apart(rank_files *set, const fsdp_source_model *model, fsdp_error *err)
{
    char name[200];
    FSDP_TRY(add_metadata(set, model, err));
    fsdp_status st = take_apart(set, err);
    if (st == FSDP_ERR_DAMAGED && set->unknown != 0)
        fsdp_error_prefix(err, "without the shape of '%s', which the model of --like lacks",
                          shown(&set->entries[set->unknown], name, sizeof name));
    return st;
}

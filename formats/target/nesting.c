/* Computes paths that do not contradict one another: see nesting.h. dcp_metadata.c reads those
 * of DCP. */
#include "formats/target/nesting.h"

#include "base/data/name_path.h"
#include "formats/target/container_table.h"

#include <stdlib.h>
#include <string.h>

/* PyTorch allocates a list up to the position, even if nothing follows. */
enum { LONGEST_LIST = 1 << 20, ROOT = 0 };

/* Limits for the rounds of settle and for the elements they visit together: a few seconds. */
enum { ROUNDS_LEAST = 4, ROUNDS_MOST = 100, STEPS_MOST = 1 << 28 };

typedef enum place_kind { PLACE_LEAF = 1, PLACE_DICT, PLACE_LIST, PLACE_TUPLE } place_kind;

/* A node of the tree of paths. */
typedef struct place {
    place_kind kind;
    int64_t items, last; /* of a list: number of items, highest position */
    bool is_full;        /* a list whose items its reader visits */
} place;

typedef struct place_map {
    container_table table; /* numbers of places */
    place *places;
    size_t count, room;
    size_t containers;
    nesting_reader reader;
    size_t flattened;
} place_map;

void nesting_release(nesting *paths)
{
    fsdp_free(paths->paths);
    fsdp_free(paths->counts);
    fsdp_arena_release(&paths->arena);
}

/* --- one path --------------------------------------------------------------------------------- */

static bool is_long_list(const char *name, const int32_t *path, size_t count)
{
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        if (path[i] < 0 && strtol(name + at, NULL, 10) >= LONGEST_LIST)
            return true;
        at += fsdp_path_bytes(path[i]) + 1;
    }
    return false;
}

static fsdp_status set_path(nesting *paths, size_t i, const int32_t *path, size_t count,
                            nesting_reader reader, fsdp_error *err)
{
    int32_t *copy = fsdp_arena_alloc(&paths->arena, count, sizeof *copy);
    if (!copy)
        return fsdp_fail_memory(err, "the names of a checkpoint");
    memcpy(copy, path, count * sizeof *copy);
    for (size_t e = 0; reader == NESTING_DCP && e < count; e++)
        if (copy[e] < 0)
            copy[e] = -(int32_t)fsdp_path_bytes(copy[e]);
    if (copy[0] < 0 && paths->root == NESTING_IN_DICT)
        copy[0] = (int32_t)fsdp_path_bytes(copy[0]);
    paths->paths[i] = copy;
    paths->counts[i] = count;
    return FSDP_OK;
}

static fsdp_status flatten(nesting *paths, size_t i, const fsdp_target_entry *entry,
                           fsdp_error *err)
{
    return set_path(paths, i, &(int32_t){(int32_t)entry->name_size}, 1, NESTING_TORCH, err);
}

static bool has_path(const fsdp_target_entry *entry)
{
    return entry->path &&
           fsdp_path_fits(entry->name, entry->name_size, entry->path, entry->path_count);
}

static fsdp_status choose(nesting *paths, size_t i, const fsdp_target_entry *entry,
                          nesting_reader reader, fsdp_error *err)
{
    int32_t usual[FSDP_PATH_DEFAULT_MOST];
    const char *name = entry->name;
    if (has_path(entry)) {
        if (is_long_list(name, entry->path, entry->path_count))
            return flatten(paths, i, entry, err);
        return set_path(paths, i, entry->path, entry->path_count, reader, err);
    }
    return set_path(paths, i, usual, fsdp_path_default(name, entry->name_size, usual), reader, err);
}

static place_kind kind_before(int32_t element)
{
    return element >= 0 ? PLACE_DICT : fsdp_path_in_tuple(element) ? PLACE_TUPLE : PLACE_LIST;
}

static nesting_root root_of(const fsdp_target_entry *entry)
{
    if (!has_path(entry) || entry->path[0] >= 0)
        return NESTING_IN_DICT;
    return fsdp_path_is_whole(entry->path, entry->path_count) ? NESTING_WHOLE
           : fsdp_path_in_tuple(entry->path[0])               ? NESTING_IN_TUPLE
                                                              : NESTING_IN_LIST;
}

/* A dict unless all entries agree on another object. */
static nesting_root find_root(const fsdp_target_entry *entries, size_t count)
{
    nesting_root root = count > 0 ? root_of(&entries[0]) : NESTING_IN_DICT;
    for (size_t i = 1; i < count; i++)
        if (root == NESTING_WHOLE || root_of(&entries[i]) != root)
            return NESTING_IN_DICT;
    return root;
}

/* --- all names -------------------------------------------------------------------------------- */

static bool add_place(place_map *map, place_kind kind)
{
    if (!fsdp_grow(&map->places, &map->room, map->count + 1, sizeof *map->places))
        return false;
    map->places[map->count++] = (place){.kind = kind, .last = -1};
    map->containers += kind != PLACE_LEAF;
    return true;
}

/* Stores the place of the last find. */
static bool put_place(place_map *map, place_kind kind)
{
    return container_table_put(&map->table, map->count) && add_place(map, kind);
}

static void count_item(place *list, const char *position)
{
    int64_t number = strtol(position, NULL, 10);
    list->items++;
    list->last = number > list->last ? number : list->last;
}

/* Walks down a path and records its places; false when one has another kind already. */
static bool put_path(place_map *map, const char *name, const int32_t *path, size_t count,
                     fsdp_error *err, fsdp_status *status)
{
    size_t at = 0, parent = ROOT;
    for (size_t i = 0; i < count; i++) {
        place_kind kind = i + 1 == count ? PLACE_LEAF : kind_before(path[i + 1]);
        const uint64_t *found = container_table_find(&map->table, parent, name + at, path[i]);
        bool is_other = found && (kind == PLACE_LEAF || map->places[*found].kind != kind);
        if (is_other || (!found && kind != PLACE_LEAF && map->containers > NESTING_MOST))
            return false;
        size_t here = found ? (size_t)*found : map->count;
        if (!found && !put_place(map, kind)) {
            *status = fsdp_fail_memory(err, "the names of a checkpoint");
            return true;
        }
        if (!found && path[i] < 0)
            count_item(&map->places[parent], name + at);
        parent = here;
        at += fsdp_path_bytes(path[i]) + 1;
    }
    return true;
}

/* Names of one element come first: they have no other path to fall back to. */
static fsdp_status put_all(place_map *map, nesting *paths, const fsdp_target_entry *entries,
                           size_t count, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < count && st == FSDP_OK; i++) {
            if ((paths->counts[i] > 1) != (pass == 1))
                continue;
            if (put_path(map, entries[i].name, paths->paths[i], paths->counts[i], err, &st) ||
                paths->counts[i] == 1)
                continue;
            map->flattened++;
            st = flatten(paths, i, &entries[i], err);
        }
    return st;
}

/* --- lists ------------------------------------------------------------------------------------ */

/* True when the entry makes its reader visit the list that it is an item of, at any depth of
 * lists. */
static bool fills(const place_map *map, const fsdp_target_entry *entry)
{
    bool is_dict = entry->value && entry->value->kind == FSDP_VALUE_DICT;
    return !entry->value || (is_dict && map->reader == NESTING_TORCH);
}

/* Calls visit for every list on the path, from the outermost on, until it returns false. */
static bool each_list(place_map *map, const fsdp_target_entry *entry, const int32_t *path,
                      size_t count,
                      bool (*visit)(place_map *map, place *list, const fsdp_target_entry *entry,
                                    const int32_t *rest, size_t rest_count))
{
    size_t at = 0, parent = ROOT;
    if (path[0] < 0 && !visit(map, &map->places[ROOT], entry, path, count))
        return false;
    for (size_t i = 0; i + 1 < count; i++) {
        const uint64_t *found =
            container_table_find(&map->table, parent, entry->name + at, path[i]);
        if (!found)
            return true; /* no memory: see check_lists */
        parent = (size_t)*found;
        at += fsdp_path_bytes(path[i]) + 1;
        if (path[i + 1] < 0 &&
            !visit(map, &map->places[parent], entry, path + i + 1, count - i - 1))
            return false;
    }
    return true;
}

static bool fill(place_map *map, place *list, const fsdp_target_entry *entry, const int32_t *rest,
                 size_t rest_count)
{
    bool is_full = fills(map, entry);
    for (size_t i = 1; i < rest_count; i++)
        is_full = is_full || rest[i] >= 0; /* a dict */
    list->is_full = list->is_full || is_full;
    return true;
}

/* A list with a gap would be filled up by its reader, and one that the reader does not visit
 * would be one value: both lose names. */
static bool holds(place_map *map, place *list, const fsdp_target_entry *entry, const int32_t *rest,
                  size_t rest_count)
{
    (void)map;
    (void)entry;
    (void)rest;
    return list->items == list->last + 1 && (list->is_full || rest_count > 1);
}

static fsdp_status check_lists(place_map *map, nesting *paths, const fsdp_target_entry *entries,
                               size_t count, fsdp_error *err)
{
    for (size_t i = 0; i < count; i++)
        (void)each_list(map, &entries[i], paths->paths[i], paths->counts[i], fill);
    for (size_t i = 0; i < count; i++)
        if (!each_list(map, &entries[i], paths->paths[i], paths->counts[i], holds)) {
            map->flattened++;
            FSDP_TRY(flatten(paths, i, &entries[i], err));
        }
    return map->table.key.failed ? fsdp_fail_memory(err, "the names of a checkpoint") : FSDP_OK;
}

/* --- rounds ----------------------------------------------------------------------------------- */

static void release_map(place_map *map)
{
    container_table_release(&map->table);
    fsdp_free(map->places);
}

static fsdp_status settle_once(nesting *paths, const fsdp_target_entry *entries, size_t count,
                               nesting_reader reader, bool *is_settled, fsdp_error *err)
{
    place_map map = {.reader = reader};
    fsdp_status st = add_place(&map, PLACE_DICT)
                         ? put_all(&map, paths, entries, count, err)
                         : fsdp_fail_memory(err, "the names of a checkpoint");
    if (st == FSDP_OK && map.flattened == 0)
        st = check_lists(&map, paths, entries, count, err);
    *is_settled = map.flattened == 0;
    release_map(&map);
    return st;
}

/* A name that was reduced to one element may collide with another, or leave a gap: repeats until
 * all fit. */
static fsdp_status settle(nesting *paths, const fsdp_target_entry *entries, size_t count,
                          nesting_reader reader, fsdp_error *err)
{
    size_t steps = 0;
    for (size_t i = 0; i < count; i++)
        steps += paths->counts[i];
    size_t rounds = STEPS_MOST / (steps + 1);
    rounds = rounds < ROUNDS_LEAST ? ROUNDS_LEAST : rounds > ROUNDS_MOST ? ROUNDS_MOST : rounds;
    for (size_t round = 0; round < rounds; round++) {
        bool is_settled;
        FSDP_TRY(settle_once(paths, entries, count, reader, &is_settled, err));
        if (is_settled)
            return FSDP_OK;
    }
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(flatten(paths, i, &entries[i], err));
    return FSDP_OK;
}

static bool all_in_list(const nesting *paths, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (paths->paths[i][0] >= 0)
            return false;
    return true;
}

fsdp_status nesting_find(const fsdp_target_entry *entries, size_t count, nesting_reader reader,
                         nesting *nesting_out, fsdp_error *err)
{
    *nesting_out = (nesting){.paths = fsdp_alloc(count, sizeof(int32_t *)),
                             .counts = fsdp_alloc(count, sizeof(size_t))};
    if (!nesting_out->paths || !nesting_out->counts)
        return fsdp_fail_memory(err, "the names of a checkpoint");
    if (reader == NESTING_TORCH)
        nesting_out->root = find_root(entries, count);
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(choose(nesting_out, i, &entries[i], reader, err));
    if (nesting_out->root == NESTING_WHOLE)
        return FSDP_OK;
    FSDP_TRY(settle(nesting_out, entries, count, reader, err));
    if (nesting_out->root == NESTING_IN_DICT || all_in_list(nesting_out, count))
        return FSDP_OK;
    nesting_out->root =
        NESTING_IN_DICT; /* a name became a key, with which there are no positions */
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(choose(nesting_out, i, &entries[i], reader, err));
    return settle(nesting_out, entries, count, reader, err);
}

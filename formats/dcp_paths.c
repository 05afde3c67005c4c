/* Paths that hold together: see dcp_paths.h; read back by dcp_metadata.c. */
#include "formats/dcp_paths.h"

#include "base/name_path.h"
#include "formats/name_table.h"

#include <fsdp/text.h>
#include <stdlib.h>
#include <string.h>

/* PyTorch fills a list up to the position, whatever comes after that. */
enum { LONGEST_LIST = 1 << 20, ROUNDS = 8 };

typedef enum place_kind { PLACE_LEAF = 1, PLACE_DICT, PLACE_LIST } place_kind;

/* What stands at the beginnings of paths. */
typedef struct place_map {
    fsdp_name_table table;
    fsdp_arena arena;
    fsdp_text key; /* of the place at hand */
    size_t flattened;
} place_map;

void dcp_paths_release(dcp_paths *paths)
{
    fsdp_free(paths->paths);
    fsdp_free(paths->counts);
    fsdp_arena_release(&paths->arena);
}

/* --- one path --------------------------------------------------------------------------------- */

static size_t bytes_of(int32_t element)
{
    return (size_t)(element < 0 ? -element : element);
}

static bool is_long_list(const char *name, const int32_t *path, size_t count)
{
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        if (path[i] < 0 && strtol(name + at, NULL, 10) >= LONGEST_LIST)
            return true;
        at += bytes_of(path[i]) + 1;
    }
    return false;
}

static fsdp_status set_path(dcp_paths *paths, size_t i, const int32_t *path, size_t count,
                            fsdp_error *err)
{
    int32_t *own = fsdp_arena_alloc(&paths->arena, count, sizeof *own);
    if (!own)
        return fsdp_fail_memory(err, "the names of a checkpoint");
    memcpy(own, path, count * sizeof *own);
    own[0] = (int32_t)bytes_of(own[0]); /* the outermost container is a dict */
    paths->paths[i] = own;
    paths->counts[i] = count;
    return FSDP_OK;
}

static fsdp_status flatten(dcp_paths *paths, size_t i, const fsdp_target_entry *entry,
                           fsdp_error *err)
{
    return set_path(paths, i, &(int32_t){(int32_t)entry->name_size}, 1, err);
}

static fsdp_status choose(dcp_paths *paths, size_t i, const fsdp_target_entry *entry,
                          fsdp_error *err)
{
    int32_t usual[FSDP_PATH_DEFAULT_MOST];
    const char *name = entry->name;
    if (entry->path && fsdp_path_fits(name, entry->name_size, entry->path, entry->path_count)) {
        if (is_long_list(name, entry->path, entry->path_count))
            return flatten(paths, i, entry, err);
        return set_path(paths, i, entry->path, entry->path_count, err);
    }
    return set_path(paths, i, usual, fsdp_path_default(name, entry->name_size, usual), err);
}

/* --- all together ----------------------------------------------------------------------------- */

static void add_element(place_map *map, const char *text, int32_t element)
{
    fsdp_text_add(&map->key, (const char *)&element, sizeof element);
    fsdp_text_add(&map->key, text, bytes_of(element));
}

static bool put(place_map *map, place_kind kind)
{
    const char *key = fsdp_arena_strndup(&map->arena, map->key.data, map->key.size);
    return key && fsdp_name_table_put(&map->table, key, map->key.size, kind);
}

/* Walks down a path and notes what stands there; false when something else does. */
static bool place(place_map *map, const char *name, const int32_t *path, size_t count,
                  fsdp_error *err, fsdp_status *status)
{
    size_t at = 0;
    map->key.size = 0;
    for (size_t i = 0; i < count; i++) {
        place_kind kind = i + 1 == count ? PLACE_LEAF : path[i + 1] < 0 ? PLACE_LIST : PLACE_DICT;
        add_element(map, name + at, path[i]);
        at += bytes_of(path[i]) + 1;
        const uint64_t *found =
            map->key.failed ? NULL
                            : fsdp_name_table_find(&map->table, map->key.data, map->key.size);
        if (found && (kind == PLACE_LEAF || *found != kind))
            return false;
        if (map->key.failed || (!found && !put(map, kind))) {
            *status = fsdp_fail_memory(err, "the names of a checkpoint");
            return true;
        }
    }
    return true;
}

/* Names of one element first: they cannot yield. */
static fsdp_status place_all(place_map *map, dcp_paths *paths, const fsdp_target_entry *entries,
                             size_t count, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < count && st == FSDP_OK; i++) {
            if ((paths->counts[i] > 1) != (pass == 1))
                continue;
            if (place(map, entries[i].name, paths->paths[i], paths->counts[i], err, &st) ||
                paths->counts[i] == 1)
                continue;
            map->flattened++;
            st = flatten(paths, i, &entries[i], err);
        }
    return st;
}

static void release_map(place_map *map)
{
    fsdp_name_table_release(&map->table);
    fsdp_arena_release(&map->arena);
    fsdp_text_release(&map->key);
    *map = (place_map){0};
}

/* A name that was made one element may be in the way of another: again, until all fit. */
static fsdp_status settle(dcp_paths *paths, const fsdp_target_entry *entries, size_t count,
                          fsdp_error *err)
{
    for (int round = 0; round < ROUNDS; round++) {
        place_map map = {0};
        fsdp_status st = place_all(&map, paths, entries, count, err);
        bool is_settled = map.flattened == 0;
        release_map(&map);
        if (st != FSDP_OK || is_settled)
            return st;
    }
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(flatten(paths, i, &entries[i], err));
    return FSDP_OK;
}

fsdp_status dcp_paths_find(const fsdp_target_entry *entries, size_t count, dcp_paths *paths_out,
                           fsdp_error *err)
{
    *paths_out = (dcp_paths){.paths = fsdp_alloc(count, sizeof(int32_t *)),
                             .counts = fsdp_alloc(count, sizeof(size_t))};
    if (!paths_out->paths || !paths_out->counts)
        return fsdp_fail_memory(err, "the names of a checkpoint");
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(choose(paths_out, i, &entries[i], err));
    return settle(paths_out, entries, count, err);
}

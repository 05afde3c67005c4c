/* Merges lists into one value: see dcp_fold.h. */
#include "formats/dcp/dcp_fold.h"

#include "base/data/name_path.h"
#include "base/data/value_internal.h"
#include "formats/target/container_table.h"
#include "formats/target/nesting.h"

#include <stdlib.h>
#include <string.h>

/* The entries below a list; other containers have zeros. */
typedef struct contents {
    size_t first;      /* first entry */
    size_t all, plain; /* plain: values with no dict on their path */
    size_t dicts;      /* dicts without keys, which made a source name the list's items */
} contents;

typedef struct folding {
    const fsdp_target_entry *entries;
    size_t count;
    dcp_fold *fold;
    fsdp_name_table names;      /* names of entries */
    container_table containers; /* indexes of contents */
    contents *contents;
    size_t contents_count, contents_room;
    bool is_too_much; /* too many contents: no list is merged */
} folding;

static bool is_nested(const fsdp_target_entry *entry)
{
    return entry->path && entry->path_count > 1 &&
           fsdp_path_fits(entry->name, entry->name_size, entry->path, entry->path_count);
}

static bool is_in_list(const fsdp_target_entry *entry)
{
    for (size_t i = 1; i < entry->path_count; i++)
        if (entry->path[i] < 0)
            return is_nested(entry);
    return false;
}

/* True when the path from that element on has positions only. */
static bool is_plain(const fsdp_target_entry *entry, size_t from)
{
    for (size_t i = from; i < entry->path_count; i++)
        if (entry->path[i] >= 0)
            return false;
    return entry->value && !fsdp_value_is_opaque(entry->value);
}

/* --- counting --------------------------------------------------------------------------------- */

/* A position on the path from the outermost dict down to an entry. */
typedef struct way_down {
    size_t around, at; /* the container reached; bytes of the name up to the next element */
} way_down;

/* The container that element i of the entry names; NULL when it is new, and the position stays. */
static contents *go_down(folding *work, const fsdp_target_entry *entry, size_t i, way_down *way)
{
    const uint64_t *found =
        container_table_find(&work->containers, way->around, entry->name + way->at, entry->path[i]);
    if (!found)
        return NULL;
    way->around = (size_t)*found + 1;
    way->at += fsdp_path_bytes(entry->path[i]) + 1;
    return &work->contents[*found];
}

/* Adds the container that go_down did not find. */
static bool add_contents(folding *work)
{
    if (!container_table_put(&work->containers, work->contents_count) ||
        !fsdp_grow(&work->contents, &work->contents_room, work->contents_count + 1,
                   sizeof *work->contents))
        return false;
    work->contents[work->contents_count++] = (contents){0};
    work->is_too_much = work->contents_count > NESTING_MOST;
    return true;
}

static fsdp_status count_entry(folding *work, size_t number, fsdp_error *err)
{
    const fsdp_target_entry *entry = &work->entries[number];
    way_down way = {0};
    for (size_t i = 0; i + 1 < entry->path_count; i++) {
        contents *list = go_down(work, entry, i, &way);
        if (!list && add_contents(work))
            list = go_down(work, entry, i, &way);
        if (!list)
            return fsdp_fail_memory(err, "the names of a checkpoint");
        if (entry->path[i + 1] >= 0)
            continue;
        if (list->all++ == 0)
            list->first = number;
        list->plain += is_plain(entry, i + 1);
        list->dicts += entry->value && entry->value->kind == FSDP_VALUE_DICT;
    }
    return FSDP_OK;
}

static fsdp_status count_all(folding *work, fsdp_error *err)
{
    for (size_t i = 0; i < work->count; i++) {
        const fsdp_target_entry *entry = &work->entries[i];
        if (!fsdp_name_table_find(&work->names, entry->name, entry->name_size) &&
            !fsdp_name_table_put(&work->names, entry->name, entry->name_size, i))
            return fsdp_fail_memory(err, "the names of a checkpoint");
        if (is_in_list(entry) && !work->is_too_much)
            FSDP_TRY(count_entry(work, i, err));
    }
    return FSDP_OK;
}

/* --- one list --------------------------------------------------------------------------------- */

/* Entries [first, end) below the list that `depth` elements name. */
typedef struct list_run {
    size_t first, end, depth;
    size_t name_size; /* of the list */
} list_run;

static bool is_below(const fsdp_target_entry *entry, const fsdp_target_entry *first, size_t depth,
                     size_t name_size)
{
    return is_nested(entry) && entry->path_count > depth && entry->name_size > name_size &&
           memcmp(entry->path, first->path, depth * sizeof *entry->path) == 0 &&
           memcmp(entry->name, first->name, name_size) == 0;
}

/* Finds the outermost plain list of the entry, if the entry is its first and its others follow. */
static bool find_list(folding *work, size_t first, list_run *run_out)
{
    const fsdp_target_entry *entry = &work->entries[first];
    const contents *list = NULL;
    way_down way = {0};
    size_t depth = 0;
    if (work->is_too_much || !is_in_list(entry))
        return false;
    for (size_t i = 0; i + 1 < entry->path_count && !list; i++) {
        const contents *found = go_down(work, entry, i, &way);
        if (!found)
            return false; /* no memory: see dcp_fold_lists */
        if (entry->path[i + 1] < 0 && found->all == found->plain && found->dicts > 0) {
            list = found;
            depth = i + 1;
        }
    }
    if (!list || list->first != first)
        return false;
    size_t end = first, name_size = way.at - 1;
    while (end < work->count && is_below(&work->entries[end], entry, depth, name_size))
        end++;
    *run_out = (list_run){first, end, depth, name_size};
    return end - first == list->all && !fsdp_name_table_find(&work->names, entry->name, name_size);
}

/* Both are in the run, and so have equal paths up to the list. */
static bool are_of_one_item(const fsdp_target_entry *a, const fsdp_target_entry *b,
                            const list_run *run)
{
    size_t depth = run->depth, at = run->name_size + 1;
    return a->path_count > depth + 1 && b->path_count > depth + 1 &&
           a->path[depth] == b->path[depth] &&
           memcmp(a->name + at, b->name + at, fsdp_path_bytes(a->path[depth])) == 0;
}

/* The entries from there on that share the next element. */
static list_run item_at(const folding *work, const list_run *run, size_t from)
{
    const fsdp_target_entry *first = &work->entries[from];
    size_t bytes = fsdp_path_bytes(first->path[run->depth]), end = from + 1;
    while (end < run->end && are_of_one_item(first, &work->entries[end], run))
        end++;
    return (list_run){from, end, run->depth + 1, run->name_size + 1 + bytes};
}

static bool has_position(const fsdp_target_entry *entry, size_t name_size, size_t position)
{
    return strtoull(entry->name + name_size + 1, NULL, 10) == position;
}

/* *whole is false when an item is missing. */
static fsdp_status make_list(const folding *work, const list_run *run, fsdp_value *list,
                             bool *whole, fsdp_error *err)
{
    size_t count = 0, item = 0;
    for (size_t i = run->first; i < run->end; i = item_at(work, run, i).end)
        *whole = *whole && has_position(&work->entries[i], run->name_size, count++);
    if (!*whole)
        return FSDP_OK;
    FSDP_TRY(fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err));
    list->is_tuple = fsdp_path_in_tuple(work->entries[run->first].path[run->depth]);
    for (size_t i = run->first, end; i < run->end && *whole; i = end) {
        const fsdp_target_entry *entry = &work->entries[i];
        fsdp_value *value = &list->as.list.items[item++];
        list_run inner = item_at(work, run, i);
        end = inner.end;
        FSDP_TRY(entry->path_count == inner.depth ? fsdp_value_copy(entry->value, value, err)
                                                  : make_list(work, &inner, value, whole, err));
    }
    return FSDP_OK;
}

/* --- all lists -------------------------------------------------------------------------------- */

static void add_entry(folding *work, const fsdp_target_entry *entry, size_t first, size_t end)
{
    for (size_t i = first; i < end; i++)
        work->fold->number[i] = work->fold->count;
    work->fold->entries[work->fold->count++] = *entry;
}

static fsdp_status fold_list(folding *work, const list_run *run, bool *is_folded, fsdp_error *err)
{
    dcp_fold *fold = work->fold;
    fsdp_value *list = &fold->lists[fold->list_count];
    fsdp_target_entry entry = work->entries[run->first];
    *is_folded = true;
    FSDP_TRY(make_list(work, run, list, is_folded, err));
    if (!*is_folded) {
        fsdp_value_release(list);
        return FSDP_OK;
    }
    fold->list_count++;
    entry.name_size = run->name_size;
    entry.path_count = run->depth;
    entry.value = list;
    add_entry(work, &entry, run->first, run->end);
    return FSDP_OK;
}

static fsdp_status fold_all(folding *work, fsdp_error *err)
{
    dcp_fold *fold = work->fold;
    fold->entries = fsdp_alloc(work->count, sizeof *fold->entries);
    fold->number = fsdp_alloc(work->count, sizeof *fold->number);
    fold->lists = fsdp_alloc(work->contents_count, sizeof *fold->lists);
    if (!fold->entries || !fold->number || !fold->lists)
        return fsdp_fail_memory(err, "a checkpoint");
    for (size_t i = 0, end; i < work->count; i = end) {
        list_run run;
        bool is_folded = false;
        if (find_list(work, i, &run))
            FSDP_TRY(fold_list(work, &run, &is_folded, err));
        end = is_folded ? run.end : i + 1;
        if (!is_folded)
            add_entry(work, &work->entries[i], i, end);
    }
    return FSDP_OK;
}

fsdp_status dcp_fold_lists(const fsdp_target_entry *entries, size_t count, dcp_fold *fold_out,
                           fsdp_error *err)
{
    folding work = {.entries = entries, .count = count, .fold = fold_out};
    *fold_out = (dcp_fold){0};
    fsdp_status st = count_all(&work, err);
    if (st == FSDP_OK)
        st = fold_all(&work, err);
    if (st == FSDP_OK && work.containers.key.failed)
        st = fsdp_fail_memory(err, "the names of a checkpoint");
    fsdp_name_table_release(&work.names);
    container_table_release(&work.containers);
    fsdp_free(work.contents);
    return st;
}

void dcp_fold_release(dcp_fold *fold)
{
    for (size_t i = 0; fold->lists && i < fold->list_count; i++)
        fsdp_value_release(&fold->lists[i]);
    fsdp_free(fold->lists);
    fsdp_free(fold->entries);
    fsdp_free(fold->number);
}

/* Lists that become one value: see dcp_fold.h. */
#include "formats/dcp_fold.h"

#include "base/name_path.h"
#include "formats/name_table.h"
#include "formats/nesting.h"

#include <fsdp/text.h>
#include <stdlib.h>
#include <string.h>

/* What is below a list. */
typedef struct contents {
    size_t all, plain; /* plain: a value, and no dict on the way to it */
    size_t dicts;      /* without keys: what our readers went into the list for */
} contents;

typedef struct folding {
    const fsdp_target_entry *entries;
    size_t count;
    dcp_fold *fold;
    fsdp_name_table names; /* of entries */
    fsdp_name_table lists; /* by their paths: numbers of contents */
    fsdp_arena arena;
    contents *contents;
    size_t contents_count, contents_room;
    fsdp_text key;
} folding;

static bool is_nested(const fsdp_target_entry *entry)
{
    return entry->path && entry->path_count > 1 &&
           fsdp_path_fits(entry->name, entry->name_size, entry->path, entry->path_count);
}

/* Only positions from the element on. */
static bool is_plain(const fsdp_target_entry *entry, size_t from)
{
    for (size_t i = from; i < entry->path_count; i++)
        if (entry->path[i] >= 0)
            return false;
    return entry->value && !fsdp_value_is_opaque(entry->value);
}

/* --- counting --------------------------------------------------------------------------------- */

static void add_element(folding *work, const fsdp_target_entry *entry, size_t i, size_t *at)
{
    size_t bytes = nesting_bytes(entry->path[i]);
    fsdp_text_add(&work->key, (const char *)&entry->path[i], sizeof entry->path[i]);
    fsdp_text_add(&work->key, entry->name + *at, bytes);
    *at += bytes + 1;
}

static contents *find_contents(folding *work)
{
    const uint64_t *found = fsdp_name_table_find(&work->lists, work->key.data, work->key.size);
    return found ? &work->contents[*found] : NULL;
}

static contents *put_contents(folding *work)
{
    const char *key = fsdp_arena_strndup(&work->arena, work->key.data, work->key.size);
    if (!key ||
        !fsdp_grow(&work->contents, &work->contents_room, work->contents_count + 1,
                   sizeof *work->contents) ||
        !fsdp_name_table_put(&work->lists, key, work->key.size, work->contents_count))
        return NULL;
    work->contents[work->contents_count] = (contents){0};
    return &work->contents[work->contents_count++];
}

static fsdp_status count_entry(folding *work, const fsdp_target_entry *entry, fsdp_error *err)
{
    size_t at = 0;
    work->key.size = 0;
    for (size_t i = 0; i + 1 < entry->path_count; i++) {
        add_element(work, entry, i, &at);
        if (entry->path[i + 1] >= 0)
            continue;
        contents *list = work->key.failed ? NULL : find_contents(work);
        if (!list && !work->key.failed)
            list = put_contents(work);
        if (!list)
            return fsdp_fail_memory(err, "the names of a checkpoint");
        list->all++;
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
        if (is_nested(entry))
            FSDP_TRY(count_entry(work, entry, err));
    }
    return FSDP_OK;
}

/* --- one list --------------------------------------------------------------------------------- */

/* Entries [first, end) below the list to which `depth` elements lead. */
typedef struct list_run {
    size_t first, end, depth;
    size_t name_size; /* of the list */
} list_run;

static size_t prefix_size(const fsdp_target_entry *entry, size_t depth)
{
    size_t size = 0;
    for (size_t i = 0; i < depth; i++)
        size += nesting_bytes(entry->path[i]) + (i > 0);
    return size;
}

static bool is_below(const fsdp_target_entry *entry, const fsdp_target_entry *first, size_t depth,
                     size_t name_size)
{
    return is_nested(entry) && entry->path_count > depth && entry->name_size > name_size &&
           memcmp(entry->path, first->path, depth * sizeof *entry->path) == 0 &&
           memcmp(entry->name, first->name, name_size) == 0;
}

/* The outermost plain list that the entry is in, if all of it follows the entry. */
static bool find_list(folding *work, size_t first, list_run *run_out)
{
    const fsdp_target_entry *entry = &work->entries[first];
    const contents *list = NULL;
    size_t at = 0, depth = 0;
    work->key.size = 0;
    for (size_t i = 0; is_nested(entry) && i + 1 < entry->path_count && !list; i++) {
        add_element(work, entry, i, &at);
        const contents *found = entry->path[i + 1] < 0 ? find_contents(work) : NULL;
        if (found && found->all == found->plain && found->dicts > 0) {
            list = found;
            depth = i + 1;
        }
    }
    if (!list)
        return false;
    size_t end = first, name_size = prefix_size(entry, depth);
    while (end < work->count && is_below(&work->entries[end], entry, depth, name_size))
        end++;
    *run_out = (list_run){first, end, depth, name_size};
    return end - first == list->all && !fsdp_name_table_find(&work->names, entry->name, name_size);
}

/* Where the entries end that share the run's next element. */
static size_t end_of_item(const folding *work, const list_run *run, size_t from)
{
    const fsdp_target_entry *first = &work->entries[from];
    size_t depth = run->depth + 1, name_size = prefix_size(first, depth), end = from + 1;
    while (end < run->end && first->path_count > depth &&
           is_below(&work->entries[end], first, depth, name_size))
        end++;
    return end;
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
    for (size_t i = run->first; i < run->end; i = end_of_item(work, run, i))
        *whole = *whole && has_position(&work->entries[i], run->name_size, count++);
    if (!*whole)
        return FSDP_OK;
    FSDP_TRY(fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err));
    for (size_t i = run->first, end; i < run->end && *whole; i = end) {
        const fsdp_target_entry *entry = &work->entries[i];
        fsdp_value *value = &list->as.list.items[item++];
        end = end_of_item(work, run, i);
        list_run inner = {i, end, run->depth + 1, prefix_size(entry, run->depth + 1)};
        FSDP_TRY(entry->path_count == inner.depth ? fsdp_value_copy(entry->value, value, err)
                                                  : make_list(work, &inner, value, whole, err));
    }
    return FSDP_OK;
}

/* --- all of them ------------------------------------------------------------------------------ */

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
    fsdp_name_table_release(&work.names);
    fsdp_name_table_release(&work.lists);
    fsdp_arena_release(&work.arena);
    fsdp_free(work.contents);
    fsdp_text_release(&work.key);
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

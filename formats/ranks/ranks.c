/*
 * The state shared by the files of this room: entries by name, and boxes. Tensors and values that are not
 * distributed become items of entries: data equal on all ranks is kept once, other data per rank. See
 * ranks.h.
 */
#include "formats/ranks/ranks.h"

#include "base/data/box_internal.h"
#include "base/data/name_path.h"
#include "base/data/value_internal.h"
#include "formats/torch/torch_resave.h"

#include <string.h>

#define MOST_WORK ((int64_t)1 << 31) /* steps: a few seconds */

fsdp_status rank_files_spend(rank_files *set, size_t steps, fsdp_error *err)
{
    if (steps > (size_t)MOST_WORK || (set->work += (int64_t)steps) > MOST_WORK)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s': the lists of ranks and shards are too long to compare", set->where);
    return FSDP_OK;
}

/* === entries ================================================================================== */

/* The name below the key of the set. What is whole has the name of the key alone. */
static fsdp_status spell_entry(rank_files *set, const char *name, size_t size, rank_entry *entry,
                               fsdp_error *err)
{
    size_t key = set->key ? strlen(set->key) : 0, before = key > 0 && size > 0 ? key + 1 : key;
    char *copy = fsdp_arena_alloc(&set->arena, before + size + 1, 1);
    if (!copy)
        return fsdp_fail_memory(err, "the names of ranks");
    if (key > 0)
        memcpy(copy, set->key, key);
    if (before > key)
        copy[key] = '.';
    if (size > 0)
        memcpy(copy + before, name, size);
    entry->name = copy;
    entry->name_size = before + size;
    return FSDP_OK;
}

static fsdp_status nest_entry(rank_files *set, rank_entry *entry, fsdp_error *err)
{
    size_t count, keys = set->key != NULL;
    const int32_t *nesting = fsdp_source_nesting(set->source, &count);
    bool is_whole = fsdp_path_is_whole(nesting, count);
    FSDP_TRY(rank_files_spend(set, count, err));
    int32_t *path = fsdp_arena_alloc(&set->arena, count + 1, sizeof *path);
    if (!path)
        return fsdp_fail_memory(err, "the names of ranks");
    if (keys > 0)
        path[0] = (int32_t)strlen(set->key);
    count = keys > 0 && is_whole ? 0 : count;
    if (count > 0)
        memcpy(path + keys, nesting, count * sizeof *path);
    entry->path = path;
    entry->path_count = keys + count;
    return FSDP_OK;
}

fsdp_status rank_files_new_entry(rank_files *set, const char *name, size_t name_size,
                                 size_t *number_out, fsdp_error *err)
{
    if (set->entry_count == 0)
        set->entry_count = 1; /* number 0 means "no entry" */
    rank_entry entry = {.last_rank = -1};
    FSDP_TRY(spell_entry(set, name, name_size, &entry, err));
    FSDP_TRY(nest_entry(set, &entry, err));
    if (!fsdp_grow(&set->entries, &set->entry_room, set->entry_count + 1, sizeof *set->entries))
        return fsdp_fail_memory(err, "the names of ranks");
    *number_out = set->entry_count;
    set->entries[set->entry_count++] = entry;
    return FSDP_OK;
}

/* A file may hold a name twice: its second entry then matches the second one of the other files. */
fsdp_status rank_files_entry(rank_files *set, const char *name, size_t name_size,
                             rank_entry **entry_out, fsdp_error *err)
{
    const uint64_t *known = fsdp_name_table_find(&set->names, name, name_size);
    size_t number = known ? (size_t)*known : 0, fresh;
    if (!known) {
        FSDP_TRY(rank_files_new_entry(set, name, name_size, &number, err));
        const rank_entry *entry = &set->entries[number];
        if (!fsdp_name_table_put(&set->names, entry->name + entry->name_size - name_size, name_size,
                                 number))
            return fsdp_fail_memory(err, "the names of ranks");
    }
    while (set->entries[number].last_rank == set->rank) {
        FSDP_TRY(rank_files_spend(set, 16, err));
        if (set->entries[number].twin == 0) {
            FSDP_TRY(rank_files_new_entry(set, name, name_size, &fresh, err));
            set->entries[number].twin = fresh;
        }
        number = set->entries[number].twin;
    }
    *entry_out = &set->entries[number];
    (*entry_out)->last_rank = set->rank;
    return FSDP_OK;
}

static fsdp_status fail_differ(const rank_files *set, const rank_entry *entry, fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s': rank %d has a different dtype or shape of tensor '%s' than earlier ranks",
        set->where, set->rank, fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}

fsdp_status rank_files_spread(rank_files *set, rank_entry *entry, fsdp_dtype dtype, int ndim,
                              const int64_t *shape, fsdp_error *err)
{
    fsdp_error why = {0};
    char shown[200];
    fsdp_printable(entry->name, entry->name_size, shown, sizeof shown);
    if (entry->item_count > 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': '%s' is a distributed tensor on rank %d but not on rank %d",
                         set->where, shown, set->rank, entry->items[0].rank);
    if (entry->is_spread) {
        bool is_same = entry->dtype == dtype && entry->ndim == ndim &&
                       memcmp(entry->shape, shape, (size_t)ndim * sizeof *shape) == 0;
        return is_same ? FSDP_OK : fail_differ(set, entry, err);
    }
    if (fsdp_shape_check(ndim, shape, fsdp_dtype_size(dtype), &why) != FSDP_OK)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': tensor '%s': %s", set->where, shown,
                         why.text);
    entry->shape = fsdp_arena_alloc(&set->arena, (size_t)ndim, sizeof *shape);
    if (!entry->shape)
        return fsdp_fail_memory(err, "a shape");
    if (ndim > 0)
        memcpy(entry->shape, shape, (size_t)ndim * sizeof *shape);
    entry->is_spread = true;
    entry->dtype = dtype;
    entry->ndim = ndim;
    return FSDP_OK;
}

fsdp_status rank_files_add_chunk(rank_files *set, rank_chunks *chunks, int rank, int ndim,
                                 const fsdp_source_chunk *chunk, fsdp_error *err)
{
    size_t bytes = (size_t)ndim * sizeof(int64_t);
    int64_t *dims = fsdp_arena_alloc(&set->arena, (size_t)ndim * 3, sizeof *dims);
    if (!dims ||
        !fsdp_grow(&chunks->items, &chunks->room, chunks->count + 1, sizeof *chunks->items))
        return fsdp_fail_memory(err, "the pieces of a tensor");
    if (ndim > 0) {
        memcpy(dims, chunk->lo, bytes);
        memcpy(dims + ndim, chunk->len, bytes);
        if (chunk->strides)
            memcpy(dims + 2 * ndim, chunk->strides, bytes);
    }
    rank_chunk *copy = &chunks->items[chunks->count++];
    *copy = (rank_chunk){.rank = rank, .chunk = *chunk};
    copy->chunk.lo = dims;
    copy->chunk.len = dims + ndim;
    copy->chunk.strides = chunk->strides ? dims + 2 * ndim : NULL;
    return FSDP_OK;
}

fsdp_status rank_files_count_compared(rank_files *set, const torch_tensor *tensor, int64_t most,
                                      fsdp_error *err)
{
    const int64_t views = 16, small = (int64_t)1 << 30;
    int64_t span = tensor->data ? 0 : torch_tensor_span(tensor);
    set->compared += span < most ? span : most;
    return set->compared / views <= set->bytes + small / views
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_LIMIT,
                           "'%s': the tensors of the ranks are far larger than their files",
                           set->where);
}

/* === tensors and values that are not distributed ============================================== */

static fsdp_status fail_mixed(const rank_files *set, const rank_entry *entry, fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': '%s' is a distributed tensor on some ranks but not on rank %d",
                     set->where, fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                     set->rank);
}

static fsdp_status add_item(rank_files *set, rank_entry *entry, rank_item **item_out,
                            fsdp_error *err)
{
    if (entry->is_spread)
        return fail_mixed(set, entry, err);
    if (!fsdp_grow(&entry->items, &entry->item_room, entry->item_count + 1, sizeof *entry->items))
        return fsdp_fail_memory(err, "the values of ranks");
    *item_out = &entry->items[entry->item_count++];
    **item_out = (rank_item){.rank = set->rank};
    return FSDP_OK;
}

static fsdp_status named(const rank_entry *entry, fsdp_status status, fsdp_error *err)
{
    char shown[200];
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "'%s'",
                          fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    return status;
}

/* --- the step ----------------------------------------------------------------------------------- */

/* A tensor of one element as a number. */
static fsdp_status read_number(rank_files *set, const torch_tensor *tensor, fsdp_value *value_out,
                               fsdp_error *err)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(tensor->dtype);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    char stored[16];
    double number = 0;
    if (fsdp_box_count(&whole) != 1 || tensor->fix != 0 || info->size > sizeof number ||
        !(info->is_float || tensor->dtype == FSDP_I64))
        return FSDP_OK;
    FSDP_TRY(torch_tensor_pread(set->source, tensor, 0, stored, info->size, err));
    if (info->is_float) {
        fsdp_kernels_get()->cast(&number, FSDP_F64, stored, tensor->dtype, 1, FSDP_OVERFLOW_INF);
        *value_out = fsdp_value_f64(number);
    } else {
        int64_t count;
        memcpy(&count, stored, sizeof count);
        *value_out = fsdp_value_i64(count);
    }
    return FSDP_OK;
}

static fsdp_status note_step(rank_files *set, const torch_item *found, const fsdp_value *value,
                             fsdp_error *err)
{
    if (value->kind != FSDP_VALUE_I64 && value->kind != FSDP_VALUE_F64)
        return FSDP_OK;
    return fsdp_facts_note(&set->facts, found->name, found->name_size, set->path, value, err);
}

static fsdp_status note_step_tensor(rank_files *set, const torch_item *found,
                                    const torch_tensor *tensor, fsdp_error *err)
{
    fsdp_value value = {0};
    FSDP_TRY(read_number(set, tensor, &value, err));
    return note_step(set, found, &value, err);
}

/* --- items -------------------------------------------------------------------------------------- */

/* Ranks may have other numbers in a tensor of their own, never of another type. */
static fsdp_status check_dtype(const rank_files *set, const rank_entry *entry,
                               const torch_tensor *tensor, fsdp_error *err)
{
    const torch_tensor *first = entry->items[0].tensor;
    char shown[200];
    bool has_shape = first->ndim == tensor->ndim &&
                     (first->ndim == 0 || memcmp(first->shape, tensor->shape,
                                                 (size_t)first->ndim * sizeof *first->shape) == 0);
    if (first->dtype == tensor->dtype || !has_shape)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': tensor '%s' is of %s on rank %d and of %s on rank %d" FSDP_TWO_SAVES,
                     set->where, fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                     fsdp_dtype_name(first->dtype), entry->items[0].rank,
                     fsdp_dtype_name(tensor->dtype), set->rank);
}

fsdp_status rank_files_tensor(void *context, const torch_item *found, torch_tensor *tensor,
                              fsdp_error *err)
{
    rank_files *set = context;
    rank_entry *entry;
    rank_item *item = NULL;
    if (fsdp_fact_is_step(found->name, found->name_size))
        FSDP_TRY(note_step_tensor(set, found, tensor, err));
    FSDP_TRY(rank_files_entry(set, found->name, found->name_size, &entry, err));
    FSDP_TRY(add_item(set, entry, &item, err));
    item->is_tensor = true;
    const rank_item *first = &entry->items[0];
    if (item != first && first->is_tensor) {
        FSDP_TRY(rank_files_count_compared(set, tensor, INT64_MAX, err));
        FSDP_TRY(check_dtype(set, entry, tensor, err));
        FSDP_TRY(named(
            entry,
            torch_same_elements(set->source, first->tensor, tensor, INT64_MAX, &item->is_same, err),
            err));
    }
    if (item->is_same)
        return FSDP_OK;
    item->tensor = fsdp_alloc(1, sizeof *item->tensor);
    if (!item->tensor)
        return fsdp_fail_memory(err, "a tensor");
    *item->tensor = *tensor;
    tensor->data = NULL;
    return FSDP_OK;
}

/* An object that is not visited item by item is compared by its pickled bytes, where they can be
 * reproduced. */
static fsdp_status hash_stored(const torch_archive *archive, fsdp_node node,
                               const fsdp_value *value, fsdp_hash *stored, fsdp_error *err)
{
    enum { MOST = 64 << 20 };
    fsdp_text bytes = {0};
    if (node == 0 || !fsdp_value_is_opaque(value))
        return FSDP_OK;
    fsdp_status st = torch_resave_node(archive, node, MOST, &bytes, err);
    if (st == FSDP_OK && bytes.size > 0)
        *stored = fsdp_kernels_get()->hash(bytes.data, bytes.size);
    fsdp_text_release(&bytes);
    return st;
}

static bool is_same(const rank_item *first, const rank_item *item, const fsdp_value *value)
{
    return item != first && !first->is_tensor && fsdp_value_equal(&first->value, value) &&
           memcmp(&first->stored, &item->stored, sizeof first->stored) == 0;
}

fsdp_status rank_files_value(void *context, const torch_item *found, fsdp_value *value,
                             fsdp_error *err)
{
    rank_files *set = context;
    rank_entry *entry;
    rank_item *item = NULL;
    if (!set->key && found->name_size == 0 && value->kind == FSDP_VALUE_DICT &&
        value->as.list.count == 0)
        return FSDP_OK; /* a rank without the entry */
    if (fsdp_fact_is_step(found->name, found->name_size))
        FSDP_TRY(note_step(set, found, value, err));
    FSDP_TRY(rank_files_entry(set, found->name, found->name_size, &entry, err));
    FSDP_TRY(add_item(set, entry, &item, err));
    const rank_item *first = &entry->items[0];
    FSDP_TRY(hash_stored(found->archive, found->node, value, &item->stored, err));
    item->is_same = is_same(first, item, value);
    if (item->is_same)
        return FSDP_OK;
    item->value = *value;
    *value = (fsdp_value){0};
    return FSDP_OK;
}

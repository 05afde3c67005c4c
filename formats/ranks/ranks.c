/* The state shared by the files of this room: entries by name, and boxes. See ranks.h. */
#include "formats/ranks/ranks.h"

#include "base/data/box_internal.h"

#include <string.h>

#define MOST_WORK ((int64_t)1 << 31) /* steps: a few seconds */

fsdp_status rank_files_spend(rank_files *set, size_t steps, fsdp_error *err)
{
    if (steps > (size_t)MOST_WORK || (set->work += (int64_t)steps) > MOST_WORK)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s': the lists of ranks and shards are too long to compare", set->where);
    return FSDP_OK;
}

/* --- entries ------------------------------------------------------------------------------------ */

fsdp_status rank_files_new_entry(rank_files *set, const char *name, size_t name_size,
                                 size_t *number_out, fsdp_error *err)
{
    if (set->entry_count == 0)
        set->entry_count = 1; /* number 0 means "no entry" */
    char *copy = fsdp_arena_strndup(&set->arena, name, name_size);
    if (!copy ||
        !fsdp_grow(&set->entries, &set->entry_room, set->entry_count + 1, sizeof *set->entries))
        return fsdp_fail_memory(err, "the names of ranks");
    size_t count;
    const int32_t *nesting = fsdp_source_nesting(set->source, &count);
    FSDP_TRY(rank_files_spend(set, count, err));
    int32_t *path = fsdp_arena_alloc(&set->arena, count, sizeof *path);
    if (!path)
        return fsdp_fail_memory(err, "the names of ranks");
    if (count > 0)
        memcpy(path, nesting, count * sizeof *path);
    *number_out = set->entry_count;
    set->entries[set->entry_count++] = (rank_entry){
        .name = copy, .name_size = name_size, .path = path, .path_count = count, .last_rank = -1};
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
        if (!fsdp_name_table_put(&set->names, set->entries[number].name, name_size, number))
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

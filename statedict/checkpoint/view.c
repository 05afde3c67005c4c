/* The view of a checkpoint: see view.h. The files it points at are named relative to it. */
#include "statedict/checkpoint/view.h"

#include "statedict/sd/layout_internal.h"
#include "statedict/transfer/pipeline.h"
#include "statedict/transfer/box_plan.h"

#include "base/data/flow.h"

#include <string.h>

typedef struct source_list {
    const fsdp_manifest *manifest;
    const fsdp_entry *entry;
    fsdp_view_source *items;
    char (*files)[FSDP_SHARD_NAME_SIZE]; /* one name per item */
    size_t count, capacity, file_capacity;
    int64_t total; /* over all tensors */
} source_list;

static fsdp_status count_source(void *context, int rank, size_t part, const fsdp_box *box,
                                fsdp_error *err)
{
    (void)rank;
    (void)part;
    (void)box;
    (void)err;
    ++*(int64_t *)context;
    return FSDP_OK;
}

static fsdp_status each_stored(const fsdp_entry *entry, int owner, fsdp_stored_visit visit,
                               void *context, fsdp_error *err)
{
    fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    return fsdp_box_plan_stored(entry, owner, &whole, visit, context, err);
}

fsdp_status fsdp_view_mappings(const fsdp_manifest *manifest, const int *owners, int64_t *count_out,
                               fsdp_error *err)
{
    *count_out = 0;
    for (size_t i = 0; i < fsdp_sd_count(manifest->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(manifest->sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            FSDP_TRY(each_stored(entry, owners[i], count_source, count_out, err));
    }
    return FSDP_OK;
}

/* False for tensors with more dims than HDF5 has: their datasets in the shards are folded. */
static bool can_show(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_TENSOR && entry->ndim <= FSDP_DATASET_DIMS;
}

/* Finds the place of a stored box of a flat tensor in the rank's flat chunk. */
static void place_in_flat(const source_list *list, int rank, size_t part, fsdp_view_source *source)
{
    const fsdp_entry *entry = list->entry;
    const fsdp_flat *flat = fsdp_sd_flat_at(list->manifest->sd, (size_t)entry->flat);
    fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    int64_t first = fsdp_layout_flat_start(&entry->layout, fsdp_box_count(&whole), rank);
    for (size_t p = 0; p < part; p++) {
        fsdp_box before;
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, p, &before);
        first += fsdp_box_count(&before);
    }
    source->name = flat->name;
    source->name_size = flat->name_size;
    source->part = 0;
    source->ndim = 1;
    source->shape[0] = flat->count / fsdp_mesh_size(flat->mesh);
    source->lo[0] = first;
    source->len[0] = fsdp_box_count(&source->box);
}

static fsdp_status add_source(void *context, int rank, size_t part, const fsdp_box *box,
                              fsdp_error *err)
{
    source_list *list = context;
    if (!fsdp_grow(&list->items, &list->capacity, list->count + 1, sizeof *list->items) ||
        !fsdp_grow(&list->files, &list->file_capacity, list->count + 1, sizeof *list->files))
        return fsdp_fail_memory(err, "a view");
    fsdp_view_source *source = &list->items[list->count];
    const fsdp_entry *entry = list->entry;
    fsdp_shard_name(rank, list->manifest->file_count, list->files[list->count++]);
    source->name = entry->name;
    source->name_size = entry->name_size;
    source->part = (unsigned)part;
    source->ndim = entry->ndim;
    source->box = *box;
    memcpy(source->shape, box->len, sizeof box->len);
    memcpy(source->len, box->len, sizeof box->len);
    memset(source->lo, 0, sizeof source->lo);
    if (list->manifest->kind == FSDP_LOCAL && !list->manifest->compressed && entry->flat >= 0)
        place_in_flat(list, rank, part, source);
    return FSDP_OK;
}

static fsdp_status add_tensor(fsdp_view *view, source_list *list, int owner, fsdp_error *err)
{
    const fsdp_entry *entry = list->entry;
    fsdp_shard_dataset tensor = {.name = entry->name,
                                 .name_size = entry->name_size,
                                 .dtype = entry->dtype,
                                 .ndim = entry->ndim,
                                 .shape = entry->shape};
    list->count = 0;
    FSDP_TRY(each_stored(entry, owner, add_source, list, err));
    for (size_t i = 0; i < list->count; i++)
        list->items[i].file = list->files[i];
    return fsdp_view_add(view, &tensor, list->items, list->count, err);
}

static fsdp_status add_entries(fsdp_view *view, const fsdp_manifest *manifest, const int *owners,
                               source_list *list, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(manifest->sd); i++) {
        list->entry = fsdp_sd_at(manifest->sd, i);
        if (can_show(list->entry))
            FSDP_TRY(add_tensor(view, list, owners[i], err));
    }
    for (size_t i = 0; i < fsdp_sd_count(manifest->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(manifest->sd, i);
        if (entry->kind != FSDP_ENTRY_ALIAS)
            continue;
        const fsdp_entry *target = fsdp_sd_at(manifest->sd, entry->target);
        if (!can_show(target))
            continue;
        FSDP_TRY(fsdp_view_alias(view, entry->name, entry->name_size, target->name,
                                 target->name_size, err));
    }
    return FSDP_OK;
}

static fsdp_status write_view(const fsdp_view_opts *opts, const char *path, fsdp_error *err)
{
    fsdp_view *view = NULL;
    source_list list = {.manifest = opts->manifest};
    FSDP_TRY(fsdp_view_create(opts->io, path, &view, err));
    fsdp_status st = add_entries(view, opts->manifest, opts->owners, &list, err);
    fsdp_free(list.items);
    fsdp_free(list.files);
    if (st != FSDP_OK) {
        fsdp_view_discard(view);
        return st;
    }
    return fsdp_view_finish(view, opts->sync, err);
}

fsdp_status fsdp_view_write_as(const fsdp_view_opts *opts, const char *path, bool *written_out,
                               fsdp_error *err)
{
    int64_t mappings;
    *written_out = false;
    fsdp_flow("statedict/checkpoint/view.c", "view '%s'", path);
    FSDP_TRY(fsdp_view_mappings(opts->manifest, opts->owners, &mappings, err));
    if (mappings > FSDP_VIEW_MAPPINGS) {
        fsdp_notice(opts->watch,
                    "no " FSDP_VIEW_NAME
                    ": it would need %lld mappings, more than %d; convert to kind "
                    "full for other programs",
                    (long long)mappings, FSDP_VIEW_MAPPINGS);
        return FSDP_OK;
    }
    FSDP_TRY(write_view(opts, path, err));
    *written_out = true;
    return FSDP_OK;
}

fsdp_status fsdp_view_write(const fsdp_view_opts *opts, const char *dir, fsdp_error *err)
{
    bool written;
    char *path = fsdp_path_join(dir, FSDP_VIEW_NAME);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = fsdp_view_write_as(opts, path, &written, err);
    fsdp_free(path);
    return st;
}

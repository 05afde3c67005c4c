/*
 * The view of a checkpoint: writes, compares and replaces it. The files it points at are named relative to
 * it. See view.h.
 */
#include "statedict/checkpoint/view.h"
#include "base/core/mem.h"
#include "base/data/flow.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/transfer/box_plan.h"
#include "statedict/transfer/pipeline.h"

#include <errno.h>
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

/* Like fsdp_view_write, into any new file. *written_out is false when the view was left out. */
static fsdp_status view_write_as(const fsdp_view_opts *opts, const char *path, bool *written_out,
                                 fsdp_error *err)
{
    int64_t mappings;
    *written_out = false;
    fsdp_flow("statedict/checkpoint/view.c", "view '%s'", path);
    FSDP_TRY(fsdp_view_mappings(opts->manifest, opts->owners, &mappings, err));
    if (mappings > FSDP_VIEW_MAPPINGS) {
        fsdp_notice(opts->watch,
                    FSDP_VIEW_NAME " is not written: it would need %lld mappings, more than %d; "
                                   "convert to kind full for other programs",
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
    fsdp_status st = view_write_as(opts, path, &written, err);
    fsdp_free(path);
    return st;
}

/* === comparing and replacing =================================================================== */

/*
 * Checks that a view has the bytes that its checkpoint would get now: writes it again into an
 * fsdp_io that stores nothing and compares every piece with the file. Also replaces it.
 *
 * Pieces arrive from front to back, with two exceptions: the superblock comes last, and the
 * header of a tensor with aliases gets their number once all are known. Until then the file may
 * differ there; these places are kept as gaps, at most two for each alias.
 */

enum { PIECE_BYTES = 64 << 10 };

/* Bytes that differ from the file. */
typedef struct gap {
    int64_t first, end;
    bool closed; /* a later write there equals the file */
} gap;

typedef struct comparison {
    fsdp_io io;
    fsdp_file sink; /* receives the writes */
    fsdp_file *file;
    const char *path;
    int64_t size, end; /* of the file; of all writes so far */
    gap *gaps;         /* from front to back */
    size_t count, capacity, most, open;
    bool differs;
    fsdp_status status; /* of reading the file */
    fsdp_error err;
} comparison;

static comparison *comparison_of(fsdp_file *sink)
{
    return (comparison *)((char *)sink - offsetof(comparison, sink));
}

/* --- gaps --- */

static void add_gap(comparison *with, int64_t first, int64_t end)
{
    if (with->differs || with->count == with->most) {
        with->differs = true;
        return;
    }
    if (!fsdp_grow(&with->gaps, &with->capacity, with->count + 1, sizeof *with->gaps)) {
        with->status = fsdp_fail_memory(&with->err, "comparing a view");
        return;
    }
    with->gaps[with->count++] = (gap){first, end, false};
    with->open++;
}

static size_t first_gap_from(const comparison *with, int64_t offset)
{
    size_t low = 0, high = with->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (with->gaps[middle].first < offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void close_gaps(comparison *with, int64_t first, int64_t end)
{
    for (size_t i = first_gap_from(with, first); i < with->count && with->gaps[i].end <= end; i++) {
        with->open -= !with->gaps[i].closed;
        with->gaps[i].closed = true;
    }
}

/* --- comparing --- */

static void note_gaps(comparison *with, const char *written, const char *found, size_t size,
                      int64_t offset)
{
    for (size_t i = 0; i < size && !with->differs && with->status == FSDP_OK; i++) {
        size_t first = i;
        while (i < size && written[i] != found[i])
            i++;
        if (i > first)
            add_gap(with, offset + (int64_t)first, offset + (int64_t)i);
    }
}

/* Compares up to the end of the file. */
static void compare(comparison *with, const char *written, size_t size, int64_t offset, bool again)
{
    char found[PIECE_BYTES];
    with->differs = with->differs || offset + (int64_t)size > with->size;
    for (size_t at = 0; at < size && !with->differs && with->status == FSDP_OK;) {
        size_t n = size - at < sizeof found ? size - at : sizeof found;
        int64_t place = offset + (int64_t)at;
        with->status = fsdp_io_read(with->file, with->path, found, n, place, &with->err);
        if (with->status == FSDP_OK && memcmp(written + at, found, n) != 0) {
            with->differs = again;
            note_gaps(with, written + at, found, n, place);
        }
        at += n;
    }
}

static ssize_t sink_pwrite(fsdp_file *sink, const void *data, size_t size, int64_t offset)
{
    comparison *with = comparison_of(sink);
    bool again = offset < with->end;
    compare(with, data, size, offset, again);
    if (again)
        close_gaps(with, offset, offset + (int64_t)size);
    else
        with->end = offset + (int64_t)size;
    return with->status == FSDP_OK ? (ssize_t)size : -EIO;
}

static int sink_close(fsdp_file *sink)
{
    (void)sink;
    return 0;
}

static int sink_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    (void)path;
    (void)flags;
    *file_out = &((comparison *)io)->sink;
    return 0;
}

static void init(comparison *with, const char *path, const fsdp_sd *sd)
{
    static const fsdp_io_ops io_ops = {.name = "comparison", .open = sink_open};
    static const fsdp_io_ops file_ops = {.pwrite = sink_pwrite, .close = sink_close};
    *with = (comparison){.io.ops = &io_ops, .sink.ops = &file_ops, .path = path};
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_ALIAS)
            with->most += 2; /* equal bytes within a number split its gap in two */
}

static fsdp_status open_file(comparison *with, fsdp_io *io, fsdp_error *err)
{
    FSDP_TRY(fsdp_io_open(io, with->path, fsdp_io_read_beneath(io), &with->file, err));
    int result = with->file->ops->size(with->file, &with->size);
    return result < 0 ? fsdp_fail_errno(err, -result, "cannot stat '%s'", with->path) : FSDP_OK;
}

static fsdp_status run(comparison *with, const fsdp_view_opts *opts, bool *same_out,
                       fsdp_error *err)
{
    bool written;
    fsdp_view_opts into = {&with->io, opts->manifest, opts->owners, false, NULL};
    fsdp_status status = view_write_as(&into, with->path, &written, err);
    if (with->status != FSDP_OK && err)
        *err = with->err; /* why writing failed */
    if (with->status != FSDP_OK)
        return with->status;
    *same_out = !with->differs && with->open == 0 && with->end == with->size;
    return status;
}

fsdp_status fsdp_view_check(const fsdp_view_opts *opts, const char *dir, bool *same_out,
                            fsdp_error *err)
{
    comparison with;
    char *path = fsdp_path_join(dir, FSDP_VIEW_NAME);
    *same_out = false;
    if (!path)
        return fsdp_fail_memory(err, "a path");
    init(&with, path, opts->manifest->sd);
    fsdp_status status = open_file(&with, opts->io, err);
    if (status == FSDP_OK)
        status = run(&with, opts, same_out, err);
    (void)fsdp_io_close(&with.file, path, NULL); /* only read */
    fsdp_free(with.gaps);
    fsdp_free(path);
    return status;
}

/* --- a new one --- */

static fsdp_status replace(fsdp_io *io, const char *dir, const char *temporary, const char *path,
                           fsdp_error *err)
{
    FSDP_TRY(fsdp_io_rename(io, temporary, path, true, err));
    return fsdp_io_sync_dir(io, dir, err);
}

fsdp_status fsdp_view_replace(const fsdp_view_opts *opts, const char *dir, bool *written_out,
                              fsdp_error *err)
{
    fsdp_io *io = opts->io;
    fsdp_view_opts synced = *opts;
    char *path = fsdp_path_join(dir, FSDP_VIEW_NAME);
    char *temporary = fsdp_path_join(dir, FSDP_VIEW_TEMPORARY);
    fsdp_status status = path && temporary ? FSDP_OK : fsdp_fail_memory(err, "a path");
    synced.sync = true;
    *written_out = false;
    if (status == FSDP_OK) {
        (void)io->ops->unlink(io, temporary); /* of a repair that was killed */
        status = view_write_as(&synced, temporary, written_out, err);
        if (status == FSDP_OK && *written_out)
            status = replace(io, dir, temporary, path, err);
        if (status != FSDP_OK)
            (void)io->ops->unlink(io, temporary);
    }
    *written_out = *written_out && status == FSDP_OK;
    fsdp_free(temporary);
    fsdp_free(path);
    return status;
}

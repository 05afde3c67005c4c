/* Calls the table of an opened checkpoint, native or another program's: see checkpoint_internal.h. */
#include "statedict/checkpoint/checkpoint_internal.h"

#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/io/io_cache.h"
#include "statedict/commit/commit_internal.h"

#include "statedict/sd/layout_internal.h"

#include <limits.h>
#include <string.h>

void fsdp_checkpoint_close(fsdp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    checkpoint->ops->close(checkpoint);
    fsdp_free(checkpoint->is_missing);
    fsdp_filter_free(checkpoint->may_lack);
    fsdp_manifest_release(&checkpoint->manifest);
    fsdp_sd_free(checkpoint->metadata);
    fsdp_free(checkpoint->path);
    fsdp_io_cache_free(checkpoint->cache);
    fsdp_free(checkpoint);
}

/* --- reading ---------------------------------------------------------------------------------- */

fsdp_status fsdp_checkpoint_get(fsdp_checkpoint *checkpoint, const fsdp_read_request *request,
                                fsdp_error *err)
{
    return request->count > 0 ? checkpoint->ops->get(checkpoint, request, err) : FSDP_OK;
}

int64_t fsdp_reader_bytes(const fsdp_reader *reader)
{
    return reader->blocks.bytes_read + reader->source.bytes_read;
}

void fsdp_reader_release(fsdp_reader *reader)
{
    fsdp_block_reader_release(&reader->blocks);
    fsdp_source_reader_release(&reader->source);
    for (int i = 0; i < FSDP_READ_BUFFERS; i++)
        fsdp_free(reader->buffers.data[i]);
    *reader = (fsdp_reader){0};
}

fsdp_status fsdp_checkpoint_require(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err)
{
    return checkpoint->ops->require(checkpoint, entry, err);
}

/* --- queries ---------------------------------------------------------------------------------- */

const fsdp_checkpoint_info *fsdp_checkpoint_describe(const fsdp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return NULL;
    return &checkpoint->info;
}

const fsdp_sd *fsdp_checkpoint_sd(const fsdp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return NULL;
    return checkpoint->manifest.sd;
}

size_t fsdp_checkpoint_missing_count(const fsdp_checkpoint *checkpoint)
{
    if (!checkpoint)
        return 0;
    return checkpoint->missing_count;
}

const char *fsdp_checkpoint_missing_at(const fsdp_checkpoint *checkpoint, size_t number,
                                       size_t *size_out)
{
    size_t size;
    return checkpoint ? checkpoint->ops->missing_at(checkpoint, number, size_out ? size_out : &size)
                      : NULL;
}

/* --- conversions ------------------------------------------------------------------------------ */

fsdp_status fsdp_checkpoint_set_memory(fsdp_checkpoint *checkpoint, int64_t memory, const char *to,
                                       fsdp_error *err)
{
    return checkpoint->ops->set_memory(checkpoint, memory, to, err);
}

fsdp_status fsdp_checkpoint_announce(fsdp_checkpoint *checkpoint, size_t entry, bool repeated,
                                     fsdp_error *err)
{
    return checkpoint->ops->announce(checkpoint, fsdp_sd_tensor_of(checkpoint->manifest.sd, entry),
                                     repeated, err);
}

fsdp_reading fsdp_checkpoint_reading(const fsdp_checkpoint *checkpoint)
{
    return checkpoint->ops->reading(checkpoint);
}

/* --- defaults --------------------------------------------------------------------------------- */

fsdp_status fsdp_default_require(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err)
{
    (void)checkpoint, (void)entry, (void)err;
    return FSDP_OK;
}

fsdp_status fsdp_default_announce(fsdp_checkpoint *checkpoint, size_t entry, bool repeated,
                                  fsdp_error *err)
{
    (void)checkpoint, (void)entry, (void)repeated, (void)err;
    return FSDP_OK;
}

fsdp_status fsdp_default_set_memory(fsdp_checkpoint *checkpoint, int64_t memory, const char *to,
                                    fsdp_error *err)
{
    (void)checkpoint, (void)memory, (void)to, (void)err;
    return FSDP_OK;
}

fsdp_reading fsdp_default_reading(const fsdp_checkpoint *checkpoint)
{
    (void)checkpoint;
    return (fsdp_reading){.threads = INT_MAX, .apart = INT64_MAX};
}

bool fsdp_default_compare_places(const fsdp_checkpoint *checkpoint, size_t a, size_t b,
                                 int *order_out)
{
    (void)checkpoint, (void)a, (void)b, (void)order_out;
    return false;
}

/* --- files ------------------------------------------------------------------------------------ */

void fsdp_checkpoint_file_at(const fsdp_checkpoint *checkpoint, int number,
                             fsdp_checkpoint_file *file_out)
{
    if (!checkpoint || !file_out)
        return;
    checkpoint->ops->file_at(checkpoint, number, file_out);
}

fsdp_status fsdp_checkpoint_each_file(const fsdp_checkpoint *checkpoint, fsdp_file_visit visit,
                                      void *context, fsdp_error *err)
{
    return checkpoint->ops->each_file(checkpoint, visit, context, err);
}

fsdp_status fsdp_checkpoint_locate(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                                   fsdp_number_visit visit, void *context, fsdp_error *err)
{
    return checkpoint->ops->locate(checkpoint, entry, box, visit, context, err);
}

static bool lies_in(fsdp_io *io, const char *path, const char *dir)
{
    char *whole = NULL, *parent = NULL;
    bool inside = fsdp_path_split(path, &whole, &parent, NULL) == FSDP_OK &&
                  fsdp_paths_are_same(io, parent, dir);
    fsdp_free(whole);
    fsdp_free(parent);
    return inside;
}

typedef struct path_search {
    fsdp_io *io;
    const char *path;
    bool is_inside, is_same;
} path_search;

static fsdp_status look_at_file(void *context, int number, const char *path,
                                const fsdp_file_info *info, fsdp_error *err)
{
    path_search *search = context;
    (void)number;
    (void)info;
    (void)err;
    search->is_inside = search->is_inside || lies_in(search->io, path, search->path);
    search->is_same = search->is_same || fsdp_paths_are_same(search->io, path, search->path);
    return FSDP_OK;
}

static path_search search_files(const fsdp_checkpoint *checkpoint, const char *path)
{
    path_search search = {.io = checkpoint->io, .path = path};
    (void)fsdp_checkpoint_each_file(checkpoint, look_at_file, &search, NULL);
    return search;
}

static fsdp_status compare_with_now(void *context, int number, const char *path,
                                    const fsdp_file_info *then, fsdp_error *err)
{
    fsdp_io *io = context;
    fsdp_file_info now;
    (void)number;
    int result = io->ops->info(io, path, &now);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot look at '%s' again", path);
    if (now.device == then->device && now.node == then->node && now.size == then->size &&
        now.mtime_ns == then->mtime_ns)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s' was written to while it was read; try again when its writer has finished", path);
}

fsdp_status fsdp_checkpoint_check_unchanged(const fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    if (!checkpoint->source)
        return FSDP_OK;
    return fsdp_checkpoint_each_file(checkpoint, compare_with_now, checkpoint->io, err);
}

bool fsdp_checkpoint_lies_in(const fsdp_checkpoint *checkpoint, const char *dir)
{
    return lies_in(checkpoint->io, checkpoint->path, dir) ||
           search_files(checkpoint, dir).is_inside;
}

bool fsdp_checkpoint_takes_in(const fsdp_checkpoint *checkpoint, const char *path)
{
    return lies_in(checkpoint->io, path, checkpoint->path);
}

bool fsdp_checkpoint_reads(const fsdp_checkpoint *checkpoint, const char *path)
{
    return search_files(checkpoint, path).is_same;
}

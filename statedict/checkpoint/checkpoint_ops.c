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
    fsdp_free(checkpoint->owners);
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

fsdp_status fsdp_checkpoint_need_file(fsdp_checkpoint *checkpoint, int number, fsdp_error *err)
{
    return checkpoint->ops->need_file ? checkpoint->ops->need_file(checkpoint, number, err)
                                      : FSDP_OK;
}

fsdp_status fsdp_checkpoint_need_all(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    for (int i = 0; i < checkpoint->manifest.file_count; i++)
        FSDP_TRY(fsdp_checkpoint_need_file(checkpoint, i, err));
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_require(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err)
{
    return checkpoint->ops->require ? checkpoint->ops->require(checkpoint, entry, err) : FSDP_OK;
}

fsdp_status fsdp_checkpoint_stream_inner(fsdp_checkpoint *checkpoint, uint64_t tensor,
                                         int64_t memory, fsdp_slab_visit visit, void *context,
                                         fsdp_error *err)
{
    FSDP_NEED(err, checkpoint);
    FSDP_NEED_CALL(err, visit);
    if (checkpoint->ops->stream_inner)
        return checkpoint->ops->stream_inner(checkpoint, tensor, memory, visit, context, err);
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no inner tensor %llu", checkpoint->path,
                     (unsigned long long)tensor);
}

fsdp_status fsdp_checkpoint_check(fsdp_checkpoint *checkpoint, int threads, const fsdp_watch *watch,
                                  fsdp_error *err)
{
    FSDP_NEED(err, checkpoint);
    return checkpoint->ops->check ? checkpoint->ops->check(checkpoint, threads, watch, err)
                                  : FSDP_OK;
}

int64_t fsdp_checkpoint_check_bytes(const fsdp_checkpoint *checkpoint)
{
    return checkpoint->ops->check_bytes ? checkpoint->ops->check_bytes(checkpoint) : 0;
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

const char *fsdp_checkpoint_extra(const fsdp_checkpoint *checkpoint, const char *member)
{
    if (!checkpoint || !member)
        return NULL;
    const char *extra = checkpoint->ops->extra ? checkpoint->ops->extra(checkpoint, member) : NULL;
    bool is_metadata = strcmp(member, "metadata") == 0 || strcmp(member, "carried") == 0;
    return !extra && is_metadata ? checkpoint->manifest.metadata : extra;
}

bool fsdp_checkpoint_stored_box_at(const fsdp_checkpoint *checkpoint, size_t entry, size_t number,
                                   fsdp_box *box_out, int *file_out)
{
    if (!checkpoint)
        return false;
    return checkpoint->ops->stored_box &&
           checkpoint->ops->stored_box(checkpoint, entry, number, box_out, file_out);
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

fsdp_status fsdp_checkpoint_carry_values(fsdp_checkpoint *checkpoint, bool is_ours, fsdp_error *err)
{
    return checkpoint->ops->carry_values ? checkpoint->ops->carry_values(checkpoint, is_ours, err)
                                         : FSDP_OK;
}

fsdp_status fsdp_checkpoint_set_memory(fsdp_checkpoint *checkpoint, int64_t memory, const char *to,
                                       fsdp_error *err)
{
    return checkpoint->ops->set_memory ? checkpoint->ops->set_memory(checkpoint, memory, to, err)
                                       : FSDP_OK;
}

fsdp_status fsdp_checkpoint_announce(fsdp_checkpoint *checkpoint, size_t entry, bool repeated,
                                     fsdp_error *err)
{
    entry = fsdp_sd_tensor_of(checkpoint->manifest.sd, entry);
    return checkpoint->ops->announce ? checkpoint->ops->announce(checkpoint, entry, repeated, err)
                                     : FSDP_OK;
}

fsdp_reading fsdp_checkpoint_reading(const fsdp_checkpoint *checkpoint)
{
    return checkpoint->ops->reading ? checkpoint->ops->reading(checkpoint)
                                    : (fsdp_reading){.threads = INT_MAX, .apart = INT64_MAX};
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

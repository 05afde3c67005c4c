/*
 * The commit: a staging directory becomes a checkpoint by one rename, and a checkpoint goes away by
 * one. Step 3 of a save, on rank 0 only. See commit.h; why it is safe: docs/commit.md.
 */
#include "statedict/commit/commit_internal.h"

#include "base/data/flow.h"
#include "base/core/mem.h"
#include "statedict/commit/leftovers.h"
#include "statedict/manifest/manifest.h"
#include "statedict/commit/resume.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* --- begin ------------------------------------------------------------------------------------ */

static fsdp_status enter_run(fsdp_staging *staging, const fsdp_watch *watch, fsdp_error *err)
{
    int64_t step;
    fsdp_lease *lease;
    if (!fsdp_target_is_step(staging->target, &step))
        return FSDP_OK;
    FSDP_TRY(fsdp_lease_await(staging->io, staging->parent, watch, &lease, err));
    fsdp_lease_keep(&staging->keeper, lease, watch);
    return FSDP_OK;
}

/* Removes the files that publishing writes last, if they exist. The shard files stay. */
static void remove_published(const fsdp_staging *staging)
{
    static const char *const names[] = {FSDP_MANIFEST_NAME, FSDP_MANIFEST_TEMPORARY, FSDP_VIEW_NAME,
                                        FSDP_VIEW_TEMPORARY};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        fsdp_marker_remove(staging->io, staging->path, names[i]);
}

static fsdp_status prepare(fsdp_staging *staging, const char *dir, const char *hash,
                           fsdp_error *err)
{
    FSDP_TRY(fsdp_place_recover(staging->io, staging->target, err));
    FSDP_TRY(fsdp_place_check(staging->io, dir, staging->overwrite, err));
    fsdp_leftovers_clear(staging->io, staging->target, staging->parent, hash, &staging->path,
                         &staging->marker);
    if (!staging->path)
        return fsdp_staging_make(staging->io, staging->target, &staging->path, &staging->marker,
                                 err);
    staging->is_taken_up = true;
    remove_published(staging);
    return FSDP_OK;
}

fsdp_status fsdp_staging_begin(fsdp_io *io, const char *dir, const fsdp_staging_opts *opts,
                               fsdp_staging *staging_out, fsdp_error *err)
{
    fsdp_staging *staging = staging_out;
    *staging = (fsdp_staging){
        .io = io ? io : fsdp_io_posix(), .durable = opts->durable, .overwrite = opts->overwrite};
    fsdp_status status = fsdp_path_split(dir, &staging->target, &staging->parent, err);
    if (status == FSDP_OK && !opts->has_lease)
        status = enter_run(staging, opts->watch, err);
    if (status == FSDP_OK)
        status = prepare(staging, dir, opts->hash, err);
    if (status != FSDP_OK)
        fsdp_staging_release(staging);
    return status;
}

/* --- keeping the lease during a save ---------------------------------------------------------- */

fsdp_watch fsdp_staging_watch(fsdp_staging *staging, const fsdp_watch *watch)
{
    staging->keeper.watch = *watch;
    return fsdp_lease_keeper_watch(&staging->keeper);
}

fsdp_status fsdp_staging_judge(const fsdp_staging *staging, fsdp_status status, fsdp_error *err)
{
    const fsdp_error *lost = &staging->keeper.lost;
    if (status != FSDP_ERR_CANCELLED || lost->status == FSDP_OK)
        return status;
    return fsdp_fail(err, FSDP_ERR_EXISTS, "lost the lease of the run while saving: %s",
                     lost->text);
}

fsdp_lease *fsdp_staging_move_lease(fsdp_staging *staging)
{
    fsdp_lease *lease = staging->keeper.lease;
    staging->keeper.lease = NULL;
    return lease;
}

void fsdp_staging_abandon(fsdp_staging *staging, fsdp_error *err)
{
    if (staging->path)
        fsdp_leftovers_discard(staging->io, staging->path, staging->target, &staging->marker, err);
    (void)fsdp_io_close(&staging->marker, FSDP_MARKER_SAVING, NULL); /* the directory was empty */
    fsdp_free(staging->path);
    staging->path = NULL;
}

void fsdp_staging_release(fsdp_staging *staging)
{
    (void)fsdp_io_close(&staging->marker, FSDP_MARKER_SAVING, NULL);
    fsdp_lease_release(staging->keeper.lease);
    fsdp_free(staging->target);
    fsdp_free(staging->parent);
    fsdp_free(staging->path);
    *staging = (fsdp_staging){0};
}

/* --- delete ----------------------------------------------------------------------------------- */

fsdp_status fsdp_checkpoint_delete(fsdp_io *io, const char *dir, fsdp_error *err)
{
    char *path = NULL, *parent = NULL;
    fsdp_status status = fsdp_path_split(dir, &path, &parent, err);
    if (status == FSDP_OK)
        status = fsdp_delete_as(io ? io : fsdp_io_posix(), path, parent, path, err);
    fsdp_free(path);
    fsdp_free(parent);
    return status;
}

/* --- the manifest ----------------------------------------------------------------------------- */

static fsdp_status write_text(const fsdp_staging *staging, const char *path, const char *text,
                              size_t size, fsdp_error *err)
{
    fsdp_file *file;
    FSDP_TRY(fsdp_io_open(staging->io, path, FSDP_IO_CREATE, &file, err));
    fsdp_status status = fsdp_io_write(file, path, text, size, 0, err);
    if (status == FSDP_OK && staging->durable)
        status = fsdp_io_sync(file, path, err);
    fsdp_status closed = fsdp_io_close(&file, path, status == FSDP_OK ? err : NULL);
    return status == FSDP_OK ? closed : status;
}

/* After this the staging directory is a whole checkpoint under another name. */
static fsdp_status write_manifest(const fsdp_staging *staging, const char *text, size_t size,
                                  fsdp_error *err)
{
    fsdp_flow("statedict/commit/commit.c", "manifest: %zu bytes", size);
    char *temporary = fsdp_path_join(staging->path, FSDP_MANIFEST_TEMPORARY);
    char *path = fsdp_path_join(staging->path, FSDP_MANIFEST_NAME);
    fsdp_status status = temporary && path ? write_text(staging, temporary, text, size, err)
                                           : fsdp_fail_memory(err, staging->path);
    if (status == FSDP_OK)
        status = fsdp_io_rename(staging->io, temporary, path, true, err);
    if (status == FSDP_OK && staging->durable)
        status = fsdp_io_sync_dir(staging->io, staging->path, err);
    fsdp_free(temporary);
    fsdp_free(path);
    return status;
}

/* --- one path in the place of another --- */

static fsdp_status move_into_place(const fsdp_swap *swap, fsdp_error *err)
{
    fsdp_io *io = swap->io;
    fsdp_flow("statedict/commit/commit.c", "publish: rename to '%s'", swap->target);
    int result = io->ops->rename(io, swap->path, swap->target, false);
    if (fsdp_moves_needed(result) && swap->is_checkpoint)
        return fsdp_moves_publish(io, swap->path, swap->target, swap->durable, err);
    /* without a rename that refuses to replace, the check and the rename are two steps */
    if (fsdp_moves_needed(result) && !fsdp_io_exists(io, swap->target))
        result = io->ops->rename(io, swap->path, swap->target, true);
    if (result == 0)
        return FSDP_OK;
    if (result == -EEXIST || result == -ENOTEMPTY)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists: another job made it meanwhile",
                         swap->target);
    return fsdp_fail_errno(err, -result, "cannot rename '%s' to '%s'", swap->path, swap->target);
}

/* The fsync of the parent failed: a result that is not reported as written must not stay. */
static void withdraw(const fsdp_swap *swap)
{
    if (swap->io->ops->rename(swap->io, swap->target, swap->path, true) < 0)
        (void)fsdp_delete_as(swap->io, swap->target, swap->parent, swap->target, NULL);
}

fsdp_status fsdp_swap_sync(const fsdp_swap *swap, fsdp_error *err)
{
    if (!swap->durable)
        return FSDP_OK;
    if (swap->folder)
        FSDP_TRY(fsdp_io_sync_dir(swap->io, swap->folder, err));
    return fsdp_io_sync_dir(swap->io, swap->parent, err);
}

fsdp_status fsdp_swap_new(const fsdp_swap *swap, fsdp_error *err)
{
    FSDP_TRY(move_into_place(swap, err));
    fsdp_status status = fsdp_swap_sync(swap, err);
    if (status != FSDP_OK)
        withdraw(swap);
    return status;
}

typedef struct forgetting {
    const fsdp_swap *swap;
    fsdp_status status;
    fsdp_error *err;
} forgetting;

static bool forget_one(void *context, const char *path)
{
    forgetting *work = context;
    const fsdp_swap *swap = work->swap;
    /* DIR must be durable before what it replaced is gone */
    work->status = fsdp_io_sync_dir(swap->io, swap->parent, work->err);
    if (work->status == FSDP_OK)
        work->status = fsdp_delete_as(swap->io, path, swap->parent, swap->target, work->err);
    return work->status == FSDP_OK;
}

/* Removes DIR.old-UUID, which an overwrite left when it was killed after its second rename. With
 * two of them set aside, the newer one could not be identified. */
static fsdp_status forget_replaced(const fsdp_swap *swap, fsdp_error *err)
{
    forgetting work = {swap, FSDP_OK, err};
    bool seen = fsdp_beside_each(swap->io, swap->target, FSDP_SUFFIX_REPLACED, forget_one, &work);
    if (work.status == FSDP_OK && !seen)
        return fsdp_fail(err, FSDP_ERR_IO, "cannot list '%s'", swap->parent);
    return work.status;
}

static void report_aside(const char *target, const char *old, fsdp_error *err)
{
    if (!err)
        return;
    fsdp_error why = *err;
    fsdp_fail(err, why.status, "%s; the old '%s' is '%s': rename it back", why.text, target, old);
    err->errnum = why.errnum;
}

/* For file systems without RENAME_EXCHANGE: renames the old one to DIR.old-UUID first. */
static fsdp_status replace_in_turn(const fsdp_swap *swap, fsdp_error *err)
{
    char *old;
    FSDP_TRY(fsdp_beside_name(swap->target, FSDP_SUFFIX_REPLACED, &old, err));
    fsdp_status status = fsdp_io_rename(swap->io, swap->target, old, true, err);
    if (status == FSDP_OK) {
        status = fsdp_swap_new(swap, err);
        if (status == FSDP_OK)
            (void)fsdp_delete_as(swap->io, old, swap->parent, swap->target, NULL);
        else if (swap->io->ops->rename(swap->io, old, swap->target, true) < 0 &&
                 fsdp_io_exists(swap->io, old)) /* another job may have put it back */
            report_aside(swap->target, old, err);
    }
    fsdp_free(old);
    return status;
}

fsdp_status fsdp_swap_replace(const fsdp_swap *swap, bool *is_old_out, fsdp_error *err)
{
    fsdp_io *io = swap->io;
    *is_old_out = false;
    FSDP_TRY(forget_replaced(swap, err));
    int result = io->ops->exchange(io, swap->path, swap->target);
    if (fsdp_moves_needed(result))
        return replace_in_turn(swap, err);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot exchange '%s' and '%s'", swap->path,
                               swap->target);
    fsdp_status status = fsdp_swap_sync(swap, err);
    if (status == FSDP_OK)
        (void)fsdp_delete_as(io, swap->path, swap->parent, swap->target, NULL);
    else /* the exchange is not durable; when it cannot be undone, both stay */
        *is_old_out = io->ops->exchange(io, swap->path, swap->target) != 0;
    return status;
}

/* --- publish ---------------------------------------------------------------------------------- */

static fsdp_swap swap_of(const fsdp_staging *staging)
{
    return (fsdp_swap){.io = staging->io,
                       .path = staging->path,
                       .target = staging->target,
                       .parent = staging->parent,
                       .durable = staging->durable,
                       .is_checkpoint = true};
}

static fsdp_status replace(fsdp_staging *staging, fsdp_error *err)
{
    FSDP_TRY(fsdp_place_check(staging->io, staging->target, true, err)); /* it may have changed */
    /* the old one must not be taken for a staging when it stands under such a name */
    fsdp_marker_remove(staging->io, staging->target, FSDP_MARKER_SAVING);
    bool is_old;
    fsdp_swap swap = swap_of(staging);
    fsdp_status status = fsdp_swap_replace(&swap, &is_old, err);
    if (is_old) {
        fsdp_free(staging->path);
        staging->path = NULL;
    }
    return status;
}

/* Closes before it removes: NFS keeps a removed open file under another name. */
static void end_marker(fsdp_staging *staging)
{
    (void)fsdp_io_close(&staging->marker, FSDP_MARKER_SAVING, NULL);
    fsdp_marker_remove(staging->io, staging->target, FSDP_MARKER_SAVING);
}

fsdp_status fsdp_staging_publish(fsdp_staging *staging, const char *manifest, size_t size,
                                 fsdp_error *err)
{
    FSDP_TRY(write_manifest(staging, manifest, size, err));
    if (staging->has_notes)
        fsdp_marker_remove(staging->io, staging->path, FSDP_RESUME_NAME);
    staging->has_notes = false;
    if (staging->keeper.lease)
        FSDP_TRY(fsdp_lease_refresh(staging->keeper.lease, err));
    bool replaces = staging->overwrite && fsdp_io_exists(staging->io, staging->target);
    fsdp_swap swap = swap_of(staging);
    FSDP_TRY(fsdp_place_forget_digests(staging->io, staging->target, staging->parent,
                                       staging->durable, err));
    FSDP_TRY(replaces ? replace(staging, err) : fsdp_swap_new(&swap, err));
    end_marker(staging);
    fsdp_free(staging->path);
    staging->path = NULL;
    return FSDP_OK;
}

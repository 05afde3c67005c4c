/*
 * The commit: a staging directory becomes a checkpoint by one rename, and a checkpoint goes away by
 * one. Step 3 of a save, on rank 0 only. See commit.h; why it is safe: docs/commit.md.
 */
#include "statedict/commit/commit_internal.h"
#include "base/core/mem.h"
#include "base/data/flow.h"
#include "statedict/commit/leftovers.h"
#include "statedict/commit/resume.h"
#include "statedict/manifest/manifest.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* === the target of a save ===================================================================== */

/*
 * Checks the target of a save before its first byte: remains of earlier saves, and whether the name
 * is free. Only place_recover writes.
 */

/* --- leftovers -------------------------------------------------------------------------------- */

/* An overwrite that was killed between its two renames left DIR.old-UUID and no DIR. */
static fsdp_status restore_replaced(fsdp_io *io, const char *dir, fsdp_error *err)
{
    char *old;
    if (!fsdp_replaced_find(io, dir, &old))
        return FSDP_OK;
    fsdp_status status = fsdp_io_rename(io, old, dir, true, err);
    fsdp_free(old);
    return status;
}

/* Restores or removes what an interrupted overwrite, publish or delete left at DIR. */
static fsdp_status place_recover(fsdp_io *io, const char *dir, fsdp_error *err)
{
    fsdp_file_info info;
    (void)fsdp_marker_forget(io, dir);
    int result = io->ops->info(io, dir, &info);
    if (result == 0 && info.kind == FSDP_FILE_DIRECTORY && !fsdp_has_manifest(io, dir)) {
        FSDP_TRY(fsdp_moves_clear(io, dir, err));
        result = io->ops->info(io, dir, &info);
    }
    return result == -ENOENT ? restore_replaced(io, dir, err) : FSDP_OK;
}

/* A file that cannot be read is not known to be a digest file. */
static bool is_digest_file(fsdp_io *io, const char *path)
{
    char head[sizeof FSDP_DIGESTS_MAGIC - 1];
    fsdp_file *file = NULL;
    if (io->ops->open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file) < 0)
        return false;
    bool is_ours = fsdp_io_read(file, path, head, sizeof head, 0, NULL) == FSDP_OK &&
                   memcmp(head, FSDP_DIGESTS_MAGIC, sizeof head) == 0;
    (void)fsdp_io_close(&file, path, NULL); /* only read */
    return is_ours;
}

fsdp_status fsdp_place_forget_digests(fsdp_io *io, const char *dir, const char *parent,
                                      bool durable, fsdp_error *err)
{
    fsdp_text path = {0};
    fsdp_status status = FSDP_OK;
    fsdp_text_addf(&path, "%s" FSDP_DIGESTS_SUFFIX, dir);
    if (path.failed) {
        status = fsdp_fail_memory(err, dir);
    } else if (is_digest_file(io, path.data)) {
        int result = io->ops->unlink(io, path.data);
        if (result < 0 && result != -ENOENT)
            status = fsdp_fail_errno(err, -result, "cannot remove '%s'", path.data);
        else if (durable)
            status = fsdp_io_sync_dir(io, parent, err);
    }
    fsdp_text_release(&path);
    return status;
}

bool fsdp_paths_are_same(fsdp_io *io, const char *a, const char *b)
{
    fsdp_file_info left, right;
    return io->ops->info(io, a, &left) == 0 && io->ops->info(io, b, &right) == 0 &&
           left.device == right.device && left.node == right.node;
}

/* --- checking the name ------------------------------------------------------------------------ */

static fsdp_status check_parent(fsdp_io *io, const char *dir, const char *parent, fsdp_error *err)
{
    fsdp_file_info info;
    fsdp_space space;
    int result = io->ops->info(io, parent, &info);
    if (result == 0 && info.kind != FSDP_FILE_DIRECTORY)
        result = -ENOTDIR;
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot save to '%s': '%s'", dir, parent);
    if (fsdp_has_manifest(io, parent))
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot save to '%s': '%s' is a checkpoint, and a checkpoint cannot hold another", dir,
            parent);
    if (io->ops->space(io, parent, &space) == 0 && space.write_errno != 0)
        return fsdp_fail_errno(err, space.write_errno,
                               "cannot save to '%s': '%s' cannot be written", dir, parent);
    return FSDP_OK;
}

static int take_foreign_name(void *context, const char *name)
{
    char **foreign = context;
    if (fsdp_is_checkpoint_file(name))
        return 0;
    *foreign = fsdp_strndup(name, strlen(name));
    return 1;
}

/* An overwrite deletes the directory, so it may hold only files of a checkpoint. */
static fsdp_status require_only_ours(fsdp_io *io, const char *dir, fsdp_error *err)
{
    bool ours;
    char *foreign = NULL;
    FSDP_TRY(fsdp_manifest_is_ours(io, dir, &ours, err));
    if (!ours)
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "cannot overwrite '%s': it is not a checkpoint; move it away first", dir);
    int result = io->ops->list(io, dir, take_foreign_name, &foreign);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot list '%s'", dir);
    if (!foreign)
        return FSDP_OK;
    fsdp_fail(err, FSDP_ERR_EXISTS,
              "cannot overwrite '%s': it also holds '%s', which does not belong to the checkpoint; "
              "move that away first",
              dir, foreign);
    fsdp_free(foreign);
    return FSDP_ERR_EXISTS;
}

/* Trailing slashes are cut: with one, the system call follows the link. */
static bool is_link(fsdp_io *io, const char *dir)
{
    fsdp_file *file = NULL;
    char *path, *parent;
    if (fsdp_path_split(dir, &path, &parent, NULL) != FSDP_OK)
        return false;
    int result = io->ops->open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file);
    (void)fsdp_io_close(&file, path, NULL);
    fsdp_free(path);
    fsdp_free(parent);
    return result == -ELOOP;
}

fsdp_status fsdp_place_refuse_link(fsdp_io *io, const char *path, fsdp_error *err)
{
    if (!is_link(io, path))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS,
                     "'%s' is a symbolic link, which is neither followed nor replaced; name its "
                     "target, or remove it",
                     path);
}

/* A dangling link looks like a free name to calls that follow links. */
static fsdp_status refuse_dangling_link(fsdp_io *io, const char *dir, fsdp_error *err)
{
    if (!is_link(io, dir))
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_EXISTS,
        "'%s' is a symbolic link to nothing; remove it, or save to the intended target", dir);
}

/* Checks the checkpoint that a save would restore to DIR (place_recover). */
static fsdp_status check_set_aside(fsdp_io *io, const char *dir, bool overwrite, fsdp_error *err)
{
    char *old;
    if (!fsdp_replaced_find(io, dir, &old))
        return FSDP_OK;
    fsdp_status status =
        overwrite ? require_only_ours(io, old, err)
                  : fsdp_fail(err, FSDP_ERR_EXISTS,
                              "the overwrite of '%s' was interrupted; '%s' is the old checkpoint",
                              dir, old);
    fsdp_free(old);
    return status;
}

static fsdp_status check_overwrite(fsdp_io *io, const char *dir, fsdp_error *err)
{
    int64_t step;
    if (fsdp_dir_is_step(dir, &step))
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "cannot overwrite '%s': it is a step of a run, and steps are never "
                         "overwritten; save under another name, or remove it first",
                         dir);
    if (is_link(io, dir))
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "cannot overwrite '%s': it is a symbolic link, which is not followed; "
                         "name its target, or remove it",
                         dir);
    return require_only_ours(io, dir, err);
}

static fsdp_status check_name(fsdp_io *io, const char *dir, bool overwrite, fsdp_error *err)
{
    fsdp_file_info info;
    int result = io->ops->info(io, dir, &info);
    if (result == -ENOENT)
        FSDP_TRY(refuse_dangling_link(io, dir, err));
    if (result == -ENOENT)
        return check_set_aside(io, dir, overwrite, err);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot stat '%s'", dir);
    if (info.kind != FSDP_FILE_DIRECTORY)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists and is not a directory", dir);
    if (!overwrite)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists", dir);
    return check_overwrite(io, dir, err);
}

fsdp_status fsdp_place_check_parent(fsdp_io *io, const char *dir, fsdp_error *err)
{
    char *path, *parent;
    FSDP_TRY(fsdp_path_split(dir, &path, &parent, err));
    fsdp_status status = fsdp_name_check_room(path, err);
    if (status == FSDP_OK)
        status = check_parent(io, dir, parent, err);
    fsdp_free(path);
    fsdp_free(parent);
    return status;
}

fsdp_status fsdp_place_check(fsdp_io *io, const char *dir, bool overwrite, fsdp_error *err)
{
    FSDP_TRY(fsdp_place_check_parent(io, dir, err));
    return check_name(io, dir, overwrite, err);
}

/* === the protocol ============================================================================= */

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
    FSDP_TRY(place_recover(staging->io, staging->target, err));
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
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' exists: another job created it in the meantime", swap->target);
    return fsdp_fail_errno(err, -result, "cannot rename '%s' to '%s'", swap->path, swap->target);
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
    /* the fsync of the parent failed: a result that is not reported as written must not stay */
    if (status != FSDP_OK && swap->io->ops->rename(swap->io, swap->target, swap->path, true) < 0)
        (void)fsdp_delete_as(swap->io, swap->target, swap->parent, swap->target, NULL);
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
    fsdp_fail(err, why.status, "%s; the old '%s' is '%s'; rename it back", why.text, target, old);
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
    /* closes before it removes: NFS keeps a removed open file under another name */
    (void)fsdp_io_close(&staging->marker, FSDP_MARKER_SAVING, NULL);
    fsdp_marker_remove(staging->io, staging->target, FSDP_MARKER_SAVING);
    fsdp_free(staging->path);
    staging->path = NULL;
    return FSDP_OK;
}

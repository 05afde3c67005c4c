/*
 * The target of a save, before its first byte: what an earlier save may have left there, whether the
 * name may be taken, whether there is room. Nothing here writes, but for fsdp_target_recover.
 */
#include "statedict/commit_internal.h"

#include "base/mem.h"
#include "statedict/manifest.h"

#include <errno.h>
#include <string.h>

/* --- what was left ---------------------------------------------------------------------------- */

/* An overwrite that was cut between its two renames left no DIR, and the old one beside it. */
static fsdp_status restore_replaced(fsdp_io *io, const char *dir, fsdp_error *err)
{
    char *old;
    if (!fsdp_replaced_find(io, dir, &old))
        return FSDP_OK;
    fsdp_status status = fsdp_io_rename(io, old, dir, true, err);
    fsdp_free(old);
    return status;
}

fsdp_status fsdp_target_recover(fsdp_io *io, const char *dir, fsdp_error *err)
{
    fsdp_file_info info;
    int result = io->ops->info(io, dir, &info);
    if (result == 0 && info.kind == FSDP_FILE_DIRECTORY && !fsdp_has_manifest(io, dir)) {
        FSDP_TRY(fsdp_moves_clear(io, dir, err));
        result = io->ops->info(io, dir, &info);
    }
    return result == -ENOENT ? restore_replaced(io, dir, err) : FSDP_OK;
}

/* --- may the name be taken? ------------------------------------------------------------------- */

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
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot save to '%s': '%s' is a checkpoint, which holds no other", dir,
                         parent);
    if (io->ops->space(io, parent, &space) == 0 && !space.is_writable)
        return fsdp_fail_errno(err, EACCES, "cannot save to '%s': '%s' cannot be written", dir,
                               parent);
    return FSDP_OK;
}

static int take_foreign_name(void *user, const char *name)
{
    char **foreign = user;
    if (fsdp_is_checkpoint_file(name))
        return 0;
    *foreign = fsdp_strndup(name, strlen(name));
    return 1;
}

/* An overwrite deletes the directory: only what we wrote may go with it. */
static fsdp_status require_only_ours(fsdp_io *io, const char *dir, fsdp_error *err)
{
    bool ours;
    char *foreign = NULL;
    FSDP_TRY(fsdp_manifest_is_ours(io, dir, &ours, err));
    if (!ours)
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' exists and is no checkpoint: it is not overwritten, remove it first",
                         dir);
    int result = io->ops->list(io, dir, take_foreign_name, &foreign);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot list '%s'", dir);
    if (!foreign)
        return FSDP_OK;
    fsdp_fail(err, FSDP_ERR_EXISTS,
              "'%s' also holds '%s', which is not of the checkpoint: it is not overwritten, move "
              "that away first",
              dir, foreign);
    fsdp_free(foreign);
    return FSDP_ERR_EXISTS;
}

static fsdp_status check_name(fsdp_io *io, const char *dir, bool overwrite, fsdp_error *err)
{
    fsdp_file_info info;
    int result = io->ops->info(io, dir, &info);
    if (result == -ENOENT)
        return FSDP_OK;
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot look at '%s'", dir);
    if (info.kind != FSDP_FILE_DIRECTORY)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists and is not a directory", dir);
    if (!overwrite)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists; say overwrite to replace it", dir);
    return require_only_ours(io, dir, err);
}

fsdp_status fsdp_target_check(fsdp_io *io, const char *dir, bool overwrite, fsdp_error *err)
{
    char *path, *parent;
    FSDP_TRY(fsdp_path_split(dir, &path, &parent, err));
    fsdp_status status = check_parent(io, dir, parent, err);
    if (status == FSDP_OK)
        status = check_name(io, path, overwrite, err);
    fsdp_free(path);
    fsdp_free(parent);
    return status;
}

/* --- is there room? --------------------------------------------------------------------------- */

fsdp_status fsdp_require_space(fsdp_io *io, const char *dir, int64_t bytes, int64_t files,
                               int64_t *free_out, fsdp_error *err)
{
    fsdp_space space;
    char *path = NULL, *parent = NULL;
    FSDP_TRY(fsdp_path_split(dir, &path, &parent, err));
    int result = io->ops->space(io, parent, &space);
    fsdp_free(path);
    fsdp_free(parent);
    *free_out = result < 0 ? -1 : space.free_bytes;
    if (result < 0)
        return FSDP_OK;
    if (bytes > space.free_bytes)
        return fsdp_fail(err, FSDP_ERR_NO_SPACE,
                         "'%s' needs %lld bytes and its file system has %lld free", dir,
                         (long long)bytes, (long long)space.free_bytes);
    if (files > space.free_files)
        return fsdp_fail(err, FSDP_ERR_NO_SPACE,
                         "'%s' needs %lld files and its file system has room for %lld", dir,
                         (long long)files, (long long)space.free_files);
    return FSDP_OK;
}

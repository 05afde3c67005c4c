/*
 * Checks the target of a save before its first byte: remains of earlier saves, and whether the name
 * is free. Only fsdp_place_recover writes.
 */
#include "statedict/commit/commit_internal.h"

#include "base/core/mem.h"
#include "statedict/manifest/manifest.h"

#include <errno.h>
#include <string.h>

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

fsdp_status fsdp_place_recover(fsdp_io *io, const char *dir, fsdp_error *err)
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
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot save to '%s': '%s' is a checkpoint, which holds no other", dir,
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
    return fsdp_fail(
        err, FSDP_ERR_EXISTS,
        "'%s' is a symbolic link, which is neither followed nor replaced: name what it "
        "leads to, or remove it",
        path);
}

/* A dangling link looks like a free name to calls that follow links. */
static fsdp_status refuse_dangling_link(fsdp_io *io, const char *dir, fsdp_error *err)
{
    if (!is_link(io, dir))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS,
                     "'%s' is a symbolic link that leads nowhere: remove it, or save to where it "
                     "should lead",
                     dir);
}

/* Checks the checkpoint that a save would restore to DIR (fsdp_place_recover). */
static fsdp_status check_set_aside(fsdp_io *io, const char *dir, bool overwrite, fsdp_error *err)
{
    char *old;
    if (!fsdp_replaced_find(io, dir, &old))
        return FSDP_OK;
    fsdp_status status = overwrite ? require_only_ours(io, old, err)
                                   : fsdp_fail(err, FSDP_ERR_EXISTS,
                                               "'%s' was being overwritten when that was "
                                               "interrupted, '%s' is the old checkpoint",
                                               dir, old);
    fsdp_free(old);
    return status;
}

static fsdp_status check_overwrite(fsdp_io *io, const char *dir, fsdp_error *err)
{
    int64_t step;
    if (fsdp_dir_is_step(dir, &step))
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' is a step of a run, and those are never overwritten: save under "
                         "another name, or remove it first",
                         dir);
    if (is_link(io, dir))
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' is a symbolic link, which is not followed to overwrite: name what "
                         "it leads to, or remove it",
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
        return fsdp_fail_errno(err, -result, "cannot look at '%s'", dir);
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

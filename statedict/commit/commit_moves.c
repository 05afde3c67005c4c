/*
 * Publishing and deleting where a directory cannot be renamed safely: overlays across layers,
 * object stores behind FUSE, file systems without a rename that refuses to replace. The files move
 * one by one and the manifest alone commits: no reader accepts a directory without one.
 *
 * A crash leaves a directory without a manifest. It is removed only when a directory next to it
 * proves where it comes from, since the data of a checkpoint that lost its manifest in another way
 * may still be needed. The proof is, for
 *   publish: the staging directory with the file ".publishing", locked while the publish is at work
 *   delete:  a directory DIR.deleting-UUID
 */
#include "statedict/commit/commit_internal.h"

#include "base/core/mem.h"
#include "statedict/manifest/manifest.h"

#include <errno.h>
#include <string.h>

bool fsdp_moves_needed(int result)
{
    return result == -EXDEV || result == -EINVAL || result == -ENOSYS || result == -EOPNOTSUPP;
}

/* The proof of a leftover must be durable before the leftover, and must be removed after it. */
static fsdp_status sync_parent(fsdp_io *io, const char *dir, fsdp_error *err)
{
    char *path = NULL, *parent = NULL;
    fsdp_status status = fsdp_path_split(dir, &path, &parent, err);
    if (status == FSDP_OK)
        status = fsdp_io_sync_dir(io, parent, err);
    fsdp_free(path);
    fsdp_free(parent);
    return status;
}

/* --- publish ---------------------------------------------------------------------------------- */

static fsdp_status create_marker(fsdp_io *io, const char *from, bool durable,
                                 fsdp_file **marker_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_marker_create(io, from, FSDP_MARKER_PUBLISHING, marker_out, err));
    if (!durable)
        return FSDP_OK;
    FSDP_TRY(fsdp_io_sync(*marker_out, from, err));
    FSDP_TRY(fsdp_io_sync_dir(io, from, err));
    return sync_parent(io, from, err);
}

static fsdp_status move_file(fsdp_io *io, const char *from, const char *to, const char *name,
                             fsdp_error *err)
{
    char *from_path = fsdp_path_join(from, name);
    char *to_path = fsdp_path_join(to, name);
    fsdp_status status = from_path && to_path ? fsdp_io_rename(io, from_path, to_path, true, err)
                                              : fsdp_fail_memory(err, to);
    fsdp_free(from_path);
    fsdp_free(to_path);
    return status;
}

/* Everything but the manifest, which comes last, and the markers, which stay. */
static bool is_moved(void *context, const char *name)
{
    (void)context;
    return strcmp(name, FSDP_MANIFEST_NAME) != 0 && strcmp(name, FSDP_MARKER_PUBLISHING) != 0 &&
           strcmp(name, FSDP_MARKER_SAVING) != 0;
}

static fsdp_status move_files(fsdp_io *io, const char *from, const char *to, fsdp_error *err)
{
    fsdp_io_names names;
    FSDP_TRY(fsdp_io_list_names(io, from, is_moved, NULL, &names, err));
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < names.count && status == FSDP_OK; i++)
        status = move_file(io, from, to, names.items[i], err);
    fsdp_io_names_release(&names);
    return status;
}

/* Syncs both directories: some file systems journal a rename in only one of them at first. */
static fsdp_status sync_both(fsdp_io *io, const char *from, const char *to, fsdp_error *err)
{
    FSDP_TRY(fsdp_io_sync_dir(io, to, err));
    return fsdp_io_sync_dir(io, from, err);
}

static fsdp_status move_all(fsdp_io *io, const char *from, const char *to, bool durable,
                            fsdp_error *err)
{
    FSDP_TRY(move_files(io, from, to, err));
    if (durable)
        FSDP_TRY(sync_both(io, from, to, err));
    FSDP_TRY(move_file(io, from, to, FSDP_MANIFEST_NAME, err));
    if (!durable)
        return FSDP_OK;
    FSDP_TRY(sync_both(io, from, to, err));
    return sync_parent(io, to, err);
}

/* The manifest is removed first, so that it never names files that are gone. */
static fsdp_status remove_manifest_and_rest(fsdp_io *io, const char *dir, fsdp_error *err)
{
    char *path = fsdp_path_join(dir, FSDP_MANIFEST_NAME);
    if (!path)
        return fsdp_fail_memory(err, dir);
    int result = io->ops->unlink(io, path);
    fsdp_status status = result < 0 && result != -ENOENT
                             ? fsdp_fail_errno(err, -result, "cannot remove '%s'", path)
                             : fsdp_io_sync_dir(io, dir, err);
    fsdp_free(path);
    if (status == FSDP_OK)
        status = fsdp_io_remove_tree(io, dir, err);
    return status == FSDP_OK ? sync_parent(io, dir, err) : status;
}

fsdp_status fsdp_moves_publish(fsdp_io *io, const char *from, const char *to, bool durable,
                               fsdp_error *err)
{
    if (fsdp_io_exists(io, to))
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' exists: another job created it in the meantime", to);
    fsdp_file *marker = NULL;
    fsdp_status status = create_marker(io, from, durable, &marker, err);
    if (status == FSDP_OK)
        status = fsdp_io_mkdir(io, to, err);
    if (status == FSDP_OK) {
        status = move_all(io, from, to, durable, err);
        if (status != FSDP_OK)
            (void)remove_manifest_and_rest(io, to, NULL);
    }
    if (status == FSDP_OK)
        (void)fsdp_io_remove_tree(io, from, NULL); /* only the markers are left in it */
    (void)fsdp_io_close(&marker, from, NULL);      /* the directory was empty */
    return status;
}

/* --- delete ----------------------------------------------------------------------------------- */

/* Removes the manifest first. The directory `aside` marks DIR as half deleted until the rest is removed. */
static fsdp_status delete_marked(fsdp_io *io, const char *dir, const char *aside, fsdp_error *err)
{
    FSDP_TRY(fsdp_io_mkdir(io, aside, err));
    FSDP_TRY(sync_parent(io, aside, err));
    FSDP_TRY(remove_manifest_and_rest(io, dir, err));
    return fsdp_io_remove_tree(io, aside, err);
}

/* --- leftovers of a crash --------------------------------------------------------------------- */

typedef struct leftover_search {
    fsdp_io *io;
    bool proven; /* a directory next to DIR proves that DIR is a leftover */
    bool busy;   /* its publish is still at work */
} leftover_search;

static bool look_at_staging(void *context, const char *path)
{
    leftover_search *search = context;
    fsdp_marker_state state = fsdp_marker_look(search->io, path, FSDP_MARKER_PUBLISHING);
    search->busy = state == FSDP_MARKER_HELD;
    search->proven = search->proven || search->busy || state == FSDP_MARKER_FREE;
    return !search->busy;
}

static bool look_at_deleting(void *context, const char *path)
{
    (void)path;
    ((leftover_search *)context)->proven = true;
    return false;
}

fsdp_status fsdp_moves_clear(fsdp_io *io, const char *dir, fsdp_error *err)
{
    fsdp_file_info info;
    if (io->ops->info(io, dir, &info) < 0 || info.kind != FSDP_FILE_DIRECTORY ||
        !fsdp_lacks_manifest(io, dir))
        return FSDP_OK;
    leftover_search search = {.io = io};
    (void)fsdp_beside_each(io, dir, FSDP_SUFFIX_STAGING, look_at_staging, &search);
    if (search.busy)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "another job is publishing '%s'", dir);
    if (!search.proven)
        (void)fsdp_beside_each(io, dir, FSDP_SUFFIX_DELETING, look_at_deleting, &search);
    if (!search.proven)
        return FSDP_OK;
    FSDP_TRY(fsdp_io_remove_tree(io, dir, err));
    return sync_parent(io, dir, err);
}

/* --- deleting in any way --- */

/* Renames `path` to NAME.deleting-UUID, so that a half of it is recognised, then removes it. */
fsdp_status fsdp_delete_as(fsdp_io *io, const char *path, const char *parent, const char *name,
                           fsdp_error *err)
{
    char *aside;
    FSDP_TRY(fsdp_beside_name(name, FSDP_SUFFIX_DELETING, &aside, err));
    fsdp_status status = FSDP_OK;
    int result = io->ops->rename(io, path, aside, true);
    if (fsdp_moves_needed(result))
        status = delete_marked(io, path, aside, err);
    else if (result < 0)
        status = fsdp_fail_errno(err, -result, "cannot rename '%s' to '%s'", path, aside);
    else if ((status = fsdp_io_sync_dir(io, parent, err)) == FSDP_OK)
        status = fsdp_io_remove_tree(io, aside, err);
    fsdp_free(aside);
    return status;
}

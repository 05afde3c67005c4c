/*
 * A model in the cache of Hugging Face: models--ORG--NAME holds blobs/HASH, snapshots/REVISION/NAME
 * (links to blobs) and refs/BRANCH, a file with a revision. The path models--ORG--NAME stands for
 * the snapshot of main. Called by resolve.c.
 */
#include "statedict/run/hub_cache.h"

#include "base/core/mem.h"
#include "statedict/manifest/disk_names.h"

#include <string.h>

enum { LONGEST_REVISION = 255 };

static bool is_directory(fsdp_io *io, const char *path)
{
    fsdp_file_info info;
    return path && io->ops->info(io, path, &info) == 0 && info.kind == FSDP_FILE_DIRECTORY;
}

static bool is_revision(const char *name)
{
    return *name != '\0' && *name != '.' && strpbrk(name, "/\\\n") == NULL;
}

/* The text of refs/main without the newline; "" when the file does not exist. */
static fsdp_status read_main(const char *path, fsdp_io *io, char revision[LONGEST_REVISION + 1],
                             fsdp_error *err)
{
    char *data = NULL;
    size_t size = 0;
    char *main_path = fsdp_path_join(path, "refs/main");
    revision[0] = '\0';
    if (!main_path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = FSDP_OK;
    if (fsdp_io_exists(io, main_path))
        st = fsdp_io_read_file(io, main_path, LONGEST_REVISION, &data, &size, err);
    if (st == FSDP_OK && data) {
        while (size > 0 && strchr(" \r\n", data[size - 1]))
            data[--size] = '\0';
        if (strlen(data) != size || !is_revision(data))
            st = fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' does not name a revision", main_path);
        else
            memcpy(revision, data, size + 1);
    }
    fsdp_free(data);
    fsdp_free(main_path);
    return st;
}

static bool is_wanted(void *context, const char *name)
{
    (void)context;
    return is_revision(name) && !strstr(name, FSDP_DIGESTS_SUFFIX); /* digests of a snapshot */
}

/* Without refs/main: the only snapshot. */
static fsdp_status only_snapshot(const char *path, const char *snapshots, fsdp_io *io,
                                 char revision[LONGEST_REVISION + 1], fsdp_error *err)
{
    fsdp_io_names names = {0};
    FSDP_TRY(fsdp_io_list_names(io, snapshots, is_wanted, NULL, &names, err));
    fsdp_status st = FSDP_OK;
    if (names.count == 1 && strlen(names.items[0]) <= LONGEST_REVISION)
        strcpy(revision, names.items[0]);
    else if (names.count == 0)
        st = fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' holds no snapshot; download the model again",
                       path);
    else
        st = fsdp_fail(err, FSDP_ERR_USAGE,
                       "'%s' holds %zu snapshots and no refs/main that names one: name one of "
                       "them, such as '%s/%s'",
                       path, names.count, snapshots, names.items[0]);
    fsdp_io_names_release(&names);
    return st;
}

/* The snapshot was not named by the user: a link to another place is followed on request only. */
static fsdp_status check_inside(const char *path, const char *snapshot, fsdp_io *io,
                                fsdp_error *err)
{
    fsdp_file_info cache, above;
    if (io->trust & FSDP_TRUST_LINKS)
        return FSDP_OK;
    char *parents = fsdp_path_join(snapshot, "../..");
    if (!parents)
        return fsdp_fail_memory(err, "a path");
    int result = io->ops->info(io, path, &cache);
    if (result == 0)
        result = io->ops->info(io, parents, &above);
    fsdp_free(parents);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot open '%s'", snapshot);
    if (cache.device == above.device && cache.node == above.node)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_REFUSED,
                     "'%s' leads out of '%s'; follow it with --follow-links, or name the directory",
                     snapshot, path);
}

static fsdp_status choose(const char *path, const char *snapshots, fsdp_io *io, char **path_out,
                          fsdp_error *err)
{
    char revision[LONGEST_REVISION + 1];
    FSDP_TRY(read_main(path, io, revision, err));
    bool is_named = revision[0] != '\0';
    if (!is_named)
        FSDP_TRY(only_snapshot(path, snapshots, io, revision, err));
    char *found = fsdp_path_join(snapshots, revision);
    if (!found)
        return fsdp_fail_memory(err, "a path");
    if (is_named && !is_directory(io, found)) {
        fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                  "'%s/refs/main' names the snapshot '%s', which does not exist; download the "
                  "model again, or name another snapshot",
                  path, revision);
        fsdp_free(found);
        return FSDP_ERR_NOT_FOUND;
    }
    fsdp_status st = check_inside(path, found, io, err);
    if (st != FSDP_OK)
        fsdp_free(found);
    else
        *path_out = found;
    return st;
}

fsdp_status fsdp_hub_snapshot(const char *path, fsdp_io *io, char **path_out, fsdp_error *err)
{
    char *snapshots = fsdp_path_join(path, "snapshots"), *blobs = fsdp_path_join(path, "blobs");
    fsdp_status st = snapshots && blobs ? FSDP_OK : fsdp_fail_memory(err, "a path");
    *path_out = NULL;
    if (st == FSDP_OK && is_directory(io, snapshots) && is_directory(io, blobs))
        st = choose(path, snapshots, io, path_out, err);
    fsdp_free(snapshots);
    fsdp_free(blobs);
    return st;
}

/*
 * Which checkpoint is meant: a path may be a checkpoint, a run directory (its newest good one), a
 * pattern of rank files, or the place of an overwrite that was cut short. Opening for everybody starts here.
 */
#include "statedict/checkpoint_internal.h"

#include "formats/source.h"
#include "statedict/commit_internal.h"
#include "statedict/incomplete.h"
#include "statedict/run_internal.h"

#include <errno.h>
#include <string.h>

/* An overwrite that was cut between its two renames left no DIR: what it set aside is still good. */
static bool find_set_aside(const char *path, fsdp_io *io, const fsdp_watch *watch, char **path_out)
{
    if (!fsdp_replaced_find(io, path, path_out))
        return false;
    fsdp_notice(watch,
                "'%s' was being overwritten when that was cut short: taking the one before, '%s'",
                path, *path_out);
    return true;
}

fsdp_status fsdp_path_is_run(const char *path, fsdp_io *io, bool *is_run_out, fsdp_error *err)
{
    fsdp_file_info info;
    io = io ? io : fsdp_io_posix();
    *is_run_out = false;
    if (io->ops->info(io, path, &info) < 0 || info.kind != FSDP_FILE_DIRECTORY)
        return FSDP_OK;
    char *manifest = fsdp_path_join(path, FSDP_MANIFEST_NAME);
    if (!manifest)
        return fsdp_fail_memory(err, "a path");
    bool is_checkpoint = fsdp_io_exists(io, manifest);
    fsdp_free(manifest);
    if (is_checkpoint)
        return FSDP_OK;
    fsdp_run_steps steps = {0};
    FSDP_TRY(fsdp_run_scan(path, io, &steps, err));
    *is_run_out = steps.count > 0;
    fsdp_run_steps_release(&steps);
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_resolve(const char *path, fsdp_io *io, const fsdp_watch *watch,
                                    char **path_out, fsdp_error *err)
{
    fsdp_file_info info;
    io = io ? io : fsdp_io_posix();
    int errnum = io->ops->info(io, path, &info);
    if (errnum == -ENOENT && find_set_aside(path, io, watch, path_out))
        return FSDP_OK;
    bool is_pattern = errnum == -ENOENT && fsdp_source_is_pattern(path), is_run = false;
    if (errnum < 0 && !is_pattern)
        return fsdp_fail_errno(err, -errnum, "cannot open '%s'", path);
    if (!is_pattern)
        FSDP_TRY(fsdp_path_is_run(path, io, &is_run, err));
    if (is_run)
        return fsdp_run_latest(path, FSDP_VERIFY_QUICK, watch, io, path_out, err);
    *path_out = fsdp_strndup(path, strlen(path));
    return *path_out ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

fsdp_status fsdp_checkpoint_open(const char *path, struct fsdp_io *io,
                                 fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    return fsdp_checkpoint_open_with(path, &(fsdp_open_opts){.io = io}, checkpoint_out, err);
}

fsdp_status fsdp_checkpoint_open_with(const char *path, const fsdp_open_opts *opts,
                                      fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    char *resolved = NULL;
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_io *io = opts && opts->io ? opts->io : fsdp_io_posix();
    FSDP_TRY(fsdp_checkpoint_resolve(path, io, NULL, &resolved, err));
    fsdp_status st = fsdp_checkpoint_open_as(io, resolved, opts, &checkpoint, err);
    fsdp_free(resolved);
    if (st == FSDP_OK)
        st = checkpoint->may_lack && !checkpoint->source
                 ? fsdp_incomplete_open(checkpoint, err)
                 : fsdp_checkpoint_need_all(checkpoint, err);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    *checkpoint_out = checkpoint;
    return FSDP_OK;
}

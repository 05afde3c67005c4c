/*
 * Resolves a path to a checkpoint. The path may be a checkpoint, a run directory (its newest good
 * step), a pattern of rank files, or the destination of an interrupted overwrite. All opening of
 * checkpoints starts here.
 */
#include "statedict/checkpoint/checkpoint_internal.h"

#include "base/io/io_cache.h"
#include "formats/frameworks.h"
#include "formats/source.h"
#include "statedict/sd/meter.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/run/hub_cache.h"
#include "statedict/run/remote_path.h"
#include "statedict/run/run_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/given.h"

/* An overwrite that was killed between its two renames left no DIR, but the old one next to it. */
static bool find_set_aside(const char *path, fsdp_io *io, const fsdp_watch *watch, char **path_out)
{
    if (!fsdp_replaced_find(io, path, path_out))
        return false;
    fsdp_notice(watch, "the overwrite of '%s' was interrupted; using the old checkpoint '%s'", path,
                *path_out);
    return true;
}

fsdp_status fsdp_path_is_run(const char *path, const fsdp_access *access, bool *is_run_out,
                             fsdp_error *err)
{
    FSDP_NEED(err, path, is_run_out);
    fsdp_io *io = fsdp_access_io(access);
    fsdp_file_info info;
    io = io ? io : fsdp_io_posix();
    *is_run_out = false;
    if (io->ops->info(io, path, &info) < 0 || info.kind != FSDP_FILE_DIRECTORY)
        return FSDP_OK;
    if (fsdp_path_has_manifest(path, access))
        return FSDP_OK;
    fsdp_run_steps steps = {0};
    FSDP_TRY(fsdp_run_scan(path, io, &steps, err));
    *is_run_out = steps.count > 0;
    fsdp_run_steps_release(&steps);
    return FSDP_OK;
}

/* The number that the name of a path ends with. */
static int64_t wanted_step(const char *name)
{
    size_t size = strlen(name), at = size;
    while (at > 0 && name[at - 1] >= '0' && name[at - 1] <= '9')
        at--;
    return at < size ? strtoll(name + at, NULL, 10) : INT64_MAX;
}

static uint64_t distance(int64_t a, int64_t b)
{
    return a > b ? (uint64_t)a - (uint64_t)b : (uint64_t)b - (uint64_t)a;
}

static const fsdp_run_step *nearest(const fsdp_run_steps *steps, int64_t wanted,
                                    const fsdp_run_step *but)
{
    const fsdp_run_step *found = NULL;
    for (size_t i = 0; i < steps->count; i++) {
        const fsdp_run_step *step = &steps->items[i];
        if (step->state == FSDP_STEP_GOOD && step != but &&
            (!found || distance(step->step, wanted) < distance(found->step, wanted)))
            found = step;
    }
    return found;
}

/* Appends "; 'RUN' holds step-00000200 and step-00000300" to the error if the path is next to steps. */
static void append_steps(const char *path, fsdp_io *io, fsdp_error *err)
{
    char *own = NULL, *run = NULL;
    fsdp_run_steps steps = {0};
    if (err && fsdp_path_split(path, &own, &run, NULL) == FSDP_OK &&
        fsdp_run_scan(run, io, &steps, NULL) == FSDP_OK) {
        const char *slash = strrchr(own, '/');
        int64_t wanted = wanted_step(slash ? slash + 1 : own);
        const fsdp_run_step *first = nearest(&steps, wanted, NULL);
        const fsdp_run_step *second = nearest(&steps, wanted, first);
        fsdp_error found = *err;
        if (first)
            fsdp_fail(err, found.status, "%s; '%s' holds %s%s%s", found.text, run, first->name,
                      second ? " and " : "", second ? second->name : "");
        err->errnum = found.errnum;
    }
    fsdp_run_steps_release(&steps);
    fsdp_free(own);
    fsdp_free(run);
}

/* Without a notice, a part of a model could be taken for the whole. */
static void notify_part(const char *path, const fsdp_watch *watch)
{
    const char *slash = strrchr(path, '/');
    int number, count;
    if (fsdp_source_is_part(path, &number, &count) && count > 1)
        fsdp_notice(watch, "'%s' is one of %d files of a model; name the directory '%.*s' for all",
                    path, count, slash ? (int)(slash - path) : 1, slash ? path : ".");
}

static void notify_way(void *context, const char *text)
{
    fsdp_notice(context, "%s", text);
}

static fsdp_status fail_to_open(const char *path, fsdp_io *io, int errnum, fsdp_error *err)
{
    fsdp_status st = fsdp_remote_path_fail(io, path, errnum, err);
    if (errnum == ENOENT)
        append_steps(path, io, err);
    return st;
}

/* *path_out: NULL, or the snapshot in a hub's cache; the checkpoint in it takes its place. */
static fsdp_status resolve_framework(fsdp_io *io, const char *path, const fsdp_framework_way *way,
                                     char **path_out, fsdp_error *err)
{
    char *found = NULL;
    fsdp_status st = fsdp_framework_resolve(io, *path_out ? *path_out : path, way, &found, err);
    if (st == FSDP_OK && !found)
        return FSDP_OK;
    fsdp_free(*path_out);
    *path_out = found;
    return st;
}

/* opts->access.disk is the cache of the call. */
static fsdp_status resolve(const char *path, const fsdp_open_opts *opts, const fsdp_watch *watch,
                           char **path_out, fsdp_error *err)
{
    fsdp_file_info info;
    const fsdp_access *access = &opts->access;
    const fsdp_framework_way way = {.note = notify_way,
                                    .context = (void *)(uintptr_t)watch,
                                    .is_chosen = opts->format != NULL,
                                    .whole = opts->whole};
    fsdp_io *io = access->disk;
    int errnum = io->ops->info(io, path, &info);
    if (errnum == -ENOENT && find_set_aside(path, io, watch, path_out))
        return FSDP_OK;
    bool is_pattern = errnum == -ENOENT && fsdp_source_is_pattern(path), is_run = false;
    if (errnum < 0 && !is_pattern)
        return fail_to_open(path, io, -errnum, err);
    if (!is_pattern)
        FSDP_TRY(fsdp_path_is_run(path, access, &is_run, err));
    if (is_run)
        return fsdp_run_latest(path, FSDP_VERIFY_QUICK, watch, access, path_out, err);
    if (!is_pattern)
        FSDP_TRY(fsdp_hub_snapshot(path, io, path_out, err));
    if (!is_pattern && fsdp_path_is_foreign(io, *path_out ? *path_out : path))
        FSDP_TRY(resolve_framework(io, path, &way, path_out, err));
    if (*path_out)
        return FSDP_OK;
    if (info.kind == FSDP_FILE_REGULAR && !is_pattern)
        notify_part(path, watch);
    *path_out = fsdp_strndup(path, strlen(path));
    return *path_out ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

fsdp_status fsdp_checkpoint_resolve(const char *path, const fsdp_open_opts *opts,
                                    const fsdp_watch *watch, char **path_out, fsdp_error *err)
{
    FSDP_NEED(err, path, path_out);
    fsdp_io *cache = NULL;
    fsdp_open_opts open = opts ? *opts : (fsdp_open_opts){0};
    *path_out = NULL;
    FSDP_TRY(fsdp_io_cache_create(fsdp_access_io(&open.access), &cache, err));
    open.access.disk = cache;
    fsdp_status st = resolve(path, &open, watch, path_out, err);
    fsdp_io_cache_free(cache);
    return st;
}

static fsdp_status open_resolved(const char *path, const fsdp_open_opts *opts,
                                 fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    char *resolved = NULL;
    FSDP_TRY(resolve(path, opts, opts->watch, &resolved, err));
    fsdp_status st =
        fsdp_checkpoint_open_as(opts->access.disk, resolved, opts, checkpoint_out, err);
    fsdp_free(resolved);
    FSDP_TRY(st);
    return fsdp_checkpoint_need_all(*checkpoint_out, err);
}

/* Several formats look at the same files before one of them opens the path: each file is opened once. */
fsdp_status fsdp_checkpoint_open(const char *path, const fsdp_open_opts *opts,
                                 fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    FSDP_NEED(err, checkpoint_out);
    *checkpoint_out = NULL;
    FSDP_NEED(err, path);
    fsdp_io *cache = NULL;
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_open_opts open = opts ? *opts : (fsdp_open_opts){0};
    FSDP_TRY(fsdp_io_cache_create(fsdp_access_io(&open.access), &cache, err));
    open.access.disk = cache;
    fsdp_status st = open_resolved(path, &open, &checkpoint, err);
    fsdp_io_cache_end(cache);
    if (checkpoint)
        checkpoint->cache = cache;
    else
        fsdp_io_cache_free(cache);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    *checkpoint_out = checkpoint;
    return FSDP_OK;
}

/* Staging directories of dead processes: see leftovers.h. */
#include "statedict/commit/leftovers.h"

#include "statedict/commit/commit_internal.h"
#include "statedict/commit/resume.h"

#include <errno.h>
#include <string.h>
#include <time.h>

typedef struct clearing {
    fsdp_io *io;
    const char *target, *parent, *hash;
    char *kept;
    fsdp_file *marker;
} clearing;

/* The rename to this name becomes durable first, or half a checkpoint could come back with its old
 * name. */
static bool finish_delete(void *context, const char *path)
{
    const clearing *work = context;
    if (fsdp_io_sync_dir(work->io, work->parent, NULL) == FSDP_OK)
        (void)fsdp_io_remove_tree(work->io, path, NULL);
    return true;
}

/*
 * True when an overwrite was killed after the exchange: the old checkpoint has the staging's name.
 * A staging keeps its marker until it becomes DIR, so a manifest without a marker identifies it.
 */
static bool is_exchanged(const clearing *work, const char *path)
{
    fsdp_io *io = work->io;
    return fsdp_marker_look(io, path, FSDP_MARKER_SAVING) == FSDP_MARKER_MISSING &&
           fsdp_marker_look(io, path, FSDP_MARKER_PUBLISHING) == FSDP_MARKER_MISSING &&
           fsdp_has_manifest(io, path) && fsdp_has_manifest(io, work->target) &&
           fsdp_io_sync_dir(io, work->parent, NULL) == FSDP_OK;
}

static bool is_to_be_kept(const clearing *work, const char *path)
{
    return work->hash && !work->kept && fsdp_resume_matches(work->io, path, work->hash);
}

/* --- killed at the very beginning -------------------------------------------------------------- */

enum { YOUNG_SECONDS = 600 };

static bool is_old(fsdp_io *io, const char *path)
{
    fsdp_file_info info;
    return io->ops->info(io, path, &info) == 0 && info.is_own && info.kind == FSDP_FILE_DIRECTORY &&
           info.mtime_ns / 1000000000 + YOUNG_SECONDS < (int64_t)time(NULL);
}

/*
 * Removes a staging directory whose process was killed before it wrote the marker: only an empty
 * one. A slow process that loses its directory this way makes another one (fsdp_staging_make).
 */
static void clear_stillborn(fsdp_io *io, const char *path)
{
    if (is_old(io, path))
        (void)io->ops->rmdir(io, path);
}

/* --- killed at work ---------------------------------------------------------------------------- */

/*
 * Deletes a staging as .deleting-UUID, so that a half that stays is recognised without a marker. A
 * conversion that was killed after it exchanged its result with the old output leaves the old one in
 * it: the exchange becomes durable first, which takes a sync of both directories.
 */
static void remove_staging(const clearing *work, const char *path)
{
    if (fsdp_io_sync_dir(work->io, path, NULL) == FSDP_OK)
        (void)fsdp_delete_as(work->io, path, work->parent, work->target, NULL);
}

/* Removes the staging of a dead process. */
static bool clear_abandoned(void *context, const char *path)
{
    clearing *work = context;
    fsdp_file *marker;
    if (fsdp_marker_take_over(work->io, path, FSDP_MARKER_SAVING, &marker)) {
        if (is_to_be_kept(work, path) && (work->kept = fsdp_strndup(path, strlen(path)))) {
            work->marker = marker;
            return true;
        }
        remove_staging(work, path);
    } else if (fsdp_marker_take_over(work->io, path, FSDP_MARKER_PUBLISHING, &marker) ||
               is_exchanged(work, path)) {
        (void)fsdp_delete_as(work->io, path, work->parent, work->target, NULL);
    } else {
        clear_stillborn(work->io, path);
    }
    (void)fsdp_io_close(&marker, path, NULL);
    return true;
}

void fsdp_leftovers_clear(fsdp_io *io, const char *target, const char *parent, const char *hash,
                          char **kept_out, fsdp_file **marker_out)
{
    clearing work = {.io = io, .target = target, .parent = parent, .hash = hash};
    (void)fsdp_beside_each(io, target, FSDP_SUFFIX_DELETING, finish_delete, &work);
    (void)fsdp_beside_each(io, target, FSDP_SUFFIX_STAGING, clear_abandoned, &work);
    *kept_out = work.kept;
    *marker_out = work.marker;
}

static void report_leftovers(const fsdp_error *why, fsdp_error *err)
{
    if (!err || err->status == FSDP_OK)
        return;
    fsdp_error found = *err;
    fsdp_fail(err, found.status, "%s; %s; remove it", found.text, why->text);
    err->errnum = found.errnum;
}

void fsdp_leftovers_discard(fsdp_io *io, const char *staging, const char *target,
                            fsdp_file **marker, fsdp_error *err)
{
    fsdp_error why = {0};
    char *aside = NULL;
    bool moved = fsdp_beside_name(target, FSDP_SUFFIX_DELETING, &aside, NULL) == FSDP_OK &&
                 io->ops->rename(io, staging, aside, true) == 0;
    /* NFS keeps a removed open file under another name */
    (void)fsdp_io_close(marker, FSDP_MARKER_SAVING, NULL);
    if (fsdp_io_remove_tree(io, moved ? aside : staging, &why) != FSDP_OK)
        report_leftovers(&why, err);
    fsdp_free(aside);
}

/* Another process may remove the directory while it is still empty (clear_stillborn): retries
 * then. */
fsdp_status fsdp_staging_make(fsdp_io *io, const char *target, char **path_out,
                              fsdp_file **marker_out, fsdp_error *err)
{
    enum { TRIES = 3 };
    fsdp_error why = {0};
    fsdp_status st = FSDP_OK;
    *marker_out = NULL;
    for (int i = 0; i < TRIES; i++) {
        FSDP_TRY(fsdp_beside_name(target, FSDP_SUFFIX_STAGING, path_out, err));
        st = fsdp_io_mkdir(io, *path_out, &why);
        bool is_made = st == FSDP_OK;
        if (is_made)
            st = fsdp_marker_create(io, *path_out, FSDP_MARKER_SAVING, marker_out, &why);
        if (st == FSDP_OK)
            return FSDP_OK;
        bool is_gone = is_made && why.errnum == ENOENT;
        if (is_made)
            fsdp_leftovers_discard(io, *path_out, target, marker_out, &why);
        fsdp_free(*path_out);
        *path_out = NULL;
        if (!is_gone)
            break;
    }
    if (err)
        *err = why;
    return st;
}

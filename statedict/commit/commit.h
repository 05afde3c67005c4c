/*
 * The commit: a checkpoint directory appears whole or not at all, and disappears the same way. The protocol
 * is in docs/commit.md.
 *
 * In: the path DIR, options, and the text of the manifest. Out: a durable directory DIR, or the state before
 * the call. Every function is local; save/ and convert/ call them on rank 0 and run the collectives around
 * them, run/ takes the lease and deletes checkpoints.
 *
 *   begin   -> DIR.tmp-UUID exists and holds only the locked file .saving
 *   (every rank creates, writes and syncs its file there)
 *   publish -> manifest durable, staging renamed to DIR, parent synced: the checkpoint is saved; .saving is
 *              removed
 *   abandon -> staging removed
 *
 *   commit.c         begin, publish, abandon, delete: renames and the fsyncs of directories; before the first
 *                    byte checks DIR and restores what an interrupted overwrite left
 *   commit_moves.c   publish and delete, file by file, where a directory cannot be renamed
 *   commit_marker.c  the lock file that shows whether the process that made a directory is alive
 *   leftovers.c      removes or reuses the staging directories of dead processes
 *   resume.c         the notes by which an interrupted conversion continues
 *   lease*.c         the lease of a run: one writer at a time
 *   space.c          the estimate of the size of a checkpoint, compared with the free space
 */
#ifndef FSDP_COMMIT_H
#define FSDP_COMMIT_H

#include "base/io/io.h"
#include "statedict/manifest/disk_names.h"
#include <fsdp/checkpoint.h>

typedef struct fsdp_lease fsdp_lease;

/* Refreshes a lease from the progress callback of long work, and stops the work once the lease is lost. */
typedef struct fsdp_lease_keeper {
    fsdp_lease *lease;         /* NULL: none is kept */
    int64_t refresh_ms;        /* time of the next refresh */
    fsdp_error lost;           /* why a refresh failed */
    fsdp_watch watch;          /* the caller's */
} fsdp_lease_keeper;

typedef struct fsdp_staging {
    fsdp_io *io;
    char *target;              /* DIR */
    char *parent;              /* the directory that holds DIR */
    char *path;                /* DIR.tmp-UUID, or DIR itself when renames cannot be trusted */
    fsdp_file *marker;         /* .saving in it, locked: this process is at work */
    fsdp_lease_keeper keeper;  /* of the run that DIR is a step of, if begin took its lease */
    bool durable;
    bool overwrite;
    bool is_taken_up;          /* a dead conversion left it, see fsdp_staging_begin */
    bool has_notes;            /* it holds a .resume, which is not published */
} fsdp_staging;

typedef struct fsdp_staging_opts {
    bool durable;
    bool overwrite;
    bool has_lease;            /* the caller holds the lease of the run */
    const char *hash;          /* of a conversion's plan: begin reuses the staging directory that a dead
                                * conversion with that plan left. NULL: always a new one */
    const fsdp_watch *watch;   /* its progress is called during a wait for another job's lease; may be NULL */
} fsdp_staging_opts;

/*
 * FSDP_ERR_EXISTS when DIR exists (unless overwrite); FSDP_ERR_NOT_FOUND when the parent does not. A DIR with
 * the name of a step makes its parent a run: begin takes the lease of the run, release gives it back.
 * io NULL: fsdp_io_posix.
 */
fsdp_status fsdp_staging_begin(fsdp_io *io, const char *dir, const fsdp_staging_opts *opts,
                               fsdp_staging *staging_out, fsdp_error *err);
/* For long work: calls the caller's watch, and its progress refreshes the lease. Valid until release. */
fsdp_watch fsdp_staging_watch(fsdp_staging *staging, const fsdp_watch *watch);
/* Returns the status that the work failed with, or FSDP_ERR_EXISTS when the lost lease stopped it. */
fsdp_status fsdp_staging_judge(const fsdp_staging *staging, fsdp_status status, fsdp_error *err);
/* Moves the lease to the caller, who releases it; NULL when there is none. */
fsdp_lease *fsdp_staging_move_lease(fsdp_staging *staging);
/* Writes the manifest as the last file, then renames. After a failure the caller abandons the staging. */
fsdp_status fsdp_staging_publish(fsdp_staging *staging, const char *manifest, size_t size, fsdp_error *err);
/* Removes a staging that was not published. err (may be NULL) holds the error that the save failed with;
 * abandon appends the path that it could not remove. */
void fsdp_staging_abandon(fsdp_staging *staging, fsdp_error *err);
void fsdp_staging_release(fsdp_staging *staging);

/* Deletes a checkpoint directory so that no reader sees half of it: renames it to NAME.deleting-UUID, syncs
 * the parent, then removes the tree. */
fsdp_status fsdp_checkpoint_delete(fsdp_io *io, const char *dir, fsdp_error *err);

/* --- the lease of a run: RUN/.lock --- */
enum { FSDP_LEASE_SECONDS = 900, FSDP_LEASE_WAIT_MS = 5000 };
/*
 * FSDP_ERR_EXISTS names the holder (host, pid, since when). The lease of a dead process of this host
 * and boot is taken over at once, any other after it expired.
 */
fsdp_status fsdp_lease_take(fsdp_io *io, const char *run, fsdp_lease **lease_out, fsdp_error *err);
/* Like fsdp_lease_take, but waits up to FSDP_LEASE_WAIT_MS for another holder: a save has work to lose,
 * and the holder may be about to finish. The progress of watch (may be NULL) may stop the wait. */
fsdp_status fsdp_lease_await(fsdp_io *io, const char *run, const fsdp_watch *watch, fsdp_lease **lease_out,
                             fsdp_error *err);
fsdp_status fsdp_lease_refresh(fsdp_lease *lease, fsdp_error *err);
void fsdp_lease_release(fsdp_lease *lease);          /* accepts NULL */

/* The keeper refreshes `lease` from now on. Work uses the watch of the keeper, which calls `watch` (may be
 * NULL) and stops the work once the lease is lost. */
void fsdp_lease_keep(fsdp_lease_keeper *keeper, fsdp_lease *lease, const fsdp_watch *watch);
fsdp_watch fsdp_lease_keeper_watch(fsdp_lease_keeper *keeper);

#endif

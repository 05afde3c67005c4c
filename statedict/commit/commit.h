/*
 * The commit: how a checkpoint directory comes into being whole or not at all, and goes away again.
 * Local steps made by one rank (rank 0); save.c and convert.c bring the ranks together around them.
 *
 *   begin   -> DIR.tmp-UUID exists and holds only the locked file .saving
 *   (every rank creates, writes and syncs its own file there)
 *   publish -> manifest durable, staging renamed to DIR, parent synced: now it is saved; .saving goes
 *   abandon -> staging removed
 */
#ifndef FSDP_COMMIT_H
#define FSDP_COMMIT_H

#include "base/io/io.h"
#include "statedict/manifest/disk_names.h"
#include <fsdp/checkpoint.h>

typedef struct fsdp_lease fsdp_lease;

/* A lease that is refreshed from where long work tells its progress; once it is lost, that stops the work. */
typedef struct fsdp_lease_keeper {
    fsdp_lease *lease;         /* NULL: none is kept */
    int64_t refresh_ms;        /* when it is to be refreshed again */
    fsdp_error lost;           /* why it could not be */
    fsdp_watch watch;          /* the caller's */
} fsdp_lease_keeper;

typedef struct fsdp_staging {
    fsdp_io *io;
    char *target;              /* DIR */
    char *parent;              /* the directory that holds DIR */
    char *path;                /* DIR.tmp-UUID, or DIR itself when renames cannot be trusted */
    fsdp_file *marker;         /* .saving in it, locked: this process is at work */
    fsdp_lease_keeper keeper;  /* of the lease of the run that DIR is a step of, when it was taken here */
    bool durable;
    bool overwrite;
    bool is_taken_up;          /* it was left by another one, see fsdp_staging_begin */
    bool has_notes;            /* it holds a .resume, which is not published */
} fsdp_staging;

/*
 * FSDP_ERR_EXISTS when DIR exists (unless overwrite); FSDP_ERR_NOT_FOUND when the parent does not.
 * The name of a step makes the parent a run: its lease is taken, and kept until release. watch (may be NULL)
 * is told while another job's lease is waited for. hash: goes on in the staging directory that a dead
 * conversion with that plan left, if there is one; NULL: always a new one.
 */
fsdp_status fsdp_staging_begin(fsdp_io *io, const char *dir, bool durable, bool overwrite, const char *hash,
                               const fsdp_watch *watch, fsdp_staging *staging_out, fsdp_error *err);
/* For long work: the caller's watch, whose progress also keeps the lease. Until release. */
fsdp_watch fsdp_staging_watch(fsdp_staging *staging, const fsdp_watch *watch);
/* The work failed with that status: FSDP_ERR_EXISTS when the lost lease is what stopped it. */
fsdp_status fsdp_staging_judge(const fsdp_staging *staging, fsdp_status status, fsdp_error *err);
/* Hands over the lease, NULL when there is none: to be released by the caller. */
fsdp_lease *fsdp_staging_move_lease(fsdp_staging *staging);
/* The manifest's text is the last thing written. On failure the staging is left for abandon. */
fsdp_status fsdp_staging_publish(fsdp_staging *staging, const char *manifest, size_t size, fsdp_error *err);
/* Removes what is left of a staging that was not published. err is the error that it is given up for, or
 * NULL: what could not be removed is told there, too. */
void fsdp_staging_abandon(fsdp_staging *staging, fsdp_error *err);
void fsdp_staging_release(fsdp_staging *staging);

/* Deletes a checkpoint directory so that no reader ever sees half of it: rename to
 * NAME.deleting-UUID, sync the parent, then remove the tree. */
fsdp_status fsdp_checkpoint_delete(fsdp_io *io, const char *dir, fsdp_error *err);

/* --- the lease of a run: RUN/.lock --- */
enum { FSDP_LEASE_SECONDS = 900, FSDP_LEASE_PATIENCE_MS = 5000 };
/*
 * FSDP_ERR_EXISTS names the holder (host, pid, since when). The lease of a dead process of this host
 * and boot is taken over at once, any other after it expired.
 */
fsdp_status fsdp_lease_take(fsdp_io *io, const char *run, fsdp_lease **lease_out, fsdp_error *err);
/* The same for who has work to lose: another holder, which may be done in a moment, is waited for up to
 * FSDP_LEASE_PATIENCE_MS. watch: NULL, or told meanwhile; its progress may stop the wait. */
fsdp_status fsdp_lease_await(fsdp_io *io, const char *run, const fsdp_watch *watch, fsdp_lease **lease_out,
                             fsdp_error *err);
fsdp_status fsdp_lease_refresh(fsdp_lease *lease, fsdp_error *err);
void fsdp_lease_release(fsdp_lease *lease);          /* accepts NULL */

/* Begins to keep a fresh lease. The watch of the keeper is for the work: it passes on to the caller's
 * (NULL: nobody), and its progress stops once the lease is lost. */
void fsdp_lease_keep(fsdp_lease_keeper *keeper, fsdp_lease *lease, const fsdp_watch *watch);
fsdp_watch fsdp_lease_keeper_watch(fsdp_lease_keeper *keeper);

#endif

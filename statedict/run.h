/*
 * A run is a directory of checkpoints named step-%08d, to which one job at a time writes. These calls save
 * into a run, list it, find its newest good checkpoint, and remove old ones. access may be NULL. Calls are
 * local unless they are marked collective.
 */
#ifndef FSDP_RUN_H
#define FSDP_RUN_H

#include <fsdp/checkpoint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Saves sd as RUN/step-%08d, as fsdp_sd_save does, under the run's lease; then applies opts->retain and
 * rewrites RUN/latest, which is only information for users. Creates RUN if it does not exist. FSDP_ERR_EXISTS
 * if the step exists or another job holds the run. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_run_save(const fsdp_sd *sd, fsdp_ctl *ctl, const char *run,
                                                int64_t step, const fsdp_save_opts *opts,
                                                fsdp_error *err);

typedef enum fsdp_step_state {
    FSDP_STEP_GOOD,            /* the manifest is undamaged and all files have the right size */
    FSDP_STEP_BROKEN,          /* a step directory that does not verify */
    FSDP_STEP_STAGING,         /* step-N.tmp-UUID: a save that did not finish, or is under way */
    FSDP_STEP_DELETING,        /* step-N.deleting-UUID: a delete that did not finish */
    FSDP_STEP_NEWER,           /* has a format version that this library does not know */
    FSDP_STEP_REPLACED         /* step-N.old-UUID: set aside by an overwrite */
} fsdp_step_state;

typedef struct fsdp_run_step {
    int64_t step;
    char *name;                /* of the directory in the run */
    fsdp_step_state state;
    bool pinned;
    bool at_work;              /* STAGING, DELETING: a process may still work on it */
    char *reason;              /* BROKEN, NEWER: why */
} fsdp_run_step;

typedef struct fsdp_run_steps { fsdp_run_step *items; size_t count; } fsdp_run_steps;

/* Returns true for a directory with the manifest of a native checkpoint, damaged or not. Since other programs
 * use that name as well, the manifest must be next to other files of a checkpoint, or begin like one. */
FSDP_API bool fsdp_path_has_manifest(const char *path, const fsdp_access *access);

/* Finds out whether a path is a run: *is_run_out is true for a directory that is not a checkpoint itself
 * and holds step directories, false for any other path, also one that does not exist. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_path_is_run(const char *path, const fsdp_access *access,
                                                   bool *is_run_out, fsdp_error *err);

/* Lists the step directories of a run and verifies each at FSDP_VERIFY_QUICK, newest step first. The
 * caller releases the list. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_run_list(const char *run, const fsdp_access *access,
                                                fsdp_run_steps *steps_out, fsdp_error *err);
/* Frees the items of a list. */
FSDP_API void fsdp_run_steps_release(fsdp_run_steps *steps);

/*
 * Finds the newest checkpoint of a run that verifies at `level`; FSDP_ERR_NOT_FOUND if there is none. Newer
 * ones that do not verify are skipped and named through watch.notice (watch may be NULL). The call fails,
 * and does not skip, if a newer one has a newer format version (FSDP_ERR_REFUSED) or cannot be read because
 * of a permission or a network file system that does not answer (FSDP_ERR_IO). The caller frees *path_out
 * with fsdp_string_free.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_run_latest(const char *run, fsdp_verify_level level,
                                                  const fsdp_watch *watch, const fsdp_access *access,
                                                  char **path_out, fsdp_error *err);
/* Frees a string; accepts NULL. */
FSDP_API void fsdp_string_free(char *text);

/* Finds the checkpoint that fsdp_checkpoint_open opens for a path with these options: the newest good one of
 * a run; after an interrupted overwrite the old one that was set aside, with a report to watch.notice; else
 * the path itself. The caller frees *path_out with fsdp_string_free. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_resolve(const char *path, const fsdp_open_opts *opts,
                                                          const fsdp_watch *watch, char **path_out,
                                                          fsdp_error *err);

typedef struct fsdp_retain_action {
    const char *name;          /* of the directory in the run; "hf/00000100" for a copy */
    bool remove;               /* false: it is kept */
    const char *reason;        /* "newest 3", "pinned", "every 5000", "interrupted save", ... */
} fsdp_retain_action;

typedef struct fsdp_retain_opts {
    bool apply;                /* removes; otherwise the actions are only reported */
    void (*report)(void *context, const fsdp_retain_action *action);  /* once per directory; may be NULL */
    void *report_context;
    int threads;
    int64_t memory;
    fsdp_watch watch;          /* called while checkpoints are read, and before each removal; if it stops the
                                  call while they are read, nothing is removed */
    fsdp_access access;
} fsdp_retain_opts;

/*
 * Applies a policy (NULL keeps every step) to a run, and removes or restores what interrupted deletes,
 * overwrites and saves left; a running save is not touched. The newest two steps that verify are always kept.
 * With a step its copies RUN/hf/N and RUN/dcp/N (fsdp-train's save.also) are removed, and what killed
 * conversions left there. opts NULL: all zero, which removes nothing; opts->apply takes the run's lease.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_run_retain(const char *run, const fsdp_retention *policy,
                                                  const fsdp_retain_opts *opts, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

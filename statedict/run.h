/*
 * Runs: a directory of checkpoints named step-%08d, one writer at a time. Saving into it, what it
 * holds, its newest good checkpoint, and which ones stay.
 */
#ifndef FSDP_RUN_H
#define FSDP_RUN_H

#include <fsdp/checkpoint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Collective. Saves as RUN/step-%08d under the run's lease, then applies opts->retain and refreshes
 * RUN/latest (a hint for people). Creates RUN if needed. FSDP_ERR_EXISTS when the step exists or
 * another job holds the run.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_run_save(const fsdp_sd *sd, fsdp_ctl *ctl, const char *run,
                                                int64_t step, const fsdp_save_opts *opts,
                                                fsdp_error *err);

typedef enum fsdp_step_state {
    FSDP_STEP_GOOD,            /* a manifest that is whole, all files with the right size */
    FSDP_STEP_BROKEN,          /* a step directory that does not verify */
    FSDP_STEP_STAGING,         /* step-N.tmp-UUID: a save that did not finish, or is under way */
    FSDP_STEP_DELETING,        /* step-N.deleting-UUID: a delete that did not finish */
    FSDP_STEP_NEWER,           /* of a format version that this library does not know */
    FSDP_STEP_REPLACED         /* step-N.old-UUID: set aside by an overwrite */
} fsdp_step_state;

typedef struct fsdp_run_step {
    int64_t step;
    char *name;                /* of the directory in the run */
    fsdp_step_state state;
    bool pinned;
    bool at_work;              /* STAGING, DELETING: it is, or may be, under way */
    char *reason;              /* BROKEN, NEWER: why */
} fsdp_run_step;

typedef struct fsdp_run_steps { fsdp_run_step *items; size_t count; } fsdp_run_steps;

/* Is the path a directory with a manifest of ours, damaged or not? Other programs have files of that name,
 * too: beside other files of a checkpoint it is ours, alone when it begins like ours. */
FSDP_API bool fsdp_path_has_manifest(const char *path, const fsdp_access *access);

/* Is the path a directory that is no checkpoint itself and holds step directories? What is not there, or
 * no directory, is no run. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_path_is_run(const char *path, const fsdp_access *access,
                                                   bool *is_run_out, fsdp_error *err);

/* All directories of a run that follow our grammar, newest step first. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_run_list(const char *run, const fsdp_access *access,
                                                fsdp_run_steps *steps_out, fsdp_error *err);
FSDP_API void fsdp_run_steps_release(fsdp_run_steps *steps);

/* The newest checkpoint of a run that verifies at `level`; FSDP_ERR_NOT_FOUND when there is none.
 * Newer ones that do not are named through watch.notice; not passed over are one of a newer format
 * version (FSDP_ERR_REFUSED), and one that was out of reach: a permission was missing, or a file system
 * of another machine did not answer (FSDP_ERR_IO).
 * *path_out is freed with fsdp_string_free. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_run_latest(const char *run, fsdp_verify_level level,
                                                  const fsdp_watch *watch, const fsdp_access *access,
                                                  char **path_out, fsdp_error *err);
FSDP_API void fsdp_string_free(char *text);

/* The checkpoint that opening a path takes: of a run its newest good one; what an overwrite that was
 * cut short set aside, told through watch.notice; else the path itself. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_checkpoint_resolve(const char *path, const fsdp_watch *watch,
                                                          const fsdp_access *access, char **path_out,
                                                          fsdp_error *err);

typedef struct fsdp_retain_action {
    const char *name;          /* directory in the run */
    bool remove;
    const char *reason;        /* "newest 3", "pinned", "every 5000", "interrupted save", ... */
} fsdp_retain_action;

typedef struct fsdp_retain_opts {
    bool apply;                /* removes; otherwise the actions are only reported */
    void (*report)(void *user, const fsdp_retain_action *action);  /* one call per directory; may be NULL */
    void *report_user;
    int threads;
    int64_t memory;
    fsdp_watch watch;          /* called while checkpoints are read, and before each removal; a call that is
                                  stopped while they are read removed nothing */
    fsdp_access access;
} fsdp_retain_opts;

/*
 * Local. Applies a policy (NULL keeps every step) to a run and finishes interrupted deletes, overwrites and
 * abandoned saves; a save that is under way is left alone. The newest two steps that verify always stay.
 * opts NULL: all zero, which removes nothing; opts->apply takes the run's lease.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_run_retain(const char *run, const fsdp_retention *policy,
                                                  const fsdp_retain_opts *opts, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

/* What retention and saving ask about a run beyond checkpoint.h. */
#ifndef FSDP_RUN_INTERNAL_H
#define FSDP_RUN_INTERNAL_H

#include "base/io/io.h"
#include "statedict/commit/commit.h"
#include <fsdp/checkpoint.h>
#include <fsdp/run.h>

/* A step directory with this file in it is kept by retention. */
#define FSDP_PIN_NAME ".pin"

/* The names of our grammar in a run, newest step first; every plain step counts as good until
 * fsdp_run_check says otherwise. */
fsdp_status fsdp_run_scan(const char *run, fsdp_io *io, fsdp_run_steps *steps_out, fsdp_error *err);

/*
 * FSDP_OK when the step directory verifies as opts say; opts->io is not NULL. fsdp_run_is_fault tells whether
 * another status says something about the checkpoint, or that nobody could know (no memory, cancelled).
 */
fsdp_status fsdp_run_check(const char *run, const fsdp_run_step *step, const fsdp_verify_opts *opts,
                           fsdp_error *err);
bool fsdp_run_is_fault(fsdp_status status);

/* FSDP_OK when all its data was read and is right, whatever opts->level: by this call, or by one before it in
 * this process and nothing has changed since. */
fsdp_status fsdp_run_check_once(const char *run, const fsdp_run_step *step, const fsdp_verify_opts *opts,
                                fsdp_error *err);

/* The disk or a permission kept us from looking, which says nothing about the checkpoint: an older one is not
 * taken in its place, any more than for one of a newer format version. */
bool fsdp_run_is_out_of_reach(fsdp_status status, const fsdp_error *err);
/* A fault that an older checkpoint may be taken for. */
bool fsdp_run_may_skip(fsdp_status status, const fsdp_error *err);

/*
 * FSDP_ERR_REFUSED when a step's directory is a checkpoint of a format version to come. Whoever looks for the
 * newest one stops there: what is older would be taken without anybody having meant it.
 */
fsdp_status fsdp_run_refuse_newer(const char *path, fsdp_io *io, fsdp_error *err);

/* FSDP_ERR_USAGE for a policy that keeps too little. NULL keeps everything. */
fsdp_status fsdp_retention_check(const fsdp_retention *policy, fsdp_error *err);

/* fsdp_run_retain for a caller that holds the run's lease: it is kept while steps are read, refreshed
 * before each removal, and nothing is removed once it is lost. `reading` has the watch, threads, memory and
 * io that steps are read with. */
fsdp_status fsdp_run_retain_held(fsdp_lease *lease, const char *run, const fsdp_retention *policy,
                                 void (*report)(void *user, const fsdp_retain_action *action),
                                 void *user, const fsdp_verify_opts *reading, fsdp_error *err);

#endif

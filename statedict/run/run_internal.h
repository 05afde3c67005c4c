/*
 * Runs: a directory of checkpoints step-N. Local, on one rank; save/save.c and the tools call this room,
 * which reads through checkpoint/ and removes through commit/.
 *
 * In: the path of a run or checkpoint, and a retention policy. Out: the path of the checkpoint to open, the
 * list of steps, or the steps removed.
 *
 *   run.c         lists the steps of a run, finds the newest one that verifies, and removes steps that the
 *                 policy does not keep, their copies in other formats, and what killed saves left; remembers
 *                 which checkpoints this process has verified
 *   resolve.c     turns any path (run, step, file, model) into the path of one checkpoint
 *   hub_cache.c   the same for a model in the cache of Hugging Face
 *   candidates.c  the checkpoints that a load tries, newest first
 */
#ifndef FSDP_RUN_INTERNAL_H
#define FSDP_RUN_INTERNAL_H

#include "base/io/io.h"
#include "statedict/commit/commit.h"
#include "statedict/sd/access.h"
#include <fsdp/checkpoint.h>
#include <fsdp/run.h>

/* Retention keeps a step directory that holds this file. */
#define FSDP_PIN_NAME ".pin"

/* Lists the directories of a run whose names disk_names.h knows, newest step first. Every plain step has
 * FSDP_STEP_GOOD; retention and the search for the newest verify it. */
fsdp_status fsdp_run_scan(const char *run, fsdp_io *io, fsdp_run_steps *steps_out, fsdp_error *err);

/* True for a fault after which a load may take an older checkpoint. */
bool fsdp_run_may_skip(fsdp_status status, const fsdp_error *err);

/*
 * FSDP_ERR_REFUSED when the directory is a checkpoint of a later format version. The search for the newest
 * checkpoint stops there: to continue from an older one would lose training unnoticed.
 */
fsdp_status fsdp_run_refuse_newer(const char *path, fsdp_io *io, fsdp_error *err);

/* FSDP_ERR_USAGE for a policy that keeps too little. NULL keeps everything. */
fsdp_status fsdp_retention_check(const fsdp_retention *policy, fsdp_error *err);

/* fsdp_run_retain, with opts->apply, for a caller that holds the lease of the run: refreshes it while steps
 * are read and before each removal, and removes nothing once it is lost. */
fsdp_status fsdp_run_retain_held(fsdp_lease *lease, const char *run, const fsdp_retention *policy,
                                 const fsdp_retain_opts *opts, fsdp_error *err);

/*
 * A cache of the checkpoints whose data this process has verified, so that retention reads each of them once
 * and not at every save. The key is a fingerprint of the files, which changes when a file changes.
 */

/* A hash of names, sizes, times and inodes of the files. False when the directory cannot be read. */
typedef struct fsdp_fingerprint { uint64_t parts[2]; } fsdp_fingerprint;

bool fsdp_verified_has(const fsdp_fingerprint *print);
void fsdp_verified_add(const fsdp_fingerprint *print);

#endif

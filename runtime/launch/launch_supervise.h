/* The supervisor of --np: the parent forwards signals, waits for the ranks, reports how they died and ends
 * the remaining ones. */
#ifndef FSDP_LAUNCH_SUPERVISE_H
#define FSDP_LAUNCH_SUPERVISE_H

#include "runtime/launch/launch_internal.h"

typedef struct fsdp_supervisor fsdp_supervisor;

/* Called before the first fork; signals are blocked until fsdp_supervise. */
fsdp_status fsdp_supervisor_create(int size, int deadline_ms, fsdp_supervisor **supervisor_out,
                                   fsdp_error *err);
/* Restores the signals. Accepts NULL. */
void fsdp_supervisor_free(fsdp_supervisor *supervisor);

/* In the parent: registers the process of a rank. */
void fsdp_supervisor_add(fsdp_supervisor *supervisor, int rank, pid_t pid);
/* In the rank: restores the signals and joins the ranks' process group. */
void fsdp_supervisor_leave(const fsdp_supervisor *supervisor);
/* In the rank: `failed` of its fsdp_launch_job; notes the exit code before the rank ends. */
void fsdp_supervisor_note(void *supervisor, int rank, int code);

/*
 * Returns when all ranks have ended: 0, or the exit code of the first that failed (128 + N: killed by signal
 * N). After a failure the others get some time to detect it themselves, then SIGTERM, and at the deadline
 * SIGKILL. is_failed: begins with that at once.
 */
int fsdp_supervise(fsdp_supervisor *supervisor, bool is_failed);

#endif

/* What the parent of --np does: forwards signals, waits, says who died and how, ends the rest. */
#ifndef FSDP_LAUNCH_SUPERVISE_H
#define FSDP_LAUNCH_SUPERVISE_H

#include "runtime/launch/launch_internal.h"

typedef struct fsdp_supervisor fsdp_supervisor;

/* Before the first fork; from here on signals wait for fsdp_supervise. */
fsdp_status fsdp_supervisor_create(int size, int deadline_ms, fsdp_supervisor **supervisor_out,
                                   fsdp_error *err);
/* Signals are again as before. Accepts NULL. */
void fsdp_supervisor_free(fsdp_supervisor *supervisor);

/* In the parent: the process that is this rank. */
void fsdp_supervisor_add(fsdp_supervisor *supervisor, int rank, pid_t pid);
/* In the rank: signals as before, a process group of the ranks. */
void fsdp_supervisor_leave(const fsdp_supervisor *supervisor);
/* In a rank, a fsdp_launch_job's `failed`: it is about to end with this code. */
void fsdp_supervisor_note(void *supervisor, int rank, int code);

/*
 * Returns when all ranks have ended: 0, or the exit code of the first that failed (128 + N: killed by
 * signal N). After a failure the others get some time to find out by themselves, then SIGTERM, and at the
 * deadline SIGKILL. is_failed: that is to begin at once.
 */
int fsdp_supervise(fsdp_supervisor *supervisor, bool is_failed);

#endif

/*
 * The control plane, by which the ranks of a save or load agree. It carries small messages; tensors go
 * through files, and the communicator of the training is not used. Calls are local unless they are marked
 * collective.
 *
 * Every call has a deadline. If a rank does not answer, the error of all others names it. All ranks make the
 * calls marked collective in the same order; if they differ, all ranks get FSDP_ERR_USAGE, which names both
 * calls. After a lost rank, and after a difference in the kind or size of calls, the control plane is
 * unusable: every later call returns that first error at once.
 *
 * One fsdp_ctl belongs to one rank, and one thread at a time uses it. This header creates groups of one rank
 * and of threads; fsdp_world_ctl (<fsdp/world.h>) returns that of a launched job, and <fsdp/ctl_mpi.h>
 * creates that of an MPI job.
 */
#ifndef FSDP_CTL_H
#define FSDP_CTL_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_ctl fsdp_ctl;

enum { FSDP_CTL_DEADLINE_MS = 300000 };

/* Creates a group of one rank; the caller frees it. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_self(fsdp_ctl **ctl_out, fsdp_error *err);

/* Frees a control plane; accepts NULL. A later call of another rank fails and names this rank as gone. */
FSDP_API void fsdp_ctl_free(fsdp_ctl *ctl);

/* Returns this rank, from 0. */
FSDP_API int fsdp_ctl_rank(const fsdp_ctl *ctl);
/* Returns the number of ranks. */
FSDP_API int fsdp_ctl_size(const fsdp_ctl *ctl);

/* Sets how long a call waits for a rank that shows no sign of life, the same time on all ranks. The default
 * is FSDP_CTL_DEADLINE_MS. In a launched job call fsdp_world_set_deadline instead. */
FSDP_API void fsdp_ctl_set_deadline(fsdp_ctl *ctl, int milliseconds);

/* Gathers `size` bytes of each of the n ranks on all ranks, in rank order: all_out has n x size bytes.
 * Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_allgather(fsdp_ctl *ctl, const void *mine, size_t size,
                                                     void *all_out, fsdp_error *err);

/* Copies the `size` bytes in data from rank `root` to all ranks. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_broadcast(fsdp_ctl *ctl, int root, void *data, size_t size,
                                                     fsdp_error *err);

/* Returns the common result of the work of all ranks. Each rank passes the status of its own work, and *err,
 * filled in unless the status is FSDP_OK. If all pass FSDP_OK the result is FSDP_OK, otherwise status and
 * text of the lowest failing rank N, with the prefix "rank N: " on the other ranks, and err->rank N. So a
 * rank whose work failed skips no collective call. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_agree(fsdp_ctl *ctl, fsdp_status mine, fsdp_error *err);

/* Waits until every rank has made this call. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_barrier(fsdp_ctl *ctl, fsdp_error *err);

/* Runs as one rank of fsdp_ctl_run_threads, and must not free its ctl. */
typedef fsdp_status (*fsdp_rank_body)(void *context, fsdp_ctl *ctl, fsdp_error *err);
/* Runs body on n threads, each with its rank of a new group, and waits for all of them. Returns the
 * failure of the lowest failing rank. Local. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_run_threads(int n, fsdp_rank_body body, void *context,
                                                       fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

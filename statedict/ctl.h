/*
 * The control plane: the ranks of a save or load agree over it. It carries small messages; tensors go
 * through files, and the communicator of the training is not used. Calls are local unless they are marked
 * collective.
 *
 * Every call has a deadline. A rank that does not answer is named in the error of all the others. All ranks
 * make the calls marked collective in the same order; a difference is FSDP_ERR_USAGE on all of them and names
 * both calls. After a lost rank, and after a difference in the kind or size of calls, the control plane is
 * unusable: every later call returns that first error at once.
 *
 * One fsdp_ctl belongs to one rank and is used by one thread at a time. Here are the groups of one rank and
 * of threads; fsdp_world_ctl (<fsdp/world.h>) has that of a launched job, <fsdp/ctl_mpi.h> that of an MPI
 * job.
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

/* Sets how long one call waits for a rank that does not report that it is at work, the same time on all
 * ranks. The default is FSDP_CTL_DEADLINE_MS. In a launched job fsdp_world_set_deadline sets it. */
FSDP_API void fsdp_ctl_set_deadline(fsdp_ctl *ctl, int milliseconds);

/* Gives every rank the `size` bytes of all ranks, in rank order: all_out has capacity for n x size.
 * Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_allgather(fsdp_ctl *ctl, const void *mine, size_t size,
                                                     void *all_out, fsdp_error *err);

/* Gives every rank root's `size` bytes in data. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_broadcast(fsdp_ctl *ctl, int root, void *data, size_t size,
                                                     fsdp_error *err);

/* Returns the common outcome of all ranks' own work. Every rank brings a status, and *err filled in unless
 * it is FSDP_OK. The outcome is FSDP_OK when all brought FSDP_OK, otherwise status and text of the lowest
 * failing rank, prefixed "rank N: " on the others, with err->rank N. So a local failure skips no
 * collective. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_agree(fsdp_ctl *ctl, fsdp_status mine, fsdp_error *err);

/* Returns when every rank has called it. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_barrier(fsdp_ctl *ctl, fsdp_error *err);

/* Runs as one rank of fsdp_ctl_run_threads; it must not free its ctl. */
typedef fsdp_status (*fsdp_rank_body)(void *context, fsdp_ctl *ctl, fsdp_error *err);
/* Runs body on n threads, each with its rank of a new group, and waits for all of them. Returns the
 * failure of the lowest failing rank. Local. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_run_threads(int n, fsdp_rank_body body, void *context,
                                                       fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

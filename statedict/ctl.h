/*
 * The control plane: the ranks of a save or load agree over it. It carries small messages; tensors go
 * through files, and the communicator of the training is not used.
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

/* Local. Accepts NULL. A later call of another rank fails and names this rank as gone. */
FSDP_API void fsdp_ctl_free(fsdp_ctl *ctl);

/* Local. This rank, from 0, and the number of ranks. */
FSDP_API int fsdp_ctl_rank(const fsdp_ctl *ctl);
FSDP_API int fsdp_ctl_size(const fsdp_ctl *ctl);

/* Local, with the same time on all ranks: how long one call waits for a rank that does not report that it
 * is at work. The default is FSDP_CTL_DEADLINE_MS. In a launched job fsdp_world_set_deadline sets it. */
FSDP_API void fsdp_ctl_set_deadline(fsdp_ctl *ctl, int milliseconds);

/* Collective. Every rank gets the `size` bytes of all ranks, in rank order: all_out has room for n x size. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_allgather(fsdp_ctl *ctl, const void *mine, size_t size,
                                                     void *all_out, fsdp_error *err);

/* Collective. Every rank gets root's `size` bytes in data. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_broadcast(fsdp_ctl *ctl, int root, void *data, size_t size,
                                                     fsdp_error *err);

/*
 * Collective. Every rank brings the outcome of its own work (a status, and *err filled in unless it is
 * FSDP_OK) and gets the common one: FSDP_OK when all brought FSDP_OK, otherwise status and text of the
 * lowest failing rank, prefixed "rank N: " on the others, with err->rank N. So a local failure skips no
 * collective.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_agree(fsdp_ctl *ctl, fsdp_status mine, fsdp_error *err);

/* Collective. Returns when every rank has called it. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_barrier(fsdp_ctl *ctl, fsdp_error *err);

/* Local. Runs body on n threads, each with its rank of a new group, and waits for all of them. Returns the
 * failure of the lowest failing rank. body must not free its ctl. */
typedef fsdp_status (*fsdp_rank_body)(void *context, fsdp_ctl *ctl, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_run_threads(int n, fsdp_rank_body body, void *context,
                                                       fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

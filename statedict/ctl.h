/*
 * The control plane: the ranks of an operation agree over it. Small messages only; tensors go
 * to files, not through here, and training's communicator is never touched.
 *
 * Every call has a deadline. A rank that does not answer is named in the error of all the others.
 * Calls marked collective are made by every rank in the same order; a difference is an error that
 * names both calls. After a failure of the control plane itself (FSDP_ERR_PEER) it is poisoned:
 * every later call returns that first error at once.
 *
 * One fsdp_ctl belongs to one rank and is used by one thread at a time.
 * Back ends: self and threads here; MPI in <fsdp/ctl_mpi.h> (library fsdp_mpi).
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

/* One rank alone. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_self(fsdp_ctl **ctl_out, fsdp_error *err);

/* Local. Accepts NULL. The other ranks see a rank that is gone. */
FSDP_API void fsdp_ctl_free(fsdp_ctl *ctl);

FSDP_API int fsdp_ctl_rank(const fsdp_ctl *ctl);
FSDP_API int fsdp_ctl_size(const fsdp_ctl *ctl);

/* Local; the same on all ranks. How long any one call may wait for a rank that gives no sign of being
 * at work (default FSDP_CTL_DEADLINE_MS). */
FSDP_API void fsdp_ctl_set_deadline(fsdp_ctl *ctl, int milliseconds);

/* Collective. size bytes from every rank, in rank order, to every rank: all_out has room for n x size. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_allgather(fsdp_ctl *ctl, const void *mine, size_t size,
                                                     void *all_out, fsdp_error *err);

/* Collective. root's size bytes to every rank. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_broadcast(fsdp_ctl *ctl, int root, void *data, size_t size,
                                                     fsdp_error *err);

/*
 * Collective. Every rank brings the outcome of its own work (status, and *err filled in when it is
 * not FSDP_OK) and all leave with one: FSDP_OK when all brought FSDP_OK, otherwise the status and
 * text of the lowest failing rank, prefixed "rank N: " on the others, err->rank set to N.
 * This is how a local failure never skips a collective.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_agree(fsdp_ctl *ctl, fsdp_status mine, fsdp_error *err);

/* Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_barrier(fsdp_ctl *ctl, fsdp_error *err);

/*
 * Runs body on n threads, each with its rank of a fresh group, and waits for all. Returns the
 * failure of the lowest failing rank. The deadline applies to every wait, so this ends.
 */
typedef fsdp_status (*fsdp_rank_body)(fsdp_ctl *ctl, void *user, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_run_threads(int n, fsdp_rank_body body, void *user,
                                                       fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

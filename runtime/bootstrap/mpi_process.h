/*
 * MPI as a resource of the process: its beginning and end, the threads that may call it, and buffers of
 * requests that are still in flight. ctl_mpi.c and p2p_mpi.c use it.
 */
#ifndef FSDP_MPI_PROCESS_H
#define FSDP_MPI_PROCESS_H

#include <fsdp/ctl.h>
#include <mpi.h>
#include <stdint.h>

/* Serialises all calls of MPI, from any thread: MPI_THREAD_SERIALIZED is enough. */
void fsdp_mpi_lock(void);
void fsdp_mpi_unlock(void);
/* With a lower level only the thread that initialised MPI may call it. */
bool fsdp_mpi_may_call(void);

/* A request may never complete: MPI_Finalize would block, and is not called. */
void fsdp_mpi_mark_broken(void);

/* Duplicates a communicator, with errors returned. Collective, with the deadline of
 * fsdp_ctl_mpi_set_deadline. When it fails with *pending_out, MPI may still write *comm_out, which must live
 * as long as the process. */
fsdp_status fsdp_mpi_duplicate(MPI_Comm comm, MPI_Comm *comm_out, bool *pending_out, fsdp_error *err);

/* Memory from base/core/mem.h that requests in flight still use; it is freed after they complete. */
typedef struct fsdp_mpi_deferred {
    struct fsdp_mpi_deferred *next;
    MPI_Request *requests;
    int count;
    void *memory[3];           /* from base/core/mem.h; may contain this struct and the requests */
} fsdp_mpi_deferred;
/* Defer takes `deferred`; reclaim frees what has completed. Both are called under the lock. */
void fsdp_mpi_defer(fsdp_mpi_deferred *deferred);
void fsdp_mpi_reclaim(void);

fsdp_status fsdp_mpi_fail(fsdp_error *err, int code, const char *what);

/* Collective. A second control plane of the same ranks, for another thread; FSDP_ERR_USAGE where the thread
 * level of MPI does not allow one. */
fsdp_status fsdp_ctl_mpi_again(fsdp_ctl *ctl, fsdp_ctl **ctl_out, fsdp_error *err);
/* Returns the communicator of a control plane over MPI; MPI_COMM_NULL for any other. */
MPI_Comm fsdp_ctl_mpi_comm_of(const fsdp_ctl *ctl);

#endif

/*
 * What a process has of MPI once, like MPI itself: how it begins and ends, who may call it when, and memory
 * that it may still be at. Under ctl_mpi.c and wire_mpi.c.
 */
#ifndef FSDP_MPI_PROCESS_H
#define FSDP_MPI_PROCESS_H

#include <fsdp/ctl.h>
#include <mpi.h>
#include <stdint.h>

/* Our calls of MPI are made one after the other, from whatever thread: MPI_THREAD_SERIALIZED is enough. */
void fsdp_mpi_lock(void);
void fsdp_mpi_unlock(void);
/* With less than that only the thread that began MPI may call it. */
bool fsdp_mpi_may_call(void);

/* Initialises MPI if nobody did yet. */
fsdp_status fsdp_mpi_begin(fsdp_error *err);
/* Something is still under way that may never end: MPI_Finalize would wait for it. */
void fsdp_mpi_mark_broken(void);

/* A duplicate whose errors come back. Collective, with the deadline of fsdp_ctl_mpi_set_deadline. *comm_out
 * must live as long as the process when it fails with *pending_out: MPI may write it yet. */
fsdp_status fsdp_mpi_duplicate(MPI_Comm comm, MPI_Comm *comm_out, bool *pending_out, fsdp_error *err);

/* Memory from base/core/mem.h that n requests are still at: freed, and they too, when they are done, some
 * time. */
typedef struct fsdp_mpi_deferred {
    struct fsdp_mpi_deferred *next;
    MPI_Request *requests;
    int count;
    void *memory[3];           /* rest and requests may lie in these */
} fsdp_mpi_deferred;
/* Takes `rest`. Both under the lock. */
void fsdp_mpi_defer(fsdp_mpi_deferred *rest);
void fsdp_mpi_reclaim(void);

/* After `tests` tests in vain: gives way to others, the longer the more. False when the time is over, but
 * only after some tests: MPI needs them to move data. */
bool fsdp_mpi_keep_waiting(int tests, int64_t until_ms);

fsdp_status fsdp_mpi_fail(fsdp_error *err, int code, const char *what);

/* The communicator of a control plane of ctl_mpi.c; MPI_COMM_NULL of another one. */
MPI_Comm fsdp_ctl_mpi_comm_of(const fsdp_ctl *ctl);

#endif

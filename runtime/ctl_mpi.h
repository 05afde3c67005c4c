/*
 * Creates the control plane over MPI (library fsdp_mpi). It uses a duplicate of the given communicator, so
 * that its messages never mix with those of the program.
 *
 * The program calls fsdp_ctl_mpi_world or fsdp_ctl_mpi_comm, uses the control plane, and calls fsdp_ctl_free,
 * then fsdp_mpi_finalize. The two calls that create a control plane are collective over its communicator.
 *
 * If a rank is dead or stopped, MPI_Finalize would block forever. After a failure of the control plane
 * fsdp_mpi_finalize therefore returns false without calling it; the program then flushes its output and ends
 * with _exit, never with exit or a return from main. By default mpirun kills all ranks when one dies; with
 * `mpirun --enable-recovery` the others continue and report which rank was lost.
 *
 * One thread of a process makes all calls (MPI_THREAD_FUNNELED).
 */
#ifndef FSDP_CTL_MPI_H
#define FSDP_CTL_MPI_H

#include <fsdp/ctl.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sets the deadline of fsdp_ctl_mpi_world and fsdp_ctl_mpi_comm (default: FSDP_CTL_DEADLINE_MS); call it
 * before them. fsdp_ctl_set_deadline sets that of calls of the control plane. Local. */
FSDP_API void fsdp_ctl_mpi_set_deadline(int milliseconds);

/* Creates the control plane of all ranks of MPI_COMM_WORLD, which the caller frees. Initialises MPI if it is
 * not initialised. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_mpi_world(fsdp_ctl **ctl_out, fsdp_error *err);

/* Creates the control plane of the ranks of a communicator, which the caller frees: comm points to an
 * MPI_Comm, which the caller keeps. Collective over comm. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_mpi_comm(void *comm, fsdp_ctl **ctl_out, fsdp_error *err);

/* Ends MPI if fsdp_ctl_mpi_world initialised it. Returns false if MPI cannot be ended because a rank did not
 * answer: end the process with _exit then. */
FSDP_API bool fsdp_mpi_finalize(void);

#ifdef __cplusplus
}
#endif
#endif

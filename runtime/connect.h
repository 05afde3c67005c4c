/*
 * Connects the processes of a job that another program started, and that have another way to exchange a few
 * bytes (PyTorch's process group, a scheduler, a file). A program that fsdp_launch starts, or that runs under
 * mpirun, srun or torchrun, calls fsdp_launch instead (launch.h).
 *
 * Rank 0 opens a listening TCP socket and tells the others its address; then every rank calls
 * fsdp_ctl_connect. The control plane can be used for saves and loads of any number of state dicts.
 */
#ifndef FSDP_CONNECT_H
#define FSDP_CONNECT_H

#include <fsdp/ctl.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_connect_opts {
    int rank, size;
    const char *job;           /* equal on all ranks, and an id that no other job has: processes with another
                                * one are refused */
    int listener;              /* rank 0: the listening socket, which the call takes, also if it fails */
    const char *host;          /* the others: where rank 0 listens */
    int port;
    int deadline_ms;           /* 0: FSDP_CTL_DEADLINE_MS */
} fsdp_connect_opts;

/* Connects the ranks. The caller frees the control plane, whose deadline is that of opts. If a rank does not
 * come within the deadline, the error of all others names it (FSDP_ERR_PEER). Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_connect(const fsdp_connect_opts *opts, fsdp_ctl **ctl_out,
                                                   fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

/*
 * Room bootstrap: connects the ranks at the start. In: an address, or the environment of mpirun or torchrun,
 * and a deadline. Out: a control plane (ctl.h) of all ranks. runtime/launch calls it; collectives over the
 * network and between processes use its listeners and sockets.
 *
 *   rendezvous.c      the ranks of a job find each other over TCP; the control plane over these connections
 *   torchrun_store.c  the ranks find rank 0 through torchrun's store
 *   socket.c          sockets with deadlines; accepts connections and reads their hellos
 *   process_watch.c   watches processes of this host
 *   ctl_mpi.c         begins and ends MPI; the control plane over it
 *
 * The rendezvous: rank 0 listens, every other rank connects to it, sends its hello and receives the addresses
 * of all ranks. Out comes a control plane over TCP (ctl_tcp.h). It ends within a deadline; the error names
 * the missing ranks. The launcher calls it.
 *
 * Every hello carries a digest of the job's id. Ranks of another job are refused with a reason and do not
 * disturb this one. A rank number that is used twice, or another number of ranks, fails the rendezvous on all
 * ranks with the same error.
 */
#ifndef FSDP_RENDEZVOUS_H
#define FSDP_RENDEZVOUS_H

#include "runtime/bootstrap/socket.h"
#include <fsdp/ctl.h>

typedef struct fsdp_rendezvous_spec {
    int rank, size;
    const char *job;           /* an id that no other job has */
    bool is_one_host;          /* listens at the loopback address only */
    int deadline_ms;
    /* Rank 0: where it listens. */
    int listener;              /* an open one, which it takes; -1: none */
    int port;                  /* else the port; 0: any free one */
    fsdp_status (*publish)(void *context, int port, int64_t until_ms, fsdp_error *err);   /* or NULL */
    /* The others: finds the address of rank 0. Called before each attempt to connect. */
    fsdp_status (*find)(void *context, char host_out[FSDP_HOST_SIZE], int *port_out, int64_t until_ms,
                        fsdp_error *err);
    void *context;
} fsdp_rendezvous_spec;

/* Collective over all ranks of the job. */
fsdp_status fsdp_rendezvous(const fsdp_rendezvous_spec *spec, fsdp_ctl **ctl_out, fsdp_error *err);

#endif

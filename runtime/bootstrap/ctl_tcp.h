/*
 * The control plane over TCP: ranks are processes of any hosts. Rank 0 has a connection with every rank
 * from their meeting (rendezvous.h). Others connect when one sends to another for the first time, each
 * direction on a connection of its own, so that the receiver never has to take part in it.
 */
#ifndef FSDP_CTL_TCP_H
#define FSDP_CTL_TCP_H

#include "runtime/bootstrap/listener.h"
#include "runtime/bootstrap/socket.h"
#include <fsdp/ctl.h>

/* Where a rank listens. */
typedef struct fsdp_rank_address {
    char host[FSDP_HOST_SIZE];
    int32_t port;
} fsdp_rank_address;

/* All of it becomes the control plane's, also when creating fails; the arrays are from base/core/mem.h. */
typedef struct fsdp_tcp_parts {
    int rank, size;
    uint8_t job[FSDP_SHA256_SIZE];
    int listener;              /* where other ranks connect; -1: none do (rank 0) */
    int *fds;                  /* rank 0: one per rank; the others: one, with rank 0. -1 where none is */
    fsdp_rank_address *addresses;      /* of all ranks; NULL at rank 0 */
} fsdp_tcp_parts;

/* Of those that became nobody's; fds and addresses may be NULL. */
void fsdp_tcp_parts_release(fsdp_tcp_parts *parts);
fsdp_status fsdp_ctl_tcp(const fsdp_tcp_parts *parts, fsdp_ctl **ctl_out, fsdp_error *err);

/* Of a control plane of this kind: the host of another rank as this one reaches it, and the job's digest.
 * False: it is of another kind. */
bool fsdp_ctl_tcp_find(const fsdp_ctl *ctl, int rank, char host_out[FSDP_HOST_SIZE],
                       uint8_t job_out[FSDP_SHA256_SIZE]);

#endif

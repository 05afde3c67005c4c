/*
 * The control plane over TCP, for ranks that are processes of any hosts. Rank 0 keeps the rendezvous'
 * connection with every rank (rendezvous.h). Two other ranks connect at the first send, one connection per
 * direction, so that the receiver does not have to take part in it.
 */
#ifndef FSDP_CTL_TCP_H
#define FSDP_CTL_TCP_H

#include "runtime/bootstrap/listener.h"
#include "runtime/bootstrap/socket.h"
#include <fsdp/ctl.h>

/* The address of a rank's listener. */
typedef struct fsdp_rank_address {
    char host[FSDP_HOST_SIZE];
    int32_t port;
} fsdp_rank_address;

/* The control plane takes all of it, also when its creation fails; the arrays come from base/core/mem.h. */
typedef struct fsdp_tcp_parts {
    int rank, size;
    uint8_t job[FSDP_SHA256_SIZE];
    int listener;              /* for the other ranks' connections; -1 at rank 0 */
    int *fds;                  /* rank 0: one per rank; the others: one, with rank 0. -1: none */
    fsdp_rank_address *addresses;      /* of all ranks; NULL at rank 0 */
} fsdp_tcp_parts;

fsdp_status fsdp_ctl_tcp(const fsdp_tcp_parts *parts, fsdp_ctl **ctl_out, fsdp_error *err);

/* The host at which this rank reaches another one, and the job's digest. Returns false when it is not
 * a control plane over TCP. */
bool fsdp_ctl_tcp_find(const fsdp_ctl *ctl, int rank, char host_out[FSDP_HOST_SIZE],
                       uint8_t job_out[FSDP_SHA256_SIZE]);

#endif

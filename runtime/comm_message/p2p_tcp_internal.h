/*
 * The connections of p2p over TCP (p2p_tcp.c), for tests as well.
 *
 * A posted receive sends its channel as a room frame, and a sender sends data only when it has got one: data
 * goes straight to its place, and no channel blocks another.
 */
#ifndef FSDP_P2P_TCP_INTERNAL_H
#define FSDP_P2P_TCP_INTERNAL_H

#include "runtime/bootstrap/socket.h"
#include "runtime/comm_message/p2p_tcp.h"
#include <pthread.h>

typedef struct tcp_batch tcp_batch;

/* One transfer of a batch; in the list of its stream while it is under way. */
typedef struct tcp_transfer {
    struct tcp_transfer *next;
    tcp_batch *batch;          /* NULL: the place is free */
    fsdp_p2p_transfer piece;
} tcp_transfer;

struct tcp_batch {
    fsdp_p2p_batch batch;
    tcp_transfer *transfers;   /* by place */
    int *finished;             /* places, not reported by test yet */
    int finished_count;
    tcp_batch *next;           /* in the list of given-up batches */
};

enum { FRAME_DATA = 1, FRAME_ROOM, FRAME_STATUS };

/* --- p2p_tcp.c ---------------------------------------------------------------------------- */

/* Collective over ctl. fds: one per rank, all -1; on failure those that were made are the caller's. */
fsdp_status fsdp_tcp_connect_all(fsdp_ctl *ctl, int deadline_ms, int *fds, fsdp_error *err);

#endif

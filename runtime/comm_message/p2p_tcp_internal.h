/*
 * The files of p2p over TCP.
 *
 *   p2p_tcp.c        batches, transfers, status messages
 *   tcp_stream.c     frames on the connection with one rank
 *   tcp_connect.c    connects every pair of ranks
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

/* In front of everything. */
typedef struct tcp_frame {
    uint32_t kind, size;
    int32_t channel;
} tcp_frame;

typedef struct tcp_room {
    int channel, count;        /* posted receives of the other rank */
} tcp_room;

typedef struct tcp_status {
    struct tcp_status *next;
    size_t size;
    unsigned char data[FSDP_P2P_STATUS];
} tcp_status;

/* The connection with one rank. */
typedef struct tcp_stream {
    int fd;                    /* -1: this rank itself, or the connection has ended */
    bool lacks_memory;         /* the reason of that */
    char place[FSDP_PLACE_SIZE];       /* the other end */
    tcp_transfer *sends, *receives;    /* the oldest first */
    /* Small frames wait here, and go before those of data. */
    unsigned char *small;
    size_t small_at, small_end, small_room;
    tcp_transfer *sending;     /* its frame has begun */
    tcp_frame out;
    size_t out_at;             /* of frame and data */
    tcp_frame in;
    size_t in_at;
    tcp_transfer *receiving;
    tcp_status *receiving_status;
    tcp_room *rooms;
    size_t room_count, room_capacity;
} tcp_stream;

/* --- tcp_stream.c ----------------------------------------------------------------------------- */

/* True when it has something to write now. */
bool fsdp_tcp_stream_wants_out(const tcp_stream *stream);
/* Transfer without waiting. An ended connection is closed. */
void fsdp_tcp_stream_write(tcp_stream *stream);
void fsdp_tcp_stream_read(tcp_stream *stream, tcp_status **statuses);
/* False when there is no memory. */
bool fsdp_tcp_stream_put_small(tcp_stream *stream, const tcp_frame *frame, const void *data);
void fsdp_tcp_stream_release(tcp_stream *stream);

/* --- tcp_connect.c ---------------------------------------------------------------------------- */

/* Collective over ctl. fds: one per rank, all -1; on failure those that were made are the caller's. */
fsdp_status fsdp_tcp_connect_all(fsdp_ctl *ctl, int deadline_ms, int *fds, fsdp_error *err);

#endif

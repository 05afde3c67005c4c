/*
 * Point-to-point messages between the ranks of a world: what a network provides to the collectives
 * (comm_message.h). p2p_mpi.c (in libfsdp_mpi) and p2p_tcp.c implement it.
 *
 * Transfers belong to a batch, which owns the memory that they read and write: after a failed call the
 * transfers in flight still use that memory, and no buffer of the caller. Messages between two ranks on one
 * channel keep their order. A status message is small, and is received without a posted receive.
 *
 * No call waits. Any thread of the rank may call, if may_call allows it.
 */
#ifndef FSDP_P2P_H
#define FSDP_P2P_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FSDP_P2P_PIECE = 1 << 20,  /* bytes in one transfer, at most */
    FSDP_P2P_STATUS = 1200     /* bytes in a status message, at most */
};

typedef struct fsdp_p2p fsdp_p2p;

typedef struct fsdp_p2p_batch {
    unsigned char *memory;     /* page-aligned */
    int places;                /* each has at most one transfer in flight */
} fsdp_p2p_batch;

typedef struct fsdp_p2p_transfer {
    int place;                 /* a free one of the batch */
    int peer, channel;         /* peer: a rank of the world */
    unsigned char *data;       /* in the batch's memory; a send only reads it */
    size_t size;               /* 1..FSDP_P2P_PIECE bytes */
} fsdp_p2p_transfer;

typedef struct fsdp_p2p_ops {
    const char *name;          /* "mpi", "tcp" */
    int channels;              /* numbers from 1 to that can be used */
    /* Fails with FSDP_ERR_USAGE on a thread that must not call the other operations. */
    fsdp_status (*may_call)(fsdp_p2p *p2p, fsdp_error *err);
    fsdp_status (*batch_create)(fsdp_p2p *p2p, int places, size_t size, fsdp_p2p_batch **batch_out,
                                fsdp_error *err);
    /* Start a transfer. */
    fsdp_status (*send)(fsdp_p2p *p2p, fsdp_p2p_batch *batch, const fsdp_p2p_transfer *transfer,
                        fsdp_error *err);
    fsdp_status (*recv)(fsdp_p2p *p2p, fsdp_p2p_batch *batch, const fsdp_p2p_transfer *transfer,
                        fsdp_error *err);
    /* Lists the places whose transfers have completed since the last call; `finished` has capacity for
     * all. */
    fsdp_status (*test)(fsdp_p2p *p2p, fsdp_p2p_batch *batch, int *finished, int *count_out,
                        fsdp_error *err);
    void (*batch_close)(fsdp_p2p *p2p, fsdp_p2p_batch *batch);
    /* Best effort; copied. */
    void (*send_status)(fsdp_p2p *p2p, int to, const void *status, size_t size);
    /* False: none has arrived. All status messages have that size. */
    bool (*recv_status)(fsdp_p2p *p2p, void *status, size_t size);
    /* True when the connection with a rank has ended. NULL: cannot be detected. */
    bool (*is_disconnected)(fsdp_p2p *p2p, int rank);
    /* The other end of that connection, "127.0.0.1:4711"; "": unknown. NULL: there are no addresses. */
    void (*locate)(fsdp_p2p *p2p, int rank, char *out, size_t out_size);
    /* After `idle` polls that found nothing: yields or sleeps, at most some milliseconds. */
    void (*back_off)(fsdp_p2p *p2p, int idle);
    void (*close)(fsdp_p2p *p2p);    /* after its batches */
} fsdp_p2p_ops;

/* The head of every implementation. */
struct fsdp_p2p {
    const fsdp_p2p_ops *ops;
};

#endif

/*
 * Messages between the ranks of a world, under the collectives that are made of them (comm_message.h): the
 * least that a network must offer. p2p_mpi.c (in libfsdp_mpi) and p2p_tcp.c offer it.
 *
 * Transfers of data belong to a *batch*, which owns the memory that they read and write: when a call is given
 * up, what is still under way goes on there and harms nobody. Messages from one rank to another on one
 * channel keep their order. *News* are small messages without a receiver that waits for them.
 *
 * No call waits. Any thread of the rank may call, where may_call says so.
 */
#ifndef FSDP_P2P_H
#define FSDP_P2P_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FSDP_P2P_PIECE = 1 << 20,       /* bytes in one transfer, at most */
    FSDP_P2P_STATUS = 1200              /* bytes of status, at most */
};

typedef struct fsdp_p2p fsdp_p2p;

typedef struct fsdp_p2p_batch {
    unsigned char *memory;     /* page-aligned */
    int places;                /* each has one transfer under way, or none */
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
    /* Is this thread one that may? Others do nothing, and get FSDP_ERR_USAGE. */
    fsdp_status (*may_call)(fsdp_p2p *p2p, fsdp_error *err);
    fsdp_status (*batch_create)(fsdp_p2p *p2p, int places, size_t size, fsdp_p2p_batch **batch_out,
                                fsdp_error *err);
    /* Begins a transfer of 1..FSDP_P2P_PIECE bytes of the batch's memory at a free place. */
    fsdp_status (*send)(fsdp_p2p *p2p, fsdp_p2p_batch *batch, const fsdp_p2p_transfer *transfer,
                        fsdp_error *err);
    fsdp_status (*recv)(fsdp_p2p *p2p, fsdp_p2p_batch *batch, const fsdp_p2p_transfer *transfer,
                        fsdp_error *err);
    /* Which places have become free; `finished` has room for all. */
    fsdp_status (*test)(fsdp_p2p *p2p, fsdp_p2p_batch *batch, int *finished, int *count_out,
                        fsdp_error *err);
    void (*batch_close)(fsdp_p2p *p2p, fsdp_p2p_batch *batch);
    /* Best effort; copied. */
    void (*send_status)(fsdp_p2p *p2p, int to, const void *status, size_t size);
    /* False: there are none. Size is that of the status, which are all of one kind. */
    bool (*recv_status)(fsdp_p2p *p2p, void *status, size_t size);
    /* Has the connection with a rank ended? NULL: nobody knows. */
    bool (*is_disconnected)(fsdp_p2p *p2p, int rank);
    /* After `idle` looks in vain: gives way to others, the longer the more. At most some milliseconds. */
    void (*back_off)(fsdp_p2p *p2p, int idle);
    void (*close)(fsdp_p2p *p2p);    /* after its batches */
} fsdp_p2p_ops;

/* The head of every wire. */
struct fsdp_p2p {
    const fsdp_p2p_ops *ops;
};

#endif

/*
 * Messages between the ranks of a world, under the collectives that are made of them (comm_message.h): the
 * least that a network must offer. wire_mpi.c (in libfsdp_mpi) and wire_tcp.c offer it.
 *
 * Transfers of data belong to a *batch*, which owns the memory that they read and write: when a call is given
 * up, what is still under way goes on there and harms nobody. Messages from one rank to another on one
 * channel keep their order. *News* are small messages without a receiver that waits for them.
 *
 * No call waits. Any thread of the rank may call, where may_call says so.
 */
#ifndef FSDP_WIRE_H
#define FSDP_WIRE_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FSDP_WIRE_PIECE = 1 << 20,       /* bytes in one transfer, at most */
    FSDP_WIRE_NEWS = 1200              /* bytes of news, at most */
};

typedef struct fsdp_wire fsdp_wire;

typedef struct fsdp_wire_batch {
    unsigned char *memory;     /* page-aligned */
    int places;                /* each has one transfer under way, or none */
} fsdp_wire_batch;

typedef struct fsdp_wire_ops {
    const char *name;          /* "mpi", "tcp" */
    int channels;              /* numbers from 1 to that can be used */
    /* Is this thread one that may? Others do nothing, and get FSDP_ERR_USAGE. */
    fsdp_status (*may_call)(fsdp_wire *wire, fsdp_error *err);
    fsdp_status (*batch_create)(fsdp_wire *wire, int places, size_t size, fsdp_wire_batch **batch_out,
                                fsdp_error *err);
    /* Begins a transfer of 1..FSDP_WIRE_PIECE bytes of the batch's memory at a free place. */
    fsdp_status (*send)(fsdp_wire *wire, fsdp_wire_batch *batch, int place, int to, int channel,
                        const void *data, size_t size, fsdp_error *err);
    fsdp_status (*recv)(fsdp_wire *wire, fsdp_wire_batch *batch, int place, int from, int channel, void *data,
                        size_t size, fsdp_error *err);
    /* Which places have become free; `finished` has room for all. */
    fsdp_status (*test)(fsdp_wire *wire, fsdp_wire_batch *batch, int *finished, int *count_out,
                        fsdp_error *err);
    void (*batch_close)(fsdp_wire *wire, fsdp_wire_batch *batch);
    /* Best effort; copied. */
    void (*tell)(fsdp_wire *wire, int to, const void *news, size_t size);
    /* False: there are none. Size is that of the news, which are all of one kind. */
    bool (*hear)(fsdp_wire *wire, void *news, size_t size);
    /* Has the connection with a rank ended? NULL: nobody knows. */
    bool (*has_lost)(fsdp_wire *wire, int rank);
    /* After `idle` looks in vain: gives way to others, the longer the more. At most some milliseconds. */
    void (*rest)(fsdp_wire *wire, int idle);
    void (*close)(fsdp_wire *wire);    /* after its batches */
} fsdp_wire_ops;

/* The head of every wire. */
struct fsdp_wire {
    const fsdp_wire_ops *ops;
};

#endif

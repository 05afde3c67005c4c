/* Ranks as threads over the fake NCCL: each has a device whose streams are threads. */
#ifndef FSDP_NCCL_RANKS_H
#define FSDP_NCCL_RANKS_H

#include "runtime/comm_nccl/transport_nccl.h"
#include "tests/nccl/fake_nccl.h"

typedef struct nccl_rank {
    int rank, size;
    fsdp_ctl *ctl;
    fsdp_transport *transport; /* NULL: it was not created, with `err` */
    fsdp_comm *comm;           /* of all ranks; NULL: it was not created */
    fsdp_device *device;
    fsdp_stream *stream;
    fsdp_status status;        /* of the body, or of the creation */
    fsdp_error err;
    void *context;
} nccl_rank;

typedef struct nccl_world {
    int size, deadline_ms;
    int creation_ms;           /* 0: the same */
    bool has_hosts;            /* two, of even and odd ranks, through the first of which beats go */
    bool check;
    fsdp_status (*body)(nccl_rank *rank, fsdp_error *err);     /* after a successful creation */
    void *context;
    void (*at_end)(void);      /* when all ranks have ended; NULL: nothing */
} nccl_world;

enum { NCCL_MOST_RANKS = 8 };

/* A device with a stream, as those ranks have it; the caller closes both. */
fsdp_status open_nccl_device(fsdp_device **device_out, fsdp_stream **stream_out, fsdp_error *err);
/* The plan of the library that FSDP_NCCL_LIB names. */
fake_nccl_control *fake_nccl_of(void);
/* Runs the world, and then checks that nothing is left in the fake; results has capacity for all ranks. */
void run_nccl_world(const nccl_world *world, nccl_rank *results);
/* An all_reduce of 8 f32 for layers.1, on the rank's stream; returns when it was given. */
fsdp_status give_call(nccl_rank *rank, fsdp_error *err);
/* Ends the rank's beats with a failure, as its death does. */
void end_beats(nccl_rank *rank, const fsdp_error *why);
/* Waits until the group has failed, at most 20 s; returns the failure. */
fsdp_status await_failure(nccl_rank *rank, fsdp_error *err);

/* Ends the test with a message when `holds` is false. */
void expect(bool holds, const char *what, const char *got);

#endif

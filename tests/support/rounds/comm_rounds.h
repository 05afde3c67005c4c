/* Random collectives: equal calls over every back end, each checked against a model of one rank. */
#ifndef FSDP_COMM_ROUNDS_H
#define FSDP_COMM_ROUNDS_H

#include "runtime/comm/comm_backend.h"

/* The kind of memory of a rank's buffers. */
typedef enum comm_buffers { COMM_MIXED, COMM_POOL, COMM_PRIVATE } comm_buffers;

typedef struct comm_rounds {
    uint64_t seed;             /* equal on all ranks */
    int rounds;
    int64_t max_count;
    comm_buffers buffers;
} comm_rounds;

fsdp_status run_comm_rounds(fsdp_comm *comm, const comm_rounds *rounds, fsdp_error *err);

/* One drawn call, for tests that need a certain one. Arrays of counts have the group's size. */
typedef struct comm_case {
    fsdp_collective_kind kind;
    fsdp_dtype dtype;
    fsdp_reduce_op op;
    double factor;
    int64_t count;
    int root;
    bool is_uneven, is_in_place;
    comm_buffers buffers;
    uint64_t seed;
    struct fsdp_stream *stream;        /* NULL, or the call is work of it */
} comm_case;
fsdp_status run_comm_case(fsdp_comm *comm, const comm_case *test, fsdp_error *err);

#endif

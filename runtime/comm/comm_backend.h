/*
 * The interface between comm.c and its back ends. A transport is one rank's connection to all ranks of its
 * world (self, threads, shm, mpi, tcp, nccl); a communicator is a group of ranks on it. In: calls of comm.h
 * that comm.c has checked. Out: their results, or the first failure of the group. comm.c also poisons
 * communicators, composes operations that a back end lacks, and builds and compares the headers of
 * calls. Rooms of back ends, the launcher and the world include this header.
 */
#ifndef FSDP_COMM_BACKEND_H
#define FSDP_COMM_BACKEND_H

#include "kernels/train/tensor.h"
#include <fsdp/comm.h>
#include <fsdp/ctl.h>
#include <stdatomic.h>

typedef struct fsdp_transport fsdp_transport;
typedef struct fsdp_comm_queue fsdp_comm_queue;

/* Describes a call. Equal on all ranks of the group. */
enum { FSDP_HEADER_UNIT = 64, FSDP_HEADER_SEEN = 0x100 };
typedef struct fsdp_comm_header {
    uint64_t sequence;         /* number of the call on this communicator */
    uint32_t kind, dtype, op;  /* kind 0: the creation of `op` groups; op: or with FSDP_HEADER_SEEN */
    int32_t root;
    uint64_t count;            /* uneven: of all parts together; all_to_all: 0 */
    uint64_t counts;           /* uneven: a hash of all counts, never 0; all_to_all: 0 */
    double factor;
    char unit[FSDP_HEADER_UNIT];       /* its beginning and end when it is too long */
} fsdp_comm_header;

typedef struct fsdp_transport_ops {
    const char *name;
    unsigned abilities;
    /* Collective over the world: all ranks create the same groups in the same order. `ranks` has `count`
     * groups of `size` ranks each, in one of which a rank is at most; a rank that is in none gets a NULL
     * communicator. */
    fsdp_status (*comm_create)(fsdp_transport *transport, const int *ranks, int size, int count,
                               fsdp_comm **comm_out, fsdp_error *err);
    /* Called with checked arguments, size > 1 and operations within the abilities. Compares headers first
     * (fsdp_comm_compare). Back ends with FSDP_COMM_POOL handle views themselves. comm.c poisons the
     * communicator with a failure and passes it to abort. */
    fsdp_status (*run)(fsdp_comm *comm, const fsdp_collective *call, const fsdp_comm_header *header,
                       fsdp_error *err);
    /* Called from any thread of this rank, also while another is in run. NULL: poisons this rank only. */
    void (*abort)(fsdp_comm *comm, const fsdp_error *why);
    /* True when a rank of the group has failed; *err_out is the first failure. May be NULL. */
    bool (*has_failed)(fsdp_comm *comm, fsdp_error *err_out);
    /* True when this rank can read all of it in that member's memory. NULL: never. */
    bool (*sees)(const fsdp_comm *comm, int member, const void *data, size_t size);
    void (*comm_close)(fsdp_comm *comm);       /* frees the back end's part */
    /* Any thread. The other ranks wait for this one until then (CLOCK_MONOTONIC), and their deadlines count
     * from there. NULL: never. */
    void (*set_busy)(fsdp_transport *transport, int64_t until_ms);
    void *(*alloc)(fsdp_transport *transport, size_t size);
    void (*dealloc)(fsdp_transport *transport, void *data);
    void (*close)(fsdp_transport *transport);  /* the other ranks see that this one has left */
} fsdp_transport_ops;

/* The head of every transport. */
struct fsdp_transport {
    const fsdp_transport_ops *ops;
    int rank, size;            /* in the world */
    _Atomic int deadline_ms;   /* threads of communicators read it */
    int exit_code;             /* of this rank's program: sent to the others when it leaves */
    const char *exit_reason;   /* goes with it; NULL: none. Borrowed */
};

struct fsdp_comm {
    fsdp_transport *transport;
    int rank, size;            /* in the group */
    int *ranks;                /* world ranks */
    uint64_t sequence;         /* calls so far */
    int patience_ms;           /* its calls wait for so long after the transport's deadline, too */
    fsdp_error poison;         /* valid when poison_state is POISON_IS_SET */
    _Atomic int poison_state;
    fsdp_comm_queue *queue;    /* started calls (comm.c); NULL: none yet */
    void *backend;
};

fsdp_status fsdp_transport_self(fsdp_transport **transport_out, fsdp_error *err);

/* --- for back ends ---------------------------------------------------------------------------- */

/* Local. Checks the ranks and creates this rank's end of its group, without the back end's part; NULL when
 * this rank is in none. */
fsdp_status fsdp_comm_create(fsdp_transport *transport, const int *ranks, int size, int count,
                             fsdp_comm **comm_out, fsdp_error *err);
void fsdp_comm_free(fsdp_comm *comm);  /* accepts NULL */

/* fsdp_comm_run without waiting for started calls. */
fsdp_status fsdp_comm_run_now(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err);
/* The first failure of the group or of this rank, without a call. Data that calls in streams have made is
 * undefined after it: ask after a wait for the stream. Any thread. */
fsdp_status fsdp_comm_failure(fsdp_comm *comm, fsdp_error *err);

/* The size of one rank's part in all_gather and reduce_scatter, and its offset, in elements. */
int64_t fsdp_comm_part(const fsdp_collective *call, int rank);
int64_t fsdp_comm_place(const fsdp_collective *call, int rank);
/* The arithmetic of a call with an op, among `size` ranks. */
fsdp_reduction fsdp_comm_reduction(const fsdp_collective *call, int size);
/* For views that follow addresses of other ranks: true when the memory is still readable, also after the
 * owner has failed. */
bool fsdp_comm_sees(const fsdp_comm *comm, int member, const void *data, size_t size);
/* Runs the view of a gather whose parts are all in `out`. parts: one pointer per rank. */
void fsdp_comm_view_out(const fsdp_collective *call, int size, const void **parts);

/* Entries of fsdp_transport_ops for transports without memory of their own. */
void *fsdp_transport_alloc_pages(fsdp_transport *transport, size_t size);
void fsdp_transport_free_pages(fsdp_transport *transport, void *data);

/* --- headers ---------------------------------------------------------------------------------- */

fsdp_comm_header fsdp_comm_head(const fsdp_comm *comm, const fsdp_collective *call);
/* Returns the header of the creation of groups. */
fsdp_comm_header fsdp_comm_head_groups(const int *ranks, int size, int count, uint64_t sequence);
/* Compares the headers of all ranks, in group order. When two differ, it fails with the same FSDP_ERR_USAGE
 * on every rank, which names two ranks and their calls: "rank 1 makes reduce_scatter of 32 bf16 for layers.1
 * (call 7), rank 0 all_gather of 16 f32 for layers.0 (call 7)". */
fsdp_status fsdp_comm_compare(const int *ranks, int size, const fsdp_comm_header *headers, fsdp_error *err);
/* Fails with that error, which names two ranks and their calls. */
fsdp_status fsdp_comm_differ(int first_rank, const fsdp_comm_header *first, int other_rank,
                             const fsdp_comm_header *other, fsdp_error *err);
/* all_to_all: fails because one rank sends another count than the other expects. */
fsdp_status fsdp_comm_miscount(int from, int to, int64_t sent, int64_t expected,
                               const fsdp_comm_header *header, fsdp_error *err);
/* "all_gather of 1190 f32 for layers.1 (call 17)" */
void fsdp_comm_describe(const fsdp_comm_header *header, char *out, size_t out_size);
const char *fsdp_comm_kind_name(uint32_t kind);        /* "all_gather"; "?": there is none */
const char *fsdp_comm_op_name(uint32_t op);            /* "premul_sum" */
bool fsdp_comm_reduces(uint32_t kind);                 /* it has an op */
/* "exit code 7 (no space)"; a code that is not one of ours, which a program may choose: "exit code 1" */
enum { FSDP_EXIT_TEXT = 64, FSDP_LEFT_TEXT = 128 };
void fsdp_comm_describe_exit(int exit_code, char out[FSDP_EXIT_TEXT]);
/* "has left the group with exit code 7 (no space): it takes no part in" */
void fsdp_comm_describe_left(int exit_code, char out[FSDP_LEFT_TEXT]);
/* A rank that takes no part in a call. */
typedef struct fsdp_comm_loss {
    int rank;
    const char *which;         /* after "rank N": " (process 4711)"; or NULL */
    const char *what;          /* "died in", "has left the group: it takes no part in" */
    const char *reason, *hint; /* its error; what to do; or NULL */
} fsdp_comm_loss;
/* FSDP_ERR_PEER: "rank 1 (process 4711) died in all_gather of 16 f32 for layers.0 (call 7)" */
fsdp_error fsdp_comm_describe_loss(const fsdp_comm_loss *loss, const fsdp_comm_header *header);

#endif

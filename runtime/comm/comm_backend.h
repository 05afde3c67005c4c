/*
 * What moves tensors between ranks, behind comm.h. A *transport* is one rank's connection to all ranks of its
 * world (self, threads, shm, mpi, tcp); a communicator is a group on it. What is common to all of them
 * (checks of arguments, poison, what a back end lacks) is comm.c; headers and how they differ are
 * comm_header.c.
 */
#ifndef FSDP_COMM_BACKEND_H
#define FSDP_COMM_BACKEND_H

#include <fsdp/comm.h>
#include <fsdp/ctl.h>
#include <stdatomic.h>

typedef struct fsdp_transport fsdp_transport;
typedef struct fsdp_comm_queue fsdp_comm_queue;

/* Goes with every call. Equal on all ranks but for the rank. */
enum { FSDP_HEADER_UNIT = 64, FSDP_HEADER_SEEN = 0x100 };
typedef struct fsdp_comm_header {
    uint64_t sequence;         /* calls on this communicator so far */
    uint32_t kind, dtype, op;  /* kind 0: a group is made; op: with FSDP_HEADER_SEEN, or not */
    int32_t root;
    uint64_t count;            /* uneven: of all parts together; all_to_all: 0 */
    uint64_t counts;           /* uneven: a hash of all counts, never 0; all_to_all: 0 */
    double factor;
    char unit[FSDP_HEADER_UNIT];       /* both ends of it, where it is too long */
} fsdp_comm_header;

typedef struct fsdp_transport_ops {
    const char *name;
    unsigned abilities;
    /* Collective over the world: all ranks call it for all groups in one order, with the same ranks; a rank
     * that is not among them gets a NULL communicator. */
    fsdp_status (*comm_create)(fsdp_transport *transport, const int *ranks, int size, fsdp_comm **comm_out,
                               fsdp_error *err);
    /* size > 1, arguments checked, abilities respected; back ends with pools see to views, comm.c does for
     * the others. Exchanges headers first (fsdp_comm_compare). A failure has a status and a text; comm.c
     * poisons, and passes it to abort. */
    fsdp_status (*run)(fsdp_comm *comm, const fsdp_collective *call, const fsdp_comm_header *header,
                       fsdp_error *err);
    /* From any thread of this rank, also while another is in run; NULL: only this rank is poisoned. */
    void (*abort)(fsdp_comm *comm, const fsdp_error *why);
    /* Has a rank of the group failed? *err_out is the first failure, as this rank tells it. May be NULL. */
    bool (*has_failed)(fsdp_comm *comm, fsdp_error *err_out);
    /* Lies all of it in memory of that member which this rank may read? NULL: never. */
    bool (*sees)(const fsdp_comm *comm, int member, const void *data, size_t size);
    void (*comm_close)(fsdp_comm *comm);       /* frees the back end's part */
    void *(*alloc)(fsdp_transport *transport, size_t size);
    void (*dealloc)(fsdp_transport *transport, void *data);
    void (*close)(fsdp_transport *transport);  /* the other ranks see that this one has left */
} fsdp_transport_ops;

/* The head of every transport. */
struct fsdp_transport {
    const fsdp_transport_ops *ops;
    int rank, size;            /* in the world */
    int deadline_ms;
    int exit_code;             /* what this rank's program returned: the others hear it when it leaves */
};

struct fsdp_comm {
    fsdp_transport *transport;
    int rank, size;            /* in the group */
    int *ranks;                /* world ranks */
    uint64_t sequence;         /* calls so far */
    fsdp_error poison;         /* to be read when poison_state says so */
    _Atomic int poison_state;
    fsdp_comm_queue *queue;    /* what was started (comm_async.c); NULL: nothing was */
    void *backend;
};

fsdp_status fsdp_transport_self(fsdp_transport **transport_out, fsdp_error *err);

/* --- for back ends ---------------------------------------------------------------------------- */

/* Local. Checks the ranks and creates this rank's end of their group, without the back end's part; NULL when
 * this rank is not among them. */
fsdp_status fsdp_comm_create(fsdp_transport *transport, const int *ranks, int size, fsdp_comm **comm_out,
                             fsdp_error *err);
void fsdp_comm_free(fsdp_comm *comm);  /* accepts NULL */

/* fsdp_comm_run, but for its place behind what was started. */
fsdp_status fsdp_comm_run_now(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err);
/* Waits until nothing that was started is under way. */
void fsdp_comm_settle(const fsdp_comm *comm);
/* Gives up what has not ended, and forgets all handles. */
void fsdp_comm_close_queue(fsdp_comm *comm);

/* Are the arguments good, alone? The text has no name of the call. */
fsdp_status fsdp_comm_check(const fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err);
/* The part of one rank in all_gather and reduce_scatter, and what lies before it, in elements. */
int64_t fsdp_comm_part(const fsdp_collective *call, int rank);
int64_t fsdp_comm_place(const fsdp_collective *call, int rank);
/* For views that follow addresses of other ranks, which may have given up by now: is it safe to look? */
bool fsdp_comm_sees(const fsdp_comm *comm, int member, const void *data, size_t size);
/* The view of a gather whose parts are all in out. parts: room for a pointer per rank. */
void fsdp_comm_view_out(const fsdp_collective *call, int size, const void **parts);
/* An average or premultiplied sum by a back end that only adds; the bits are the same. */
fsdp_status fsdp_comm_run_scaled(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err);

/* Entries of fsdp_transport_ops where any memory is as good as any other. */
void *fsdp_transport_alloc_pages(fsdp_transport *transport, size_t size);
void fsdp_transport_free_pages(fsdp_transport *transport, void *data);

/* --- headers (comm_header.c) ------------------------------------------------------------------ */

fsdp_comm_header fsdp_comm_head(const fsdp_comm *comm, const fsdp_collective *call);
/* The making of a group. */
fsdp_comm_header fsdp_comm_head_group(const int *ranks, int size, uint64_t sequence);
/* Are the headers of all ranks (in group order) the same call? Otherwise the same FSDP_ERR_USAGE on every
 * rank, naming two ranks and their calls: "rank 1 makes reduce_scatter of 32 bf16 for layers.1 (call 7),
 * rank 0 all_gather of 16 f32 for layers.0 (call 7)". */
fsdp_status fsdp_comm_compare(const int *ranks, int size, const fsdp_comm_header *headers, fsdp_error *err);
/* That error, for those who know the first rank and the first one that differs from it. */
fsdp_status fsdp_comm_differ(int first_rank, const fsdp_comm_header *first, int other_rank,
                             const fsdp_comm_header *other, fsdp_error *err);
/* all_to_all: what one rank sends is not what the other expects. */
fsdp_status fsdp_comm_miscount(int from, int to, int64_t sent, int64_t expected,
                               const fsdp_comm_header *header, fsdp_error *err);
/* "all_gather of 1190 f32 for layers.1 (call 17)" */
void fsdp_comm_describe(const fsdp_comm_header *header, char *out, size_t out_size);
const char *fsdp_comm_kind_name(uint32_t kind);        /* "all_gather"; "?": there is none */
const char *fsdp_comm_op_name(uint32_t op);            /* "premul_sum" */
bool fsdp_comm_reduces(uint32_t kind);                 /* has it an op? */
/* "exit code 7 (no space)"; a code that is no error of ours, which a program may choose: "exit code 1" */
enum { FSDP_EXIT_TEXT = 64, FSDP_LEFT_TEXT = 128 };
void fsdp_comm_describe_exit(int exit_code, char out[FSDP_EXIT_TEXT]);
/* "has left the group with exit code 7 (no space): it does not come to" */
void fsdp_comm_describe_left(int exit_code, char out[FSDP_LEFT_TEXT]);

#endif

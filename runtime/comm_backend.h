/*
 * What moves tensors between ranks, behind comm.h. A *fabric* is one rank's connection to all ranks of its
 * world (self, threads, shm, mpi); a communicator is a group on it. What is common to all of them (checks of
 * arguments, poison, what a back end lacks) is comm.c; headers and how they differ are comm_header.c.
 */
#ifndef FSDP_COMM_BACKEND_H
#define FSDP_COMM_BACKEND_H

#include <fsdp/comm.h>
#include <fsdp/ctl.h>

typedef struct fsdp_fabric fsdp_fabric;

/* Goes with every call. Equal on all ranks but for the rank. */
enum { FSDP_HEADER_UNIT = 64 };
typedef struct fsdp_comm_header {
    uint64_t sequence;         /* calls on this communicator so far */
    uint32_t kind, dtype, op;
    int32_t root;
    uint64_t count;            /* uneven: a hash of all counts */
    double factor;
    char unit[FSDP_HEADER_UNIT];       /* cut to fit */
} fsdp_comm_header;

typedef struct fsdp_fabric_ops {
    const char *name;
    unsigned abilities;
    /* Collective over the world: all ranks call it for all groups in one order, with the same ranks; a rank
     * that is not among them gets a NULL communicator. */
    fsdp_status (*comm_create)(fsdp_fabric *fabric, const int *ranks, int size, fsdp_comm **comm_out,
                               fsdp_error *err);
    /* size > 1, arguments checked, abilities respected. Exchanges headers first (fsdp_comm_compare). A
     * failure has a status and a text; comm.c poisons. */
    fsdp_status (*run)(fsdp_comm *comm, const fsdp_collective *call, const fsdp_comm_header *header,
                       fsdp_error *err);
    void (*abort)(fsdp_comm *comm, const fsdp_error *why);
    void (*comm_close)(fsdp_comm *comm);       /* frees the back end's part */
    void *(*alloc)(fsdp_fabric *fabric, size_t size);
    void (*dealloc)(fsdp_fabric *fabric, void *data);
    void (*close)(fsdp_fabric *fabric);        /* frees the fabric; the others see a rank that has left */
} fsdp_fabric_ops;

/* The head of every fabric. */
struct fsdp_fabric {
    const fsdp_fabric_ops *ops;
    int rank, size;            /* in the world */
    int deadline_ms;
};

struct fsdp_comm {
    fsdp_fabric *fabric;
    int rank, size;            /* in the group */
    int *ranks;                /* world ranks */
    uint64_t sequence;         /* calls so far */
    fsdp_error poison;
    void *backend;
};

/* --- the fabrics ------------------------------------------------------------------------------ */

fsdp_status fsdp_fabric_self(fsdp_fabric **fabric_out, fsdp_error *err);
/* n connected ranks for n threads of this process. */
fsdp_status fsdp_fabric_threads(int n, int deadline_ms, fsdp_fabric **fabrics_out, fsdp_error *err);
/* Collective over ctl, whose ranks are all processes of this host. */
fsdp_status fsdp_fabric_shm(fsdp_ctl *ctl, int deadline_ms, fsdp_fabric **fabric_out, fsdp_error *err);

/* --- for back ends ---------------------------------------------------------------------------- */

FSDP_API fsdp_status fsdp_comm_create(fsdp_fabric *fabric, const int *ranks, int size, void *backend,
                                      fsdp_comm **comm_out, fsdp_error *err);
void fsdp_comm_free(fsdp_comm *comm);  /* accepts NULL */

fsdp_comm_header fsdp_comm_head(const fsdp_comm *comm, const fsdp_collective *call);
/* Are the headers of all ranks (in group order) the same call? Otherwise the same FSDP_ERR_USAGE on every
 * rank, naming two ranks and their calls: "rank 1 makes reduce_scatter of 32 bf16 for layers.1 (call 7),
 * rank 0 all_gather of 16 f32 for layers.0 (call 7)". */
FSDP_API fsdp_status fsdp_comm_compare(const fsdp_comm *comm, const fsdp_comm_header *headers, fsdp_error *err);
/* "all_gather of 1190 f32 for layers.1 (call 17)" */
FSDP_API void fsdp_comm_describe(const fsdp_comm_header *header, char *out, size_t out_size);

#endif

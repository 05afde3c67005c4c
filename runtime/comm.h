/*
 * Collectives, by which ranks exchange tensors. A communicator is one rank's member of a group of ranks;
 * the world creates and owns it (world.h). Calls are local unless they are marked collective.
 *
 * All back ends but NCCL sum in one order: every reduced element is x0 + x1 + ... in the order of the group's
 * ranks, in f32 for f32, bf16 and f16, else in its own type; an average divides once, and the result is
 * rounded once. So these back ends give the same bits, all ranks hold the same bits, and all_reduce equals
 * reduce_scatter and all_gather.
 *
 * Every call carries a header (its number, kind, unit, dtype, count, operation). When ranks make different
 * calls, all of them get an error that names both. A process that dies is named within a second, one that
 * stalls at the deadline. After a failure the communicator is poisoned: every later call returns that first
 * error at once, here and on the other ranks.
 */
#ifndef FSDP_COMM_H
#define FSDP_COMM_H

#include <fsdp/dtype.h>
#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_comm fsdp_comm;

typedef enum fsdp_collective_kind {
    FSDP_ALL_GATHER = 1,       /* in: count elements of this rank; out: those of all, in rank order */
    FSDP_REDUCE_SCATTER,       /* in: of all ranks' parts; out: this rank's part, reduced */
    FSDP_ALL_REDUCE,           /* count elements, from in to out */
    FSDP_BROADCAST,            /* count elements of root; in is used there, out elsewhere */
    FSDP_ALL_TO_ALL            /* in: counts[r] elements for rank r; out: out_counts[r] of rank r */
} fsdp_collective_kind;

typedef enum fsdp_reduce_op {
    FSDP_REDUCE_SUM = 0,
    FSDP_REDUCE_AVG,           /* sum / size; floating types */
    FSDP_REDUCE_MAX,           /* NaN wins. Not of floating types in a stream over NCCL, which needs none */
    FSDP_REDUCE_PREMUL_SUM     /* sum of factor * x; floating types */
} fsdp_reduce_op;

/*
 * Gives zero-copy access to the ranks' inputs. `see` gets one pointer per rank of the group, in its order,
 * into that rank's buffer. It may read there until it returns, and must not call the communicator. A rank
 * sends no heartbeat while `see` runs, which should take much less than the deadline.
 *   all_gather      `see` replaces the copy of the parts, on any of the ranks. The contents of `out` are
 *                   undefined afterwards, but `out` is still needed: if ranks cannot read each other's
 *                   memory, the parts are received there.
 *   reduce_scatter  `see` replaces the reduction: it combines all inputs in the order of ranks, on all ranks
 *                   or on none. Needs FSDP_COMM_POOL, and inputs from fsdp_comm_alloc. `out` is not used.
 */
typedef struct fsdp_comm_view {
    void (*see)(void *context, const void *const *parts);
    void *context;
} fsdp_comm_view;

/* Buffers may overlap in these cases only: all_gather with `in` at this rank's part of `out`,
 * reduce_scatter with `out` at this rank's part of `in`, all_reduce and broadcast with in == out.
 * The caller does not touch buffers until the call returns. */
typedef struct fsdp_collective {
    fsdp_collective_kind kind;
    fsdp_dtype dtype;
    const void *in;
    void *out;
    int64_t count;             /* per rank for all_gather and reduce_scatter, else of the whole */
    const int64_t *counts;     /* NULL, or uneven: one per rank of the group, equal on all ranks (all_to_all:
                                * what this rank sends to each) */
    const int64_t *out_counts; /* all_to_all: what it gets from each */
    fsdp_reduce_op op;
    double factor;             /* premul_sum */
    int root;                  /* broadcast: position in the group */
    const char *unit;          /* names the caller in messages; or NULL */
    const fsdp_comm_view *view;        /* all_gather and reduce_scatter; or NULL */
    struct fsdp_stream *stream;        /* NULL: the buffers are the host's, and the call returns when it is
                                * done. Otherwise they are a device's, and the call returns after it has
                                * issued the work to that stream. Hooks get the stream (settings.h, wrap.h) */
} fsdp_collective;

/* Returns this rank's position in the group. */
FSDP_API int fsdp_comm_rank(const fsdp_comm *comm);
/* Returns the number of ranks in the group. */
FSDP_API int fsdp_comm_size(const fsdp_comm *comm);
/* Returns the world ranks in group order, which the communicator owns. */
FSDP_API const int *fsdp_comm_ranks(const fsdp_comm *comm);
/* Returns the back end's name: "self", "threads", "shm", ... */
FSDP_API const char *fsdp_comm_backend(const fsdp_comm *comm);

/* Operations that the back end implements itself; comm.c composes the others, with the same result. */
enum { FSDP_COMM_AVG = 1, FSDP_COMM_PREMUL_SUM = 2, FSDP_COMM_POOL = 4 };
/* Kinds of memory: STREAMS accepts calls in streams of a device, and with DEVICE_MEMORY fsdp_comm_alloc
 * returns memory of a device. */
enum { FSDP_COMM_STREAMS = 8, FSDP_COMM_DEVICE_MEMORY = 16 };
/* Returns the operations and kinds of memory above, as a set of bits. */
FSDP_API unsigned fsdp_comm_abilities(const fsdp_comm *comm);

/* Runs a call. Any thread may use a communicator, one at a time. If one rank has a bad argument, the call
 * fails on all, and poisons the communicator like any other failure. Collective in the group. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_comm_run(fsdp_comm *comm, const fsdp_collective *call,
                                                fsdp_error *err);

typedef struct fsdp_comm_handle fsdp_comm_handle;
/*
 * Starts a call without waiting for it. A thread of the communicator runs started calls in order;
 * fsdp_comm_run on the same communicator runs after them, so ranks may mix both if their order is the same.
 * The caller does not change the buffers, nor anything else that `call` points to, until fsdp_comm_wait
 * returns. With hundreds of calls in flight it waits for the oldest. Over MPI it needs MPI_THREAD_SERIALIZED.
 * fsdp_comm_wait returns a failure of the call and frees the handle. If fsdp_comm_start itself fails (no
 * memory, no thread), it returns no handle and poisons the communicator. Collective in the group.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_comm_start(fsdp_comm *comm, const fsdp_collective *call,
                                                  fsdp_comm_handle **handle_out, fsdp_error *err);
/* Returns true after the call has ended, successfully or not, and for NULL. */
FSDP_API bool fsdp_comm_is_done(const fsdp_comm_handle *handle);
/* Waits for the end of the call, returns its status, frees the handle and sets it NULL; accepts NULL.
 * Handles may be waited for in any order. A world that ends aborts the calls that still run and were not
 * waited for. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_comm_wait(fsdp_comm_handle **handle, fsdp_error *err);

/* Allocates memory that the other ranks can read directly, page-aligned and not zeroed; the caller frees it.
 * Any buffer works in a collective, but this one is faster. Returns NULL if none is left or the back end has
 * none: use a plain buffer then. With FSDP_COMM_DEVICE_MEMORY it is memory of a GPU, for calls in streams,
 * which the host cannot access. */
FSDP_API void *fsdp_comm_alloc(fsdp_comm *comm, size_t size);
/* Frees memory of fsdp_comm_alloc, through any communicator of the same rank and world. Accepts NULL. */
FSDP_API void fsdp_comm_dealloc(fsdp_comm *comm, void *data);

/* Aborts the communicator: from now on every call on it, here and on the other ranks, returns the error
 * `why`. Any thread may abort at any time, also while another is in a call; only the first abort has an
 * effect. `why` is copied; NULL, or FSDP_OK in it, means FSDP_ERR_CANCELLED. */
FSDP_API void fsdp_comm_abort(fsdp_comm *comm, const fsdp_error *why);

#ifdef __cplusplus
}
#endif
#endif

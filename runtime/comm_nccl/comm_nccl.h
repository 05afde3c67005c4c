/*
 * Collectives of GPU memory over NCCL.
 *
 *   nccl_library.c    finds and opens libnccl, whose functions nccl_api.h declares
 *   transport_nccl.c  creates and closes the transport and its communicators, gives calls to streams; memory
 *                     that NCCL knows
 *   nccl_failure.c    the first failure of a group; results of NCCL as errors; the end of communicators
 *   nccl_watch.c      a thread per rank that finds failures, tells all ranks, and names the rank because of
 *                     which a call is late
 *
 * In: calls (fsdp_collective) that comm.c has checked, with streams of the device. Out: work of those
 * streams, or the same error on all members. The launcher creates the transport (transport_nccl.h), comm.c
 * calls its operations; no other room includes this header.
 *
 * The inner transport connects the same ranks over the host (threads, shared memory, TCP or MPI). It carries
 * NCCL's unique ids, calls without a stream (host memory: whether gradients are finite), the comparison of
 * --check, and what the watches tell each other. NCCL carries nothing else than tensors.
 *
 * Creation must not block: the watch aborts it when a rank is lost. Calls must: for each call of a
 * communicator that does not block, NCCL (2.23.4 and later) starts a thread. So one communicator of all
 * ranks, the creator, is made from a unique id and does not block; it carries no calls. Each group is split
 * from it, and blocks: the state of the creator tells when the split is done. An NCCL that cannot split
 * (before 2.18) makes each group from an id of its own, and starts no threads.
 *
 * A call returns when NCCL has launched it, and ends later on the device. So a group keeps the calls that
 * were given and are not done: after each, its stream sets a flag in staging memory. The watch of each rank
 * wakes several times per second, asks NCCL for errors, and exchanges a beat with the others' watches, which
 * a dead or stopped rank misses; the inner transport names that rank. Beyond 64 ranks beats go through one
 * rank per host, once per second. A call without progress for a deadline is late: then the watches compare
 * how far the members have come, and name the one that did not make the call, or made another one. NCCL may
 * take minutes to make a communicator, and to connect it in the first call of each algorithm, which does not
 * return before: a call that has not returned on some member has a deadline of its own. The first failure of
 * a group is kept on all its members, and the watch aborts NCCL's communicator, so that waiting kernels end.
 *
 * The end of a communicator may wait for all work of the GPU (NCCL gives memory back by cudaFree), and so for
 * kernels of other groups. So when a group fails, all groups of the rank that have calls under way fail with
 * it; a thread per rank that is not the watch ends them together, and the watch continues its beats.
 * NCCL frees with an aborted communicator what a thread in one of its calls still uses. From 2.22.3 on
 * ncclCommAbort in a group of calls only tells the call to return, and ncclGroupEnd frees: between both the
 * thread waits for the call. Before, it waits first, for a second, and then has to free, as a call that
 * connects to a lost rank does not return by itself: such a rank may crash, after the failure is known.
 * ncclCommRevoke (2.28.7) does not help: it takes its order to return back, before calls have seen it.
 */
#ifndef FSDP_COMM_NCCL_H
#define FSDP_COMM_NCCL_H

#include "runtime/comm/comm_backend.h"
#include "runtime/comm_nccl/nccl_library.h"
#include "runtime/comm_nccl/transport_nccl.h"
#include "runtime/device/device.h"

#include <pthread.h>

enum { FSDP_NCCL_PENDING = 256, FSDP_NCCL_FACTORS = 8 };

typedef struct nccl_transport nccl_transport;

/* A call that was given, and the moment when NCCL got it or, after that, had launched it. */
typedef struct nccl_pending {
    fsdp_comm_header header;
    int64_t since_ms;
    bool is_starting;          /* NCCL has not launched it yet, and may connect first */
} nccl_pending;

/* An operation of NCCL that multiplies first. */
typedef struct nccl_factor {
    fsdp_nccl_op op;
    fsdp_dtype dtype;
    double factor;
} nccl_factor;

/* The source of a failure; told: the others know it. A remote one is NCCL's notice that another rank is gone,
 * without its number: another failure that comes soon replaces it, and only then the group has failed.
 * A failure that spread is that of another group of this rank, and names the rank at fault. */
typedef enum nccl_origin {
    FSDP_NCCL_NO_FAILURE = 0, FSDP_NCCL_TOLD, FSDP_NCCL_REMOTE, FSDP_NCCL_SPREAD, FSDP_NCCL_OWN
} nccl_origin;

typedef enum nccl_end { FSDP_NCCL_OPEN = 0, FSDP_NCCL_ENDING, FSDP_NCCL_ENDED } nccl_end;

/* One member's end of a group. */
typedef struct nccl_group {
    nccl_transport *transport;
    struct nccl_group *next;
    fsdp_comm *comm, *inner;
    bool is_creator, is_blocking;
    uint64_t id;               /* its number among all groups, those of other ranks, too */
    pthread_mutex_t calling;   /* one thread calls NCCL with the communicator; taken before `lock` */
    _Atomic(fsdp_nccl_comm) handle;    /* NULL: not made yet, or given to the thread that ends it */
    _Atomic(fsdp_nccl_comm) split;     /* of the creator: NCCL writes one that is split from it here, done or
                                          failed; the new group takes it */
    /* Of the thread that ends it. */
    _Atomic int end;           /* nccl_end */
    fsdp_nccl_comm ended;
    struct nccl_group *next_ended;
    nccl_factor factors[FSDP_NCCL_FACTORS];
    uint64_t factors_made;
    pthread_mutex_t lock;      /* of all below */
    uint64_t issued, done;     /* calls; the first is the creation of the group */
    int64_t progress_ms;
    nccl_pending pending[FSDP_NCCL_PENDING];
    _Atomic unsigned char *flags;      /* staging memory, one per pending call: it is done */
    nccl_origin origin;
    bool has_spread;           /* the failure, to other groups */
    bool aborts_inner;         /* of the watch: soon, with the failure */
    fsdp_error failure;
    int64_t remote_ms;         /* when a remote failure was seen */
} nccl_group;

/* NCCL's registration of a block with a group. */
typedef struct nccl_registration {
    struct nccl_registration *next;
    nccl_group *group;
    void *handle;
} nccl_registration;

typedef struct nccl_block {
    struct nccl_block *next;
    void *data;
    size_t size;
    nccl_registration *registrations;
} nccl_block;

/* The state of a rank, in every beat. */
typedef struct nccl_beat {
    uint64_t group, number;    /* of the failure, or of the oldest call that is not done */
    int32_t failure;           /* nccl_origin: it has one to tell */
    int32_t busy_ms;           /* it is busy for so long from now on */
    uint8_t is_pending, is_late;       /* there is such a call; it is past the deadline */
    uint8_t leaves;
    uint8_t is_failed_rank;    /* the failure is the rank's own end: of all groups */
    uint8_t unused[4];
} nccl_beat;

/* The progress of a rank in a group. */
typedef struct nccl_progress {
    uint64_t issued, done;
    fsdp_comm_header header;   /* of the late call; zero: it is not pending here */
    int64_t waits_ms;          /* for the late call, since it was given or launched */
    uint32_t is_member, has_closed;
    uint32_t is_starting;      /* the late call makes a communicator, or NCCL has not launched it */
    uint32_t unused;
} nccl_progress;

/* The way of beats through the first rank of each host, its leader. */
typedef struct nccl_hosts {
    fsdp_comm *local;          /* the ranks of this rank's host */
    fsdp_comm *leaders;        /* NULL: this rank is none of them */
    int *order;                /* ranks: those of the first host, of the second, ... */
    int64_t *bytes;            /* of each host, in the current exchange */
    int *sizes, count;         /* ranks of each host */
    int patience_ms;           /* how much longer a leader waits for others than for the ranks of its host */
    unsigned char *here, *everywhere, *message;        /* of this host, of all, and what all ranks get */
} nccl_hosts;

struct nccl_transport {
    fsdp_transport base;
    fsdp_transport *inner;
    fsdp_device *device;
    const fsdp_nccl *nccl;
    bool check, shares_gpu;
    int creation_ms;
    int *all;                  /* ranks: 0, 1, ... */
    uint64_t groups_made;
    fsdp_comm *creator;        /* of all ranks, without calls: groups are split from it; NULL: none */
    _Atomic int64_t busy_until_ms;
    pthread_mutex_t memory;    /* of `blocks`, and of changes to `groups`; taken before `lock` */
    pthread_mutex_t lock;      /* of `groups` and of is_leaving; taken before those of groups */
    pthread_cond_t changed;
    nccl_group *groups;
    uint64_t *closed;          /* per id of a group that this rank has closed: 1 + its calls; else 0 */
    size_t closed_room;
    nccl_block *blocks;
    bool is_leaving;
    /* The watch's own. */
    pthread_t watch;
    bool has_watch;
    _Atomic bool is_whole;     /* all ranks take part in beats */
    int beat_ms;               /* how far beats are apart, at most */
    fsdp_comm *watches;        /* its group, of all ranks */
    bool uses_hosts;           /* beats go through one rank per host; else among all */
    nccl_hosts hosts;
    nccl_beat *beats;          /* per rank, as are the next two */
    nccl_progress *progress;
    bool *has_left;
    int64_t others_busy_until_ms;
};

/* --- nccl_failure.c --------------------------------------------------------------------------- */

/* "NCCL 2.28.9: unhandled cuda error: ..." */
fsdp_status fsdp_nccl_fail(const nccl_transport *transport, fsdp_nccl_result result, fsdp_error *err);
/* Keeps the first failure of a group, and wakes the watch. Any thread; takes the group's lock. */
void fsdp_nccl_group_fail(nccl_group *group, const fsdp_error *why, nccl_origin origin);
bool fsdp_nccl_group_has_failed(nccl_group *group, fsdp_error *err_out);
/* With the right to call NCCL: what it says of a communicator, FSDP_NCCL_IN_PROGRESS or a result. */
fsdp_nccl_result fsdp_nccl_poll(const fsdp_nccl *nccl, fsdp_nccl_comm handle);
/* With the group's lock: counts the calls that are done. */
void fsdp_nccl_advance(nccl_group *group);
void fsdp_nccl_nap(unsigned naps);
/* Takes the communicator of a group for its end, and puts the group into the list; false: it has none, or
 * it was taken. With the transport's lock, or when the watch does not know the group any more. */
bool fsdp_nccl_take_handle(nccl_group *group, nccl_group **list);
/* Ends all communicators of the list by threads of their own, and returns at once. */
void fsdp_nccl_end(nccl_group *list, bool aborts);
/* Waits until that is done, for a deadline and 2 s; false: NCCL still does it, so that its thread keeps the
 * group. */
bool fsdp_nccl_await_end(const nccl_group *group);

/* --- transport_nccl.c ----------------------------------------------------------------------------- */

/* Reserves the next place among the pending calls. */
fsdp_status fsdp_nccl_begin(nccl_group *group, const fsdp_comm_header *header, uint64_t *number_out,
                            fsdp_error *err);

/* --- nccl_watch.c ----------------------------------------------------------------------------- */

/* Collective over ctl, with the same outcome on all ranks. */
fsdp_status fsdp_nccl_watch_begin(nccl_transport *transport, const fsdp_nccl_spec *spec, fsdp_error *err);
/* Tells the others that this rank leaves, and why, and ends the thread. With a failure all groups of the rank
 * fail. Does nothing a second time. */
void fsdp_nccl_watch_end(nccl_transport *transport);

#endif

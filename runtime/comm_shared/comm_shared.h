/*
 * Collectives over memory that all ranks of a group can read: threads of a process, or processes of a host.
 *
 *   shared_group.c       creates and closes groups
 *   comm_shared.c        runs a call: publishes it, passes a barrier, compares the calls, runs the steps,
 *                        which say which ranges a member copies and reduces
 *   shared_stream.c      the same in streams of a device, among threads
 *   shared_barrier.c     the barrier between members, and all that ends a wait: failures, exits, deadlines;
 *                        finds the rank that a missing rank itself waits for
 *   transport_threads.c  memory of one process
 *   transport_shm.c      one segment of memory per process: created, passed to the other processes, and
 *                        allocated in
 *
 * In: a call (fsdp_collective) that comm.c has checked, and its header. Out: the reduced or moved data, or
 * the same error on all members. The launcher creates the transports (shared_transports.h); comm.c calls
 * their operations; no other room includes this header.
 *
 * Every group has one block of shared memory with a slot per member. In a barrier each member increments the
 * phase of its slot and waits until all phases are equal. A call begins and ends with a barrier, so the
 * buffers of a member stay valid while others read them.
 *
 * Small calls pass one barrier only: the data that others read is copied into this rank's window first, and
 * stays there until the call after the next one, before which all members have passed another barrier. For
 * this a window has two halves that alternate from call to call, and a slot has two published calls.
 */
#ifndef FSDP_COMM_SHARED_H
#define FSDP_COMM_SHARED_H

#include "runtime/comm/comm_backend.h"
#include "runtime/comm_shared/shared_transports.h"
#include "runtime/device/device.h"

enum { FSDP_SHARED_LINE = 64, FSDP_SHARED_CALL = 5 };

/* The first failure in a group. */
typedef struct shared_failure {
    _Atomic uint32_t state;    /* 0: none; 2 x (member + 1): written by that member; plus 1: being written */
    int32_t status, rank, errnum;
    int32_t is_local;          /* it happened on the writer; else the text names the rank */
    char text[FSDP_ERROR_TEXT];
} shared_failure;

/* A member's call, and its buffers as offsets from shared_transport.bases. */
typedef struct shared_published {
    _Alignas(FSDP_SHARED_LINE) fsdp_comm_header header;
    uint64_t in, out;
    fsdp_event points[2];      /* of calls in streams (shared_stream.c) */
} shared_published;

typedef struct shared_slot {
    _Alignas(FSDP_SHARED_LINE) _Atomic uint64_t phase; /* barriers that this member has reached */
    _Atomic uint64_t heartbeats;       /* counted in long work between barriers */
    _Atomic uint32_t is_reading;       /* it may be reading buffers of other members */
    _Atomic uint32_t has_left;         /* 1 + its exit code */
    /* Only the world's block uses it (shared_barrier.c). */
    _Atomic uint32_t waits_for;        /* in a barrier of any group: 1 + the awaited rank; 0: in none */
    _Atomic uint32_t ctl_waits_for;    /* in a call of the control plane: 1 + rank */
    _Atomic uint64_t ctl_call[FSDP_SHARED_CALL];       /* its name, as words: "fsdp_root_save", or "" */
    _Atomic int64_t busy_until_ms;     /* 0: never was */
    _Atomic int64_t looked_ms;         /* last update of waits_for */
    _Atomic uint32_t waits_in;         /* kind of the collective of that barrier */
    /* Written before the member reaches a barrier. */
    shared_published published[2];     /* the current call and the next one */
    uint64_t block, window;            /* while a group is created */
} shared_slot;

typedef struct shared_block {
    _Alignas(FSDP_SHARED_LINE) _Atomic uint32_t event; /* futex: a barrier is complete, or a member failed */
    _Atomic uint32_t sleepers;
    shared_failure failure;
    shared_slot slots[];       /* then, per member: counts[size], out_counts[size] of all_to_all */
} shared_block;

typedef struct shared_transport shared_transport;

/* One member's end of a group. */
typedef struct shared_group {
    shared_transport *transport;
    const fsdp_comm *comm;     /* NULL: the group of all ranks that creates the others has none */
    shared_block *block;
    int rank, size;            /* in the group */
    const int *ranks;          /* world ranks; borrowed */
    uint64_t phase;            /* barriers reached so far */
    uint64_t call_phase;       /* its value at the start of the current call */
    uint64_t calls;            /* so far; its parity selects the published call */
    unsigned half;             /* of windows: the next one to fill; counts up */
    unsigned failed_spins;     /* waits in a row in which spinning was not enough */
    fsdp_comm_header header;   /* of the current call, for messages */
    unsigned char **windows;   /* of all members: four times window_half bytes */
    fsdp_comm_header *headers; /* room to compare those of all members */
    const void **sources;      /* operands of a reduction */
} shared_group;

/* The head of both transports. */
struct shared_transport {
    fsdp_transport base;
    shared_group world;        /* all ranks: creates the other groups */
    int *world_ranks;          /* 0, 1, ... */
    uintptr_t *bases;          /* per world rank: its published addresses are offsets from here */
    size_t segment_size;       /* others can read this rank's buffers in its segment only; 0: all of them */
    bool is_limited;           /* ... which is small because files may have only so many bytes */
    int spins;                 /* polls of a wait before it sleeps */
    size_t window_half;        /* bytes */
    fsdp_ctl *observed;        /* reports its calls to this transport; NULL: none */
    /* Memory that all ranks can read and that lives as long as the transport. NULL: none left. */
    void *(*alloc_shared)(fsdp_transport *transport, size_t size);
    /* NULL: a rank cannot die alone. Also writes its name for messages: "process 4711". */
    bool (*is_dead)(shared_transport *transport, int rank, char *name, size_t name_size);
};

/* --- shared_barrier.c ------------------------------------------------------------------------- */

size_t fsdp_shared_block_size(int members);
/* The block of the world, which has a text per rank after that of a group: the reason of its exit code. */
size_t fsdp_shared_world_size(int ranks);
int64_t *fsdp_shared_counts(shared_group *group, int member); /* counts; out_counts follow */

/* The two halves of a barrier. Await fails when a member failed, left or died, or gives no heartbeat within
 * the deadline. */
void fsdp_shared_arrive(shared_group *group);
fsdp_status fsdp_shared_await(shared_group *group, fsdp_error *err);

/* Between these two calls this member may read the others' buffers, and look up points of their streams. The
 * first fails after a failure. */
fsdp_status fsdp_shared_begin_read(shared_group *group, fsdp_error *err);
void fsdp_shared_end_read(shared_group *group);

/* Records the first failure of the group. is_local: it happened on this rank and its text names no other. */
void fsdp_shared_fail(shared_group *group, const fsdp_error *why, bool is_local);
bool fsdp_shared_has_failed(shared_group *group, fsdp_error *err_out);
/* This member reaches no further barrier. */
void fsdp_shared_leave(shared_group *group);

/* The wait-for graph. Called repeatedly in a wait: the first missing member. */
void fsdp_shared_note_wait(shared_group *group, int member, int64_t now_ms);
void fsdp_shared_end_wait(shared_group *group);
/* Follows the waits from a missing member to the rank that waits for none, describes that rank's state ("is
 * stuck, or stopped: it did not come") and returns its world rank. was_in: the member had begun the call. */
enum { FSDP_WAIT_TEXT = 192 };
int fsdp_shared_find_missing(const shared_group *group, int member, bool was_in, char out[FSDP_WAIT_TEXT]);
/* An entry of fsdp_transport_ops, and its value for a rank; 0: it never was. */
void fsdp_shared_set_busy(fsdp_transport *transport, int64_t until_ms);

/* --- shared_group.c --------------------------------------------------------------------------- */

/* Entries of fsdp_transport_ops. */
fsdp_status fsdp_shared_comm_create(fsdp_transport *transport, const int *ranks, int size, int count,
                                    fsdp_comm **comm_out, fsdp_error *err);
void fsdp_shared_comm_close(fsdp_comm *comm);

/* The fields that both transports share; base.rank and base.size are set. */
fsdp_status fsdp_shared_transport_init(shared_transport *transport, fsdp_error *err);
void fsdp_shared_transport_release(shared_transport *transport);
/* alloc_shared had none left for `what`: names the limit of files where that is why. */
fsdp_status fsdp_shared_fail_memory(const shared_transport *transport, const char *what, fsdp_error *err);

/* Both halves. */
static inline fsdp_status fsdp_shared_pass_barrier(shared_group *group, fsdp_error *err)
{
    fsdp_shared_arrive(group);
    return fsdp_shared_await(group, err);
}

/* --- comm_shared.c: entries of fsdp_transport_ops --------------------------------------------- */

fsdp_status fsdp_shared_run(fsdp_comm *comm, const fsdp_collective *call, const fsdp_comm_header *header,
                            fsdp_error *err);
void fsdp_shared_abort(fsdp_comm *comm, const fsdp_error *why);
bool fsdp_shared_comm_has_failed(fsdp_comm *comm, fsdp_error *err_out);
bool fsdp_shared_sees(const fsdp_comm *comm, int member, const void *data, size_t size);
/* Called in long work. False when the group has failed and the work is pointless. */
bool fsdp_shared_heartbeat(shared_group *group);

/* --- shared_stream.c ---------------------------------------------------------------------------- */

/* The rest of a call that was published and compared, as work of call->stream. */
fsdp_status fsdp_shared_run_in_stream(shared_group *group, const fsdp_collective *call, fsdp_error *err);

/* The current call, as a member published it. */
static inline shared_published *fsdp_shared_published(const shared_group *group, int member)
{
    return &group->block->slots[member].published[group->calls % 2];
}

#endif

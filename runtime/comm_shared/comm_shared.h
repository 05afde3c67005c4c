/*
 * Collectives over memory that all ranks see: threads of a process, or processes of a host.
 *
 *   comm_shared.c     a call: publish it, meet, compare, do the steps, meet
 *   shared_steps.c    the steps: who copies and adds what
 *   shared_barrier.c     how ranks wait for each other, and what ends a wait
 *   wait_graph.c    who waits for whom
 *   shared_group.c    groups are made and left
 *   transport_threads.c  memory of one process
 *   transport_shm.c      segments of several (shm_*.c)
 *
 * Every group has one *block* that all its members see, with a slot for each. Members *meet*: each counts up
 * its phase and waits until all have. A call begins and ends with a spec, so the buffers of a rank stay
 * there while others may look at them.
 *
 * Calls of little data have one meeting only: what others read was copied into this rank's window, and stays
 * there until the call after the next one, before which all have met again. So windows have halves, used in
 * turns from call to call, and what is published does, too.
 */
#ifndef FSDP_COMM_SHARED_H
#define FSDP_COMM_SHARED_H

#include "runtime/comm/comm_backend.h"
#include "runtime/comm_shared/shared_transports.h"

enum { FSDP_SHARED_LINE = 64 };
/* The address of a buffer that only its own rank can read. */
#define FSDP_SHARED_PRIVATE UINT64_MAX

/* The first failure in a group. */
typedef struct shared_failure {
    _Atomic uint32_t state;    /* 0: none; 2 x (position + 1): it is here, written by; one more: it comes */
    int32_t status, rank, errnum;
    int32_t is_local;            /* what happened to the writer; else the text says whom it is about */
    char text[FSDP_ERROR_TEXT];
} shared_failure;

/* What a member calls, and where its buffers are, as addresses of shared_transport.bases. */
typedef struct shared_published {
    _Alignas(FSDP_SHARED_LINE) fsdp_comm_header header;
    uint64_t in, out;
} shared_published;

typedef struct shared_slot {
    _Alignas(FSDP_SHARED_LINE) _Atomic uint64_t phase; /* meetings this member has come to */
    _Atomic uint64_t heartbeats; /* heartbeats of life between them */
    _Atomic uint32_t is_reading; /* it may be reading buffers of others */
    _Atomic uint32_t has_left;  /* 1 + its exit code */
    /* In the block of the world (wait_graph.c). */
    _Atomic uint32_t waits_for; /* in a meeting of any group: 1 + the rank; 0: in none */
    _Atomic uint32_t asks, ctl_call; /* in a call of the control plane: the same, and the call_kind */
    _Atomic int64_t looked_ms; /* in a spec, the last time */
    _Atomic uint32_t waits_in; /* the kind of that collective */
    /* Written before it comes to a meeting. */
    shared_published published[2];     /* of a call and the next one */
    uint64_t block, window;    /* while a group is made */
} shared_slot;

typedef struct shared_block {
    _Alignas(FSDP_SHARED_LINE) _Atomic uint32_t event; /* a futex: all have come, or something is wrong */
    _Atomic uint32_t sleepers;
    shared_failure failure;
    shared_slot slots[];       /* then, per member: counts[size], out_counts[size] of all_to_all */
} shared_block;

typedef struct shared_transport shared_transport;

/* One member's end of a group. */
typedef struct shared_group {
    shared_transport *transport;
    shared_block *block;
    int rank, size;            /* in the group */
    const int *ranks;          /* world ranks; borrowed */
    uint64_t phase;            /* meetings so far */
    uint64_t call_phase;       /* those before the call that is under way */
    uint64_t calls;            /* so far; tells which of what is published is meant */
    unsigned half;             /* of windows: the one that is filled next; counts up */
    unsigned vain;             /* waits in a row for which looking was not enough */
    fsdp_comm_header header;   /* of that call, for messages */
    unsigned char **windows;   /* of all members: four times window_half bytes */
    fsdp_comm_header *headers; /* room to compare, and to fold */
    const void **sources;
} shared_group;

/* The head of both transports. */
struct shared_transport {
    fsdp_transport base;
    shared_group world;        /* all ranks: to make groups */
    int *world_ranks;          /* 0, 1, ... */
    uintptr_t *bases;          /* per world rank: what its published addresses count from */
    size_t segment_size;       /* only buffers in this rank's segment can be read by others; 0: all can */
    int spins;                 /* how often a wait looks before it sleeps */
    size_t window_half;        /* bytes */
    fsdp_ctl *observed;        /* tells this transport of its calls; NULL: none */
    /* Memory of a group, which all can read and which lives as long as the transport. NULL: none left. */
    void *(*alloc_shared)(fsdp_transport *transport, size_t size);
    /* NULL: ranks cannot die alone. Also says how to name it: "process 4711". */
    bool (*is_dead)(shared_transport *transport, int rank, char *name, size_t name_size);
};

/* --- shared_barrier.c ---------------------------------------------------------------------------- */

size_t fsdp_shared_block_size(int members);
int64_t *fsdp_shared_counts(shared_group *group, int member); /* counts; out_counts follow */

void fsdp_shared_arrive(shared_group *group);
/* Until all members have arrived as often as this one. Fails when one cannot come, or does not in time. */
fsdp_status fsdp_shared_await(shared_group *group, fsdp_error *err);

/* Between enter and leave buffers of other members may be read. Enter fails after a failure. */
fsdp_status fsdp_shared_begin_read(shared_group *group, fsdp_error *err);
void fsdp_shared_end_read(shared_group *group);
/* In long work: a sign of life. False when there is no point in going on. */
bool fsdp_shared_heartbeat(shared_group *group);

/* The first failure counts. is_local: it happened to this rank, and is not about another one. */
void fsdp_shared_fail(shared_group *group, const fsdp_error *why, bool is_local);
bool fsdp_shared_has_failed(shared_group *group, fsdp_error *err_out);
/* After a failure: until nobody reads buffers of this rank any more. */
void fsdp_shared_wait_for_readers(shared_group *group);
/* This member comes to no more meetings. */
void fsdp_shared_leave(shared_group *group);

/* --- wait_graph.c --------------------------------------------------------------------------- */

/* In a wait, again and again: who is missing. */
void fsdp_shared_note_wait(shared_group *group, int member, int64_t now_ms);
void fsdp_shared_end_wait(shared_group *group);
/* Says why a member is missing: "is stuck, or stopped: it did not come". Returns the world rank of which that
 * is said: of the one for whom the member waits itself. */
enum { FSDP_WAIT_TEXT = 192 };
int fsdp_shared_find_missing(const shared_group *group, int member, bool was_in, char out[FSDP_WAIT_TEXT]);
void fsdp_shared_unobserve(shared_transport *transport);

/* --- shared_group.c --------------------------------------------------------------------------- */

/* Makes room for what the group holds but ranks and block. On failure nothing is left. */
fsdp_status fsdp_shared_group_init(shared_group *group, shared_transport *transport, int rank, int size,
                                   fsdp_error *err);
void fsdp_shared_group_release(shared_group *group);
/* Entries of fsdp_transport_ops. */
fsdp_status fsdp_shared_comm_create(fsdp_transport *transport, const int *ranks, int size, fsdp_comm **comm_out,
                                    fsdp_error *err);
void fsdp_shared_comm_close(fsdp_comm *comm);

/* The parts of the transport that all transports have; rank and size in transport.transport are set. */
fsdp_status fsdp_shared_transport_init(shared_transport *transport, fsdp_error *err);
void fsdp_shared_transport_release(shared_transport *transport);

/* --- comm_shared.c ---------------------------------------------------------------------------- */

fsdp_status fsdp_shared_run(fsdp_comm *comm, const fsdp_collective *call, const fsdp_comm_header *header,
                            fsdp_error *err);
void fsdp_shared_abort(fsdp_comm *comm, const fsdp_error *why);
bool fsdp_shared_comm_has_failed(fsdp_comm *comm, fsdp_error *err_out);
bool fsdp_shared_sees(const fsdp_comm *comm, int member, const void *data, size_t size);

/* --- shared_steps.c --------------------------------------------------------------------------- */

/*
 * One call under way. A member reads *ranges* of others' buffers; a step moves one piece of each range. Where
 * all buffers can be read by others, that is the whole range; else each private one goes through its owner's
 * window, one half of it after the other.
 */
typedef struct shared_move {
    shared_group *group;
    const fsdp_collective *call;
    const struct shared_steps *steps;
    size_t element;
    const unsigned char *in;
    unsigned char *out;
    bool is_in_private, is_out_private;
    bool is_little;            /* everything goes through windows, which saves a meeting */
    unsigned half;             /* of windows, for the first step */
    uint64_t piece;            /* bytes */
} shared_move;

typedef struct shared_steps {
    uint64_t (*longest)(const shared_move *move);      /* range, in bytes */
    uint64_t (*window_piece)(const shared_move *move); /* what fits into half a window */
    void (*fill)(const shared_move *move, uint64_t step); /* this member's window for that step */
    void (*work)(const shared_move *move, uint64_t step);
    unsigned extra;            /* steps after the last piece */
} shared_steps;

/* Chooses the steps, by what is equal on all members. move has its group, call and element. */
void fsdp_shared_steps_choose(shared_move *move);
/* Instead of these, for a call with a view whose inputs all lie where everybody can read them: one step. */
extern const shared_steps fsdp_shared_steps_view;
/* What a member has published for the call under way. */
static inline shared_published *fsdp_shared_published(const shared_group *group, int member)
{
    return &group->block->slots[member].published[group->calls % 2];
}

#endif

/*
 * Collectives over point-to-point messages (p2p.h), for ranks that share no memory.
 *
 *   message_transport.c  creates the transport, creates and closes its groups; runs a call: compares its
 *                        header with the other members' (a small value of every member is combined in
 *                        log2(members) rounds), then runs its exchanges: bytes between all pairs of members,
 *                        in pieces through bounded staging; received pieces are copied, or reduced in rank
 *                        order
 *   message_status.c     peer status: failures, leave messages, probes, and what ends a wait
 *   p2p_tcp.c, p2p_mpi.c implement p2p.h
 *
 * In: a call (fsdp_collective) that comm.c has checked, and its header. Out: the reduced or moved data, or
 * the same error on all members. The launcher creates the transport (message_transport.h); comm.c calls its
 * operations; no other room includes this header.
 *
 * A member sends as many bytes as the result has, whatever the number of members. No member owns shared
 * state: the first failure is sent to all members, and all of them report it.
 */
#ifndef FSDP_COMM_MESSAGE_H
#define FSDP_COMM_MESSAGE_H

#include "runtime/bootstrap/process_watch.h"
#include "runtime/comm_message/message_transport.h"
#include <pthread.h>

typedef struct message_transport message_transport;

/* This member's knowledge of another one; written under the transport's lock. */
typedef struct message_member {
    _Atomic bool has_left, has_answered;
    _Atomic uint64_t calls;    /* begun before it left or answered a probe */
    _Atomic int exit_code;     /* with which it left */
    char *reason;              /* goes with it; NULL: none was sent. Written before has_left */
} message_member;

/* Bytes between this member and another one in an exchange. */
typedef struct message_route {
    const unsigned char *out;  /* is sent */
    unsigned char *in;         /* receives; unused in a reduction */
    uint64_t out_size, in_size;
} message_route;

/* One member's end of a group. */
typedef struct message_group {
    message_transport *transport;
    const fsdp_comm *comm;     /* NULL: `world` has none */
    struct message_group *next;        /* of this rank's groups */
    int rank, size;            /* in the group */
    const int *ranks;          /* world ranks; borrowed */
    int channel;
    _Atomic uint64_t calls;    /* begun */
    fsdp_comm_header header;   /* of the current call */
    bool are_all_here;         /* every member has begun the current call */
    message_member *members;
    message_route *routes;
    const void **sources;      /* operands of a reduction */
    int *finished;             /* capacity for all places of the batch */
    bool *is_arriving;         /* per half and member: a receive is in flight */
    int64_t *counts;           /* all_to_all: elements that each member sends here */
    fsdp_p2p_batch *batch;     /* four rows of places with one place per member: two outgoing, two incoming */
    unsigned char *pieces;     /* staging memory, in the order of the places */
    size_t piece;              /* bytes of staging per place */
    /* Under the transport's lock. */
    _Atomic bool has_failed;
    bool is_unreported;        /* the other members have not been sent the failure yet */
    bool is_local;             /* the failure happened on this rank, and its text names no other rank */
    fsdp_error failure;
} message_group;

struct message_transport {
    fsdp_transport base;
    fsdp_transport_ops ops;    /* named after p2p */
    fsdp_p2p *p2p;
    pthread_mutex_t lock;      /* several threads of this rank may use the transport */
    message_group *groups;     /* all but `world` */
    message_group world;       /* all ranks: creates the other groups */
    int *world_ranks;          /* 0, 1, ... */
    fsdp_process_watch *watches;       /* per world rank */
    _Atomic int64_t *busy_until_ms;    /* per world rank; 0: it never was */
    fsdp_ctl *observed;        /* asks this transport which ranks are busy; NULL: none */
    int channels;              /* assigned to groups so far */
};

/* --- message_status.c ------------------------------------------------------------------------- */

/* The state of a wait. Zero-initialise. */
typedef struct message_watch {
    int idle;                  /* polls in a row that found nothing */
    int64_t until_ms, look_ms; /* the deadline; time of the next check of the watched processes */
    int64_t probe_ms;          /* members may answer the probe until then; 0: none was sent */
} message_watch;

/*
 * Called between two polls of the p2p: reads status messages and, when the last poll moved nothing, backs
 * off. Fails when a member failed, left or died, or when nothing arrived within the deadline. waits_for: the
 * member whose message is missing.
 */
fsdp_status fsdp_message_pause(message_group *group, message_watch *watch, bool has_moved, int waits_for,
                               fsdp_error *err);
/* Records the first failure of the group, and later ones not. is_local: it happened on this rank and its text
 * names no other rank. is_common: every member detects it by itself. */
void fsdp_message_fail(message_group *group, const fsdp_error *why, bool is_local, bool is_common);
bool fsdp_message_has_failed(message_group *group, fsdp_error *err_out);
/* An entry of fsdp_transport_ops. */
void fsdp_message_set_busy(fsdp_transport *transport, int64_t until_ms);
/* For the control plane, which cannot see whom a rank waits for: the latest time of all other ranks. */
int64_t fsdp_message_busy_until(void *context, int rank);
/* Sends a leave message: this member begins no further calls. */
void fsdp_message_leave(message_group *group);

/* --- message_transport.c ----------------------------------------------------------------------- */

/* Moves bytes along the routes of the group. With `fold`, received bytes are operands: the sum of those of
 * all members, `local` among them, goes to `to`. */
typedef struct message_exchange {
    message_group *group;
    const fsdp_collective *fold;       /* the call that reduces; NULL: bytes go to the routes' `in` */
    const unsigned char *local;
    unsigned char *to;
    uint64_t to_size;
} message_exchange;

fsdp_status fsdp_message_run_exchange(const message_exchange *exchange, fsdp_error *err);

#endif

/*
 * Collectives over messages between two ranks (p2p.h): over networks, where ranks share no memory.
 *
 *   message_steps.c    a call: headers are compared, then its exchanges run: who sends whom what
 *   dissemination.c   what all members know after log2(members) rounds
 *   message_exchange.c     a exchange: ranges in pieces, through bounded staging; copied, or added up in rank order
 *   message_status.c     failures, farewells, roll calls: what ends a wait
 *   transport_message.c   the transport, its groups
 *
 * A member sends as many bytes as the whole result has, whatever the number of members. Nobody owns anything
 * common: a failure is told to all members, who tell the same then.
 */
#ifndef FSDP_COMM_MESSAGE_H
#define FSDP_COMM_MESSAGE_H

#include "runtime/comm/comm_backend.h"
#include "runtime/bootstrap/process_watch.h"
#include "runtime/comm_message/message_transport.h"
#include <pthread.h>

typedef struct message_transport message_transport;

/* What this member knows of another one; written under the transport's lock. */
typedef struct message_member {
    _Atomic bool has_left, has_answered;
    _Atomic uint64_t calls;    /* that it had begun when it left, or answered */
    _Atomic int exit_code;     /* with which it left */
} message_member;

/* Bytes between this member and another one in a exchange. */
typedef struct message_route {
    const unsigned char *out;  /* sent from here */
    unsigned char *in;         /* to be put here; not used where sums are made */
    uint64_t out_size, in_size;
} message_route;

/* One member's end of a group. */
typedef struct message_group {
    message_transport *transport;
    struct message_group *next;        /* of this rank's groups */
    int rank, size;            /* in the group */
    const int *ranks;          /* world ranks; borrowed */
    int channel;
    _Atomic uint64_t calls;    /* begun */
    fsdp_comm_header header;   /* of the call that is under way */
    bool are_all_here;         /* in that call */
    message_member *members;
    message_route *routes;
    const void **sources;      /* to add up */
    int *finished;             /* room for the places of the batch */
    bool *is_arriving;         /* per half and member: a piece comes from there */
    int64_t *counts;           /* all_to_all: what the others send here */
    fsdp_p2p_batch *batch;    /* two halves of places: outgoing, then incoming; one per member in each */
    unsigned char *pieces;     /* of the same order */
    size_t piece;
    /* Under the transport's lock. */
    _Atomic bool has_failed;
    bool is_unreported;            /* the failure */
    bool is_local;               /* it happened to this rank, and is not about another one */
    fsdp_error failure;
} message_group;

struct message_transport {
    fsdp_transport base;
    fsdp_transport_ops ops;       /* of the wire's name */
    fsdp_p2p *p2p;
    pthread_mutex_t lock;      /* of what several threads of this rank may touch */
    message_group *groups;     /* all but `world` */
    message_group world;       /* all ranks: to make groups */
    int *world_ranks;          /* 0, 1, ... */
    fsdp_process_watch *watches;  /* per world rank */
    int channels;              /* given to groups so far */
};

/* --- message_status.c --------------------------------------------------------------------------- */

/* What a wait knows. Zero-initialise. */
typedef struct message_watch {
    int idle;                  /* looks in vain */
    int64_t until_ms, look_ms; /* the deadline; when to look at processes again */
    int64_t probe_ms;           /* a roll call goes on until then; 0: none */
} message_watch;

/*
 * Between two looks at the wire: hears status, and after a look in vain (has_moved: it was not) rests a little.
 * Fails when a member failed, left, died, or nothing came for the deadline. waits_for: the member whose
 * message is missing.
 */
fsdp_status fsdp_message_pause(message_group *group, message_watch *watch, bool has_moved, int waits_for,
                               fsdp_error *err);
/* The first failure counts. is_local: it happened to this rank, and is not about another one. is_common: all
 * members find it by themselves. */
void fsdp_message_fail(message_group *group, const fsdp_error *why, bool is_local, bool is_common);
bool fsdp_message_has_failed(message_group *group, fsdp_error *err_out);
/* This member comes to no more calls. */
void fsdp_message_leave(message_group *group);

/* --- dissemination.c ------------------------------------------------------------------------- */

enum { FSDP_DISSEMINATION_SIZE = 512 };    /* bytes, at most */

/* Collective in the group. Until `mine` is what all members together know: `merge` adds what another one
 * knew. In any order, and more than once. */
fsdp_status fsdp_message_disseminate(message_group *group, void *mine, size_t size,
                                void (*merge)(void *mine, const void *theirs), fsdp_error *err);

/* Collective in the group: is everybody in the same call? Otherwise the same failure everywhere. */
fsdp_status fsdp_message_begin(message_group *group, const fsdp_comm_header *header, fsdp_error *err);

/* --- message_exchange.c --------------------------------------------------------------------------- */

typedef struct message_exchange {
    message_group *group;      /* its routes are what moves */
    /* Sums: of what comes in and `own`, to `to`; NULL: what comes in goes to its routes. */
    const fsdp_collective *fold;
    const unsigned char *own;
    unsigned char *to;
    uint64_t to_size;
} message_exchange;

fsdp_status fsdp_message_run_exchange(const message_exchange *exchange, fsdp_error *err);
/* How large pieces are in a group. */
size_t fsdp_message_piece(int members);

/* --- message_steps.c -------------------------------------------------------------------------- */

/* An entry of fsdp_transport_ops. */
fsdp_status fsdp_message_run(fsdp_comm *comm, const fsdp_collective *call, const fsdp_comm_header *header,
                             fsdp_error *err);

#endif

/*
 * The interface of control-plane back ends: messages between two ranks with a deadline. All
 * collectives are written once on top of it (ctl.c); back ends are ctl_self.c, ctl_threads.c, and
 * rendezvous.c (TCP) and ctl_mpi.c of runtime/bootstrap.
 */
#ifndef FSDP_CTL_BACKEND_H
#define FSDP_CTL_BACKEND_H

#include "base/core/clock.h"
#include <fsdp/ctl.h>
#include <stdatomic.h>
#include <stdint.h>

enum {
    FSDP_CTL_PIECE = 1 << 20,  /* longer data is cut (ctl.c) */
    FSDP_CTL_FRAME = 96,       /* what goes in front of it (ctl_frame.h) */
    FSDP_CTL_CALL = 40         /* the longest name of a public call */
};

/* Ends the text of an error that a deadline caused, here and in collectives. */
#define FSDP_DEADLINE_HINT "a rank that is busy calls fsdp_world_begin_busy, or set a longer deadline"

typedef struct fsdp_ctl_ops {
    const char *name;
    bool shares_memory;
    /*
     * One message of 1..FSDP_CTL_PIECE bytes to or from another rank; messages between two ranks
     * keep their order and their bounds. data is the caller's again when the call returns, also
     * after a failure. until_ms is on CLOCK_MONOTONIC; past it the call still does what needs no
     * waiting, else it fails with FSDP_ERR_PEER and an empty text (ctl.c names the rank and the
     * operation). send first asks fsdp_ctl_keep_sending; recv passes the received message to
     * fsdp_ctl_hand_over, which checks its size.
     */
    fsdp_status (*send)(fsdp_ctl *ctl, int to, const void *data, size_t size, int64_t until_ms,
                        fsdp_error *err);
    fsdp_status (*recv)(fsdp_ctl *ctl, int from, void *data, size_t size, int64_t until_ms,
                        fsdp_error *err);
    void (*close)(fsdp_ctl *ctl);    /* frees the back end's own part, not ctl */
    /* Address of the other end of the connection with a rank, "127.0.0.1:4711"; "": none. NULL: no back end
     * with addresses. */
    void (*locate)(const fsdp_ctl *ctl, int rank, char *out, size_t out_size);
} fsdp_ctl_ops;

/* Rank 0's knowledge of another rank while it waits for its call. */
typedef struct fsdp_ctl_peer {
    bool here;
    int64_t until_ms;    /* it is missing from then on, unless it reports work */
} fsdp_ctl_peer;

/* An observer, the transport of collectives, knows what ranks do outside of the control plane. Called
 * on this rank's thread; each may be NULL. */
typedef struct fsdp_ctl_observer {
    /* This rank is in a public call, "fsdp_root_save" (NULL: in none), in which it waits for another rank
     * (-1: not yet). */
    void (*note)(void *context, const char *call, int waits_for);
    /* Describes a rank: "it is in all_gather, where it waits for rank 0". Unknown: leaves `out` unchanged. */
    void (*find)(void *context, int rank, char *out, size_t out_size);
    /* Until when a rank, or one that it may wait for, is busy (fsdp_world_begin_busy), on CLOCK_MONOTONIC;
     * 0: not. */
    int64_t (*busy_until)(void *context, int rank);
    void *context;
} fsdp_ctl_observer;

/* Shared by ranks with one address space; it lives until the last of them has freed its fsdp_ctl. */
typedef struct fsdp_ctl_access {
    atomic_int users;          /* ranks that use memory of other ranks now */
    atomic_bool closed;        /* a rank has withdrawn its memory: no rank may begin */
} fsdp_ctl_access;

struct fsdp_ctl {
    const fsdp_ctl_ops *ops;
    int rank, size;
    int deadline_ms;
    uint64_t calls;            /* collectives so far; sent with every message, to detect mixed-up calls */
    const char *public_call;   /* which makes them: "fsdp_root_save"; NULL: the caller itself */
    fsdp_error poison;         /* the first failure of the control plane */
    void *backend;
    fsdp_ctl_access *access;   /* NULL: no rank has the memory of another */
    int64_t announced_until_ms;     /* until when the others wait for this rank */
    fsdp_ctl_peer *peers;      /* rank 0: one per rank */
    void (*waiting)(void *context);
    void *waiting_user;
    fsdp_ctl_observer observer;
    size_t unexpected_size;         /* of the last message, when recv waited for another size; 0: none */
    unsigned char unexpected[FSDP_CTL_FRAME];       /* the first of its bytes */
};

/* n connected ranks for n threads of this process; each is freed by fsdp_ctl_free. */
FSDP_CHECKED fsdp_status fsdp_ctl_threads(int n, fsdp_ctl **ctls_out, fsdp_error *err);
/* Local, as often as on the other ranks: this rank's end of a further group of the same threads. */
FSDP_CHECKED fsdp_status fsdp_ctl_threads_again(fsdp_ctl *ctl, fsdp_ctl **ctl_out, fsdp_error *err);

/* True when all ranks share one address space: a pointer sent to another rank may be used there. */
bool fsdp_ctl_shares_memory(const fsdp_ctl *ctl);

/*
 * Local. Between begin and end a rank may use memory whose address another rank sent it, and waits for no
 * rank. begin and check are FSDP_ERR_PEER once a rank has withdrawn its memory; long work checks repeatedly.
 */
FSDP_CHECKED fsdp_status fsdp_ctl_begin_access(fsdp_ctl *ctl, fsdp_error *err);
FSDP_CHECKED fsdp_status fsdp_ctl_check_access(const fsdp_ctl *ctl, fsdp_error *err);
void fsdp_ctl_end_access(fsdp_ctl *ctl);
/* Local, before a rank frees memory whose address it sent. After an agreement no rank uses it, and this does
 * nothing. When the control plane broke, by whatever failure, no rank begins any more, and this waits for
 * those that have begun: without a deadline, because the memory must stay as long as they use it. */
void fsdp_ctl_withdraw_memory(fsdp_ctl *ctl);

/*
 * Local. The messages of this control plane name `call`, a public function, until the end. The outermost one
 * counts. Returns what the end needs.
 */
static inline const char *fsdp_ctl_begin_public(fsdp_ctl *ctl, const char *call)
{
    const char *outer = ctl->public_call;
    ctl->public_call = outer ? outer : call;
    return outer;
}
static inline void fsdp_ctl_end_public(fsdp_ctl *ctl, const char *outer)
{
    ctl->public_call = outer;
}

/* Point to point; the sizes of both sides must be equal. A send may wait until the receiver has
 * room: at most FSDP_CTL_WINDOW bytes or one message are under way between two ranks. Exported for the
 * test of the MPI back end. */
enum { FSDP_CTL_WINDOW = 8 << 20 };
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_send(fsdp_ctl *ctl, int to, const void *data, size_t size,
                                                fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_ctl_recv(fsdp_ctl *ctl, int from, void *data, size_t size,
                                                fsdp_error *err);

/*
 * Collective, in one round: fsdp_ctl_agree on `mine`, and when every rank brings FSDP_OK the allgather or the
 * broadcast. A rank that fails takes part with any pointers; nothing is written to them then.
 */
fsdp_status fsdp_ctl_agree_allgather(fsdp_ctl *ctl, fsdp_status mine, const void *part, size_t size,
                                     void *all_out, fsdp_error *err);
fsdp_status fsdp_ctl_agree_broadcast(fsdp_ctl *ctl, fsdp_status mine, int root, void *data, size_t size,
                                     fsdp_error *err);

/*
 * Local. Reports that this rank is working before its next call: the others wait for it at least `left_ms`
 * from now on. Called repeatedly while the work continues, with a short time each, so that the others soon
 * miss a rank that was killed. Sends a message only when it changes their deadline, and never waits. A
 * collective must follow.
 */
void fsdp_ctl_report_working(fsdp_ctl *ctl, int64_t left_ms);

/* Rank 0 calls this every few seconds while it waits for others; NULL: nothing. */
void fsdp_ctl_set_waiting(fsdp_ctl *ctl, void (*waiting)(void *context), void *context);

/*
 * Local. Leaves the control plane with a reason, which ranks in a call get at once. Waits at most a second
 * for ranks that do not read it. fsdp_ctl_free must follow. Does nothing after a failure of the control
 * plane.
 */
void fsdp_ctl_leave(fsdp_ctl *ctl, const fsdp_error *why);

/* For back ends, when the time of a send is over: true when it continues until the new *until_ms, because the
 * receiver is busy (fsdp_world_begin_busy). ctl may be NULL when *until_ms is 0. */
FSDP_API bool fsdp_ctl_keep_sending(const fsdp_ctl *ctl, int to, int64_t *until_ms);

/* For back ends: the result of send and recv when their time is over. */
static inline fsdp_status fsdp_ctl_fail_late(fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_PEER, "%s", "");
}

/* For back ends, at the end of recv. A message of an unexpected size is an error, and kept in ctl: it may be
 * the leave message of a rank that failed. */
typedef struct fsdp_ctl_bytes {
    const void *data;
    size_t size;
} fsdp_ctl_bytes;
FSDP_API fsdp_status fsdp_ctl_hand_over(fsdp_ctl *ctl, int from, fsdp_ctl_bytes received, void *data,
                                        size_t size, fsdp_error *err);

/* Takes ownership of backend; on failure closes it. Exported for the back ends outside libfsdp. */
FSDP_API fsdp_status fsdp_ctl_create(const fsdp_ctl_ops *ops, int rank, int size, void *backend,
                                     fsdp_ctl **ctl_out, fsdp_error *err);

#endif

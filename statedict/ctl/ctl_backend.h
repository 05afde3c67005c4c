/*
 * What a control-plane back end provides: messages between two ranks with a deadline. All
 * collectives are written once on top of it (ctl.c); back ends are ctl_self.c, ctl_threads.c, and
 * runtime/bootstrap/ctl_mpi.c and ctl_tcp.c.
 */
#ifndef FSDP_CTL_BACKEND_H
#define FSDP_CTL_BACKEND_H

#include "base/core/clock.h"
#include <fsdp/ctl.h>
#include <stdint.h>

enum {
    FSDP_CTL_PIECE = 1 << 20,  /* longer data is cut (ctl_message.c) */
    FSDP_CTL_FRAME = 56        /* what goes in front of it (ctl_frame.h) */
};

typedef struct fsdp_ctl_ops {
    const char *name;
    bool shares_memory;
    /*
     * One message of 1..FSDP_CTL_PIECE bytes to or from another rank; messages between two ranks
     * keep their order and their bounds. data is the caller's again when the call returns, also
     * after a failure. until_ms is on CLOCK_MONOTONIC; past it the call still does what needs no
     * waiting, else it fails with FSDP_ERR_PEER and an empty text (ctl.c names the rank and the
     * operation). recv gives what came to fsdp_ctl_hand_over, which checks that it is of that size.
     */
    fsdp_status (*send)(fsdp_ctl *ctl, int to, const void *data, size_t size, int64_t until_ms,
                        fsdp_error *err);
    fsdp_status (*recv)(fsdp_ctl *ctl, int from, void *data, size_t size, int64_t until_ms,
                        fsdp_error *err);
    void (*close)(fsdp_ctl *ctl);    /* frees the back end's own part, not ctl */
} fsdp_ctl_ops;

/* What rank 0 knows of another rank while it waits for its call. */
typedef struct fsdp_ctl_peer {
    bool here;
    int64_t until_ms;    /* without another sign of life it is missing from then on */
} fsdp_ctl_peer;

/* What others know of ranks that do not come: set by those who also see what ranks do outside these calls.
 * Used on this rank's thread; either may be NULL. */
typedef struct fsdp_ctl_observer {
    /* This rank is in a call of the control plane (a call_kind of ctl_frame.h; 0: in none), where it
     * waits for another one (-1: not yet). */
    void (*note)(void *user, uint32_t call, int waits_for);
    /* Says where a rank is: "it is in all_gather, where it waits for rank 0". Not known: leaves out
     * as it is. */
    void (*find)(void *user, int rank, char *out, size_t out_size);
    void *user;
} fsdp_ctl_observer;

struct fsdp_ctl {
    const fsdp_ctl_ops *ops;
    int rank, size;
    int deadline_ms;
    uint64_t calls;            /* collectives so far: goes with every message, so mixing is seen */
    fsdp_error poison;         /* the first failure of the control plane */
    void *backend;
    int64_t announced_until_ms;     /* how long the others wait for this rank without a sign of it */
    fsdp_ctl_peer *peers;      /* rank 0: one per rank */
    void (*waiting)(void *user);
    void *waiting_user;
    fsdp_ctl_observer observer;
    size_t unexpected_size;         /* of the last message, when recv waited for another size; 0: none */
    unsigned char unexpected[FSDP_CTL_FRAME];       /* its bytes, when they are as many as those of a frame */
};

/*
 * Collective, in one round: fsdp_ctl_agree on `mine`, and when every rank brings FSDP_OK the allgather or the
 * broadcast. A rank that fails takes part with any pointers; nothing is written to them then.
 */
fsdp_status fsdp_ctl_agree_allgather(fsdp_ctl *ctl, fsdp_status mine, const void *part, size_t size,
                                     void *all_out, fsdp_error *err);
fsdp_status fsdp_ctl_agree_broadcast(fsdp_ctl *ctl, fsdp_status mine, int root, void *data, size_t size,
                                     fsdp_error *err);

/*
 * Local. This rank is at work and comes to the next call later: the others wait for it `left_ms` from
 * now on at least. To be said again and again while work goes on, with a short time each, so that a
 * rank that is killed meanwhile is soon missed. Sends something only when that is news to them, and
 * never waits. To be followed by a collective.
 */
void fsdp_ctl_report_working(fsdp_ctl *ctl, int64_t left_ms);

/* Rank 0 calls this every few seconds while it waits for others; NULL: nothing. */
void fsdp_ctl_set_waiting(fsdp_ctl *ctl, void (*waiting)(void *user), void *user);

/*
 * Local. This rank comes to no more calls, and says why: others in a call learn that at once. Waits at most
 * a second for those who do not take it. To be followed by fsdp_ctl_free. Does nothing after a failure of the
 * control plane.
 */
void fsdp_ctl_leave(fsdp_ctl *ctl, const fsdp_error *why);

/* For back ends: what send and recv return when their time is over. */
static inline fsdp_status fsdp_ctl_fail_late(fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_PEER, "%s", "");
}

/* For back ends, at the end of recv. A message of another size than was waited for is an error, and noted in
 * ctl: it may be the farewell of a rank that gave up. */
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

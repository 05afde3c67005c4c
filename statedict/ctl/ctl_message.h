/*
 * A call of the control plane and its messages from one rank to another; ctl.c builds collectives of them. A
 * rank that fails sends a leave message at any point: a receiver that waits for anything else takes its
 * reason as the error.
 */
#ifndef FSDP_CTL_MESSAGE_H
#define FSDP_CTL_MESSAGE_H

#include "statedict/ctl/ctl_frame.h"

enum { FSDP_CTL_LEAVE_MS = 1000 };

/* One call in progress on this rank. */
typedef struct ctl_call {
    frame head;
    const void *mine;          /* allgather: this rank's part; send: what is sent */
    void *data;                /* where data lies or goes */
    int64_t until_ms;
    bool timed_out;            /* the last wait failed at its deadline */
    bool peer_left;             /* it failed because of a leave message */
    fsdp_error outcome;        /* in: this rank's own; after the verdict: the common one */
    fsdp_status (*transfer)(fsdp_ctl *ctl, struct ctl_call *call, fsdp_error *err);
} ctl_call;

fsdp_status fsdp_ctl_fail_mismatch(const fsdp_ctl *ctl, const frame *mine, int peer, const frame *theirs,
                                   fsdp_error *err);
/* Completes a back end's error; FSDP_ERR_PEER without a text means that the time is over. ctl.c appends the
 * hint. */
fsdp_status fsdp_ctl_fail_wait(const fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err);

/* The other ranks wait that much longer than rank 0, so that its report of missing ranks arrives. */
int64_t fsdp_ctl_grace_ms(const fsdp_ctl *ctl);
/* At the end of a wait for a rank: its new end, later than until_ms while that rank is busy. */
int64_t fsdp_ctl_busy_until(const fsdp_ctl *ctl, int peer, int64_t until_ms);
bool fsdp_ctl_is_work(const frame *head);
bool fsdp_ctl_is_same_call(const frame *a, const frame *b);
bool fsdp_ctl_is_same_public(const frame *a, const frame *b);

/* A frame that carries an outcome: CALL, VERDICT, LEAVE, and WAITING (where it is FSDP_OK). */
frame fsdp_ctl_report_head(const ctl_call *call, frame_kind kind, const fsdp_error *report);
fsdp_status fsdp_ctl_put_report(fsdp_ctl *ctl, ctl_call *call, int to, frame_kind kind,
                                const fsdp_error *report, fsdp_error *err);
fsdp_status fsdp_ctl_take_report(fsdp_ctl *ctl, ctl_call *call, int from, frame *head_out,
                                 fsdp_error *report_out, fsdp_error *err);
/* Receives what follows a head. */
fsdp_status fsdp_ctl_take_rest(fsdp_ctl *ctl, ctl_call *call, int from, const frame *head,
                               fsdp_error *report_out, fsdp_error *err);

/* The piece of the call's data that begins at `at`, and how long it is. */
size_t fsdp_ctl_piece_size(const ctl_call *call, uint64_t at);
fsdp_status fsdp_ctl_put_piece(fsdp_ctl *ctl, ctl_call *call, int to, uint64_t at, const void *data,
                               fsdp_error *err);
fsdp_status fsdp_ctl_take_piece(fsdp_ctl *ctl, ctl_call *call, int from, uint64_t at, void *data,
                                fsdp_error *err);
fsdp_status fsdp_ctl_put_data(fsdp_ctl *ctl, ctl_call *call, int to, const void *data, fsdp_error *err);
fsdp_status fsdp_ctl_take_data(fsdp_ctl *ctl, ctl_call *call, int from, void *data, fsdp_error *err);

#endif

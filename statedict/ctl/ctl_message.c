/*
 * One message of the control plane from one rank to another: frames, what follows them, and what
 * comes instead of them. See ctl_message.h.
 */
#include "statedict/ctl/ctl_message.h"

#include <stdio.h>
#include <string.h>

enum { LEAVE_DEPTH = 64 };

/* --- failures --------------------------------------------------------------------------------- */

fsdp_status fsdp_ctl_fail_mismatch(const fsdp_ctl *ctl, const frame *mine, int peer,
                                   const frame *theirs, fsdp_error *err)
{
    char my_call[160], their_call[160];
    fsdp_ctl_call_describe(mine, my_call, sizeof my_call);
    fsdp_ctl_call_describe(theirs, their_call, sizeof their_call);
    err->rank = peer;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "rank %d is in %s while rank %d is in %s: all ranks must make the same calls "
                     "in the same order",
                     peer, their_call, ctl->rank, my_call);
}

/* --- frames ----------------------------------------------------------------------------------- */

/* " (127.0.0.1:4711)", or nothing. */
static void locate(const fsdp_ctl *ctl, int peer, char *out, size_t out_size)
{
    char place[80] = "";
    if (ctl->ops->locate)
        ctl->ops->locate(ctl, peer, place, sizeof place);
    snprintf(out, out_size, place[0] ? " (%s)" : "%s", place);
}

static fsdp_status fail_version(const ctl_call *call, int peer, fsdp_error *err)
{
    char name[FSDP_CTL_CALL];
    fsdp_ctl_call_public(&call->head, name);
    err->rank = peer;
    return fsdp_fail(err, FSDP_ERR_PEER, "rank %d runs another version of fsdp (seen in %s)", peer,
                     name);
}

/* True when the last message was one of an unexpected size, and a frame of another version. */
static bool is_foreign_frame(const fsdp_ctl *ctl)
{
    uint32_t magic;
    memcpy(&magic, ctl->unexpected, sizeof magic);
    const uint32_t difference = magic ^ FRAME_MAGIC;
    return ctl->unexpected_size >= sizeof magic && difference != 0 && difference <= FRAME_VERSION;
}

fsdp_status fsdp_ctl_fail_wait(const fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err)
{
    char name[FSDP_CTL_CALL], place[96];
    if (is_foreign_frame(ctl))
        return fail_version(call, peer, err);
    fsdp_ctl_call_public(&call->head, name);
    locate(ctl, peer, place, sizeof place);
    err->rank = err->status == FSDP_ERR_PEER ? peer : ctl->rank;
    if (err->text[0] == '\0') {
        call->timed_out = true;
        char where[160] = "it is gone, stuck, or in another call";
        if (ctl->observer.find)
            ctl->observer.find(ctl->observer.context, peer, where, sizeof where);
        return fsdp_fail(err, FSDP_ERR_PEER, "rank %d%s did not answer within %g s in %s: %s", peer,
                         place, ctl->deadline_ms / 1000.0, name, where);
    }
    size_t used = strlen(err->text);
    snprintf(err->text + used, sizeof err->text - used, " during %s%s", name, place);
    return err->status;
}

/* --- leave messages --------------------------------------------------------------------------- */

static bool is_leave(const frame *head)
{
    return head->magic == FRAME_MAGIC && head->kind == FRAME_LEAVE;
}

/* True when the last message was a leave message of an unexpected size. */
static bool is_unexpected_leave(const fsdp_ctl *ctl, frame *head_out)
{
    if (ctl->unexpected_size != sizeof *head_out)
        return false;
    memcpy(head_out, ctl->unexpected, sizeof *head_out);
    return is_leave(head_out);
}

/* Different calls are the error of every rank; a rank that left for another reason is lost. */
static void note_leave(ctl_call *call, const frame *head, const char *text, fsdp_error *err)
{
    bool is_mismatch = head->call != 0 && head->status == FSDP_ERR_USAGE;
    call->timed_out = false;
    call->peer_left = true;
    *err = (fsdp_error){.status = is_mismatch ? FSDP_ERR_USAGE : FSDP_ERR_PEER,
                        .rank = head->rank,
                        .errnum = head->errnum};
    memcpy(err->text, text, sizeof err->text - 1);
}

static bool recv_message(fsdp_ctl *ctl, int from, void *data, size_t size, int64_t until_ms)
{
    fsdp_error ignored = {0};
    ctl->unexpected_size = 0;
    return ctl->ops->recv(ctl, from, data, size, until_ms, &ignored) == FSDP_OK;
}

/* A rank that receives nothing more may have sent a leave message after its earlier messages: its
 * reason is the error. */
static void find_leave(fsdp_ctl *ctl, ctl_call *call, int peer, int64_t until_ms, fsdp_error *err)
{
    frame head = {0};
    fsdp_error report = {0};
    for (int i = 0; i < LEAVE_DEPTH && !is_leave(&head); i++) {
        head = (frame){0};
        bool came = recv_message(ctl, peer, &head, sizeof head, until_ms);
        if (!came && ctl->unexpected_size == 0)
            return;
        if (came && head.magic == FRAME_MAGIC && head.status != FSDP_OK &&
            !recv_message(ctl, peer, report.text, sizeof report.text, until_ms))
            return;
    }
    if (is_leave(&head))
        note_leave(call, &head, report.text, err);
}

/* Receives the reason after the head of a leave message. */
static fsdp_status take_leave_reason(fsdp_ctl *ctl, ctl_call *call, int from, const frame *head,
                                     fsdp_error *err)
{
    char text[FSDP_ERROR_TEXT] = "";
    int64_t until_ms = fsdp_now_ms() + FSDP_CTL_LEAVE_MS;
    if (!recv_message(ctl, from, text, sizeof text, until_ms)) {
        err->rank = from;
        return fsdp_fail(err, FSDP_ERR_PEER, "rank %d gave up without a reason", from);
    }
    note_leave(call, head, text, err);
    return err->status;
}

/* --- frames ----------------------------------------------------------------------------------- */

static fsdp_status put(fsdp_ctl *ctl, ctl_call *call, int to, const void *data, size_t size,
                       fsdp_error *err)
{
    if (ctl->ops->send(ctl, to, data, size, call->until_ms, err) == FSDP_OK)
        return FSDP_OK;
    (void)fsdp_ctl_fail_wait(ctl, call, to, err);
    find_leave(ctl, call, to, 0, err);
    /* it sent its reason to rank 0, which relays it to all */
    if (!call->peer_left && to != 0 && ctl->rank != 0)
        find_leave(ctl, call, 0, fsdp_now_ms() + FSDP_CTL_LEAVE_MS, err);
    return err->status;
}

/* The other ranks wait that much longer than rank 0, so that its report of missing ranks
 * arrives. */
int64_t fsdp_ctl_grace_ms(const fsdp_ctl *ctl)
{
    int64_t fifth = ctl->deadline_ms / 5;
    return fifth > 2000 ? fifth : 2000;
}

int64_t fsdp_ctl_busy_until(const fsdp_ctl *ctl, int peer, int64_t until_ms)
{
    const fsdp_ctl_observer *observer = &ctl->observer;
    int64_t busy_ms = observer->busy_until ? observer->busy_until(observer->context, peer) : 0;
    int64_t later_ms = busy_ms + ctl->deadline_ms + (ctl->rank == 0 ? 0 : fsdp_ctl_grace_ms(ctl));
    int64_t soon_ms = fsdp_now_ms() + ctl->deadline_ms; /* it may end being busy earlier */
    if (busy_ms == 0 || later_ms <= until_ms)
        return until_ms;
    return later_ms < soon_ms ? later_ms : soon_ms;
}

bool fsdp_ctl_keep_sending(const fsdp_ctl *ctl, int to, int64_t *until_ms)
{
    if (*until_ms == 0 || ctl->poison.status != FSDP_OK)
        return false;
    *until_ms = fsdp_ctl_busy_until(ctl, to, *until_ms);
    return fsdp_now_ms() < *until_ms;
}

/* Receives; the deadline moves while the sender is busy. */
static fsdp_status receive(fsdp_ctl *ctl, ctl_call *call, int from, void *data, size_t size,
                           fsdp_error *err)
{
    for (;;) {
        int64_t until_ms = call->until_ms;
        fsdp_status status = ctl->ops->recv(ctl, from, data, size, until_ms, err);
        bool is_late = status == FSDP_ERR_PEER && err->text[0] == '\0';
        if (is_late)
            call->until_ms = fsdp_ctl_busy_until(ctl, from, until_ms);
        if (!is_late || call->until_ms == until_ms)
            return status;
    }
}

static fsdp_status take(fsdp_ctl *ctl, ctl_call *call, int from, void *data, size_t size,
                        fsdp_error *err)
{
    frame head;
    ctl->unexpected_size = 0;
    if (receive(ctl, call, from, data, size, err) == FSDP_OK)
        return FSDP_OK;
    if (is_unexpected_leave(ctl, &head))
        return take_leave_reason(ctl, call, from, &head, err);
    return fsdp_ctl_fail_wait(ctl, call, from, err);
}

/* Extends the deadline for a rank that reports work. */
static void note_work(const fsdp_ctl *ctl, ctl_call *call, const frame *head)
{
    int64_t until_ms =
        fsdp_now_ms() + head->left_ms + (ctl->rank == 0 ? 0 : fsdp_ctl_grace_ms(ctl));
    if (until_ms > call->until_ms)
        call->until_ms = until_ms;
}

bool fsdp_ctl_is_work(const frame *head)
{
    return head->magic == FRAME_MAGIC && head->kind == FRAME_WORKING;
}

/* A frame that carries an outcome: CALL, VERDICT, LEAVE, and WAITING (where it is FSDP_OK). */
frame fsdp_ctl_report_head(const ctl_call *call, frame_kind kind, const fsdp_error *report)
{
    frame head = call->head;
    int64_t left_ms = call->until_ms - fsdp_now_ms();
    head.kind = kind;
    head.status = (int32_t)report->status;
    head.rank = report->rank;
    head.errnum = report->errnum;
    head.left_ms = left_ms > 0 ? (int32_t)left_ms : 0;
    return head;
}

fsdp_status fsdp_ctl_put_report(fsdp_ctl *ctl, ctl_call *call, int to, frame_kind kind,
                                const fsdp_error *report, fsdp_error *err)
{
    frame head = fsdp_ctl_report_head(call, kind, report);
    FSDP_TRY(put(ctl, call, to, &head, sizeof head, err));
    if (report->status == FSDP_OK)
        return FSDP_OK;
    return put(ctl, call, to, report->text, sizeof report->text, err);
}

/* Receives what follows a head. */
fsdp_status fsdp_ctl_take_rest(fsdp_ctl *ctl, ctl_call *call, int from, const frame *head,
                               fsdp_error *report_out, fsdp_error *err)
{
    if (head->magic != FRAME_MAGIC)
        return fail_version(call, from, err);
    report_out->status = (fsdp_status)head->status;
    report_out->rank = head->rank;
    report_out->errnum = head->errnum;
    if (head->status != FSDP_OK)
        FSDP_TRY(take(ctl, call, from, report_out->text, sizeof report_out->text, err));
    report_out->text[sizeof report_out->text - 1] = '\0';
    if (head->kind != FRAME_LEAVE)
        return FSDP_OK;
    note_leave(call, head, report_out->text, err);
    return err->status;
}

fsdp_status fsdp_ctl_take_report(fsdp_ctl *ctl, ctl_call *call, int from, frame *head_out,
                                 fsdp_error *report_out, fsdp_error *err)
{
    FSDP_TRY(take(ctl, call, from, head_out, sizeof *head_out, err));
    while (fsdp_ctl_is_work(head_out)) {
        note_work(ctl, call, head_out);
        FSDP_TRY(take(ctl, call, from, head_out, sizeof *head_out, err));
    }
    return fsdp_ctl_take_rest(ctl, call, from, head_out, report_out, err);
}

bool fsdp_ctl_is_same_call(const frame *a, const frame *b)
{
    return a->call == b->call && a->root == b->root && a->size == b->size && a->calls == b->calls;
}

bool fsdp_ctl_is_same_public(const frame *a, const frame *b)
{
    return strncmp(a->public_call, b->public_call, sizeof a->public_call) == 0;
}

/* Never the size of a frame, so that a leave message is not taken for data. */
size_t fsdp_ctl_piece_size(const ctl_call *call, uint64_t at)
{
    uint64_t left = call->head.size - at;
    if (left == sizeof(frame))
        return sizeof(frame) - 1;
    return left < FSDP_CTL_PIECE ? (size_t)left : (size_t)FSDP_CTL_PIECE;
}

/* The piece of data that begins at `at`. No data at all is one empty piece, so that a receiver who
 * expects more sees it. */
fsdp_status fsdp_ctl_put_piece(fsdp_ctl *ctl, ctl_call *call, int to, uint64_t at, const void *data,
                               fsdp_error *err)
{
    frame head = call->head;
    head.kind = FRAME_DATA;
    head.at = at;
    FSDP_TRY(put(ctl, call, to, &head, sizeof head, err));
    size_t size = fsdp_ctl_piece_size(call, at);
    return size == 0 ? FSDP_OK : put(ctl, call, to, (const char *)data + at, size, err);
}

fsdp_status fsdp_ctl_take_piece(fsdp_ctl *ctl, ctl_call *call, int from, uint64_t at, void *data,
                                fsdp_error *err)
{
    frame head = {0}, expected = call->head;
    fsdp_error report = {0};
    if (expected.call == CALL_RECV)
        expected.call = CALL_SEND;
    FSDP_TRY(fsdp_ctl_take_report(ctl, call, from, &head, &report, err));
    if (head.kind != FRAME_DATA || head.at != at || !fsdp_ctl_is_same_call(&head, &expected) ||
        !fsdp_ctl_is_same_public(&head, &expected))
        return fsdp_ctl_fail_mismatch(ctl, &call->head, from, &head, err);
    size_t size = fsdp_ctl_piece_size(call, at);
    return size == 0 ? FSDP_OK : take(ctl, call, from, (char *)data + at, size, err);
}

fsdp_status fsdp_ctl_put_data(fsdp_ctl *ctl, ctl_call *call, int to, const void *data,
                              fsdp_error *err)
{
    uint64_t at = 0;
    do {
        FSDP_TRY(fsdp_ctl_put_piece(ctl, call, to, at, data, err));
        at += fsdp_ctl_piece_size(call, at);
    } while (at < call->head.size);
    return FSDP_OK;
}

fsdp_status fsdp_ctl_take_data(fsdp_ctl *ctl, ctl_call *call, int from, void *data, fsdp_error *err)
{
    uint64_t at = 0;
    do {
        FSDP_TRY(fsdp_ctl_take_piece(ctl, call, from, at, data, err));
        at += fsdp_ctl_piece_size(call, at);
    } while (at < call->head.size);
    return FSDP_OK;
}

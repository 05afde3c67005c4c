/*
 * The calls of the control plane, written once for all back ends. In: each rank's call and the
 * outcome of its work. Out: one verdict and the data of rank 0 or of all, or the first failure.
 * Saves and loads, the launcher and programs call this room (ctl.h); back ends implement
 * ctl_backend.h.
 *
 * A collective is a star around rank 0. Every rank sends its call, and the outcome of its own work,
 * to rank 0. Rank 0 compares the calls and answers all of them with one verdict. Data follows only
 * after a good verdict, so a mismatch never leaves half a transfer behind.
 *
 * A rank that works for long before its next call reports so repeatedly, and is waited for as long
 * as it does. Rank 0 reads from all ranks that have not made the call yet, each with its own
 * deadline, so that one working rank does not hide a dead one; and reports to the others that it
 * still waits.
 *
 * There are two kinds of failure. A failed outcome that the ranks agree on leaves the control plane
 * usable, and so do different public calls whose messages are alike. A rank that is silent, gone or
 * in another call breaks it: the rank that detects this sends a leave message to rank 0, and rank 0
 * to all, so that all ranks fail soon and with the same text.
 */
#include "base/data/flow.h"
#include "base/core/given.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/ctl/ctl_frame.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* === calls ==================================================================================== */

/* "agree" */
static const char *ctl_call_name(uint32_t kind)
{
    static const char *const names[] = {"?",       "allgather", "broadcast", "agree",
                                        "barrier", "send",      "recv"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : names[0];
}

/* The public function that the caller is in: "fsdp_root_save", "fsdp_ctl_agree". */
static void ctl_call_public(const frame *head, char out[FSDP_CTL_CALL])
{
    if (head->public_call[0])
        snprintf(out, FSDP_CTL_CALL, "%.*s", FSDP_CTL_CALL - 1, head->public_call);
    else
        snprintf(out, FSDP_CTL_CALL, "fsdp_ctl_%s", ctl_call_name(head->call));
}

/* The sizes of a call: "of 8 bytes from rank 0". */
static void describe_sizes(const frame *head, char *out, size_t out_size)
{
    const unsigned long long size = head->size;
    if (head->call == CALL_BROADCAST)
        snprintf(out, out_size, " of %llu bytes from rank %d", size, (int)head->root);
    else if (head->call == CALL_AGREE || head->call == CALL_BARRIER)
        out[0] = '\0';
    else
        snprintf(out, out_size, " of %llu bytes", size);
}

/* "fsdp_root_save (broadcast of 8 bytes from rank 0, call 3)", "fsdp_ctl_agree (call 3)" */
static void ctl_call_describe(const frame *head, char *out, size_t out_size)
{
    char call[FSDP_CTL_CALL], sizes[64];
    const bool is_message = head->call == CALL_SEND || head->call == CALL_RECV;
    const char *when = is_message ? "after call" : "call";
    const unsigned long long calls = head->calls;
    ctl_call_public(head, call);
    describe_sizes(head, sizes, sizeof sizes);
    if (head->public_call[0])
        snprintf(out, out_size, "%s (%s%s, %s %llu)", call, ctl_call_name(head->call), sizes, when,
                 calls);
    else
        snprintf(out, out_size, "%s%s (%s %llu)", call, sizes, when, calls);
}

/* === messages ================================================================================= */

/*
 * One message of a call from one rank to another: frames, what follows them, and what comes instead of them.
 * A rank that fails sends a leave message at any point: a receiver that waits for anything else takes its
 * reason as the error.
 */

enum { FSDP_CTL_LEAVE_MS = 1000 };

/* One call in progress on this rank. */
typedef struct ctl_call {
    frame head;
    const void *mine; /* allgather: this rank's part; send: what is sent */
    void *data;       /* where data lies or goes */
    int64_t until_ms;
    bool timed_out;     /* the last wait failed at its deadline */
    bool peer_left;     /* it failed because of a leave message */
    fsdp_error outcome; /* in: this rank's own; after the verdict: the common one */
    fsdp_status (*transfer)(fsdp_ctl *ctl, struct ctl_call *call, fsdp_error *err);
} ctl_call;

enum { LEAVE_DEPTH = 64 };

/* --- failures --------------------------------------------------------------------------------- */

static fsdp_status ctl_fail_mismatch(const fsdp_ctl *ctl, const frame *mine, int peer,
                                     const frame *theirs, fsdp_error *err)
{
    char my_call[160], their_call[160];
    ctl_call_describe(mine, my_call, sizeof my_call);
    ctl_call_describe(theirs, their_call, sizeof their_call);
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
    ctl_call_public(&call->head, name);
    err->rank = peer;
    return fsdp_fail(
        err, FSDP_ERR_PEER,
        "rank %d runs another version of fsdp (seen in %s); use one version on all ranks", peer,
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

/* Completes a back end's error; FSDP_ERR_PEER without a text means that the time is over. wait_failed
 * appends the hint. */
static fsdp_status ctl_fail_wait(const fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err)
{
    char name[FSDP_CTL_CALL], place[96];
    if (is_foreign_frame(ctl))
        return fail_version(call, peer, err);
    ctl_call_public(&call->head, name);
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
    (void)ctl_fail_wait(ctl, call, to, err);
    find_leave(ctl, call, to, 0, err);
    /* it sent its reason to rank 0, which relays it to all */
    if (!call->peer_left && to != 0 && ctl->rank != 0)
        find_leave(ctl, call, 0, fsdp_now_ms() + FSDP_CTL_LEAVE_MS, err);
    return err->status;
}

/* The other ranks wait that much longer than rank 0, so that its report of missing ranks arrives. */
static int64_t ctl_grace_ms(const fsdp_ctl *ctl)
{
    int64_t fifth = ctl->deadline_ms / 5;
    return fifth > 2000 ? fifth : 2000;
}

/* At the end of a wait for a rank: its new end, later than until_ms while that rank is busy. */
static int64_t ctl_busy_until(const fsdp_ctl *ctl, int peer, int64_t until_ms)
{
    const fsdp_ctl_observer *observer = &ctl->observer;
    int64_t busy_ms = observer->busy_until ? observer->busy_until(observer->context, peer) : 0;
    int64_t later_ms = busy_ms + ctl->deadline_ms + (ctl->rank == 0 ? 0 : ctl_grace_ms(ctl));
    int64_t soon_ms = fsdp_now_ms() + ctl->deadline_ms; /* it may end being busy earlier */
    if (busy_ms == 0 || later_ms <= until_ms)
        return until_ms;
    return later_ms < soon_ms ? later_ms : soon_ms;
}

bool fsdp_ctl_keep_sending(const fsdp_ctl *ctl, int to, int64_t *until_ms)
{
    if (*until_ms == 0 || ctl->poison.status != FSDP_OK)
        return false;
    *until_ms = ctl_busy_until(ctl, to, *until_ms);
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
            call->until_ms = ctl_busy_until(ctl, from, until_ms);
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
    return ctl_fail_wait(ctl, call, from, err);
}

/* Extends the deadline for a rank that reports work. */
static void note_work(const fsdp_ctl *ctl, ctl_call *call, const frame *head)
{
    int64_t until_ms = fsdp_now_ms() + head->left_ms + (ctl->rank == 0 ? 0 : ctl_grace_ms(ctl));
    if (until_ms > call->until_ms)
        call->until_ms = until_ms;
}

static bool ctl_is_work(const frame *head)
{
    return head->magic == FRAME_MAGIC && head->kind == FRAME_WORKING;
}

/* A frame that carries an outcome: CALL, VERDICT, LEAVE, and WAITING (where it is FSDP_OK). */
static frame ctl_report_head(const ctl_call *call, frame_kind kind, const fsdp_error *report)
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

static fsdp_status ctl_put_report(fsdp_ctl *ctl, ctl_call *call, int to, frame_kind kind,
                                  const fsdp_error *report, fsdp_error *err)
{
    frame head = ctl_report_head(call, kind, report);
    FSDP_TRY(put(ctl, call, to, &head, sizeof head, err));
    if (report->status == FSDP_OK)
        return FSDP_OK;
    return put(ctl, call, to, report->text, sizeof report->text, err);
}

/* Receives what follows a head. */
static fsdp_status ctl_take_rest(fsdp_ctl *ctl, ctl_call *call, int from, const frame *head,
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

static fsdp_status ctl_take_report(fsdp_ctl *ctl, ctl_call *call, int from, frame *head_out,
                                   fsdp_error *report_out, fsdp_error *err)
{
    FSDP_TRY(take(ctl, call, from, head_out, sizeof *head_out, err));
    while (ctl_is_work(head_out)) {
        note_work(ctl, call, head_out);
        FSDP_TRY(take(ctl, call, from, head_out, sizeof *head_out, err));
    }
    return ctl_take_rest(ctl, call, from, head_out, report_out, err);
}

static bool ctl_is_same_call(const frame *a, const frame *b)
{
    return a->call == b->call && a->root == b->root && a->size == b->size && a->calls == b->calls;
}

static bool ctl_is_same_public(const frame *a, const frame *b)
{
    return strncmp(a->public_call, b->public_call, sizeof a->public_call) == 0;
}

/* The length of the piece of the call's data that begins at `at`. It is never the size of a frame, so that a
 * leave message is not taken for data. */
static size_t ctl_piece_size(const ctl_call *call, uint64_t at)
{
    uint64_t left = call->head.size - at;
    if (left == sizeof(frame))
        return sizeof(frame) - 1;
    return left < FSDP_CTL_PIECE ? (size_t)left : (size_t)FSDP_CTL_PIECE;
}

/* The piece of data that begins at `at`. No data at all is one empty piece, so that a receiver who
 * expects more sees it. */
static fsdp_status ctl_put_piece(fsdp_ctl *ctl, ctl_call *call, int to, uint64_t at,
                                 const void *data, fsdp_error *err)
{
    frame head = call->head;
    head.kind = FRAME_DATA;
    head.at = at;
    FSDP_TRY(put(ctl, call, to, &head, sizeof head, err));
    size_t size = ctl_piece_size(call, at);
    return size == 0 ? FSDP_OK : put(ctl, call, to, (const char *)data + at, size, err);
}

static fsdp_status ctl_take_piece(fsdp_ctl *ctl, ctl_call *call, int from, uint64_t at, void *data,
                                  fsdp_error *err)
{
    frame head = {0}, expected = call->head;
    fsdp_error report = {0};
    if (expected.call == CALL_RECV)
        expected.call = CALL_SEND;
    FSDP_TRY(ctl_take_report(ctl, call, from, &head, &report, err));
    if (head.kind != FRAME_DATA || head.at != at || !ctl_is_same_call(&head, &expected) ||
        !ctl_is_same_public(&head, &expected))
        return ctl_fail_mismatch(ctl, &call->head, from, &head, err);
    size_t size = ctl_piece_size(call, at);
    return size == 0 ? FSDP_OK : take(ctl, call, from, (char *)data + at, size, err);
}

static fsdp_status ctl_put_data(fsdp_ctl *ctl, ctl_call *call, int to, const void *data,
                                fsdp_error *err)
{
    uint64_t at = 0;
    do {
        FSDP_TRY(ctl_put_piece(ctl, call, to, at, data, err));
        at += ctl_piece_size(call, at);
    } while (at < call->head.size);
    return FSDP_OK;
}

static fsdp_status ctl_take_data(fsdp_ctl *ctl, ctl_call *call, int from, void *data,
                                 fsdp_error *err)
{
    uint64_t at = 0;
    do {
        FSDP_TRY(ctl_take_piece(ctl, call, from, at, data, err));
        at += ctl_piece_size(call, at);
    } while (at < call->head.size);
    return FSDP_OK;
}

/* === the control plane ======================================================================== */

enum {
    SOON_MS = 1000,
    MISSING_SHOWN = 16,
    LOOK_MS = 250, /* while rank 0 waits for one rank it reads from the others this often */
    WAKE_MS = 5000 /* and calls `waiting` this often */
};

typedef fsdp_status (*peer_step)(fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err);

/* call NULL: the end of the call. */
static void note_call(const fsdp_ctl *ctl, const ctl_call *call, int waits_for)
{
    char name[FSDP_CTL_CALL];
    if (!ctl->observer.note)
        return;
    if (call)
        ctl_call_public(&call->head, name);
    ctl->observer.note(ctl->observer.context, call ? name : NULL, waits_for);
}

/* --- rank 0 and its peers --------------------------------------------------------------------- */

typedef struct missing_list {
    int count;
    char text[MISSING_SHOWN * 12];
} missing_list;

static void add_missing(missing_list *missing, int rank)
{
    if (missing->count++ >= MISSING_SHOWN)
        return;
    size_t used = strlen(missing->text);
    snprintf(missing->text + used, sizeof missing->text - used, "%s%d", used ? ", " : "", rank);
}

static fsdp_status fail_missing(const missing_list *missing, fsdp_error *err)
{
    if (missing->count < 2)
        return err->status;
    size_t used = strlen(err->text);
    int hidden = missing->count - MISSING_SHOWN;
    if (hidden > 0)
        snprintf(err->text + used, sizeof err->text - used, " (ranks %s and %d more missing)",
                 missing->text, hidden);
    else
        snprintf(err->text + used, sizeof err->text - used, " (ranks %s missing)", missing->text);
    return err->status;
}

/*
 * Runs one step with every other rank. When the deadline has passed, the steps with the remaining
 * ranks only take what is there already: that is how the message names all who are missing.
 */
static fsdp_status each_peer(fsdp_ctl *ctl, ctl_call *call, peer_step step, fsdp_error *err)
{
    missing_list missing = {0};
    for (int peer = 1; peer < ctl->size; peer++) {
        fsdp_error one = {0};
        call->timed_out = false;
        fsdp_status status = step(ctl, call, peer, &one);
        if (status == FSDP_OK)
            continue;
        if (missing.count == 0)
            *err = one;
        if (call->timed_out)
            add_missing(&missing, peer);
        else if (missing.count == 0)
            return status;
    }
    call->timed_out = missing.count > 0;
    return missing.count ? fail_missing(&missing, err) : FSDP_OK;
}

/* Reports to all ranks that rank 0 waits in this call. Best effort, without waiting. */
static void announce_call(fsdp_ctl *ctl, const ctl_call *call)
{
    static const fsdp_error fine;
    frame head = ctl_report_head(call, FRAME_WAITING, &fine);
    head.left_ms = (int32_t)((int64_t)ctl->deadline_ms * 3 / 4);
    for (int peer = 1; peer < ctl->size; peer++) {
        fsdp_error ignored = {0};
        (void)ctl->ops->send(ctl, peer, &head, sizeof head, 0, &ignored);
    }
}

static fsdp_status take_call(fsdp_ctl *ctl, ctl_call *call, int peer, const frame *head,
                             fsdp_error *err)
{
    fsdp_error theirs = {0};
    call->until_ms = fsdp_now_ms() + ctl->deadline_ms;
    FSDP_TRY(ctl_take_rest(ctl, call, peer, head, &theirs, err));
    if (head->kind != FRAME_CALL || !ctl_is_same_call(head, &call->head))
        return ctl_fail_mismatch(ctl, &call->head, peer, head, err);
    /* their messages are alike, so that the ranks can agree on this failure */
    if (theirs.status == FSDP_OK && !ctl_is_same_public(head, &call->head))
        (void)ctl_fail_mismatch(ctl, &call->head, peer, head, &theirs);
    if (theirs.status != FSDP_OK &&
        (call->outcome.status == FSDP_OK || peer < call->outcome.rank)) {
        call->outcome = theirs;
        call->outcome.rank = peer;
    }
    ctl->peers[peer].here = true;
    return FSDP_OK;
}

/* Reads from a rank that has not made the call yet, and waits until then for more. Its silence is
 * no failure. */
static fsdp_status listen_to(fsdp_ctl *ctl, ctl_call *call, int peer, int64_t until_ms,
                             fsdp_error *err)
{
    fsdp_ctl_peer *waited = &ctl->peers[peer];
    while (!waited->here) {
        frame head = {0};
        fsdp_error failed = {0};
        ctl->unexpected_size = 0;
        if (ctl->ops->recv(ctl, peer, &head, sizeof head, until_ms, &failed) != FSDP_OK) {
            if (failed.text[0] == '\0' && failed.status == FSDP_ERR_PEER)
                return FSDP_OK;
            *err = failed;
            return ctl_fail_wait(ctl, call, peer, err);
        }
        if (!ctl_is_work(&head))
            return take_call(ctl, call, peer, &head, err);
        int64_t until = fsdp_now_ms() + head.left_ms;
        if (until > waited->until_ms)
            waited->until_ms = until;
    }
    return FSDP_OK;
}

static fsdp_status check_missing(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    missing_list missing = {0};
    int64_t now_ms = fsdp_now_ms();
    for (int peer = 1; peer < ctl->size; peer++) {
        fsdp_ctl_peer *waited = &ctl->peers[peer];
        if (!waited->here && now_ms >= waited->until_ms)
            waited->until_ms = ctl_busy_until(ctl, peer, waited->until_ms);
        if (waited->here || now_ms < waited->until_ms)
            continue;
        if (missing.count == 0) {
            err->status = FSDP_ERR_PEER;
            (void)ctl_fail_wait(ctl, call, peer, err);
        }
        add_missing(&missing, peer);
    }
    return missing.count > 0 ? fail_missing(&missing, err) : FSDP_OK;
}

/* While one rank is late, reads from all that have not made the call. */
static fsdp_status look_around(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    for (int peer = 1; peer < ctl->size; peer++)
        FSDP_TRY(listen_to(ctl, call, peer, 0, err));
    return check_missing(ctl, call, err);
}

/* In the quick case every rank is waited for once, in order. */
static fsdp_status collect_calls(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    const int64_t deadline_ms = ctl->deadline_ms, look_ms = deadline_ms / 16 + 1;
    int64_t now_ms = fsdp_now_ms(), wake_ms = now_ms + WAKE_MS;
    int64_t announce_ms = now_ms + (deadline_ms / 4 < SOON_MS ? deadline_ms / 4 : SOON_MS);
    for (int peer = 1; peer < ctl->size; peer++)
        ctl->peers[peer] = (fsdp_ctl_peer){false, now_ms + deadline_ms};
    for (int peer = 1; peer < ctl->size; peer += ctl->peers[peer].here) {
        now_ms = fsdp_now_ms();
        FSDP_TRY(listen_to(ctl, call, peer, now_ms + (look_ms < LOOK_MS ? look_ms : LOOK_MS), err));
        if (ctl->peers[peer].here)
            continue;
        note_call(ctl, call, peer);
        FSDP_TRY(look_around(ctl, call, err));
        if (now_ms >= announce_ms) {
            announce_call(ctl, call);
            announce_ms = now_ms + deadline_ms / 4;
        }
        if (ctl->waiting && now_ms >= wake_ms) {
            ctl->waiting(ctl->waiting_user);
            wake_ms = fsdp_now_ms() + WAKE_MS;
        }
    }
    return FSDP_OK;
}

static fsdp_status put_verdict(fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err)
{
    return ctl_put_report(ctl, call, peer, FRAME_VERDICT, &call->outcome, err);
}

static fsdp_status lead(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    FSDP_TRY(collect_calls(ctl, call, err));
    call->until_ms = fsdp_now_ms() + ctl->deadline_ms;
    return each_peer(ctl, call, put_verdict, err);
}

static fsdp_status follow(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    frame head = {0};
    FSDP_TRY(ctl_put_report(ctl, call, 0, FRAME_CALL, &call->outcome, err));
    do {
        call->outcome = (fsdp_error){0};
        FSDP_TRY(ctl_take_report(ctl, call, 0, &head, &call->outcome, err));
        if (!ctl_is_same_call(&head, &call->head) || head.kind == FRAME_DATA)
            return ctl_fail_mismatch(ctl, &call->head, 0, &head, err);
        call->until_ms = fsdp_now_ms() + head.left_ms + ctl_grace_ms(ctl);
    } while (head.kind != FRAME_VERDICT);
    return FSDP_OK;
}

/* --- at work, outside calls ------------------------------------------------------------------- */

void fsdp_ctl_report_working(fsdp_ctl *ctl, int64_t left_ms)
{
    int64_t until_ms = fsdp_now_ms() + (left_ms < INT32_MAX ? left_ms : INT32_MAX);
    int last = ctl->rank == 0 ? ctl->size - 1 : 0;
    if (ctl->poison.status != FSDP_OK || until_ms - ctl->announced_until_ms < ctl->deadline_ms / 8)
        return;
    ctl->announced_until_ms = until_ms;
    frame head = {.magic = FRAME_MAGIC,
                  .kind = FRAME_WORKING,
                  .left_ms = (int32_t)(until_ms - fsdp_now_ms())};
    for (int peer = ctl->rank == 0 ? 1 : 0; peer <= last; peer++) {
        fsdp_error ignored = {0};
        (void)ctl->ops->send(ctl, peer, &head, sizeof head, 0, &ignored);
    }
}

/* --- failures that break the control plane ---------------------------------------------------- */

/* Rank 0 sends it to all ranks; the others to rank 0, unless they got it from there. Best effort,
 * within a short time for all. */
static void send_leave(fsdp_ctl *ctl, ctl_call *call)
{
    int last = ctl->rank == 0 ? ctl->size - 1 : 0;
    if (ctl->rank != 0 && call->peer_left)
        return;
    call->until_ms = fsdp_now_ms() + FSDP_CTL_LEAVE_MS;
    for (int peer = ctl->rank == 0 ? 1 : 0; peer <= last; peer++) {
        fsdp_error ignored = {0};
        (void)ctl_put_report(ctl, call, peer, FRAME_LEAVE, &ctl->poison, &ignored);
    }
}

static fsdp_status poison_ctl(fsdp_ctl *ctl, ctl_call *call, fsdp_error *broken, fsdp_error *err)
{
    size_t used = strlen(broken->text);
    if (call->timed_out)
        snprintf(broken->text + used, sizeof broken->text - used, "; %s", FSDP_DEADLINE_HINT);
    ctl->poison = *broken;
    send_leave(ctl, call);
    if (err)
        *err = *broken;
    return broken->status;
}

void fsdp_ctl_leave(fsdp_ctl *ctl, const fsdp_error *why)
{
    ctl_call none = {.head = {.magic = FRAME_MAGIC}};
    fsdp_error reason = *why;
    if (ctl->poison.status == FSDP_OK)
        (void)poison_ctl(ctl, &none, &reason, NULL);
}

/* --- collectives ------------------------------------------------------------------------------ */

static ctl_call begin_call(const fsdp_ctl *ctl, call_kind kind, size_t size)
{
    ctl_call call = {.head = {.magic = FRAME_MAGIC, .call = kind, .size = size}};
    if (ctl->public_call)
        snprintf(call.head.public_call, sizeof call.head.public_call, "%s", ctl->public_call);
    call.until_ms = fsdp_now_ms() + ctl->deadline_ms;
    return call;
}

static fsdp_status leave_with_outcome(const fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    fsdp_error *outcome = &call->outcome;
    char begin[32];
    if (outcome->status == FSDP_OK)
        return FSDP_OK;
    snprintf(begin, sizeof begin, "rank %d is in ", outcome->rank);
    if (outcome->rank != ctl->rank && strncmp(outcome->text, begin, strlen(begin)) != 0)
        fsdp_error_prefix(outcome, "rank %d", outcome->rank);
    if (err)
        *err = *outcome;
    return outcome->status;
}

static fsdp_status make_call(fsdp_ctl *ctl, ctl_call *call, fsdp_error *broken)
{
    call->head.calls = ++ctl->calls;
    if (ctl->rank != 0)
        call->until_ms += ctl_grace_ms(ctl);
    FSDP_TRY(ctl->rank == 0 ? lead(ctl, call, broken) : follow(ctl, call, broken));
    if (call->transfer && call->head.size > 0 && call->outcome.status == FSDP_OK)
        return call->transfer(ctl, call, broken);
    return FSDP_OK;
}

/* A rank with a failure of its own reports that one even when the control plane breaks too. */
static fsdp_status run_collective(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    const char *name = ctl_call_name(call->head.call);
    fsdp_error mine = call->outcome, broken = ctl->poison;
    fsdp_status status = broken.status;
    fsdp_flow("statedict/ctl/ctl.c", "%s", name);
    if (status == FSDP_OK) {
        note_call(ctl, call, ctl->rank == 0 ? -1 : 0);
        status = make_call(ctl, call, &broken);
        note_call(ctl, NULL, -1);
        ctl->announced_until_ms = fsdp_now_ms() + ctl->deadline_ms;
        if (status == FSDP_OK)
            return leave_with_outcome(ctl, call, err);
        (void)poison_ctl(ctl, call, &broken, NULL);
    }
    if (err)
        *err = mine.status != FSDP_OK ? mine : broken;
    return mine.status != FSDP_OK ? mine.status : status;
}

/* The call's outcome on this rank is `mine`, with the text of err. */
static void bring_outcome(const fsdp_ctl *ctl, ctl_call *call, fsdp_status mine,
                          const fsdp_error *err)
{
    if (mine == FSDP_OK)
        return;
    if (err)
        call->outcome = *err;
    if (call->outcome.text[0] == '\0')
        (void)fsdp_fail(&call->outcome, mine, "%s", fsdp_status_name(mine));
    call->outcome.status = mine;
    call->outcome.rank = ctl->rank;
}

static fsdp_status take_part(fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err)
{
    return ctl_take_data(ctl, call, peer, (char *)call->data + (size_t)peer * call->head.size, err);
}

static fsdp_status put_all(fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err)
{
    return ctl_put_data(ctl, call, peer, call->data, err);
}

static fsdp_status transfer_parts(fsdp_ctl *ctl, ctl_call *part, fsdp_error *err)
{
    size_t size = (size_t)part->head.size;
    ctl_call all = *part;
    all.head.size *= (uint64_t)ctl->size;
    if (ctl->rank != 0) {
        FSDP_TRY(ctl_put_data(ctl, part, 0, part->mine, err));
        fsdp_status status = ctl_take_data(ctl, &all, 0, part->data, err);
        part->peer_left = all.peer_left;
        return status;
    }
    memmove(part->data, part->mine, size);
    FSDP_TRY(each_peer(ctl, part, take_part, err));
    return each_peer(ctl, &all, put_all, err);
}

fsdp_status fsdp_ctl_agree_allgather(fsdp_ctl *ctl, fsdp_status mine, const void *part, size_t size,
                                     void *all_out, fsdp_error *err)
{
    ctl_call call = begin_call(ctl, CALL_ALLGATHER, size);
    call.mine = part;
    call.data = all_out;
    call.transfer = transfer_parts;
    if (mine == FSDP_OK &&
        (size > SIZE_MAX / (size_t)ctl->size || (size > 0 && (!part || !all_out))))
        (void)fsdp_fail(&call.outcome, FSDP_ERR_USAGE, "cannot allgather %zu bytes%s", size,
                        !part      ? ": 'mine' is NULL"
                        : !all_out ? ": 'all_out' is NULL"
                                   : "");
    call.outcome.rank = ctl->rank;
    bring_outcome(ctl, &call, mine, err);
    return run_collective(ctl, &call, err);
}

fsdp_status fsdp_ctl_allgather(fsdp_ctl *ctl, const void *mine, size_t size, void *all_out,
                               fsdp_error *err)
{
    FSDP_NEED(err, ctl);
    return fsdp_ctl_agree_allgather(ctl, FSDP_OK, mine, size, all_out, err);
}

/* Rank 0 relays the piece at call->at to all ranks but the root. */
static fsdp_status relay_piece(fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err)
{
    if (peer == call->head.root)
        return FSDP_OK;
    return ctl_put_piece(ctl, call, peer, call->head.at, call->data, err);
}

static fsdp_status transfer_root(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    int root = call->head.root;
    if (ctl->rank == root && root != 0)
        return ctl_put_data(ctl, call, 0, call->data, err);
    if (ctl->rank != 0)
        return ctl_take_data(ctl, call, 0, call->data, err);
    for (uint64_t at = 0; at < call->head.size; at += ctl_piece_size(call, at)) {
        if (root != 0)
            FSDP_TRY(ctl_take_piece(ctl, call, root, at, call->data, err));
        call->head.at = at;
        FSDP_TRY(each_peer(ctl, call, relay_piece, err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_ctl_agree_broadcast(fsdp_ctl *ctl, fsdp_status mine, int root, void *data,
                                     size_t size, fsdp_error *err)
{
    ctl_call call = begin_call(ctl, CALL_BROADCAST, size);
    call.head.root = root;
    call.data = data;
    call.transfer = transfer_root;
    if (root < 0 || root >= ctl->size)
        (void)fsdp_fail(&call.outcome, FSDP_ERR_USAGE,
                        "cannot broadcast from rank %d: the group has %d ranks", root, ctl->size);
    else if (size > 0 && !data)
        (void)fsdp_fail(&call.outcome, FSDP_ERR_USAGE, "cannot broadcast %zu bytes: 'data' is NULL",
                        size);
    call.outcome.rank = ctl->rank;
    bring_outcome(ctl, &call, mine, err);
    return run_collective(ctl, &call, err);
}

fsdp_status fsdp_ctl_broadcast(fsdp_ctl *ctl, int root, void *data, size_t size, fsdp_error *err)
{
    FSDP_NEED(err, ctl);
    return fsdp_ctl_agree_broadcast(ctl, FSDP_OK, root, data, size, err);
}

fsdp_status fsdp_ctl_agree(fsdp_ctl *ctl, fsdp_status mine, fsdp_error *err)
{
    FSDP_NEED(err, ctl);
    ctl_call call = begin_call(ctl, CALL_AGREE, 0);
    bring_outcome(ctl, &call, mine, err);
    return run_collective(ctl, &call, err);
}

fsdp_status fsdp_ctl_barrier(fsdp_ctl *ctl, fsdp_error *err)
{
    FSDP_NEED(err, ctl);
    ctl_call call = begin_call(ctl, CALL_BARRIER, 0);
    return run_collective(ctl, &call, err);
}

/* --- point to point --------------------------------------------------------------------------- */

static fsdp_status check_peer(const fsdp_ctl *ctl, int peer, fsdp_error *err)
{
    if (ctl->poison.status != FSDP_OK) {
        *err = ctl->poison;
        return err->status;
    }
    if (peer >= 0 && peer < ctl->size && peer != ctl->rank)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "rank %d of %d cannot send to or receive from rank %d",
                     ctl->rank, ctl->size, peer);
}

static fsdp_status run_message(fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err)
{
    fsdp_error broken = {0};
    call->head.calls = ctl->calls;
    fsdp_status status = check_peer(ctl, peer, &broken);
    if (status != FSDP_OK) {
        if (err)
            *err = broken;
        return status;
    }
    note_call(ctl, call, peer);
    if (call->head.call == CALL_SEND)
        status = ctl_put_data(ctl, call, peer, call->mine, &broken);
    else
        status = ctl_take_data(ctl, call, peer, call->data, &broken);
    note_call(ctl, NULL, -1);
    return status == FSDP_OK ? FSDP_OK : poison_ctl(ctl, call, &broken, err);
}

fsdp_status fsdp_ctl_send(fsdp_ctl *ctl, int to, const void *data, size_t size, fsdp_error *err)
{
    ctl_call call = begin_call(ctl, CALL_SEND, size);
    call.mine = data;
    return run_message(ctl, &call, to, err);
}

fsdp_status fsdp_ctl_recv(fsdp_ctl *ctl, int from, void *data, size_t size, fsdp_error *err)
{
    ctl_call call = begin_call(ctl, CALL_RECV, size);
    call.data = data;
    return run_message(ctl, &call, from, err);
}

/* === use of other ranks' memory =============================================================== */

/*
 * Ranks with one address space use the memory of others. A rank whose control plane broke must
 * not free what others still use, and no message can tell it when they have stopped: so they count
 * themselves while they do.
 */

fsdp_status fsdp_ctl_check_access(const fsdp_ctl *ctl, fsdp_error *err)
{
    return ctl->access && atomic_load(&ctl->access->closed)
               ? fsdp_fail(err, FSDP_ERR_PEER, "another rank has left")
               : FSDP_OK;
}

fsdp_status fsdp_ctl_begin_access(fsdp_ctl *ctl, fsdp_error *err)
{
    if (ctl->access)
        atomic_fetch_add(&ctl->access->users, 1);
    fsdp_status status = fsdp_ctl_check_access(ctl, err);
    if (status != FSDP_OK)
        fsdp_ctl_end_access(ctl);
    return status;
}

void fsdp_ctl_end_access(fsdp_ctl *ctl)
{
    if (ctl->access)
        atomic_fetch_sub(&ctl->access->users, 1);
}

void fsdp_ctl_withdraw_memory(fsdp_ctl *ctl)
{
    bool is_broken = ctl->poison.status != FSDP_OK;
    if (!ctl->access || !is_broken)
        return;
    atomic_store(&ctl->access->closed, true);
    while (atomic_load(&ctl->access->users) > 0)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

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
#include "statedict/ctl/ctl_message.h"

#include <stdio.h>
#include <string.h>

#include "base/data/flow.h"
#include "statedict/ctl/ctl_backend.h"

#include "base/core/given.h"

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
        fsdp_ctl_call_public(&call->head, name);
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
    frame head = fsdp_ctl_report_head(call, FRAME_WAITING, &fine);
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
    FSDP_TRY(fsdp_ctl_take_rest(ctl, call, peer, head, &theirs, err));
    if (head->kind != FRAME_CALL || !fsdp_ctl_is_same_call(head, &call->head))
        return fsdp_ctl_fail_mismatch(ctl, &call->head, peer, head, err);
    /* their messages are alike, so that the ranks can agree on this failure */
    if (theirs.status == FSDP_OK && !fsdp_ctl_is_same_public(head, &call->head))
        (void)fsdp_ctl_fail_mismatch(ctl, &call->head, peer, head, &theirs);
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
            return fsdp_ctl_fail_wait(ctl, call, peer, err);
        }
        if (!fsdp_ctl_is_work(&head))
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
            waited->until_ms = fsdp_ctl_busy_until(ctl, peer, waited->until_ms);
        if (waited->here || now_ms < waited->until_ms)
            continue;
        if (missing.count == 0) {
            err->status = FSDP_ERR_PEER;
            (void)fsdp_ctl_fail_wait(ctl, call, peer, err);
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
    return fsdp_ctl_put_report(ctl, call, peer, FRAME_VERDICT, &call->outcome, err);
}

static fsdp_status lead(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    FSDP_TRY(collect_calls(ctl, call, err));
    call->until_ms = fsdp_now_ms() + ctl->deadline_ms;
    return each_peer(ctl, call, put_verdict, err);
}

static void extend_wait(const fsdp_ctl *ctl, ctl_call *call, const frame *head)
{
    call->until_ms = fsdp_now_ms() + head->left_ms + fsdp_ctl_grace_ms(ctl);
}

static fsdp_status follow(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    frame head = {0};
    FSDP_TRY(fsdp_ctl_put_report(ctl, call, 0, FRAME_CALL, &call->outcome, err));
    do {
        call->outcome = (fsdp_error){0};
        FSDP_TRY(fsdp_ctl_take_report(ctl, call, 0, &head, &call->outcome, err));
        if (!fsdp_ctl_is_same_call(&head, &call->head) || head.kind == FRAME_DATA)
            return fsdp_ctl_fail_mismatch(ctl, &call->head, 0, &head, err);
        extend_wait(ctl, call, &head);
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
        (void)fsdp_ctl_put_report(ctl, call, peer, FRAME_LEAVE, &ctl->poison, &ignored);
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
        call->until_ms += fsdp_ctl_grace_ms(ctl);
    FSDP_TRY(ctl->rank == 0 ? lead(ctl, call, broken) : follow(ctl, call, broken));
    if (call->transfer && call->head.size > 0 && call->outcome.status == FSDP_OK)
        return call->transfer(ctl, call, broken);
    return FSDP_OK;
}

/* A rank with a failure of its own reports that one even when the control plane breaks too. */
static fsdp_status run_collective(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    const char *name = fsdp_ctl_call_name(call->head.call);
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
    return fsdp_ctl_take_data(ctl, call, peer, (char *)call->data + (size_t)peer * call->head.size,
                              err);
}

static fsdp_status put_all(fsdp_ctl *ctl, ctl_call *call, int peer, fsdp_error *err)
{
    return fsdp_ctl_put_data(ctl, call, peer, call->data, err);
}

static fsdp_status transfer_parts(fsdp_ctl *ctl, ctl_call *part, fsdp_error *err)
{
    size_t size = (size_t)part->head.size;
    ctl_call all = *part;
    all.head.size *= (uint64_t)ctl->size;
    if (ctl->rank != 0) {
        FSDP_TRY(fsdp_ctl_put_data(ctl, part, 0, part->mine, err));
        fsdp_status status = fsdp_ctl_take_data(ctl, &all, 0, part->data, err);
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
        (void)fsdp_fail(&call.outcome, FSDP_ERR_USAGE,
                        "no room given for an allgather of %zu bytes%s", size,
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
    return fsdp_ctl_put_piece(ctl, call, peer, call->head.at, call->data, err);
}

static fsdp_status transfer_root(fsdp_ctl *ctl, ctl_call *call, fsdp_error *err)
{
    int root = call->head.root;
    if (ctl->rank == root && root != 0)
        return fsdp_ctl_put_data(ctl, call, 0, call->data, err);
    if (ctl->rank != 0)
        return fsdp_ctl_take_data(ctl, call, 0, call->data, err);
    for (uint64_t at = 0; at < call->head.size; at += fsdp_ctl_piece_size(call, at)) {
        if (root != 0)
            FSDP_TRY(fsdp_ctl_take_piece(ctl, call, root, at, call->data, err));
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
                        "there is no rank %d to broadcast from: "
                        "%d ranks are here",
                        root, ctl->size);
    else if (size > 0 && !data)
        (void)fsdp_fail(&call.outcome, FSDP_ERR_USAGE,
                        "no memory given for a broadcast of %zu bytes: 'data' is NULL", size);
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
        status = fsdp_ctl_put_data(ctl, call, peer, call->mine, &broken);
    else
        status = fsdp_ctl_take_data(ctl, call, peer, call->data, &broken);
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

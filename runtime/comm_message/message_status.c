/*
 * Ends waits for other members. A member that fails sends its error to all others, a member that
 * closes the group sends a leave message, and processes of the same host are watched. When nothing
 * arrives within the deadline, a member probes the others: waiting members reply, and the error
 * names the one that does not. See comm_message.h.
 */
#include "base/core/clock.h"
#include "base/core/mem.h"
#include "runtime/comm_message/comm_message.h"
#include "statedict/ctl/ctl_backend.h"

#include <stdio.h>
#include <string.h>

enum {
    LOOK_MS = 100,        /* between checks of the watched processes */
    LATE_MS = 500,        /* a longer sleep means that this rank itself was stopped */
    LEAST_GRACE_MS = 250, /* for the replies to a probe */
    MOST_GRACE_MS = 2000
};

typedef enum status_kind { FAILED = 1, LEFT, PROBE, PROBE_REPLY, BUSY } status_kind;

typedef struct message_status {
    int32_t kind, channel;
    int32_t from; /* world rank */
    int32_t status, rank, errnum, is_local;
    uint64_t calls; /* BUSY: milliseconds from now on */
    char text[FSDP_ERROR_TEXT];
} message_status;

_Static_assert(sizeof(message_status) <= FSDP_P2P_STATUS, "status are small");

/* --- sending ---------------------------------------------------------------------------------- */

static void send_to_members(const message_group *group, const message_status *status)
{
    fsdp_p2p *p2p = group->transport->p2p;
    for (int i = 0; i < group->size; i++) {
        if (i != group->rank)
            p2p->ops->send_status(p2p, group->ranks[i], status, sizeof *status);
    }
}

static message_status make_status(message_group *group, status_kind kind)
{
    message_status status;
    memset(&status, 0, sizeof status);
    status.kind = (int32_t)kind;
    status.channel = group->channel;
    status.from = group->transport->base.rank;
    status.calls = atomic_load(&group->calls);
    return status;
}

static void report_failure(message_group *group)
{
    message_status status = make_status(group, FAILED);
    status.status = (int32_t)group->failure.status;
    status.rank = group->failure.rank;
    status.errnum = group->failure.errnum;
    status.is_local = group->is_local;
    memcpy(status.text, group->failure.text, sizeof status.text - 1);
    group->is_unreported = false;
    send_to_members(group, &status);
}

/* A thread that must not use the p2p leaves this to one that may. */
static bool may_call(const message_transport *transport)
{
    return transport->p2p->ops->may_call(transport->p2p, NULL) == FSDP_OK;
}

/* --- receiving -------------------------------------------------------------------------------- */

static message_group *find_group(message_transport *transport, int channel)
{
    message_group *group = transport->groups;
    if (channel == transport->world.channel)
        return &transport->world;
    while (group && group->channel != channel)
        group = group->next;
    return group;
}

static int find_member(const message_group *group, int rank)
{
    int i = 0;
    while (i < group->size && group->ranks[i] != rank)
        i++;
    return i;
}

static void note_failure(message_group *group, const message_status *status)
{
    if (atomic_load(&group->has_failed) || status->status == FSDP_OK) /* not a valid failure */
        return;
    fsdp_error *err = &group->failure;
    *err = (fsdp_error){.status = (fsdp_status)status->status, .errnum = status->errnum};
    err->rank = status->is_local ? status->from : status->rank;
    memcpy(err->text, status->text, sizeof err->text - 1);
    if (status->is_local)
        fsdp_error_prefix(err, "rank %d", (int)status->from);
    atomic_store(&group->has_failed, true);
}

/* Replies also for a group that this rank has closed or not created yet, with no calls begun. */
static void reply_to_probe(message_transport *transport, message_group *group,
                           const message_status *probe)
{
    message_status status = make_status(group ? group : &transport->world, PROBE_REPLY);
    status.channel = probe->channel;
    status.calls = group ? status.calls : 0;
    transport->p2p->ops->send_status(transport->p2p, probe->from, &status, sizeof status);
}

/* The text of an exit code, which may be lost when there is no memory. */
static void note_left(message_member *member, const message_status *status)
{
    if (!member->has_left && status->text[0])
        member->reason = fsdp_strndup(status->text, strnlen(status->text, FSDP_ERROR_TEXT));
    member->exit_code = status->status;
    member->has_left = true;
}

static void note_busy(message_transport *transport, const message_status *status)
{
    const uint64_t left_ms = status->calls < INT32_MAX ? status->calls : INT32_MAX;
    if (status->from >= 0 && status->from < transport->base.size)
        transport->busy_until_ms[status->from] = fsdp_now_ms() + (int64_t)left_ms;
}

static void handle_status(message_transport *transport, const message_status *status)
{
    message_group *group = find_group(transport, status->channel);
    if (status->kind == BUSY)
        note_busy(transport, status);
    if (status->kind == PROBE)
        reply_to_probe(transport, group, status);
    int from = group ? find_member(group, status->from) : 0;
    if (!group || from == group->size)
        return;
    message_member *member = &group->members[from];
    if (status->kind == FAILED)
        note_failure(group, status);
    if (status->kind == LEFT || status->kind == PROBE_REPLY)
        member->calls = status->calls;
    if (status->kind == LEFT)
        note_left(member, status);
    member->has_answered |= status->kind == PROBE_REPLY;
}

/* Called under the lock. */
static void poll_status(message_transport *transport)
{
    message_status status;
    if (!may_call(transport))
        return;
    while (transport->p2p->ops->recv_status(transport->p2p, &status, sizeof status))
        handle_status(transport, &status);
    if (transport->world.is_unreported)
        report_failure(&transport->world);
    for (message_group *group = transport->groups; group; group = group->next) {
        if (group->is_unreported)
            report_failure(group);
    }
}

/* --- failures --------------------------------------------------------------------------------- */

void fsdp_message_fail(message_group *group, const fsdp_error *why, bool is_local, bool is_common)
{
    message_transport *transport = group->transport;
    pthread_mutex_lock(&transport->lock);
    if (!atomic_load(&group->has_failed)) {
        group->failure = *why;
        group->is_local = is_local;
        group->is_unreported = !is_common;
        atomic_store(&group->has_failed, true);
        poll_status(transport);
    }
    pthread_mutex_unlock(&transport->lock);
}

bool fsdp_message_has_failed(message_group *group, fsdp_error *err_out)
{
    message_transport *transport = group->transport;
    pthread_mutex_lock(&transport->lock);
    poll_status(transport);
    bool has_failed = atomic_load(&group->has_failed);
    if (has_failed)
        *err_out = group->failure;
    pthread_mutex_unlock(&transport->lock);
    return has_failed;
}

void fsdp_message_leave(message_group *group)
{
    message_transport *transport = group->transport;
    pthread_mutex_lock(&transport->lock);
    if (may_call(transport)) {
        message_status status = make_status(group, LEFT);
        status.status = transport->base.exit_code;
        if (transport->base.exit_reason)
            snprintf(status.text, sizeof status.text, "%s", transport->base.exit_reason);
        poll_status(transport); /* reports pending failures */
        send_to_members(group, &status);
    }
    pthread_mutex_unlock(&transport->lock);
}

/* --- busy ranks ------------------------------------------------------------------------------- */

void fsdp_message_set_busy(fsdp_transport *base, int64_t until_ms)
{
    message_transport *transport = (message_transport *)base;
    const int64_t left_ms = until_ms - fsdp_now_ms();
    pthread_mutex_lock(&transport->lock);
    if (may_call(transport)) {
        message_status status = make_status(&transport->world, BUSY);
        status.calls = left_ms > 0 ? (uint64_t)left_ms : 0;
        send_to_members(&transport->world, &status);
    }
    pthread_mutex_unlock(&transport->lock);
}

static int64_t latest_busy(const message_transport *transport)
{
    int64_t latest_ms = 0;
    for (int i = 0; i < transport->base.size; i++)
        if (transport->busy_until_ms[i] > latest_ms)
            latest_ms = transport->busy_until_ms[i];
    return latest_ms;
}

int64_t fsdp_message_busy_until(void *context, int rank)
{
    message_transport *transport = context;
    (void)rank;
    pthread_mutex_lock(&transport->lock);
    poll_status(transport);
    int64_t busy_ms = latest_busy(transport);
    pthread_mutex_unlock(&transport->lock);
    return busy_ms;
}

/* --- missing members -------------------------------------------------------------------------- */

static fsdp_status fail_missing(message_group *group, const fsdp_comm_loss *loss, fsdp_error *err)
{
    fsdp_error why = fsdp_comm_describe_loss(loss, &group->header);
    /* records it, unless another failure was first, and returns the first */
    fsdp_message_fail(group, &why, false, false);
    (void)fsdp_message_has_failed(group, err);
    return err->status;
}

/* A member that left after it began the current call has sent all its data. */
static fsdp_status check_left(message_group *group, fsdp_error *err)
{
    for (int i = 0; i < group->size; i++) {
        const message_member *member = &group->members[i];
        if (!member->has_left || member->calls >= atomic_load(&group->calls))
            continue;
        char what[FSDP_LEFT_TEXT];
        fsdp_comm_describe_left(member->exit_code, what);
        const fsdp_comm_loss loss = {
            .rank = group->ranks[i], .what = what, .reason = member->reason};
        return fail_missing(group, &loss, err);
    }
    return FSDP_OK;
}

static bool is_dead(const message_group *group, int member, char *name, size_t name_size)
{
    fsdp_p2p *p2p = group->transport->p2p;
    int rank = group->ranks[member];
    const fsdp_process_watch *line = &group->transport->watches[rank];
    snprintf(name, name_size, " (process %d)", line->pid);
    if (fsdp_process_watch_has_ended(line))
        return true;
    if (!p2p->ops->is_disconnected || !p2p->ops->is_disconnected(p2p, rank))
        return false;
    char place[64];
    p2p->ops->locate(p2p, rank, place, sizeof place);
    snprintf(name, name_size, ", whose connection (%s) ended,", place);
    return true;
}

static fsdp_status check_dead(message_group *group, fsdp_error *err)
{
    for (int i = 0; i < group->size; i++) {
        char name[112];
        if (!is_dead(group, i, name, sizeof name))
            continue;
        if (fsdp_message_has_failed(group, err)) /* its own report is more precise */
            return err->status;
        FSDP_TRY(check_left(group, err));
        if (group->members[i].has_left)
            continue;
        const fsdp_comm_loss loss = {.rank = group->ranks[i],
                                     .which = name,
                                     .what = group->are_all_here ? "died in" : "died before"};
        return fail_missing(group, &loss, err);
    }
    return FSDP_OK;
}

/* --- probes ----------------------------------------------------------------------------------- */

static int deadline_of(const message_group *group)
{
    return group->transport->base.deadline_ms + (group->comm ? group->comm->patience_ms : 0);
}

static void send_probe(message_group *group, message_watch *watch, int64_t now_ms)
{
    int64_t grace_ms = group->transport->base.deadline_ms / 10;
    grace_ms = grace_ms < LEAST_GRACE_MS ? LEAST_GRACE_MS : grace_ms;
    watch->probe_ms = now_ms + (grace_ms < MOST_GRACE_MS ? grace_ms : MOST_GRACE_MS);
    pthread_mutex_lock(&group->transport->lock);
    for (int i = 0; i < group->size; i++)
        group->members[i].has_answered = i == group->rank;
    if (may_call(group->transport)) {
        message_status status = make_status(group, PROBE);
        send_to_members(group, &status);
    }
    pthread_mutex_unlock(&group->transport->lock);
}

static bool is_busy(const message_group *group, int rank, int64_t now_ms)
{
    int64_t busy_ms = group->transport->busy_until_ms[rank];
    return busy_ms > 0 && now_ms < busy_ms + deadline_of(group);
}

/* A member that did not reply, else one that has not begun this call, else the sender of the
 * missing message. */
static int find_missing(const message_group *group, int waits_for)
{
    int elsewhere = -1;
    for (int i = group->size - 1; i >= 0; i--) {
        if (i != group->rank && group->members[i].calls < atomic_load(&group->calls))
            elsewhere = i;
    }
    for (int i = 0; i < group->size; i++) {
        if (!group->members[i].has_answered && !is_busy(group, group->ranks[i], fsdp_now_ms()))
            return i;
    }
    return elsewhere >= 0 ? elsewhere : waits_for;
}

/* A rank that is busy does not answer. */
static bool have_all_answered(const message_group *group, int64_t now_ms)
{
    bool all = true;
    for (int i = 0; i < group->size; i++)
        all &= group->members[i].has_answered || is_busy(group, group->ranks[i], now_ms);
    return all;
}

/* All members live, and some rank is busy, on which one of them may wait: the deadline moves. */
static bool wait_for_busy(const message_group *group, message_watch *watch, int64_t now_ms)
{
    const int64_t deadline_ms = deadline_of(group);
    int64_t busy_ms = latest_busy(group->transport);
    if (busy_ms == 0 || now_ms >= busy_ms + deadline_ms || !have_all_answered(group, now_ms))
        return false;
    watch->probe_ms = 0;
    watch->until_ms = (busy_ms < now_ms ? busy_ms : now_ms) + deadline_ms;
    return true;
}

static fsdp_status end_probe(message_group *group, int waits_for, fsdp_error *err)
{
    char what[128];
    const bool was_in = group->are_all_here;
    snprintf(what, sizeof what, "is stuck, or stopped: %s within %g s%s",
             was_in ? "nothing came from it" : "it did not come", deadline_of(group) / 1000.0,
             was_in ? ", in" : " to");
    const fsdp_comm_loss loss = {.rank = group->ranks[find_missing(group, waits_for)],
                                 .what = what,
                                 .hint = FSDP_DEADLINE_HINT};
    return fail_missing(group, &loss, err);
}

static fsdp_status check_time(message_group *group, message_watch *watch, int waits_for,
                              fsdp_error *err)
{
    int64_t now_ms = fsdp_now_ms();
    if (now_ms < watch->until_ms)
        return FSDP_OK;
    if (watch->probe_ms == 0)
        send_probe(group, watch, now_ms);
    else if ((now_ms >= watch->probe_ms || have_all_answered(group, now_ms)) &&
             !wait_for_busy(group, watch, now_ms))
        return end_probe(group, waits_for, err);
    return FSDP_OK;
}

/* --- waiting ---------------------------------------------------------------------------------- */

static void note_move(const message_group *group, message_watch *watch)
{
    int64_t now_ms = fsdp_now_ms();
    watch->idle = 0;
    watch->probe_ms = 0;
    watch->until_ms = now_ms + deadline_of(group);
    watch->look_ms = now_ms + LOOK_MS;
}

static void back_off(const message_group *group, message_watch *watch)
{
    fsdp_p2p *p2p = group->transport->p2p;
    int64_t before_ms = fsdp_now_ms();
    p2p->ops->back_off(p2p, watch->idle++);
    int64_t late_ms = fsdp_now_ms() - before_ms;
    if (late_ms > LATE_MS) /* this rank was stopped: the others are not late */
        watch->until_ms += late_ms;
}

fsdp_status fsdp_message_pause(message_group *group, message_watch *watch, bool has_moved,
                               int waits_for, fsdp_error *err)
{
    if (fsdp_message_has_failed(group, err))
        return err->status;
    if (has_moved || watch->until_ms == 0) {
        note_move(group, watch);
        return FSDP_OK;
    }
    FSDP_TRY(check_left(group, err));
    if (fsdp_now_ms() >= watch->look_ms) {
        watch->look_ms = fsdp_now_ms() + LOOK_MS;
        FSDP_TRY(check_dead(group, err));
    }
    FSDP_TRY(check_time(group, watch, waits_for, err));
    back_off(group, watch);
    return FSDP_OK;
}

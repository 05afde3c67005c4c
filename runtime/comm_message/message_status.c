/*
 * What ends a wait for another member. Whoever fails tells all members why; whoever leaves says goodbye, and
 * processes of the same host are watched. When nothing comes for the deadline, a member calls the roll: those
 * who wait themselves answer, and who does not is the one that all wait for. See comm_message.h.
 */
#include "base/clock.h"
#include "runtime/comm_message/comm_message.h"

#include <stdio.h>
#include <string.h>

enum {
    LOOK_MS = 100,        /* between looks at processes */
    LATE_MS = 500,        /* a rest that takes longer is a stop of this rank's own */
    LEAST_GRACE_MS = 250, /* to answer in */
    MOST_GRACE_MS = 2000,
    CALL_NAME = 200
};

typedef enum news_kind { FAILED = 1, LEFT, WHO_IS_THERE, I_AM } news_kind;

typedef struct message_news {
    int32_t kind, channel;
    int32_t from; /* world rank */
    int32_t status, rank, errnum, is_own;
    uint64_t calls;
    char text[FSDP_ERROR_TEXT];
} message_news;

_Static_assert(sizeof(message_news) <= FSDP_WIRE_NEWS, "news are small");

/* --- telling ---------------------------------------------------------------------------------- */

static void tell_all(const message_group *group, const message_news *news)
{
    fsdp_wire *wire = group->fabric->wire;
    for (int i = 0; i < group->size; i++) {
        if (i != group->rank)
            wire->ops->tell(wire, group->ranks[i], news, sizeof *news);
    }
}

static message_news news_of(message_group *group, news_kind kind)
{
    message_news news;
    memset(&news, 0, sizeof news);
    news.kind = (int32_t)kind;
    news.channel = group->channel;
    news.from = group->fabric->fabric.rank;
    news.calls = atomic_load(&group->calls);
    return news;
}

static void tell_failure(message_group *group)
{
    message_news news = news_of(group, FAILED);
    news.status = (int32_t)group->failure.status;
    news.rank = group->failure.rank;
    news.errnum = group->failure.errnum;
    news.is_own = group->is_own;
    memcpy(news.text, group->failure.text, sizeof news.text - 1);
    group->is_untold = false;
    tell_all(group, &news);
}

/* A thread that may not use the wire leaves it to one that may. */
static bool may_call(const message_fabric *fabric)
{
    return fabric->wire->ops->may_call(fabric->wire, NULL) == FSDP_OK;
}

/* --- hearing ---------------------------------------------------------------------------------- */

static message_group *find_group(message_fabric *fabric, int channel)
{
    message_group *group = fabric->groups;
    if (channel == fabric->world.channel)
        return &fabric->world;
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

static void hear_failure(message_group *group, const message_news *news)
{
    if (atomic_load(&group->has_failed) || news->status == FSDP_OK) /* a failure has a status */
        return;
    fsdp_error *err = &group->failure;
    *err = (fsdp_error){.status = (fsdp_status)news->status, .errnum = news->errnum};
    err->rank = news->is_own ? news->from : news->rank;
    memcpy(err->text, news->text, sizeof err->text - 1);
    if (news->is_own)
        fsdp_error_prefix(err, "rank %d", (int)news->from);
    atomic_store(&group->has_failed, true);
}

/* Also of a group that this rank has left or not made yet: it has begun none of its calls. */
static void answer(message_fabric *fabric, message_group *group, const message_news *asked)
{
    message_news news = news_of(group ? group : &fabric->world, I_AM);
    news.channel = asked->channel;
    news.calls = group ? news.calls : 0;
    fabric->wire->ops->tell(fabric->wire, asked->from, &news, sizeof news);
}

static void take_news(message_fabric *fabric, const message_news *news)
{
    message_group *group = find_group(fabric, news->channel);
    if (news->kind == WHO_IS_THERE)
        answer(fabric, group, news);
    int from = group ? find_member(group, news->from) : 0;
    if (!group || from == group->size)
        return;
    message_member *member = &group->members[from];
    if (news->kind == FAILED)
        hear_failure(group, news);
    if (news->kind == LEFT || news->kind == I_AM)
        member->calls = news->calls;
    if (news->kind == LEFT)
        member->exit_code = news->status;
    member->has_left |= news->kind == LEFT;
    member->has_answered |= news->kind == I_AM;
}

/* Under the lock. */
static void hear_all(message_fabric *fabric)
{
    message_news news;
    if (!may_call(fabric))
        return;
    while (fabric->wire->ops->hear(fabric->wire, &news, sizeof news))
        take_news(fabric, &news);
    if (fabric->world.is_untold)
        tell_failure(&fabric->world);
    for (message_group *group = fabric->groups; group; group = group->next) {
        if (group->is_untold)
            tell_failure(group);
    }
}

/* --- failures --------------------------------------------------------------------------------- */

void fsdp_message_fail(message_group *group, const fsdp_error *why, bool is_own, bool is_common)
{
    message_fabric *fabric = group->fabric;
    pthread_mutex_lock(&fabric->lock);
    if (!atomic_load(&group->has_failed)) {
        group->failure = *why;
        group->is_own = is_own;
        group->is_untold = !is_common;
        atomic_store(&group->has_failed, true);
        hear_all(fabric);
    }
    pthread_mutex_unlock(&fabric->lock);
}

bool fsdp_message_has_failed(message_group *group, fsdp_error *err_out)
{
    message_fabric *fabric = group->fabric;
    pthread_mutex_lock(&fabric->lock);
    hear_all(fabric);
    bool has_failed = atomic_load(&group->has_failed);
    if (has_failed)
        *err_out = group->failure;
    pthread_mutex_unlock(&fabric->lock);
    return has_failed;
}

void fsdp_message_depart(message_group *group)
{
    message_fabric *fabric = group->fabric;
    pthread_mutex_lock(&fabric->lock);
    if (may_call(fabric)) {
        message_news news = news_of(group, LEFT);
        news.status = fabric->fabric.exit_code;
        hear_all(fabric); /* tells what is untold */
        tell_all(group, &news);
    }
    pthread_mutex_unlock(&fabric->lock);
}

/* --- who is missing --------------------------------------------------------------------------- */

/* Everybody's failure now, if it is the first. */
static fsdp_status fail_all(message_group *group, const fsdp_error *why, fsdp_error *err)
{
    fsdp_message_fail(group, why, false, false);
    (void)fsdp_message_has_failed(group, err);
    return err->status;
}

static fsdp_status fail_missing(message_group *group, int member, const char *more,
                                const char *what, fsdp_error *err)
{
    char call[CALL_NAME];
    fsdp_error why = {.rank = group->ranks[member]};
    fsdp_comm_describe(&group->header, call, sizeof call);
    (void)fsdp_fail(&why, FSDP_ERR_PEER, "rank %d%s %s %s", why.rank, more, what, call);
    return fail_all(group, &why, err);
}

/* Who has begun the call before it left has sent all that it had to. */
static fsdp_status check_left(message_group *group, fsdp_error *err)
{
    for (int i = 0; i < group->size; i++) {
        const message_member *member = &group->members[i];
        if (!member->has_left || member->calls >= atomic_load(&group->calls))
            continue;
        char what[FSDP_LEFT_TEXT];
        fsdp_comm_describe_left(member->exit_code, what);
        return fail_missing(group, i, "", what, err);
    }
    return FSDP_OK;
}

static bool is_dead(const message_group *group, int member, char *name, size_t name_size)
{
    fsdp_wire *wire = group->fabric->wire;
    int rank = group->ranks[member];
    const fsdp_lifeline *line = &group->fabric->lifelines[rank];
    snprintf(name, name_size, " (process %d)", line->pid);
    if (fsdp_lifeline_has_ended(line))
        return true;
    snprintf(name, name_size, ", whose connection ended,");
    return wire->ops->has_lost && wire->ops->has_lost(wire, rank);
}

static fsdp_status check_dead(message_group *group, fsdp_error *err)
{
    for (int i = 0; i < group->size; i++) {
        char name[48];
        if (!is_dead(group, i, name, sizeof name))
            continue;
        if (fsdp_message_has_failed(group, err)) /* it may have said why */
            return err->status;
        FSDP_TRY(check_left(group, err));
        if (group->members[i].has_left)
            continue;
        return fail_missing(group, i, name, group->are_all_here ? "died in" : "died before", err);
    }
    return FSDP_OK;
}

/* --- the roll --------------------------------------------------------------------------------- */

static void call_roll(message_group *group, message_watch *watch, int64_t now_ms)
{
    int64_t grace_ms = group->fabric->fabric.deadline_ms / 10;
    grace_ms = grace_ms < LEAST_GRACE_MS ? LEAST_GRACE_MS : grace_ms;
    watch->roll_ms = now_ms + (grace_ms < MOST_GRACE_MS ? grace_ms : MOST_GRACE_MS);
    pthread_mutex_lock(&group->fabric->lock);
    for (int i = 0; i < group->size; i++)
        group->members[i].has_answered = i == group->rank;
    if (may_call(group->fabric)) {
        message_news news = news_of(group, WHO_IS_THERE);
        tell_all(group, &news);
    }
    pthread_mutex_unlock(&group->fabric->lock);
}

/* First those who say nothing, then those who are elsewhere, else the one whose message is missing. */
static int find_missing(const message_group *group, int waits_for)
{
    int elsewhere = -1;
    for (int i = group->size - 1; i >= 0; i--) {
        if (i != group->rank && group->members[i].calls < atomic_load(&group->calls))
            elsewhere = i;
    }
    for (int i = 0; i < group->size; i++) {
        if (!group->members[i].has_answered)
            return i;
    }
    return elsewhere >= 0 ? elsewhere : waits_for;
}

static bool have_all_answered(const message_group *group)
{
    bool all = true;
    for (int i = 0; i < group->size; i++)
        all &= group->members[i].has_answered;
    return all;
}

static fsdp_status end_roll(message_group *group, int waits_for, fsdp_error *err)
{
    char what[64];
    int missing = find_missing(group, waits_for);
    snprintf(what, sizeof what, "within %g s%s", group->fabric->fabric.deadline_ms / 1000.0,
             group->are_all_here ? ", in" : " to");
    return fail_missing(group, missing,
                        group->are_all_here ? " is stuck, or stopped: nothing came from it"
                                            : " is stuck, or stopped: it did not come",
                        what, err);
}

static fsdp_status check_time(message_group *group, message_watch *watch, int waits_for,
                              fsdp_error *err)
{
    int64_t now_ms = fsdp_now_ms();
    if (now_ms < watch->until_ms)
        return FSDP_OK;
    if (watch->roll_ms == 0)
        call_roll(group, watch, now_ms);
    else if (now_ms >= watch->roll_ms || have_all_answered(group))
        return end_roll(group, waits_for, err);
    return FSDP_OK;
}

/* --- waiting ---------------------------------------------------------------------------------- */

static void note_move(const message_group *group, message_watch *watch)
{
    int64_t now_ms = fsdp_now_ms();
    watch->idle = 0;
    watch->roll_ms = 0;
    watch->until_ms = now_ms + group->fabric->fabric.deadline_ms;
    watch->look_ms = now_ms + LOOK_MS;
}

static void rest(const message_group *group, message_watch *watch)
{
    fsdp_wire *wire = group->fabric->wire;
    int64_t before_ms = fsdp_now_ms();
    wire->ops->rest(wire, watch->idle++);
    int64_t late_ms = fsdp_now_ms() - before_ms;
    if (late_ms > LATE_MS) /* nobody else's fault */
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
    rest(group, watch);
    return FSDP_OK;
}

/*
 * The watch: a thread per rank that finds failures, tells them to the watches of all ranks, and aborts NCCL's
 * communicators of groups that have failed. See comm_nccl.h.
 */
#include "runtime/comm_nccl/comm_nccl.h"

#include <string.h>
#include <time.h>

#include "base/core/clock.h"

enum { SLOWEST_MS = 100, FASTEST_MS = 2, PER_DEADLINE = 16, HOLD_MS = 1000, ABORT_WAIT_MS = 1000 };

/* --- this rank's groups ------------------------------------------------------------------------- */

/* Errors that NCCL itself has found. A thread that is in a call of NCCL finds them by itself. */
static void look_for_error(nccl_group *group)
{
    const nccl_transport *transport = group->transport;
    fsdp_nccl_result state = FSDP_NCCL_SUCCESS;
    fsdp_error why = {0};
    if (pthread_mutex_trylock(&group->calling) != 0)
        return;
    if (group->handle)
        state = fsdp_nccl_poll(group);
    pthread_mutex_unlock(&group->calling);
    if (state == FSDP_NCCL_SUCCESS || state == FSDP_NCCL_IN_PROGRESS)
        return;
    (void)fsdp_nccl_fail(transport, state, &why);
    fsdp_nccl_group_fail(group, &why,
                         state == FSDP_NCCL_REMOTE_ERROR ? FSDP_NCCL_REMOTE : FSDP_NCCL_OWN);
}

/* With the group's lock. */
static bool is_late(const nccl_group *group, int64_t now_ms)
{
    const nccl_transport *transport = group->transport;
    const int64_t deadline_ms = atomic_load(&transport->base.deadline_ms);
    if (group->done == group->issued)
        return false;
    int64_t from_ms = group->pending[group->done % FSDP_NCCL_PENDING].since_ms;
    from_ms = group->progress_ms > from_ms ? group->progress_ms : from_ms;
    from_ms = transport->others_busy_until_ms > from_ms ? transport->others_busy_until_ms : from_ms;
    return now_ms > from_ms + deadline_ms;
}

/* A remote failure is held back for a moment, in which the beat of the lost rank may be missed. */
static bool is_told_now(nccl_group *group, int64_t now_ms)
{
    int64_t hold_ms = atomic_load(&group->transport->base.deadline_ms) / 2;
    hold_ms = hold_ms > HOLD_MS ? HOLD_MS : hold_ms;
    if (group->origin == FSDP_NCCL_REMOTE && group->remote_ms == 0)
        group->remote_ms = now_ms;
    return group->origin == FSDP_NCCL_OWN ||
           (group->origin == FSDP_NCCL_REMOTE && now_ms >= group->remote_ms + hold_ms);
}

/* Late calls go before others that are pending, and the oldest one goes first. */
static void look_at_pending(const nccl_group *group, int64_t now_ms, int64_t *oldest_ms,
                            nccl_beat *mine)
{
    int64_t since_ms = group->pending[group->done % FSDP_NCCL_PENDING].since_ms;
    bool late = is_late(group, now_ms);
    if (group->done == group->issued || late < mine->is_late)
        return;
    if (mine->is_pending && late == mine->is_late && since_ms >= *oldest_ms)
        return;
    *oldest_ms = since_ms;
    mine->is_pending = 1;
    mine->is_late = late;
    mine->group = group->id;
    mine->number = group->done;
}

/* Failures go before calls. */
static void look_at_group(nccl_group *group, int64_t now_ms, int64_t *oldest_ms, nccl_beat *mine)
{
    look_for_error(group);
    pthread_mutex_lock(&group->lock);
    fsdp_nccl_advance(group);
    if (mine->failure != FSDP_NCCL_NO_FAILURE) {
        /* it is the one that is told */
    } else if (is_told_now(group, now_ms)) {
        *mine = (nccl_beat){.failure = (int32_t)group->origin, .group = group->id};
    } else if (group->origin == FSDP_NCCL_NO_FAILURE) {
        look_at_pending(group, now_ms, oldest_ms, mine);
    }
    pthread_mutex_unlock(&group->lock);
}

static nccl_beat look(nccl_transport *transport, bool leaves)
{
    int64_t now_ms = fsdp_now_ms(), oldest_ms = 0;
    int64_t busy_ms = atomic_load(&transport->busy_until_ms) - now_ms;
    nccl_beat mine;
    memset(&mine, 0, sizeof mine);
    pthread_mutex_lock(&transport->lock);
    for (nccl_group *group = transport->groups; group; group = group->next)
        look_at_group(group, now_ms, &oldest_ms, &mine);
    pthread_mutex_unlock(&transport->lock);
    mine.busy_ms = busy_ms <= 0 ? 0 : busy_ms > INT32_MAX ? INT32_MAX : (int32_t)busy_ms;
    mine.leaves = leaves;
    if (leaves && transport->base.exit_code != 0) {
        mine.failure = FSDP_NCCL_OWN;
        mine.is_failed_rank = 1;
        mine.is_pending = mine.is_late = 0;
    }
    return mine;
}

/* --- beats -------------------------------------------------------------------------------------- */

/* The rank whose failure all take: a cause goes before what NCCL noticed of it. -1: none. */
static int find_teller(const nccl_transport *transport)
{
    int teller = -1;
    for (int i = 0; i < transport->base.size; i++) {
        int32_t failure = transport->beats[i].failure;
        if (failure > (teller < 0 ? FSDP_NCCL_NO_FAILURE : transport->beats[teller].failure))
            teller = i;
    }
    return teller;
}

/* This rank's own failure, which the others are told. */
static void take_failure(nccl_transport *transport, const nccl_beat *mine, fsdp_error *why)
{
    char left[FSDP_EXIT_TEXT];
    const char *reason = transport->base.exit_reason;
    if (mine->is_failed_rank) {
        fsdp_comm_describe_exit(transport->base.exit_code, left);
        (void)fsdp_fail(why, FSDP_ERR_PEER, "rank %d has left with %s%s%s", transport->base.rank,
                        left, reason ? ": " : "", reason ? reason : "");
        return;
    }
    pthread_mutex_lock(&transport->lock);
    nccl_group *group = fsdp_nccl_find_group(transport, mine->group);
    if (group) {
        pthread_mutex_lock(&group->lock);
        group->origin = FSDP_NCCL_TOLD;
        *why = group->failure;
        pthread_mutex_unlock(&group->lock);
        fsdp_comm_abort(group->inner, why); /* the first one counts */
    }
    pthread_mutex_unlock(&transport->lock);
}

/* Collective: all ranks learn the teller's failure. */
static void share_failure(nccl_transport *transport, int teller)
{
    const nccl_beat *told = &transport->beats[teller];
    fsdp_error why, lost = {0};
    memset(&why, 0, sizeof why);
    if (teller == transport->base.rank)
        take_failure(transport, told, &why);
    const fsdp_collective call = {.kind = FSDP_BROADCAST,
                                  .dtype = FSDP_U8,
                                  .in = &why,
                                  .out = &why,
                                  .count = sizeof why,
                                  .root = teller,
                                  .unit = "the watch over NCCL"};
    if (fsdp_comm_run_now(transport->watches, &call, &lost) != FSDP_OK) {
        atomic_store(&transport->is_whole, false);
        fsdp_nccl_fail_all(transport, &lost);
        return;
    }
    why.text[sizeof why.text - 1] = '\0';
    why.rank = teller;
    if (told->is_failed_rank) {
        fsdp_nccl_fail_all(transport, &why);
        return;
    }
    if (teller != transport->base.rank)
        fsdp_error_prefix(&why, "rank %d", teller);
    pthread_mutex_lock(&transport->lock);
    nccl_group *group = fsdp_nccl_find_group(transport, told->group);
    if (group)
        fsdp_nccl_group_fail(group, &why, FSDP_NCCL_TOLD);
    pthread_mutex_unlock(&transport->lock);
}

/* Until when any rank is busy; who leaves, after whom no beat comes any more. */
static bool note_beats(nccl_transport *transport)
{
    int64_t now_ms = fsdp_now_ms();
    bool is_late = false;
    for (int i = 0; i < transport->base.size; i++) {
        const nccl_beat *beat = &transport->beats[i];
        if (beat->busy_ms > 0 && now_ms + beat->busy_ms > transport->others_busy_until_ms)
            transport->others_busy_until_ms = now_ms + beat->busy_ms;
        is_late |= beat->is_late;
    }
    return is_late;
}

static void note_leaves(nccl_transport *transport)
{
    for (int i = 0; i < transport->base.size; i++) {
        if (!transport->beats[i].leaves)
            continue;
        transport->has_left[i] = true;
        atomic_store(&transport->is_whole, false);
    }
}

static void exchange_beats(nccl_transport *transport, const nccl_beat *mine)
{
    atomic_store(&transport->inner->deadline_ms, atomic_load(&transport->base.deadline_ms));
    if (!fsdp_nccl_gather(transport, mine, sizeof *mine, transport->beats))
        return;
    bool is_late = note_beats(transport);
    int teller = find_teller(transport);
    if (teller >= 0)
        share_failure(transport, teller);
    else if (is_late)
        fsdp_nccl_judge(transport);
    note_leaves(transport);
}

/* --- the end of NCCL's communicators -------------------------------------------------------------- */

/* By trying, since ThreadSanitizer does not know pthread_mutex_clocklock. */
static bool take_right_to_call(nccl_group *group)
{
    int64_t until_ms = fsdp_now_ms() + ABORT_WAIT_MS;
    for (unsigned naps = 0; pthread_mutex_trylock(&group->calling) != 0; naps++) {
        if (fsdp_now_ms() >= until_ms)
            return false;
        fsdp_nccl_nap(naps);
    }
    return true;
}

/* A thread that NCCL does not let go of would hold the right to call for good: abort ends its call, too. */
static void abort_group(nccl_group *group)
{
    bool is_mine = take_right_to_call(group);
    fsdp_nccl_comm handle = group->handle;
    group->handle = NULL;
    if (handle)
        (void)group->transport->nccl->CommAbort(handle);
    if (is_mine)
        pthread_mutex_unlock(&group->calling);
}

/* The failures that nobody can be told any more count as told. */
static void end_failed_groups(nccl_transport *transport)
{
    bool is_whole = atomic_load(&transport->is_whole);
    pthread_mutex_lock(&transport->lock);
    for (nccl_group *group = transport->groups; group; group = group->next) {
        pthread_mutex_lock(&group->lock);
        const fsdp_error why = group->failure;
        const bool is_untold = group->origin == FSDP_NCCL_OWN || group->origin == FSDP_NCCL_REMOTE;
        if (is_untold && !is_whole)
            group->origin = FSDP_NCCL_TOLD;
        pthread_mutex_unlock(&group->lock);
        if (!fsdp_nccl_group_has_failed(group, NULL))
            continue; /* also of a remote one: work that is aborted goes on with undefined data */
        if (group->handle)
            abort_group(group);
        if (is_untold && !is_whole)
            fsdp_comm_abort(group->inner, &why);
    }
    pthread_mutex_unlock(&transport->lock);
}

/* --- the thread --------------------------------------------------------------------------------- */

/* True when this rank leaves. */
static bool sleep_a_while(nccl_transport *transport)
{
    int ms = atomic_load(&transport->base.deadline_ms) / PER_DEADLINE;
    ms = ms > SLOWEST_MS ? SLOWEST_MS : ms < FASTEST_MS ? FASTEST_MS : ms;
    struct timespec until = fsdp_timespec(fsdp_now_ms() + ms);
    pthread_mutex_lock(&transport->lock);
    if (!transport->is_leaving)
        (void)pthread_cond_timedwait(&transport->changed, &transport->lock, &until);
    bool leaves = transport->is_leaving;
    pthread_mutex_unlock(&transport->lock);
    return leaves;
}

static void *watch(void *context)
{
    nccl_transport *transport = context;
    for (bool leaves = false; !leaves;) {
        leaves = sleep_a_while(transport);
        const nccl_beat mine = look(transport, leaves);
        if (atomic_load(&transport->is_whole))
            exchange_beats(transport, &mine);
        else if (mine.is_late)
            fsdp_nccl_judge_alone(transport, &mine);
        end_failed_groups(transport);
    }
    return NULL;
}

fsdp_status fsdp_nccl_watch_begin(nccl_transport *transport, fsdp_error *err)
{
    int failed = pthread_create(&transport->watch, NULL, watch, transport);
    if (failed)
        return fsdp_fail_errno(err, failed, "cannot start the thread that watches NCCL");
    transport->has_watch = true;
    return FSDP_OK;
}

void fsdp_nccl_watch_end(nccl_transport *transport)
{
    if (!transport->has_watch)
        return;
    pthread_mutex_lock(&transport->lock);
    transport->is_leaving = true;
    pthread_cond_signal(&transport->changed);
    pthread_mutex_unlock(&transport->lock);
    (void)pthread_join(transport->watch, NULL);
    transport->has_watch = false;
}

/*
 * The watch: a thread per rank that finds failures, tells them to the watches of all ranks, and aborts NCCL's
 * communicators of groups that have failed. See comm_nccl.h.
 */
#include "runtime/comm_nccl/comm_nccl.h"
#include "base/core/clock.h"
#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* === verdicts ================================================================================= */

/*
 * Names the rank because of which a call is late: the watches of all ranks compare how far the members of its
 * group have come. All compute the same verdict from the same numbers.
 */

#define WATCH "the watch over NCCL"

enum { MOST_HOPS = 16 };

typedef enum verdict_kind {
    NOT_LATE = 0, /* it has ended meanwhile */
    STARTING,     /* all ranks gave the call, and NCCL has more time to connect */
    UNFINISHED,   /* all ranks gave the call */
    MISSING,
    DIFFERS
} verdict_kind;

typedef struct verdict {
    verdict_kind kind;
    uint64_t group;
    fsdp_error why;
} verdict;

/* --- what all ranks know ---------------------------------------------------------------------- */

/* With the transport's lock; NULL: this rank is not a member. */
static nccl_group *nccl_find_group(nccl_transport *transport, uint64_t id)
{
    nccl_group *group = transport->groups;
    while (group && group->id != id)
        group = group->next;
    return group;
}

/* In a call, the error begins with it. */
static void fail_in_call(nccl_group *group, fsdp_error why, nccl_origin origin)
{
    char call[200];
    pthread_mutex_lock(&group->lock);
    fsdp_nccl_advance(group);
    if (group->done < group->issued) {
        fsdp_comm_describe(&group->pending[group->done % FSDP_NCCL_PENDING].header, call,
                           sizeof call);
        fsdp_error_prefix(&why, "in %s", call);
    }
    pthread_mutex_unlock(&group->lock);
    fsdp_nccl_group_fail(group, &why, origin);
}

/* Fails all groups with what the other ranks notice, too. */
static void nccl_fail_all(nccl_transport *transport, const fsdp_error *why)
{
    pthread_mutex_lock(&transport->lock);
    for (nccl_group *group = transport->groups; group; group = group->next)
        fail_in_call(group, *why, FSDP_NCCL_TOLD);
    pthread_mutex_unlock(&transport->lock);
}

/* --- the way through one rank per host --- */

static fsdp_status gather_parts(fsdp_comm *comm, const void *mine, size_t size,
                                const int64_t *bytes, void *all, fsdp_error *err)
{
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = FSDP_U8,
                                  .in = mine,
                                  .out = all,
                                  .count = (int64_t)size,
                                  .counts = bytes,
                                  .unit = WATCH};
    return fsdp_comm_run_now(comm, &call, err);
}

static fsdp_status send_to_all(fsdp_comm *comm, int root, void *data, size_t size, fsdp_error *err)
{
    const fsdp_collective call = {.kind = FSDP_BROADCAST,
                                  .dtype = FSDP_U8,
                                  .in = data,
                                  .out = data,
                                  .count = (int64_t)size,
                                  .root = root,
                                  .unit = WATCH};
    return fsdp_comm_run_now(comm, &call, err);
}

/* Leaders exchange what the ranks of their hosts have sent, or the failure of a host. `message` is what the
 * ranks of this host get then: the first failure, and what all ranks have sent, by `order`. */
static void run_leaders(nccl_transport *transport, size_t size, const fsdp_error *lost)
{
    nccl_hosts *hosts = &transport->hosts;
    fsdp_error first = {0};
    unsigned char *to = hosts->message + sizeof first;
    const unsigned char *part = hosts->everywhere;
    for (int i = 0; i < hosts->count; i++)
        hosts->bytes[i] = (int64_t)sizeof *lost + hosts->sizes[i] * (int64_t)size;
    memcpy(hosts->here, lost, sizeof *lost);
    (void)gather_parts(hosts->leaders, hosts->here,
                       sizeof *lost + (size_t)hosts->local->size * size, hosts->bytes,
                       hosts->everywhere, &first);
    for (int i = 0; i < hosts->count && first.status == FSDP_OK; i++) {
        const size_t sent = (size_t)hosts->sizes[i] * size;
        memcpy(&first, part, sizeof first);
        memcpy(to, part + sizeof first, sent);
        part += sizeof first + sent;
        to += sent;
    }
    memcpy(hosts->message, &first, sizeof first);
}

/* The ranks of a host send to its leader, leaders exchange, and a leader sends to the ranks of its host.
 * Failures go the same way, since the other hosts learn them in no other. A rank that waits for one that
 * waits itself is more patient: otherwise it would name that one before it hears of the rank at fault. */
static fsdp_status gather_by_hosts(nccl_transport *transport, const void *mine, size_t size,
                                   void *all, fsdp_error *err)
{
    nccl_hosts *hosts = &transport->hosts;
    const size_t ranks = (size_t)transport->base.size;
    fsdp_error lost;
    memset(&lost, 0, sizeof lost);
    hosts->local->patience_ms = 0;
    (void)gather_parts(hosts->local, mine, size, NULL, hosts->here + sizeof lost, &lost);
    if (hosts->leaders) {
        hosts->leaders->patience_ms = hosts->patience_ms;
        run_leaders(transport, size, &lost);
    }
    hosts->local->patience_ms = 2 * hosts->patience_ms;
    if (lost.status == FSDP_OK)
        (void)send_to_all(hosts->local, 0, hosts->message, sizeof lost + ranks * size, &lost);
    if (lost.status == FSDP_OK)
        memcpy(&lost, hosts->message, sizeof lost);
    for (size_t i = 0; i < ranks && lost.status == FSDP_OK; i++)
        memcpy((unsigned char *)all + (size_t)hosts->order[i] * size,
               hosts->message + sizeof lost + i * size, size);
    *err = lost;
    return lost.status;
}

/* Collective among the watches; false when it failed, which fails all groups. */
static bool nccl_gather(nccl_transport *transport, const void *mine, size_t size, void *all)
{
    fsdp_error why = {0};
    if ((transport->uses_hosts
             ? gather_by_hosts(transport, mine, size, all, &why)
             : gather_parts(transport->watches, mine, size, NULL, all, &why)) == FSDP_OK)
        return true;
    atomic_store(&transport->is_whole, false);
    nccl_fail_all(transport, &why);
    return false;
}

static nccl_progress progress_of(nccl_transport *transport, uint64_t id, uint64_t number)
{
    nccl_progress mine;
    memset(&mine, 0, sizeof mine);
    pthread_mutex_lock(&transport->lock);
    nccl_group *group = nccl_find_group(transport, id);
    mine.is_member = group || transport->groups_made <= id; /* all ranks create all groups */
    if (!mine.is_member && transport->closed[id] > 0) {
        mine.is_member = mine.has_closed = 1;
        mine.issued = mine.done = transport->closed[id] - 1;
    }
    if (group) {
        pthread_mutex_lock(&group->lock);
        fsdp_nccl_advance(group);
        mine.issued = group->issued;
        mine.done = group->done;
        if (number >= group->done && number < group->issued) {
            const nccl_pending *late = &group->pending[number % FSDP_NCCL_PENDING];
            mine.header = late->header;
            mine.is_starting = late->is_starting;
            mine.waits_ms = fsdp_now_ms() - late->since_ms;
        }
        pthread_mutex_unlock(&group->lock);
    }
    pthread_mutex_unlock(&transport->lock);
    return mine;
}

/* --- the verdict ------------------------------------------------------------------------------ */

static int deadline_of(const nccl_transport *transport, bool is_starting)
{
    const int deadline_ms = atomic_load(&transport->base.deadline_ms);
    return is_starting && transport->creation_ms > deadline_ms ? transport->creation_ms
                                                               : deadline_ms;
}

static fsdp_error describe_missing(const nccl_transport *transport, int rank,
                                   const fsdp_comm_header *header)
{
    char what[96];
    bool has_left = transport->has_left[rank] || transport->progress[rank].has_closed;
    snprintf(what, sizeof what, "did not come within %g s to",
             deadline_of(transport, false) / 1000.0);
    const fsdp_comm_loss loss = {.rank = rank,
                                 .what =
                                     has_left ? "has left the group: it takes no part in" : what,
                                 .hint = has_left ? NULL : FSDP_DEADLINE_HINT};
    return fsdp_comm_describe_loss(&loss, header);
}

static fsdp_error describe_unfinished(const nccl_transport *transport, int rank,
                                      const nccl_progress *late, bool all_came, bool is_starting)
{
    char what[128];
    snprintf(what, sizeof what, "got no result from NCCL within %g s%s",
             deadline_of(transport, is_starting && all_came) / 1000.0,
             all_came ? ", though all ranks came to" : ", in");
    const fsdp_comm_loss loss = {
        .rank = rank, .what = what, .hint = "a GPU or a connection between two hangs"};
    return fsdp_comm_describe_loss(&loss, &late->header);
}

/* The first member that has not given the call; -1: none. */
static int find_missing(const nccl_transport *transport, uint64_t number)
{
    for (int i = 0; i < transport->base.size; i++)
        if (transport->progress[i].is_member && transport->progress[i].issued <= number)
            return i;
    return -1;
}

/* NCCL has not launched the call on some rank. */
static bool is_starting(const nccl_transport *transport)
{
    bool is_starting = false;
    for (int i = 0; i < transport->base.size; i++)
        is_starting |= transport->progress[i].is_starting != 0;
    return is_starting;
}

/* Compares the calls of those ranks where it is pending, and names the first that differs from the first. */
static bool is_mismatch(const nccl_transport *transport, uint64_t number, verdict *out)
{
    int first = -1;
    for (int i = 0; i < transport->base.size; i++) {
        const nccl_progress *one = &transport->progress[i];
        if (!one->is_member || one->done > number || one->issued <= number)
            continue;
        if (first < 0)
            first = i;
        if (memcmp(&one->header, &transport->progress[first].header, sizeof one->header) == 0)
            continue;
        out->why.status =
            fsdp_comm_differ(first, &transport->progress[first].header, i, &one->header, &out->why);
        return true;
    }
    return false;
}

/* Collective among the watches; false when that failed. */
static bool judge_call(nccl_transport *transport, int asker, verdict *out)
{
    const nccl_beat *asked = &transport->beats[asker];
    const nccl_progress mine = progress_of(transport, asked->group, asked->number);
    *out = (verdict){.group = asked->group};
    if (!nccl_gather(transport, &mine, sizeof mine, transport->progress))
        return false;
    const nccl_progress *late = &transport->progress[asker];
    int missing = find_missing(transport, asked->number);
    bool starts = is_starting(transport);
    if (!late->is_member || late->done > asked->number)
        return true;
    if (is_mismatch(transport, asked->number, out)) {
        out->kind = DIFFERS;
    } else if (missing >= 0) {
        out->kind = MISSING;
        out->why = describe_missing(transport, missing, &late->header);
    } else if (starts && late->waits_ms <= deadline_of(transport, true)) {
        out->kind = STARTING;
    } else {
        out->kind = UNFINISHED;
        out->why = describe_unfinished(transport, asker, late, true, starts);
    }
    return true;
}

/*
 * A missing rank may itself wait for a call of another group, in which a third one is missing, or which NCCL
 * connects. Follows such a chain from rank `asker` to its end; groups_out gets the groups on the way.
 * Collective.
 */
static bool follow_chain(nccl_transport *transport, int asker, verdict *chosen,
                         uint64_t groups_out[MOST_HOPS], int *hops_out)
{
    verdict next;
    if (!judge_call(transport, asker, chosen))
        return false;
    groups_out[0] = chosen->group;
    *hops_out = 1;
    while (chosen->kind == MISSING && *hops_out < MOST_HOPS) {
        int missing = chosen->why.rank;
        if (!transport->beats[missing].is_pending)
            break;
        if (!judge_call(transport, missing, &next))
            return false;
        if (next.kind != STARTING && next.kind < MISSING &&
            !(next.kind == UNFINISHED && transport->beats[missing].is_late))
            break;
        *chosen = next;
        groups_out[(*hops_out)++] = next.group;
    }
    return true;
}

/* A rank is late: finds the one because of which it is, from the beats of all, and fails their groups. */
static void nccl_judge(nccl_transport *transport)
{
    uint64_t groups[MOST_HOPS];
    verdict chosen;
    int asker = 0, hops = 0;
    while (!transport->beats[asker].is_late)
        asker++;
    if (!follow_chain(transport, asker, &chosen, groups, &hops) || chosen.kind <= STARTING)
        return;
    pthread_mutex_lock(&transport->lock);
    for (int i = 0; i < hops; i++) {
        nccl_group *group = nccl_find_group(transport, groups[i]);
        if (group)
            fsdp_nccl_group_fail(group, &chosen.why, FSDP_NCCL_TOLD);
    }
    pthread_mutex_unlock(&transport->lock);
}

/* As far as this rank knows alone, after another has left. */
static void nccl_judge_alone(nccl_transport *transport, const nccl_beat *mine)
{
    const nccl_progress late = progress_of(transport, mine->group, mine->number);
    if (late.done > mine->number) /* it has ended meanwhile */
        return;
    pthread_mutex_lock(&transport->lock);
    nccl_group *group = nccl_find_group(transport, mine->group);
    if (group) {
        int left = -1;
        for (int i = 0; i < group->comm->size && left < 0; i++)
            left = transport->has_left[group->comm->ranks[i]] ? group->comm->ranks[i] : -1;
        const fsdp_error why =
            left >= 0 ? describe_missing(transport, left, &late.header)
                      : describe_unfinished(transport, transport->base.rank, &late, false, false);
        fsdp_nccl_group_fail(group, &why, FSDP_NCCL_OWN);
    }
    pthread_mutex_unlock(&transport->lock);
}

/* === the watch ================================================================================ */

enum {
    DIRECT_RANKS = 64,
    SLOWEST_MS = 100,
    SLOWEST_OF_HOSTS_MS = 1000,
    FASTEST_MS = 2,
    PER_DEADLINE = 16,
    HOLD_MS = 1000,
    LEAST_GRACE_MS = 250,
    MOST_GRACE_MS = 2000
};

/* --- this rank's groups ------------------------------------------------------------------------- */

/* Errors that NCCL itself has found. A thread that is in a call of NCCL finds them by itself. */
static void look_for_error(nccl_group *group)
{
    const nccl_transport *transport = group->transport;
    fsdp_nccl_result state = FSDP_NCCL_SUCCESS;
    fsdp_error why = {0};
    if (pthread_mutex_trylock(&group->calling) != 0)
        return;
    fsdp_nccl_comm handle = atomic_load(&group->handle);
    if (handle)
        state = fsdp_nccl_poll(transport->nccl, handle);
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
    const int64_t most_ms = HOLD_MS + 2 * group->transport->beat_ms;
    hold_ms = hold_ms > most_ms ? most_ms : hold_ms;
    if (group->origin == FSDP_NCCL_REMOTE && group->remote_ms == 0)
        group->remote_ms = now_ms;
    return group->origin == FSDP_NCCL_OWN || group->origin == FSDP_NCCL_SPREAD ||
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

static void describe_leave(const nccl_transport *transport, fsdp_error *out)
{
    char left[FSDP_EXIT_TEXT];
    const char *reason = transport->base.exit_reason;
    fsdp_comm_describe_exit(transport->base.exit_code, left);
    (void)fsdp_fail(out, FSDP_ERR_PEER, "rank %d has left with %s%s%s", transport->base.rank, left,
                    reason ? ": " : "", reason ? reason : "");
}

/* This rank's own failure, which the others are told. */
static void take_failure(nccl_transport *transport, const nccl_beat *mine, fsdp_error *why)
{
    if (mine->is_failed_rank) {
        describe_leave(transport, why);
        return;
    }
    pthread_mutex_lock(&transport->lock);
    nccl_group *group = nccl_find_group(transport, mine->group);
    if (group) {
        pthread_mutex_lock(&group->lock);
        group->origin = FSDP_NCCL_TOLD;
        *why = group->failure;
        pthread_mutex_unlock(&group->lock);
        if (mine->failure == FSDP_NCCL_SPREAD)
            group->aborts_inner = true;
        else
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
    if (send_to_all(transport->watches, teller, &why, sizeof why, &lost) != FSDP_OK) {
        atomic_store(&transport->is_whole, false);
        nccl_fail_all(transport, &lost);
        return;
    }
    why.text[sizeof why.text - 1] = '\0';
    if (told->failure != FSDP_NCCL_SPREAD)
        why.rank = teller;
    if (told->is_failed_rank) {
        nccl_fail_all(transport, &why);
        return;
    }
    if (teller != transport->base.rank && told->failure != FSDP_NCCL_SPREAD)
        fsdp_error_prefix(&why, "rank %d", teller);
    pthread_mutex_lock(&transport->lock);
    nccl_group *group = nccl_find_group(transport, told->group);
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

/* Beats are at most so far apart. */
static int beat_interval(const nccl_transport *transport)
{
    const int ms = atomic_load(&transport->base.deadline_ms) / PER_DEADLINE;
    return ms > transport->beat_ms ? transport->beat_ms : ms < FASTEST_MS ? FASTEST_MS : ms;
}

/* After a deadline the inner transport asks the silent ranks again; ranks begin an exchange up to a beat
 * apart. */
static int patience_of(const nccl_transport *transport)
{
    int grace_ms = atomic_load(&transport->base.deadline_ms) / 10;
    grace_ms = grace_ms < LEAST_GRACE_MS ? LEAST_GRACE_MS : grace_ms;
    return 2 * (grace_ms < MOST_GRACE_MS ? grace_ms : MOST_GRACE_MS) + beat_interval(transport);
}

/* The inner group takes this rank for the one at fault. So a failure that spread reaches it last: when all
 * have come to the next exchange, they know the failure. */
static void abort_inner_groups(nccl_transport *transport)
{
    pthread_mutex_lock(&transport->lock);
    for (nccl_group *group = transport->groups; group; group = group->next) {
        fsdp_error why = {0};
        if (group->aborts_inner && fsdp_nccl_group_has_failed(group, &why))
            fsdp_comm_abort(group->inner, &why);
        group->aborts_inner = false;
    }
    pthread_mutex_unlock(&transport->lock);
}

static void exchange_beats(nccl_transport *transport, const nccl_beat *mine)
{
    atomic_store(&transport->inner->deadline_ms, atomic_load(&transport->base.deadline_ms));
    transport->hosts.patience_ms = patience_of(transport);
    const bool is_exchanged = nccl_gather(transport, mine, sizeof *mine, transport->beats);
    abort_inner_groups(transport);
    if (!is_exchanged)
        return;
    bool is_late = note_beats(transport);
    int teller = find_teller(transport);
    if (teller >= 0)
        share_failure(transport, teller);
    else if (is_late)
        nccl_judge(transport);
    note_leaves(transport);
}

/* --- the end of NCCL's communicators -------------------------------------------------------------- */

/* With the transport's lock: a failed group whose failure has not spread yet; NULL: there is none. */
static nccl_group *find_newly_failed(nccl_transport *transport)
{
    nccl_group *group = transport->groups;
    while (group && (group->has_spread || !fsdp_nccl_group_has_failed(group, NULL)))
        group = group->next;
    return group;
}

/* With the transport's lock: groups with calls under way fail with another one, since the end of a
 * communicator may wait for the whole GPU. */
static void spread_failures(nccl_transport *transport)
{
    for (nccl_group *failed; (failed = find_newly_failed(transport));) {
        fsdp_error why = {0};
        failed->has_spread = true;
        if (!fsdp_nccl_group_has_failed(failed, &why))
            continue;
        for (nccl_group *group = transport->groups; group; group = group->next) {
            pthread_mutex_lock(&group->lock);
            fsdp_nccl_advance(group);
            const bool is_under_way = group->done < group->issued;
            pthread_mutex_unlock(&group->lock);
            if (group == failed || !is_under_way || fsdp_nccl_group_has_failed(group, NULL))
                continue;
            group->has_spread = true;
            fsdp_nccl_group_fail(group, &why, FSDP_NCCL_SPREAD);
        }
    }
}

/* The failures that nobody can be told any more count as told. */
static void end_failed_groups(nccl_transport *transport)
{
    bool is_whole = atomic_load(&transport->is_whole);
    nccl_group *ended = NULL;
    pthread_mutex_lock(&transport->lock);
    spread_failures(transport);
    for (nccl_group *group = transport->groups; group; group = group->next) {
        pthread_mutex_lock(&group->lock);
        const fsdp_error why = group->failure;
        const bool is_untold = group->origin > FSDP_NCCL_TOLD;
        if (is_untold && !is_whole)
            group->origin = FSDP_NCCL_TOLD;
        pthread_mutex_unlock(&group->lock);
        if (!fsdp_nccl_group_has_failed(group, NULL))
            continue; /* also of a remote one: work that is aborted continues with undefined data */
        (void)fsdp_nccl_take_handle(group, &ended);
        if (is_untold && !is_whole)
            fsdp_comm_abort(group->inner, &why);
    }
    pthread_mutex_unlock(&transport->lock);
    fsdp_nccl_end(ended, true);
}

/* A rank that leaves with a failure ends all its groups together. */
static void fail_before_leaving(nccl_transport *transport)
{
    fsdp_error why = {.rank = transport->base.rank};
    describe_leave(transport, &why);
    nccl_fail_all(transport, &why);
}

/* --- the thread --------------------------------------------------------------------------------- */

/* True when this rank leaves. */
static bool sleep_a_while(nccl_transport *transport)
{
    struct timespec until = fsdp_timespec(fsdp_now_ms() + beat_interval(transport));
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
            nccl_judge_alone(transport, &mine);
        if (leaves && transport->base.exit_code != 0)
            fail_before_leaving(transport);
        end_failed_groups(transport);
    }
    return NULL;
}

/* --- the groups of the watches ------------------------------------------------------------------ */

/* Local: fills order, sizes and count from the hosts of all ranks. */
static void sort_hosts(nccl_hosts *hosts, const uint64_t *host_of, int ranks)
{
    int n = 0;
    for (int first = 0; first < ranks; first++) {
        int before = 0;
        while (host_of[before] != host_of[first])
            before++;
        if (before < first)
            continue;
        const int begin = n;
        for (int rank = first; rank < ranks; rank++)
            if (host_of[rank] == host_of[first])
                hosts->order[n++] = rank;
        hosts->sizes[hosts->count++] = n - begin;
    }
}

/* Collective: the groups of hosts with `size` ranks; group: capacity for all ranks. */
static fsdp_status connect_hosts_of(nccl_transport *transport, int size, int *group,
                                    fsdp_error *err)
{
    nccl_hosts *hosts = &transport->hosts;
    fsdp_comm *made = NULL;
    int count = 0;
    for (int i = 0, at = 0; i < hosts->count; at += hosts->sizes[i++])
        if (hosts->sizes[i] == size)
            memcpy(group + count++ * size, hosts->order + at, (size_t)size * sizeof *group);
    if (count == 0)
        return FSDP_OK;
    FSDP_TRY(transport->inner->ops->comm_create(transport->inner, group, size, count, &made, err));
    hosts->local = made ? made : hosts->local;
    return FSDP_OK;
}

static fsdp_status connect_hosts(nccl_transport *transport, int *group, fsdp_error *err)
{
    nccl_hosts *hosts = &transport->hosts;
    for (int size = 1; size <= transport->base.size; size++)
        FSDP_TRY(connect_hosts_of(transport, size, group, err));
    for (int i = 0, at = 0; i < hosts->count; at += hosts->sizes[i++])
        group[i] = hosts->order[at];
    return transport->inner->ops->comm_create(transport->inner, group, hosts->count, 1,
                                              &hosts->leaders, err);
}

static fsdp_status open_hosts(nccl_transport *transport, const fsdp_nccl_spec *spec,
                              fsdp_error *err)
{
    nccl_hosts *hosts = &transport->hosts;
    const size_t n = (size_t)transport->base.size;
    const size_t most =
        sizeof(nccl_beat) > sizeof(nccl_progress) ? sizeof(nccl_beat) : sizeof(nccl_progress);
    uint64_t *host_of = fsdp_alloc(n, sizeof *host_of);
    int *group = fsdp_alloc(n, sizeof *group);
    hosts->order = fsdp_alloc(n, sizeof *hosts->order);
    hosts->sizes = fsdp_alloc(n, sizeof *hosts->sizes);
    hosts->bytes = fsdp_alloc(n, sizeof *hosts->bytes);
    hosts->here = fsdp_alloc(n, sizeof(fsdp_error) + most);
    hosts->everywhere = fsdp_alloc(n, sizeof(fsdp_error) + most);
    hosts->message = fsdp_alloc(n, sizeof(fsdp_error) + most);
    const bool has_all = host_of && group && hosts->order && hosts->sizes && hosts->bytes &&
                         hosts->here && hosts->everywhere && hosts->message;
    fsdp_status status = has_all ? FSDP_OK : fsdp_fail_memory(err, "the watch over NCCL");
    status =
        fsdp_ctl_agree_allgather(spec->ctl, status, &spec->host, sizeof spec->host, host_of, err);
    if (status == FSDP_OK) {
        sort_hosts(hosts, host_of, transport->base.size);
        status = connect_hosts(transport, group, err);
    }
    fsdp_free(host_of);
    fsdp_free(group);
    return fsdp_ctl_agree(spec->ctl, status, err);
}

static fsdp_status start(nccl_transport *transport, fsdp_error *err)
{
    int failed = pthread_create(&transport->watch, NULL, watch, transport);
    if (failed)
        return fsdp_fail_errno(err, failed, "cannot start the thread that watches NCCL");
    transport->has_watch = true;
    return FSDP_OK;
}

fsdp_status fsdp_nccl_watch_begin(nccl_transport *transport, const fsdp_nccl_spec *spec,
                                  fsdp_error *err)
{
    fsdp_transport *inner = transport->inner;
    const int direct = spec->direct_ranks > 0 ? spec->direct_ranks : DIRECT_RANKS;
    transport->uses_hosts = inner->size > direct;
    transport->beat_ms = transport->uses_hosts ? SLOWEST_OF_HOSTS_MS : SLOWEST_MS;
    fsdp_status status =
        inner->ops->comm_create(inner, transport->all, inner->size, 1, &transport->watches, err);
    FSDP_TRY(fsdp_ctl_agree(spec->ctl, status, err));
    if (transport->uses_hosts)
        FSDP_TRY(open_hosts(transport, spec, err));
    return fsdp_ctl_agree(spec->ctl, start(transport, err), err);
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

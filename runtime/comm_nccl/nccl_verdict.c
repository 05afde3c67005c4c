/*
 * Names the rank because of which a call is late: the watches of all ranks compare how far the members of its
 * group have come. All compute the same verdict from the same numbers. See comm_nccl.h.
 */
#include "runtime/comm_nccl/comm_nccl.h"

#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "statedict/ctl/ctl_backend.h"

enum { MOST_HOPS = 16 };

typedef enum verdict_kind {
    NOT_LATE = 0, /* it has ended meanwhile */
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

nccl_group *fsdp_nccl_find_group(nccl_transport *transport, uint64_t id)
{
    nccl_group *group = transport->groups;
    while (group && group->id != id)
        group = group->next;
    return group;
}

/* In a call, the error begins with it. */
static void fail_in_call(nccl_group *group, fsdp_error why)
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
    fsdp_nccl_group_fail(group, &why, FSDP_NCCL_TOLD);
}

void fsdp_nccl_fail_all(nccl_transport *transport, const fsdp_error *why)
{
    pthread_mutex_lock(&transport->lock);
    for (nccl_group *group = transport->groups; group; group = group->next)
        fail_in_call(group, *why);
    pthread_mutex_unlock(&transport->lock);
}

bool fsdp_nccl_gather(nccl_transport *transport, const void *mine, size_t size, void *all)
{
    fsdp_error why = {0};
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = FSDP_U8,
                                  .in = mine,
                                  .out = all,
                                  .count = (int64_t)size,
                                  .unit = "the watch over NCCL"};
    if (fsdp_comm_run_now(transport->watches, &call, &why) == FSDP_OK)
        return true;
    atomic_store(&transport->is_whole, false);
    fsdp_nccl_fail_all(transport, &why);
    return false;
}

static nccl_progress progress_of(nccl_transport *transport, uint64_t id, uint64_t number)
{
    nccl_progress mine;
    memset(&mine, 0, sizeof mine);
    pthread_mutex_lock(&transport->lock);
    nccl_group *group = fsdp_nccl_find_group(transport, id);
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
        if (number >= group->done && number < group->issued)
            mine.header = group->pending[number % FSDP_NCCL_PENDING].header;
        pthread_mutex_unlock(&group->lock);
    }
    pthread_mutex_unlock(&transport->lock);
    return mine;
}

/* --- the verdict ------------------------------------------------------------------------------ */

static double seconds_of(const nccl_transport *transport)
{
    return atomic_load(&transport->base.deadline_ms) / 1000.0;
}

static fsdp_error describe_missing(const nccl_transport *transport, int rank,
                                   const fsdp_comm_header *header)
{
    char what[96];
    bool has_left = transport->has_left[rank] || transport->progress[rank].has_closed;
    snprintf(what, sizeof what, "did not come within %g s to", seconds_of(transport));
    const fsdp_comm_loss loss = {.rank = rank,
                                 .what =
                                     has_left ? "has left the group: it takes no part in" : what,
                                 .hint = has_left ? NULL : FSDP_DEADLINE_HINT};
    return fsdp_comm_describe_loss(&loss, header);
}

static fsdp_error describe_unfinished(const nccl_transport *transport, int rank,
                                      const fsdp_comm_header *header, bool all_came)
{
    char what[128];
    snprintf(what, sizeof what, "got no result from NCCL within %g s%s", seconds_of(transport),
             all_came ? ", though all ranks came to" : ", in");
    const fsdp_comm_loss loss = {
        .rank = rank, .what = what, .hint = "a GPU or a connection between two hangs"};
    return fsdp_comm_describe_loss(&loss, header);
}

/* The first member that has not given the call; -1: none. */
static int find_missing(const nccl_transport *transport, uint64_t number)
{
    for (int i = 0; i < transport->base.size; i++)
        if (transport->progress[i].is_member && transport->progress[i].issued <= number)
            return i;
    return -1;
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
    if (!fsdp_nccl_gather(transport, &mine, sizeof mine, transport->progress))
        return false;
    const nccl_progress *late = &transport->progress[asker];
    int missing = find_missing(transport, asked->number);
    if (!late->is_member || late->done > asked->number)
        return true;
    if (is_mismatch(transport, asked->number, out)) {
        out->kind = DIFFERS;
    } else if (missing >= 0) {
        out->kind = MISSING;
        out->why = describe_missing(transport, missing, &late->header);
    } else {
        out->kind = UNFINISHED;
        out->why = describe_unfinished(transport, asker, &late->header, true);
    }
    return true;
}

/*
 * A missing rank may itself wait for a call of another group, in which a third one is missing. Follows such a
 * chain from rank `asker` to its end; groups_out gets the groups on the way. Collective.
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
        if (next.kind < MISSING && !(next.kind == UNFINISHED && transport->beats[missing].is_late))
            break;
        *chosen = next;
        groups_out[(*hops_out)++] = next.group;
    }
    return true;
}

void fsdp_nccl_judge(nccl_transport *transport)
{
    uint64_t groups[MOST_HOPS];
    verdict chosen;
    int asker = 0, hops = 0;
    while (!transport->beats[asker].is_late)
        asker++;
    if (!follow_chain(transport, asker, &chosen, groups, &hops) || chosen.kind == NOT_LATE)
        return;
    pthread_mutex_lock(&transport->lock);
    for (int i = 0; i < hops; i++) {
        nccl_group *group = fsdp_nccl_find_group(transport, groups[i]);
        if (group)
            fsdp_nccl_group_fail(group, &chosen.why, FSDP_NCCL_TOLD);
    }
    pthread_mutex_unlock(&transport->lock);
}

void fsdp_nccl_judge_alone(nccl_transport *transport, const nccl_beat *mine)
{
    const nccl_progress late = progress_of(transport, mine->group, mine->number);
    if (late.done > mine->number) /* it has ended meanwhile */
        return;
    pthread_mutex_lock(&transport->lock);
    nccl_group *group = fsdp_nccl_find_group(transport, mine->group);
    if (group) {
        int left = -1;
        for (int i = 0; i < group->comm->size && left < 0; i++)
            left = transport->has_left[group->comm->ranks[i]] ? group->comm->ranks[i] : -1;
        const fsdp_error why =
            left >= 0 ? describe_missing(transport, left, &late.header)
                      : describe_unfinished(transport, transport->base.rank, &late.header, false);
        fsdp_nccl_group_fail(group, &why, FSDP_NCCL_OWN);
    }
    pthread_mutex_unlock(&transport->lock);
}

/*
 * The wait-for graph of the ranks. Every rank that sleeps in a barrier, or is in a call of the
 * control plane, publishes the rank that it waits for in its slot of the world's block. A rank that
 * misses another follows these edges to the rank that all wait for. See comm_shared.h.
 */
#include "runtime/comm_shared/comm_shared.h"

#include <stdio.h>
#include <string.h>

#include "statedict/ctl/ctl_backend.h"

enum { MOST_FRESH_MS = 2000, STATE_TEXT = 96 };

_Static_assert(FSDP_SHARED_CALL * sizeof(uint64_t) == FSDP_CTL_CALL, "a name fills its words");

static shared_slot *slot_of(const shared_transport *transport, int rank)
{
    return &transport->world.block->slots[rank];
}

void fsdp_shared_note_wait(shared_group *group, int member, int64_t now_ms)
{
    shared_slot *mine = slot_of(group->transport, group->transport->base.rank);
    atomic_store(&mine->waits_in, group->header.kind);
    atomic_store(&mine->looked_ms, now_ms);
    atomic_store(&mine->waits_for, (uint32_t)group->ranks[member] + 1);
}

void fsdp_shared_end_wait(shared_group *group)
{
    atomic_store(&slot_of(group->transport, group->transport->base.rank)->waits_for, 0);
}

/* --- edges ------------------------------------------------------------------------------------ */

/* A waiting rank updates its slot all the time; an old slot means that the rank is stopped. */
static bool is_fresh(const shared_transport *transport, const shared_slot *slot)
{
    int64_t half_ms = transport->base.deadline_ms / 2;
    int64_t age_ms = fsdp_now_ms() - atomic_load(&slot->looked_ms);
    return age_ms < (half_ms < MOST_FRESH_MS ? half_ms : MOST_FRESH_MS);
}

/* The rank that `rank` waits for in a barrier of any group; -1: none. */
static int awaited_in_collective(const shared_transport *transport, int rank)
{
    const shared_slot *slot = slot_of(transport, rank);
    uint32_t waits_for = atomic_load(&slot->waits_for);
    bool is_known = waits_for > 0 && waits_for <= (uint32_t)transport->base.size;
    return is_known && is_fresh(transport, slot) ? (int)waits_for - 1 : -1;
}

static const char *waited_kind(const shared_transport *transport, int rank)
{
    uint32_t kind = atomic_load(&slot_of(transport, rank)->waits_in);
    return kind == 0 ? "the making of a group" : fsdp_comm_kind_name(kind);
}

static int awaited_rank(const shared_transport *transport, int rank)
{
    int other = awaited_in_collective(transport, rank);
    uint32_t ctl_waits_for = atomic_load(&slot_of(transport, rank)->ctl_waits_for);
    if (other < 0 && ctl_waits_for > 0 && ctl_waits_for <= (uint32_t)transport->base.size)
        other = (int)ctl_waits_for - 1;
    return other;
}

/* The end of the chain of waits: `rank` itself when it does not wait, or when the waits form a
 * cycle. */
static int find_root(const shared_transport *transport, int rank)
{
    int root = rank;
    for (int i = 0; i < transport->base.size; i++) {
        int next = awaited_rank(transport, root);
        if (next < 0)
            return root;
        root = next;
    }
    return rank;
}

/* A name that changes meanwhile may be read half old, half new. */
static void load_call(const shared_slot *slot, char call_out[FSDP_CTL_CALL])
{
    for (int i = 0; i < FSDP_SHARED_CALL; i++) {
        uint64_t word = atomic_load(&slot->ctl_call[i]);
        memcpy(call_out + (size_t)i * sizeof word, &word, sizeof word);
    }
    call_out[FSDP_CTL_CALL - 1] = '\0';
}

static void store_call(shared_slot *slot, const char *call)
{
    uint64_t words[FSDP_SHARED_CALL] = {0};
    memcpy(words, call, strnlen(call, sizeof words - 1));
    for (int i = 0; i < FSDP_SHARED_CALL; i++)
        atomic_store(&slot->ctl_call[i], words[i]);
}

static void describe_state(const shared_transport *transport, int rank, char out[STATE_TEXT])
{
    int other = awaited_in_collective(transport, rank);
    char call[FSDP_CTL_CALL];
    load_call(slot_of(transport, rank), call);
    if (other >= 0)
        snprintf(out, STATE_TEXT, "waits for rank %d in %s, in another group", other,
                 waited_kind(transport, rank));
    else if (call[0])
        snprintf(out, STATE_TEXT, "is in %s", call);
    else
        snprintf(out, STATE_TEXT, "is stuck, or stopped");
}

int fsdp_shared_find_missing(const shared_group *group, int member, bool was_in,
                             char out[FSDP_WAIT_TEXT])
{
    const shared_transport *transport = group->transport;
    int missing = group->ranks[member], root = find_root(transport, missing);
    char state[STATE_TEXT];
    describe_state(transport, root, state);
    if (root == missing)
        snprintf(out, FSDP_WAIT_TEXT, "%s: %s", state,
                 was_in ? "nothing came from it" : "it did not come");
    else
        snprintf(out, FSDP_WAIT_TEXT, "%s: rank %d waits for it, and %s", state, missing,
                 was_in ? "nothing came from that" : "did not come");
    return root;
}

/* --- calls of the control plane --------------------------------------------------------------- */

static void note_call(void *context, const char *call, int waits_for)
{
    const shared_transport *transport = context;
    shared_slot *mine = slot_of(transport, transport->base.rank);
    atomic_store(&mine->ctl_waits_for, (uint32_t)(waits_for + 1));
    store_call(mine, call ? call : "");
}

static void find_rank(void *context, int rank, char *out, size_t out_size)
{
    int other = awaited_in_collective(context, rank);
    if (other >= 0)
        snprintf(out, out_size, "it is in %s, where it waits for rank %d",
                 waited_kind(context, rank), other);
}

/* --- busy ranks ------------------------------------------------------------------------------- */

void fsdp_shared_set_busy(fsdp_transport *transport, int64_t until_ms)
{
    const shared_transport *mine = (const shared_transport *)transport;
    atomic_store(&slot_of(mine, transport->rank)->busy_until_ms, until_ms);
}

int64_t fsdp_shared_busy_until(const shared_transport *transport, int rank)
{
    return atomic_load(&slot_of(transport, rank)->busy_until_ms);
}

/* For the control plane. */
static int64_t awaited_busy_until(void *context, int rank)
{
    return fsdp_shared_busy_until(context, find_root(context, rank));
}

void fsdp_shared_observe(fsdp_transport *transport, fsdp_ctl *ctl)
{
    shared_transport *mine = (shared_transport *)transport;
    mine->observed = ctl;
    ctl->observer = (fsdp_ctl_observer){.note = note_call,
                                        .find = find_rank,
                                        .busy_until = awaited_busy_until,
                                        .context = transport};
}

void fsdp_shared_unobserve(shared_transport *transport)
{
    if (transport->observed)
        transport->observed->observer = (fsdp_ctl_observer){0};
    transport->observed = NULL;
}

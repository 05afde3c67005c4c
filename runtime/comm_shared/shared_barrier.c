/*
 * The barrier of a group. A wait spins, then sleeps on the block's futex in short slices; after
 * each slice it checks whether a member failed, left or died, and whether the deadline has passed
 * since the last heartbeat. Then the graph of waits names the rank that all wait for. See
 * comm_shared.h.
 */
#include "base/core/clock.h"
#include "runtime/comm_shared/comm_shared.h"
#include "statedict/ctl/ctl_backend.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* === the wait-for graph ======================================================================= */

/*
 * The wait-for graph of the ranks. Every rank that sleeps in a barrier, or is in a call of the
 * control plane, publishes the rank that it waits for in its slot of the world's block. A rank that
 * misses another follows these edges to the rank that all wait for.
 */

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

static int64_t shared_busy_until(const shared_transport *transport, int rank)
{
    return atomic_load(&slot_of(transport, rank)->busy_until_ms);
}

/* For the control plane. */
static int64_t awaited_busy_until(void *context, int rank)
{
    return shared_busy_until(context, find_root(context, rank));
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

/* === the barrier ============================================================================== */

enum { LONG_LOOK = 16, SHORT_LOOK = 32, SLICE_MS = 100, NAP_US = 50, WRITING_MS = 1000 };

/* The state of a wait. */
typedef struct barrier_watch {
    int64_t until_ms;
    uint64_t heartbeats;
    bool has_slept; /* for a whole slice: time to check the processes */
} barrier_watch;

static void rest(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = NAP_US * 1000}, NULL);
}

size_t fsdp_shared_block_size(int members)
{
    size_t n = (size_t)members;
    return sizeof(shared_block) + n * sizeof(shared_slot) + n * 2 * n * sizeof(int64_t);
}

size_t fsdp_shared_world_size(int ranks)
{
    return fsdp_shared_block_size(ranks) + (size_t)ranks * FSDP_ERROR_TEXT;
}

/* Written once, before the rank leaves its first group. */
static char *reason_of(shared_transport *transport, int rank)
{
    char *reasons = (char *)transport->world.block + fsdp_shared_block_size(transport->base.size);
    return reasons + (size_t)rank * FSDP_ERROR_TEXT;
}

int64_t *fsdp_shared_counts(shared_group *group, int member)
{
    size_t n = (size_t)group->size;
    return (int64_t *)(void *)&group->block->slots[n] + (size_t)member * 2 * n;
}

static shared_slot *local_slot(shared_group *group)
{
    return &group->block->slots[group->rank];
}

/* --- events ----------------------------------------------------------------------------------- */

/* Sleepers increment the count before FUTEX_WAIT compares the event, so that no wake-up is lost. */
static void wake_all(shared_block *block)
{
    atomic_fetch_add(&block->event, 1);
    if (atomic_load(&block->sleepers) > 0)
        syscall(SYS_futex, &block->event, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* False when no event came within ms. */
static bool sleep_until_event(shared_block *block, uint32_t event, int64_t ms)
{
    struct timespec time = fsdp_timespec(ms);
    atomic_fetch_add(&block->sleepers, 1);
    long failed = syscall(SYS_futex, &block->event, FUTEX_WAIT, event, &time, NULL, 0);
    bool in_vain = failed && errno == ETIMEDOUT;
    atomic_fetch_sub(&block->sleepers, 1);
    return !in_vain;
}

/* --- failures --------------------------------------------------------------------------------- */

void fsdp_shared_fail(shared_group *group, const fsdp_error *why, bool is_local)
{
    shared_failure *failure = &group->block->failure;
    uint32_t none = 0, here = 2 * ((uint32_t)group->rank + 1);
    if (!atomic_compare_exchange_strong(&failure->state, &none, here + 1))
        return;
    failure->status = (int32_t)why->status;
    failure->rank = why->rank;
    failure->errnum = why->errnum;
    failure->is_local = is_local;
    memcpy(failure->text, why->text, sizeof failure->text - 1);
    atomic_store(&failure->state, here);
    wake_all(group->block);
}

/* Bounded: the writer may have died while it wrote the text. */
static uint32_t wait_for_text(const shared_failure *failure)
{
    int64_t until_ms = fsdp_now_ms() + WRITING_MS;
    uint32_t state = atomic_load(&failure->state);
    while (state % 2 != 0 && fsdp_now_ms() < until_ms) {
        nap();
        state = atomic_load(&failure->state);
    }
    return state;
}

bool fsdp_shared_has_failed(shared_group *group, fsdp_error *err_out)
{
    const shared_failure *failure = &group->block->failure;
    uint32_t state = atomic_load(&failure->state);
    if (state == 0)
        return false;
    if (state % 2 != 0)
        state = wait_for_text(failure);
    int writer = (int)(state / 2) - 1, rank = group->ranks[writer];
    *err_out = (fsdp_error){.rank = rank};
    if (state % 2 != 0) {
        (void)fsdp_fail(err_out, FSDP_ERR_PEER,
                        "rank %d failed, and died before it reported the reason", rank);
        return true;
    }
    err_out->status = (fsdp_status)failure->status;
    err_out->errnum = failure->errnum;
    memcpy(err_out->text, failure->text, sizeof err_out->text - 1);
    if (failure->is_local && writer != group->rank)
        fsdp_error_prefix(err_out, "rank %d", rank);
    else if (!failure->is_local)
        err_out->rank = failure->rank;
    return true;
}

/* --- missing members -------------------------------------------------------------------------- */

static bool is_here(shared_group *group, int member)
{
    return atomic_load(&group->block->slots[member].phase) >= group->phase;
}

/* Searches from *first, and sets it to the first missing member. */
static bool are_all_here(shared_group *group, int *first)
{
    while (*first < group->size && is_here(group, *first))
        ++*first;
    return *first == group->size;
}

static fsdp_status fail_missing(shared_group *group, const fsdp_comm_loss *loss, fsdp_error *err)
{
    fsdp_error why = fsdp_comm_describe_loss(loss, &group->header);
    /* records it, unless another failure was first, and returns the first */
    fsdp_shared_fail(group, &why, false);
    (void)fsdp_shared_has_failed(group, err);
    return err->status;
}

static fsdp_status check_left(shared_group *group, int member, fsdp_error *err)
{
    /* in this order: a member arrives before it leaves */
    uint32_t has_left = atomic_load(&group->block->slots[member].has_left);
    if (!has_left || is_here(group, member))
        return FSDP_OK;
    char what[FSDP_LEFT_TEXT], reason[FSDP_ERROR_TEXT];
    const int rank = group->ranks[member];
    fsdp_comm_describe_left((int)(has_left - 1), what);
    snprintf(reason, sizeof reason, "%.*s", FSDP_ERROR_TEXT - 1, reason_of(group->transport, rank));
    const fsdp_comm_loss loss = {.rank = rank, .what = what, .reason = reason[0] ? reason : NULL};
    return fail_missing(group, &loss, err);
}

static fsdp_status check_dead(shared_group *group, int member, fsdp_error *err)
{
    char process[48], what[80];
    int rank = group->ranks[member];
    if (!group->transport->is_dead ||
        !group->transport->is_dead(group->transport, rank, process, sizeof process) ||
        is_here(group, member))
        return FSDP_OK;
    bool was_in = atomic_load(&group->block->slots[member].phase) > group->call_phase;
    snprintf(what, sizeof what, "(%s) died %s", process, was_in ? "in" : "before");
    return fail_missing(group, &(fsdp_comm_loss){.rank = rank, .what = what}, err);
}

static fsdp_status check_each(shared_group *group,
                              fsdp_status (*check)(shared_group *, int, fsdp_error *),
                              fsdp_error *err)
{
    for (int i = 0; i < group->size; i++) {
        if (!is_here(group, i))
            FSDP_TRY(check(group, i, err));
    }
    return FSDP_OK;
}

static uint64_t count_heartbeats(shared_group *group)
{
    uint64_t heartbeats = 1;
    for (int i = 0; i < group->size; i++)
        heartbeats += atomic_load(&group->block->slots[i].heartbeats);
    return heartbeats;
}

static fsdp_status check_time(shared_group *group, barrier_watch *watch, fsdp_error *err)
{
    const int patience_ms = group->comm ? group->comm->patience_ms : 0;
    int missing = 0, deadline_ms = group->transport->base.deadline_ms + patience_ms;
    uint64_t heartbeats = count_heartbeats(group);
    int64_t now_ms = fsdp_now_ms();
    if (heartbeats != watch->heartbeats)
        watch->until_ms = now_ms + deadline_ms;
    watch->heartbeats = heartbeats;
    if (are_all_here(group, &missing))
        return FSDP_OK;
    fsdp_shared_note_wait(group, missing, now_ms);
    if (now_ms < watch->until_ms)
        return FSDP_OK;
    char where[FSDP_WAIT_TEXT], what[FSDP_WAIT_TEXT + 64];
    bool was_in = atomic_load(&group->block->slots[missing].phase) > group->call_phase;
    int root = fsdp_shared_find_missing(group, missing, was_in, where);
    int64_t busy_ms = shared_busy_until(group->transport, root);
    if (busy_ms > 0 && now_ms < busy_ms + deadline_ms) {
        watch->until_ms = now_ms + SLICE_MS; /* sleeps of whole slices until the next look */
        return FSDP_OK;
    }
    snprintf(what, sizeof what, "%s within %g s%s", where, deadline_ms / 1000.0,
             was_in ? ", in" : " to");
    const fsdp_comm_loss loss = {.rank = root, .what = what, .hint = FSDP_DEADLINE_HINT};
    return fail_missing(group, &loss, err);
}

static fsdp_status look_around(shared_group *group, barrier_watch *watch, fsdp_error *err)
{
    if (fsdp_shared_has_failed(group, err))
        return err->status;
    FSDP_TRY(check_each(group, check_left, err));
    if (watch->has_slept)
        FSDP_TRY(check_each(group, check_dead, err));
    return check_time(group, watch, err);
}

/* After a sleep that was much too long this rank itself was stopped: the deadline moves. */
static void sleep_a_slice(shared_group *group, uint32_t event, barrier_watch *watch)
{
    int64_t before_ms = fsdp_now_ms(), left_ms = watch->until_ms - before_ms;
    int64_t slice_ms = left_ms > SLICE_MS ? SLICE_MS : left_ms > 1 ? left_ms : 1;
    watch->has_slept = !sleep_until_event(group->block, event, slice_ms);
    int64_t late_ms = fsdp_now_ms() - before_ms - slice_ms;
    if (late_ms > 5 * SLICE_MS)
        watch->until_ms += late_ms;
}

/* --- the barrier ------------------------------------------------------------------------------ */

void fsdp_shared_arrive(shared_group *group)
{
    int first = 0;
    atomic_store(&local_slot(group)->phase, ++group->phase);
    if (are_all_here(group, &first))
        wake_all(group->block);
}

/*
 * Running members arrive within a moment; a preempted one does not. After a spin that was not long
 * enough the next ones are short, except one in LONG_LOOK: a member that was woken late stays late
 * at every barrier until the others have waited for it once.
 */
static bool spin(shared_group *group, int *first)
{
    if (are_all_here(group, first))
        return true;
    bool is_long = group->failed_spins % LONG_LOOK == 0;
    int spins = is_long ? group->transport->spins : group->transport->spins / SHORT_LOOK;
    for (int i = 0; i < spins; i++) {
        rest();
        if (!are_all_here(group, first))
            continue;
        group->failed_spins = 0;
        return true;
    }
    group->failed_spins++;
    return false;
}

fsdp_status fsdp_shared_await(shared_group *group, fsdp_error *err)
{
    int first = 0;
    if (spin(group, &first))
        return FSDP_OK;
    barrier_watch watch = {.until_ms = 0};
    for (;;) {
        uint32_t event = atomic_load(&group->block->event);
        if (are_all_here(group, &first)) {
            fsdp_shared_end_wait(group);
            return FSDP_OK;
        }
        FSDP_TRY(look_around(group, &watch, err));
        sleep_a_slice(group, event, &watch);
    }
}

fsdp_status fsdp_shared_begin_read(shared_group *group, fsdp_error *err)
{
    atomic_store(&local_slot(group)->is_reading, 1);
    if (!fsdp_shared_has_failed(group, err))
        return FSDP_OK;
    fsdp_shared_end_read(group);
    return err->status;
}

void fsdp_shared_end_read(shared_group *group)
{
    atomic_store(&local_slot(group)->is_reading, 0);
}

void fsdp_shared_leave(shared_group *group)
{
    const fsdp_transport *base = &group->transport->base;
    char *reason = reason_of(group->transport, base->rank);
    if (base->exit_reason && reason[0] == '\0')
        snprintf(reason, FSDP_ERROR_TEXT, "%s", base->exit_reason);
    atomic_store(&local_slot(group)->has_left, 1 + (uint32_t)base->exit_code);
    wake_all(group->block);
}

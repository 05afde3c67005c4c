/*
 * Runs a collective over shared memory: every member publishes its call and its buffers, all pass a
 * barrier, compare the calls, run the steps, and pass a barrier after each. See comm_shared.h.
 */
#include "runtime/comm_shared/comm_shared.h"
#include "base/core/clock.h"
#include "kernels/train/tensor.h"

#include <string.h>
#include <time.h>

/* === the steps ================================================================================ */

/*
 * The steps of each collective: the ranges of the other members' buffers that a member copies or
 * reduces. Reductions are in the order of the group's ranks on every member.
 */

/*
 * The state of a call. A member reads ranges of the others' buffers, and a step moves one piece of each
 * range. When all these buffers are shared, a piece is the whole range; otherwise the pieces of each private
 * buffer go through its owner's window, whose halves alternate.
 */
typedef struct shared_move {
    shared_group *group;
    const fsdp_collective *call;
    const struct shared_steps *steps;
    size_t element;
    const unsigned char *in;
    unsigned char *out;
    bool is_in_private, is_out_private;
    bool is_little; /* all data goes through windows, which saves a barrier */
    unsigned half;  /* of windows, for the first step */
    uint64_t piece; /* bytes */
} shared_move;

typedef struct shared_steps {
    uint64_t (*longest)(const shared_move *move);      /* range, in bytes */
    uint64_t (*window_piece)(const shared_move *move); /* bytes of a piece in half a window */
    /* copies this member's input into its window */
    void (*fill)(const shared_move *move, uint64_t step);
    void (*work)(const shared_move *move, uint64_t step);
    unsigned extra; /* steps after the last piece */
} shared_steps;

/* The published address of a buffer that only its own rank can read. */
#define SHARED_PRIVATE UINT64_MAX

enum {
    HEARTBEAT_BYTES = 32 << 20, /* bytes between two heartbeats */
    /* per member: a copy through a window takes no longer than a barrier */
    LITTLE_INPUT = 16 << 10,
    LITTLE_SUM = 256 << 10,       /* of all members together: every member reduces all elements */
    LITTLE_SUM_OF_TWO = 512 << 10 /* per member of two: the size of half a window */
};

/* --- places ----------------------------------------------------------------------------------- */

static uint64_t round_up(uint64_t bytes)
{
    return (bytes + FSDP_SHARED_LINE - 1) / FSDP_SHARED_LINE * FSDP_SHARED_LINE;
}

/* Returns the size of the piece at `at` in a range of `size` bytes. */
static uint64_t piece_from(const shared_move *move, uint64_t size, uint64_t at)
{
    return at >= size ? 0 : size - at < move->piece ? size - at : move->piece;
}

/* Size of the piece of a step. */
static uint64_t piece_size(const shared_move *move, uint64_t size, uint64_t step)
{
    return piece_from(move, size, step * move->piece);
}

static unsigned char *window_half(const shared_move *move, int member, uint64_t step)
{
    return move->group->windows[member] +
           (move->half + step) % 2 * move->group->transport->window_half;
}

/* Results of an all_reduce have two halves of their own. */
static unsigned char *result_half(const shared_move *move, int member, uint64_t step)
{
    return window_half(move, member, step) + 2 * move->group->transport->window_half;
}

/* Adds numbers, not pointers: the base of threads is 0. */
static const unsigned char *readable(const shared_move *move, int member, uint64_t address)
{
    const shared_group *group = move->group;
    return (const unsigned char *)(group->transport->bases[group->ranks[member]] + address);
}

/*
 * Returns the address of byte `at` of a member's input, or of its piece in that member's window.
 */
static const unsigned char *source(const shared_move *move, int member, uint64_t at,
                                   uint64_t at_in_window, uint64_t step)
{
    if (member == move->group->rank)
        return move->in + at;
    uint64_t in = fsdp_shared_published(move->group, member)->in;
    if (in == SHARED_PRIVATE || move->is_little)
        return window_half(move, member, step) + at_in_window;
    return readable(move, member, in + at);
}

static uint64_t part_of(const shared_move *move, int member)
{
    return (uint64_t)fsdp_comm_part(move->call, member) * move->element;
}

static uint64_t place_of(const shared_move *move, int member)
{
    return (uint64_t)fsdp_comm_place(move->call, member) * move->element;
}

static uint64_t longest_part(const shared_move *move)
{
    uint64_t longest = 0;
    for (int i = 0; i < move->group->size; i++)
        longest = part_of(move, i) > longest ? part_of(move, i) : longest;
    return longest;
}

static uint64_t whole_half(const shared_move *move)
{
    return move->group->transport->window_half;
}

/* A member's share of a window that holds a piece for each. */
static uint64_t share_of_half(const shared_move *move)
{
    uint64_t share = whole_half(move) / (uint64_t)move->group->size;
    return share / FSDP_SHARED_LINE * FSDP_SHARED_LINE;
}

/* --- work ------------------------------------------------------------------------------------- */

static void copy(const shared_move *move, unsigned char *to, const unsigned char *from,
                 uint64_t size)
{
    uint64_t all = size;
    while (size > 0 && to != from) {
        uint64_t part = size < HEARTBEAT_BYTES ? size : HEARTBEAT_BYTES;
        fsdp_tensor_copy(to, from, part, all);
        to += part;
        from += part;
        size -= part;
        if (size > 0 && !fsdp_shared_heartbeat(move->group))
            return;
    }
}

/* Reduces the bytes at source() of all members. */
static void fold(const shared_move *move, uint64_t at, uint64_t at_in_window, uint64_t step,
                 unsigned char *to, uint64_t size)
{
    shared_group *group = move->group;
    const fsdp_collective *call = move->call;
    fsdp_reduction how = fsdp_comm_reduction(call, group->size);
    for (int i = 0; i < group->size; i++)
        group->sources[i] = source(move, i, at, at_in_window, step);
    while (size > 0) {
        uint64_t part = size < HEARTBEAT_BYTES ? size : HEARTBEAT_BYTES;
        fsdp_tensor_fold(to, group->sources, group->size, call->dtype, part / move->element, how);
        to += part;
        size -= part;
        for (int i = 0; i < group->size; i++)
            group->sources[i] = (const unsigned char *)group->sources[i] + part;
        if (size > 0 && !fsdp_shared_heartbeat(group))
            return;
    }
}

/* Copies a piece of the input to its receiver's place in this member's window. */
static void hand_out(const shared_move *move, int to, uint64_t step, uint64_t at, uint64_t size)
{
    int rank = move->group->rank;
    if (to != rank)
        copy(move, window_half(move, rank, step) + (uint64_t)to * move->piece, move->in + at, size);
}

/* Members begin with themselves, so that they do not all read from the same one. */
static int turn(const shared_move *move, int i)
{
    return (move->group->rank + i) % move->group->size;
}

/* --- all_gather ------------------------------------------------------------------------------- */

static void fill_gather(const shared_move *move, uint64_t step)
{
    int rank = move->group->rank;
    copy(move, window_half(move, rank, step), move->in + step * move->piece,
         piece_size(move, part_of(move, rank), step));
}

static void gather(const shared_move *move, uint64_t step)
{
    uint64_t at = step * move->piece;
    for (int i = 0; i < move->group->size; i++) {
        int from = turn(move, i);
        copy(move, move->out + place_of(move, from) + at, source(move, from, at, 0, step),
             piece_size(move, part_of(move, from), step));
    }
}

/* --- reduce_scatter --------------------------------------------------------------------------- */

static void fill_scatter(const shared_move *move, uint64_t step)
{
    for (int to = 0; to < move->group->size; to++)
        hand_out(move, to, step, place_of(move, to) + step * move->piece,
                 piece_size(move, part_of(move, to), step));
}

static void scatter(const shared_move *move, uint64_t step)
{
    int rank = move->group->rank;
    uint64_t at = place_of(move, rank) + step * move->piece;
    fold(move, at, (uint64_t)rank * move->piece, step, move->out + step * move->piece,
         piece_size(move, part_of(move, rank), step));
}

/* --- all_reduce ------------------------------------------------------------------------------- */

/*
 * Every member adds up its slice of a piece, which is as many slices as there are members; one step
 * later all fetch the slices of the others. In place is safe: a member overwrites slices of its
 * input only after the step in which their owners have added them up.
 */
static uint64_t all_bytes(const shared_move *move)
{
    return (uint64_t)move->call->count * move->element;
}

static uint64_t longest_slice(const shared_move *move)
{
    uint64_t n = (uint64_t)move->group->size;
    return round_up(all_bytes(move) / n + (all_bytes(move) % n != 0));
}

static uint64_t window_slice(const shared_move *move)
{
    uint64_t longest = longest_slice(move), share = share_of_half(move);
    return longest < share ? longest : share;
}

static uint64_t slice_at(const shared_move *move, int member, uint64_t step)
{
    return (step * (uint64_t)move->group->size + (uint64_t)member) * move->piece;
}

static uint64_t slice_size(const shared_move *move, int member, uint64_t step)
{
    return piece_from(move, all_bytes(move), slice_at(move, member, step));
}

static void fill_reduce(const shared_move *move, uint64_t step)
{
    for (int to = 0; to < move->group->size; to++)
        hand_out(move, to, step, slice_at(move, to, step), slice_size(move, to, step));
}

static void reduce_slice(const shared_move *move, uint64_t step)
{
    int rank = move->group->rank;
    uint64_t at = slice_at(move, rank, step), size = slice_size(move, rank, step);
    if (size == 0)
        return;
    fold(move, at, (uint64_t)rank * move->piece, step, move->out + at, size);
    if (move->is_out_private)
        copy(move, result_half(move, rank, step), move->out + at, size);
}

static void fetch_slices(const shared_move *move, uint64_t step)
{
    for (int i = 1; i < move->group->size; i++) {
        int from = turn(move, i);
        uint64_t at = slice_at(move, from, step);
        uint64_t out = fsdp_shared_published(move->group, from)->out;
        const unsigned char *slice =
            out == SHARED_PRIVATE ? result_half(move, from, step) : readable(move, from, out + at);
        copy(move, move->out + at, slice, slice_size(move, from, step));
    }
}

static void reduce(const shared_move *move, uint64_t step)
{
    if (step > 0)
        fetch_slices(move, step - 1);
    reduce_slice(move, step);
}

/* --- all_reduce of little --------------------------------------------------------------------- */

/*
 * Every member adds up everything, which moves no more than slices do as long as there are two
 * members, or caches hold it.
 */
static void fill_all(const shared_move *move, uint64_t step)
{
    copy(move, window_half(move, move->group->rank, step), move->in, all_bytes(move));
}

static void reduce_all(const shared_move *move, uint64_t step)
{
    fold(move, 0, 0, step, move->out, all_bytes(move));
}

/* --- broadcast -------------------------------------------------------------------------------- */

static void fill_broadcast(const shared_move *move, uint64_t step)
{
    int rank = move->group->rank;
    if (rank == move->call->root)
        copy(move, window_half(move, rank, step), move->in + step * move->piece,
             piece_size(move, all_bytes(move), step));
}

static void fetch_broadcast(const shared_move *move, uint64_t step)
{
    uint64_t at = step * move->piece;
    if (move->group->rank != move->call->root)
        copy(move, move->out + at, source(move, move->call->root, at, 0, step),
             piece_size(move, all_bytes(move), step));
}

/* --- all_to_all ------------------------------------------------------------------------------- */

static uint64_t sent(const shared_move *move, int from, int to)
{
    return (uint64_t)fsdp_shared_counts(move->group, from)[to] * move->element;
}

static uint64_t sent_before(const shared_move *move, int from, int to)
{
    uint64_t sum = 0;
    for (int i = 0; i < to; i++)
        sum += sent(move, from, i);
    return sum;
}

static uint64_t longest_sent(const shared_move *move)
{
    uint64_t longest = 0;
    for (int from = 0; from < move->group->size; from++) {
        for (int to = 0; to < move->group->size; to++)
            longest = sent(move, from, to) > longest ? sent(move, from, to) : longest;
    }
    return longest;
}

static void fill_exchange(const shared_move *move, uint64_t step)
{
    int rank = move->group->rank;
    for (int to = 0; to < move->group->size; to++)
        hand_out(move, to, step, sent_before(move, rank, to) + step * move->piece,
                 piece_size(move, sent(move, rank, to), step));
}

static void exchange(const shared_move *move, uint64_t step)
{
    int rank = move->group->rank;
    uint64_t place = 0, at = step * move->piece;
    for (int from = 0; from < move->group->size; from++) {
        uint64_t size = sent(move, from, rank);
        const unsigned char *data = source(move, from, sent_before(move, from, rank) + at,
                                           (uint64_t)rank * move->piece, step);
        copy(move, move->out + place + at, data, piece_size(move, size, step));
        place += size;
    }
}

/* --- views ------------------------------------------------------------------------------------ */

static void show(const shared_move *move, uint64_t step)
{
    for (int i = 0; i < move->group->size; i++)
        move->group->sources[i] = source(move, i, 0, 0, step);
    move->call->view->see(move->call->view->context, move->group->sources);
}

static const shared_steps steps_view = {.longest = longest_part, .work = show};

/* --- the table -------------------------------------------------------------------------------- */

/*
 * Bytes of a member's window when all data goes through windows. It is unknown for all_to_all before the
 * first barrier.
 */
static uint64_t input_of_each(const shared_move *move)
{
    uint64_t longest, n = (uint64_t)move->group->size;
    switch (move->call->kind) {
    case FSDP_ALL_GATHER:
    case FSDP_BROADCAST: return move->steps->longest(move);
    case FSDP_REDUCE_SCATTER:
        longest = move->steps->longest(move);
        return longest <= LITTLE_INPUT && !move->call->view ? longest * n : UINT64_MAX;
    default: return UINT64_MAX;
    }
}

static bool is_little_sum(const shared_move *move)
{
    uint64_t n = (uint64_t)move->group->size, most = n == 2 ? LITTLE_SUM_OF_TWO : LITTLE_SUM / n;
    return move->call->kind == FSDP_ALL_REDUCE && all_bytes(move) <= most &&
           all_bytes(move) <= whole_half(move);
}

/* Chooses the steps from values that are equal on all members. move has its group, call and element. */
static void shared_steps_choose(shared_move *move)
{
    static const shared_steps all[] = {
        [FSDP_ALL_GATHER] = {longest_part, whole_half, fill_gather, gather, 0},
        [FSDP_REDUCE_SCATTER] = {longest_part, share_of_half, fill_scatter, scatter, 0},
        [FSDP_ALL_REDUCE] = {longest_slice, window_slice, fill_reduce, reduce, 1},
        [FSDP_BROADCAST] = {all_bytes, whole_half, fill_broadcast, fetch_broadcast, 0},
        [FSDP_ALL_TO_ALL] = {longest_sent, share_of_half, fill_exchange, exchange, 0},
    };
    static const shared_steps little_sum = {all_bytes, whole_half, fill_all, reduce_all, 0};
    move->is_little = is_little_sum(move);
    move->steps = move->is_little ? &little_sum : &all[move->call->kind];
    uint64_t input = move->is_little ? 0 : input_of_each(move);
    move->is_little |= input <= LITTLE_INPUT && input <= whole_half(move);
    move->piece = move->is_little ? move->steps->longest(move) : move->steps->window_piece(move);
}

/* === calls ==================================================================================== */

/* --- publishing ------------------------------------------------------------------------------- */

/* All segments have the same size; threads can read all memory. */
static bool is_readable(const shared_transport *transport, int owner, const void *data, size_t size)
{
    uintptr_t at = (uintptr_t)data, base = transport->bases[owner];
    return transport->segment_size == 0 || (at >= base && at - base < transport->segment_size &&
                                            size <= transport->segment_size - (at - base));
}

bool fsdp_shared_sees(const fsdp_comm *comm, int member, const void *data, size_t size)
{
    return is_readable((const shared_transport *)comm->transport, comm->ranks[member], data, size);
}

static uint64_t published(const shared_transport *transport, const void *data)
{
    int rank = transport->base.rank;
    return is_readable(transport, rank, data, 0) ? (uintptr_t)data - transport->bases[rank]
                                                 : SHARED_PRIVATE;
}

static void publish(shared_move *move, const fsdp_comm_header *header)
{
    shared_group *group = move->group;
    const fsdp_collective *call = move->call;
    group->calls++;
    group->header = *header;
    shared_published *mine = fsdp_shared_published(group, group->rank);
    mine->header = *header;
    mine->in = published(group->transport, call->in);
    mine->out = published(group->transport, call->out);
    move->is_in_private = mine->in == SHARED_PRIVATE;
    move->is_out_private = mine->out == SHARED_PRIVATE;
    if (call->kind == FSDP_ALL_TO_ALL) {
        size_t bytes = (size_t)group->size * sizeof(int64_t);
        int64_t *counts = fsdp_shared_counts(group, group->rank);
        memcpy(counts, call->counts, bytes);
        memcpy(counts + group->size, call->out_counts, bytes);
    }
}

/* --- comparing -------------------------------------------------------------------------------- */

static fsdp_status compare_counts(const fsdp_comm *comm, shared_group *group, fsdp_error *err)
{
    for (int from = 0; from < group->size; from++) {
        const int64_t *counts = fsdp_shared_counts(group, from);
        for (int to = 0; to < group->size; to++) {
            int64_t expected = fsdp_shared_counts(group, to)[group->size + from];
            if (counts[to] == expected)
                continue;
            return fsdp_comm_miscount(comm->ranks[from], comm->ranks[to], counts[to], expected,
                                      &group->header, err);
        }
    }
    return FSDP_OK;
}

static fsdp_status compare_all(const fsdp_comm *comm, shared_group *group, fsdp_error *err)
{
    bool is_same = true;
    for (int i = 0; i < group->size; i++)
        is_same &= memcmp(&fsdp_shared_published(group, i)->header, &group->header,
                          sizeof group->header) == 0;
    if (!is_same) {
        for (int i = 0; i < group->size; i++)
            group->headers[i] = fsdp_shared_published(group, i)->header;
        return fsdp_comm_compare(comm->ranks, comm->size, group->headers, err);
    }
    return group->header.kind == FSDP_ALL_TO_ALL ? compare_counts(comm, group, err) : FSDP_OK;
}

static bool is_staged(const shared_move *move)
{
    bool uses_out = move->call->kind == FSDP_ALL_REDUCE;
    for (int i = 0; i < move->group->size; i++) {
        if (move->call->kind == FSDP_BROADCAST && i != move->call->root)
            continue;
        const shared_published *theirs = fsdp_shared_published(move->group, i);
        if (theirs->in == SHARED_PRIVATE || (uses_out && theirs->out == SHARED_PRIVATE))
            return true;
    }
    return false;
}

/* --- a call ----------------------------------------------------------------------------------- */

/* Every member compares all headers, so all find the same difference. */
static fsdp_status compare(const fsdp_comm *comm, shared_group *group, fsdp_error *err)
{
    err->status = compare_all(comm, group, err);
    if (err->status != FSDP_OK)
        fsdp_shared_fail(group, err, false);
    return err->status;
}

/* Fills the window for the next step while peers may still read the half of this one. */
static fsdp_status run_step(const shared_move *move, uint64_t step, bool fills, fsdp_error *err)
{
    FSDP_TRY(fsdp_shared_begin_read(move->group, err));
    move->steps->work(move, step);
    if (fills)
        move->steps->fill(move, step + 1);
    fsdp_shared_end_read(move->group);
    if (!fsdp_shared_heartbeat(move->group) && fsdp_shared_has_failed(move->group, err))
        return err->status; /* the data that was read may be invalid */
    return fsdp_shared_pass_barrier(move->group, err);
}

/* Every member detects it, and reports the same error. */
static fsdp_status fail_private(shared_group *group, fsdp_error *err)
{
    char name[200];
    fsdp_comm_describe(&group->header, name, sizeof name);
    err->status = fsdp_fail(err, FSDP_ERR_USAGE,
                            "%s: the input of a view is not memory of fsdp_comm_alloc", name);
    fsdp_shared_fail(group, err, false);
    return err->status;
}

static fsdp_status run_steps(const fsdp_comm *comm, shared_move *move, fsdp_error *err)
{
    FSDP_TRY(fsdp_shared_pass_barrier(move->group, err));
    FSDP_TRY(compare(comm, move->group, err));
    if (move->call->stream)
        return fsdp_shared_run_in_stream(move->group, move->call, err);
    if (move->is_little) {
        move->steps->work(move, 0);
        move->group->half++;
        return FSDP_OK;
    }
    uint64_t longest = move->steps->longest(move);
    bool is_direct = !is_staged(move);
    if (is_direct)
        move->piece = longest;
    if (is_direct && move->call->view)
        move->steps = &steps_view;
    else if (move->call->view && move->call->kind == FSDP_REDUCE_SCATTER)
        return fail_private(move->group, err);
    uint64_t pieces = longest > 0 ? (longest - 1) / move->piece + 1 : 1;
    uint64_t steps = pieces + move->steps->extra;
    for (uint64_t step = 0; step < steps; step++)
        FSDP_TRY(run_step(move, step, move->is_in_private && step + 1 < pieces, err));
    move->group->half += (unsigned)(pieces % 2);
    return FSDP_OK;
}

bool fsdp_shared_heartbeat(shared_group *group)
{
    atomic_fetch_add(&group->block->slots[group->rank].heartbeats, 1);
    return atomic_load(&group->block->failure.state) == 0;
}

/* After a failure: returns when no member reads buffers of this rank any more. */
static void wait_for_readers(shared_group *group)
{
    enum { NAP_US = 50 };
    int64_t until_ms = fsdp_now_ms() + group->transport->base.deadline_ms;
    for (int i = 0; i < group->size; i++) {
        while (i != group->rank && atomic_load(&group->block->slots[i].is_reading) &&
               fsdp_now_ms() < until_ms)
            nanosleep(&(struct timespec){.tv_nsec = NAP_US * 1000}, NULL);
    }
}

/*
 * The caller gets its buffers back, so that no member may read them any more. Between processes a
 * late read is harmless: its reader finds the failure afterwards.
 */
static void give_up(shared_group *group, const fsdp_error *why)
{
    fsdp_shared_fail(group, why, true);
    if (group->transport->segment_size == 0)
        wait_for_readers(group);
}

fsdp_status fsdp_shared_run(fsdp_comm *comm, const fsdp_collective *call,
                            const fsdp_comm_header *header, fsdp_error *err)
{
    shared_group *group = comm->backend;
    shared_move move = {.group = group,
                        .call = call,
                        .element = fsdp_dtype_size(call->dtype),
                        .in = call->in,
                        .out = call->out,
                        .half = group->half};
    if (!move.in) /* empty or unused: any valid address */
        move.in = (const unsigned char *)group;
    if (!move.out)
        move.out = (unsigned char *)group;
    fsdp_error failure = {.rank = comm->transport->rank};
    group->call_phase = group->phase;
    publish(&move, header);
    shared_steps_choose(&move);
    if (!call->stream && (move.is_in_private || move.is_little))
        move.steps->fill(&move, 0);
    fsdp_status status = run_steps(comm, &move, &failure);
    if (status == FSDP_OK && call->view && move.steps != &steps_view)
        fsdp_comm_view_out(call, group->size, group->sources);
    if (status == FSDP_OK)
        return FSDP_OK;
    failure.status = status;
    give_up(group, &failure);
    *err = failure;
    return status;
}

void fsdp_shared_abort(fsdp_comm *comm, const fsdp_error *why)
{
    fsdp_shared_fail(comm->backend, why, true);
}

bool fsdp_shared_comm_has_failed(fsdp_comm *comm, fsdp_error *err_out)
{
    return fsdp_shared_has_failed(comm->backend, err_out);
}

/*
 * The steps of each collective: the ranges of the other members' buffers that a member copies or
 * reduces. Reductions are in the order of the group's ranks on every member. See comm_shared.h.
 */
#include "runtime/comm_shared/comm_shared.h"

#include "kernels/train/tensor.h"

enum {
    HEARTBEAT_BYTES = 32 << 20, /* bytes between two heartbeats */
    LITTLE_INPUT =
        16 << 10,           /* per member: a copy through a window takes no longer than a barrier */
    LITTLE_SUM = 256 << 10, /* of all members together: every member reduces all elements */
    LITTLE_SUM_OF_TWO = 512 << 10 /* per member of two: the size of half a window */
};

/* --- places ----------------------------------------------------------------------------------- */

static uint64_t round_up(uint64_t bytes)
{
    return (bytes + FSDP_SHARED_LINE - 1) / FSDP_SHARED_LINE * FSDP_SHARED_LINE;
}

/* Size of the piece at `at` in a range of `size` bytes. */
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
 * The address of byte `at` of a member's input, or of its piece in that member's window.
 */
static const unsigned char *source(const shared_move *move, int member, uint64_t at,
                                   uint64_t at_in_window, uint64_t step)
{
    if (member == move->group->rank)
        return move->in + at;
    uint64_t in = fsdp_shared_published(move->group, member)->in;
    if (in == FSDP_SHARED_PRIVATE || move->is_little)
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
        const unsigned char *slice = out == FSDP_SHARED_PRIVATE ? result_half(move, from, step)
                                                                : readable(move, from, out + at);
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

const shared_steps fsdp_shared_steps_view = {.longest = longest_part, .work = show};

/* --- the table -------------------------------------------------------------------------------- */

/*
 * Bytes of a member's window when all data goes through windows. Unknown for all_to_all before the
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

void fsdp_shared_steps_choose(shared_move *move)
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

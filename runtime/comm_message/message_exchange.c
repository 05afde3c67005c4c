/*
 * An exchange: every member has a range of bytes for every other one, and receives one from it.
 * Ranges are cut into pieces; row n is the n-th piece of all ranges of a member. Two rows at a time
 * are in flight in each direction, each in its own half of the staging, so that one half is filled
 * while the other moves, and a failed call leaves no transfer in the caller's buffers. A row of a
 * reduction is reduced when all its pieces have arrived, in the order of the ranks.
 *
 * An exchange cannot deadlock: the lowest row that any member still has to send is one that its
 * receiver has posted, because the receiver has retired all rows before it. See comm_message.h.
 */
#include "runtime/comm_message/comm_message.h"

#include <string.h>

#include "kernels/train/tensor.h"

enum { STAGING = 16 << 20, LEAST_PIECE = 4096, HALVES = 2 };

typedef struct progress {
    const message_exchange *exchange;
    message_group *group;
    uint64_t rows_out, rows_in;
    uint64_t staged, posted, retired; /* rows, counted */
    int out_left[HALVES], in_left[HALVES];
    message_watch watch;
    bool has_moved;
} progress;

size_t fsdp_message_piece(int members)
{
    size_t piece = (size_t)STAGING / (2 * HALVES * (size_t)members) / 64 * 64;
    piece = piece < FSDP_P2P_PIECE ? piece : FSDP_P2P_PIECE;
    return piece > LEAST_PIECE ? piece : LEAST_PIECE;
}

/* --- places ----------------------------------------------------------------------------------- */

static int half_of(uint64_t row)
{
    return (int)(row % HALVES);
}

static int out_place(const message_group *group, int half, int member)
{
    return half * group->size + member;
}

static int in_place(const message_group *group, int half, int member)
{
    return (HALVES + half) * group->size + member;
}

static unsigned char *piece_at(const message_group *group, int place)
{
    return group->pieces + (size_t)place * group->piece;
}

static size_t piece_size(const message_group *group, uint64_t size, uint64_t row)
{
    uint64_t at = row * group->piece;
    return at >= size ? 0 : size - at < group->piece ? (size_t)(size - at) : group->piece;
}

static uint64_t count_rows(const message_group *group, uint64_t size)
{
    return size / group->piece + (size % group->piece != 0);
}

/* --- sending ---------------------------------------------------------------------------------- */

/* Members that receive the same bytes share one copy in the staging. */
static fsdp_status stage_row(progress *now, fsdp_error *err)
{
    message_group *group = now->group;
    fsdp_p2p *p2p = group->transport->p2p;
    int half = half_of(now->staged);
    const unsigned char *last = NULL;
    unsigned char *staged = NULL;
    size_t last_size = 0;
    for (int i = 1; i < group->size; i++) {
        int to = (group->rank + i) % group->size, place = out_place(group, half, to);
        const message_route *route = &group->routes[to];
        size_t size = piece_size(group, route->out_size, now->staged);
        if (size == 0)
            continue;
        const unsigned char *from = route->out + now->staged * group->piece;
        if (from != last || size != last_size)
            staged = memcpy(piece_at(group, place), from, size);
        last = from;
        last_size = size;
        const fsdp_p2p_transfer transfer = {place, group->ranks[to], group->channel, staged, size};
        FSDP_TRY(p2p->ops->send(p2p, group->batch, &transfer, err));
        now->out_left[half]++;
    }
    now->staged++;
    now->has_moved = true;
    return FSDP_OK;
}

/* --- receiving -------------------------------------------------------------------------------- */

static fsdp_status post_row(progress *now, fsdp_error *err)
{
    message_group *group = now->group;
    fsdp_p2p *p2p = group->transport->p2p;
    int half = half_of(now->posted);
    for (int i = 1; i < group->size; i++) {
        int from = (group->rank - i + group->size) % group->size;
        int place = in_place(group, half, from);
        size_t size = piece_size(group, group->routes[from].in_size, now->posted);
        if (size == 0)
            continue;
        const fsdp_p2p_transfer transfer = {place, group->ranks[from], group->channel,
                                            piece_at(group, place), size};
        FSDP_TRY(p2p->ops->recv(p2p, group->batch, &transfer, err));
        group->is_arriving[half * group->size + from] = true;
        now->in_left[half]++;
    }
    now->posted++;
    now->has_moved = true;
    return FSDP_OK;
}

static void land(progress *now, int half, int from)
{
    message_group *group = now->group;
    const message_route *route = &group->routes[from];
    uint64_t row = now->retired + (half_of(now->retired) != half);
    group->is_arriving[half * group->size + from] = false;
    now->in_left[half]--;
    if (!now->exchange->fold)
        memcpy(route->in + row * group->piece, piece_at(group, in_place(group, half, from)),
               piece_size(group, route->in_size, row));
}

static void add_up(progress *now, uint64_t row)
{
    message_group *group = now->group;
    const message_exchange *exchange = now->exchange;
    const fsdp_collective *call = exchange->fold;
    uint64_t at = row * group->piece;
    for (int i = 0; i < group->size; i++)
        group->sources[i] = piece_at(group, in_place(group, half_of(row), i));
    group->sources[group->rank] = exchange->local + at;
    fsdp_tensor_fold(exchange->to + at, group->sources, group->size, call->dtype,
                     piece_size(group, exchange->to_size, row) / fsdp_dtype_size(call->dtype),
                     fsdp_comm_reduction(call, group->size));
}

/* An in-place reduction overwrites the source of this row for the others: the row is staged
 * first. */
static void retire_row(progress *now)
{
    uint64_t row = now->retired;
    bool is_staged = now->staged > row || now->staged == now->rows_out;
    if (row == now->posted || now->in_left[half_of(row)] > 0 || !is_staged)
        return;
    if (now->exchange->fold)
        add_up(now, row);
    now->retired++;
    now->has_moved = true;
}

/* --- together --------------------------------------------------------------------------------- */

static fsdp_status finish_transfers(progress *now, fsdp_error *err)
{
    message_group *group = now->group;
    fsdp_p2p *p2p = group->transport->p2p;
    int count = 0;
    FSDP_TRY(p2p->ops->test(p2p, group->batch, group->finished, &count, err));
    for (int i = 0; i < count; i++) {
        int half = group->finished[i] / group->size, member = group->finished[i] % group->size;
        if (half < HALVES)
            now->out_left[half]--;
        else
            land(now, half - HALVES, member);
    }
    now->has_moved |= count > 0;
    return FSDP_OK;
}

/* For error messages. */
static int find_missing(const progress *now)
{
    const message_group *group = now->group;
    const bool *arriving = group->is_arriving + half_of(now->retired) * group->size;
    for (int i = 0; i < group->size; i++) {
        if (arriving[i])
            return i;
    }
    return (group->rank + 1) % group->size;
}

static bool is_over(const progress *now)
{
    return now->staged == now->rows_out && now->retired == now->rows_in && now->out_left[0] == 0 &&
           now->out_left[1] == 0;
}

static progress begin(const message_exchange *exchange)
{
    message_group *group = exchange->group;
    progress now = {.exchange = exchange, .group = group};
    uint64_t out = 0, in = exchange->fold ? exchange->to_size : 0;
    for (int i = 0; i < group->size; i++) {
        const message_route *route = &group->routes[i];
        if (i == group->rank)
            continue;
        out = route->out_size > out ? route->out_size : out;
        in = route->in_size > in ? route->in_size : in;
    }
    now.rows_out = count_rows(group, out);
    now.rows_in = count_rows(group, in);
    return now;
}

fsdp_status fsdp_message_run_exchange(const message_exchange *exchange, fsdp_error *err)
{
    progress now = begin(exchange);
    while (!is_over(&now)) {
        now.has_moved = false;
        if (now.posted < now.rows_in && now.posted < now.retired + HALVES)
            FSDP_TRY(post_row(&now, err));
        if (now.staged < now.rows_out && now.out_left[half_of(now.staged)] == 0)
            FSDP_TRY(stage_row(&now, err));
        FSDP_TRY(finish_transfers(&now, err));
        retire_row(&now);
        FSDP_TRY(fsdp_message_pause(now.group, &now.watch, now.has_moved, find_missing(&now), err));
    }
    return FSDP_OK;
}

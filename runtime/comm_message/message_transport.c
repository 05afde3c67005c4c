/*
 * The transport over point-to-point messages: its calls, from the ground up, and the creation and
 * closing of its groups. All ranks of the world take part in the creation of a group, so that every
 * rank knows the group before a member uses it. See comm_message.h.
 */
#include "runtime/comm_message/comm_message.h"
#include "base/core/mem.h"
#include "kernels/train/tensor.h"
#include "statedict/ctl/ctl_backend.h"

#include <string.h>

/* === dissemination ============================================================================ */

/*
 * Dissemination: in each round a member sends its combined value to the member at twice the
 * distance of the round before, so that after log2(members) rounds every member has the values of
 * all.
 */

enum { FSDP_DISSEMINATION_SIZE = 512 }; /* bytes, at most */

/* --- rounds ----------------------------------------------------------------------------------- */

/* Waits for both transfers of a round. */
static fsdp_status await_round(message_group *group, int from, int in_place, fsdp_error *err)
{
    fsdp_p2p *p2p = group->transport->p2p;
    message_watch watch = {0};
    bool is_here = false;
    for (int left = 2; left > 0;) {
        int count = 0;
        FSDP_TRY(p2p->ops->test(p2p, group->batch, group->finished, &count, err));
        for (int i = 0; i < count; i++)
            is_here |= group->finished[i] == in_place;
        left -= count;
        if (left > 0)
            FSDP_TRY(
                fsdp_message_pause(group, &watch, count > 0, is_here ? group->rank : from, err));
    }
    return FSDP_OK;
}

static fsdp_status run_round(message_group *group, int distance, void *mine, size_t size,
                             void (*merge)(void *mine, const void *theirs), fsdp_error *err)
{
    fsdp_p2p *p2p = group->transport->p2p;
    int n = group->size, to = (group->rank + distance) % n;
    int from = (group->rank - distance + n) % n, in_place = 2 * n;
    unsigned char *incoming = group->pieces + (size_t)in_place * group->piece;
    const fsdp_p2p_transfer recv = {in_place, group->ranks[from], group->channel, incoming, size};
    const fsdp_p2p_transfer send = {0, group->ranks[to], group->channel, group->pieces, size};
    memcpy(send.data, mine, size);
    FSDP_TRY(p2p->ops->recv(p2p, group->batch, &recv, err));
    FSDP_TRY(p2p->ops->send(p2p, group->batch, &send, err));
    FSDP_TRY(await_round(group, from, in_place, err));
    merge(mine, incoming);
    return FSDP_OK;
}

/* Collective in the group. Combines every member's `mine` into the same value on all members. `merge` must
 * not depend on the order of its calls, and may see a value more than once. */
static fsdp_status message_disseminate(message_group *group, void *mine, size_t size,
                                       void (*merge)(void *mine, const void *theirs),
                                       fsdp_error *err)
{
    for (int distance = 1; distance < group->size; distance *= 2)
        FSDP_TRY(run_round(group, distance, mine, size, merge, err));
    return FSDP_OK;
}

/* --- headers ---------------------------------------------------------------------------------- */

/* The header of the first member that is known so far, and that of the first known member whose header
 * differs. */
typedef struct known_headers {
    int32_t first, other; /* members; other -1: all headers are equal */
    fsdp_comm_header headers[2];
} known_headers;

_Static_assert(sizeof(known_headers) <= FSDP_DISSEMINATION_SIZE, "fits into a round");

/* Records the header when it differs and belongs to an earlier member than the recorded one. */
static void consider(known_headers *known, int position, const fsdp_comm_header *header)
{
    bool is_same = memcmp(header, &known->headers[0], sizeof *header) == 0;
    if (position < 0 || is_same || (known->other >= 0 && known->other <= position))
        return;
    known->other = position;
    known->headers[1] = *header;
}

static void merge_headers(void *mine, const void *theirs)
{
    known_headers *known = mine, more, before = *known;
    memcpy(&more, theirs, sizeof more);
    if (more.first < known->first) {
        *known = more;
        more = before;
    }
    consider(known, more.first, &more.headers[0]);
    consider(known, more.other, &more.headers[1]);
}

/* Collective in the group. Begins a call: compares the headers of all members, and fails on all of them with
 * the same error when two differ. */
static fsdp_status message_begin(message_group *group, const fsdp_comm_header *header,
                                 fsdp_error *err)
{
    known_headers known;
    memset(&known, 0, sizeof known);
    known.first = group->rank;
    known.other = -1;
    known.headers[0] = *header;
    group->header = *header;
    group->are_all_here = false;
    atomic_fetch_add(&group->calls, 1);
    FSDP_TRY(message_disseminate(group, &known, sizeof known, merge_headers, err));
    group->are_all_here = true;
    if (known.other < 0)
        return FSDP_OK;
    err->status = fsdp_comm_differ(group->ranks[known.first], &known.headers[0],
                                   group->ranks[known.other], &known.headers[1], err);
    fsdp_message_fail(group, err, false, true);
    return err->status;
}

/* === exchanges ================================================================================ */

/*
 * An exchange: every member has a range of bytes for every other one, and receives one from it.
 * Ranges are cut into pieces; row n is the n-th piece of all ranges of a member. Two rows at a time
 * are in flight in each direction, each in its own half of the staging, so that one half is filled
 * while the other moves, and a failed call leaves no transfer in the caller's buffers. A row of a
 * reduction is reduced when all its pieces have arrived, in the order of the ranks.
 *
 * An exchange cannot deadlock: the lowest row that any member still has to send is one that its
 * receiver has posted, because the receiver has retired all rows before it.
 */

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

/* Returns the bytes of a piece in a group of that many members. */
static size_t message_piece(int members)
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

static void add_row_up(progress *now, uint64_t row)
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
        add_row_up(now, row);
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

/* === calls ==================================================================================== */

/*
 * Runs a collective: compares the headers of all members, then runs its exchanges. Large reductions
 * and broadcasts are cut into slices, one per member, that are gathered afterwards; in small ones
 * every member gets all bytes at once.
 */

enum { LITTLE = 256 << 10 }; /* bytes of all members together, in a call without slices */

typedef struct message_call {
    message_group *group;
    const fsdp_collective *call;
    const unsigned char *in;
    unsigned char *out;
    uint64_t element, slice;
} message_call;

static uint64_t all_bytes(const message_call *now)
{
    return (uint64_t)now->call->count * now->element;
}

/* Depends only on values that are equal on all members. */
static bool is_little(const message_call *now)
{
    return now->group->size == 2 || all_bytes(now) <= LITTLE / (uint64_t)now->group->size;
}

static void clear_routes(const message_group *group)
{
    memset(group->routes, 0, (size_t)group->size * sizeof *group->routes);
}

static fsdp_status move(const message_call *now, fsdp_error *err)
{
    const message_exchange exchange = {.group = now->group};
    return fsdp_message_run_exchange(&exchange, err);
}

static fsdp_status add_up(const message_call *now, const unsigned char *local, unsigned char *to,
                          uint64_t size, fsdp_error *err)
{
    const message_exchange exchange = {
        .group = now->group, .fold = now->call, .local = local, .to = to, .to_size = size};
    return fsdp_message_run_exchange(&exchange, err);
}

/* --- parts ------------------------------------------------------------------------------------ */

static uint64_t part_of(const message_call *now, int member)
{
    return (uint64_t)fsdp_comm_part(now->call, member) * now->element;
}

static fsdp_status gather(const message_call *now, fsdp_error *err)
{
    message_group *group = now->group;
    uint64_t place = 0, local = part_of(now, group->rank);
    clear_routes(group);
    for (int i = 0; i < group->size; i++) {
        uint64_t size = part_of(now, i);
        if (i != group->rank)
            group->routes[i] = (message_route){now->in, now->out + place, local, size};
        else if (now->out + place != now->in && size > 0)
            memcpy(now->out + place, now->in, size);
        place += size;
    }
    return move(now, err);
}

static fsdp_status scatter(const message_call *now, fsdp_error *err)
{
    message_group *group = now->group;
    const unsigned char *mine = now->in;
    uint64_t place = 0, local = part_of(now, group->rank);
    clear_routes(group);
    for (int i = 0; i < group->size; i++) {
        uint64_t size = part_of(now, i);
        if (i != group->rank)
            group->routes[i] = (message_route){now->in + place, NULL, size, local};
        else
            mine = now->in + place;
        place += size;
    }
    return add_up(now, mine, now->out, local, err);
}

/* --- slices ----------------------------------------------------------------------------------- */

static uint64_t slice_at(const message_call *now, int member)
{
    uint64_t at = (uint64_t)member * now->slice, all = all_bytes(now);
    return at < all ? at : all;
}

static uint64_t slice_of(const message_call *now, int member)
{
    return slice_at(now, member + 1) - slice_at(now, member);
}

/* Gathers the members' slices of `from` on all members; `has_all` has all of them already. */
static fsdp_status gather_slices(const message_call *now, const unsigned char *from, int has_all,
                                 fsdp_error *err)
{
    message_group *group = now->group;
    int rank = group->rank;
    clear_routes(group);
    for (int i = 0; i < group->size; i++) {
        if (i == rank)
            continue;
        group->routes[i] = (message_route){from + slice_at(now, rank), now->out + slice_at(now, i),
                                           i == has_all ? 0 : slice_of(now, rank),
                                           rank == has_all ? 0 : slice_of(now, i)};
    }
    return move(now, err);
}

static fsdp_status reduce_slices(const message_call *now, fsdp_error *err)
{
    message_group *group = now->group;
    uint64_t at = slice_at(now, group->rank), local = slice_of(now, group->rank);
    clear_routes(group);
    for (int i = 0; i < group->size; i++) {
        if (i != group->rank)
            group->routes[i] =
                (message_route){now->in + slice_at(now, i), NULL, slice_of(now, i), local};
    }
    FSDP_TRY(add_up(now, now->in + at, now->out + at, local, err));
    return gather_slices(now, now->out, -1, err);
}

static fsdp_status reduce(const message_call *now, fsdp_error *err)
{
    message_group *group = now->group;
    uint64_t all = all_bytes(now);
    if (!is_little(now))
        return reduce_slices(now, err);
    clear_routes(group);
    for (int i = 0; i < group->size; i++) {
        if (i != group->rank)
            group->routes[i] = (message_route){now->in, NULL, all, all};
    }
    return add_up(now, now->in, now->out, all, err);
}

static fsdp_status broadcast(const message_call *now, fsdp_error *err)
{
    message_group *group = now->group;
    int rank = group->rank, root = now->call->root;
    bool is_whole = is_little(now);
    clear_routes(group);
    for (int i = 0; i < group->size && rank == root; i++) {
        if (i == root)
            continue;
        group->routes[i].out = now->in + (is_whole ? 0 : slice_at(now, i));
        group->routes[i].out_size = is_whole ? all_bytes(now) : slice_of(now, i);
    }
    if (rank != root) {
        group->routes[root].in = now->out + (is_whole ? 0 : slice_at(now, rank));
        group->routes[root].in_size = is_whole ? all_bytes(now) : slice_of(now, rank);
    }
    FSDP_TRY(move(now, err));
    return is_whole ? FSDP_OK : gather_slices(now, rank == root ? now->in : now->out, root, err);
}

/* --- all_to_all ------------------------------------------------------------------------------- */

/* The first pair, by sender and then receiver, whose counts differ. */
typedef struct count_difference {
    int32_t from, to; /* from -1: there are none */
    int64_t sent, expected;
} count_difference;

static void merge_differences(void *mine, const void *theirs)
{
    count_difference *known = mine, other;
    memcpy(&other, theirs, sizeof other);
    if (other.from < 0)
        return;
    if (known->from < 0 || other.from < known->from ||
        (other.from == known->from && other.to < known->to))
        *known = other;
}

static fsdp_status exchange_counts(const message_call *now, fsdp_error *err)
{
    message_group *group = now->group;
    clear_routes(group);
    for (int i = 0; i < group->size; i++) {
        if (i != group->rank)
            group->routes[i] = (message_route){(const unsigned char *)&now->call->counts[i],
                                               (unsigned char *)&group->counts[i], sizeof(int64_t),
                                               sizeof(int64_t)};
    }
    group->counts[group->rank] = now->call->counts[group->rank];
    return move(now, err);
}

static fsdp_status compare_counts(const message_call *now, fsdp_error *err)
{
    message_group *group = now->group;
    count_difference first = {.from = -1};
    FSDP_TRY(exchange_counts(now, err));
    for (int i = group->size - 1; i >= 0; i--) {
        if (group->counts[i] != now->call->out_counts[i])
            first = (count_difference){i, group->rank, group->counts[i], now->call->out_counts[i]};
    }
    FSDP_TRY(message_disseminate(group, &first, sizeof first, merge_differences, err));
    if (first.from < 0)
        return FSDP_OK;
    err->status = fsdp_comm_miscount(group->ranks[first.from], group->ranks[first.to], first.sent,
                                     first.expected, &group->header, err);
    fsdp_message_fail(group, err, false, true);
    return err->status;
}

static fsdp_status exchange(const message_call *now, fsdp_error *err)
{
    message_group *group = now->group;
    const unsigned char *from = now->in;
    unsigned char *to = now->out;
    FSDP_TRY(compare_counts(now, err));
    clear_routes(group);
    for (int i = 0; i < group->size; i++) {
        uint64_t sent = (uint64_t)now->call->counts[i] * now->element;
        uint64_t got = (uint64_t)now->call->out_counts[i] * now->element;
        if (i != group->rank)
            group->routes[i] = (message_route){from, to, sent, got};
        else if (sent > 0)
            memcpy(to, from, sent);
        from += sent;
        to += got;
    }
    return move(now, err);
}

/* --- a call ----------------------------------------------------------------------------------- */

static fsdp_status run_exchanges(message_group *group, const fsdp_collective *call, fsdp_error *err)
{
    static fsdp_status (*const steps[])(const message_call *, fsdp_error *) = {
        [FSDP_ALL_GATHER] = gather,   [FSDP_REDUCE_SCATTER] = scatter, [FSDP_ALL_REDUCE] = reduce,
        [FSDP_BROADCAST] = broadcast, [FSDP_ALL_TO_ALL] = exchange,
    };
    message_call now = {.group = group,
                        .call = call,
                        .in = call->in,
                        .out = call->out,
                        .element = fsdp_dtype_size(call->dtype)};
    if (!now.in) /* empty or unused: any valid address */
        now.in = (const unsigned char *)group;
    if (!now.out)
        now.out = (unsigned char *)group;
    uint64_t n = (uint64_t)group->size, share = all_bytes(&now) / n + (all_bytes(&now) % n != 0);
    now.slice = (share + 63) / 64 * 64;
    return steps[call->kind](&now, err);
}

/* An entry of fsdp_transport_ops. */
static fsdp_status message_run(fsdp_comm *comm, const fsdp_collective *call,
                               const fsdp_comm_header *header, fsdp_error *err)
{
    message_group *group = comm->backend;
    fsdp_p2p *p2p = group->transport->p2p;
    fsdp_error failure = {.rank = comm->transport->rank};
    fsdp_status status = p2p->ops->may_call(p2p, &failure);
    if (status == FSDP_OK)
        status = message_begin(group, header, &failure);
    if (status == FSDP_OK)
        status = run_exchanges(group, call, &failure);
    if (status == FSDP_OK)
        return FSDP_OK;
    failure.status = status;
    fsdp_message_fail(group, &failure, true, false);
    *err = failure;
    return status;
}

/* === the transport ============================================================================ */

enum { PLACES = 4 }; /* per member: two halves each way */

/* --- a member's end --------------------------------------------------------------------------- */

static void release_group(message_group *group)
{
    fsdp_p2p *p2p = group->transport->p2p;
    if (group->batch)
        p2p->ops->batch_close(p2p, group->batch);
    for (int i = 0; group->members && i < group->size; i++)
        fsdp_free(group->members[i].reason);
    fsdp_free(group->members);
    fsdp_free(group->routes);
    fsdp_free(group->sources);
    fsdp_free(group->finished);
    fsdp_free(group->is_arriving);
    fsdp_free(group->counts);
}

static bool make_lists(message_group *group)
{
    size_t n = (size_t)group->size;
    group->members = fsdp_alloc(n, sizeof *group->members);
    group->routes = fsdp_alloc(n, sizeof *group->routes);
    group->sources = fsdp_alloc(n, sizeof *group->sources);
    group->finished = fsdp_alloc(n, PLACES * sizeof *group->finished);
    group->is_arriving = fsdp_alloc(n, 2 * sizeof *group->is_arriving);
    group->counts = fsdp_alloc(n, sizeof *group->counts);
    return group->members && group->routes && group->sources && group->finished &&
           group->is_arriving && group->counts;
}

/* On failure nothing is left. Staging memory is not touched before it is used. */
static fsdp_status init_group(message_group *group, message_transport *transport, const int *ranks,
                              int size, int position, fsdp_error *err)
{
    fsdp_p2p *p2p = transport->p2p;
    *group = (message_group){.transport = transport,
                             .rank = position,
                             .size = size,
                             .ranks = ranks,
                             .piece = message_piece(size)};
    fsdp_status status = make_lists(group) ? FSDP_OK : fsdp_fail_memory(err, "a group of ranks");
    size_t places = PLACES * (size_t)size;
    if (status == FSDP_OK)
        status =
            p2p->ops->batch_create(p2p, (int)places, places * group->piece, &group->batch, err);
    if (status == FSDP_OK)
        group->pieces = group->batch->memory;
    else
        release_group(group);
    return status;
}

/* --- a new group ------------------------------------------------------------------------------ */

typedef struct new_group {
    const int *ranks; /* of all groups */
    int size, count;
    fsdp_comm *comm;      /* NULL: this rank is not a member */
    message_group *group; /* NULL: as before, or it is the only one */
} new_group;

static fsdp_status prepare(message_transport *transport, new_group *made, fsdp_error *err)
{
    FSDP_TRY(
        fsdp_comm_create(&transport->base, made->ranks, made->size, made->count, &made->comm, err));
    if (transport->channels == transport->p2p->ops->channels)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot make more than %d groups over %s",
                         transport->channels, transport->p2p->ops->name);
    if (!made->comm || made->size == 1)
        return FSDP_OK;
    message_group *group = fsdp_alloc(1, sizeof *group);
    if (!group)
        return fsdp_fail_memory(err, "a group of ranks");
    fsdp_status status =
        init_group(group, transport, made->comm->ranks, made->size, made->comm->rank, err);
    if (status != FSDP_OK) {
        fsdp_free(group);
        return status;
    }
    group->comm = made->comm;
    made->comm->backend = made->group = group;
    return FSDP_OK;
}

/* Called before other members can use the group, so that their status messages find it. */
static void register_group(message_transport *transport, message_group *group)
{
    pthread_mutex_lock(&transport->lock);
    transport->channels++;
    if (group) {
        group->channel = transport->channels;
        group->next = transport->groups;
        transport->groups = group;
    }
    pthread_mutex_unlock(&transport->lock);
}

static void unregister(message_transport *transport, const message_group *group)
{
    pthread_mutex_lock(&transport->lock);
    message_group **at = &transport->groups;
    while (*at && *at != group)
        at = &(*at)->next;
    if (*at)
        *at = group->next;
    pthread_mutex_unlock(&transport->lock);
}

static fsdp_status make_group(message_transport *transport, new_group *made, fsdp_error *err)
{
    message_group *world = &transport->world;
    uint64_t number = atomic_load(&world->calls) + 1;
    FSDP_TRY(transport->p2p->ops->may_call(transport->p2p, err));
    FSDP_TRY(prepare(transport, made, err));
    fsdp_comm_header header = fsdp_comm_head_groups(made->ranks, made->size, made->count, number);
    register_group(transport, made->group);
    return message_begin(world, &header, err);
}

static fsdp_status create_comm(fsdp_transport *base, const int *ranks, int size, int count,
                               fsdp_comm **comm_out, fsdp_error *err)
{
    message_transport *transport = (message_transport *)base;
    message_group *world = &transport->world;
    new_group made = {.ranks = ranks, .size = size, .count = count};
    fsdp_error why = {.rank = base->rank};
    if (!fsdp_message_has_failed(world, &why)) {
        why.status = make_group(transport, &made, &why);
        if (why.status == FSDP_OK) {
            *comm_out = made.comm;
            return FSDP_OK;
        }
        fsdp_message_fail(world, &why, true, false);
        if (made.group && made.group->channel > 0) /* other members may use it already */
            fsdp_message_fail(made.group, &why, world->is_local, false);
        (void)fsdp_message_has_failed(world, &why);
    }
    fsdp_comm_free(made.comm);
    if (err)
        *err = why;
    return why.status;
}

static void close_comm(fsdp_comm *comm)
{
    message_group *group = comm->backend;
    if (group->channel > 0)
        fsdp_message_leave(group);
    unregister(group->transport, group);
    release_group(group);
    fsdp_free(group);
    comm->backend = NULL;
}

/* --- the transport ---------------------------------------------------------------------------- */

static void abort_comm(fsdp_comm *comm, const fsdp_error *why)
{
    fsdp_message_fail(comm->backend, why, true, false);
}

static bool has_comm_failed(fsdp_comm *comm, fsdp_error *err_out)
{
    return fsdp_message_has_failed(comm->backend, err_out);
}

static void free_transport(message_transport *transport)
{
    for (int i = 0; transport->watches && i < transport->base.size; i++)
        fsdp_process_watch_close(&transport->watches[i]);
    if (transport->observed)
        transport->observed->observer = (fsdp_ctl_observer){0};
    fsdp_free(transport->watches);
    fsdp_free(transport->busy_until_ms);
    fsdp_free(transport->world_ranks);
    pthread_mutex_destroy(&transport->lock);
    fsdp_free(transport);
}

static void close_transport(fsdp_transport *base)
{
    message_transport *transport = (message_transport *)base;
    fsdp_p2p *p2p = transport->p2p;
    fsdp_message_leave(&transport->world);
    release_group(&transport->world);
    p2p->ops->close(p2p);
    free_transport(transport);
}

static const fsdp_transport_ops message_ops = {
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM,
    .comm_create = create_comm,
    .run = message_run,
    .abort = abort_comm,
    .has_failed = has_comm_failed,
    .comm_close = close_comm,
    .set_busy = fsdp_message_set_busy,
    .close = close_transport,
};

static fsdp_status make_transport(int rank, int size, message_transport **transport_out,
                                  fsdp_error *err)
{
    message_transport *transport = fsdp_alloc(1, sizeof *transport);
    if (!transport || pthread_mutex_init(&transport->lock, NULL) != 0) {
        fsdp_free(transport);
        return fsdp_fail_memory(err, "a transport");
    }
    transport->base.rank = rank;
    transport->base.size = size;
    transport->world_ranks = fsdp_alloc((size_t)size, sizeof *transport->world_ranks);
    transport->watches = fsdp_alloc((size_t)size, sizeof *transport->watches);
    transport->busy_until_ms = fsdp_alloc((size_t)size, sizeof *transport->busy_until_ms);
    for (int i = 0; transport->watches && i < size; i++)
        transport->watches[i].fd = -1;
    for (int i = 0; transport->world_ranks && i < size; i++)
        transport->world_ranks[i] = i;
    if (transport->world_ranks && transport->watches && transport->busy_until_ms) {
        *transport_out = transport;
        return FSDP_OK;
    }
    free_transport(transport);
    return fsdp_fail_memory(err, "a transport");
}

static fsdp_status connect_transport(message_transport *transport, fsdp_p2p *p2p, int deadline_ms,
                                     fsdp_error *err)
{
    transport->p2p = p2p;
    transport->ops = message_ops;
    transport->ops.name = p2p->ops->name;
    transport->base.ops = &transport->ops;
    transport->base.deadline_ms = deadline_ms;
    FSDP_TRY(init_group(&transport->world, transport, transport->world_ranks, transport->base.size,
                        transport->base.rank, err));
    transport->world.channel = transport->channels = 1;
    return FSDP_OK;
}

fsdp_status fsdp_transport_message(fsdp_ctl *ctl, fsdp_p2p *p2p, int deadline_ms,
                                   fsdp_transport **transport_out, fsdp_error *err)
{
    message_transport *transport = NULL;
    fsdp_error why = {0};
    fsdp_status status = make_transport(fsdp_ctl_rank(ctl), fsdp_ctl_size(ctl), &transport, &why);
    if (status == FSDP_OK)
        status = connect_transport(transport, p2p, deadline_ms, &why);
    bool is_connected = status == FSDP_OK;
    status = fsdp_ctl_agree(ctl, status, &why);
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(ctl, fsdp_process_watch_all(ctl, transport->watches, &why), &why);
    if (status == FSDP_OK) {
        transport->observed = ctl;
        ctl->observer =
            (fsdp_ctl_observer){.busy_until = fsdp_message_busy_until, .context = transport};
        *transport_out = &transport->base;
        return FSDP_OK;
    }
    if (is_connected)
        release_group(&transport->world);
    if (transport)
        free_transport(transport);
    p2p->ops->close(p2p);
    if (err)
        *err = why;
    return status;
}

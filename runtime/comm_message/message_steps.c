/*
 * Runs a collective: compares the headers of all members, then runs its exchanges. Large reductions
 * and broadcasts are cut into slices, one per member, that are gathered afterwards; in small ones
 * every member gets all bytes at once. See comm_message.h.
 */
#include "runtime/comm_message/comm_message.h"

#include <string.h>

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
    FSDP_TRY(fsdp_message_disseminate(group, &first, sizeof first, merge_differences, err));
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

fsdp_status fsdp_message_run(fsdp_comm *comm, const fsdp_collective *call,
                             const fsdp_comm_header *header, fsdp_error *err)
{
    message_group *group = comm->backend;
    fsdp_p2p *p2p = group->transport->p2p;
    fsdp_error failure = {.rank = comm->transport->rank};
    fsdp_status status = p2p->ops->may_call(p2p, &failure);
    if (status == FSDP_OK)
        status = fsdp_message_begin(group, header, &failure);
    if (status == FSDP_OK)
        status = run_exchanges(group, call, &failure);
    if (status == FSDP_OK)
        return FSDP_OK;
    failure.status = status;
    fsdp_message_fail(group, &failure, true, false);
    *err = failure;
    return status;
}

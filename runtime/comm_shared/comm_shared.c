/*
 * Runs a collective over shared memory: every member publishes its call and its buffers, all pass a
 * barrier, compare the calls, run the steps, and pass a barrier after each. See comm_shared.h.
 */
#include "runtime/comm_shared/comm_shared.h"

#include <string.h>

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
                                                 : FSDP_SHARED_PRIVATE;
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
    move->is_in_private = mine->in == FSDP_SHARED_PRIVATE;
    move->is_out_private = mine->out == FSDP_SHARED_PRIVATE;
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
        if (theirs->in == FSDP_SHARED_PRIVATE || (uses_out && theirs->out == FSDP_SHARED_PRIVATE))
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
        move->steps = &fsdp_shared_steps_view;
    else if (move->call->view && move->call->kind == FSDP_REDUCE_SCATTER)
        return fail_private(move->group, err);
    uint64_t pieces = longest > 0 ? (longest - 1) / move->piece + 1 : 1;
    uint64_t steps = pieces + move->steps->extra;
    for (uint64_t step = 0; step < steps; step++)
        FSDP_TRY(run_step(move, step, move->is_in_private && step + 1 < pieces, err));
    move->group->half += (unsigned)(pieces % 2);
    return FSDP_OK;
}

/*
 * The caller gets its buffers back, so that no member may read them any more. Between processes a
 * late read is harmless: its reader finds the failure afterwards.
 */
static void give_up(shared_group *group, const fsdp_error *why)
{
    fsdp_shared_fail(group, why, true);
    if (group->transport->segment_size == 0)
        fsdp_shared_wait_for_readers(group);
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
    fsdp_shared_steps_choose(&move);
    if (!call->stream && (move.is_in_private || move.is_little))
        move.steps->fill(&move, 0);
    fsdp_status status = run_steps(comm, &move, &failure);
    if (status == FSDP_OK && call->view && move.steps != &fsdp_shared_steps_view)
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

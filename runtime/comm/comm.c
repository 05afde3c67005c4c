/*
 * The common part of all back ends: checks arguments, serves groups of one rank, and poisons
 * communicators: after the first failure of any rank every call returns that failure. See comm.h.
 */
#include "runtime/comm/comm_backend.h"

#include <string.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "kernels/train/tensor.h"
#include "runtime/device/device.h"

enum { POISON_NONE, POISON_COMES, POISON_IS_SET };

/* --- a communicator --------------------------------------------------------------------------- */

static fsdp_status check_ranks(const fsdp_transport *transport, const int *ranks, int size,
                               int *position_out, fsdp_error *err)
{
    *position_out = -1;
    if (size < 1 || size > transport->size)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a group of %d ranks in a world of %d", size,
                         transport->size);
    for (int i = 0; i < size; i++) {
        int rank = ranks[i];
        bool is_twice = false;
        for (int j = 0; j < i; j++)
            is_twice |= ranks[j] == rank;
        if (rank < 0 || rank >= transport->size || is_twice)
            return fsdp_fail(err, FSDP_ERR_USAGE, "rank %d in a group %s", rank,
                             is_twice ? "twice" : "is not in the world");
        if (rank == transport->rank)
            *position_out = i;
    }
    return FSDP_OK;
}

fsdp_status fsdp_comm_create(fsdp_transport *transport, const int *ranks, int size,
                             fsdp_comm **comm_out, fsdp_error *err)
{
    int position;
    *comm_out = NULL;
    FSDP_TRY(check_ranks(transport, ranks, size, &position, err));
    if (position < 0)
        return FSDP_OK;
    fsdp_comm *comm = fsdp_alloc(1, sizeof *comm);
    int *copy = fsdp_alloc((size_t)size, sizeof *copy);
    if (!comm || !copy) {
        fsdp_free(comm);
        fsdp_free(copy);
        return fsdp_fail_memory(err, "a communicator");
    }
    memcpy(copy, ranks, (size_t)size * sizeof *ranks);
    *comm = (fsdp_comm){.transport = transport, .rank = position, .size = size, .ranks = copy};
    *comm_out = comm;
    return FSDP_OK;
}

void fsdp_comm_free(fsdp_comm *comm)
{
    if (!comm)
        return;
    fsdp_comm_close_queue(comm);
    if (comm->backend)
        comm->transport->ops->comm_close(comm);
    fsdp_free(comm->ranks);
    fsdp_free(comm);
}

int fsdp_comm_rank(const fsdp_comm *comm)
{
    if (!comm)
        return 0;
    return comm->rank;
}

int fsdp_comm_size(const fsdp_comm *comm)
{
    if (!comm)
        return 0;
    return comm->size;
}

const int *fsdp_comm_ranks(const fsdp_comm *comm)
{
    if (!comm)
        return NULL;
    return comm->ranks;
}

void *fsdp_comm_alloc(fsdp_comm *comm, size_t size)
{
    if (!comm)
        return NULL;
    fsdp_transport *transport = comm->transport;
    return transport->ops->alloc ? transport->ops->alloc(transport, size) : NULL;
}

void fsdp_comm_dealloc(fsdp_comm *comm, void *data)
{
    if (!comm)
        return;
    if (data)
        comm->transport->ops->dealloc(comm->transport, data);
}

void *fsdp_transport_alloc_pages(fsdp_transport *transport, size_t size)
{
    (void)transport;
    return fsdp_alloc_pages(size);
}

void fsdp_transport_free_pages(fsdp_transport *transport, void *data)
{
    (void)transport;
    fsdp_free(data);
}

/* --- poison ----------------------------------------------------------------------------------- */

/* Another thread of this rank may abort at any time: the state is set after the text. */
static void keep_poison(fsdp_comm *comm, const fsdp_error *why)
{
    int none = POISON_NONE;
    if (!atomic_compare_exchange_strong(&comm->poison_state, &none, POISON_COMES))
        return;
    comm->poison = *why;
    atomic_store(&comm->poison_state, POISON_IS_SET);
}

/* The group's failure goes before the local one, so that all ranks report the same first
 * failure. */
static bool is_poisoned(fsdp_comm *comm, fsdp_error *err_out)
{
    const fsdp_transport_ops *ops = comm->transport->ops;
    if (comm->size > 1 && ops->has_failed && ops->has_failed(comm, err_out))
        return true;
    if (atomic_load(&comm->poison_state) != POISON_IS_SET)
        return false;
    *err_out = comm->poison;
    return true;
}

fsdp_status fsdp_comm_failure(fsdp_comm *comm, fsdp_error *err)
{
    fsdp_error failure = {0};
    if (!is_poisoned(comm, &failure))
        return FSDP_OK;
    if (err)
        *err = failure;
    return failure.status;
}

static void poison(fsdp_comm *comm, const fsdp_error *why)
{
    const fsdp_transport_ops *ops = comm->transport->ops;
    keep_poison(comm, why);
    if (comm->size > 1 && ops->abort)
        ops->abort(comm, why);
}

void fsdp_comm_abort(fsdp_comm *comm, const fsdp_error *why)
{
    if (!comm)
        return;
    fsdp_error said = {0};
    if (why)
        said = *why;
    if (said.status == FSDP_OK)
        (void)fsdp_fail(&said, FSDP_ERR_CANCELLED, "gave up");
    said.rank = comm->transport->rank;
    poison(comm, &said);
}

/* --- a call ----------------------------------------------------------------------------------- */

static fsdp_status check(const fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    fsdp_status status = fsdp_comm_check(comm, call, err);
    if (status == FSDP_OK)
        return FSDP_OK;
    err->rank = comm->transport->rank;
    if (call->kind < FSDP_ALL_GATHER || call->kind > FSDP_ALL_TO_ALL)
        return status; /* it has no name */
    char name[200];
    fsdp_collective named = *call;
    named.counts = NULL; /* they may be what is wrong */
    fsdp_comm_header header = fsdp_comm_head(comm, &named);
    fsdp_comm_describe(&header, name, sizeof name);
    fsdp_error_prefix(err, "%s", name);
    return status;
}

/* Gives a stream the copy, or the sum of one, that a group of one rank makes. */
static void copy_in_stream(const fsdp_collective *call, size_t count)
{
    const fsdp_device_kernels *kernels = call->stream->device->ops->kernels;
    const fsdp_fold_call sum = {.to = call->out,
                                .from = &call->in,
                                .n = 1,
                                .dtype = call->dtype,
                                .count = count,
                                .how = fsdp_comm_reduction(call, 1)};
    if (fsdp_comm_reduces((uint32_t)call->kind) && call->op == FSDP_REDUCE_PREMUL_SUM)
        kernels->fold(call->stream, &sum);
    else if (call->in != call->out)
        kernels->copy(call->stream, call->out, call->in, count * fsdp_dtype_size(call->dtype));
}

/* A group of one rank: the result is its own input. */
static fsdp_status run_alone(const fsdp_collective *call, fsdp_error *err)
{
    int64_t count = fsdp_comm_part(call, 0);
    if (call->view) {
        call->view->see(call->view->context, &call->in);
        return FSDP_OK;
    }
    if (call->kind == FSDP_ALL_TO_ALL && count != call->out_counts[0])
        return fsdp_fail(err, FSDP_ERR_USAGE, "counts and out_counts of the only rank differ");
    if (call->kind == FSDP_BROADCAST || count == 0)
        return FSDP_OK;
    if (call->stream)
        copy_in_stream(call, (size_t)count);
    else if (fsdp_comm_reduces((uint32_t)call->kind) && call->op == FSDP_REDUCE_PREMUL_SUM)
        fsdp_tensor_fold(call->out, &call->in, 1, call->dtype, (size_t)count,
                         fsdp_comm_reduction(call, 1));
    else if (call->in != call->out)
        memcpy(call->out, call->in, (size_t)count * fsdp_dtype_size(call->dtype));
    return FSDP_OK;
}

static bool lacks_op(const fsdp_comm *comm, const fsdp_collective *call)
{
    unsigned abilities = comm->transport->ops->abilities;
    if (!fsdp_comm_reduces((uint32_t)call->kind))
        return false;
    return (call->op == FSDP_REDUCE_AVG && !(abilities & FSDP_COMM_AVG)) ||
           (call->op == FSDP_REDUCE_PREMUL_SUM && !(abilities & FSDP_COMM_PREMUL_SUM));
}

bool fsdp_comm_sees(const fsdp_comm *comm, int member, const void *data, size_t size)
{
    return comm->transport->ops->sees && comm->transport->ops->sees(comm, member, data, size);
}

void fsdp_comm_view_out(const fsdp_collective *call, int size, const void **parts)
{
    size_t element = fsdp_dtype_size(call->dtype);
    for (int i = 0; i < size; i++)
        parts[i] = (const unsigned char *)call->out + (size_t)fsdp_comm_place(call, i) * element;
    call->view->see(call->view->context, parts);
}

static fsdp_status run_with_view(fsdp_comm *comm, const fsdp_collective *call,
                                 const fsdp_comm_header *header, fsdp_error *err)
{
    const void **parts = fsdp_alloc((size_t)comm->size, sizeof *parts);
    if (!parts)
        return fsdp_fail_memory(err, "a view");
    fsdp_status status = comm->transport->ops->run(comm, call, header, err);
    if (status == FSDP_OK)
        fsdp_comm_view_out(call, comm->size, parts);
    fsdp_free(parts);
    return status;
}

static fsdp_status run(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    FSDP_TRY(check(comm, call, err));
    if (call->stream && !(comm->transport->ops->abilities & FSDP_COMM_STREAMS))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s moves the host's memory only: a GPU's memory needs --comm nccl, or "
                         "ranks that are threads (--threads N)",
                         comm->transport->ops->name);
    if (comm->size == 1)
        return run_alone(call, err);
    if (lacks_op(comm, call))
        return fsdp_comm_run_scaled(comm, call, err);
    fsdp_comm_header header = fsdp_comm_head(comm, call);
    if (call->view && !(comm->transport->ops->abilities & FSDP_COMM_POOL))
        return run_with_view(comm, call, &header, err);
    return comm->transport->ops->run(comm, call, &header, err);
}

fsdp_status fsdp_comm_run_now(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    fsdp_error failure = {0};
    if (!is_poisoned(comm, &failure)) {
        comm->sequence++;
        failure.status = run(comm, call, &failure);
        if (failure.status == FSDP_OK)
            return FSDP_OK;
        poison(comm, &failure);
        (void)is_poisoned(comm, &failure);
    }
    if (err)
        *err = failure;
    return failure.status;
}

fsdp_status fsdp_comm_run(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    FSDP_NEED(err, comm, call);
    fsdp_comm_settle(comm);
    return fsdp_comm_run_now(comm, call, err);
}

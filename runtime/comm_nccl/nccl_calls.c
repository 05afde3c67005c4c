/*
 * Gives calls to NCCL: each becomes work of the caller's stream. Uneven parts are one group of broadcasts,
 * reductions or messages, which NCCL runs as one. See comm_nccl.h.
 */
#include "runtime/comm_nccl/comm_nccl.h"

#include <string.h>

#include "base/core/clock.h"
#include "base/core/mem.h"
#include "kernels/train/tensor.h"

/* A call, as NCCL gets it. Parts are in units of `dtype`: bytes where nothing is reduced. */
typedef struct nccl_issue {
    nccl_group *group;
    const fsdp_nccl *nccl;
    const fsdp_collective *call;
    fsdp_nccl_stream stream;
    fsdp_nccl_dtype dtype;
    size_t element, unit; /* bytes of an element; units of an element */
    fsdp_nccl_op op;
} nccl_issue;

/* --- the pending calls ------------------------------------------------------------------------ */

fsdp_status fsdp_nccl_begin(nccl_group *group, const fsdp_comm_header *header, uint64_t *number_out,
                            fsdp_error *err)
{
    fsdp_error why = {0};
    pthread_mutex_lock(&group->lock);
    fsdp_nccl_advance(group);
    for (unsigned naps = 0; group->issued - group->done == FSDP_NCCL_PENDING; naps++) {
        pthread_mutex_unlock(&group->lock);
        fsdp_nccl_nap(naps);
        if (fsdp_nccl_group_has_failed(group, &why)) {
            if (err)
                *err = why;
            return why.status;
        }
        pthread_mutex_lock(&group->lock);
        fsdp_nccl_advance(group);
    }
    uint64_t number = group->issued++;
    group->pending[number % FSDP_NCCL_PENDING] =
        (nccl_pending){.header = *header, .since_ms = fsdp_now_ms()};
    atomic_store(&group->flags[number % FSDP_NCCL_PENDING], 0);
    pthread_mutex_unlock(&group->lock);
    *number_out = number;
    return FSDP_OK;
}

/* --- types and operations --------------------------------------------------------------------- */

static int nccl_dtype_of(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_F64: return FSDP_NCCL_F64;
    case FSDP_F32: return FSDP_NCCL_F32;
    case FSDP_F16: return FSDP_NCCL_F16;
    case FSDP_BF16: return FSDP_NCCL_BF16;
    case FSDP_I64: return FSDP_NCCL_I64;
    case FSDP_I32: return FSDP_NCCL_I32;
    case FSDP_I8: return FSDP_NCCL_I8;
    case FSDP_U64: return FSDP_NCCL_U64;
    case FSDP_U32: return FSDP_NCCL_U32;
    case FSDP_U8: return FSDP_NCCL_U8;
    default: return -1;
    }
}

static fsdp_status find_dtype(const nccl_issue *issue, fsdp_nccl_dtype *dtype_out, fsdp_error *err)
{
    const fsdp_collective *call = issue->call;
    const char *name = fsdp_dtype_name(call->dtype);
    int dtype = nccl_dtype_of(call->dtype);
    if (dtype < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "NCCL does not reduce %s", name);
    if (call->op == FSDP_REDUCE_MAX && fsdp_dtype_describe(call->dtype)->is_float)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "NCCL's maximum of %s may lose a NaN: use memory of the host", name);
    *dtype_out = dtype;
    return FSDP_OK;
}

/* The oldest operation is given up when there is no room; NCCL allows that as soon as a call that used it has
 * returned. */
static fsdp_nccl_result make_factor(nccl_issue *issue)
{
    nccl_group *group = issue->group;
    const fsdp_collective *call = issue->call;
    nccl_factor *place = &group->factors[group->factors_made % FSDP_NCCL_FACTORS];
    _Alignas(16) unsigned char scalar[16];
    const fsdp_rect cast = fsdp_rect_line(scalar, call->dtype, &call->factor, FSDP_F64, 1);
    fsdp_rects_copy(&cast, 1);
    if (group->factors_made >= FSDP_NCCL_FACTORS)
        (void)issue->nccl->RedOpDestroy(place->op, group->handle);
    fsdp_nccl_result result = issue->nccl->RedOpCreatePreMulSum(
        &place->op, scalar, issue->dtype, FSDP_NCCL_HOST_IMMEDIATE, group->handle);
    if (result != FSDP_NCCL_SUCCESS)
        return result;
    place->dtype = call->dtype;
    place->factor = call->factor;
    group->factors_made++;
    issue->op = place->op;
    return FSDP_NCCL_SUCCESS;
}

static fsdp_nccl_result find_op(nccl_issue *issue)
{
    const nccl_group *group = issue->group;
    const fsdp_collective *call = issue->call;
    static const fsdp_nccl_op ops[] = {[FSDP_REDUCE_SUM] = FSDP_NCCL_SUM,
                                       [FSDP_REDUCE_AVG] = FSDP_NCCL_AVG,
                                       [FSDP_REDUCE_MAX] = FSDP_NCCL_MAX};
    if (call->op != FSDP_REDUCE_PREMUL_SUM) {
        issue->op = ops[call->op];
        return FSDP_NCCL_SUCCESS;
    }
    uint64_t made = group->factors_made;
    for (uint64_t i = 0; i < FSDP_NCCL_FACTORS && i < made; i++) {
        if (group->factors[i].dtype != call->dtype || group->factors[i].factor != call->factor)
            continue;
        issue->op = group->factors[i].op;
        return FSDP_NCCL_SUCCESS;
    }
    return make_factor(issue);
}

/* --- the collectives -------------------------------------------------------------------------- */

static const void *in_at(const nccl_issue *issue, int64_t place)
{
    return (const unsigned char *)issue->call->in + (size_t)place * issue->element;
}

static void *out_at(const nccl_issue *issue, int64_t place)
{
    return (unsigned char *)issue->call->out + (size_t)place * issue->element;
}

static fsdp_nccl_result first_of(fsdp_nccl_result first, fsdp_nccl_result next)
{
    return first == FSDP_NCCL_SUCCESS || first == FSDP_NCCL_IN_PROGRESS ? next : first;
}

static fsdp_nccl_result gather(nccl_issue *issue)
{
    const fsdp_collective *call = issue->call;
    const nccl_group *group = issue->group;
    if (!call->counts)
        return issue->nccl->AllGather(call->in, call->out, (size_t)call->count * issue->unit,
                                      issue->dtype, group->handle, issue->stream);
    fsdp_nccl_result result = issue->nccl->GroupStart();
    for (int i = 0; i < group->comm->size; i++) {
        if (call->counts[i] == 0)
            continue;
        void *part = out_at(issue, fsdp_comm_place(call, i));
        const void *from = i == group->comm->rank ? call->in : part;
        result = first_of(result,
                          issue->nccl->Broadcast(from, part, (size_t)call->counts[i] * issue->unit,
                                                 issue->dtype, i, group->handle, issue->stream));
    }
    return first_of(result, issue->nccl->GroupEnd());
}

static fsdp_nccl_result reduce_scatter(nccl_issue *issue)
{
    const fsdp_collective *call = issue->call;
    const nccl_group *group = issue->group;
    if (!call->counts)
        return issue->nccl->ReduceScatter(call->in, call->out, (size_t)call->count, issue->dtype,
                                          issue->op, group->handle, issue->stream);
    fsdp_nccl_result result = issue->nccl->GroupStart();
    for (int i = 0; i < group->comm->size; i++) {
        if (call->counts[i] == 0)
            continue;
        void *to = i == group->comm->rank ? call->out : NULL;
        result = first_of(result, issue->nccl->Reduce(in_at(issue, fsdp_comm_place(call, i)), to,
                                                      (size_t)call->counts[i], issue->dtype,
                                                      issue->op, i, group->handle, issue->stream));
    }
    return first_of(result, issue->nccl->GroupEnd());
}

static fsdp_nccl_result all_reduce(nccl_issue *issue)
{
    return issue->nccl->AllReduce(issue->call->in, issue->call->out, (size_t)issue->call->count,
                                  issue->dtype, issue->op, issue->group->handle, issue->stream);
}

/* The root's own data stays where it is. */
static fsdp_nccl_result broadcast(nccl_issue *issue)
{
    const fsdp_collective *call = issue->call;
    bool is_root = call->root == issue->group->comm->rank;
    void *data = is_root ? (void *)call->in : call->out;
    return issue->nccl->Broadcast(data, data, (size_t)call->count * issue->unit, issue->dtype,
                                  call->root, issue->group->handle, issue->stream);
}

static fsdp_nccl_result all_to_all(nccl_issue *issue)
{
    const fsdp_collective *call = issue->call;
    const nccl_group *group = issue->group;
    int64_t from = 0, to = 0;
    fsdp_nccl_result result = issue->nccl->GroupStart();
    for (int i = 0; i < group->comm->size; i++) {
        if (call->counts[i] > 0)
            result = first_of(
                result, issue->nccl->Send(in_at(issue, from), (size_t)call->counts[i] * issue->unit,
                                          issue->dtype, i, group->handle, issue->stream));
        if (call->out_counts[i] > 0)
            result =
                first_of(result, issue->nccl->Recv(out_at(issue, to),
                                                   (size_t)call->out_counts[i] * issue->unit,
                                                   issue->dtype, i, group->handle, issue->stream));
        from += call->counts[i];
        to += call->out_counts[i];
    }
    return first_of(result, issue->nccl->GroupEnd());
}

/* With the right to call NCCL. */
static fsdp_nccl_result start(nccl_issue *issue)
{
    fsdp_nccl_result result = FSDP_NCCL_SUCCESS;
    if (fsdp_comm_reduces((uint32_t)issue->call->kind))
        result = find_op(issue);
    if (result != FSDP_NCCL_SUCCESS)
        return result;
    switch (issue->call->kind) {
    case FSDP_ALL_GATHER: return gather(issue);
    case FSDP_REDUCE_SCATTER: return reduce_scatter(issue);
    case FSDP_ALL_REDUCE: return all_reduce(issue);
    case FSDP_BROADCAST: return broadcast(issue);
    case FSDP_ALL_TO_ALL: return all_to_all(issue);
    }
    return FSDP_NCCL_INVALID_ARGUMENT;
}

/* --- a call ----------------------------------------------------------------------------------- */

static fsdp_status issue_call(nccl_issue *issue, const fsdp_comm_header *header, fsdp_error *err)
{
    nccl_group *group = issue->group;
    const fsdp_device_kernels *kernels = group->transport->device->ops->kernels;
    fsdp_nccl_result result = FSDP_NCCL_IN_PROGRESS;
    uint64_t number = 0;
    FSDP_TRY(fsdp_nccl_begin(group, header, &number, err));
    pthread_mutex_lock(&group->calling);
    if (group->handle) /* else await returns the failure */
        result = start(issue);
    pthread_mutex_unlock(&group->calling);
    fsdp_status status = fsdp_nccl_await(group, result, err);
    _Atomic unsigned char *flag = &group->flags[number % FSDP_NCCL_PENDING];
    if (status == FSDP_OK)
        kernels->fill(issue->call->stream, (void *)flag, 1, 1);
    else
        atomic_store(flag, 1); /* no stream will */
    return status;
}

/* The inner transport compares the headers before it moves the one byte. */
static fsdp_status compare(nccl_group *group, const fsdp_comm_header *header, fsdp_error *err)
{
    unsigned char byte = 0, *bytes = fsdp_alloc((size_t)group->comm->size, 1);
    if (!bytes)
        return fsdp_fail_memory(err, "the comparison of calls");
    const fsdp_collective call = {
        .kind = FSDP_ALL_GATHER, .dtype = FSDP_U8, .in = &byte, .out = bytes, .count = 1};
    fsdp_status status = group->inner->transport->ops->run(group->inner, &call, header, err);
    fsdp_free(bytes);
    return status;
}

static fsdp_status run_in_stream(nccl_group *group, const fsdp_collective *call,
                                 const fsdp_comm_header *header, fsdp_error *err)
{
    const fsdp_device_ops *device = group->transport->device->ops;
    nccl_issue issue = {.group = group,
                        .nccl = group->transport->nccl,
                        .call = call,
                        .dtype = FSDP_NCCL_I8,
                        .element = fsdp_dtype_size(call->dtype)};
    issue.unit = issue.element;
    if (fsdp_comm_reduces((uint32_t)call->kind))
        FSDP_TRY(find_dtype(&issue, &issue.dtype, err));
    if (group->transport->check)
        FSDP_TRY(compare(group, header, err));
    issue.stream = device->native(call->stream);
    return issue_call(&issue, header, err);
}

fsdp_status fsdp_nccl_run(fsdp_comm *comm, const fsdp_collective *call,
                          const fsdp_comm_header *header, fsdp_error *err)
{
    nccl_group *group = comm->backend;
    fsdp_collective moved = *call;
    moved.view = NULL; /* comm.c shows it what was moved */
    if (!call->stream)
        return fsdp_comm_run_now(group->inner, &moved, err);
    fsdp_error mine = {.rank = comm->transport->rank};
    char name[200];
    fsdp_status status = run_in_stream(group, call, header, &mine);
    if (status != FSDP_OK && !fsdp_nccl_group_has_failed(group, NULL)) {
        fsdp_comm_describe(header, name, sizeof name);
        fsdp_error_prefix(&mine, "%s", name);
    }
    if (status != FSDP_OK && err)
        *err = mine;
    return status;
}

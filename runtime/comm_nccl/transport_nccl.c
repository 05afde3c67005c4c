/*
 * The transport over NCCL: its groups (their memory, their calls, their creation and end) and the transport
 * itself. See comm_nccl.h.
 */
#include "runtime/comm_nccl/transport_nccl.h"
#include "base/core/clock.h"
#include "base/core/mem.h"
#include "kernels/train/tensor.h"
#include "runtime/comm_nccl/comm_nccl.h"
#include "runtime/comm_nccl/nccl_library.h"
#include "runtime/device/cuda_library.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* === memory =================================================================================== */

/*
 * Memory that NCCL allocates and registers with all groups, so that it moves without copies through NCCL's
 * own buffers. A library that cannot do that gives none, and plain memory of the device does. NCCL and CUDA
 * may wait here for work that waits for a lost rank: the watch, which ends that work, needs no lock of this.
 */

/* With the transport's `memory`. A block that NCCL does not register still works. */
static void register_block(nccl_block *block, nccl_group *group)
{
    const fsdp_nccl *nccl = group->transport->nccl;
    nccl_registration *made = nccl->CommRegister ? fsdp_alloc(1, sizeof *made) : NULL;
    fsdp_nccl_result result = FSDP_NCCL_INVALID_USAGE;
    if (!made)
        return;
    pthread_mutex_lock(&group->calling);
    fsdp_nccl_comm handle = atomic_load(&group->handle);
    if (handle)
        result = nccl->CommRegister(handle, block->data, block->size, &made->handle);
    pthread_mutex_unlock(&group->calling);
    if (result != FSDP_NCCL_SUCCESS) {
        fsdp_free(made);
        return;
    }
    made->group = group;
    made->next = block->registrations;
    block->registrations = made;
}

/* With the transport's `memory`. group: NULL means all. */
static void deregister_block(nccl_block *block, const nccl_group *group)
{
    nccl_registration **at = &block->registrations;
    while (*at) {
        nccl_registration *made = *at;
        if (group && made->group != group) {
            at = &made->next;
            continue;
        }
        pthread_mutex_lock(&made->group->calling);
        fsdp_nccl_comm handle = atomic_load(&made->group->handle);
        if (handle)
            (void)made->group->transport->nccl->CommDeregister(handle, made->handle);
        pthread_mutex_unlock(&made->group->calling);
        if (!handle) /* NCCL ends the registration with the communicator, and needs the memory for it */
            (void)fsdp_nccl_await_end(made->group);
        *at = made->next;
        fsdp_free(made);
    }
}

/* Registers all blocks with a new group; ends the registrations of one that closes. */
static void nccl_register_blocks(nccl_group *group)
{
    pthread_mutex_lock(&group->transport->memory);
    for (nccl_block *block = group->transport->blocks; block; block = block->next)
        register_block(block, group);
    pthread_mutex_unlock(&group->transport->memory);
}

static void nccl_deregister_blocks(nccl_group *group)
{
    pthread_mutex_lock(&group->transport->memory);
    for (nccl_block *block = group->transport->blocks; block; block = block->next)
        deregister_block(block, group);
    pthread_mutex_unlock(&group->transport->memory);
}

static void *nccl_alloc(fsdp_transport *base, size_t size)
{
    nccl_transport *transport = (nccl_transport *)base;
    const fsdp_nccl *nccl = transport->nccl;
    nccl_block *block = nccl->MemAlloc && nccl->MemFree ? fsdp_alloc(1, sizeof *block) : NULL;
    if (!block)
        return NULL;
    block->size = size;
    (void)transport->device->ops->choose_gpu(transport->device);
    if (nccl->MemAlloc(&block->data, size) != FSDP_NCCL_SUCCESS) {
        fsdp_free(block);
        return NULL;
    }
    pthread_mutex_lock(&transport->memory);
    block->next = transport->blocks;
    transport->blocks = block;
    for (nccl_group *group = transport->groups; group; group = group->next)
        if (!group->is_creator)
            register_block(block, group);
    pthread_mutex_unlock(&transport->memory);
    return block->data;
}

static void free_block(nccl_transport *transport, nccl_block *block)
{
    deregister_block(block, NULL);
    (void)transport->nccl->MemFree(block->data);
    fsdp_free(block);
}

static void nccl_dealloc(fsdp_transport *base, void *data)
{
    nccl_transport *transport = (nccl_transport *)base;
    pthread_mutex_lock(&transport->memory);
    nccl_block **at = &transport->blocks;
    while (*at && (*at)->data != data)
        at = &(*at)->next;
    nccl_block *block = *at;
    if (block) {
        *at = block->next;
        free_block(transport, block);
    }
    pthread_mutex_unlock(&transport->memory);
}

static void nccl_free_blocks(nccl_transport *transport)
{
    while (transport->blocks) {
        nccl_block *next = transport->blocks->next;
        free_block(transport, transport->blocks);
        transport->blocks = next;
    }
}

/* === calls ==================================================================================== */

/*
 * Gives calls to NCCL: each becomes work of the caller's stream. Uneven parts are one group of broadcasts,
 * reductions or messages, which NCCL runs as one.
 */

/* A call, as NCCL gets it. Parts are in units of `dtype`: bytes where nothing is reduced. */
typedef struct nccl_issue {
    nccl_group *group;
    const fsdp_nccl *nccl;
    const fsdp_collective *call;
    fsdp_nccl_comm handle; /* as it was when the call began: the watch may take that of the group */
    fsdp_nccl_stream stream;
    fsdp_nccl_dtype dtype;
    size_t element, unit; /* bytes of an element; units of an element */
    fsdp_nccl_op op;
} nccl_issue;

/* --- waits ------------------------------------------------------------------------------------- */

/* NCCL's notice that another rank is gone becomes the group's failure when the watch knows no better one. */
static fsdp_nccl_result await_reason(nccl_group *group, fsdp_nccl_result result)
{
    fsdp_error why = {0};
    if (result != FSDP_NCCL_REMOTE_ERROR)
        return result;
    (void)fsdp_nccl_fail(group->transport, result, &why);
    fsdp_nccl_group_fail(group, &why, FSDP_NCCL_REMOTE);
    return FSDP_NCCL_IN_PROGRESS;
}

/* Waits until NCCL has done what gave `result`, or the group has failed; the watch sees to the deadline. */
static fsdp_status await_result(nccl_group *group, fsdp_nccl_result result, fsdp_error *err)
{
    fsdp_error why = {0};
    bool has_noticed = result == FSDP_NCCL_REMOTE_ERROR;
    result = await_reason(group, result);
    for (unsigned naps = 0; result == FSDP_NCCL_IN_PROGRESS; naps++) {
        if (fsdp_nccl_group_has_failed(group, &why)) {
            if (err)
                *err = why;
            return why.status;
        }
        fsdp_nccl_nap(naps);
        pthread_mutex_lock(&group->calling);
        fsdp_nccl_comm handle = atomic_load(&group->handle);
        if (handle && !has_noticed) /* one that blocks reports success again */
            result = fsdp_nccl_poll(group->transport->nccl, handle);
        pthread_mutex_unlock(&group->calling);
        has_noticed |= result == FSDP_NCCL_REMOTE_ERROR;
        result = await_reason(group, result);
    }
    return result == FSDP_NCCL_SUCCESS ? FSDP_OK : fsdp_nccl_fail(group->transport, result, err);
}

/* Waits, at most for a deadline, until the others know this rank's failure. */
static void await_told(nccl_group *group)
{
    nccl_transport *transport = group->transport;
    int64_t until_ms = fsdp_now_ms() + atomic_load(&transport->base.deadline_ms);
    bool is_told = false;
    while (!is_told && atomic_load(&transport->is_whole) && fsdp_now_ms() < until_ms) {
        pthread_mutex_lock(&group->lock);
        is_told = group->origin == FSDP_NCCL_NO_FAILURE || group->origin == FSDP_NCCL_TOLD;
        pthread_mutex_unlock(&group->lock);
        fsdp_nccl_nap(UINT_MAX);
    }
}

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
        (nccl_pending){.header = *header, .since_ms = fsdp_now_ms(), .is_starting = true};
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
                         "NCCL's maximum of %s may lose a NaN; use memory of the host", name);
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
        (void)issue->nccl->RedOpDestroy(place->op, issue->handle);
    fsdp_nccl_result result = issue->nccl->RedOpCreatePreMulSum(
        &place->op, scalar, issue->dtype, FSDP_NCCL_HOST_IMMEDIATE, issue->handle);
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
                                      issue->dtype, issue->handle, issue->stream);
    fsdp_nccl_result result = issue->nccl->GroupStart();
    for (int i = 0; i < group->comm->size; i++) {
        if (call->counts[i] == 0)
            continue;
        void *part = out_at(issue, fsdp_comm_place(call, i));
        const void *from = i == group->comm->rank ? call->in : part;
        result = first_of(result,
                          issue->nccl->Broadcast(from, part, (size_t)call->counts[i] * issue->unit,
                                                 issue->dtype, i, issue->handle, issue->stream));
    }
    return first_of(result, issue->nccl->GroupEnd());
}

static fsdp_nccl_result reduce_scatter(nccl_issue *issue)
{
    const fsdp_collective *call = issue->call;
    const nccl_group *group = issue->group;
    if (!call->counts)
        return issue->nccl->ReduceScatter(call->in, call->out, (size_t)call->count, issue->dtype,
                                          issue->op, issue->handle, issue->stream);
    fsdp_nccl_result result = issue->nccl->GroupStart();
    for (int i = 0; i < group->comm->size; i++) {
        if (call->counts[i] == 0)
            continue;
        void *to = i == group->comm->rank ? call->out : NULL;
        result = first_of(result, issue->nccl->Reduce(in_at(issue, fsdp_comm_place(call, i)), to,
                                                      (size_t)call->counts[i], issue->dtype,
                                                      issue->op, i, issue->handle, issue->stream));
    }
    return first_of(result, issue->nccl->GroupEnd());
}

static fsdp_nccl_result all_reduce(nccl_issue *issue)
{
    return issue->nccl->AllReduce(issue->call->in, issue->call->out, (size_t)issue->call->count,
                                  issue->dtype, issue->op, issue->handle, issue->stream);
}

/* The root's own data stays where it is. */
static fsdp_nccl_result broadcast(nccl_issue *issue)
{
    const fsdp_collective *call = issue->call;
    bool is_root = call->root == issue->group->comm->rank;
    void *data = is_root ? (void *)call->in : call->out;
    return issue->nccl->Broadcast(data, data, (size_t)call->count * issue->unit, issue->dtype,
                                  call->root, issue->handle, issue->stream);
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
                                          issue->dtype, i, issue->handle, issue->stream));
        if (call->out_counts[i] > 0)
            result =
                first_of(result, issue->nccl->Recv(out_at(issue, to),
                                                   (size_t)call->out_counts[i] * issue->unit,
                                                   issue->dtype, i, issue->handle, issue->stream));
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

/* NCCL has launched it: from now on it is late after a deadline. */
static void note_launch(nccl_group *group, uint64_t number)
{
    nccl_pending *pending = &group->pending[number % FSDP_NCCL_PENDING];
    pthread_mutex_lock(&group->lock);
    pending->is_starting = false;
    pending->since_ms = fsdp_now_ms();
    pthread_mutex_unlock(&group->lock);
}

static fsdp_status issue_call(nccl_issue *issue, const fsdp_comm_header *header, fsdp_error *err)
{
    nccl_group *group = issue->group;
    const fsdp_device_kernels *kernels = group->transport->device->ops->kernels;
    fsdp_nccl_result result = FSDP_NCCL_IN_PROGRESS;
    uint64_t number = 0;
    FSDP_TRY(fsdp_nccl_begin(group, header, &number, err));
    pthread_mutex_lock(&group->calling);
    issue->handle = atomic_load(&group->handle);
    if (issue->handle) /* else await returns the failure */
        result = start(issue);
    pthread_mutex_unlock(&group->calling);
    fsdp_status status = await_result(group, result, err);
    _Atomic unsigned char *flag = &group->flags[number % FSDP_NCCL_PENDING];
    note_launch(group, number);
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

/* Entries of fsdp_transport_ops. */
static fsdp_status nccl_run(fsdp_comm *comm, const fsdp_collective *call,
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

/* === groups =================================================================================== */

enum { ABORTED_MS = 1000, CREATION_MS = 10 * 60 * 1000, SHARED_CTAS = 8 };

/* --- this rank's end ---------------------------------------------------------------------------- */

static fsdp_status create_group(nccl_transport *transport, fsdp_comm *comm, uint64_t id,
                                nccl_group **group_out, fsdp_error *err)
{
    const fsdp_device_ops *device = transport->device->ops;
    nccl_group *group = fsdp_alloc(1, sizeof *group);
    void *flags = device->alloc_staging(transport->device, FSDP_NCCL_PENDING);
    if (!group || !flags) {
        if (flags)
            device->dealloc_staging(transport->device, flags, FSDP_NCCL_PENDING);
        fsdp_free(group);
        return fsdp_fail_memory(err, "a group of ranks over NCCL");
    }
    *group = (nccl_group){.transport = transport,
                          .comm = comm,
                          .id = id,
                          .flags = flags,
                          .progress_ms = fsdp_now_ms()};
    pthread_mutex_init(&group->calling, NULL); /* cannot fail with default attributes */
    pthread_mutex_init(&group->lock, NULL);
    *group_out = group;
    return FSDP_OK;
}

/* A flag that a stream may still set keeps its memory for good, and so does a group that NCCL still ends. */
static void free_group(nccl_group *group)
{
    nccl_transport *transport = group->transport;
    fsdp_nccl_advance(group);
    fsdp_comm_free(group->inner);
    if (atomic_load(&group->end) == FSDP_NCCL_ENDING)
        return;
    pthread_mutex_destroy(&group->calling);
    pthread_mutex_destroy(&group->lock);
    if (group->done == group->issued)
        transport->device->ops->dealloc_staging(transport->device, (void *)group->flags,
                                                FSDP_NCCL_PENDING);
    fsdp_free(group);
}

static void register_group(nccl_group *group)
{
    nccl_transport *transport = group->transport;
    pthread_mutex_lock(&transport->memory);
    pthread_mutex_lock(&transport->lock);
    group->next = transport->groups;
    transport->groups = group;
    pthread_mutex_unlock(&transport->lock);
    pthread_mutex_unlock(&transport->memory);
}

static void unregister_group(nccl_group *group)
{
    nccl_transport *transport = group->transport;
    pthread_mutex_lock(&transport->memory);
    pthread_mutex_lock(&transport->lock);
    nccl_group **at = &transport->groups;
    while (*at && *at != group)
        at = &(*at)->next;
    if (*at)
        *at = group->next;
    transport->closed[group->id] = 1 + group->issued;
    pthread_mutex_unlock(&transport->lock);
    pthread_mutex_unlock(&transport->memory);
}

/* --- NCCL's communicator ------------------------------------------------------------------------ */

/* Ranks that share a GPU hang when the blocks of one collective take all of its processors. */
static fsdp_nccl_config make_config(const nccl_transport *transport, bool blocking)
{
    const bool has_ctas = transport->nccl->version >= FSDP_NCCL_HAS_CTAS;
    return (fsdp_nccl_config){.size = sizeof(fsdp_nccl_config),
                              .magic = (unsigned)FSDP_NCCL_MAGIC,
                              .version = has_ctas ? FSDP_NCCL_HAS_CTAS : FSDP_NCCL_LEAST,
                              .blocking = blocking,
                              .cgaClusterSize = FSDP_NCCL_UNDEFINED,
                              .minCTAs = FSDP_NCCL_UNDEFINED,
                              .maxCTAs = transport->shares_gpu ? SHARED_CTAS : FSDP_NCCL_UNDEFINED};
}

/* Collective in the group. */
static fsdp_status share_id(nccl_group *group, fsdp_nccl_id *id, fsdp_error *err)
{
    const nccl_transport *transport = group->transport;
    memset(id, 0, sizeof *id);
    fsdp_nccl_result result =
        group->comm->rank == 0 ? transport->nccl->GetUniqueId(id) : FSDP_NCCL_SUCCESS;
    if (result != FSDP_NCCL_SUCCESS)
        return fsdp_nccl_fail(transport, result, err);
    const fsdp_collective call = {.kind = FSDP_BROADCAST,
                                  .dtype = FSDP_U8,
                                  .in = id,
                                  .out = id,
                                  .count = sizeof *id,
                                  .unit = "NCCL's unique id"};
    return fsdp_comm_run_now(group->inner, &call, err);
}

/* NCCL has read its own file of settings into the environment by now. Groups that share what a communicator
 * has are aborted together, those that have not failed, too. */
static fsdp_status refuse_shared_resources(fsdp_error *err)
{
    const char *shares = getenv("NCCL_COMM_SPLIT_SHARE_RESOURCES");
    if (!shares || strcmp(shares, "0") == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "NCCL_COMM_SPLIT_SHARE_RESOURCES is %s, in the environment or in nccl.conf: "
                     "groups that share resources cannot fail alone; set it to 0",
                     shares);
}

static fsdp_status join(nccl_group *group, fsdp_error *err)
{
    const nccl_transport *transport = group->transport;
    fsdp_nccl_config config = make_config(transport, false);
    if (group->is_creator) /* before 2.22 NCCL makes the buffers of all blocks at once */
        config.maxCTAs = 1;
    fsdp_nccl_id id;
    FSDP_TRY(share_id(group, &id, err));
    (void)transport->device->ops->choose_gpu(transport->device); /* NCCL takes this thread's */
    pthread_mutex_lock(&group->calling);
    fsdp_nccl_result result = transport->nccl->CommInitRankConfig(
        (fsdp_nccl_comm *)&group->handle, group->comm->size, id, group->comm->rank, &config);
    pthread_mutex_unlock(&group->calling);
    if (group->is_creator)
        FSDP_TRY(refuse_shared_resources(err));
    fsdp_status status = await_result(group, result, err);
    /* at once: this rank has no GPU that NCCL can use */
    return result == FSDP_NCCL_CUDA_ERROR && err ? (err->status = FSDP_ERR_USAGE) : status;
}

/* All ranks are told the failure of the creator, so nobody needs to be told that of the new group. */
static void fail_split(nccl_group *creator, const fsdp_comm_header *header, nccl_group *group,
                       fsdp_error *why)
{
    char name[200];
    if (!fsdp_nccl_group_has_failed(creator, NULL)) {
        fsdp_comm_describe(header, name, sizeof name);
        fsdp_error_prefix(why, "%s", name);
    }
    fsdp_nccl_group_fail(creator, why, FSDP_NCCL_OWN);
    if (group)
        fsdp_nccl_group_fail(group, why, FSDP_NCCL_TOLD);
}

/* Collective over all ranks, as a call of the creator. group: NULL on ranks that are not members. NCCL may
 * write the new communicator until the creator's is aborted, so the creator has the place. */
static fsdp_status split(nccl_group *creator, const fsdp_comm_header *header, nccl_group *group,
                         fsdp_error *err)
{
    fsdp_nccl_config config = make_config(creator->transport, true);
    uint64_t number = 0;
    fsdp_nccl_result result = FSDP_NCCL_IN_PROGRESS;
    const int color = group ? (int)(group->id - header->sequence) : FSDP_NCCL_NO_COLOR;
    FSDP_TRY(fsdp_nccl_begin(creator, header, &number, err));
    pthread_mutex_lock(&creator->calling);
    fsdp_nccl_comm handle = atomic_load(&creator->handle);
    if (handle) /* else await returns the failure */
        result = creator->transport->nccl->CommSplit(handle, color, group ? group->comm->rank : 0,
                                                     (fsdp_nccl_comm *)&creator->split, &config);
    pthread_mutex_unlock(&creator->calling);
    /* NCCL reports success although the split is under way: the creator's state tells when it is done. */
    if (result == FSDP_NCCL_SUCCESS)
        result = FSDP_NCCL_IN_PROGRESS;
    fsdp_status status = await_result(creator, result, err);
    if (status != FSDP_OK)
        fail_split(creator, header, group, err);
    atomic_store(&creator->flags[number % FSDP_NCCL_PENDING], 1);
    if (status != FSDP_OK || !group)
        return status;
    group->is_blocking = true;
    atomic_store(&group->handle, atomic_exchange(&creator->split, NULL));
    return FSDP_OK;
}

/* Collective in the group: all members are there, or all get the failure of one. */
static fsdp_status meet(nccl_group *group, fsdp_error *err)
{
    unsigned char byte = 0, *bytes = fsdp_alloc((size_t)group->comm->size, 1);
    if (!bytes)
        return fsdp_fail_memory(err, "a group of ranks over NCCL");
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = FSDP_U8,
                                  .in = &byte,
                                  .out = bytes,
                                  .count = 1,
                                  .unit = "a new group over NCCL"};
    fsdp_status status = fsdp_comm_run_now(group->inner, &call, err);
    fsdp_free(bytes);
    return status;
}

/* --- a new group -------------------------------------------------------------------------------- */

typedef struct new_group {
    fsdp_comm_header header;
    fsdp_comm *comm;   /* NULL: this rank is not a member */
    nccl_group *group; /* with it */
} new_group;

static fsdp_status connect_group(const nccl_transport *transport, const new_group *made,
                                 fsdp_error *err)
{
    nccl_group *group = made->group;
    nccl_group *creator = transport->creator ? transport->creator->backend : NULL;
    uint64_t number = 0;
    if (group)
        FSDP_TRY(fsdp_nccl_begin(group, &made->header, &number, err));
    if (creator)
        FSDP_TRY(split(creator, &made->header, group, err));
    else if (group)
        FSDP_TRY(join(group, err));
    if (!group)
        return FSDP_OK;
    FSDP_TRY(meet(group, err));
    atomic_store(&group->flags[number], 1);
    return FSDP_OK;
}

/* All members get the failure, by the inner group and by the watch. */
static void fail_group(nccl_group *group, fsdp_error *why)
{
    char name[200];
    if (!fsdp_nccl_group_has_failed(group, NULL)) {
        fsdp_comm_describe(&group->pending[0].header, name, sizeof name);
        fsdp_error_prefix(why, "%s", name);
    }
    fsdp_comm_abort(group->inner, why);
    fsdp_nccl_group_fail(group, why, FSDP_NCCL_OWN);
    await_told(group);
    (void)fsdp_nccl_group_has_failed(group, why);
    atomic_store(&group->flags[0], 1); /* no stream knows the group */
}

static fsdp_status prepare(nccl_transport *transport, const int *ranks, int size, int count,
                           new_group *made, fsdp_error *err)
{
    pthread_mutex_lock(&transport->lock);
    uint64_t id = transport->groups_made;
    bool has_room = fsdp_grow(&transport->closed, &transport->closed_room,
                              (size_t)id + (size_t)count, sizeof *transport->closed);
    if (has_room)
        memset(transport->closed + id, 0, (size_t)count * sizeof *transport->closed);
    pthread_mutex_unlock(&transport->lock);
    if (!has_room)
        return fsdp_fail_memory(err, "a group of ranks over NCCL");
    made->header = fsdp_comm_head_groups(ranks, size, count, id);
    FSDP_TRY(fsdp_comm_create(&transport->base, ranks, size, count, &made->comm, err));
    if (!made->comm)
        return FSDP_OK;
    while (ranks[0] != made->comm->ranks[0]) {
        ranks += size;
        id++;
    }
    FSDP_TRY(create_group(transport, made->comm, id, &made->group, err));
    made->group->is_creator = transport->nccl->CommSplit && !transport->creator;
    return FSDP_OK;
}

/* Takes the inner group. */
static fsdp_status complete(nccl_transport *transport, new_group *made, fsdp_comm *inner,
                            fsdp_error *err)
{
    fsdp_error why = {.rank = transport->base.rank};
    if (made->group) {
        made->group->inner = inner;
        made->comm->backend = made->group;
        register_group(made->group);
    }
    fsdp_status status = connect_group(transport, made, &why);
    if (status != FSDP_OK && made->group)
        fail_group(made->group, &why);
    if (status != FSDP_OK && err)
        *err = why;
    return status == FSDP_OK ? FSDP_OK : why.status;
}

/* Collective over all ranks. */
static fsdp_status make_groups(nccl_transport *transport, const int *ranks, int size, int count,
                               fsdp_comm **comm_out, fsdp_error *err)
{
    fsdp_error mine = {.rank = transport->base.rank};
    new_group made = {.comm = NULL};
    fsdp_comm *inner = NULL;
    fsdp_status prepared = prepare(transport, ranks, size, count, &made, &mine);
    fsdp_status status =
        transport->inner->ops->comm_create(transport->inner, ranks, size, count, &inner, err);
    pthread_mutex_lock(&transport->lock);
    transport->groups_made += (uint64_t)count;
    pthread_mutex_unlock(&transport->lock);
    if (prepared != FSDP_OK) {
        fsdp_comm_abort(inner, &mine);
        fsdp_comm_free(inner);
        if (err)
            *err = mine;
        status = prepared;
    } else if (status == FSDP_OK) {
        status = complete(transport, &made, inner, err);
    }
    if (status == FSDP_OK)
        *comm_out = made.comm;
    else if (made.group && !made.comm->backend)
        free_group(made.group);
    if (status != FSDP_OK)
        fsdp_comm_free(made.comm);
    return status;
}

static fsdp_status nccl_comm_create(fsdp_transport *base, const int *ranks, int size, int count,
                                    fsdp_comm **comm_out, fsdp_error *err)
{
    nccl_transport *transport = (nccl_transport *)base;
    fsdp_comm *made = NULL;
    *comm_out = NULL;
    if (size == 1)
        return fsdp_comm_create(base, ranks, size, count, comm_out,
                                err); /* comm.c runs its calls */
    if (transport->nccl->CommSplit && !transport->creator)
        FSDP_TRY(make_groups(transport, transport->all, base->size, 1, &transport->creator, err));
    FSDP_TRY(make_groups(transport, ranks, size, count, &made, err));
    if (made)
        nccl_register_blocks(made->backend);
    *comm_out = made;
    return FSDP_OK;
}

/* --- the end ------------------------------------------------------------------------------------ */

static bool is_drained(nccl_group *group)
{
    pthread_mutex_lock(&group->lock);
    fsdp_nccl_advance(group);
    bool is_drained = group->done == group->issued;
    pthread_mutex_unlock(&group->lock);
    return is_drained;
}

/* The watch fails the group when that takes too long. */
static void drain(nccl_group *group)
{
    for (unsigned naps = 0; !is_drained(group) && !fsdp_nccl_group_has_failed(group, NULL); naps++)
        fsdp_nccl_nap(naps);
}

/* Kernels that were aborted end soon, and then their streams set the flags. */
static void drain_aborted(nccl_group *group)
{
    int64_t until_ms = fsdp_now_ms() + ABORTED_MS;
    for (unsigned naps = 0; !is_drained(group) && fsdp_now_ms() < until_ms; naps++)
        fsdp_nccl_nap(naps);
}

/* The watch does not know the group any more. */
static void end_handle(nccl_group *group, bool aborts)
{
    const fsdp_nccl *nccl = group->transport->nccl;
    nccl_group *ended = NULL;
    nccl_deregister_blocks(group);
    pthread_mutex_lock(&group->calling);
    fsdp_nccl_comm handle = atomic_load(&group->handle);
    for (uint64_t i = 0; handle && i < FSDP_NCCL_FACTORS && i < group->factors_made; i++)
        (void)nccl->RedOpDestroy(group->factors[i].op, handle);
    pthread_mutex_unlock(&group->calling);
    if (fsdp_nccl_take_handle(group, &ended))
        fsdp_nccl_end(ended, aborts);
    (void)fsdp_nccl_await_end(group);
}

static void nccl_comm_close(fsdp_comm *comm)
{
    nccl_group *group = comm->backend;
    if (comm->transport->exit_code != 0) /* before the others miss NCCL's connections */
        fsdp_nccl_watch_end(group->transport);
    else
        drain(group);
    await_told(group);
    unregister_group(group);
    end_handle(group, fsdp_nccl_group_has_failed(group, NULL));
    drain_aborted(group);
    free_group(group);
    comm->backend = NULL;
}

/* === the transport ============================================================================ */

/* --- entries of the table ------------------------------------------------------------------------ */

/* A failure that this rank was told by the others is not told again. */
static void abort_comm(fsdp_comm *comm, const fsdp_error *why)
{
    nccl_group *group = comm->backend;
    fsdp_comm_abort(group->inner, why);
    fsdp_nccl_group_fail(group, why, FSDP_NCCL_OWN);
}

/* NCCL's failure goes first; a failure of a call of host memory is the inner group's. */
static bool has_failed(fsdp_comm *comm, fsdp_error *err_out)
{
    nccl_group *group = comm->backend;
    const fsdp_transport_ops *inner = group->inner->transport->ops;
    return fsdp_nccl_group_has_failed(group, err_out) ||
           (inner->has_failed && inner->has_failed(group->inner, err_out));
}

static void set_busy(fsdp_transport *base, int64_t until_ms)
{
    nccl_transport *transport = (nccl_transport *)base;
    atomic_store(&transport->busy_until_ms, until_ms);
    if (transport->inner->ops->set_busy)
        transport->inner->ops->set_busy(transport->inner, until_ms);
}

static void release(nccl_transport *transport)
{
    fsdp_comm_free(transport->watches);
    fsdp_comm_free(transport->hosts.local);
    fsdp_comm_free(transport->hosts.leaders);
    fsdp_free(transport->hosts.order);
    fsdp_free(transport->hosts.bytes);
    fsdp_free(transport->hosts.sizes);
    fsdp_free(transport->hosts.here);
    fsdp_free(transport->hosts.everywhere);
    fsdp_free(transport->hosts.message);
    pthread_mutex_destroy(&transport->memory);
    pthread_mutex_destroy(&transport->lock);
    pthread_cond_destroy(&transport->changed);
    fsdp_free(transport->closed);
    fsdp_free(transport->all);
    fsdp_free(transport->beats);
    fsdp_free(transport->progress);
    fsdp_free(transport->has_left);
    fsdp_free(transport);
}

/* The inner transport tells its peers why this rank leaves. */
static void close_transport(fsdp_transport *base)
{
    nccl_transport *transport = (nccl_transport *)base;
    fsdp_transport *inner = transport->inner;
    fsdp_comm_free(transport->creator);
    fsdp_nccl_watch_end(transport);
    nccl_free_blocks(transport);
    inner->exit_code = base->exit_code;
    inner->exit_reason = base->exit_reason;
    release(transport);
    inner->ops->close(inner);
}

static const fsdp_transport_ops nccl_ops = {
    .name = "nccl",
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM | FSDP_COMM_STREAMS | FSDP_COMM_DEVICE_MEMORY,
    .comm_create = nccl_comm_create,
    .run = nccl_run,
    .abort = abort_comm,
    .has_failed = has_failed,
    .comm_close = nccl_comm_close,
    .set_busy = set_busy,
    .alloc = nccl_alloc,
    .dealloc = nccl_dealloc,
    .close = close_transport,
};

/* --- creation ------------------------------------------------------------------------------------ */

static fsdp_status init_locks(nccl_transport *transport, fsdp_error *err)
{
    pthread_condattr_t attributes;
    int failed = pthread_condattr_init(&attributes);
    if (!failed) {
        failed = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        if (!failed)
            failed = pthread_cond_init(&transport->changed, &attributes);
        pthread_condattr_destroy(&attributes);
    }
    if (!failed)
        failed = pthread_mutex_init(&transport->lock, NULL);
    if (!failed)
        failed = pthread_mutex_init(&transport->memory, NULL);
    return failed ? fsdp_fail_errno(err, failed, "cannot make a lock") : FSDP_OK;
}

/* Local. */
static fsdp_status create(const fsdp_nccl_spec *spec, nccl_transport **made_out, fsdp_error *err)
{
    const fsdp_transport *inner = spec->inner;
    const size_t n = (size_t)inner->size;
    const fsdp_nccl *nccl = NULL;
    if (!spec->device->ops->native)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "NCCL moves memory of GPUs: it needs --device cuda, not %s",
                         spec->device->ops->name);
    FSDP_TRY(fsdp_nccl_open(&nccl, err));
    nccl_transport *made = fsdp_alloc(1, sizeof *made);
    if (!made)
        return fsdp_fail_memory(err, "a transport over NCCL");
    *made =
        (nccl_transport){.base = {.ops = &nccl_ops, .rank = inner->rank, .size = inner->size},
                         .inner = spec->inner,
                         .device = spec->device,
                         .nccl = nccl,
                         .check = spec->check,
                         .shares_gpu = spec->shares_gpu,
                         .creation_ms = spec->creation_ms > 0 ? spec->creation_ms : CREATION_MS};
    atomic_store(&made->base.deadline_ms, atomic_load(&inner->deadline_ms));
    atomic_store(&made->is_whole, true);
    fsdp_status status = init_locks(made, err);
    if (status != FSDP_OK) {
        fsdp_free(made);
        return status;
    }
    made->all = fsdp_alloc(n, sizeof *made->all);
    for (int i = 0; i < inner->size && made->all; i++)
        made->all[i] = i;
    made->beats = fsdp_alloc(n, sizeof *made->beats);
    made->progress = fsdp_alloc(n, sizeof *made->progress);
    made->has_left = fsdp_alloc(n, sizeof *made->has_left);
    *made_out = made;
    return made->all && made->beats && made->progress && made->has_left
               ? FSDP_OK
               : fsdp_fail_memory(err, "a transport over NCCL");
}

fsdp_status fsdp_transport_nccl(const fsdp_nccl_spec *spec, fsdp_transport **transport_out,
                                fsdp_error *err)
{
    nccl_transport *made = NULL;
    fsdp_status status = fsdp_ctl_agree(spec->ctl, create(spec, &made, err), err);
    if (status == FSDP_OK)
        status = fsdp_nccl_watch_begin(made, spec, err);
    if (status == FSDP_OK) {
        *transport_out = &made->base;
        return FSDP_OK;
    }
    if (made) {
        fsdp_nccl_watch_end(made);
        release(made);
    }
    return status;
}

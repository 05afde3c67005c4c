/*
 * Creates and closes groups. The first of all ranks is made from a unique id, which the inner transport
 * carries; later ones are split from it where NCCL can. See comm_nccl.h.
 */
#include "runtime/comm_nccl/comm_nccl.h"

#include <string.h>

#include "base/core/clock.h"
#include "base/core/mem.h"

enum { ABORTED_MS = 1000 };

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

/* A flag that a stream may still set keeps its memory for good. */
static void free_group(nccl_group *group)
{
    nccl_transport *transport = group->transport;
    fsdp_nccl_advance(group);
    fsdp_comm_free(group->inner);
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
    pthread_mutex_lock(&transport->lock);
    group->next = transport->groups;
    transport->groups = group;
    pthread_mutex_unlock(&transport->lock);
}

static void unregister_group(nccl_group *group)
{
    nccl_transport *transport = group->transport;
    pthread_mutex_lock(&transport->lock);
    nccl_group **at = &transport->groups;
    while (*at && *at != group)
        at = &(*at)->next;
    if (*at)
        *at = group->next;
    if (transport->parent == group)
        transport->parent = NULL;
    transport->closed[group->id] = 1 + group->issued;
    pthread_mutex_unlock(&transport->lock);
}

/* --- NCCL's communicator ------------------------------------------------------------------------ */

static fsdp_nccl_config make_config(void)
{
    return (fsdp_nccl_config){.size = sizeof(fsdp_nccl_config),
                              .magic = (unsigned)FSDP_NCCL_MAGIC,
                              .version = FSDP_NCCL_LEAST,
                              .blocking = 0};
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

static fsdp_status join(nccl_group *group, fsdp_error *err)
{
    const nccl_transport *transport = group->transport;
    fsdp_nccl_config config = make_config();
    fsdp_nccl_id id;
    FSDP_TRY(share_id(group, &id, err));
    (void)transport->device->ops->choose_gpu(transport->device); /* NCCL takes this thread's */
    pthread_mutex_lock(&group->calling);
    fsdp_nccl_result result = transport->nccl->CommInitRankConfig(&group->handle, group->comm->size,
                                                                  id, group->comm->rank, &config);
    pthread_mutex_unlock(&group->calling);
    fsdp_status status = fsdp_nccl_await(group, result, err);
    /* at once: this rank has no GPU that NCCL can use */
    return result == FSDP_NCCL_CUDA_ERROR && err ? (err->status = FSDP_ERR_USAGE) : status;
}

/* All ranks are told the failure of the parent, so nobody needs to be told that of the new group. */
static void fail_split(nccl_group *parent, const fsdp_comm_header *header, nccl_group *group,
                       fsdp_error *why)
{
    char name[200];
    if (!fsdp_nccl_group_has_failed(parent, NULL)) {
        fsdp_comm_describe(header, name, sizeof name);
        fsdp_error_prefix(why, "%s", name);
    }
    fsdp_nccl_group_fail(parent, why, FSDP_NCCL_OWN);
    if (group)
        fsdp_nccl_group_fail(group, why, FSDP_NCCL_TOLD);
}

static void take_handle(nccl_group *group, fsdp_nccl_comm handle)
{
    pthread_mutex_lock(&group->calling);
    group->handle = handle;
    pthread_mutex_unlock(&group->calling);
}

/* Collective over all ranks, as a call of the group of all. group: NULL on ranks that are no members. NCCL
 * may write the new communicator until the parent's is aborted, so the parent has the place. */
static fsdp_status split(nccl_group *parent, const fsdp_comm_header *header, nccl_group *group,
                         fsdp_error *err)
{
    fsdp_nccl_config config = make_config();
    uint64_t number = 0;
    fsdp_nccl_result result = FSDP_NCCL_IN_PROGRESS;
    FSDP_TRY(fsdp_nccl_begin(parent, header, &number, err));
    pthread_mutex_lock(&parent->calling);
    if (parent->handle) /* else await returns the failure */
        result = parent->transport->nccl->CommSplit(parent->handle, group ? 0 : FSDP_NCCL_NO_COLOR,
                                                    group ? group->comm->rank : 0, &parent->split,
                                                    &config);
    pthread_mutex_unlock(&parent->calling);
    fsdp_status status = fsdp_nccl_await(parent, result, err);
    if (status != FSDP_OK)
        fail_split(parent, header, group, err);
    atomic_store(&parent->flags[number % FSDP_NCCL_PENDING], 1);
    if (status != FSDP_OK || !group)
        return status;
    take_handle(group, parent->split);
    return fsdp_nccl_await(group, FSDP_NCCL_IN_PROGRESS, err);
}

/* Equal on all ranks, unless one of them has failed. */
static nccl_group *parent_of(const nccl_transport *transport)
{
    nccl_group *parent = transport->parent;
    bool can_split = parent && transport->nccl->CommSplit;
    return can_split && !fsdp_nccl_group_has_failed(parent, NULL) ? parent : NULL;
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

static bool is_world(const nccl_group *group)
{
    bool is_in_order = group->comm->size == group->transport->base.size;
    for (int i = 0; i < group->comm->size && is_in_order; i++)
        is_in_order = group->comm->ranks[i] == i;
    return is_in_order;
}

/* --- a new group -------------------------------------------------------------------------------- */

typedef struct new_group {
    fsdp_comm_header header;
    fsdp_comm *comm;   /* NULL: this rank is no member */
    nccl_group *group; /* with it */
} new_group;

static fsdp_status connect_group(nccl_transport *transport, const new_group *made, fsdp_error *err)
{
    nccl_group *group = made->group, *parent = parent_of(transport);
    uint64_t number = 0;
    if (group)
        FSDP_TRY(fsdp_nccl_begin(group, &made->header, &number, err));
    if (parent)
        FSDP_TRY(split(parent, &made->header, group, err));
    else if (group)
        FSDP_TRY(join(group, err));
    if (!group)
        return FSDP_OK;
    FSDP_TRY(meet(group, err));
    atomic_store(&group->flags[number], 1);
    fsdp_nccl_register_blocks(group);
    if (is_world(group) && !transport->parent)
        transport->parent = group;
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
    fsdp_nccl_await_told(group);
    (void)fsdp_nccl_group_has_failed(group, why);
    atomic_store(&group->flags[0], 1); /* no stream knows the group */
}

static fsdp_status prepare(nccl_transport *transport, const int *ranks, int size, new_group *made,
                           fsdp_error *err)
{
    pthread_mutex_lock(&transport->lock);
    uint64_t id = transport->groups_made;
    bool has_room = fsdp_grow(&transport->closed, &transport->closed_room, (size_t)id + 1,
                              sizeof *transport->closed);
    if (has_room)
        transport->closed[id] = 0;
    pthread_mutex_unlock(&transport->lock);
    if (!has_room)
        return fsdp_fail_memory(err, "a group of ranks over NCCL");
    made->header = fsdp_comm_head_group(ranks, size, id);
    FSDP_TRY(fsdp_comm_create(&transport->base, ranks, size, &made->comm, err));
    return made->comm ? create_group(transport, made->comm, id, &made->group, err) : FSDP_OK;
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

fsdp_status fsdp_nccl_comm_create(fsdp_transport *base, const int *ranks, int size,
                                  fsdp_comm **comm_out, fsdp_error *err)
{
    nccl_transport *transport = (nccl_transport *)base;
    fsdp_error mine = {.rank = base->rank};
    new_group made = {.comm = NULL};
    fsdp_comm *inner = NULL;
    *comm_out = NULL;
    if (size == 1)
        return fsdp_comm_create(base, ranks, size, comm_out, err); /* comm.c runs its calls */
    fsdp_status prepared = prepare(transport, ranks, size, &made, &mine);
    fsdp_status status =
        transport->inner->ops->comm_create(transport->inner, ranks, size, &inner, err);
    pthread_mutex_lock(&transport->lock);
    transport->groups_made++;
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

static bool finalize(nccl_group *group)
{
    const fsdp_nccl *nccl = group->transport->nccl;
    int64_t until_ms = fsdp_now_ms() + atomic_load(&group->transport->base.deadline_ms);
    fsdp_nccl_result result = nccl->CommFinalize(group->handle);
    for (unsigned naps = 0; result == FSDP_NCCL_IN_PROGRESS && fsdp_now_ms() < until_ms; naps++) {
        fsdp_nccl_nap(naps);
        result = fsdp_nccl_poll(group);
    }
    return result == FSDP_NCCL_SUCCESS;
}

/* No other thread knows the group any more. */
static void end_handle(nccl_group *group, bool has_failed)
{
    const fsdp_nccl *nccl = group->transport->nccl;
    if (!group->handle)
        return;
    fsdp_nccl_deregister_blocks(group);
    for (uint64_t i = 0; i < FSDP_NCCL_FACTORS && i < group->factors_made; i++)
        (void)nccl->RedOpDestroy(group->factors[i].op, group->handle);
    if (!has_failed && finalize(group))
        (void)nccl->CommDestroy(group->handle);
    else
        (void)nccl->CommAbort(group->handle);
    group->handle = NULL;
}

void fsdp_nccl_comm_close(fsdp_comm *comm)
{
    nccl_group *group = comm->backend;
    bool has_failed = comm->transport->exit_code != 0;
    if (has_failed)
        fsdp_nccl_watch_end(
            group->transport); /* tells the others, before they miss NCCL's connections */
    else
        drain(group);
    fsdp_nccl_await_told(group);
    unregister_group(group);
    end_handle(group, has_failed || fsdp_nccl_group_has_failed(group, NULL));
    fsdp_nccl_deregister_blocks(group); /* of one that was aborted */
    drain_aborted(group);
    free_group(group);
    comm->backend = NULL;
}

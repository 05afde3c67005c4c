/*
 * Creates and closes groups. All ranks of the world pass a barrier for each new group, so that they
 * create groups in the same order; its first member allocates the block, each member its window.
 * See comm_shared.h.
 */
#include "runtime/comm_shared/comm_shared.h"

#include <errno.h>
#include <string.h>

#include "base/core/mem.h"
#include "base/core/pool.h"
#include "statedict/ctl/ctl_backend.h"

enum { SPINS = 2000 };

/* --- a member's end --------------------------------------------------------------------------- */

static void release_group(shared_group *group)
{
    fsdp_free(group->windows);
    fsdp_free(group->headers);
    fsdp_free(group->sources);
}

/* Allocates the group's lists; the caller sets ranks and block. On failure nothing is left. */
static fsdp_status init_group(shared_group *group, shared_transport *transport, int rank, int size,
                              fsdp_error *err)
{
    *group = (shared_group){.transport = transport, .rank = rank, .size = size};
    group->windows = fsdp_alloc((size_t)size, sizeof *group->windows);
    group->headers = fsdp_alloc((size_t)size, sizeof *group->headers);
    group->sources = fsdp_alloc((size_t)size, sizeof *group->sources);
    if (group->windows && group->headers && group->sources)
        return FSDP_OK;
    release_group(group);
    return fsdp_fail_memory(err, "a group of ranks");
}

fsdp_status fsdp_shared_transport_init(shared_transport *transport, fsdp_error *err)
{
    int size = transport->base.size;
    transport->spins = size <= fsdp_pool_cores() ? SPINS : 0;
    transport->world_ranks = fsdp_alloc((size_t)size, sizeof *transport->world_ranks);
    transport->bases = fsdp_alloc((size_t)size, sizeof *transport->bases);
    fsdp_status status = FSDP_OK;
    if (transport->world_ranks && transport->bases)
        status = init_group(&transport->world, transport, transport->base.rank, size, err);
    else
        status = fsdp_fail_memory(err, "a transport");
    if (status != FSDP_OK) {
        fsdp_free(transport->world_ranks);
        fsdp_free(transport->bases);
        return status;
    }
    for (int i = 0; i < size; i++)
        transport->world_ranks[i] = i;
    transport->world.ranks = transport->world_ranks;
    return FSDP_OK;
}

/* The control plane may outlive the transport. */
static void unobserve(shared_transport *transport)
{
    if (transport->observed)
        transport->observed->observer = (fsdp_ctl_observer){0};
    transport->observed = NULL;
}

void fsdp_shared_transport_release(shared_transport *transport)
{
    unobserve(transport);
    release_group(&transport->world);
    fsdp_free(transport->world_ranks);
    fsdp_free(transport->bases);
}

fsdp_status fsdp_shared_fail_memory(const shared_transport *transport, const char *what,
                                    fsdp_error *err)
{
    if (transport->is_limited)
        return fsdp_fail_errno(err, EFBIG, "cannot allocate memory for %s", what);
    return fsdp_fail_memory(err, what);
}

/* --- a new group ------------------------------------------------------------------------------ */

typedef struct new_group {
    const int *ranks; /* of all groups */
    int size, count;
    fsdp_comm *comm;        /* NULL: this rank is not a member */
    shared_group *group;    /* NULL: as before, or it is the only one */
    uint64_t block, window; /* as published */
} new_group;

static fsdp_status take_shared(shared_transport *transport, size_t size, uint64_t *address_out,
                               void **data_out, fsdp_error *err)
{
    *data_out = transport->alloc_shared(&transport->base, size);
    if (!*data_out)
        return fsdp_shared_fail_memory(transport,
                                       "a group of ranks, in memory that all of them see", err);
    *address_out = (uintptr_t)*data_out - transport->bases[transport->base.rank];
    return FSDP_OK;
}

/* A window has two halves for pieces of inputs and two for results: comm_shared.c. */
static fsdp_status bring_memory(shared_transport *transport, new_group *made, fsdp_error *err)
{
    void *data;
    if (made->comm->rank == 0) {
        size_t size = fsdp_shared_block_size(made->size);
        FSDP_TRY(take_shared(transport, size, &made->block, &data, err));
        memset(data, 0, size);
    }
    return take_shared(transport, 4 * transport->window_half, &made->window, &data, err);
}

static fsdp_status prepare(shared_transport *transport, new_group *made, fsdp_error *err)
{
    FSDP_TRY(
        fsdp_comm_create(&transport->base, made->ranks, made->size, made->count, &made->comm, err));
    if (!made->comm || made->size == 1)
        return FSDP_OK;
    made->group = fsdp_alloc(1, sizeof *made->group);
    if (!made->group)
        return fsdp_fail_memory(err, "a group of ranks");
    fsdp_status status = init_group(made->group, transport, made->comm->rank, made->size, err);
    if (status != FSDP_OK) {
        fsdp_free(made->group);
        made->group = NULL;
        return status;
    }
    return bring_memory(transport, made, err);
}

static void publish(shared_group *world, const new_group *made)
{
    shared_slot *slot = &world->block->slots[world->rank];
    world->header =
        fsdp_comm_head_groups(made->ranks, made->size, made->count, world->phase / 2 + 1);
    slot->published[0].header = world->header;
    slot->block = made->block;
    slot->window = made->window;
}

static fsdp_status compare(shared_group *world, fsdp_error *err)
{
    for (int i = 0; i < world->size; i++)
        world->headers[i] = world->block->slots[i].published[0].header;
    err->status = fsdp_comm_compare(world->ranks, world->size, world->headers, err);
    if (err->status != FSDP_OK)
        fsdp_shared_fail(world, err, false);
    return err->status;
}

static void attach(shared_group *world, new_group *made)
{
    const shared_transport *transport = world->transport;
    shared_group *group = made->group;
    const shared_slot *slots = world->block->slots;
    group->comm = made->comm;
    group->ranks = made->comm->ranks;
    int first = group->ranks[0];
    group->block = (shared_block *)(transport->bases[first] + slots[first].block);
    for (int i = 0; i < group->size; i++) {
        int rank = group->ranks[i];
        group->windows[i] = (unsigned char *)(transport->bases[rank] + slots[rank].window);
    }
    made->comm->backend = group;
}

static fsdp_status attach_all(shared_group *world, new_group *made, fsdp_error *err)
{
    publish(world, made);
    fsdp_shared_arrive(world);
    FSDP_TRY(fsdp_shared_await(world, err));
    FSDP_TRY(compare(world, err));
    if (made->group)
        attach(world, made);
    fsdp_shared_arrive(world);
    return fsdp_shared_await(world, err);
}

static void discard(new_group *made)
{
    if (made->group && !made->comm->backend) {
        release_group(made->group);
        fsdp_free(made->group);
    }
    fsdp_comm_free(made->comm);
}

fsdp_status fsdp_shared_comm_create(fsdp_transport *base, const int *ranks, int size, int count,
                                    fsdp_comm **comm_out, fsdp_error *err)
{
    shared_transport *transport = (shared_transport *)base;
    shared_group *world = &transport->world;
    new_group made = {.ranks = ranks, .size = size, .count = count};
    fsdp_error why = {.rank = base->rank};
    if (fsdp_shared_has_failed(world, &why)) {
        if (err)
            *err = why;
        return why.status;
    }
    world->call_phase = world->phase;
    fsdp_status status = prepare(transport, &made, &why);
    if (status == FSDP_OK)
        status = attach_all(world, &made, &why);
    if (status == FSDP_OK) {
        *comm_out = made.comm;
        return FSDP_OK;
    }
    why.status = status;
    fsdp_shared_fail(world, &why, true);
    (void)fsdp_shared_has_failed(world, &why);
    discard(&made);
    if (err)
        *err = why;
    return why.status;
}

void fsdp_shared_comm_close(fsdp_comm *comm)
{
    shared_group *group = comm->backend;
    fsdp_shared_leave(group);
    release_group(group);
    fsdp_free(group);
    comm->backend = NULL;
}

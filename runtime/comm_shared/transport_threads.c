/*
 * The transport of ranks that are threads of one process, where all ranks can read every buffer. A
 * hub owns the blocks and windows of groups; it is freed with the last rank. See comm_shared.h.
 */
#include "runtime/comm_shared/comm_shared.h"

#include <string.h>

#include "base/core/mem.h"

enum { MAX_RANKS = 1024, WINDOW_HALF = 512 << 10 };

/* The head of an allocation of a group. */
typedef struct shared_memory {
    struct shared_memory *next;
    _Alignas(FSDP_SHARED_LINE) unsigned char data[];
} shared_memory;

/* Shared by all ranks; freed with the last reference. */
typedef struct thread_hub {
    int size, deadline_ms;
    shared_block *block; /* of the world */
    _Atomic int references;
    _Atomic(shared_memory *) first;
} thread_hub;

typedef struct thread_transport {
    shared_transport shared;
    thread_hub *hub;
} thread_transport;

/* --- the hub ---------------------------------------------------------------------------------- */

static void *hub_alloc(thread_hub *hub, size_t size)
{
    shared_memory *memory = fsdp_alloc_pages(sizeof *memory + size);
    if (!memory)
        return NULL;
    memory->next = atomic_load(&hub->first);
    while (!atomic_compare_exchange_weak(&hub->first, &memory->next, memory))
        ;
    return memory->data;
}

static void release_hub(thread_hub *hub)
{
    if (atomic_fetch_sub(&hub->references, 1) > 1)
        return;
    shared_memory *memory = atomic_load(&hub->first);
    while (memory) {
        shared_memory *next = memory->next;
        fsdp_free(memory);
        memory = next;
    }
    fsdp_free(hub);
}

/* --- the transport ---------------------------------------------------------------------------- */

static void *alloc_shared(fsdp_transport *transport, size_t size)
{
    return hub_alloc(((thread_transport *)transport)->hub, size);
}

static void close_transport(fsdp_transport *transport)
{
    thread_transport *mine = (thread_transport *)transport;
    fsdp_shared_leave(&mine->shared.world);
    fsdp_shared_transport_release(&mine->shared);
    release_hub(mine->hub);
    fsdp_free(mine);
}

static const fsdp_transport_ops thread_ops = {
    .name = "threads",
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM | FSDP_COMM_POOL | FSDP_COMM_STREAMS,
    .comm_create = fsdp_shared_comm_create,
    .run = fsdp_shared_run,
    .abort = fsdp_shared_abort,
    .has_failed = fsdp_shared_comm_has_failed,
    .sees = fsdp_shared_sees,
    .comm_close = fsdp_shared_comm_close,
    .set_busy = fsdp_shared_set_busy,
    .alloc = fsdp_transport_alloc_pages,
    .dealloc = fsdp_transport_free_pages,
    .close = close_transport,
};

static fsdp_status create_transport(thread_hub *hub, int rank, fsdp_transport **transport_out,
                                    fsdp_error *err)
{
    thread_transport *mine = fsdp_alloc(1, sizeof *mine);
    if (!mine)
        return fsdp_fail_memory(err, "a transport");
    mine->shared.base = (fsdp_transport){
        .ops = &thread_ops, .rank = rank, .size = hub->size, .deadline_ms = hub->deadline_ms};
    mine->shared.window_half = WINDOW_HALF;
    mine->shared.alloc_shared = alloc_shared;
    mine->hub = hub;
    fsdp_status status = fsdp_shared_transport_init(&mine->shared, err);
    if (status != FSDP_OK) {
        fsdp_free(mine);
        return status;
    }
    mine->shared.world.block = hub->block;
    atomic_fetch_add(&hub->references, 1);
    *transport_out = &mine->shared.base;
    return FSDP_OK;
}

/* The caller holds a reference until all ranks have theirs. */
static fsdp_status create_hub(int size, int deadline_ms, thread_hub **hub_out, fsdp_error *err)
{
    thread_hub *hub = fsdp_alloc(1, sizeof *hub);
    if (!hub)
        return fsdp_fail_memory(err, "the hub of a world of threads");
    hub->size = size;
    hub->deadline_ms = deadline_ms;
    atomic_store(&hub->references, 1);
    hub->block = hub_alloc(hub, fsdp_shared_world_size(size));
    if (!hub->block) {
        release_hub(hub);
        return fsdp_fail_memory(err, "the hub of a world of threads");
    }
    memset(hub->block, 0, fsdp_shared_world_size(size));
    *hub_out = hub;
    return FSDP_OK;
}

fsdp_status fsdp_transport_threads(int n, int deadline_ms, fsdp_transport **transports_out,
                                   fsdp_error *err)
{
    thread_hub *hub = NULL;
    if (n < 1 || n > MAX_RANKS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot connect %d threads; use 1 to %d", n,
                         MAX_RANKS);
    FSDP_TRY(create_hub(n, deadline_ms, &hub, err));
    fsdp_status status = FSDP_OK;
    int made = 0;
    while (made < n && status == FSDP_OK) {
        status = create_transport(hub, made, &transports_out[made], err);
        made += status == FSDP_OK;
    }
    for (int i = 0; status != FSDP_OK && i < made; i++)
        transports_out[i]->ops->close(transports_out[i]);
    release_hub(hub);
    return status;
}

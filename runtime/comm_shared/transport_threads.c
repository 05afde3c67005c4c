/*
 * The fabric of ranks that are threads of one process: every buffer can be read by all. Blocks of
 * groups hang on a hub that goes with the last rank. See comm_shared.h.
 */
#include "runtime/comm_shared/comm_shared.h"

#include <string.h>

#include "base/mem.h"

enum { MAX_RANKS = 1024, WINDOW_HALF = 512 << 10 };

/* In front of memory that groups share. */
typedef struct shared_memory {
    struct shared_memory *next;
    _Alignas(FSDP_SHARED_LINE) unsigned char data[];
} shared_memory;

typedef struct thread_hub {
    _Atomic int seats_taken;
    _Atomic(shared_memory *) first;
} thread_hub;

typedef struct thread_fabric {
    shared_fabric shared;
    thread_hub *hub;
} thread_fabric;

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

static void leave_hub(thread_hub *hub)
{
    if (atomic_fetch_sub(&hub->seats_taken, 1) > 1)
        return;
    shared_memory *memory = atomic_load(&hub->first);
    while (memory) {
        shared_memory *next = memory->next;
        fsdp_free(memory);
        memory = next;
    }
    fsdp_free(hub);
}

/* --- the fabric ------------------------------------------------------------------------------- */

static void *alloc_shared(fsdp_fabric *fabric, size_t size)
{
    return hub_alloc(((thread_fabric *)fabric)->hub, size);
}

static void close_fabric(fsdp_fabric *fabric)
{
    thread_fabric *mine = (thread_fabric *)fabric;
    fsdp_shared_depart(&mine->shared.world);
    fsdp_shared_fabric_release(&mine->shared);
    leave_hub(mine->hub);
    fsdp_free(mine);
}

static const fsdp_fabric_ops thread_ops = {
    .name = "threads",
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM | FSDP_COMM_POOL,
    .comm_create = fsdp_shared_comm_create,
    .run = fsdp_shared_run,
    .abort = fsdp_shared_abort,
    .has_failed = fsdp_shared_comm_has_failed,
    .sees = fsdp_shared_sees,
    .comm_close = fsdp_shared_comm_close,
    .alloc = fsdp_fabric_alloc_pages,
    .dealloc = fsdp_fabric_free_pages,
    .close = close_fabric,
};

static fsdp_status create_fabric(thread_hub *hub, shared_block *block, int rank, int size,
                                 int deadline_ms, fsdp_fabric **fabric_out, fsdp_error *err)
{
    thread_fabric *mine = fsdp_alloc(1, sizeof *mine);
    if (!mine)
        return fsdp_fail_memory(err, "a fabric");
    mine->shared.fabric =
        (fsdp_fabric){.ops = &thread_ops, .rank = rank, .size = size, .deadline_ms = deadline_ms};
    mine->shared.window_half = WINDOW_HALF;
    mine->shared.alloc_shared = alloc_shared;
    mine->hub = hub;
    fsdp_status status = fsdp_shared_fabric_init(&mine->shared, err);
    if (status != FSDP_OK) {
        fsdp_free(mine);
        return status;
    }
    mine->shared.world.block = block;
    atomic_fetch_add(&hub->seats_taken, 1);
    *fabric_out = &mine->shared.fabric;
    return FSDP_OK;
}

/* The hub has a seat for the making itself, so that it is there until the end of it. */
static fsdp_status create_hub(int n, thread_hub **hub_out, shared_block **block_out,
                              fsdp_error *err)
{
    thread_hub *hub = fsdp_alloc(1, sizeof *hub);
    if (!hub)
        return fsdp_fail_memory(err, "the hub of a world of threads");
    atomic_store(&hub->seats_taken, 1);
    *block_out = hub_alloc(hub, fsdp_shared_block_size(n));
    if (!*block_out) {
        leave_hub(hub);
        return fsdp_fail_memory(err, "the hub of a world of threads");
    }
    memset(*block_out, 0, fsdp_shared_block_size(n));
    *hub_out = hub;
    return FSDP_OK;
}

fsdp_status fsdp_fabric_threads(int n, int deadline_ms, fsdp_fabric **fabrics_out, fsdp_error *err)
{
    thread_hub *hub = NULL;
    shared_block *block = NULL;
    if (n < 1 || n > MAX_RANKS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot connect %d threads: 1 to %d are possible", n,
                         MAX_RANKS);
    FSDP_TRY(create_hub(n, &hub, &block, err));
    fsdp_status status = FSDP_OK;
    int made = 0;
    while (made < n && status == FSDP_OK) {
        status = create_fabric(hub, block, made, n, deadline_ms, &fabrics_out[made], err);
        made += status == FSDP_OK;
    }
    for (int i = 0; status != FSDP_OK && i < made; i++)
        fabrics_out[i]->ops->close(fabrics_out[i]);
    leave_hub(hub);
    return status;
}

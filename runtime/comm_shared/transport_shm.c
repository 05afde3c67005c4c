/*
 * The transport of ranks that are processes of one host. All ranks map every rank's segment of
 * memory, which contains its pool, blocks of groups and windows. See comm_shared.h and
 * transport_shm.h.
 */
#include "runtime/comm_shared/comm_shared.h"
#include "runtime/comm_shared/transport_shm.h"

#include <stdio.h>

#include "base/core/mem.h"

enum { LEAST_HALF = 512 << 10, MOST_HALF = 2 << 20, HALF_PER_RANK = 32 << 10 };

typedef struct shm_transport {
    shared_transport shared;
    shm_segment local;
    shm_pool *pool;
    shm_peer *peers;
} shm_transport;

static bool is_dead(shared_transport *transport, int rank, char *name, size_t name_size)
{
    const shm_peer *peer = &((const shm_transport *)transport)->peers[rank];
    snprintf(name, name_size, "process %d", peer->process.pid);
    return fsdp_process_watch_has_ended(&peer->process);
}

static void *allocate(fsdp_transport *transport, size_t size)
{
    return fsdp_shm_pool_take(((shm_transport *)transport)->pool, size);
}

static void deallocate(fsdp_transport *transport, void *data)
{
    fsdp_shm_pool_give(((shm_transport *)transport)->pool, data);
}

/* --- creating and closing --------------------------------------------------------------------- */

static void release_peers(shm_transport *mine)
{
    for (int i = 0; mine->peers && i < mine->shared.base.size; i++) {
        fsdp_shm_segment_release(&mine->peers[i].segment);
        fsdp_process_watch_close(&mine->peers[i].process);
    }
    fsdp_free(mine->peers);
}

static void free_transport(shm_transport *mine)
{
    if (!mine)
        return;
    release_peers(mine);
    fsdp_shm_pool_free(mine->pool);
    fsdp_shm_segment_release(&mine->local);
    fsdp_shared_transport_release(&mine->shared);
    fsdp_free(mine);
}

static void close_transport(fsdp_transport *transport)
{
    shm_transport *mine = (shm_transport *)transport;
    fsdp_shared_leave(&mine->shared.world);
    free_transport(mine);
}

static const fsdp_transport_ops shm_ops = {
    .name = "shm",
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM | FSDP_COMM_POOL,
    .comm_create = fsdp_shared_comm_create,
    .run = fsdp_shared_run,
    .abort = fsdp_shared_abort,
    .has_failed = fsdp_shared_comm_has_failed,
    .sees = fsdp_shared_sees,
    .comm_close = fsdp_shared_comm_close,
    .set_busy = fsdp_shared_set_busy,
    .alloc = allocate,
    .dealloc = deallocate,
    .close = close_transport,
};

static size_t half_of_window(int ranks)
{
    size_t wanted = (size_t)ranks * HALF_PER_RANK;
    return wanted < LEAST_HALF ? LEAST_HALF : wanted > MOST_HALF ? MOST_HALF : wanted;
}

static fsdp_status create_transport(fsdp_ctl *ctl, int deadline_ms, shm_transport **mine_out,
                                    fsdp_error *err)
{
    shm_transport *mine = fsdp_alloc(1, sizeof *mine);
    if (!mine)
        return fsdp_fail_memory(err, "a transport");
    int size = fsdp_ctl_size(ctl);
    mine->shared.base = (fsdp_transport){
        .ops = &shm_ops, .rank = fsdp_ctl_rank(ctl), .size = size, .deadline_ms = deadline_ms};
    mine->shared.window_half = half_of_window(size);
    mine->shared.alloc_shared = allocate;
    mine->shared.is_dead = is_dead;
    fsdp_status status = fsdp_shared_transport_init(&mine->shared, err);
    if (status == FSDP_OK)
        *mine_out = mine;
    else
        fsdp_free(mine);
    return status;
}

/* The block of the world is at the beginning of rank 0's segment: all ranks know its address. */
static fsdp_status prepare(shm_transport *mine, fsdp_error *err)
{
    int rank = mine->shared.base.rank, size = mine->shared.base.size;
    mine->peers = fsdp_alloc((size_t)size, sizeof *mine->peers);
    if (!mine->peers)
        return fsdp_fail_memory(err, "a transport");
    for (int i = 0; i < size; i++)
        mine->peers[i].process.fd = -1;
    FSDP_TRY(fsdp_shm_segment_init(size, &mine->local, err));
    FSDP_TRY(fsdp_shm_pool_create(&mine->local, &mine->pool, err));
    mine->shared.segment_size = mine->local.size;
    mine->shared.is_limited = mine->local.is_limited;
    mine->shared.bases[rank] = (uintptr_t)mine->local.data;
    if (rank != 0)
        return FSDP_OK;
    size_t block_size = fsdp_shared_world_size(size);
    void *block = fsdp_shm_pool_take(mine->pool, block_size);
    return block ? FSDP_OK : fsdp_shared_fail_memory(&mine->shared, "the block of a world", err);
}

static void attach(shm_transport *mine)
{
    shared_transport *shared = &mine->shared;
    for (int i = 0; i < shared->base.size; i++) {
        if (i != shared->base.rank)
            shared->bases[i] = (uintptr_t)mine->peers[i].segment.data;
    }
    shared->world.block = (shared_block *)shared->bases[0];
    fsdp_shm_segment_close_fd(&mine->local);
}

fsdp_status fsdp_transport_shm(fsdp_ctl *ctl, int deadline_ms, fsdp_transport **transport_out,
                               fsdp_error *err)
{
    shm_transport *mine = NULL;
    fsdp_error why = {0};
    fsdp_status status = create_transport(ctl, deadline_ms, &mine, &why);
    if (status == FSDP_OK)
        status = prepare(mine, &why);
    status = fsdp_ctl_agree(ctl, status, &why);
    if (status == FSDP_OK)
        status = fsdp_shm_connect(ctl, deadline_ms, &mine->local, mine->peers, &why);
    if (status == FSDP_OK) {
        attach(mine);
        fsdp_shared_observe(&mine->shared.base, ctl);
        *transport_out = &mine->shared.base;
        return FSDP_OK;
    }
    free_transport(mine);
    if (err)
        *err = why;
    return status;
}

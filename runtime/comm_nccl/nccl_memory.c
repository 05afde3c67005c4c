/*
 * Memory that NCCL allocates and registers with all groups, so that it moves without copies through NCCL's
 * own buffers. A library that cannot do that gives none, and plain memory of the device does. See
 * comm_nccl.h.
 */
#include "runtime/comm_nccl/comm_nccl.h"

#include "base/core/mem.h"

/* With the transport's lock. A block that NCCL does not register still works. */
static void register_block(nccl_block *block, nccl_group *group)
{
    const fsdp_nccl *nccl = group->transport->nccl;
    nccl_registration *made = nccl->CommRegister ? fsdp_alloc(1, sizeof *made) : NULL;
    fsdp_nccl_result result = FSDP_NCCL_INVALID_USAGE;
    if (!made)
        return;
    pthread_mutex_lock(&group->calling);
    if (group->handle)
        result = nccl->CommRegister(group->handle, block->data, block->size, &made->handle);
    pthread_mutex_unlock(&group->calling);
    if (result != FSDP_NCCL_SUCCESS) {
        fsdp_free(made);
        return;
    }
    made->group = group;
    made->next = block->registrations;
    block->registrations = made;
}

/* With the transport's lock. group: NULL means all. */
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
        if (made->group->handle)
            (void)made->group->transport->nccl->CommDeregister(made->group->handle, made->handle);
        pthread_mutex_unlock(&made->group->calling);
        *at = made->next;
        fsdp_free(made);
    }
}

void fsdp_nccl_register_blocks(nccl_group *group)
{
    pthread_mutex_lock(&group->transport->lock);
    for (nccl_block *block = group->transport->blocks; block; block = block->next)
        register_block(block, group);
    pthread_mutex_unlock(&group->transport->lock);
}

void fsdp_nccl_deregister_blocks(nccl_group *group)
{
    pthread_mutex_lock(&group->transport->lock);
    for (nccl_block *block = group->transport->blocks; block; block = block->next)
        deregister_block(block, group);
    pthread_mutex_unlock(&group->transport->lock);
}

void *fsdp_nccl_alloc(fsdp_transport *base, size_t size)
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
    pthread_mutex_lock(&transport->lock);
    block->next = transport->blocks;
    transport->blocks = block;
    for (nccl_group *group = transport->groups; group; group = group->next)
        register_block(block, group);
    pthread_mutex_unlock(&transport->lock);
    return block->data;
}

static void free_block(nccl_transport *transport, nccl_block *block)
{
    deregister_block(block, NULL);
    (void)transport->nccl->MemFree(block->data);
    fsdp_free(block);
}

void fsdp_nccl_dealloc(fsdp_transport *base, void *data)
{
    nccl_transport *transport = (nccl_transport *)base;
    pthread_mutex_lock(&transport->lock);
    nccl_block **at = &transport->blocks;
    while (*at && (*at)->data != data)
        at = &(*at)->next;
    nccl_block *block = *at;
    if (block) {
        *at = block->next;
        free_block(transport, block);
    }
    pthread_mutex_unlock(&transport->lock);
}

void fsdp_nccl_free_blocks(nccl_transport *transport)
{
    while (transport->blocks) {
        nccl_block *next = transport->blocks->next;
        free_block(transport, transport->blocks);
        transport->blocks = next;
    }
}

/* Blocks of pinned memory by size classes. See pinned_pool.h. */
#include "runtime/device/pinned_pool.h"

#include <stdint.h>

enum { LEAST = 4096, STEPS = 4 };

/* Lies in the block itself: to give one back never fails. */
typedef struct fsdp_pinned_block {
    struct fsdp_pinned_block *next;
    size_t room;
} pinned_block;

int fsdp_pinned_init(fsdp_pinned_pool *pool, void *(*alloc)(size_t size),
                     void (*dealloc)(void *data))
{
    *pool = (fsdp_pinned_pool){.alloc = alloc, .dealloc = dealloc};
    return pthread_mutex_init(&pool->lock, NULL);
}

/* Four classes between two powers of two. 0: larger than any memory. */
static size_t room_of(size_t size)
{
    size_t step = LEAST;
    while (size / STEPS >= 2 * step)
        step *= 2;
    if (size > SIZE_MAX - step)
        return 0;
    return size == 0 ? LEAST : (size + step - 1) / step * step;
}

/* --- free blocks ------------------------------------------------------------------------------ */

static pinned_block *unlink_block(fsdp_pinned_pool *pool, pinned_block **at)
{
    pinned_block *block = *at;
    *at = block->next;
    pool->kept -= block->room;
    return block;
}

static pinned_block *take_free(fsdp_pinned_pool *pool, size_t room)
{
    for (pinned_block **at = &pool->free; *at; at = &(*at)->next)
        if ((*at)->room == room)
            return unlink_block(pool, at);
    return NULL;
}

/* The last of the list was given back first. */
static void free_oldest(fsdp_pinned_pool *pool)
{
    pinned_block **at = &pool->free;
    while ((*at)->next)
        at = &(*at)->next;
    pool->dealloc(unlink_block(pool, at));
}

static void shrink(fsdp_pinned_pool *pool, size_t most)
{
    while (pool->free && pool->used + pool->kept > most)
        free_oldest(pool);
}

void fsdp_pinned_release(fsdp_pinned_pool *pool)
{
    shrink(pool, 0);
    pthread_mutex_destroy(&pool->lock);
}

/* --- blocks ----------------------------------------------------------------------------------- */

/* Kept blocks of other sizes make way when there is no memory. */
static void *allocate(fsdp_pinned_pool *pool, size_t room)
{
    void *data = pool->alloc(room);
    if (data || !pool->free)
        return data;
    shrink(pool, 0);
    return pool->alloc(room);
}

void *fsdp_pinned_take(fsdp_pinned_pool *pool, size_t size)
{
    size_t room = room_of(size);
    if (room == 0)
        return NULL;
    pthread_mutex_lock(&pool->lock);
    void *data = take_free(pool, room);
    if (!data)
        data = allocate(pool, room);
    if (data)
        pool->used += room;
    if (pool->used > pool->most_used)
        pool->most_used = pool->used;
    pthread_mutex_unlock(&pool->lock);
    return data;
}

void fsdp_pinned_give(fsdp_pinned_pool *pool, void *data, size_t size)
{
    pinned_block *block = data;
    if (!block)
        return;
    pthread_mutex_lock(&pool->lock);
    *block = (pinned_block){.next = pool->free, .room = room_of(size)};
    pool->free = block;
    pool->used -= block->room;
    pool->kept += block->room;
    shrink(pool, pool->most_used + FSDP_PINNED_BESIDE);
    pthread_mutex_unlock(&pool->lock);
}

/*
 * Pinned memory of a device, which is slow to allocate: blocks that were given back are kept and reused.
 * Sizes are rounded up to classes, by a quarter at most (from 4 KiB on), so that later requests fit. All
 * blocks together hold little more than was ever in use at once.
 *
 * In: sizes, and the two calls that allocate, from a device. Out: blocks. Any thread may call.
 */
#ifndef FSDP_PINNED_POOL_H
#define FSDP_PINNED_POOL_H

#include <pthread.h>
#include <stddef.h>

struct fsdp_pinned_block;

typedef struct fsdp_pinned_pool {
    void *(*alloc)(size_t size);       /* NULL: none left */
    void (*dealloc)(void *data);
    pthread_mutex_t lock;
    struct fsdp_pinned_block *free;   /* the last that was given back first */
    size_t used, most_used, kept;      /* bytes in use, now and at most, and of free blocks */
} fsdp_pinned_pool;

enum { FSDP_PINNED_BESIDE = 64 << 20 };       /* bytes that are kept beyond the most that were used at once */

/* Returns an errno, 0 for success. */
int fsdp_pinned_init(fsdp_pinned_pool *pool, void *(*alloc)(size_t size), void (*dealloc)(void *data));
void fsdp_pinned_release(fsdp_pinned_pool *pool);    /* all blocks were given back */

/* At least that many bytes, not zeroed. NULL: none left. */
void *fsdp_pinned_take(fsdp_pinned_pool *pool, size_t size);
void fsdp_pinned_give(fsdp_pinned_pool *pool, void *data, size_t size);     /* as asked for; accepts NULL */

#endif

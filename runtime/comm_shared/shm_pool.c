/*
 * Allocates pages of this rank's segment from an ordered list of ranges; neighbouring free ranges
 * are joined. First fit keeps allocations together; freed large ranges return their pages to the
 * system. Locked, because streams of a rank are threads. See transport_shm.h.
 */
#include "runtime/comm_shared/transport_shm.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/core/mem.h"

enum { GIVEN_BACK = 1 << 20 };

typedef struct shm_range {
    struct shm_range *before, *after;
    size_t at, size;
    bool is_taken;
} shm_range;

struct shm_pool {
    pthread_mutex_t lock;
    unsigned char *data;
    size_t page;
    shm_range *first;
};

fsdp_status fsdp_shm_pool_create(const shm_segment *segment, shm_pool **pool_out, fsdp_error *err)
{
    shm_pool *pool = fsdp_alloc(1, sizeof *pool);
    shm_range *all = fsdp_alloc(1, sizeof *all);
    if (!pool || !all || pthread_mutex_init(&pool->lock, NULL) != 0) {
        fsdp_free(pool);
        fsdp_free(all);
        return fsdp_fail_memory(err, "a pool of shared memory");
    }
    all->size = segment->size;
    pool->data = segment->data;
    pool->page = (size_t)sysconf(_SC_PAGESIZE);
    pool->first = all;
    *pool_out = pool;
    return FSDP_OK;
}

void fsdp_shm_pool_free(shm_pool *pool)
{
    if (!pool)
        return;
    while (pool->first) {
        shm_range *after = pool->first->after;
        fsdp_free(pool->first);
        pool->first = after;
    }
    pthread_mutex_destroy(&pool->lock);
    fsdp_free(pool);
}

/* Cuts a range after `size` bytes. */
static void cut(shm_range *range, size_t size, shm_range *rest)
{
    *rest = (shm_range){
        .before = range, .after = range->after, .at = range->at + size, .size = range->size - size};
    if (range->after)
        range->after->before = rest;
    range->after = rest;
    range->size = size;
}

/* Joins a range with the next one. */
static void join(shm_range *range)
{
    shm_range *gone = range->after;
    range->size += gone->size;
    range->after = gone->after;
    if (gone->after)
        gone->after->before = range;
    fsdp_free(gone);
}

void *fsdp_shm_pool_take(shm_pool *pool, size_t size)
{
    if (size > SIZE_MAX - pool->page)
        return NULL;
    size_t pages = size > 0 ? (size + pool->page - 1) / pool->page * pool->page : pool->page;
    shm_range *rest = fsdp_alloc(1, sizeof *rest);
    if (!rest)
        return NULL;
    pthread_mutex_lock(&pool->lock);
    shm_range *range = pool->first;
    while (range && (range->is_taken || range->size < pages))
        range = range->after;
    if (range)
        range->is_taken = true;
    if (range && range->size > pages) {
        cut(range, pages, rest);
        rest = NULL;
    }
    void *data = range ? pool->data + range->at : NULL;
    pthread_mutex_unlock(&pool->lock);
    fsdp_free(rest);
    return data;
}

void fsdp_shm_pool_give(shm_pool *pool, void *data)
{
    pthread_mutex_lock(&pool->lock);
    shm_range *range = pool->first;
    while (range && (!range->is_taken || pool->data + range->at != data))
        range = range->after;
    if (range) {
        if (range->size >= GIVEN_BACK)
            (void)madvise(data, range->size, MADV_REMOVE);
        range->is_taken = false;
        if (range->after && !range->after->is_taken)
            join(range);
        if (range->before && !range->before->is_taken)
            join(range->before);
    }
    pthread_mutex_unlock(&pool->lock);
}

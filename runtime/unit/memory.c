/* Blocks of memory that belong to streams. See memory.h. */
#include "runtime/unit/memory.h"

#include "base/mem.h"

static const char *const class_names[FSDP_MEMORY_CLASSES] = {"shard",  "unsharded", "all_gather",
                                                             "reduce", "grad",      "optim"};

const char *fsdp_memory_class_name(fsdp_memory_class which)
{
    return which >= 0 && which < FSDP_MEMORY_CLASSES ? class_names[which] : "?";
}

/* --- counts ----------------------------------------------------------------------------------- */

void fsdp_memory_count(fsdp_memory_pool *pool, fsdp_memory_class class, int64_t bytes)
{
    fsdp_memory *counts = &pool->counts;
    counts->now[class] += bytes;
    counts->total_now += bytes;
    if (counts->now[class] > counts->peak[class])
        counts->peak[class] = counts->now[class];
    if (counts->total_now > counts->total_peak)
        counts->total_peak = counts->total_now;
}

void fsdp_memory_move(fsdp_memory_pool *pool, fsdp_block *block, fsdp_memory_class class)
{
    fsdp_memory_count(pool, block->class, -(int64_t)block->size);
    fsdp_memory_count(pool, class, (int64_t)block->size);
    block->class = class;
}

/* --- blocks ----------------------------------------------------------------------------------- */

void fsdp_memory_init(fsdp_memory_pool *pool, fsdp_device *device)
{
    *pool = (fsdp_memory_pool){.device = device};
}

static void destroy(fsdp_memory_pool *pool, fsdp_block *block)
{
    if (block->comm)
        fsdp_comm_dealloc(block->comm, block->data);
    else if (block->data)
        pool->device->ops->dealloc(pool->device, block->data, block->room);
    fsdp_free(block);
}

static void tell_own(const fsdp_memory_pool *pool, const fsdp_block *block)
{
    if (pool->device->ops->own)
        pool->device->ops->own(block->stream, block->data, block->room);
}

static void tell_disown(const fsdp_memory_pool *pool, const fsdp_block *block)
{
    if (pool->device->ops->disown)
        pool->device->ops->disown(block->stream, block->data);
}

/* Takes it out of the free ones. */
static fsdp_block *unlink_free(fsdp_memory_pool *pool, fsdp_block **at)
{
    fsdp_block *block = *at;
    *at = block->next;
    pool->kept -= block->room;
    return block;
}

/* All free blocks; those that streams still use are waited for. */
static void trim(fsdp_memory_pool *pool)
{
    while (pool->free) {
        (void)!pool->device->ops->sync(pool->free->given, NULL);
        destroy(pool, unlink_free(pool, &pool->free));
    }
}

/* The one that was given back first, of those that no stream uses any more. */
static fsdp_block **find_oldest(fsdp_memory_pool *pool)
{
    fsdp_block **oldest = NULL;
    for (fsdp_block **at = &pool->free; *at; at = &(*at)->next)
        if (pool->device->ops->is_reached((*at)->given))
            oldest = at;
    return oldest;
}

enum { KEPT_BESIDE = 16 << 20 };

/* Before `room` more bytes are taken from the device. */
static void make_way(fsdp_memory_pool *pool, size_t room)
{
    size_t most = pool->used + room > pool->most_used ? pool->used + room : pool->most_used;
    while (pool->used + pool->kept + room > most + KEPT_BESIDE) {
        fsdp_block **oldest = find_oldest(pool);
        if (!oldest)
            return;
        destroy(pool, unlink_free(pool, oldest));
    }
}

void fsdp_memory_release(fsdp_memory_pool *pool)
{
    trim(pool);
}

static void note_used(fsdp_memory_pool *pool, const fsdp_block *block)
{
    pool->used += block->room;
    if (pool->used > pool->most_used)
        pool->most_used = pool->used;
}

/* A little more room than needed is fine: sizes of a step come again. */
static fsdp_block *find_free(fsdp_memory_pool *pool, fsdp_stream *stream, fsdp_comm *comm,
                             size_t size)
{
    for (fsdp_block **at = &pool->free; *at; at = &(*at)->next) {
        fsdp_block *block = *at;
        if (block->stream == stream && block->asked == comm && block->room >= size &&
            block->room - size <= size / 8)
            return unlink_free(pool, at);
    }
    return NULL;
}

static fsdp_block *make(fsdp_memory_pool *pool, fsdp_comm *comm, size_t size)
{
    fsdp_block *block = fsdp_alloc(1, sizeof *block);
    if (!block)
        return NULL;
    block->room = size;
    block->asked = comm;
    if (comm) {
        block->comm = comm;
        block->data = fsdp_comm_alloc(comm, block->room);
    }
    if (!block->data) {
        block->comm = NULL;
        block->data = pool->device->ops->alloc(pool->device, block->room);
    }
    if (!block->data) {
        fsdp_free(block);
        return NULL;
    }
    return block;
}

fsdp_status fsdp_memory_take(fsdp_memory_pool *pool, fsdp_memory_class class, fsdp_stream *stream,
                             fsdp_comm *comm, size_t size, size_t slack, const char *what,
                             fsdp_block **block_out, fsdp_error *err)
{
    size_t room = size + slack > 0 ? size + slack : 1;
    fsdp_block *block = find_free(pool, stream, comm, room);
    if (!block) {
        make_way(pool, room);
        block = make(pool, comm, room);
    }
    if (!block) {
        trim(pool);
        block = make(pool, comm, room);
    }
    if (!block)
        return fsdp_fail_memory(err, what);
    block->size = size;
    block->class = class;
    block->stream = stream;
    note_used(pool, block);
    fsdp_memory_count(pool, class, (int64_t)size);
    tell_own(pool, block);
    *block_out = block;
    return FSDP_OK;
}

void fsdp_memory_pass(fsdp_memory_pool *from, fsdp_memory_pool *to, fsdp_block *block,
                      fsdp_stream *stream)
{
    tell_disown(from, block);
    from->used -= block->room;
    block->stream = stream;
    note_used(to, block);
    tell_own(to, block);
}

void fsdp_memory_give(fsdp_memory_pool *pool, fsdp_block *block, fsdp_event last_use)
{
    if (!block)
        return;
    const fsdp_device_ops *ops = pool->device->ops;
    ops->wait(block->stream, last_use);
    tell_disown(pool, block);
    block->given = ops->record(block->stream);
    fsdp_memory_count(pool, block->class, -(int64_t)block->size);
    pool->used -= block->room;
    pool->kept += block->room;
    block->next = pool->free;
    pool->free = block;
}

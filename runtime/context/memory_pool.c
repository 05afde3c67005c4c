/* Blocks of memory that belong to streams. See memory.h. */
#include "runtime/context/memory_pool.h"

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

void fsdp_memory_uncount(fsdp_memory_pool *pool, fsdp_block *block)
{
    fsdp_memory_count(pool, block->class, -(int64_t)block->size);
    block->size = 0;
}

/* --- lenders ---------------------------------------------------------------------------------- */

static void *alloc_of_comm(void *user, size_t size)
{
    return fsdp_comm_alloc(user, size);
}

static void dealloc_of_comm(void *user, void *data)
{
    fsdp_comm_dealloc(user, data);
}

fsdp_lender fsdp_lender_of_comm(fsdp_comm *comm)
{
    if (!comm)
        return (fsdp_lender){0};
    return (fsdp_lender){.user = comm, .alloc = alloc_of_comm, .dealloc = dealloc_of_comm};
}

fsdp_lender fsdp_lender_of_custom(const fsdp_custom_collective *custom)
{
    if (!custom || !custom->alloc)
        return (fsdp_lender){0};
    return (fsdp_lender){.user = custom->user,
                         .alloc = custom->alloc,
                         .dealloc = custom->dealloc,
                         .is_obliged = true};
}

static bool is_same(const fsdp_lender *a, const fsdp_lender *b)
{
    return a->user == b->user && a->alloc == b->alloc && a->dealloc == b->dealloc;
}

/* --- blocks ----------------------------------------------------------------------------------- */

void fsdp_memory_init(fsdp_memory_pool *pool, fsdp_device *device)
{
    *pool = (fsdp_memory_pool){.device = device};
}

static void destroy(fsdp_memory_pool *pool, fsdp_block *block)
{
    if (!block->is_lent)
        pool->device->ops->dealloc(pool->device, block->data, block->room);
    else if (block->lender.dealloc)
        block->lender.dealloc(block->lender.user, block->data);
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

/* Its lender takes nothing back: it is of use only here. */
static bool is_stuck(const fsdp_block *block)
{
    return block->is_lent && !block->lender.dealloc;
}

static bool is_any(const fsdp_block *block)
{
    (void)block;
    return true;
}

static bool is_lent(const fsdp_block *block)
{
    return block->is_lent;
}

static bool is_returnable(const fsdp_block *block)
{
    return !is_stuck(block);
}

/* Those free blocks; what streams still use is waited for. */
static void trim(fsdp_memory_pool *pool, bool (*is_meant)(const fsdp_block *block))
{
    fsdp_block **at = &pool->free;
    while (*at) {
        if (!is_meant(*at)) {
            at = &(*at)->next;
            continue;
        }
        (void)!pool->device->ops->sync((*at)->given, NULL);
        destroy(pool, unlink_free(pool, at));
    }
}

/* The one that was given back first, of those that no stream uses any more. */
static fsdp_block **find_oldest(fsdp_memory_pool *pool)
{
    fsdp_block **oldest = NULL;
    for (fsdp_block **at = &pool->free; *at; at = &(*at)->next)
        if (!is_stuck(*at) && pool->device->ops->is_reached((*at)->given))
            oldest = at;
    return oldest;
}

enum { KEPT_BESIDE = 16 << 20 };

/* Before `room` more bytes are taken from the device or a lender. */
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
    trim(pool, is_any);
}

void fsdp_memory_return_lent(fsdp_memory_pool *pool)
{
    trim(pool, is_lent);
}

static void note_used(fsdp_memory_pool *pool, const fsdp_block *block)
{
    pool->used += block->room;
    if (pool->used > pool->most_used)
        pool->most_used = pool->used;
}

/* A little more room than needed is fine: sizes of a step come again. */
static fsdp_block *find_free(fsdp_memory_pool *pool, fsdp_stream *stream, const fsdp_lender *lender,
                             size_t size)
{
    for (fsdp_block **at = &pool->free; *at; at = &(*at)->next) {
        fsdp_block *block = *at;
        if (block->stream == stream && is_same(&block->lender, lender) && block->room >= size &&
            block->room - size <= size / 8)
            return unlink_free(pool, at);
    }
    return NULL;
}

static fsdp_block *make(fsdp_memory_pool *pool, const fsdp_lender *lender, size_t size)
{
    fsdp_block *block = fsdp_alloc(1, sizeof *block);
    if (!block)
        return NULL;
    block->room = size;
    block->lender = *lender;
    if (lender->alloc)
        block->data = lender->alloc(lender->user, size);
    block->is_lent = block->data != NULL;
    if (!block->data && !lender->is_obliged)
        block->data = pool->device->ops->alloc(pool->device, size);
    if (!block->data) {
        fsdp_free(block);
        return NULL;
    }
    return block;
}

static fsdp_status fail_take(const fsdp_lender *lender, size_t room, const char *what,
                             fsdp_error *err)
{
    if (!lender->is_obliged)
        return fsdp_fail_memory(err, what);
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "unit %s: the alloc of its custom collective gave no %zu bytes", what, room);
}

fsdp_status fsdp_memory_take(fsdp_memory_pool *pool, fsdp_memory_class class, fsdp_stream *stream,
                             const fsdp_lender *lender, size_t size, size_t slack, const char *what,
                             fsdp_block **block_out, fsdp_error *err)
{
    size_t room = size + slack > 0 ? size + slack : 1;
    const fsdp_lender asked = lender ? *lender : (fsdp_lender){0};
    fsdp_block *block = find_free(pool, stream, &asked, room);
    if (!block) {
        make_way(pool, room);
        block = make(pool, &asked, room);
    }
    if (!block) {
        trim(pool, is_returnable);
        block = make(pool, &asked, room);
    }
    if (!block)
        return fail_take(&asked, room, what, err);
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

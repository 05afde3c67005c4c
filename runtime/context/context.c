/*
 * A context: the memory of a step, as blocks that belong to streams; the streams, and the blocks in flight
 * between them. See memory_pool.h and context.h.
 */
#include "runtime/context/context.h"

#include <string.h>

#include "base/core/mem.h"

/* === the memory pool ========================================================================== */

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

/* --- allocators ------------------------------------------------------------------------------- */

static void *alloc_of_comm(void *context, size_t size)
{
    return fsdp_comm_alloc(context, size);
}

static void dealloc_of_comm(void *context, void *data)
{
    fsdp_comm_dealloc(context, data);
}

fsdp_allocator fsdp_allocator_of_comm(fsdp_comm *comm)
{
    if (!comm)
        return (fsdp_allocator){0};
    return (fsdp_allocator){.context = comm, .alloc = alloc_of_comm, .dealloc = dealloc_of_comm};
}

fsdp_allocator fsdp_allocator_of_custom(const fsdp_custom_collective *custom)
{
    if (!custom || !custom->alloc)
        return (fsdp_allocator){0};
    return (fsdp_allocator){.context = custom->context,
                            .alloc = custom->alloc,
                            .dealloc = custom->dealloc,
                            .is_required = true};
}

static bool is_same(const fsdp_allocator *a, const fsdp_allocator *b)
{
    return a->context == b->context && a->alloc == b->alloc && a->dealloc == b->dealloc;
}

/* --- blocks ----------------------------------------------------------------------------------- */

void fsdp_memory_init(fsdp_memory_pool *pool, fsdp_device *device)
{
    *pool = (fsdp_memory_pool){.device = device};
}

static void destroy(fsdp_memory_pool *pool, fsdp_block *block)
{
    const fsdp_device_ops *ops = pool->device->ops;
    if (block->is_staging)
        ops->dealloc_staging(pool->device, block->data, block->room);
    else if (!block->is_external)
        ops->dealloc(pool->device, block->data, block->room);
    else if (block->allocator.dealloc)
        block->allocator.dealloc(block->allocator.context, block->data);
    fsdp_free(block);
}

static void report_own(const fsdp_memory_pool *pool, const fsdp_block *block)
{
    if (pool->device->ops->own)
        pool->device->ops->own(block->stream, block->data, block->room);
}

static void report_disown(const fsdp_memory_pool *pool, const fsdp_block *block)
{
    if (pool->device->ops->disown)
        pool->device->ops->disown(block->stream, block->data);
}

/* Takes a block out of the list of free ones. */
static fsdp_block *unlink_free(fsdp_memory_pool *pool, fsdp_block **at)
{
    fsdp_block *block = *at;
    *at = block->next;
    pool->kept -= block->room;
    return block;
}

/* Its allocator takes nothing back, so it stays in the pool. */
static bool is_stuck(const fsdp_block *block)
{
    return block->is_external && !block->allocator.dealloc;
}

static bool is_any(const fsdp_block *block)
{
    (void)block;
    return true;
}

static bool is_external(const fsdp_block *block)
{
    return block->is_external;
}

static bool is_returnable(const fsdp_block *block)
{
    return !is_stuck(block);
}

/* Frees the matching free blocks, after their last work. */
static void trim(fsdp_memory_pool *pool, bool (*matches)(const fsdp_block *block))
{
    fsdp_block **at = &pool->free;
    while (*at) {
        if (!matches(*at)) {
            at = &(*at)->next;
            continue;
        }
        (void)!pool->device->ops->sync((*at)->given, NULL);
        destroy(pool, unlink_free(pool, at));
    }
}

/* The block that was given back first, of those that no stream uses any more. */
static fsdp_block **find_oldest(fsdp_memory_pool *pool)
{
    fsdp_block **oldest = NULL;
    for (fsdp_block **at = &pool->free; *at; at = &(*at)->next)
        if (!is_stuck(*at) && pool->device->ops->is_reached((*at)->given))
            oldest = at;
    return oldest;
}

enum { KEPT_BESIDE = 16 << 20 };

/* Before `room` more bytes are taken from the device or an allocator. */
static void make_way(fsdp_memory_pool *pool, size_t room)
{
    if (!pool->device->ops->is_host)
        return;
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

void fsdp_memory_return_external(fsdp_memory_pool *pool)
{
    trim(pool, is_external);
}

static void note_used(fsdp_memory_pool *pool, const fsdp_block *block)
{
    pool->used += block->room;
    if (pool->used > pool->most_used)
        pool->most_used = pool->used;
}

/* A block may be up to an eighth larger than requested: the next step requests the same sizes. */
static bool fits(const fsdp_block *block, const fsdp_memory_request *request, size_t size)
{
    return is_same(&block->allocator, &request->allocator) &&
           block->is_staging == request->is_staging && block->room >= size &&
           block->room - size <= size / 8;
}

/* One of the stream. Of the host's memory also one that no stream uses any more: new pages would have to be
 * zeroed. On a GPU that would depend on time, and some later step would still have to allocate. */
static fsdp_block *find_free(fsdp_memory_pool *pool, const fsdp_memory_request *request,
                             size_t size)
{
    fsdp_block **idle = NULL;
    for (fsdp_block **at = &pool->free; *at; at = &(*at)->next) {
        if (!fits(*at, request, size))
            continue;
        if ((*at)->stream == request->stream)
            return unlink_free(pool, at);
        if (pool->device->ops->is_host && pool->device->ops->is_reached((*at)->given))
            idle = at;
    }
    return idle ? unlink_free(pool, idle) : NULL;
}

static fsdp_block *make(fsdp_memory_pool *pool, const fsdp_memory_request *request, size_t size)
{
    const fsdp_allocator *allocator = &request->allocator;
    const fsdp_device_ops *ops = pool->device->ops;
    fsdp_block *block = fsdp_alloc(1, sizeof *block);
    if (!block)
        return NULL;
    block->room = size;
    block->allocator = *allocator;
    if (allocator->alloc)
        block->data = allocator->alloc(allocator->context, size);
    block->is_external = block->data != NULL;
    block->is_staging = request->is_staging;
    if (!block->data && !allocator->is_required)
        block->data = (request->is_staging ? ops->alloc_staging : ops->alloc)(pool->device, size);
    if (!block->data) {
        fsdp_free(block);
        return NULL;
    }
    return block;
}

static fsdp_status fail_take(const fsdp_memory_request *request, size_t room, fsdp_error *err)
{
    if (!request->allocator.is_required)
        return fsdp_fail_memory(err, request->owner);
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "unit %s: the alloc of its custom collective returned no memory of %zu bytes",
                     request->owner, room);
}

fsdp_status fsdp_memory_take(fsdp_memory_pool *pool, const fsdp_memory_request *request,
                             fsdp_block **block_out, fsdp_error *err)
{
    size_t wanted = request->size + request->slack, room = wanted > 0 ? wanted : 1;
    fsdp_block *block = find_free(pool, request, room);
    if (!block) {
        make_way(pool, room);
        block = make(pool, request, room);
    }
    if (!block) {
        trim(pool, is_returnable);
        block = make(pool, request, room);
    }
    if (!block)
        return fail_take(request, room, err);
    block->size = request->size;
    block->class = request->class;
    block->stream = request->stream;
    note_used(pool, block);
    fsdp_memory_count(pool, request->class, (int64_t)request->size);
    report_own(pool, block);
    *block_out = block;
    return FSDP_OK;
}

fsdp_status fsdp_memory_take_zeroed(fsdp_memory_pool *pool, const fsdp_memory_request *request,
                                    fsdp_block **block_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_memory_take(pool, request, block_out, err));
    const fsdp_device_ops *ops = pool->device->ops;
    ops->kernels->fill(request->stream, (*block_out)->data, 0, request->size + request->slack);
    return ops->sync(ops->record(request->stream), err);
}

void fsdp_memory_pass(fsdp_memory_pool *from, fsdp_memory_pool *to, fsdp_block *block,
                      fsdp_stream *stream)
{
    report_disown(from, block);
    from->used -= block->room;
    block->stream = stream;
    note_used(to, block);
    report_own(to, block);
}

void fsdp_memory_give(fsdp_memory_pool *pool, fsdp_block *block, fsdp_event last_use)
{
    if (!block)
        return;
    const fsdp_device_ops *ops = pool->device->ops;
    ops->wait(block->stream, last_use);
    report_disown(pool, block);
    block->given = ops->record(block->stream);
    fsdp_memory_count(pool, block->class, -(int64_t)block->size);
    pool->used -= block->room;
    pool->kept += block->room;
    block->next = pool->free;
    pool->free = block;
}

/* === contexts ================================================================================= */

static const char *const stream_names[FSDP_STREAMS] = {"compute", "copy_in", "all_gather", "reduce",
                                                       "all_reduce"};

static fsdp_status open_streams(fsdp_context *context, fsdp_error *err)
{
    for (int i = 0; i < FSDP_STREAMS; i++)
        FSDP_TRY(context->device->ops->stream_create(context->device, stream_names[i],
                                                     &context->streams[i], err));
    return FSDP_OK;
}

fsdp_status fsdp_context_create(fsdp_world *world, fsdp_context **context_out, fsdp_error *err)
{
    fsdp_context *context = fsdp_alloc(1, sizeof *context);
    *context_out = context;
    if (!context)
        return fsdp_fail_memory(err, "the context of a root");
    context->world = world;
    context->device = world->parts.device;
    fsdp_memory_init(&context->memory, context->device);
    return open_streams(context, err);
}

void fsdp_context_drain(fsdp_context *context)
{
    const fsdp_device_ops *ops = context->device->ops;
    for (int i = 0; i < FSDP_STREAMS; i++)
        if (context->streams[i])
            (void)!ops->sync(ops->record(context->streams[i]), NULL);
}

/* Communicators outlive contexts, and their last events belong to streams that are freed now. The streams
 * were drained, so these events are reached. */
static void forget_streams(fsdp_context *context)
{
    for (size_t i = 0; i < context->world->comm_count; i++)
        for (int s = 0; s < FSDP_STREAMS; s++)
            if (context->world->comms[i]->last.stream == context->streams[s])
                context->world->comms[i]->last = (fsdp_event){0};
}

void fsdp_context_free(fsdp_context *context)
{
    fsdp_context_flush_gather(context);
    fsdp_context_limit_inputs(context, 0);
    fsdp_context_give_all_reduced(context);
    fsdp_context_drain(context); /* no stream is freed while another one still waits for it */
    fsdp_memory_release(&context->memory);
    forget_streams(context);
    for (int i = 0; i < FSDP_STREAMS; i++)
        if (context->streams[i])
            context->device->ops->stream_free(context->streams[i]);
    fsdp_free(context->inputs);
    fsdp_free(context->order);
    fsdp_free(context);
}

fsdp_status fsdp_context_sync(fsdp_context *context, fsdp_error *err)
{
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_ops *ops = context->device->ops;
    return ops->is_host ? ops->sync(ops->record(compute), err) : FSDP_OK;
}

fsdp_status fsdp_context_check_comms(const fsdp_context *context, fsdp_error *err)
{
    const fsdp_world *world = context->world;
    if (!context->device->ops->issue) /* calls of the host have returned their failures */
        return FSDP_OK;
    for (size_t i = 0; i < world->comm_count; i++)
        if (world->comms[i]->comm)
            FSDP_TRY(fsdp_comm_failure(world->comms[i]->comm, err));
    return FSDP_OK;
}

fsdp_status fsdp_context_check(const fsdp_context *context, fsdp_error *err)
{
    for (int i = 0; i < FSDP_STREAMS; i++)
        FSDP_TRY(context->device->ops->check(context->streams[i], err));
    return FSDP_OK;
}

/* --- gathers ---------------------------------------------------------------------------------- */

void fsdp_context_give_gather(fsdp_context *context, fsdp_used_block *gather)
{
    if (!gather->block)
        return;
    fsdp_memory_give(&context->memory, gather->block, gather->event);
    *gather = (fsdp_used_block){0};
}

void fsdp_context_flush_gather(fsdp_context *context)
{
    fsdp_context_give_gather(context, &context->deferred);
}

/* --- reductions ------------------------------------------------------------------------------- */

fsdp_status fsdp_context_size_inputs(fsdp_context *context, int most, fsdp_error *err)
{
    context->max_inputs = most;
    if (most <= context->input_room)
        return FSDP_OK;
    fsdp_used_block *inputs = fsdp_realloc(context->inputs, (size_t)most, sizeof *inputs);
    if (!inputs)
        return fsdp_fail_memory(err, "the list of reductions");
    context->inputs = inputs;
    context->input_room = most;
    return FSDP_OK;
}

void fsdp_context_limit_inputs(fsdp_context *context, int most)
{
    while (context->input_count > most) {
        const fsdp_used_block oldest = context->inputs[0];
        fsdp_memory_give(&context->memory, oldest.block, oldest.event);
        context->input_count--;
        memmove(context->inputs, context->inputs + 1,
                (size_t)context->input_count * sizeof *context->inputs);
    }
}

void fsdp_context_give_all_reduced(fsdp_context *context)
{
    fsdp_memory_give(&context->memory, context->all_reduced.block, context->all_reduced.event);
    context->all_reduced = (fsdp_used_block){0};
}

/* --- trace ------------------------------------------------------------------------------------ */

void fsdp_context_trace(fsdp_context *context, fsdp_text *events, const fsdp_trace_event *event)
{
    fsdp_trace_add(context->world->parts.trace, event);
    if (events)
        fsdp_text_addf(events, "%s %s\n", event->event, event->unit);
}

/*
 * A watched device, for --check and in builds for debugging (without NDEBUG): it runs its work on
 * another device and tracks the order of the work with vector clocks. It reports a stream that uses
 * a block without waiting for it, and a block that is freed while another stream may still use it
 * (docs/runtime.md, "Ownership of memory"), also when the race happens to go well. See device.h.
 *
 * A stream's ticket counts the work and the waits that were issued to it; `reached` is, for every
 * stream, the last ticket that is ordered before this stream's next work.
 */
#include "base/core/mem.h"
#include "runtime/device/device.h"

#include <stdatomic.h>
#include <string.h>

/* Queues are much shorter than POINTS, so that the work before an overwritten point is done. */
enum { MOST_STREAMS = 32, POINTS = 1024 };

typedef struct watch_point {
    uint64_t ticket;
    fsdp_event event; /* of the inner device */
    uint64_t reached[MOST_STREAMS];
} watch_point;

typedef struct watched_stream {
    fsdp_stream head;
    fsdp_stream *inner;
    int index;
    uint64_t reached[MOST_STREAMS]; /* [index]: its own ticket */
    watch_point points[POINTS];
} watched_stream;

typedef struct watched_block {
    const unsigned char *data;
    size_t size;
    const watched_stream *owner;
    uint64_t since;
    uint64_t used[MOST_STREAMS]; /* ticket of the last use; 0: none */
} watched_block;

typedef struct watched_device {
    fsdp_device head;
    fsdp_device_ops ops;
    fsdp_device *inner;
    watched_stream *streams[MOST_STREAMS];
    uint64_t tickets[MOST_STREAMS]; /* of freed streams */
    watched_block *blocks;
    size_t count, room;
    fsdp_error error;        /* the first; the program's thread alone writes it, before ... */
    _Atomic bool has_failed; /* ... this, since the thread of a save reads it, too */
} watched_device;

static watched_device *device_of(const fsdp_stream *stream)
{
    return (watched_device *)stream->device;
}

static watched_stream *of(fsdp_stream *stream)
{
    return (watched_stream *)stream;
}

/* --- streams ---------------------------------------------------------------------------------- */

static fsdp_status create_stream(fsdp_device *head, const char *name, fsdp_stream **stream_out,
                                 fsdp_error *err)
{
    watched_device *device = (watched_device *)head;
    int index = 0;
    while (index < MOST_STREAMS && device->streams[index])
        index++;
    if (index == MOST_STREAMS)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "--check watches %d streams at most", MOST_STREAMS);
    watched_stream *stream = fsdp_alloc(1, sizeof *stream);
    if (!stream)
        return fsdp_fail_memory(err, "a stream");
    fsdp_status status =
        device->inner->ops->stream_create(device->inner, name, &stream->inner, err);
    if (status != FSDP_OK) {
        fsdp_free(stream);
        return status;
    }
    stream->head = (fsdp_stream){.device = head, .name = name};
    stream->index = index;
    stream->reached[index] = device->tickets[index];
    device->streams[index] = stream;
    *stream_out = &stream->head;
    return FSDP_OK;
}

static void free_stream(fsdp_stream *head)
{
    watched_stream *stream = of(head);
    watched_device *device = device_of(head);
    device->inner->ops->stream_free(stream->inner);
    device->tickets[stream->index] = stream->reached[stream->index];
    device->streams[stream->index] = NULL;
    fsdp_free(stream);
}

/* --- work ------------------------------------------------------------------------------------- */

/* The stream of the inner device that gets the next work. */
static fsdp_stream *next_work(fsdp_stream *head)
{
    watched_stream *stream = of(head);
    stream->reached[stream->index]++;
    return stream->inner;
}

static const fsdp_device_kernels *kernels_of(const fsdp_stream *inner)
{
    return inner->device->ops->kernels;
}

static void submit(fsdp_stream *head, fsdp_work work, const void *args, size_t args_size)
{
    fsdp_stream *inner = next_work(head);
    inner->device->ops->submit(inner, work, args, args_size);
}

static void copy(fsdp_stream *head, void *to, const void *from, size_t size)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->copy(inner, to, from, size);
}

static void fill(fsdp_stream *head, void *to, int byte, size_t size)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->fill(inner, to, byte, size);
}

static void rects(fsdp_stream *head, const fsdp_rect *items, size_t n)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->rects(inner, items, n);
}

static void copy_boxes(fsdp_stream *head, const fsdp_strided_copy *copies, size_t n)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->copy_boxes(inner, copies, n);
}

static void cast(fsdp_stream *head, void *to, fsdp_dtype to_type, const void *from,
                 fsdp_dtype from_type, size_t count)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->cast(inner, to, to_type, from, from_type, count);
}

static void add(fsdp_stream *head, void *to, fsdp_dtype to_type, const void *from,
                fsdp_dtype from_type, size_t count)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->add(inner, to, to_type, from, from_type, count);
}

static void multiply(fsdp_stream *head, const fsdp_span *spans, size_t n, double factor)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->multiply(inner, spans, n, factor);
}

static void divide(fsdp_stream *head, void *data, fsdp_dtype dtype, size_t count, double divisor)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->divide(inner, data, dtype, count, divisor);
}

static void fold(fsdp_stream *head, const fsdp_fold_call *call)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->fold(inner, call);
}

static void adamw(fsdp_stream *head, const fsdp_optim_tensors *tensors,
                  const fsdp_adamw_step *steps, size_t n)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->adamw(inner, tensors, steps, n);
}

static void sgd(fsdp_stream *head, const fsdp_optim_tensors *tensors, const fsdp_sgd_step *steps,
                size_t n)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->sgd(inner, tensors, steps, n);
}

static void power_sums(fsdp_stream *head, const fsdp_span *spans, size_t n, double p, double *sums)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->power_sums(inner, spans, n, p, sums);
}

static void norm(fsdp_stream *head, const fsdp_norm_call *call)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->norm(inner, call);
}

static void are_finite(fsdp_stream *head, const fsdp_span *spans, size_t n, int *all_are_finite)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->are_finite(inner, spans, n, all_are_finite);
}

static void hashes(fsdp_stream *head, const fsdp_span *spans, size_t n, fsdp_hash *hashes_out)
{
    fsdp_stream *inner = next_work(head);
    kernels_of(inner)->hashes(inner, spans, n, hashes_out);
}

static const fsdp_device_kernels watched_kernels = {
    .copy = copy,
    .fill = fill,
    .rects = rects,
    .copy_boxes = copy_boxes,
    .cast = cast,
    .add = add,
    .multiply = multiply,
    .divide = divide,
    .fold = fold,
    .adamw = adamw,
    .sgd = sgd,
    .power_sums = power_sums,
    .norm = norm,
    .are_finite = are_finite,
    .hashes = hashes,
};

static void issue(fsdp_stream *head, fsdp_work work, void *args)
{
    watched_stream *stream = of(head);
    stream->reached[stream->index]++;
    stream->inner->device->ops->issue(stream->inner, work, args);
}

/* --- events ----------------------------------------------------------------------------------- */

static fsdp_event record(fsdp_stream *head)
{
    watched_stream *stream = of(head);
    uint64_t ticket = stream->reached[stream->index];
    watch_point *point = &stream->points[ticket % POINTS];
    point->ticket = ticket;
    point->event = stream->inner->device->ops->record(stream->inner);
    memcpy(point->reached, stream->reached, sizeof point->reached);
    return (fsdp_event){.stream = head, .ticket = ticket};
}

/* NULL: overwritten, and therefore reached. */
static const watch_point *find_point(fsdp_event event)
{
    if (!event.stream)
        return NULL;
    const watch_point *point = &of(event.stream)->points[event.ticket % POINTS];
    return point->event.stream && point->ticket == event.ticket ? point : NULL;
}

static void learn(watched_stream *stream, const uint64_t *reached)
{
    for (int i = 0; i < MOST_STREAMS; i++)
        if (i != stream->index && reached[i] > stream->reached[i])
            stream->reached[i] = reached[i];
}

static void wait(fsdp_stream *head, fsdp_event event)
{
    watched_stream *stream = of(head);
    const watch_point *point = find_point(event);
    if (!event.stream)
        return;
    if (event.stream->device == head->device) /* another rank has clocks of its own */
        learn(stream, point ? point->reached : of(event.stream)->reached);
    stream->reached[stream->index]++;
    if (point)
        stream->inner->device->ops->wait(stream->inner, point->event);
}

static bool is_reached(fsdp_event event)
{
    const watch_point *point = find_point(event);
    return !point || of(event.stream)->inner->device->ops->is_reached(point->event);
}

static fsdp_status own_error(watched_device *device, fsdp_error *err)
{
    if (!atomic_load(&device->has_failed))
        return FSDP_OK;
    if (err)
        *err = device->error;
    return device->error.status;
}

static void keep_error(watched_device *device, const fsdp_error *found)
{
    if (atomic_load(&device->has_failed))
        return;
    device->error = *found;
    atomic_store(&device->has_failed, true);
}

static fsdp_status check(fsdp_stream *head, fsdp_error *err)
{
    watched_stream *stream = of(head);
    FSDP_TRY(stream->inner->device->ops->check(stream->inner, err));
    return own_error(device_of(head), err);
}

static fsdp_status sync(fsdp_event event, fsdp_error *err)
{
    const watch_point *point = find_point(event);
    if (!event.stream)
        return FSDP_OK;
    const watched_stream *stream = of(event.stream);
    const fsdp_device_ops *ops = stream->inner->device->ops;
    FSDP_TRY(ops->sync(point ? point->event : ops->record(stream->inner), err));
    return own_error(device_of(event.stream), err);
}

/* --- blocks ----------------------------------------------------------------------------------- */

static watched_block *find_block(const watched_device *device, const void *data)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < device->count; i++)
        if (at >= device->blocks[i].data && at < device->blocks[i].data + device->blocks[i].size)
            return &device->blocks[i];
    return NULL;
}

static void own(fsdp_stream *head, const void *data, size_t size)
{
    watched_device *device = device_of(head);
    const watched_stream *stream = of(head);
    watched_block *block = find_block(device, data);
    if (!block) {
        if (!fsdp_grow(&device->blocks, &device->room, device->count + 1, sizeof *device->blocks)) {
            fsdp_error missing = {0};
            (void)fsdp_fail_memory(&missing, "the records of --check");
            keep_error(device, &missing);
            return;
        }
        block = &device->blocks[device->count++];
    }
    *block = (watched_block){
        .data = data, .size = size, .owner = stream, .since = stream->reached[stream->index]};
}

static void use(fsdp_stream *head, const void *data)
{
    watched_device *device = device_of(head);
    const watched_stream *stream = of(head);
    watched_block *block = find_block(device, data);
    if (!block)
        return;
    block->used[stream->index] = stream->reached[stream->index] + 1;
    const watched_stream *owner = block->owner;
    if (owner == stream || stream->reached[owner->index] >= block->since)
        return;
    fsdp_error early = {0};
    (void)fsdp_fail(&early, FSDP_ERR_INTERNAL,
                    "stream %s uses %zu bytes of stream %s without waiting for their last use",
                    stream->head.name, block->size, owner->head.name);
    keep_error(device, &early);
}

static void disown(fsdp_stream *head, const void *data)
{
    watched_device *device = device_of(head);
    watched_block *block = find_block(device, data);
    if (!block)
        return;
    const watched_stream *owner = block->owner;
    for (int i = 0; i < MOST_STREAMS; i++) {
        fsdp_error early = {0};
        if (!device->streams[i] || block->used[i] <= owner->reached[i])
            continue;
        (void)fsdp_fail(&early, FSDP_ERR_INTERNAL,
                        "%zu bytes of stream %s are freed while stream %s may use them",
                        block->size, owner->head.name, device->streams[i]->head.name);
        keep_error(device, &early);
    }
    *block = device->blocks[--device->count];
}

/* --- memory, the end -------------------------------------------------------------------------- */

static void *alloc(fsdp_device *head, size_t size)
{
    fsdp_device *inner = ((watched_device *)head)->inner;
    return inner->ops->alloc(inner, size);
}

static void dealloc(fsdp_device *head, void *data, size_t size)
{
    fsdp_device *inner = ((watched_device *)head)->inner;
    inner->ops->dealloc(inner, data, size);
}

static void *alloc_staging(fsdp_device *head, size_t size)
{
    fsdp_device *inner = ((watched_device *)head)->inner;
    return inner->ops->alloc_staging(inner, size);
}

static void dealloc_staging(fsdp_device *head, void *data, size_t size)
{
    fsdp_device *inner = ((watched_device *)head)->inner;
    inner->ops->dealloc_staging(inner, data, size);
}

static void *native(fsdp_stream *head)
{
    fsdp_stream *inner = of(head)->inner;
    return inner->device->ops->native(inner);
}

static const fsdp_gpu *choose_gpu(fsdp_device *head)
{
    fsdp_device *inner = ((watched_device *)head)->inner;
    return inner->ops->choose_gpu(inner);
}

static void close_device(fsdp_device *head)
{
    watched_device *device = (watched_device *)head;
    fsdp_device_close(device->inner);
    fsdp_free(device->blocks);
    fsdp_free(device);
}

fsdp_status fsdp_device_watch(fsdp_device **device, fsdp_error *err)
{
    watched_device *watched = fsdp_alloc(1, sizeof *watched);
    if (!watched)
        return fsdp_fail_memory(err, "a device");
    watched->inner = *device;
    const fsdp_device_ops *inner = watched->inner->ops;
    watched->ops = (fsdp_device_ops){.name = inner->name,
                                     .is_host = inner->is_host,
                                     .is_at_once = inner->is_at_once,
                                     .kernels = &watched_kernels,
                                     .stream_create = create_stream,
                                     .stream_free = free_stream,
                                     .submit = submit,
                                     .issue = inner->issue ? issue : NULL,
                                     .record = record,
                                     .wait = wait,
                                     .sync = sync,
                                     .is_reached = is_reached,
                                     .check = check,
                                     .own = own,
                                     .use = use,
                                     .disown = disown,
                                     .alloc = alloc,
                                     .dealloc = dealloc,
                                     .alloc_staging = alloc_staging,
                                     .dealloc_staging = dealloc_staging,
                                     .native = inner->native ? native : NULL,
                                     .choose_gpu = inner->choose_gpu ? choose_gpu : NULL,
                                     .close = close_device};
    watched->head.ops = &watched->ops;
    *device = &watched->head;
    return FSDP_OK;
}

/*
 * Device "cpu-async": a worker thread per stream, so that streams overlap as on an accelerator and
 * a missing event is a race that ThreadSanitizer sees. See device.h.
 *
 * A stream is a ring of work. `issued` counts the items of the host, `done` those that the worker
 * has finished; an event is a value of `issued`. The host waits while the ring is full. A worker
 * waits only for events of other streams, which depend only on work issued earlier: no cycle is
 * possible.
 */
#include "base/core/mem.h"
#include "runtime/device/device.h"

#include <pthread.h>
#include <string.h>

enum { RING = 256 };

typedef struct async_item {
    fsdp_work work; /* NULL: wait for the event */
    fsdp_event event;
    _Alignas(16) unsigned char args[FSDP_WORK_ARGS];
} async_item;

typedef struct async_stream {
    fsdp_stream head;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t issued, done;
    bool is_ending;
    fsdp_error error;
    pthread_t worker;
    async_item ring[RING];
} async_stream;

static async_stream *of(fsdp_stream *stream)
{
    return (async_stream *)stream;
}

/* --- the worker ------------------------------------------------------------------------------- */

/* The host waits, or another stream's worker. */
static fsdp_status sync(fsdp_event event, fsdp_error *err)
{
    async_stream *stream = of(event.stream);
    if (!stream)
        return FSDP_OK;
    pthread_mutex_lock(&stream->lock);
    while (stream->done < event.ticket)
        pthread_cond_wait(&stream->changed, &stream->lock);
    fsdp_status status = stream->error.status;
    if (status != FSDP_OK && err)
        *err = stream->error;
    pthread_mutex_unlock(&stream->lock);
    return status;
}

/* Only the worker writes the error, so it may read it without the lock. */
static void run_item(async_stream *stream, async_item *item)
{
    fsdp_error error = {0};
    if (stream->error.status != FSDP_OK)
        return;
    fsdp_status status = item->work ? item->work(item->args, &error) : sync(item->event, &error);
    if (status == FSDP_OK)
        return;
    pthread_mutex_lock(&stream->lock);
    stream->error = error;
    stream->error.status = status;
    pthread_mutex_unlock(&stream->lock);
}

static void *work(void *context)
{
    async_stream *stream = context;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (stream->done == stream->issued && !stream->is_ending)
            pthread_cond_wait(&stream->changed, &stream->lock);
        if (stream->done == stream->issued)
            break;
        async_item *item = &stream->ring[stream->done % RING];
        pthread_mutex_unlock(&stream->lock);
        run_item(stream, item);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

/* --- streams ---------------------------------------------------------------------------------- */

/* Returns an errno, with everything released, when one of the three fails. */
static int start_worker(async_stream *stream)
{
    int failed = pthread_mutex_init(&stream->lock, NULL);
    if (failed)
        return failed;
    failed = pthread_cond_init(&stream->changed, NULL);
    if (!failed) {
        failed = pthread_create(&stream->worker, NULL, work, stream);
        if (failed)
            pthread_cond_destroy(&stream->changed);
    }
    if (failed)
        pthread_mutex_destroy(&stream->lock);
    return failed;
}

static fsdp_status create_stream(fsdp_device *device, const char *name, fsdp_stream **stream_out,
                                 fsdp_error *err)
{
    async_stream *stream = fsdp_alloc(1, sizeof *stream);
    if (!stream)
        return fsdp_fail_memory(err, "a stream");
    stream->head = (fsdp_stream){.device = device, .name = name};
    int failed = start_worker(stream);
    if (failed) {
        fsdp_free(stream);
        return fsdp_fail_errno(err, failed, "cannot start the thread of stream '%s'", name);
    }
    *stream_out = &stream->head;
    return FSDP_OK;
}

static void free_stream(fsdp_stream *head)
{
    async_stream *stream = of(head);
    pthread_mutex_lock(&stream->lock);
    stream->is_ending = true;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->worker, NULL);
    pthread_cond_destroy(&stream->changed);
    pthread_mutex_destroy(&stream->lock);
    fsdp_free(stream);
}

/* Waits for a free slot at the end of the ring; the lock is held from here to put. */
static async_item *next_item(async_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    while (stream->issued - stream->done == RING)
        pthread_cond_wait(&stream->changed, &stream->lock);
    return &stream->ring[stream->issued % RING];
}

static void put(async_stream *stream)
{
    stream->issued++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

static void submit(fsdp_stream *head, fsdp_work work_to_do, const void *args, size_t args_size)
{
    async_stream *stream = of(head);
    async_item *item = next_item(stream);
    item->work = work_to_do;
    memcpy(item->args, args, args_size);
    put(stream);
}

static fsdp_event record(fsdp_stream *head)
{
    async_stream *stream = of(head);
    pthread_mutex_lock(&stream->lock);
    fsdp_event event = {.stream = head, .ticket = stream->issued};
    pthread_mutex_unlock(&stream->lock);
    return event;
}

static void wait_in_stream(fsdp_stream *head, fsdp_event event)
{
    if (!event.stream || event.stream == head)
        return;
    async_stream *stream = of(head);
    async_item *item = next_item(stream);
    item->work = NULL;
    item->event = event;
    put(stream);
}

static bool is_reached(fsdp_event event)
{
    async_stream *stream = of(event.stream);
    if (!stream)
        return true;
    pthread_mutex_lock(&stream->lock);
    bool reached = stream->done >= event.ticket;
    pthread_mutex_unlock(&stream->lock);
    return reached;
}

static fsdp_status check(fsdp_stream *head, fsdp_error *err)
{
    return sync((fsdp_event){.stream = head, .ticket = 0}, err);
}

/* --- the device ------------------------------------------------------------------------------- */

static const fsdp_device_ops ops = {.name = "cpu-async",
                                    .is_host = true,
                                    .kernels = &fsdp_device_host_kernels,
                                    .stream_create = create_stream,
                                    .stream_free = free_stream,
                                    .submit = submit,
                                    .record = record,
                                    .wait = wait_in_stream,
                                    .sync = sync,
                                    .is_reached = is_reached,
                                    .check = check,
                                    .alloc = fsdp_device_host_alloc,
                                    .dealloc = fsdp_device_host_dealloc,
                                    .alloc_staging = fsdp_device_host_alloc,
                                    .dealloc_staging = fsdp_device_host_dealloc,
                                    .close = fsdp_device_host_close};

fsdp_status fsdp_device_cpu_async(fsdp_device **device_out, fsdp_error *err)
{
    return fsdp_device_create_host(&ops, device_out, err);
}

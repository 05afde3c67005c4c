/* The copies of a load into a device's memory. See load_copies.h. */
#include "runtime/staging/load_copies.h"

#include "runtime/context/work.h"

static bool holds(void *context, const void *data)
{
    const fsdp_load_copies *copies = context;
    return fsdp_host_view_find(&copies->root->view, data) != NULL;
}

static void *alloc(void *context, size_t size)
{
    fsdp_device *device = ((const fsdp_load_copies *)context)->stream->device;
    return device->ops->alloc_staging(device, size);
}

static void dealloc(void *context, void *data, size_t size)
{
    fsdp_device *device = ((const fsdp_load_copies *)context)->stream->device;
    device->ops->dealloc_staging(device, data, size);
}

/* Rows that are one run need no kernel. */
static uint64_t copy(void *context, const fsdp_strided_copy *copy)
{
    fsdp_load_copies *copies = context;
    const fsdp_device_ops *ops = copies->stream->device->ops;
    size_t run = fsdp_copy_run(copy);
    pthread_mutex_lock(&copies->lock);
    fsdp_work_uses(copies->stream, copy->to);
    if (run > 0)
        ops->kernels->copy(copies->stream, copy->to, copy->from, run);
    else
        ops->kernels->copy_boxes(copies->stream, copy, 1);
    fsdp_event event = ops->record(copies->stream);
    pthread_mutex_unlock(&copies->lock);
    return event.ticket;
}

/* With the lock, since a stream and its events are one thread's at a time: other workers read meanwhile, and
 * what they gave before keeps the device busy. */
static fsdp_status wait(void *context, uint64_t number, fsdp_error *err)
{
    fsdp_load_copies *copies = context;
    pthread_mutex_lock(&copies->lock);
    fsdp_status status = copies->stream->device->ops->sync(
        (fsdp_event){.stream = copies->stream, .ticket = number}, err);
    pthread_mutex_unlock(&copies->lock);
    return status;
}

fsdp_status fsdp_load_copies_begin(fsdp_load_copies *copies, fsdp_root *root, fsdp_error *err)
{
    const fsdp_context *context = root->context;
    const fsdp_device_ops *ops = context->device->ops;
    if (ops->is_host)
        return fsdp_context_check_comms(context, err);
    int failed = pthread_mutex_init(&copies->lock, NULL);
    if (failed)
        return fsdp_fail_errno(err, failed, "cannot create the lock of a load");
    copies->root = root;
    FSDP_TRY(ops->stream_create(context->device, "staging", &copies->stream, err));
    copies->device = (fsdp_read_device){.context = copies,
                                        .holds = holds,
                                        .alloc = alloc,
                                        .dealloc = dealloc,
                                        .copy = copy,
                                        .wait = wait};
    fsdp_stream_follow(copies->stream, context->streams[FSDP_STREAM_COMPUTE]);
    fsdp_root_wait_copied(root, copies->stream);
    FSDP_TRY(ops->sync(ops->record(copies->stream), err));
    return fsdp_context_check_comms(context, err);
}

void fsdp_load_copies_release(fsdp_load_copies *copies)
{
    if (copies->stream)
        copies->stream->device->ops->stream_free(copies->stream);
    if (copies->root)
        pthread_mutex_destroy(&copies->lock);
    *copies = (fsdp_load_copies){0};
}

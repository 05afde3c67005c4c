/*
 * Device "cpu": everything is done at once, in the caller. A stream is only its error; an event is always
 * reached. See device.h.
 */
#include "base/core/mem.h"
#include "runtime/device/device.h"

typedef struct cpu_stream {
    fsdp_stream head;
    fsdp_error error;
} cpu_stream;

static fsdp_status create_stream(fsdp_device *device, const char *name, fsdp_stream **stream_out,
                                 fsdp_error *err)
{
    cpu_stream *stream = fsdp_alloc(1, sizeof *stream);
    if (!stream)
        return fsdp_fail_memory(err, "a stream");
    stream->head = (fsdp_stream){.device = device, .name = name};
    *stream_out = &stream->head;
    return FSDP_OK;
}

static void free_stream(fsdp_stream *stream)
{
    fsdp_free(stream);
}

static void submit(fsdp_stream *stream, fsdp_work work, const void *args, size_t args_size)
{
    fsdp_error *error = &((cpu_stream *)stream)->error;
    (void)args_size;
    if (error->status == FSDP_OK)
        error->status = work((void *)args, error);
}

static fsdp_event record(fsdp_stream *stream)
{
    return (fsdp_event){.stream = stream};
}

static void wait(fsdp_stream *stream, fsdp_event event)
{
    fsdp_error *error = &((cpu_stream *)stream)->error;
    if (event.stream && error->status == FSDP_OK)
        *error = ((cpu_stream *)event.stream)->error;
}

static fsdp_status check(fsdp_stream *stream, fsdp_error *err)
{
    const fsdp_error *error = &((cpu_stream *)stream)->error;
    if (err && error->status != FSDP_OK)
        *err = *error;
    return error->status;
}

static fsdp_status sync(fsdp_event event, fsdp_error *err)
{
    return event.stream ? check(event.stream, err) : FSDP_OK;
}

static bool is_reached(fsdp_event event)
{
    (void)event;
    return true;
}

static const fsdp_device_ops ops = {.name = "cpu",
                                    .is_host = true,
                                    .kernels = &fsdp_device_host_kernels,
                                    .is_at_once = true,
                                    .stream_create = create_stream,
                                    .stream_free = free_stream,
                                    .submit = submit,
                                    .record = record,
                                    .wait = wait,
                                    .sync = sync,
                                    .is_reached = is_reached,
                                    .check = check,
                                    .alloc = fsdp_device_host_alloc,
                                    .dealloc = fsdp_device_host_dealloc,
                                    .alloc_staging = fsdp_device_host_alloc,
                                    .dealloc_staging = fsdp_device_host_dealloc,
                                    .close = fsdp_device_host_close};

fsdp_status fsdp_device_cpu(fsdp_device **device_out, fsdp_error *err)
{
    return fsdp_device_create_host(&ops, device_out, err);
}

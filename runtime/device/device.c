/* The device "cpu", and devices by name. See device.h. */
#include "runtime/device/device.h"
#include "base/core/mem.h"
#include "runtime/device/device_cuda.h"

#include <string.h>

/* === device "cpu" ============================================================================= */

/* Everything is done at once, in the caller. A stream is only its error; an event is always reached. */

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

/* === devices by name ========================================================================== */

typedef struct named_device {
    const char *name;
    fsdp_status (*open)(fsdp_device **device_out, fsdp_error *err);
} named_device;

static const named_device devices[] = {{"cpu", fsdp_device_cpu},
                                       {"cpu-async", fsdp_device_cpu_async}};

/* NULL: not one of the host. */
static const named_device *find_host_device(const char *name)
{
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (strcmp(devices[i].name, name) == 0)
            return &devices[i];
    return NULL;
}

static bool is_cuda(const char *name)
{
    return strcmp(name, "cuda") == 0 || strncmp(name, "cuda:", 5) == 0;
}

static fsdp_status fail_unknown(const char *name, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "unknown device '%s': use cpu, cpu-async, cuda or cuda:N",
                     name);
}

#ifndef FSDP_HAVE_CUDA
static fsdp_status fail_without_cuda(const char *name, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "device '%s': this program was built without CUDA; build it where nvcc is, "
                     "with -DFSDP_WITH_CUDA=ON, or use --device cpu",
                     name);
}
#endif

/* device_out NULL: finds out whether it can be opened. */
static fsdp_status open_cuda(const char *name, const fsdp_device_rank *rank,
                             fsdp_device **device_out, fsdp_error *err)
{
#ifdef FSDP_HAVE_CUDA
    return fsdp_device_cuda(name, rank, &fsdp_device_cuda_kernels, device_out, err);
#else
    (void)rank;
    (void)device_out;
    return fail_without_cuda(name, err);
#endif
}

fsdp_status fsdp_device_open(const char *name, const fsdp_device_rank *rank,
                             fsdp_device **device_out, fsdp_error *err)
{
    static const fsdp_device_rank first = {0};
    const named_device *device = find_host_device(name);
    if (device)
        return device->open(device_out, err);
    if (is_cuda(name))
        return open_cuda(name, rank ? rank : &first, device_out, err);
    return fail_unknown(name, err);
}

fsdp_status fsdp_device_find(const char *name, fsdp_error *err)
{
    if (find_host_device(name))
        return FSDP_OK;
    if (!is_cuda(name))
        return fail_unknown(name, err);
    return open_cuda(name, &(fsdp_device_rank){0}, NULL, err);
}

void fsdp_device_close(fsdp_device *device)
{
    if (device)
        device->ops->close(device);
}

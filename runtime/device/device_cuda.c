/*
 * Device "cuda": memory, streams and events of a GPU, on CUDA's runtime; the one file that includes
 * its header. See device_cuda.h.
 *
 * Memory is allocated plainly, since the pools above keep it; staging memory is pinned, and kept
 * here. Each stream has a ring of CUDA's events, and an event of device.h is a number of a record:
 * once its place in the ring is recorded again, it is reached, since the host waits for it before.
 * That bounds how far the host runs ahead. CUDA reports a failure of earlier work at any later
 * call, so the text has that work, too.
 */
#include "runtime/device/device_cuda.h"
#include "base/core/mem.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === pinned memory ============================================================================ */

/*
 * Pinned memory of a device: blocks that were given back are kept and reused, because the device stops for
 * each one that is allocated or freed. Sizes are rounded up to classes, by a quarter at most (from 4 KiB on),
 * so that later requests fit.
 *
 * In: sizes, and the two calls that allocate, from a device. Out: blocks. Any thread may call.
 */

struct fsdp_pinned_block;

typedef struct fsdp_pinned_pool {
    void *(*alloc)(size_t size); /* NULL: none left */
    void (*dealloc)(void *data);
    pthread_mutex_t lock;
    struct fsdp_pinned_block *free; /* the last that was given back first */
} fsdp_pinned_pool;

enum { LEAST = 4096, STEPS = 4 };

/* Lies in the block itself: to give one back never fails. */
typedef struct fsdp_pinned_block {
    struct fsdp_pinned_block *next;
    size_t room;
} pinned_block;

/* Returns an errno, 0 for success. */
static int pinned_init(fsdp_pinned_pool *pool, void *(*alloc)(size_t size),
                       void (*dealloc)(void *data))
{
    *pool = (fsdp_pinned_pool){.alloc = alloc, .dealloc = dealloc};
    return pthread_mutex_init(&pool->lock, NULL);
}

/* Four classes between two powers of two. 0: larger than any memory. */
static size_t room_of(size_t size)
{
    size_t step = LEAST;
    while (size / STEPS >= 2 * step)
        step *= 2;
    if (size > SIZE_MAX - step)
        return 0;
    return size == 0 ? LEAST : (size + step - 1) / step * step;
}

/* --- free blocks ------------------------------------------------------------------------------ */

static pinned_block *unlink_block(pinned_block **at)
{
    pinned_block *block = *at;
    *at = block->next;
    return block;
}

static pinned_block *take_free(fsdp_pinned_pool *pool, size_t room)
{
    for (pinned_block **at = &pool->free; *at; at = &(*at)->next)
        if ((*at)->room == room)
            return unlink_block(at);
    return NULL;
}

static void free_kept(fsdp_pinned_pool *pool)
{
    while (pool->free)
        pool->dealloc(unlink_block(&pool->free));
}

/* all blocks were given back */
static void pinned_release(fsdp_pinned_pool *pool)
{
    free_kept(pool);
    pthread_mutex_destroy(&pool->lock);
}

/* --- blocks ----------------------------------------------------------------------------------- */

/* Kept blocks of other sizes make way when there is no memory. */
static void *allocate(fsdp_pinned_pool *pool, size_t room)
{
    void *data = pool->alloc(room);
    if (data || !pool->free)
        return data;
    free_kept(pool);
    return pool->alloc(room);
}

/* Allocates at least that many bytes, not zeroed. NULL: none left. */
static void *pinned_take(fsdp_pinned_pool *pool, size_t size)
{
    size_t room = room_of(size);
    if (room == 0)
        return NULL;
    pthread_mutex_lock(&pool->lock);
    void *data = take_free(pool, room);
    if (!data)
        data = allocate(pool, room);
    pthread_mutex_unlock(&pool->lock);
    return data;
}

/* as asked for; accepts NULL */
static void pinned_give(fsdp_pinned_pool *pool, void *data, size_t size)
{
    pinned_block *block = data;
    if (!block)
        return;
    pthread_mutex_lock(&pool->lock);
    *block = (pinned_block){.next = pool->free, .room = room_of(size)};
    pool->free = block;
    pthread_mutex_unlock(&pool->lock);
}

/* === the device =============================================================================== */

enum { RING = 1024, LEAST_MAJOR = 8, OPERATION = 96 };

typedef struct cuda_device {
    fsdp_device head;
    fsdp_device_ops ops;
    fsdp_device_kernels kernels;
    int rank, ordinal;
    fsdp_gpu gpu;
    int usual_priority, high_priority;
    fsdp_pinned_pool staging;
} cuda_device;

typedef struct cuda_stream {
    fsdp_stream head;
    cudaStream_t native;
    pthread_mutex_t lock; /* of what follows: other ranks wait for events of this stream */
    uint64_t recorded, reached;
    cudaEvent_t ring[RING]; /* NULL: never recorded */
    fsdp_error error;
    char last[OPERATION]; /* "cast of 4096 bytes": the last work */
    void *workspace;      /* of kernels; only the thread that gives the stream work uses it */
    size_t workspace_size;
} cuda_stream;

static cuda_device *device_of(const fsdp_stream *stream)
{
    return (cuda_device *)stream->device;
}

static cuda_stream *of(fsdp_stream *stream)
{
    return (cuda_stream *)stream;
}

/* CUDA's calls are for the GPU that the calling thread has chosen. */
static void enter(const cuda_device *device)
{
    (void)cudaSetDevice(device->ordinal);
}

/* --- what is missing -------------------------------------------------------------------------- */

static fsdp_status fail_without_driver(const char *name, fsdp_error *err)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    const char *why = library ? NULL : dlerror();
    fsdp_status status = fsdp_fail(
        err, FSDP_ERR_USAGE,
        "device '%s': there is no NVIDIA driver: %s (sought on LD_LIBRARY_PATH and in the loader's "
        "folders); install the driver, or use --device cpu",
        name, why ? why : "libcuda.so.1 exists but does not start");
    if (library)
        dlclose(library);
    return status;
}

/* A runtime works with each driver of its major version. Those of 12 must also be of 12.1, from which on a
 * kernel may have 32,764 bytes of parameters. */
int fsdp_cuda_needed_driver(int runtime, char spelled_out[FSDP_CUDA_DRIVER])
{
    static const struct {
        int cuda;
        const char *number;
    } drivers[] = {{12010, "530.30.02"}, {13000, "580.65.06"}};
    for (size_t i = 0; i < sizeof drivers / sizeof *drivers; i++) {
        if (drivers[i].cuda / 1000 != runtime / 1000)
            continue;
        snprintf(spelled_out, FSDP_CUDA_DRIVER, "NVIDIA driver %s or later", drivers[i].number);
        return drivers[i].cuda;
    }
    snprintf(spelled_out, FSDP_CUDA_DRIVER, "an NVIDIA driver for CUDA %d.0 or later",
             runtime / 1000);
    return runtime / 1000 * 1000;
}

static fsdp_status fail_old_driver(const char *name, int driver, fsdp_error *err)
{
    char needed[FSDP_CUDA_DRIVER];
    (void)fsdp_cuda_needed_driver(CUDART_VERSION, needed);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "device '%s': the NVIDIA driver supports CUDA %d.%d, and this program is "
                     "built with %d.%d; install %s, or use --device cpu",
                     name, driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                     CUDART_VERSION % 1000 / 10, needed);
}

/* A driver of 12.0 is one that the runtime takes, but not the kernels. */
static fsdp_status check_driver(const char *name, fsdp_error *err)
{
    char needed[FSDP_CUDA_DRIVER];
    int driver = 0;
    cudaError_t code = cudaDriverGetVersion(&driver);
    bool is_new = code != cudaSuccess || driver >= fsdp_cuda_needed_driver(CUDART_VERSION, needed);
    return is_new ? FSDP_OK : fail_old_driver(name, driver, err);
}

/* Explains the error of cudaGetDeviceCount. */
static fsdp_status fail_without_devices(const char *name, cudaError_t code, fsdp_error *err)
{
    int driver = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    (void)cudaGetLastError();
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        return fail_without_driver(name, err);
    if (code == cudaErrorInsufficientDriver)
        return fail_old_driver(name, driver, err);
    if (code != cudaSuccess && code != cudaErrorNoDevice)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "device '%s': cudaGetDeviceCount: %s; nvidia-smi shows whether the driver "
                         "(CUDA %d.%d) works, or use --device cpu",
                         name, cudaGetErrorString(code), driver / 1000, driver % 1000 / 10);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "device '%s': the NVIDIA driver (CUDA %d.%d) finds no GPU (sought in "
                     "/dev/nvidia*; CUDA_VISIBLE_DEVICES is %s); give this process access to a "
                     "GPU, or use --device cpu",
                     name, driver / 1000, driver % 1000 / 10, visible ? visible : "not set");
}

static fsdp_status count_devices(const char *name, int *count_out, fsdp_error *err)
{
    *count_out = 0;
    cudaError_t code = cudaGetDeviceCount(count_out);
    return code == cudaSuccess && *count_out > 0 ? check_driver(name, err)
                                                 : fail_without_devices(name, code, err);
}

static fsdp_status fail_query(const char *name, cudaError_t code, fsdp_error *err)
{
    (void)cudaGetLastError();
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "device '%s': the GPU does not answer: %s; nvidia-smi shows its state, or use "
                     "--device cpu",
                     name, cudaGetErrorString(code));
}

static fsdp_status check_age(const char *name, int ordinal, unsigned char uuid_out[FSDP_GPU_UUID],
                             fsdp_error *err)
{
    struct cudaDeviceProp found;
    cudaError_t code = cudaGetDeviceProperties(&found, ordinal);
    if (code != cudaSuccess)
        return fail_query(name, code, err);
    memcpy(uuid_out, &found.uuid, FSDP_GPU_UUID);
    if (found.major >= LEAST_MAJOR)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "device '%s': GPU %d (%s) has compute capability %d.%d, and the kernels need "
                     "%d.0 or later; choose another one by cuda:N, or use --device cpu",
                     name, ordinal, found.name, found.major, found.minor, LEAST_MAJOR);
}

/* Returns the number after "cuda:"; -1: none is given. */
static fsdp_status read_number(const char *name, int *number_out, fsdp_error *err)
{
    const char *text = name + strlen("cuda");
    char *end = NULL;
    *number_out = -1;
    if (*text == '\0')
        return FSDP_OK;
    long number = strtol(text + 1, &end, 10);
    if (text[1] < '0' || text[1] > '9' || *end != '\0' || number > INT_MAX)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "device '%s': a number must follow cuda:, as in cuda:0", name);
    *number_out = (int)number;
    return FSDP_OK;
}

static fsdp_status choose(const char *name, int local_rank, int *ordinal_out, fsdp_gpu *gpu_out,
                          fsdp_error *err)
{
    int count, number;
    FSDP_TRY(read_number(name, &number, err));
    FSDP_TRY(count_devices(name, &count, err));
    if (number >= count)
        return fsdp_fail(err, FSDP_ERR_USAGE, "device '%s': the last GPU of this host is cuda:%d",
                         name, count - 1);
    gpu_out->visible = count;
    *ordinal_out = number >= 0 ? number : local_rank % count;
    return check_age(name, *ordinal_out, gpu_out->uuid, err);
}

/* --- failures of a stream --------------------------------------------------------------------- */

/* A GPU that has run out of memory or that is broken; anything else is a bug. */
static fsdp_status status_of(cudaError_t code)
{
    switch ((int)code) {
    case cudaErrorMemoryAllocation: return FSDP_ERR_LIMIT;
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorDevicesUnavailable: return FSDP_ERR_IO;
    default: return FSDP_ERR_INTERNAL;
    }
}

/* The lock is held. The first failure counts. */
static void note(cuda_stream *stream, const char *operation, cudaError_t code)
{
    if (code == cudaSuccess)
        return;
    (void)cudaGetLastError();
    if (stream->error.status != FSDP_OK)
        return;
    int rank = device_of(&stream->head)->rank;
    bool has_last = stream->last[0] && strcmp(operation, stream->last) != 0;
    (void)fsdp_fail(&stream->error, status_of(code), "rank %d: %s (stream %s)%s%s: %s", rank,
                    operation, stream->head.name, has_last ? " after " : "",
                    has_last ? stream->last : "", cudaGetErrorString(code));
    stream->error.rank = rank;
}

static fsdp_status read_error(cuda_stream *stream, fsdp_error *err)
{
    pthread_mutex_lock(&stream->lock);
    fsdp_status status = stream->error.status;
    if (status != FSDP_OK && err)
        *err = stream->error;
    pthread_mutex_unlock(&stream->lock);
    return status;
}

static void take_error(cuda_stream *stream, const fsdp_error *error)
{
    pthread_mutex_lock(&stream->lock);
    if (stream->error.status == FSDP_OK)
        stream->error = *error;
    pthread_mutex_unlock(&stream->lock);
}

/* --- work ------------------------------------------------------------------------------------- */

void *fsdp_cuda_stream_begin(fsdp_stream *head)
{
    enter(device_of(head));
    return read_error(of(head), NULL) == FSDP_OK ? (void *)of(head)->native : NULL;
}

void fsdp_cuda_stream_end(fsdp_stream *head, const char *kernel, size_t size, int code)
{
    cuda_stream *stream = of(head);
    char operation[OPERATION];
    snprintf(operation, sizeof operation, "%s of %zu bytes", kernel, size);
    pthread_mutex_lock(&stream->lock);
    note(stream, operation, (cudaError_t)code);
    memcpy(stream->last, operation, sizeof operation);
    pthread_mutex_unlock(&stream->lock);
}

/* cudaFree waits for the kernels that have the old one. */
void *fsdp_cuda_stream_workspace(fsdp_stream *head, size_t size)
{
    cuda_stream *stream = of(head);
    size_t room = size > 2 * stream->workspace_size ? size : 2 * stream->workspace_size;
    if (stream->workspace && size <= stream->workspace_size)
        return stream->workspace;
    cudaError_t code = cudaFree(stream->workspace);
    stream->workspace = NULL;
    stream->workspace_size = room;
    if (code == cudaSuccess)
        code = cudaMalloc(&stream->workspace, room > 0 ? room : 1);
    if (code != cudaSuccess)
        fsdp_cuda_stream_end(head, "a workspace", room, (int)code);
    return stream->workspace;
}

static void copy(fsdp_stream *head, void *to, const void *from, size_t size)
{
    cudaStream_t native = fsdp_cuda_stream_begin(head);
    if (native && size > 0)
        fsdp_cuda_stream_end(head, "cudaMemcpyAsync", size,
                             (int)cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, native));
}

static void fill(fsdp_stream *head, void *to, int byte, size_t size)
{
    cudaStream_t native = fsdp_cuda_stream_begin(head);
    if (native && size > 0)
        fsdp_cuda_stream_end(head, "cudaMemsetAsync", size,
                             (int)cudaMemsetAsync(to, byte, size, native));
}

static void issue(fsdp_stream *head, fsdp_work work, void *args)
{
    fsdp_error error = {0};
    if (!fsdp_cuda_stream_begin(head))
        return;
    error.status = work(args, &error);
    if (error.status != FSDP_OK)
        take_error(of(head), &error);
}

/* Host work gives the stream its work itself. */
static void submit(fsdp_stream *head, fsdp_work work, const void *args, size_t args_size)
{
    (void)args_size;
    issue(head, work, (void *)args);
}

static void *native(fsdp_stream *head)
{
    return of(head)->native;
}

static const fsdp_gpu *choose_gpu(fsdp_device *head)
{
    const cuda_device *device = (cuda_device *)head;
    enter(device);
    return &device->gpu;
}

/* --- events ----------------------------------------------------------------------------------- */

/* The lock is held. The CUDA event of a ticket that may not be reached yet; else NULL. */
static cudaEvent_t pending(const cuda_stream *stream, uint64_t ticket)
{
    bool is_kept = ticket > stream->reached && ticket + RING > stream->recorded;
    return is_kept ? stream->ring[ticket % RING] : NULL;
}

static void reach(cuda_stream *stream, uint64_t ticket, const char *operation, cudaError_t code)
{
    pthread_mutex_lock(&stream->lock);
    if (ticket > stream->reached)
        stream->reached = ticket;
    note(stream, operation, code);
    pthread_mutex_unlock(&stream->lock);
}

static cudaEvent_t find_pending(cuda_stream *stream, uint64_t ticket)
{
    pthread_mutex_lock(&stream->lock);
    cudaEvent_t point = pending(stream, ticket);
    pthread_mutex_unlock(&stream->lock);
    return point;
}

/* The host waits, without the lock, where the event is not reached already. */
static void await(cuda_stream *stream, uint64_t ticket)
{
    cudaEvent_t point = find_pending(stream, ticket);
    if (!point)
        return;
    cudaError_t code = cudaEventQuery(point);
    if (code == cudaErrorNotReady)
        code = cudaEventSynchronize(point);
    reach(stream, ticket, "cudaEventSynchronize", code);
}

/* The lock is held, and the event that had the place is reached. */
static cudaError_t record_next(cuda_stream *stream)
{
    cudaEvent_t *place = &stream->ring[++stream->recorded % RING];
    cudaError_t code = cudaSuccess;
    if (!*place)
        code = cudaEventCreateWithFlags(place, cudaEventDisableTiming);
    return code == cudaSuccess ? cudaEventRecord(*place, stream->native) : code;
}

/* Only the thread that gives the stream work changes `recorded`. */
static fsdp_event record(fsdp_stream *head)
{
    cuda_stream *stream = of(head);
    enter(device_of(head));
    if (stream->recorded >= RING)
        await(stream, stream->recorded + 1 - RING);
    pthread_mutex_lock(&stream->lock);
    note(stream, "cudaEventRecord", record_next(stream));
    fsdp_event event = {.stream = head, .ticket = stream->recorded};
    pthread_mutex_unlock(&stream->lock);
    return event;
}

/* A failed stream waits, too: memory that others use is given back through it. */
static void wait(fsdp_stream *head, fsdp_event event)
{
    cuda_stream *stream = of(head), *other = of(event.stream);
    if (!other || other == stream)
        return;
    enter(device_of(head));
    pthread_mutex_lock(&other->lock);
    const fsdp_error error = other->error;
    cudaEvent_t point = pending(other, event.ticket);
    pthread_mutex_unlock(&other->lock);
    pthread_mutex_lock(&stream->lock);
    if (stream->error.status == FSDP_OK && error.status != FSDP_OK)
        stream->error = error;
    if (point)
        note(stream, "cudaStreamWaitEvent", cudaStreamWaitEvent(stream->native, point, 0));
    pthread_mutex_unlock(&stream->lock);
}

static fsdp_status sync(fsdp_event event, fsdp_error *err)
{
    cuda_stream *stream = of(event.stream);
    if (!stream)
        return FSDP_OK;
    enter(device_of(event.stream));
    await(stream, event.ticket);
    /* A record may have failed, and the work before it has not ended. */
    if (read_error(stream, NULL) != FSDP_OK)
        (void)cudaStreamSynchronize(stream->native);
    return read_error(stream, err);
}

static bool is_reached(fsdp_event event)
{
    cuda_stream *stream = of(event.stream);
    cudaEvent_t point = stream ? find_pending(stream, event.ticket) : NULL;
    if (!point)
        return true;
    enter(device_of(event.stream));
    cudaError_t code = cudaEventQuery(point);
    if (code == cudaErrorNotReady)
        return false;
    reach(stream, event.ticket, "cudaEventQuery", code);
    return true;
}

static fsdp_status check(fsdp_stream *head, fsdp_error *err)
{
    cuda_stream *stream = of(head);
    enter(device_of(head));
    cudaError_t code = cudaStreamQuery(stream->native);
    reach(stream, 0, "cudaStreamQuery", code == cudaErrorNotReady ? cudaSuccess : code);
    return read_error(stream, err);
}

/* --- streams ---------------------------------------------------------------------------------- */

/* Gathers are waited for first, and reductions let memory go. */
static int priority_of(const cuda_device *device, const char *name)
{
    static const char *const high[] = {"all_gather", "copy_in", "reduce"};
    for (size_t i = 0; i < sizeof high / sizeof *high; i++)
        if (strcmp(high[i], name) == 0)
            return device->high_priority;
    return device->usual_priority;
}

static fsdp_status create_stream(fsdp_device *head, const char *name, fsdp_stream **stream_out,
                                 fsdp_error *err)
{
    cuda_device *device = (cuda_device *)head;
    cuda_stream *stream = fsdp_alloc(1, sizeof *stream);
    if (!stream || pthread_mutex_init(&stream->lock, NULL) != 0) {
        fsdp_free(stream);
        return fsdp_fail_memory(err, "a stream");
    }
    stream->head = (fsdp_stream){.device = head, .name = name};
    enter(device);
    cudaError_t code = cudaStreamCreateWithPriority(&stream->native, cudaStreamNonBlocking,
                                                    priority_of(device, name));
    if (code == cudaSuccess) {
        *stream_out = &stream->head;
        return FSDP_OK;
    }
    note(stream, "cudaStreamCreateWithPriority", code);
    if (err)
        *err = stream->error;
    pthread_mutex_destroy(&stream->lock);
    fsdp_free(stream);
    return status_of(code);
}

static void free_stream(fsdp_stream *head)
{
    cuda_stream *stream = of(head);
    enter(device_of(head));
    (void)cudaStreamSynchronize(stream->native);
    for (int i = 0; i < RING; i++)
        if (stream->ring[i])
            (void)cudaEventDestroy(stream->ring[i]);
    (void)cudaFree(stream->workspace);
    (void)cudaStreamDestroy(stream->native);
    pthread_mutex_destroy(&stream->lock);
    fsdp_free(stream);
}

/* --- memory ----------------------------------------------------------------------------------- */

static void *alloc(fsdp_device *head, size_t size)
{
    void *data = NULL;
    enter((cuda_device *)head);
    if (cudaMalloc(&data, size > 0 ? size : 1) == cudaSuccess)
        return data;
    (void)cudaGetLastError();
    return NULL;
}

static void dealloc(fsdp_device *head, void *data, size_t size)
{
    (void)size;
    enter((cuda_device *)head);
    (void)cudaFree(data);
}

static void *alloc_pinned(size_t size)
{
    void *data = NULL;
    if (cudaHostAlloc(&data, size, cudaHostAllocPortable | cudaHostAllocMapped) == cudaSuccess)
        return data;
    (void)cudaGetLastError();
    return NULL;
}

static void dealloc_pinned(void *data)
{
    (void)cudaFreeHost(data);
}

static void *alloc_staging(fsdp_device *head, size_t size)
{
    cuda_device *device = (cuda_device *)head;
    enter(device);
    return pinned_take(&device->staging, size);
}

static void dealloc_staging(fsdp_device *head, void *data, size_t size)
{
    cuda_device *device = (cuda_device *)head;
    enter(device);
    pinned_give(&device->staging, data, size);
}

/* --- the device ------------------------------------------------------------------------------- */

static void close_device(fsdp_device *head)
{
    cuda_device *device = (cuda_device *)head;
    enter(device);
    pinned_release(&device->staging);
    fsdp_free(device);
}

/* Starts CUDA in this process, and reads what streams need. */
static fsdp_status start(cuda_device *device, const char *name, fsdp_error *err)
{
    cudaError_t code = cudaDeviceGetPCIBusId(device->gpu.bus, FSDP_GPU_BUS, device->ordinal);
    if (code == cudaSuccess)
        code = cudaSetDevice(device->ordinal);
    if (code == cudaSuccess)
        code = cudaDeviceGetStreamPriorityRange(&device->usual_priority, &device->high_priority);
    return code == cudaSuccess ? FSDP_OK : fail_query(name, code, err);
}

static const fsdp_device_ops cuda_ops = {.name = "cuda",
                                         .stream_create = create_stream,
                                         .stream_free = free_stream,
                                         .submit = submit,
                                         .issue = issue,
                                         .record = record,
                                         .wait = wait,
                                         .sync = sync,
                                         .is_reached = is_reached,
                                         .check = check,
                                         .alloc = alloc,
                                         .dealloc = dealloc,
                                         .alloc_staging = alloc_staging,
                                         .dealloc_staging = dealloc_staging,
                                         .native = native,
                                         .choose_gpu = choose_gpu,
                                         .close = close_device};

fsdp_status fsdp_device_cuda(const char *name, const fsdp_device_rank *rank,
                             const fsdp_device_kernels *kernels, fsdp_device **device_out,
                             fsdp_error *err)
{
    int ordinal;
    fsdp_gpu gpu;
    if (!device_out)
        return choose(name, rank->local_rank, &ordinal, &gpu, err);
    cuda_device *device = fsdp_alloc(1, sizeof *device);
    if (!device || pinned_init(&device->staging, alloc_pinned, dealloc_pinned) != 0) {
        fsdp_free(device);
        return fsdp_fail_memory(err, "a device");
    }
    device->ops = cuda_ops;
    device->kernels = *kernels;
    device->kernels.copy = copy;
    device->kernels.fill = fill;
    device->ops.kernels = &device->kernels;
    device->head.ops = &device->ops;
    device->rank = rank->rank;
    fsdp_status status = choose(name, rank->local_rank, &device->ordinal, &device->gpu, err);
    if (status == FSDP_OK)
        status = start(device, name, err);
    if (status == FSDP_OK)
        *device_out = &device->head;
    else
        close_device(&device->head);
    return status;
}

/*
 * CUDA's functions, for the calls of device_cuda.c; those of the real runtime are not linked. Each
 * counts itself and may be told to fail. See fake_cudart.h.
 */
#include "tests/cuda/fake_cudart_parts.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_FUNCTIONS = 64, STAGED = 65536, GARBAGE = 0xb7 };

typedef struct called {
    const char *function;
    int times;
} called;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t misuse_lock = PTHREAD_MUTEX_INITIALIZER;
static fake_cudart_plan plan;
static called calls[MOST_FUNCTIONS];
static size_t to_host;
static cudaError_t broken;
static char misuse[256], shown[256];
static _Thread_local int current, times_here[MOST_FUNCTIONS];
static _Thread_local cudaError_t last_error;

void fake_lock(void)
{
    pthread_mutex_lock(&lock);
}

void fake_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

const fake_cudart_plan *fake_plan(void)
{
    return &plan;
}

int fake_cudart_gpu(void)
{
    return current;
}

uint64_t fake_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* --- failures --------------------------------------------------------------------------------- */

void fake_misuse(const char *format, ...)
{
    va_list arguments;
    pthread_mutex_lock(&misuse_lock);
    va_start(arguments, format);
    if (!misuse[0])
        vsnprintf(misuse, sizeof misuse, format, arguments);
    va_end(arguments);
    pthread_mutex_unlock(&misuse_lock);
}

void fake_break(cudaError_t code)
{
    fake_lock();
    broken = code;
    fake_unlock();
}

cudaError_t fake_broken(void)
{
    fake_lock();
    cudaError_t code = broken;
    fake_unlock();
    return code;
}

static cudaError_t fail(cudaError_t code)
{
    if (code != cudaSuccess && code != cudaErrorNotReady)
        last_error = code;
    return code;
}

/* A fault of the GPU stays; what one call lacks does not. */
static bool stays(cudaError_t code)
{
    return code == cudaErrorIllegalAddress || code == cudaErrorLaunchFailure ||
           code == cudaErrorECCUncorrectable;
}

static called *find_called(const char *function)
{
    called *one = calls;
    while (one->function && strcmp(one->function, function) != 0)
        one++;
    if (one == &calls[MOST_FUNCTIONS - 1])
        abort();
    one->function = function;
    return one;
}

cudaError_t fake_call(const char *function)
{
    fake_lock();
    called *one = find_called(function);
    int times = ++one->times;
    times_here[one - calls]++;
    cudaError_t code = broken;
    if (code == cudaSuccess && plan.fail_call && times == plan.fail_at &&
        strcmp(plan.fail_call, function) == 0)
        code = (cudaError_t)plan.fail_code;
    if (stays(code))
        broken = code;
    fake_unlock();
    return fail(code);
}

bool fake_ignores(const char *function)
{
    return plan.ignore_call && strcmp(plan.ignore_call, function) == 0;
}

int fake_cudart_calls(const char *function)
{
    fake_lock();
    int times = find_called(function)->times;
    fake_unlock();
    return times;
}

int fake_cudart_calls_here(const char *function)
{
    fake_lock();
    int times = times_here[find_called(function) - calls];
    fake_unlock();
    return times;
}

size_t fake_cudart_to_host(void)
{
    fake_lock();
    size_t size = to_host;
    fake_unlock();
    return size;
}

#define CALL()                                       \
    do {                                             \
        cudaError_t call_code = fake_call(__func__); \
        if (call_code != cudaSuccess)                \
            return call_code;                        \
        if (fake_ignores(__func__))                  \
            return cudaSuccess;                      \
    } while (0)

/* --- tests ------------------------------------------------------------------------------------ */

void fake_cudart_begin(const fake_cudart_plan *wanted)
{
    fake_streams_forget();
    fake_lock();
    plan = *wanted;
    memset(calls, 0, sizeof calls);
    to_host = 0;
    broken = cudaSuccess;
    misuse[0] = '\0';
    fake_unlock();
    last_error = cudaSuccess;
    current = 0;
}

const char *fake_cudart_end(void)
{
    size_t handles = fake_streams_count(), blocks = fake_memory_count();
    if (handles > 0)
        fake_misuse("%zu streams and events were not destroyed", handles);
    if (blocks > 0)
        fake_misuse("%zu blocks of memory were not freed", blocks);
    pthread_mutex_lock(&misuse_lock);
    memcpy(shown, misuse, sizeof shown);
    misuse[0] = '\0';
    pthread_mutex_unlock(&misuse_lock);
    return shown[0] ? shown : NULL;
}

int fake_cudart_version(void)
{
    return CUDART_VERSION;
}

bool fake_cudart_reaches(const void *data, size_t size)
{
    bool reaches = size == 0 || (fake_memory_kind(data) != FAKE_PAGEABLE &&
                                 fake_memory_is_whole(data, size) && fake_memory_is_near(data));
    if (!reaches)
        fake_misuse("a kernel reaches %zu bytes at %p, which are no memory of its GPU", size, data);
    return reaches;
}

int fake_cudart_enqueue(void *stream, void (*run)(void *), void *closure, void (*drop)(void *))
{
    cudaError_t code = fake_call("cudaLaunchKernel");
    if (code == cudaSuccess && !fake_stream_check(stream, "a kernel"))
        code = fail(cudaErrorInvalidResourceHandle);
    if (code == cudaSuccess)
        fake_stream_put(stream, run, closure, drop);
    else if (drop)
        drop(closure);
    return (int)code;
}

/* --- the driver and its devices --------------------------------------------------------------- */

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = plan.driver < 0 ? 0 : plan.driver > 0 ? plan.driver : CUDART_VERSION;
    return cudaSuccess;
}

static int count_devices(void)
{
    return plan.devices > 0 ? plan.devices : plan.devices == 0;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    CALL();
    bool is_too_old = plan.driver != 0 && plan.driver / 1000 < CUDART_VERSION / 1000;
    if (plan.driver < 0 || (is_too_old && !plan.takes_any_driver))
        return fail(cudaErrorInsufficientDriver);
    *count = count_devices();
    return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    CALL();
    if (device < 0 || device >= count_devices())
        return fail(cudaErrorInvalidDevice);
    *prop = (struct cudaDeviceProp){.major = plan.major ? plan.major : 9,
                                    .minor = plan.major ? plan.minor : 0};
    snprintf(prop->name, sizeof prop->name, "a GPU of tests");
    prop->uuid.bytes[0] = (char)device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *pciBusId, int len, int device)
{
    CALL();
    if (device < 0 || device >= count_devices())
        return fail(cudaErrorInvalidDevice);
    const unsigned domain = plan.is_hidden ? 0x8000 | ((unsigned)getpid() & 0x7fff) : 0xFA0E;
    const int whole = plan.parts > 0 ? device / plan.parts : device;
    snprintf(pciBusId, (size_t)len, "%04X:%02X:00.0", domain, whole); /* none of this host */
    return cudaSuccess;
}

/* Starts the device, and is not a call that counts. */
cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= count_devices())
        return fail(cudaErrorInvalidDevice);
    current = device;
    return fake_broken();
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
    CALL();
    *leastPriority = 0;
    *greatestPriority = -5;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t code = last_error;
    last_error = fake_broken();
    return code;
}

/* The texts of CUDA 13. */
const char *cudaGetErrorString(cudaError_t error)
{
    switch ((int)error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorInsufficientDriver:
        return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorSystemNotReady: return "system not yet initialized";
    default: return "unrecognized error code";
    }
}

/* --- memory ----------------------------------------------------------------------------------- */

static cudaError_t alloc(void **data_out, size_t size, fake_kind kind)
{
    *data_out = fake_memory_alloc(size, kind);
    return *data_out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

/* The host waits until the GPU is idle, as in CUDA. */
static cudaError_t release(void *data, fake_kind kind, const char *function)
{
    if (!data)
        return cudaSuccess;
    fake_streams_drain();
    if (fake_memory_free(data, kind))
        return cudaSuccess;
    fake_misuse("%s of memory that is not there", function);
    return fail(cudaErrorInvalidValue);
}

cudaError_t cudaMalloc(void **devPtr, size_t size)
{
    CALL();
    return alloc(devPtr, size, FAKE_DEVICE);
}

/* After a fault nothing is to be freed, but tests count blocks. */
cudaError_t cudaFree(void *devPtr)
{
    cudaError_t code = fake_call(__func__), freed = release(devPtr, FAKE_DEVICE, __func__);
    return code != cudaSuccess ? code : freed;
}

cudaError_t cudaHostAlloc(void **pHost, size_t size, unsigned int flags)
{
    CALL();
    if (!(flags & cudaHostAllocPortable) || !(flags & cudaHostAllocMapped))
        fake_misuse("pinned memory that other devices or kernels do not reach");
    return alloc(pHost, size, FAKE_PINNED);
}

cudaError_t cudaFreeHost(void *ptr)
{
    cudaError_t code = fake_call(__func__), freed = release(ptr, FAKE_PINNED, __func__);
    return code != cudaSuccess ? code : freed;
}

typedef struct copy {
    void *to;
    const void *from;
    size_t size;
    int byte; /* from NULL: fills */
    unsigned char staged[];
} copy;

/* Until a copy is done its target is undefined. A single byte may be one that the host polls. */
static void run_copy(void *closure)
{
    copy *job = closure;
    if (!job->from && job->size == 1) {
        __atomic_store_n((unsigned char *)job->to, (unsigned char)job->byte, __ATOMIC_RELEASE);
        return;
    }
    if (!job->from) {
        memset(job->to, job->byte, job->size);
        return;
    }
    bool is_inside = (const unsigned char *)job->from < (unsigned char *)job->to + job->size &&
                     (unsigned char *)job->to < (const unsigned char *)job->from + job->size;
    if (!is_inside)
        memset(job->to, GARBAGE, job->size);
    memmove(job->to, job->from, job->size);
}

static copy *make_copy(void *to, const void *from, size_t size, size_t staged)
{
    copy *job = malloc(sizeof *job + staged);
    if (!job)
        abort();
    *job = (copy){.to = to, .from = from, .size = size};
    if (staged > 0)
        job->from = memcpy(job->staged, from, staged);
    return job;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    CALL();
    if (!fake_stream_check(stream, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    if (kind != cudaMemcpyDefault)
        fake_misuse("a copy that names the kinds of its memory");
    if (!fake_memory_is_whole(dst, count) || !fake_memory_is_whole(src, count)) {
        fake_misuse("a copy of %zu bytes beyond a block, or of a freed one", count);
        fake_break(cudaErrorIllegalAddress);
        return fail(cudaErrorIllegalAddress);
    }
    bool is_staged = fake_memory_kind(src) == FAKE_PAGEABLE &&
                     fake_memory_kind(dst) == FAKE_DEVICE && count <= STAGED;
    bool is_waited_for = !is_staged && (fake_memory_kind(src) == FAKE_PAGEABLE ||
                                        fake_memory_kind(dst) == FAKE_PAGEABLE);
    if (fake_memory_kind(src) == FAKE_DEVICE && fake_memory_kind(dst) != FAKE_DEVICE) {
        fake_lock();
        to_host += count;
        fake_unlock();
    }
    fake_stream_put(stream, run_copy, make_copy(dst, src, count, is_staged ? count : 0), free);
    if (is_waited_for)
        fake_stream_drain(stream);
    return fail(fake_broken());
}

cudaError_t cudaMemsetAsync(void *devPtr, int value, size_t count, cudaStream_t stream)
{
    CALL();
    if (!fake_stream_check(stream, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    if (!fake_cudart_reaches(devPtr, count))
        return fail(cudaErrorInvalidValue);
    copy *job = make_copy(devPtr, NULL, count, 0);
    job->byte = value;
    fake_stream_put(stream, run_copy, job, free);
    return cudaSuccess;
}

/* --- streams and events ----------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *pStream, unsigned int flags, int priority)
{
    CALL();
    if (flags != cudaStreamNonBlocking)
        fake_misuse("a stream that waits for the default stream");
    return fake_stream_create(pStream, priority);
}

/* Also after a fault, when CUDA has given them up: tests count streams and events. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaError_t code = fake_call(__func__);
    if (!fake_stream_check(stream, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    fake_stream_destroy(stream);
    return code;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    CALL();
    if (!fake_stream_check(stream, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    return fake_stream_is_idle(stream) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    CALL();
    if (!fake_stream_check(stream, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    fake_stream_drain(stream);
    return fail(fake_broken());
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    CALL();
    if (!fake_stream_check(stream, __func__) || !fake_event_check(event, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    if (flags != 0)
        return fail(cudaErrorInvalidValue);
    fake_event_wait(event, stream);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    CALL();
    if (flags != cudaEventDisableTiming)
        fake_misuse("an event that takes the time");
    return fake_event_create(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    cudaError_t code = fake_call(__func__);
    if (!fake_event_check(event, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    fake_event_destroy(event);
    return code;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    CALL();
    if (!fake_event_check(event, __func__) || !fake_stream_check(stream, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    fake_event_record(event, stream);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    CALL();
    if (!fake_event_check(event, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    return fake_event_is_reached(event) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    CALL();
    if (!fake_event_check(event, __func__))
        return fail(cudaErrorInvalidResourceHandle);
    fake_event_sync(event);
    return fail(fake_broken());
}

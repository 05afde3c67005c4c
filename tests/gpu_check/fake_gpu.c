/*
 * gpu-check over the fake CUDA runtime (tests/cuda/fake_cudart.h): the calls of CUDA that only
 * gpu-check makes, and bugs that the environment plants.
 *
 *   FAKE_GPU=none       a driver without a GPU
 *   FAKE_GPU=no-driver
 *   FAKE_GPU=old-driver one of CUDA 11
 *   FAKE_GPU=two        two GPUs
 *   FAKE_BUG=rects      the last rectangle of each call is not copied
 *   FAKE_BUG=crash      a process that multiplies is ended
 *   FAKE_BUG=fold       the device refuses this kernel
 *   FAKE_BUG=late       AdamW takes the device 20 ms more
 *
 * Time between two events is that since the call before, which is not a measurement.
 */
#include <cuda_runtime.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/device/device_cuda.h"
#include "tests/cuda/fake_cudart.h"
#include "tests/cuda/nccl_streams.h"

enum { OLD_DRIVER = 11080, LATE_US = 20000 };

static bool is_set(const char *name, const char *value)
{
    const char *text = getenv(name);
    return text && strcmp(text, value) == 0;
}

__attribute__((constructor)) static void begin(void)
{
    const fake_cudart_plan plan = {.seed = 1,
                                   .devices = is_set("FAKE_GPU", "none")  ? -1
                                              : is_set("FAKE_GPU", "two") ? 2
                                                                          : 0,
                                   .driver = is_set("FAKE_GPU", "no-driver")    ? -1
                                             : is_set("FAKE_GPU", "old-driver") ? OLD_DRIVER
                                                                                : 0};
    fake_cudart_begin(&plan);
    (void)
        fake_cudart_is_guarded(); /* makes its key, which threads of streams need when they begin */
    fake_nccl_control *nccl = fake_nccl_over_cudart();
    if (nccl)
        nccl->plan.version = 23000; /* ranks share the GPU */
}

/* --- facts and time --------------------------------------------------------------------------- */

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out)
{
    *free_out = *total_out = (size_t)1 << 30;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    static _Thread_local double before; /* ranks are threads, and time never goes back in one */
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    double now = (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
    if (cudaEventQuery(start) != cudaSuccess || cudaEventQuery(end) != cudaSuccess)
        return cudaErrorNotReady;
    *ms = (float)(before > 0 ? now - before : 1);
    before = now;
    return cudaSuccess;
}

/* --- counting: the work is done, and its launches are counted ----------------------------------- */

static int launches;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    (void)stream, (void)mode;
    launches = fake_cudart_calls("cudaLaunchKernel");
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    (void)stream;
    launches = fake_cudart_calls("cudaLaunchKernel") - launches;
    *graph = (cudaGraph_t)(void *)&launches;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n)
{
    (void)nodes;
    *n = (size_t) * (int *)(void *)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type)
{
    (void)node;
    *type = cudaGraphNodeTypeKernel;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    (void)graph;
    return cudaSuccess;
}

/* --- planted bugs ----------------------------------------------------------------------------- */

static fsdp_device_kernels kernels;

static void rects_but_one(fsdp_stream *stream, const fsdp_rect *rects, size_t n)
{
    fsdp_device_cuda_kernels.rects(stream, rects, n > 0 ? n - 1 : 0);
}

static void crash(fsdp_stream *stream, const fsdp_span *spans, size_t n, double factor)
{
    (void)stream, (void)spans, (void)n, (void)factor;
    (void)raise(SIGKILL); /* of which no sanitizer makes a report */
}

static void refuse(fsdp_stream *stream, const fsdp_fold_call *call)
{
    (void)call;
    if (fsdp_cuda_stream_begin(stream))
        fsdp_cuda_stream_end(stream, "fold", 0, cudaErrorNotSupported);
}

static void sleep_on_device(void *closure)
{
    (void)closure;
    usleep(LATE_US);
}

static void late_adamw(fsdp_stream *stream, const fsdp_optim_tensors *tensors,
                       const fsdp_adamw_step *steps, size_t n)
{
    fsdp_device_cuda_kernels.adamw(stream, tensors, steps, n);
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "sleep", 0,
                             fake_cudart_enqueue(native, sleep_on_device, NULL, NULL));
}

/* The linker puts it in place of fsdp_device_open. */
fsdp_status __real_fsdp_device_open(const char *name, const fsdp_device_rank *rank,
                                    fsdp_device **device_out, fsdp_error *err);
fsdp_status __wrap_fsdp_device_open(const char *name, const fsdp_device_rank *rank,
                                    fsdp_device **device_out, fsdp_error *err);
fsdp_status __wrap_fsdp_device_open(const char *name, const fsdp_device_rank *rank,
                                    fsdp_device **device_out, fsdp_error *err)
{
    FSDP_TRY(__real_fsdp_device_open(name, rank, device_out, err));
    if (!getenv("FAKE_BUG") || (*device_out)->ops->is_host)
        return FSDP_OK;
    kernels = *(*device_out)->ops->kernels;
    if (is_set("FAKE_BUG", "rects"))
        kernels.rects = rects_but_one;
    if (is_set("FAKE_BUG", "crash"))
        kernels.multiply = crash;
    if (is_set("FAKE_BUG", "fold"))
        kernels.fold = refuse;
    if (is_set("FAKE_BUG", "late"))
        kernels.adamw = late_adamw;
    ((fsdp_device_ops *)(*device_out)->ops)->kernels = &kernels;
    return FSDP_OK;
}

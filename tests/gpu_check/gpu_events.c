/*
 * gpu-check's calls of CUDA: facts of the GPU, time by events, and counts of launches by recording a stream's
 * work. The rest goes through runtime/device. See gpu_check.h.
 */
#include "tests/gpu_check/gpu_check.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/device/device_cuda.h"

enum { MOST_NODES = 4096 };

typedef struct gpu_timer {
    cudaEvent_t begin, end;
} gpu_timer;

/* --- facts ------------------------------------------------------------------------------------ */

static void spell_version(int version, char *out, size_t out_size)
{
    snprintf(out, out_size, "%d.%d", version / 1000, version % 1000 / 10);
}

void gpu_spell_runtime(char *out, size_t out_size)
{
    char version[16], driver[FSDP_CUDA_DRIVER];
    spell_version(CUDART_VERSION, version, sizeof version);
    (void)fsdp_cuda_needed_driver(CUDART_VERSION, driver);
    snprintf(out, out_size, "CUDA %s, which needs %s", version, driver);
}

void gpu_read_facts(gpu_facts *facts)
{
    struct cudaDeviceProp found;
    size_t free_bytes = 0, total = 0;
    int device = 0, driver = 0, runtime = 0;
    (void)cudaGetDevice(&device);
    (void)cudaGetDeviceCount(&facts->gpus);
    if (cudaGetDeviceProperties(&found, device) == cudaSuccess)
        snprintf(facts->name, sizeof facts->name, "%s", found.name);
    if (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess)
        facts->memory = (double)total;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    spell_version(driver, facts->driver, sizeof facts->driver);
    spell_version(runtime, facts->runtime, sizeof facts->runtime);
}

/* --- time ------------------------------------------------------------------------------------- */

void *gpu_timer_create(void)
{
    gpu_timer *timer = calloc(1, sizeof *timer);
    if (timer && cudaEventCreateWithFlags(&timer->begin, cudaEventDefault) == cudaSuccess &&
        cudaEventCreateWithFlags(&timer->end, cudaEventDefault) == cudaSuccess)
        return timer;
    gpu_timer_free(timer);
    return NULL;
}

void gpu_timer_free(void *data)
{
    gpu_timer *timer = data;
    if (timer && timer->begin)
        (void)cudaEventDestroy(timer->begin);
    if (timer && timer->end)
        (void)cudaEventDestroy(timer->end);
    free(timer);
}

bool gpu_timer_begin(void *timer, void *native_stream)
{
    return cudaEventRecord(((gpu_timer *)timer)->begin, native_stream) == cudaSuccess;
}

bool gpu_timer_end(void *timer, void *native_stream)
{
    return cudaEventRecord(((gpu_timer *)timer)->end, native_stream) == cudaSuccess;
}

double gpu_timer_seconds(void *data)
{
    const gpu_timer *timer = data;
    float ms = 0;
    bool is_good = cudaEventSynchronize(timer->end) == cudaSuccess &&
                   cudaEventElapsedTime(&ms, timer->begin, timer->end) == cudaSuccess;
    return is_good ? (double)ms * 1e-3 : -1;
}

/* --- launches --------------------------------------------------------------------------------- */

bool gpu_count_begin(void *native_stream)
{
    return cudaStreamBeginCapture(native_stream, cudaStreamCaptureModeRelaxed) == cudaSuccess;
}

static int count_kernels(cudaGraph_t graph)
{
    static cudaGraphNode_t nodes[MOST_NODES];
    size_t n = MOST_NODES;
    int kernels = 0;
    if (cudaGraphGetNodes(graph, NULL, &n) != cudaSuccess || n > MOST_NODES)
        return -1;
    if (n > 0 && cudaGraphGetNodes(graph, nodes, &n) != cudaSuccess)
        return -1;
    for (size_t i = 0; i < n; i++) {
        enum cudaGraphNodeType type;
        if (cudaGraphNodeGetType(nodes[i], &type) != cudaSuccess)
            return -1;
        kernels += type == cudaGraphNodeTypeKernel;
    }
    return kernels;
}

int gpu_count_end(void *native_stream)
{
    cudaGraph_t graph = NULL;
    if (cudaStreamEndCapture(native_stream, &graph) != cudaSuccess || !graph) {
        (void)cudaGetLastError();
        return -1;
    }
    int kernels = count_kernels(graph);
    (void)cudaGraphDestroy(graph);
    return kernels;
}

/* See nccl_streams.h. */
#include "tests/cuda/nccl_streams.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdlib.h>

#include "tests/cuda/fake_cudart.h"

static void launch(void *stream, void (*work)(void *), void *argument)
{
    (void)fake_cudart_enqueue(stream, work, argument, NULL);
}

static void *alloc(size_t size)
{
    void *data = NULL;
    return cudaMalloc(&data, size) == cudaSuccess ? data : NULL;
}

static void dealloc(void *data)
{
    (void)cudaFree(data);
}

fake_nccl_control *fake_nccl_over_cudart(void)
{
    const char *path = getenv("FSDP_NCCL_LIB");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    fake_nccl_control *fake = library ? dlsym(library, "fake_nccl") : NULL;
    if (!fake)
        return NULL;
    fake->launch = launch;
    fake->alloc = alloc;
    fake->dealloc = dealloc;
    fake->gpu = fake_cudart_gpu;
    return fake;
}

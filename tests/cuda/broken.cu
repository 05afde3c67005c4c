/*
 * Kernels that are wrong on purpose: the shim must say so. They are compiled for the host only, by
 * tests/cuda/CMakeLists.txt; test_cuda_kernels_planted.c runs them.
 */
#include "kernels/cuda/launch.cuh"
#include "tests/cuda/broken.h"

struct broken_params {
    int kind;
    int *sums_out;
};

enum { THREADS = 64 };

static void break_barrier(bool is_first_half)
{
    if (is_first_half)
        __syncthreads();
}

FSDP_KERNEL(THREADS, 1) broken(FSDP_PARAMS(broken_params) params)
{
    const unsigned lane = threadIdx.x % 32;
    int sum = (int)threadIdx.x;
    switch (params.kind) {
    case BROKEN_BARRIER: break_barrier(threadIdx.x < THREADS / 2); break;
    case BROKEN_TWO_BARRIERS:
        if (threadIdx.x < THREADS / 2)
            __syncthreads();
        else
            break_barrier(true);
        break;
    case BROKEN_ABSENT_LANES:
        if (lane < 16)
            sum += __shfl_down_sync(0xffffffffu, sum, 1);
        break;
    case BROKEN_MASK:
        if (lane < 16)
            sum += __shfl_sync(0x0000ffffu, sum, lane + 16);
        break;
    default: sum = __any_sync(0xffffffffu, lane == 3) ? 1 : 0; break;
    }
    params.sums_out[threadIdx.x] = sum;
}

int fsdp_broken_launch(int kind, int *sums_out)
{
    const fsdp_grid<broken_params> grid = {broken, THREADS, nullptr};
    return fsdp_launch(grid, 1, broken_params{kind, sums_out});
}

/*
 * The norm of a list of power sums, and the factor of clipping, which stay on the device. The additions are
 * those of kernels/train/tensor_norm.c, in their order. See cuda_kernels.h.
 */
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/real.cuh"

struct some_sums {
    double sums[FSDP_THREADS];
};

FSDP_DEVICE double norm_of(double total, double p)
{
    if (p == 2)
        return fsdp_root(total);
    return isinf(p) ? total : pow(total, 1 / p);
}

FSDP_DEVICE double factor_of(double norm, const fsdp_norm_call &call)
{
    if (call.skips && !isfinite(norm))
        return FSDP_SKIPPED;
    if (isinf(call.max_norm))
        return 1;
    double factor = call.max_norm / (norm + 1e-6);
    return factor < 1 || isnan(factor) ? factor : 1;
}

FSDP_DEVICE double take(double total, double part, double p)
{
    return isinf(p) ? fsdp_larger(total, part) : total + part;
}

/* One block: threads fetch the sums, and the first one adds them. */
FSDP_KERNEL(FSDP_THREADS, 1) find_norm(FSDP_PARAMS(fsdp_norm_call) call)
{
    FSDP_SHARED(some_sums, shared);
    double total = 0;
    for (size_t first = 0; first < call.n; first += FSDP_THREADS) {
        size_t left = call.n - first;
        uint32_t n = left < FSDP_THREADS ? (uint32_t)left : (uint32_t)FSDP_THREADS;
        if (threadIdx.x < n)
            shared.sums[threadIdx.x] = call.sums[first + threadIdx.x];
        __syncthreads();
        for (uint32_t i = 0; i < n && threadIdx.x == 0; i++)
            total = take(total, shared.sums[i], call.p);
        __syncthreads();
    }
    if (threadIdx.x != 0)
        return;
    if (call.total_out)
        *call.total_out = fsdp_settled(total);
    if (call.factor_out)
        *call.factor_out = factor_of(norm_of(total, call.p), call);
}

int fsdp_cuda_norm(const fsdp_norm_call *call, void *stream)
{
    return fsdp_launch<fsdp_norm_call>({find_norm, FSDP_THREADS, stream}, 1, *call);
}

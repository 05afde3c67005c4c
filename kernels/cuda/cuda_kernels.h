/*
 * The kernels of a training step and of staging on NVIDIA GPUs. Each call computes the same bits as the
 * plain C function that its comment names; docs/gpu_kernels.md describes how they work and how they are
 * proven.
 *
 * All data lies in device memory; lists and structs lie in host memory and are read before the call
 * returns. `stream` is a cudaStream_t. A call enqueues its work and returns: it never waits and allocates
 * nothing. The result is a cudaError_t, 0 for success; an empty list is success. A list that fits one
 * launch, hundreds of tensors, is one launch, whatever the sizes of the tensors.
 *
 * The room kernels/cuda takes and returns device memory; the runtime calls it, and kernels/ below it has
 * the references. It is there where FSDP_HAVE_CUDA is defined.
 */
#ifndef FSDP_CUDA_KERNELS_H
#define FSDP_CUDA_KERNELS_H

#include "kernels/kernels.h"
#include "kernels/train/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- copies ----------------------------------------------------------------------------------- */

/* As fsdp_rects_copy: chunk-cat, copy-out, casts, zeros. */
int fsdp_cuda_rects(const fsdp_rect *rects, size_t n, void *stream);

#ifdef __cplusplus
}
#endif
#endif

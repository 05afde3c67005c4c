/*
 * The kernels of a training step and of staging on NVIDIA GPUs. Each call computes the same bits as the
 * plain C function that its comment names; docs/gpu_kernels.md describes how they work and how they are
 * proven.
 *
 * All data lies in device memory; lists and structs lie in host memory and are read before the call
 * returns. `stream` is a cudaStream_t. A call enqueues its work and returns: it never waits and allocates
 * nothing. The result is a cudaError_t, 0 for success; an empty list is success. A list of hundreds of
 * tensors is one launch, whatever their sizes; tensors of f64 among others are a second one, and power sums
 * and searches for what is not finite take two.
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

/* In device memory. Data may lie at any address; aligned data is faster. Of vectors of 16 bytes that contain
 * its first or last bytes, other bytes may be read, too: all memory of a GPU consists of whole vectors. */
typedef fsdp_span fsdp_cuda_span;

/* --- copies ----------------------------------------------------------------------------------- */

/* As fsdp_rects_copy: chunk-cat, copy-out, casts, zeros. */
int fsdp_cuda_rects(const fsdp_rect *rects, size_t n, void *stream);

/* As fsdp_copy_box for each; strides and lengths lie in host memory. */
int fsdp_cuda_copy_box(const fsdp_strided_copy *copies, size_t n, void *stream);

/* --- arithmetic ------------------------------------------------------------------------------- */

enum { FSDP_CUDA_FOLD_SOURCES = 1024 };        /* at most, of one fold: as many as ranks that are threads */

/* As fsdp_tensor_fold, of to->count elements; the list `from` lies in host memory. */
int fsdp_cuda_fold(const fsdp_cuda_span *to, const void *const *from, int n, fsdp_reduction how,
                   void *stream);
/* As fsdp_tensor_add: to[i] += from[i], of to->count elements. */
int fsdp_cuda_add(const fsdp_cuda_span *to, const void *from, fsdp_dtype from_type, void *stream);
/* As fsdp_tensor_multiply and fsdp_tensor_divide, for each span. */
int fsdp_cuda_multiply(const fsdp_cuda_span *spans, size_t n, double factor, void *stream);
int fsdp_cuda_divide(const fsdp_cuda_span *spans, size_t n, double divisor, void *stream);

/* --- norms ------------------------------------------------------------------------------------ */

/* Doubles of workspace that fsdp_cuda_power_sums needs for these spans. */
size_t fsdp_cuda_power_partials(const fsdp_cuda_span *spans, size_t n);
/*
 * As fsdp_tensor_power_sum of each span, into sums_out (device memory, one double per span): equal bits for
 * p 1, 2 and infinity; for another p, as far as pow of the device and of the C library agree, and equal
 * from run to run.
 */
int fsdp_cuda_power_sums(const fsdp_cuda_span *spans, size_t n, double p, double *partials, double *sums_out,
                         void *stream);
/* As fsdp_tensor_norm, in one launch. The sums lie in device memory, outputs there or in pinned memory. The
 * total has equal bits; the factor of another p than 1 and infinity, as far as pow agrees. */
int fsdp_cuda_norm(const fsdp_norm_call *call, void *stream);
/* all_finite_out (device memory): 1 when all elements of all spans are finite, else 0. */
int fsdp_cuda_are_finite(const fsdp_cuda_span *spans, size_t n, int *all_finite_out, void *stream);

/* --- optimizers ------------------------------------------------------------------------------- */

/*
 * As fsdp_tensor_adamw and fsdp_tensor_sgd: tensors[i] takes steps[i]. A launch has capacity for 16 different
 * steps, so lists with more groups of parameters should be sorted by them.
 */
int fsdp_cuda_adamw(const fsdp_optim_tensors *tensors, size_t n, const fsdp_adamw_step *steps, void *stream);
int fsdp_cuda_sgd(const fsdp_optim_tensors *tensors, size_t n, const fsdp_sgd_step *steps, void *stream);

/* --- hashes ----------------------------------------------------------------------------------- */

/* XXH3-128 of the bytes of each span, as fsdp_kernels.hash, into hashes_out (device memory, one per span). */
int fsdp_cuda_hash(const fsdp_cuda_span *spans, size_t n, fsdp_hash *hashes_out, void *stream);

#ifdef __cplusplus
}
#endif
#endif

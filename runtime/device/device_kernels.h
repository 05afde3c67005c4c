/*
 * Kernels of a device: what a training step does with the device's memory. The rooms above give streams this
 * work through device->ops->kernels and never ask where memory lies.
 *
 * A call is work in stream order, like submit of device.h; the host does not wait. Lists that are passed
 * (rectangles, boxes, tensors) stay the caller's and unchanged until the work is done.
 * Pointers are to memory of the device, or to its staging memory (fsdp_device_ops.alloc_staging). The
 * arithmetic is that of kernels/train/tensor.h, bit for bit on every device. A failure stays in the stream.
 *
 * device_host_kernels.c has the table of devices whose memory is the host's, device_cuda_kernels.c that of
 * CUDA.
 */
#ifndef FSDP_DEVICE_KERNELS_H
#define FSDP_DEVICE_KERNELS_H

#include "kernels/kernels.h"
#include "kernels/train/tensor.h"

typedef struct fsdp_stream fsdp_stream;

typedef struct fsdp_fold_call {
    void *to;
    const void *const *from;   /* n of them */
    int n;
    fsdp_dtype dtype;
    size_t count;
    fsdp_reduction how;
} fsdp_fold_call;

typedef struct fsdp_device_kernels {
    /* Copies between any two of the device's memory, its staging memory and other memory of the host. */
    void (*copy)(fsdp_stream *stream, void *to, const void *from, size_t size);
    void (*fill)(fsdp_stream *stream, void *to, int byte, size_t size);
    void (*rects)(fsdp_stream *stream, const fsdp_rect *rects, size_t n);
    void (*copy_boxes)(fsdp_stream *stream, const fsdp_strided_copy *copies, size_t n);

    void (*cast)(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                 size_t count);
    void (*add)(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                size_t count);
    void (*multiply)(fsdp_stream *stream, const fsdp_span *spans, size_t n, double factor);
    void (*divide)(fsdp_stream *stream, void *data, fsdp_dtype dtype, size_t count, double divisor);
    void (*fold)(fsdp_stream *stream, const fsdp_fold_call *call);     /* call stays the caller's, too */

    /* Tensor i with step i. */
    void (*adamw)(fsdp_stream *stream, const fsdp_optim_tensors *tensors, const fsdp_adamw_step *steps,
                  size_t n);
    void (*sgd)(fsdp_stream *stream, const fsdp_optim_tensors *tensors, const fsdp_sgd_step *steps, size_t n);

    /* Results lie in memory of either kind, one per span, or one for all. */
    void (*power_sums)(fsdp_stream *stream, const fsdp_span *spans, size_t n, double p, double *sums);
    /* The call is copied. The sums are those of power_sums. */
    void (*norm)(fsdp_stream *stream, const fsdp_norm_call *call);
    void (*are_finite)(fsdp_stream *stream, const fsdp_span *spans, size_t n, int *all_are_finite);
    void (*hashes)(fsdp_stream *stream, const fsdp_span *spans, size_t n, fsdp_hash *hashes);
} fsdp_device_kernels;

/* Each kernel is host code that is submitted: for devices whose memory is the host's. */
extern const fsdp_device_kernels fsdp_device_host_kernels;

#endif

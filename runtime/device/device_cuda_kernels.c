/*
 * Kernels of device "cuda": each gives its stream the launches of kernels/cuda, and the stream
 * keeps what they return. See device_kernels.h.
 */
#include "kernels/cuda/cuda_kernels.h"
#include "runtime/device/device_cuda.h"

enum { NOT_SUPPORTED = 801 }; /* cudaErrorNotSupported */

/* --- copies ----------------------------------------------------------------------------------- */

static size_t size_of_rects(const fsdp_rect *items, size_t n)
{
    size_t size = 0;
    for (size_t i = 0; i < n; i++)
        size += (size_t)(items[i].rows * items[i].width) * fsdp_dtype_size(items[i].to_type);
    return size;
}

static void rects(fsdp_stream *stream, const fsdp_rect *items, size_t n)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "rects", size_of_rects(items, n),
                             fsdp_cuda_rects(items, n, native));
}

static void cast(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from,
                 fsdp_dtype from_type, size_t count)
{
    const fsdp_rect line = fsdp_rect_line(to, to_type, from, from_type, (int64_t)count);
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "cast", size_of_rects(&line, 1),
                             fsdp_cuda_rects(&line, count > 0, native));
}

/* --- kernels that kernels/cuda has not yet ---------------------------------------------------- */

static void refuse(fsdp_stream *stream, const char *kernel, size_t size)
{
    if (fsdp_cuda_stream_begin(stream))
        fsdp_cuda_stream_end(stream, kernel, size, NOT_SUPPORTED);
}

static void copy_boxes(fsdp_stream *stream, const fsdp_strided_copy *copies, size_t n)
{
    (void)copies;
    refuse(stream, "copy_boxes", n);
}

static void add(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from,
                fsdp_dtype from_type, size_t count)
{
    (void)to, (void)from, (void)from_type;
    refuse(stream, "add", count * fsdp_dtype_size(to_type));
}

static void multiply(fsdp_stream *stream, void *data, fsdp_dtype dtype, size_t count, double factor)
{
    (void)data, (void)factor;
    refuse(stream, "multiply", count * fsdp_dtype_size(dtype));
}

static void divide(fsdp_stream *stream, void *data, fsdp_dtype dtype, size_t count, double divisor)
{
    (void)data, (void)divisor;
    refuse(stream, "divide", count * fsdp_dtype_size(dtype));
}

static void fold(fsdp_stream *stream, const fsdp_fold_call *call)
{
    refuse(stream, "fold", call->count * fsdp_dtype_size(call->dtype));
}

static void adamw(fsdp_stream *stream, const fsdp_optim_tensors *tensors,
                  const fsdp_adamw_step *steps, size_t n)
{
    (void)tensors, (void)steps;
    refuse(stream, "adamw", n);
}

static void sgd(fsdp_stream *stream, const fsdp_optim_tensors *tensors, const fsdp_sgd_step *steps,
                size_t n)
{
    (void)tensors, (void)steps;
    refuse(stream, "sgd", n);
}

static void power_sums(fsdp_stream *stream, const fsdp_span *spans, size_t n, double p,
                       double *sums)
{
    (void)spans, (void)p, (void)sums;
    refuse(stream, "power_sums", n);
}

static void are_finite(fsdp_stream *stream, const fsdp_span *spans, size_t n, int *all_are_finite)
{
    (void)spans, (void)all_are_finite;
    refuse(stream, "are_finite", n);
}

static void hashes(fsdp_stream *stream, const fsdp_span *spans, size_t n, fsdp_hash *hashes_out)
{
    (void)spans, (void)hashes_out;
    refuse(stream, "hashes", n);
}

const fsdp_device_kernels fsdp_device_cuda_kernels = {
    .copy = fsdp_cuda_stream_copy,
    .fill = fsdp_cuda_stream_fill,
    .rects = rects,
    .copy_boxes = copy_boxes,
    .cast = cast,
    .add = add,
    .multiply = multiply,
    .divide = divide,
    .fold = fold,
    .adamw = adamw,
    .sgd = sgd,
    .power_sums = power_sums,
    .are_finite = are_finite,
    .hashes = hashes,
};

/*
 * Kernels of device "cuda": each gives its stream the launches of kernels/cuda, and the stream
 * keeps what they return. See device_kernels.h.
 */
#include "kernels/cuda/cuda_kernels.h"
#include "runtime/device/device_cuda.h"

/* --- copies ----------------------------------------------------------------------------------- */

static size_t size_of_rects(const fsdp_rect *items, size_t n)
{
    size_t size = 0;
    for (size_t i = 0; i < n; i++)
        size += (size_t)(items[i].rows * items[i].width) * fsdp_dtype_size(items[i].to_type);
    return size;
}

static size_t size_of_boxes(const fsdp_strided_copy *copies, size_t n)
{
    size_t size = 0;
    for (size_t i = 0; i < n; i++)
        size += (size_t)fsdp_shape_count(copies[i].ndim, copies[i].len) * copies[i].element_size;
    return size;
}

static void rects(fsdp_stream *stream, const fsdp_rect *items, size_t n)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "rects", size_of_rects(items, n),
                             fsdp_cuda_rects(items, n, native));
}

static void copy_boxes(fsdp_stream *stream, const fsdp_strided_copy *copies, size_t n)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "copy_boxes", size_of_boxes(copies, n),
                             fsdp_cuda_copy_box(copies, n, native));
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

/* --- arithmetic ------------------------------------------------------------------------------- */

static size_t size_of_spans(const fsdp_span *spans, size_t n)
{
    size_t size = 0;
    for (size_t i = 0; i < n; i++)
        size += spans[i].count * fsdp_dtype_size(spans[i].dtype);
    return size;
}

static void add(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from,
                fsdp_dtype from_type, size_t count)
{
    const fsdp_span span = {.data = to, .dtype = to_type, .count = count};
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "add", size_of_spans(&span, 1),
                             fsdp_cuda_add(&span, from, from_type, native));
}

static void multiply(fsdp_stream *stream, const fsdp_span *spans, size_t n, double factor)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "multiply", size_of_spans(spans, n),
                             fsdp_cuda_multiply(spans, n, factor, native));
}

static void divide(fsdp_stream *stream, void *data, fsdp_dtype dtype, size_t count, double divisor)
{
    const fsdp_span span = {.data = data, .dtype = dtype, .count = count};
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "divide", size_of_spans(&span, 1),
                             fsdp_cuda_divide(&span, 1, divisor, native));
}

static void fold(fsdp_stream *stream, const fsdp_fold_call *call)
{
    const fsdp_span to = {.data = call->to, .dtype = call->dtype, .count = call->count};
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "fold", size_of_spans(&to, 1),
                             fsdp_cuda_fold(&to, call->from, call->n, call->how, native));
}

/* --- optimizers ------------------------------------------------------------------------------- */

static size_t size_of_params(const fsdp_optim_tensors *tensors, size_t n)
{
    size_t size = 0;
    for (size_t i = 0; i < n; i++)
        size += tensors[i].count * fsdp_dtype_size(tensors[i].param_type);
    return size;
}

static void adamw(fsdp_stream *stream, const fsdp_optim_tensors *tensors,
                  const fsdp_adamw_step *steps, size_t n)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "adamw", size_of_params(tensors, n),
                             fsdp_cuda_adamw(tensors, n, steps, native));
}

static void sgd(fsdp_stream *stream, const fsdp_optim_tensors *tensors, const fsdp_sgd_step *steps,
                size_t n)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "sgd", size_of_params(tensors, n),
                             fsdp_cuda_sgd(tensors, n, steps, native));
}

/* --- results ---------------------------------------------------------------------------------- */

static void power_sums(fsdp_stream *stream, const fsdp_span *spans, size_t n, double p,
                       double *sums)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (!native)
        return;
    size_t partials = fsdp_cuda_power_partials(spans, n) * sizeof(double);
    double *workspace = fsdp_cuda_stream_workspace(stream, partials);
    if (workspace)
        fsdp_cuda_stream_end(stream, "power_sums", size_of_spans(spans, n),
                             fsdp_cuda_power_sums(spans, n, p, workspace, sums, native));
}

static void norm(fsdp_stream *stream, const fsdp_norm_call *call)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "norm", call->n * sizeof *call->sums,
                             fsdp_cuda_norm(call, native));
}

static void are_finite(fsdp_stream *stream, const fsdp_span *spans, size_t n, int *all_are_finite)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "are_finite", size_of_spans(spans, n),
                             fsdp_cuda_are_finite(spans, n, all_are_finite, native));
}

static void hashes(fsdp_stream *stream, const fsdp_span *spans, size_t n, fsdp_hash *hashes_out)
{
    void *native = fsdp_cuda_stream_begin(stream);
    if (native)
        fsdp_cuda_stream_end(stream, "hashes", size_of_spans(spans, n),
                             fsdp_cuda_hash(spans, n, hashes_out, native));
}

const fsdp_device_kernels fsdp_device_cuda_kernels = {
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
    .norm = norm,
    .are_finite = are_finite,
    .hashes = hashes,
};

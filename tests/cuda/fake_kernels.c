/*
 * Kernels of device "cuda" for tests of everything but the kernels: host code that the streams of
 * the fake CUDA runtime run, in place of runtime/device/device_cuda_kernels.c. As launches do, a
 * call reads its lists before it returns, and reaches only memory of the device and staging memory.
 */
#include "runtime/device/device_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "tests/cuda/fake_cudart.h"

enum { ILLEGAL_ADDRESS = 700 };

/* Host kernels are given to it as to a stream of the host; it passes them on to the stream of
 * CUDA. */
typedef struct relay {
    fsdp_stream head;
    fsdp_stream *stream;
    const char *kernel;
    size_t size;
    void *lists; /* copies, which are freed after the work */
    bool reaches;
} relay;

typedef struct launch {
    fsdp_work work;
    void *lists;
    _Alignas(16) unsigned char args[FSDP_WORK_ARGS];
} launch;

static void run(void *closure)
{
    launch *job = closure;
    (void)job->work(job->args, NULL);
}

static void drop(void *closure)
{
    launch *job = closure;
    free(job->lists);
    free(job);
}

static void *allocate(size_t size)
{
    void *data = malloc(size > 0 ? size : 1);
    if (!data)
        abort();
    return data;
}

static void submit(fsdp_stream *head, fsdp_work work, const void *args, size_t args_size)
{
    const relay *from = (const relay *)head;
    void *native = fsdp_cuda_stream_begin(from->stream);
    launch *job = allocate(sizeof *job);
    *job = (launch){.work = work, .lists = from->lists};
    memcpy(job->args, args, args_size);
    if (!native || !from->reaches)
        drop(job);
    if (native)
        fsdp_cuda_stream_end(from->stream, from->kernel, from->size,
                             from->reaches ? fake_cudart_enqueue(native, run, job, drop)
                                           : ILLEGAL_ADDRESS);
}

static relay begin(fsdp_stream *stream, const char *kernel)
{
    static const fsdp_device_ops ops = {.submit = submit};
    static fsdp_device device = {.ops = &ops};
    return (relay){
        .head = {.device = &device}, .stream = stream, .kernel = kernel, .reaches = true};
}

/* The kernel reads or writes these bytes. */
static void reach(relay *to, const void *data, size_t size)
{
    to->size += size;
    if (data && !fake_cudart_reaches(data, size))
        to->reaches = false;
}

static void *keep(relay *to, const void *list, size_t size)
{
    to->lists = allocate(size);
    return memcpy(to->lists, list, size);
}

static const fsdp_device_kernels *host(void)
{
    return &fsdp_device_host_kernels;
}

/* --- copies ----------------------------------------------------------------------------------- */

/* Bytes between the first element and the end of the last one. */
static size_t extent(int64_t rows, int64_t width, int64_t pitch, fsdp_dtype dtype)
{
    return rows > 0 ? (size_t)((rows - 1) * pitch + width) * fsdp_dtype_size(dtype) : 0;
}

static void rects(fsdp_stream *stream, const fsdp_rect *items, size_t n)
{
    relay to = begin(stream, "rects");
    for (size_t i = 0; i < n; i++) {
        const fsdp_rect *one = &items[i];
        reach(&to, one->to, extent(one->rows, one->width, one->to_pitch, one->to_type));
        reach(&to, one->from, extent(one->rows, one->width, one->from_pitch, one->from_type));
    }
    if (n > 0)
        host()->rects(&to.head, keep(&to, items, n * sizeof *items), n);
}

static void copy_boxes(fsdp_stream *stream, const fsdp_strided_copy *copies, size_t n)
{
    relay to = begin(stream, "copy_boxes");
    size_t numbers = 0;
    for (size_t i = 0; i < n; i++)
        numbers += 3 * (size_t)copies[i].ndim;
    fsdp_strided_copy *kept = allocate(n * sizeof *kept + numbers * sizeof(int64_t));
    int64_t *at = (int64_t *)(kept + n);
    for (size_t i = 0; i < n; i++) {
        const fsdp_strided_copy *one = &copies[i];
        size_t dims = (size_t)one->ndim, size = dims * sizeof *at;
        kept[i] = *one;
        kept[i].to_strides = memcpy(at, one->to_strides, size);
        kept[i].from_strides = memcpy(at + dims, one->from_strides, size);
        kept[i].len = memcpy(at + 2 * dims, one->len, size);
        at += 3 * dims;
        reach(&to, one->to, one->element_size);
        reach(&to, one->from, one->element_size);
    }
    to.lists = kept;
    if (n > 0)
        host()->copy_boxes(&to.head, kept, n);
    else
        free(kept);
}

/* --- arithmetic ------------------------------------------------------------------------------- */

static void cast(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from,
                 fsdp_dtype from_type, size_t count)
{
    relay call = begin(stream, "cast");
    reach(&call, to, count * fsdp_dtype_size(to_type));
    reach(&call, from, count * fsdp_dtype_size(from_type));
    host()->cast(&call.head, to, to_type, from, from_type, count);
}

static void add(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from,
                fsdp_dtype from_type, size_t count)
{
    relay call = begin(stream, "add");
    reach(&call, to, count * fsdp_dtype_size(to_type));
    reach(&call, from, count * fsdp_dtype_size(from_type));
    host()->add(&call.head, to, to_type, from, from_type, count);
}

static const fsdp_span *keep_spans(relay *to, const fsdp_span *spans, size_t n)
{
    for (size_t i = 0; i < n; i++)
        reach(to, spans[i].data, spans[i].count * fsdp_dtype_size(spans[i].dtype));
    return keep(to, spans, n * sizeof *spans);
}

static void multiply(fsdp_stream *stream, const fsdp_span *spans, size_t n, double factor)
{
    relay to = begin(stream, "multiply");
    if (n > 0)
        host()->multiply(&to.head, keep_spans(&to, spans, n), n, factor);
}

static void divide(fsdp_stream *stream, void *data, fsdp_dtype dtype, size_t count, double divisor)
{
    relay call = begin(stream, "divide");
    reach(&call, data, count * fsdp_dtype_size(dtype));
    host()->divide(&call.head, data, dtype, count, divisor);
}

static void fold(fsdp_stream *stream, const fsdp_fold_call *call)
{
    relay to = begin(stream, "fold");
    size_t size = call->count * fsdp_dtype_size(call->dtype);
    fsdp_fold_call *kept = allocate(sizeof *kept + (size_t)call->n * sizeof *call->from);
    *kept = *call;
    kept->from = memcpy(kept + 1, call->from, (size_t)call->n * sizeof *call->from);
    reach(&to, call->to, size);
    for (int i = 0; i < call->n; i++)
        reach(&to, call->from[i], size);
    to.lists = kept;
    host()->fold(&to.head, kept);
}

/* --- optimizers ------------------------------------------------------------------------------- */

static void reach_tensors(relay *to, const fsdp_optim_tensors *tensors, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const fsdp_optim_tensors *one = &tensors[i];
        reach(to, one->param, one->count * fsdp_dtype_size(one->param_type));
        reach(to, one->master, one->count * sizeof *one->master);
        reach(to, one->grad, one->count * fsdp_dtype_size(one->grad_type));
        reach(to, one->moments[0], one->count * fsdp_dtype_size(one->moment_type));
        reach(to, one->moments[1], one->count * fsdp_dtype_size(one->moment_type));
    }
}

/* Both lists in one block; returns the tensors. */
static fsdp_optim_tensors *keep_steps(relay *to, const fsdp_optim_tensors *tensors,
                                      const void *steps, size_t n, size_t step_size)
{
    fsdp_optim_tensors *kept = allocate(n * (sizeof *kept + step_size));
    memcpy(kept, tensors, n * sizeof *kept);
    memcpy(kept + n, steps, n * step_size);
    reach_tensors(to, tensors, n);
    to->lists = kept;
    return kept;
}

static void adamw(fsdp_stream *stream, const fsdp_optim_tensors *tensors,
                  const fsdp_adamw_step *steps, size_t n)
{
    relay to = begin(stream, "adamw");
    if (n == 0)
        return;
    for (size_t i = 0; i < n; i++)
        reach(&to, steps[i].clip, sizeof *steps[i].clip);
    fsdp_optim_tensors *kept = keep_steps(&to, tensors, steps, n, sizeof *steps);
    host()->adamw(&to.head, kept, (const fsdp_adamw_step *)(const void *)(kept + n), n);
}

static void sgd(fsdp_stream *stream, const fsdp_optim_tensors *tensors, const fsdp_sgd_step *steps,
                size_t n)
{
    relay to = begin(stream, "sgd");
    if (n == 0)
        return;
    for (size_t i = 0; i < n; i++)
        reach(&to, steps[i].clip, sizeof *steps[i].clip);
    fsdp_optim_tensors *kept = keep_steps(&to, tensors, steps, n, sizeof *steps);
    host()->sgd(&to.head, kept, (const fsdp_sgd_step *)(const void *)(kept + n), n);
}

/* --- results ---------------------------------------------------------------------------------- */

static void power_sums(fsdp_stream *stream, const fsdp_span *spans, size_t n, double p,
                       double *sums)
{
    relay to = begin(stream, "power_sums");
    reach(&to, sums, n * sizeof *sums);
    host()->power_sums(&to.head, keep_spans(&to, spans, n), n, p, sums);
}

static void norm(fsdp_stream *stream, const fsdp_norm_call *call)
{
    relay to = begin(stream, "norm");
    reach(&to, call->sums, call->n * sizeof *call->sums);
    reach(&to, call->total_out, sizeof *call->total_out);
    reach(&to, call->factor_out, sizeof *call->factor_out);
    host()->norm(&to.head, call);
}

static void are_finite(fsdp_stream *stream, const fsdp_span *spans, size_t n, int *all_are_finite)
{
    relay to = begin(stream, "are_finite");
    reach(&to, all_are_finite, sizeof *all_are_finite);
    host()->are_finite(&to.head, keep_spans(&to, spans, n), n, all_are_finite);
}

static void hashes(fsdp_stream *stream, const fsdp_span *spans, size_t n, fsdp_hash *hashes_out)
{
    relay to = begin(stream, "hashes");
    reach(&to, hashes_out, n * sizeof *hashes_out);
    host()->hashes(&to.head, keep_spans(&to, spans, n), n, hashes_out);
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

/*
 * Kernels of devices whose memory is the host's: each is a host function that the stream runs. Copies of
 * the arguments travel with the work, lists stay the caller's. See device_kernels.h.
 */
#include "runtime/device/device_kernels.h"

#include "runtime/device/device.h"

#include <string.h>

static void submit(fsdp_stream *stream, fsdp_work work, const void *args, size_t size)
{
    stream->device->ops->submit(stream, work, args, size);
}

/* --- copies ------------------------------------------------------------------------------------- */

typedef struct copy_args {
    void *to;
    const void *from;
    size_t size;
    int byte;
} copy_args;

static fsdp_status run_copy(void *args, fsdp_error *err)
{
    const copy_args *work = args;
    (void)err;
    fsdp_tensor_copy(work->to, work->from, work->size, work->size);
    return FSDP_OK;
}

static void copy(fsdp_stream *stream, void *to, const void *from, size_t size)
{
    const copy_args args = {.to = to, .from = from, .size = size};
    submit(stream, run_copy, &args, sizeof args);
}

static fsdp_status run_fill(void *args, fsdp_error *err)
{
    const copy_args *work = args;
    (void)err;
    memset(work->to, work->byte, work->size);
    return FSDP_OK;
}

static void fill(fsdp_stream *stream, void *to, int byte, size_t size)
{
    const copy_args args = {.to = to, .byte = byte, .size = size};
    submit(stream, run_fill, &args, sizeof args);
}

typedef struct list_args {
    const void *items;
    size_t n;
} list_args;

static fsdp_status run_rects(void *args, fsdp_error *err)
{
    const list_args *rects = args;
    (void)err;
    fsdp_rects_copy(rects->items, rects->n);
    return FSDP_OK;
}

static void rects(fsdp_stream *stream, const fsdp_rect *items, size_t n)
{
    submit(stream, run_rects, &(list_args){items, n}, sizeof(list_args));
}

static fsdp_status run_copy_boxes(void *args, fsdp_error *err)
{
    const list_args *copies = args;
    const fsdp_strided_copy *items = copies->items;
    (void)err;
    for (size_t i = 0; i < copies->n; i++)
        fsdp_copy_box(&items[i]);
    return FSDP_OK;
}

static void copy_boxes(fsdp_stream *stream, const fsdp_strided_copy *copies, size_t n)
{
    submit(stream, run_copy_boxes, &(list_args){copies, n}, sizeof(list_args));
}

/* --- arithmetic --------------------------------------------------------------------------------- */

typedef struct arithmetic_args {
    void *to;
    const void *from;
    fsdp_dtype to_type, from_type;
    size_t count;
    double number;
} arithmetic_args;

static fsdp_status run_cast(void *args, fsdp_error *err)
{
    const arithmetic_args *work = args;
    const fsdp_rect line =
        fsdp_rect_line(work->to, work->to_type, work->from, work->from_type, (int64_t)work->count);
    (void)err;
    fsdp_rects_copy(&line, work->count > 0);
    return FSDP_OK;
}

static void cast(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from,
                 fsdp_dtype from_type, size_t count)
{
    const arithmetic_args args = {
        .to = to, .to_type = to_type, .from = from, .from_type = from_type, .count = count};
    submit(stream, run_cast, &args, sizeof args);
}

static fsdp_status run_add(void *args, fsdp_error *err)
{
    const arithmetic_args *work = args;
    (void)err;
    fsdp_tensor_add(work->to, work->to_type, work->from, work->from_type, work->count);
    return FSDP_OK;
}

static void add(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from,
                fsdp_dtype from_type, size_t count)
{
    const arithmetic_args args = {
        .to = to, .to_type = to_type, .from = from, .from_type = from_type, .count = count};
    submit(stream, run_add, &args, sizeof args);
}

typedef struct multiply_args {
    const fsdp_span *spans;
    size_t n;
    double factor;
} multiply_args;

static fsdp_status run_multiply(void *args, fsdp_error *err)
{
    const multiply_args *work = args;
    (void)err;
    for (size_t i = 0; i < work->n; i++)
        fsdp_tensor_multiply(work->spans[i].data, work->spans[i].dtype, work->spans[i].count,
                             work->factor);
    return FSDP_OK;
}

static void multiply(fsdp_stream *stream, const fsdp_span *spans, size_t n, double factor)
{
    submit(stream, run_multiply, &(multiply_args){spans, n, factor}, sizeof(multiply_args));
}

static fsdp_status run_divide(void *args, fsdp_error *err)
{
    const arithmetic_args *work = args;
    (void)err;
    fsdp_tensor_divide(work->to, work->to_type, work->count, work->number);
    return FSDP_OK;
}

static void divide(fsdp_stream *stream, void *data, fsdp_dtype dtype, size_t count, double divisor)
{
    const arithmetic_args args = {.to = data, .to_type = dtype, .count = count, .number = divisor};
    submit(stream, run_divide, &args, sizeof args);
}

static fsdp_status run_fold(void *args, fsdp_error *err)
{
    const list_args *work = args;
    const fsdp_fold_call *call = work->items;
    (void)err;
    fsdp_tensor_fold(call->to, call->from, call->n, call->dtype, call->count, call->how);
    return FSDP_OK;
}

static void fold(fsdp_stream *stream, const fsdp_fold_call *call)
{
    submit(stream, run_fold, &(list_args){call, 1}, sizeof(list_args));
}

/* --- optimizers --------------------------------------------------------------------------------- */

typedef struct step_args {
    const fsdp_optim_tensors *tensors;
    const void *steps;
    size_t n;
} step_args;

static fsdp_status run_adamw(void *args, fsdp_error *err)
{
    const step_args *work = args;
    const fsdp_adamw_step *steps = work->steps;
    (void)err;
    for (size_t i = 0; i < work->n; i++)
        fsdp_tensor_adamw(&work->tensors[i], &steps[i]);
    return FSDP_OK;
}

static void adamw(fsdp_stream *stream, const fsdp_optim_tensors *tensors,
                  const fsdp_adamw_step *steps, size_t n)
{
    submit(stream, run_adamw, &(step_args){tensors, steps, n}, sizeof(step_args));
}

static fsdp_status run_sgd(void *args, fsdp_error *err)
{
    const step_args *work = args;
    const fsdp_sgd_step *steps = work->steps;
    (void)err;
    for (size_t i = 0; i < work->n; i++)
        fsdp_tensor_sgd(&work->tensors[i], &steps[i]);
    return FSDP_OK;
}

static void sgd(fsdp_stream *stream, const fsdp_optim_tensors *tensors, const fsdp_sgd_step *steps,
                size_t n)
{
    submit(stream, run_sgd, &(step_args){tensors, steps, n}, sizeof(step_args));
}

/* --- results ------------------------------------------------------------------------------------ */

typedef struct result_args {
    const fsdp_span *spans;
    size_t n;
    double p;
    void *out;
} result_args;

static fsdp_status run_power_sums(void *args, fsdp_error *err)
{
    const result_args *work = args;
    double *sums = work->out;
    (void)err;
    for (size_t i = 0; i < work->n; i++)
        sums[i] = fsdp_tensor_power_sum(work->spans[i].data, work->spans[i].dtype,
                                        work->spans[i].count, work->p);
    return FSDP_OK;
}

static void power_sums(fsdp_stream *stream, const fsdp_span *spans, size_t n, double p,
                       double *sums)
{
    const result_args args = {.spans = spans, .n = n, .p = p, .out = sums};
    submit(stream, run_power_sums, &args, sizeof args);
}

static fsdp_status run_norm(void *args, fsdp_error *err)
{
    (void)err;
    fsdp_tensor_norm(args);
    return FSDP_OK;
}

static void norm(fsdp_stream *stream, const fsdp_norm_call *call)
{
    submit(stream, run_norm, call, sizeof *call);
}

static fsdp_status run_are_finite(void *args, fsdp_error *err)
{
    const result_args *work = args;
    int *finite = work->out;
    (void)err;
    *finite = 1;
    for (size_t i = 0; i < work->n && *finite; i++)
        *finite =
            fsdp_tensor_is_finite(work->spans[i].data, work->spans[i].dtype, work->spans[i].count);
    return FSDP_OK;
}

static void are_finite(fsdp_stream *stream, const fsdp_span *spans, size_t n, int *all_are_finite)
{
    const result_args args = {.spans = spans, .n = n, .out = all_are_finite};
    submit(stream, run_are_finite, &args, sizeof args);
}

static fsdp_status run_hashes(void *args, fsdp_error *err)
{
    const result_args *work = args;
    fsdp_hash *hashes = work->out;
    (void)err;
    for (size_t i = 0; i < work->n; i++)
        hashes[i] = fsdp_kernels_get()->hash(
            work->spans[i].data, work->spans[i].count * fsdp_dtype_size(work->spans[i].dtype));
    return FSDP_OK;
}

static void hashes(fsdp_stream *stream, const fsdp_span *spans, size_t n, fsdp_hash *hashes_out)
{
    const result_args args = {.spans = spans, .n = n, .out = hashes_out};
    submit(stream, run_hashes, &args, sizeof args);
}

const fsdp_device_kernels fsdp_device_host_kernels = {
    .copy = copy,
    .fill = fill,
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

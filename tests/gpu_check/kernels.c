/*
 * The kernels of the device on fresh random data. A case gives a stream one kernel's work on an
 * arena; it is given to the GPU and, with a copy of the arena, to device "cpu", whose kernels are
 * the C reference. All bytes of both arenas are equal afterwards, as are results; then the GPU's
 * time is measured. See gpu_check.h.
 */
#include "tests/gpu_check/gpu_check.h"

#include <stdlib.h>
#include <string.h>

#include "base/core/mem.h"

enum { PIECES = 1024, MANY = 1000, RANKS = 8, RESULTS = PIECES * 16, BLOCK = 64 };

/* One side's arena, and lists that stay until its stream has done the work. */
typedef struct kernel_job {
    const struct kernel_case *what;
    unsigned char *arena;
    size_t size;
    int pieces;
    void *results; /* RESULTS bytes: the host's, or staging memory */
    fsdp_rect rects[PIECES];
    fsdp_span spans[PIECES];
    fsdp_optim_tensors tensors[PIECES];
    fsdp_adamw_step steps[PIECES];
    fsdp_strided_copy boxes[PIECES];
    int64_t len[2]; /* of each */
    const void *sources[4];
    fsdp_fold_call fold;
} kernel_job;

typedef struct kernel_case {
    const char *name;
    gpu_work work; /* context: a kernel_job */
    void (*fill)(unsigned char *arena, size_t size, uint64_t seed);
    double traffic;    /* bytes read and written, per byte of the arena */
    int pieces;        /* tensors */
    int most_launches; /* 0: not counted */
} kernel_case;

/* --- arenas ----------------------------------------------------------------------------------- */

/* Elements of one piece, of an arena whose pieces have so many bytes per element. */
static size_t count_of(const kernel_job *job, size_t bytes)
{
    size_t count = job->size / bytes / (size_t)job->pieces;
    return count >= BLOCK ? count / BLOCK * BLOCK : count;
}

static void fill_bytes(unsigned char *arena, size_t size, uint64_t seed)
{
    gpu_fill_bytes(arena, size, seed);
}

static void fill_f32(unsigned char *arena, size_t size, uint64_t seed)
{
    gpu_fill_f32((float *)(void *)arena, size / sizeof(float), seed, false);
}

/* Squares are not negative. */
static void fill_positive(unsigned char *arena, size_t size, uint64_t seed)
{
    gpu_fill_f32((float *)(void *)arena, size / sizeof(float), seed, true);
}

static void fill_bf16(unsigned char *arena, size_t size, uint64_t seed)
{
    gpu_fill_bf16((uint16_t *)(void *)arena, size / sizeof(uint16_t), seed);
}

/* --- copies ----------------------------------------------------------------------------------- */

/* Pieces lie one after the other on one side; on the other RANKS parts, each with a row of every piece. */
static void give_rects(kernel_job *job, const fsdp_device_kernels *kernels, fsdp_stream *stream,
                       fsdp_dtype type, bool gathers)
{
    const size_t narrow = 2, wide = fsdp_dtype_size(type);
    const size_t count = count_of(job, narrow + wide) / RANKS * RANKS, width = count / RANKS;
    const size_t all = count * (size_t)job->pieces, pitch = width * (size_t)job->pieces;
    for (int i = 0; i < job->pieces; i++) {
        unsigned char *piece = job->arena + (size_t)i * count * wide;
        unsigned char *part = job->arena + all * wide + (size_t)i * width * narrow;
        fsdp_rect *rect = &job->rects[i];
        *rect = (fsdp_rect){.rows = RANKS, .width = (int64_t)width};
        rect->to = gathers ? piece : part;
        rect->from = gathers ? part : piece;
        rect->to_type = gathers ? type : FSDP_BF16;
        rect->from_type = gathers ? FSDP_BF16 : type;
        rect->to_pitch = (int64_t)(gathers ? width : pitch);
        rect->from_pitch = (int64_t)(gathers ? pitch : width);
    }
    kernels->rects(stream, job->rects, (size_t)job->pieces);
}

static void copy_out(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    give_rects(context, kernels, stream, FSDP_BF16, true);
}

static void chunk_cat(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    give_rects(context, kernels, stream, FSDP_F32, false);
}

/* From the front of the arena to its back. */
static void cast(kernel_job *job, const fsdp_device_kernels *kernels, fsdp_stream *stream,
                 const fsdp_dtype types[2])
{
    const size_t from = fsdp_dtype_size(types[0]), to = fsdp_dtype_size(types[1]);
    const size_t count = count_of(job, from + to);
    kernels->cast(stream, job->arena + count * from, types[1], job->arena, types[0], count);
}

static void cast_down(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    cast(context, kernels, stream, (fsdp_dtype[]){FSDP_F32, FSDP_BF16});
}

static void cast_up(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    cast(context, kernels, stream, (fsdp_dtype[]){FSDP_BF16, FSDP_F32});
}

static void cast_fp8(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    cast(context, kernels, stream, (fsdp_dtype[]){FSDP_F32, FSDP_F8_E4M3FN});
}

/* The first half of each row of a matrix, packed. */
static void copy_boxes(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    static const int64_t strides[] = {2048, 4}, packed[] = {1024, 4};
    kernel_job *job = context;
    const size_t rows = job->size / (2048 + 1024) / (size_t)job->pieces;
    job->len[0] = (int64_t)rows;
    job->len[1] = 1024 / 4;
    for (int i = 0; i < job->pieces; i++)
        job->boxes[i] = (fsdp_strided_copy){.to = job->arena + (size_t)job->pieces * rows * 2048 +
                                                  (size_t)i * rows * 1024,
                                            .to_strides = packed,
                                            .from = job->arena + (size_t)i * rows * 2048,
                                            .from_strides = strides,
                                            .ndim = 2,
                                            .len = job->len,
                                            .element_size = 4};
    kernels->copy_boxes(stream, job->boxes, (size_t)job->pieces);
}

/* --- arithmetic ------------------------------------------------------------------------------- */

static void add(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    kernel_job *job = context;
    const size_t count = count_of(job, 6);
    kernels->add(stream, job->arena, FSDP_F32, job->arena + count * 4, FSDP_BF16, count);
}

static void multiply(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    kernel_job *job = context;
    kernels->multiply(stream, &(fsdp_span){job->arena, FSDP_F32, count_of(job, 4)}, 1, 0.999);
}

static void divide(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    kernel_job *job = context;
    kernels->divide(stream, job->arena, FSDP_F32, count_of(job, 4), 3);
}

static void fold(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    kernel_job *job = context;
    const size_t count = count_of(job, 5 * sizeof(float));
    for (size_t i = 0; i < 4; i++)
        job->sources[i] = job->arena + (i + 1) * count * sizeof(float);
    job->fold = (fsdp_fold_call){.to = job->arena,
                                 .from = job->sources,
                                 .n = 4,
                                 .dtype = FSDP_F32,
                                 .count = count,
                                 .how = {.fold = FSDP_FOLD_SUM, .multiply = 1, .divide = 4}};
    kernels->fold(stream, &job->fold);
}

static void set_spans(kernel_job *job, fsdp_dtype type)
{
    const size_t size = fsdp_dtype_size(type), count = count_of(job, size);
    for (int i = 0; i < job->pieces; i++)
        job->spans[i] = (fsdp_span){
            .data = job->arena + (size_t)i * count * size, .dtype = type, .count = count};
}

static void norm(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    kernel_job *job = context;
    set_spans(job, FSDP_F32);
    kernels->power_sums(stream, job->spans, (size_t)job->pieces, 2, job->results);
}

static void are_finite(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    kernel_job *job = context;
    set_spans(job, FSDP_F32);
    kernels->are_finite(stream, job->spans, (size_t)job->pieces, job->results);
}

static void hash(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    kernel_job *job = context;
    set_spans(job, FSDP_U8);
    kernels->hashes(stream, job->spans, (size_t)job->pieces, job->results);
}

static void adamw(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    static const fsdp_adamw_step step = {.lr = 1e-3,
                                         .beta1 = 0.9,
                                         .beta2 = 0.999,
                                         .eps = 1e-8,
                                         .weight_decay = 0.01,
                                         .step = 7,
                                         .grad_scale = 1};
    kernel_job *job = context;
    const size_t count = count_of(job, 4 * sizeof(float)), all = count * (size_t)job->pieces;
    float *data = (float *)(void *)job->arena;
    for (int i = 0; i < job->pieces; i++, data += count) {
        job->steps[i] = step;
        job->tensors[i] = (fsdp_optim_tensors){.param = data,
                                               .param_type = FSDP_F32,
                                               .grad = data + all,
                                               .grad_type = FSDP_F32,
                                               .moments = {data + 2 * all, data + 3 * all},
                                               .moment_type = FSDP_F32,
                                               .count = count};
    }
    kernels->adamw(stream, job->tensors, job->steps, (size_t)job->pieces);
}

static const kernel_case cases[] = {
    {"kernel/copy-out", copy_out, fill_bytes, 1, 64, 0},
    {"kernel/chunk-cat", chunk_cat, fill_f32, 1, 64, 2},
    {"kernel/cast-f32-bf16", cast_down, fill_f32, 1, 1, 0},
    {"kernel/cast-bf16-f32", cast_up, fill_bf16, 1, 1, 0},
    {"kernel/cast-f32-fp8", cast_fp8, fill_f32, 1, 1, 0},
    {"kernel/copy-boxes", copy_boxes, fill_bytes, 2.0 / 3, 8, 0},
    {"kernel/add", add, fill_bf16, 10.0 / 6, 1, 0},
    {"kernel/multiply", multiply, fill_f32, 2, 1, 0},
    {"kernel/divide", divide, fill_f32, 2, 1, 0},
    {"kernel/fold", fold, fill_f32, 1, 1, 0},
    {"kernel/norm", norm, fill_f32, 1, 64, 0},
    {"kernel/are-finite", are_finite, fill_f32, 1, 64, 0},
    {"kernel/adamw", adamw, fill_positive, 28.0 / 16, 64, 0},
    {"kernel/hash", hash, fill_bytes, 1, 256, 0},
    {"small/adamw", adamw, fill_positive, 28.0 / 16, 1000, 3},
    {"small/norm", norm, fill_f32, 1, 1000, 3},
    {"small/copy-out", copy_out, fill_bytes, 1, 1000, 3},
};

int gpu_kernel_count(void)
{
    return (int)(sizeof cases / sizeof *cases);
}

const char *gpu_kernel_name(int kernel)
{
    return cases[kernel].name;
}

/* --- one case --------------------------------------------------------------------------------- */

typedef struct kernel_run {
    gpu_session session;
    fsdp_device *host;
    fsdp_stream *host_stream;
    kernel_job expected, device;
    unsigned char *found; /* the device's arena, on the host */
} kernel_run;

static fsdp_status prepare(kernel_run *run, const gpu_results *results, const kernel_case *what,
                           fsdp_error *err)
{
    gpu_session *session = &run->session;
    const size_t small = (size_t)256 << 20;
    size_t size = results->options.bytes;
    size = (what->pieces >= MANY && size > small ? small : size) / 64 * 64;
    run->expected = run->device = (kernel_job){.what = what, .size = size, .pieces = what->pieces};
    FSDP_TRY(gpu_session_open(session, results, err));
    FSDP_TRY(fsdp_device_cpu(&run->host, err));
    FSDP_TRY(run->host->ops->stream_create(run->host, "compute", &run->host_stream, err));
    void *arena;
    FSDP_TRY(gpu_session_alloc(session, size, &arena, err));
    run->device.arena = arena;
    run->device.results = session->ops->alloc_staging(session->device, RESULTS);
    run->expected.arena = fsdp_alloc_pages(size);
    run->expected.results = fsdp_alloc(1, RESULTS);
    run->found = fsdp_alloc_pages(size);
    if (!run->device.results || !run->expected.arena || !run->expected.results || !run->found)
        return fsdp_fail_memory(err, "the data of a kernel");
    memset(run->device.results, 0, RESULTS);
    return FSDP_OK;
}

static void release(kernel_run *run)
{
    gpu_session *session = &run->session;
    fsdp_error err;
    if (session->stream)
        (void)gpu_session_sync(session, &err);
    gpu_session_dealloc(session, run->device.arena, run->device.size);
    if (run->device.results)
        session->ops->dealloc_staging(session->device, run->device.results, RESULTS);
    gpu_session_close(session);
    if (run->host_stream)
        run->host->ops->stream_free(run->host_stream);
    fsdp_device_close(run->host);
    fsdp_free(run->expected.arena);
    fsdp_free(run->expected.results);
    fsdp_free(run->found);
}

/* Both sides, once. */
static fsdp_status run_both(kernel_run *run, uint64_t seed, fsdp_error *err)
{
    gpu_session *session = &run->session;
    kernel_job *device = &run->device, *expected = &run->expected;
    const kernel_case *what = device->what;
    what->fill(expected->arena, expected->size, seed);
    session->kernels->copy(session->stream, device->arena, expected->arena, device->size);
    FSDP_TRY(gpu_session_sync(session, err));
    what->work(device, session->kernels, session->stream);
    session->kernels->copy(session->stream, run->found, device->arena, device->size);
    what->work(expected, run->host->ops->kernels, run->host_stream);
    return gpu_session_sync(session, err);
}

static fsdp_status compare(const char *where, const void *found, const void *expected, size_t size,
                           fsdp_error *err)
{
    const unsigned char *a = found, *b = expected;
    if (memcmp(a, b, size) == 0)
        return FSDP_OK;
    size_t at = 0;
    while (a[at] == b[at])
        at++;
    return fsdp_fail(err, FSDP_ERR_INTERNAL,
                     "%s differ from those of the host from byte %zu of %zu on: %02x, and %02x is "
                     "right",
                     where, at, size, a[at], b[at]);
}

static void judge_launches(kernel_run *run, gpu_row *row)
{
    const kernel_case *what = run->device.what;
    int launches =
        what->most_launches > 0 ? gpu_session_launches(&run->session, what->work, &run->device) : 0;
    if (launches < 0)
        gpu_fail_row(row, "its launches cannot be counted");
    else if (launches > what->most_launches)
        gpu_fail_row(row, "%d launches, and at most %d are wanted", launches, what->most_launches);
}

static fsdp_status run_case(kernel_run *run, const gpu_results *results, gpu_row *row,
                            fsdp_error *err)
{
    const kernel_case *what = run->device.what;
    row->size = (double)run->device.size;
    FSDP_TRY(run_both(run, results->options.seed, err));
    FSDP_TRY(compare("bytes", run->found, run->expected.arena, run->device.size, err));
    FSDP_TRY(compare("results", run->device.results, run->expected.results, RESULTS, err));
    if (what->pieces >= MANY)
        FSDP_TRY(gpu_session_lead(&run->session, err));
    FSDP_TRY(gpu_session_time(&run->session, what->work, &run->device, &row->seconds, err));
    gpu_rate_row(results, row, what->traffic * (double)run->device.size,
                 results->ceilings.device_copy);
    judge_launches(run, row);
    return FSDP_OK;
}

fsdp_status gpu_check_kernel(gpu_results *results, int kernel, fsdp_error *err)
{
    gpu_row *row = gpu_add_row(results, "%s", cases[kernel].name);
    kernel_run *run = fsdp_alloc(1, sizeof *run);
    if (!run)
        return fsdp_fail_memory(err, "a kernel's lists");
    fsdp_status status = prepare(run, results, &cases[kernel], err);
    if (status == FSDP_OK)
        status = run_case(run, results, row, err);
    gpu_end_row(row, status, err);
    release(run);
    fsdp_free(run);
    return FSDP_OK;
}

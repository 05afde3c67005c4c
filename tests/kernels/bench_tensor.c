/*
 * Speed of kernels/train/tensor.h: every job against memcpy over as many bytes, read and written, both in
 * turns so that other load meets both; the ratio is of the best runs. The parameters are those of a block of
 * GPT-2.
 */
#include "tests/kernels/bench_tensor.h"

#include "base/core/mem.h"
#include "kernels/train/tensor.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS = 4, SOURCES = 4, PARAMETERS = 12, MOST_RECTS = 2 * RANKS * PARAMETERS };

/* First dim and elements per row, as PyTorch's Conv1D has them. */
static const int64_t gpt2_block[PARAMETERS][2] = {
    {768, 1}, {768, 1}, {768, 2304}, {2304, 1}, {768, 768},  {768, 1},
    {768, 1}, {768, 1}, {768, 3072}, {3072, 1}, {3072, 768}, {768, 1},
};

typedef struct tensor_job {
    uint8_t *from[SOURCES], *to;
    size_t size; /* bytes of each of them */
    int sources;
    fsdp_dtype dtype;
    size_t rect_count;
    fsdp_rect rects[MOST_RECTS];
    size_t moved; /* bytes read and written */
} tensor_job;

typedef void run_once(tensor_job *job);

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double seconds_of(tensor_job *job, run_once *run)
{
    double start = seconds_now();
    run(job);
    return seconds_now() - start;
}

static void run_memcpy(tensor_job *job)
{
    for (size_t left = job->moved / 2; left > 0;) {
        size_t n = left < job->size ? left : job->size;
        memcpy(job->to, job->from[left / job->size % SOURCES], n);
        left -= n;
    }
}

static void report(const char *what, tensor_job *job, run_once *run, int repeats)
{
    double best = INFINITY, best_memcpy = INFINITY;
    for (int i = 0; i < repeats; i++) {
        best_memcpy = fmin(best_memcpy, seconds_of(job, run_memcpy));
        best = fmin(best, seconds_of(job, run));
    }
    printf("%-41s %7.2f GB/s moved  %5.2f of memcpy\n", what, (double)job->moved / best / 1e9,
           best_memcpy / best);
}

static void run_fold(tensor_job *job)
{
    fsdp_tensor_fold(job->to, (const void *const *)job->from, job->sources, job->dtype,
                     job->size / fsdp_dtype_size(job->dtype),
                     (fsdp_reduction){FSDP_FOLD_SUM, 1, job->sources});
}

static void run_add(tensor_job *job)
{
    fsdp_tensor_add(job->to, job->dtype, job->from[0], job->dtype,
                    job->size / fsdp_dtype_size(job->dtype));
}

static void run_rects(tensor_job *job)
{
    fsdp_rects_copy(job->rects, job->rect_count);
}

static void run_finite(tensor_job *job)
{
    if (!fsdp_tensor_is_finite(job->from[0], job->dtype, job->size / fsdp_dtype_size(job->dtype)))
        job->to[0]++;
}

static void run_norm(tensor_job *job)
{
    size_t count = job->size / fsdp_dtype_size(job->dtype);
    job->to[0] = fsdp_tensor_power_sum(job->from[0], job->dtype, count, 2) > 1;
}

static void run_adamw(tensor_job *job)
{
    static const fsdp_adamw_step step = {
        .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 3, .grad_scale = 1};
    const fsdp_optim_tensors tensors = {.param = job->to,
                                        .param_type = FSDP_F32,
                                        .grad = job->from[0],
                                        .grad_type = FSDP_F32,
                                        .moments = {job->from[1], job->from[2]},
                                        .moment_type = FSDP_F32,
                                        .count = job->size / sizeof(float)};
    fsdp_tensor_adamw(&tensors, &step);
}

static void bench_folds(tensor_job *job, int repeats)
{
    const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_I32};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        for (job->sources = 2; job->sources <= SOURCES; job->sources += 2) {
            char what[64];
            job->dtype = dtypes[i];
            job->moved = ((size_t)job->sources + 1) * job->size;
            snprintf(what, sizeof what, "fold %d %s of %zu KiB", job->sources,
                     fsdp_dtype_name(job->dtype), job->size >> 10);
            report(what, job, run_fold, repeats);
        }
    }
}

static void bench_updates(tensor_job *job, int repeats)
{
    job->dtype = FSDP_F32;
    job->moved = 3 * job->size;
    report("add f32", job, run_add, repeats);
    job->dtype = FSDP_BF16;
    report("add bf16", job, run_add, repeats);
    job->moved = job->size;
    report("is_finite bf16", job, run_finite, repeats);
    job->dtype = FSDP_F32;
    report("is_finite f32", job, run_finite, repeats);
    report("power_sum f32, p = 2", job, run_norm, repeats);
    job->moved = 7 * job->size;
    report("adamw f32", job, run_adamw, repeats);
}

/* A row of ranks: rank r's piece of every parameter lies together, at r * row. */
static void make_rects(tensor_job *job, fsdp_dtype packed_type, fsdp_dtype type, bool packs)
{
    int64_t row = 0, at = 0, whole = 0;
    for (int i = 0; i < PARAMETERS; i++)
        row += gpt2_block[i][0] / RANKS * gpt2_block[i][1];
    for (int i = 0; i < PARAMETERS; i++) {
        int64_t piece = gpt2_block[i][0] / RANKS * gpt2_block[i][1];
        fsdp_rect rect = {.rows = RANKS, .width = piece};
        uint8_t *packed =
            (packs ? job->to : job->from[0]) + (size_t)at * fsdp_dtype_size(packed_type);
        uint8_t *tensor = (packs ? job->from[0] : job->to) + (size_t)whole * fsdp_dtype_size(type);
        rect.to = packs ? packed : tensor;
        rect.from = packs ? tensor : packed;
        rect.to_type = packs ? packed_type : type;
        rect.from_type = packs ? type : packed_type;
        rect.to_pitch = packs ? row : piece;
        rect.from_pitch = packs ? piece : row;
        job->rects[job->rect_count++] = rect;
        at += piece;
        whole += RANKS * piece;
    }
    job->moved = (size_t)whole * (fsdp_dtype_size(type) + fsdp_dtype_size(packed_type));
}

static void bench_rects(tensor_job *job, int repeats)
{
    const fsdp_dtype pairs[][2] = {
        {FSDP_F32, FSDP_F32}, {FSDP_BF16, FSDP_BF16}, {FSDP_F32, FSDP_BF16}, {FSDP_BF16, FSDP_F32}};
    for (size_t i = 0; i < 2 * (sizeof pairs / sizeof *pairs); i++) {
        char what[64];
        job->rect_count = 0;
        make_rects(job, pairs[i / 2][0], pairs[i / 2][1], i % 2 == 0);
        snprintf(what, sizeof what, "%s GPT-2 block, %s %s", i % 2 ? "copy-out" : "chunk-cat",
                 fsdp_dtype_name(pairs[i / 2][1]), fsdp_dtype_name(pairs[i / 2][0]));
        report(what, job, run_rects, repeats);
    }
}

/* Shard(1) of a weight: rows of `width` elements out of rows RANKS times as long. */
static void bench_columns(tensor_job *job, int repeats)
{
    const int64_t widths[] = {2, 16, 64, 256, 1024};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        char what[64];
        int64_t width = widths[i], rows = (int64_t)(job->size / 4) / (RANKS * width);
        job->rect_count = 1;
        job->rects[0] = (fsdp_rect){.to = job->to,
                                    .from = job->from[0],
                                    .to_type = FSDP_BF16,
                                    .from_type = FSDP_F32,
                                    .rows = rows,
                                    .width = width,
                                    .to_pitch = width,
                                    .from_pitch = RANKS * width};
        job->moved = (size_t)(rows * width) * 6;
        snprintf(what, sizeof what, "columns of %ld, f32 to bf16", (long)width);
        report(what, job, run_rects, repeats);
    }
}

void bench_tensor(size_t size, int repeats)
{
    static tensor_job job;
    size = size < (size_t)32 << 20 ? (size_t)32 << 20 : size;
    for (int i = 0; i < SOURCES; i++) {
        job.from[i] = fsdp_alloc_pages(size);
        if (!job.from[i])
            return;
        memset(job.from[i], 0, size);
    }
    job.to = fsdp_alloc_pages(size);
    if (!job.to)
        return;
    memset(job.to, 0, size);
    const size_t sizes[] = {(size_t)64 << 10, (size_t)1 << 20, size};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        job.size = sizes[i];
        bench_folds(&job, job.size < size ? 100 * repeats : repeats);
    }
    bench_updates(&job, repeats);
    bench_rects(&job, repeats);
    bench_columns(&job, repeats);
    fsdp_free(job.to);
    for (int i = 0; i < SOURCES; i++)
        fsdp_free(job.from[i]);
}

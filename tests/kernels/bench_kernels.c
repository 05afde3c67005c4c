/*
 * Speed of the kernels against memcpy on the same bytes, in GB/s of input. Not a test: it asserts
 * nothing and prints the best of a few runs. usage: bench_kernels [MIB] [REPEATS]
 */
#include "base/core/mem.h"
#include "kernels/kernels.h"
#include "tests/kernels/bench_product.h"
#include "tests/kernels/bench_tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct setup {
    const fsdp_kernels *kernels;
    uint8_t *from, *to; /* to has capacity for size and half as much again */
    size_t size;
    int repeats;
    double memcpy_rate; /* bytes per second */
} setup;

typedef struct job {
    size_t element_size;
    fsdp_dtype to_type, from_type;
    int64_t row, gap; /* bytes copied, and bytes between them on both sides */
    fsdp_codec *codec;
    uint8_t *frames;
    size_t frame_size[64];
} job;

typedef void run_once(const setup *bench, job *work);

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double best_seconds(const setup *bench, job *work, run_once *run)
{
    double best = INFINITY;
    for (int i = 0; i < bench->repeats; i++) {
        double start = seconds_now();
        run(bench, work);
        best = fmin(best, seconds_now() - start);
    }
    return best;
}

static void report(const setup *bench, job *work, run_once *run, const char *what, size_t bytes)
{
    double rate = (double)bytes / best_seconds(bench, work, run);
    printf("%-6s %-34s %7.2f GB/s  %5.2f of memcpy\n", bench->kernels->name, what, rate / 1e9,
           rate / bench->memcpy_rate);
}

static void run_memcpy(const setup *bench, job *work)
{
    (void)work;
    memcpy(bench->to, bench->from, bench->size);
}

static void run_copy_box(const setup *bench, job *work)
{
    int64_t stride = work->row + work->gap;
    int64_t strides[2] = {stride, (int64_t)work->element_size};
    int64_t len[2] = {(int64_t)bench->size / stride, work->row / (int64_t)work->element_size};
    fsdp_copy_box(
        &(fsdp_strided_copy){bench->to, strides, bench->from, strides, 2, len, work->element_size});
}

static void run_pack_rows(const setup *bench, job *work)
{
    int64_t stride = work->row + work->gap;
    int64_t from_strides[2] = {stride, (int64_t)work->element_size};
    int64_t to_strides[2] = {work->row, (int64_t)work->element_size};
    int64_t len[2] = {(int64_t)bench->size / stride, work->row / (int64_t)work->element_size};
    fsdp_copy_box(&(fsdp_strided_copy){bench->to, to_strides, bench->from, from_strides, 2, len,
                                       work->element_size});
}

static void run_shuffle(const setup *bench, job *work)
{
    bench->kernels->shuffle(bench->to, bench->from, bench->size, work->element_size);
}

static void run_unshuffle(const setup *bench, job *work)
{
    bench->kernels->unshuffle(bench->to, bench->from, bench->size, work->element_size);
}

static void run_hash(const setup *bench, job *work)
{
    (void)work;
    fsdp_hash hash = bench->kernels->hash(bench->from, bench->size);
    memcpy(bench->to, &hash, sizeof hash);
}

static void run_sha256(const setup *bench, job *work)
{
    (void)work;
    fsdp_sha256 sha;
    fsdp_sha256_init(&sha);
    fsdp_sha256_add(&sha, bench->from, bench->size);
    fsdp_sha256_value(&sha, bench->to);
}

static void run_cast(const setup *bench, job *work)
{
    size_t larger = fsdp_dtype_size(work->to_type) > fsdp_dtype_size(work->from_type)
                        ? fsdp_dtype_size(work->to_type)
                        : fsdp_dtype_size(work->from_type);
    bench->kernels->cast(bench->to, work->to_type, bench->from, work->from_type,
                         bench->size / larger, FSDP_OVERFLOW_INF);
}

static void run_cast_measured(const setup *bench, job *work)
{
    fsdp_cast_tally tally = {0};
    double misfit;
    size_t from = fsdp_dtype_size(work->from_type), to = fsdp_dtype_size(work->to_type);
    fsdp_counted_cast cast = {bench->to,
                              work->to_type,
                              bench->from,
                              work->from_type,
                              bench->size / (from > to ? from : to),
                              FSDP_OVERFLOW_INF};
    (void)fsdp_cast_measured(&cast, &tally, &misfit);
}

enum { BLOCK = 1 << 20 };

static void run_encode(const setup *bench, job *work)
{
    for (size_t i = 0; i < 64 && (i + 1) * BLOCK <= bench->size; i++) {
        size_t room = fsdp_codec_bound(BLOCK);
        fsdp_error err = {0};
        fsdp_coding coding = {bench->from + i * BLOCK, BLOCK, work->frames + i * room, room,
                              work->element_size};
        if (fsdp_codec_encode(work->codec, &coding, &work->frame_size[i], &err) != FSDP_OK)
            exit(fsdp_error_report(&err));
    }
}

static void run_decode(const setup *bench, job *work)
{
    for (size_t i = 0; i < 64 && (i + 1) * BLOCK <= bench->size; i++) {
        fsdp_error err = {0};
        fsdp_coding coding = {work->frames + i * fsdp_codec_bound(BLOCK), work->frame_size[i],
                              bench->to + i * BLOCK, BLOCK, work->element_size};
        if (fsdp_codec_decode(work->codec, &coding, &err) != FSDP_OK)
            exit(fsdp_error_report(&err));
    }
}

/* Normal values of spread 0.02, the usual start of weights. */
static void fill_like_weights(float *values, size_t count)
{
    srand(1);
    for (size_t i = 0; i < count; i++) {
        double a = ((double)rand() + 1) / ((double)RAND_MAX + 2), b = (double)rand() / RAND_MAX;
        values[i] = (float)(0.02 * sqrt(-2 * log(a)) * cos(6.283185307179586 * b));
    }
}

static void bench_copies(const setup *bench)
{
    static const int64_t rows[] = {4, 8, 16, 64, 256, 512, 1024, 4096, 65536};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char what[64];
        job work = {.element_size = 4, .row = rows[i], .gap = rows[i]};
        size_t bytes = bench->size / (size_t)(2 * rows[i]) * (size_t)rows[i];
        snprintf(what, sizeof what, "copy_box rows of %ld, gaps", (long)rows[i]);
        report(bench, &work, run_copy_box, what, bytes);
        snprintf(what, sizeof what, "copy_box rows of %ld, packing", (long)rows[i]);
        report(bench, &work, run_pack_rows, what, bytes);
        work.gap = 0;
        snprintf(what, sizeof what, "copy_box rows of %ld, dense", (long)rows[i]);
        report(bench, &work, run_copy_box, what, bench->size);
    }
}

static void bench_shuffles(const setup *bench)
{
    for (size_t element_size = 2; element_size <= 8; element_size *= 2) {
        char what[64];
        job work = {.element_size = element_size};
        snprintf(what, sizeof what, "shuffle %zu", element_size);
        report(bench, &work, run_shuffle, what, bench->size);
        snprintf(what, sizeof what, "unshuffle %zu", element_size);
        report(bench, &work, run_unshuffle, what, bench->size);
    }
}

static void bench_casts(const setup *bench)
{
    static const fsdp_dtype pairs[][2] = {
        {FSDP_F32, FSDP_BF16}, {FSDP_BF16, FSDP_F32},      {FSDP_F32, FSDP_F16},
        {FSDP_F16, FSDP_F32},  {FSDP_F32, FSDP_F8_E4M3FN}, {FSDP_F8_E4M3FN, FSDP_F32},
        {FSDP_F64, FSDP_F32},  {FSDP_BF16, FSDP_F16},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        char what[64];
        job work = {.from_type = pairs[i][0], .to_type = pairs[i][1]};
        size_t from_size = fsdp_dtype_size(work.from_type), to_size = fsdp_dtype_size(work.to_type);
        size_t count = bench->size / (from_size > to_size ? from_size : to_size);
        snprintf(what, sizeof what, "cast %s to %s", fsdp_dtype_name(work.from_type),
                 fsdp_dtype_name(work.to_type));
        report(bench, &work, run_cast, what, count * from_size);
        if (bench->kernels != fsdp_kernels_get())
            continue; /* it takes the best ones itself */
        strcat(what, ", measured");
        report(bench, &work, run_cast_measured, what, count * from_size);
    }
}

static void bench_codec(const setup *bench, int level)
{
    char what[64];
    job work = {.element_size = 4};
    fsdp_error err = {0};
    size_t blocks = bench->size / BLOCK < 64 ? bench->size / BLOCK : 64, made = 0;
    work.frames = fsdp_alloc(64, fsdp_codec_bound(BLOCK));
    if (!work.frames || fsdp_codec_create(level, &work.codec, &err) != FSDP_OK)
        exit(fsdp_error_report(&err));
    snprintf(what, sizeof what, "encode f32, level %d", level);
    report(bench, &work, run_encode, what, blocks * BLOCK);
    for (size_t i = 0; i < blocks; i++)
        made += work.frame_size[i];
    snprintf(what, sizeof what, "decode f32, level %d, ratio %.3f", level,
             (double)(blocks * BLOCK) / (double)made);
    report(bench, &work, run_decode, what, blocks * BLOCK);
    fsdp_codec_free(work.codec);
    fsdp_free(work.frames);
}

int main(int argc, char **argv)
{
    size_t mib = argc > 1 ? strtoul(argv[1], NULL, 10) : 64;
    setup bench = {.size = mib << 20, .repeats = argc > 2 ? atoi(argv[2]) : 5};
    bench.from = fsdp_alloc_pages(bench.size);
    bench.to = fsdp_alloc_pages(bench.size * 3 / 2);
    if (!bench.from || !bench.to || bench.size == 0)
        return 1;
    fill_like_weights((float *)(void *)bench.from, bench.size / sizeof(float));
    memset(bench.to, 1, bench.size * 3 / 2);

    const fsdp_kernels *tables[8];
    size_t count = fsdp_kernels_all(tables, 8);
    bench.memcpy_rate = (double)bench.size / best_seconds(&bench, NULL, run_memcpy);
    printf("memcpy of %zu MiB: %.2f GB/s\n", mib, bench.memcpy_rate / 1e9);
    for (size_t i = 0; i < count; i++) {
        bench.kernels = tables[i];
        bench_shuffles(&bench);
        bench_casts(&bench);
        report(&bench, NULL, run_hash, "hash", bench.size);
    }
    bench.kernels = fsdp_kernels_get();
    bench_copies(&bench);
    report(&bench, NULL, run_sha256, "sha256", bench.size);
    bench_codec(&bench, FSDP_CODEC_HUFFMAN);
    bench_codec(&bench, 1);
    bench_tensor(bench.size, bench.repeats);
    bench_product(bench.repeats);
    fsdp_free(bench.from);
    fsdp_free(bench.to);
    return 0;
}

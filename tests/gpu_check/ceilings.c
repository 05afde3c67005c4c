/*
 * The ceilings of gpu-check: how fast this device copies its own memory and pinned memory of the
 * host, and how fast it multiplies bf16 matrices. Other rows are compared with those of the same
 * run. See gpu_check.h.
 */
#include "tests/gpu_check/gpu_check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/mem.h"

/* --- the machine ------------------------------------------------------------------------------ */

/* No row: what is missing, or the facts. */
fsdp_status gpu_check_device(gpu_results *results, int argument, fsdp_error *err)
{
    gpu_facts *facts = &results->facts;
    gpu_session session;
    (void)argument;
    if (gpu_session_open(&session, results, err) != FSDP_OK)
        snprintf(facts->missing, sizeof facts->missing, "%s", err->text);
    else
        gpu_read_facts(facts);
    gpu_session_close(&session);
    return FSDP_OK;
}

/* --- copies ----------------------------------------------------------------------------------- */

typedef struct copy_job {
    void *to;
    const void *from;
    size_t size;
} copy_job;

static void copy(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    const copy_job *job = context;
    kernels->copy(stream, job->to, job->from, job->size);
}

/* moved: bytes, both directions where both are the device's. */
static fsdp_status add_copy(gpu_session *session, gpu_results *results, const char *name,
                            copy_job *job, double moved, double *rate_out, fsdp_error *err)
{
    gpu_row *row = gpu_add_row(results, "ceiling/%s", name);
    row->size = (double)job->size;
    fsdp_status status = gpu_session_time(session, copy, job, &row->seconds, err);
    gpu_rate_row(results, row, moved, 0);
    gpu_end_row(row, status, err);
    *rate_out = row->achieved;
    return status;
}

typedef struct copy_blocks {
    void *one, *two, *pinned;
    size_t size;
} copy_blocks;

static fsdp_status measure_copies(gpu_session *session, gpu_results *results, copy_blocks *blocks,
                                  fsdp_error *err)
{
    gpu_ceilings *ceilings = &results->ceilings;
    const size_t size = blocks->size;
    copy_job between = {blocks->two, blocks->one, size},
             there = {blocks->one, blocks->pinned, size},
             back = {blocks->pinned, blocks->one, size};
    memset(blocks->pinned, 1, size); /* pages that were never touched are not memory yet */
    FSDP_TRY(add_copy(session, results, "pinned-to-device", &there, (double)size,
                      &ceilings->to_device, err));
    FSDP_TRY(add_copy(session, results, "device-copy", &between, 2 * (double)size,
                      &ceilings->device_copy, err));
    return add_copy(session, results, "device-to-pinned", &back, (double)size, &ceilings->to_host,
                    err);
}

fsdp_status gpu_check_copies(gpu_results *results, int argument, fsdp_error *err)
{
    gpu_session session;
    copy_blocks blocks = {.size = results->options.bytes};
    (void)argument;
    fsdp_status status = gpu_session_open(&session, results, err);
    if (status == FSDP_OK)
        status = gpu_session_alloc(&session, blocks.size, &blocks.one, err);
    if (status == FSDP_OK)
        status = gpu_session_alloc(&session, blocks.size, &blocks.two, err);
    if (status == FSDP_OK)
        blocks.pinned = session.ops->alloc_staging(session.device, blocks.size);
    if (status == FSDP_OK && !blocks.pinned)
        status = fsdp_fail(err, FSDP_ERR_LIMIT, "the host has no %zu pinned bytes", blocks.size);
    if (status == FSDP_OK)
        status = measure_copies(&session, results, &blocks, err);
    gpu_session_dealloc(&session, blocks.one, blocks.size);
    gpu_session_dealloc(&session, blocks.two, blocks.size);
    if (blocks.pinned)
        session.ops->dealloc_staging(session.device, blocks.pinned, blocks.size);
    gpu_session_close(&session);
    return status;
}

/* --- the bf16 product ------------------------------------------------------------------------- */

enum { WORKSPACE = 32 << 20, PROBES = 256 };

typedef struct product_job {
    gpu_product *product;
    void *blocks[4]; /* of the device: A, B, C, workspace */
    uint16_t *host;  /* A, B and C */
    int64_t n;
    int code;
} product_job;

static void multiply(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    product_job *job = context;
    void *native = stream->device->ops->native(stream);
    (void)kernels;
    int code =
        gpu_product_run(job->product, job->blocks[0], job->blocks[1], job->blocks[2], native);
    job->code = job->code ? job->code : code;
}

static double value_of(uint16_t bf16)
{
    union {
        uint32_t bits;
        float value;
    } both = {.bits = (uint32_t)bf16 << 16};
    return (double)both.value;
}

/* Some elements next to the sum in f64: rounded to bf16, after sums in f32 in any order. */
static fsdp_status compare(const product_job *job, uint64_t seed, fsdp_error *err)
{
    const size_t n = (size_t)job->n, all = n * n;
    uint32_t places[2 * PROBES];
    gpu_fill_bytes(places, sizeof places, seed);
    for (int p = 0; p < PROBES; p++) {
        size_t row = places[2 * p] % n, column = places[2 * p + 1] % n;
        double sum = 0, found = value_of(job->host[2 * all + row + column * n]);
        for (size_t k = 0; k < n; k++)
            sum += value_of(job->host[k + row * n]) * value_of(job->host[all + k + column * n]);
        if (!(fabs(found - sum) <= fabs(sum) * 0x1p-8 + 1e-5 * sqrt((double)n)))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "element %zu, %zu is %g, and %g is right", row,
                             column, found, sum);
    }
    return FSDP_OK;
}

static fsdp_status measure_product(gpu_session *session, gpu_results *results, product_job *job,
                                   gpu_row *row, fsdp_error *err)
{
    const size_t all = (size_t)job->n * (size_t)job->n, size = all * sizeof *job->host;
    for (int i = 0; i < 2; i++) {
        uint16_t *matrix = job->host + (size_t)i * all;
        gpu_fill_bf16(matrix, all, results->options.seed + (uint64_t)i);
        session->kernels->copy(session->stream, job->blocks[i], matrix, size);
    }
    FSDP_TRY(gpu_session_time(session, multiply, job, &row->seconds, err));
    if (job->code != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "cublasLtMatmul: error %d", job->code);
    session->kernels->copy(session->stream, job->host + 2 * all, job->blocks[2], size);
    FSDP_TRY(gpu_session_sync(session, err));
    gpu_rate_row(results, row, row->size, 0);
    snprintf(row->note, sizeof row->note, "cuBLASLt %s", results->facts.cublaslt);
    return compare(job, results->options.seed, err);
}

static fsdp_status run_product(gpu_session *session, gpu_results *results, product_job *job,
                               gpu_row *row, fsdp_error *err)
{
    const size_t size = (size_t)job->n * (size_t)job->n * sizeof *job->host;
    for (int i = 0; i < 4; i++)
        FSDP_TRY(gpu_session_alloc(session, i < 3 ? size : WORKSPACE, &job->blocks[i], err));
    job->host = fsdp_alloc(3, size);
    if (!job->host)
        return fsdp_fail_memory(err, "matrices");
    FSDP_TRY(gpu_product_open(job->n, job->blocks[3], WORKSPACE, results->facts.cublaslt,
                              &job->product, err));
    return measure_product(session, results, job, row, err);
}

fsdp_status gpu_check_product(gpu_results *results, int argument, fsdp_error *err)
{
    const size_t bytes = results->options.bytes;
    product_job job = {.n = bytes >= (size_t)1 << 30 ? 8192 : bytes >= 1 << 27 ? 4096 : 64};
    gpu_row *row = gpu_add_row(results, "ceiling/product-bf16");
    gpu_session session;
    (void)argument;
    row->size = 2 * pow((double)job.n, 3);
    fsdp_status status = gpu_session_open(&session, results, err);
    if (status == FSDP_OK)
        status = run_product(&session, results, &job, row, err);
    if (status == FSDP_ERR_NOT_FOUND)
        gpu_skip_row(row, "%s", err->text);
    else
        gpu_end_row(row, status, err);
    if (session.stream && status == FSDP_OK)
        status = gpu_session_sync(&session, err);
    gpu_product_close(job.product);
    fsdp_free(job.host);
    for (int i = 0; i < 4; i++)
        gpu_session_dealloc(&session, job.blocks[i], 0);
    gpu_session_close(&session);
    return FSDP_OK;
}

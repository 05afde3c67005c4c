/*
 * Speed of kernels/linear.h: the three products of a layer of 1000 x 1000, in billions of multiplications and
 * additions per second of processor time, the best of several runs.
 */
#include "tests/kernels/bench_linear.h"

#include "base/core/mem.h"
#include "kernels/linear.h"

#include <stdio.h>
#include <time.h>

enum { WIDTH = 1000, MOST_ROWS = 256, RUNS = 5 };

typedef struct linear_job {
    fsdp_linear_scratch *scratch;
    fsdp_linear_size size;
    float *x, *y, *weight, *dweight;
} linear_job;

typedef fsdp_status product(const linear_job *job);

static fsdp_status forward(const linear_job *job)
{
    return fsdp_linear_forward(job->scratch, job->size, job->x, job->weight, job->y, NULL);
}

static fsdp_status grad_input(const linear_job *job)
{
    fsdp_linear_grad_input(job->scratch, job->size, job->y, job->weight, job->x);
    return FSDP_OK;
}

static fsdp_status grad_weight(const linear_job *job)
{
    fsdp_linear_grad_weight(job->scratch, job->size, job->x, job->y, job->dweight);
    return FSDP_OK;
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void report(const linear_job *job, const char *what, product *run, int repeats)
{
    double best = 1e9;
    for (int i = 0; i < RUNS * repeats; i++) {
        double start = seconds_now();
        if (run(job) != FSDP_OK)
            return;
        double seconds = seconds_now() - start;
        best = seconds < best ? seconds : best;
    }
    printf("%-12s %3ld rows: %6.1f GFLOPS\n", what, (long)job->size.rows,
           2e-9 * (double)job->size.rows * WIDTH * WIDTH / best);
}

void bench_linear(int repeats)
{
    static const int64_t rows[] = {32, MOST_ROWS};
    linear_job job = {.x = fsdp_alloc(MOST_ROWS * WIDTH, sizeof(float)),
                      .y = fsdp_alloc(MOST_ROWS * WIDTH, sizeof(float)),
                      .weight = fsdp_alloc((size_t)WIDTH * WIDTH, sizeof(float)),
                      .dweight = fsdp_alloc((size_t)WIDTH * WIDTH, sizeof(float))};
    if (job.x && job.y && job.weight && job.dweight &&
        fsdp_linear_scratch_create(&job.scratch, NULL) == FSDP_OK)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            job.size = (fsdp_linear_size){rows[i], WIDTH, WIDTH};
            report(&job, "forward", forward, repeats);
            report(&job, "grad_input", grad_input, repeats);
            report(&job, "grad_weight", grad_weight, repeats);
        }
    fsdp_linear_scratch_free(job.scratch);
    fsdp_free(job.x);
    fsdp_free(job.y);
    fsdp_free(job.weight);
    fsdp_free(job.dweight);
}

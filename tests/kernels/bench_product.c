/*
 * Speed of the products of kernels/nn.h: those of a linear layer of 1000 x 1000, in billions of
 * multiplications and additions per second of processor time, the best of several runs.
 */
#include "tests/kernels/bench_product.h"

#include "base/core/mem.h"
#include "kernels/nn.h"

#include <stdio.h>
#include <time.h>

enum { WIDTH = 1000, MOST_ROWS = 256, RUNS = 5 };

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void report(fsdp_nn *nn, const char *what, const fsdp_nn_product *call, int repeats)
{
    double best = 1e9;
    for (int i = 0; i < RUNS * repeats; i++) {
        double start = seconds_now();
        nn->ops->product(nn, call);
        double seconds = seconds_now() - start;
        best = seconds < best ? seconds : best;
    }
    printf("%-12s %3ld rows: %6.1f GFLOPS\n", what,
           (long)(call->a_is_turned ? call->inner : call->rows),
           2e-9 * (double)call->rows * (double)call->columns * (double)call->inner / best);
}

static void report_layer(fsdp_nn *nn, float *x, float *y, float *weight, int64_t rows, int repeats)
{
    fsdp_nn_product call = {.rows = rows, .columns = WIDTH, .inner = WIDTH};
    call.out = y;
    call.a = x;
    call.b = weight;
    call.b_is_turned = true;
    report(nn, "forward", &call, repeats);
    call.out = x;
    call.a = y;
    call.b_is_turned = false;
    report(nn, "grad_input", &call, repeats);
    call.out = weight + WIDTH * WIDTH;
    call.b = x;
    call.rows = WIDTH;
    call.inner = rows;
    call.a_is_turned = true;
    report(nn, "grad_weight", &call, repeats);
}

void bench_product(int repeats)
{
    float *x = fsdp_alloc(MOST_ROWS * WIDTH, sizeof *x),
          *y = fsdp_alloc(MOST_ROWS * WIDTH, sizeof *y);
    float *weights = fsdp_alloc((size_t)2 * WIDTH * WIDTH, sizeof *weights);
    fsdp_nn *nn = NULL;
    if (x && y && weights && fsdp_nn_open_cpu(1, &nn, NULL) == FSDP_OK) {
        report_layer(nn, x, y, weights, 32, repeats);
        report_layer(nn, x, y, weights, MOST_ROWS, repeats);
        nn->ops->close(nn);
    }
    fsdp_free(x);
    fsdp_free(y);
    fsdp_free(weights);
}

/*
 * Products of OpenBLAS (kernels/nn/nn_openblas.c), which this processor may do as well without: they are
 * asked for by FSDP_PRODUCTS. Every test is a process of its own, so each one may choose again.
 */
#include "kernels/nn/nn_cpu.h"
#include "tests/unit/kernels/nn/nn_values.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { ROWS = 37, COLUMNS = 700, INNER = 130 }; /* columns of three pieces */

/* NULL: it is not installed, which CI does not accept. */
static fsdp_nn *open_blas(int threads)
{
    fsdp_nn *nn = NULL;
    fsdp_error err = {0};
    setenv("FSDP_PRODUCTS", "openblas", 1);
    fsdp_status status = fsdp_nn_open_cpu(threads, &nn, &err);
    if (status == FSDP_ERR_NOT_FOUND && !getenv("CI"))
        cr_skip_test("%s", err.text);
    cr_assert_eq(status, FSDP_OK, "%s", err.text);
    return nn;
}

static fsdp_nn_product describe(int kind, int64_t rows, int64_t columns, const float *bias)
{
    return (fsdp_nn_product){.rows = rows,
                             .columns = columns,
                             .inner = INNER,
                             .a_is_turned = kind & 1,
                             .b_is_turned = kind & 2,
                             .adds = kind / 4 == 1,
                             .bias = kind / 4 == 2 ? bias : NULL};
}

static double expected_element(const fsdp_nn_product *call, int64_t i, int64_t j, float before)
{
    double sum = call->adds ? (double)before : call->bias ? (double)call->bias[j] : 0;
    for (int64_t p = 0; p < call->inner; p++)
        sum += (double)call->a[call->a_is_turned ? p * call->rows + i : i * call->inner + p] *
               (double)call->b[call->b_is_turned ? j * call->inner + p : p * call->columns + j];
    return sum;
}

static void check_product(fsdp_nn *nn, fsdp_nn_product call)
{
    const int64_t count = call.rows * call.columns;
    float *a = values("a", call.rows * INNER), *b = values("b", INNER * call.columns);
    float *before = values("out", count), *out = values("out", count);
    call.a = a;
    call.b = b;
    call.out = out;
    nn->ops->product(nn, &call);
    for (int64_t e = 0; e < count; e++) {
        double right = expected_element(&call, e / call.columns, e % call.columns, before[e]);
        cr_assert(fabs((double)out[e] - right) < 1e-4, "element %lld: %g instead of %g",
                  (long long)e, (double)out[e], right);
    }
    free(a);
    free(b);
    free(before);
    free(out);
}

Test(nn_openblas, makes_every_form_of_a_product)
{
    fsdp_nn *nn = open_blas(2);
    float *bias = values("bias", COLUMNS);
    cr_assert(strncmp(fsdp_nn_cpu_products(), "OpenBLAS ", 9) == 0, "%s", fsdp_nn_cpu_products());
    for (int kind = 0; kind < 12; kind++) {
        check_product(nn, describe(kind, ROWS, COLUMNS, bias));
        check_product(nn, describe(kind, COLUMNS, ROWS, bias));
        check_product(nn, describe(kind, 1, 1, bias));
    }
    free(bias);
    finish_nn(nn);
}

/* Bytes of a product on so many threads; the caller frees them. */
static float *product_of(int threads, int64_t rows, int64_t columns)
{
    fsdp_nn *nn = open_blas(threads);
    float *a = values("a", rows * INNER), *b = values("b", INNER * columns);
    float *out = values("out", rows * columns);
    fsdp_nn_product call = describe(2, rows, columns, NULL);
    call.a = a;
    call.b = b;
    call.out = out;
    nn->ops->product(nn, &call);
    free(a);
    free(b);
    finish_nn(nn);
    return out;
}

Test(nn_openblas, bits_do_not_depend_on_the_number_of_threads)
{
    static const int64_t shapes[][2] = {{ROWS, COLUMNS}, {COLUMNS, ROWS}};
    for (int i = 0; i < 2; i++) {
        float *one = product_of(1, shapes[i][0], shapes[i][1]);
        for (int threads = 2; threads < 4; threads++) {
            float *more = product_of(threads, shapes[i][0], shapes[i][1]);
            cr_assert_arr_eq(one, more, ROWS * COLUMNS * sizeof *one, "%d threads", threads);
            free(more);
        }
        free(one);
    }
}

/* --- pieces, of an OpenBLAS that only notes them ------------------------------------------------------- */

typedef struct noted_piece {
    int rows, columns;
} noted_piece;

static struct {
    noted_piece pieces[8]; /* by their place in the result */
    int count;
    pthread_mutex_t lock;
} noted = {.lock = PTHREAD_MUTEX_INITIALIZER};
static float noted_out[ROWS * COLUMNS];

static void note_piece(int order, int a_is_turned, int b_is_turned, int rows, int columns,
                       int inner, float alpha, const float *a, int a_columns, const float *b,
                       int b_columns, float beta, float *c, int c_columns)
{
    (void)order, (void)a_is_turned, (void)b_is_turned, (void)inner, (void)alpha, (void)a;
    (void)a_columns, (void)b, (void)b_columns, (void)beta;
    const int64_t at = c - noted_out, piece = c_columns == COLUMNS ? at : at / c_columns;
    cr_assert(piece % 256 == 0 && piece / 256 < 3, "a piece begins at %lld", (long long)piece);
    pthread_mutex_lock(&noted.lock);
    noted.pieces[piece / 256] = (noted_piece){rows, columns};
    noted.count++;
    pthread_mutex_unlock(&noted.lock);
}

/* Any number of threads makes the same calls, so that the bits of this OpenBLAS do not matter. */
Test(nn_openblas, pieces_do_not_depend_on_the_number_of_threads)
{
    static const fsdp_nn_openblas noting = {.sgemm = note_piece};
    for (int threads = 1; threads < 6; threads++)
        for (int is_high = 0; is_high < 2; is_high++) {
            const int64_t rows = is_high ? COLUMNS : ROWS, columns = is_high ? ROWS : COLUMNS;
            float *a = values("a", rows * INNER), *b = values("b", INNER * columns);
            fsdp_nn_product call = describe(0, rows, columns, NULL);
            fsdp_nn *nn = open_nn(threads);
            ((fsdp_nn_cpu *)nn)->blas = &noting;
            call.a = a;
            call.b = b;
            call.out = noted_out;
            noted.count = 0;
            nn->ops->product(nn, &call);
            cr_assert_eq(noted.count, 3, "%d pieces on %d threads", noted.count, threads);
            for (int i = 0; i < 3; i++) {
                const int long_side = i < 2 ? 256 : COLUMNS - 2 * 256;
                cr_assert_eq(noted.pieces[i].rows, is_high ? long_side : ROWS);
                cr_assert_eq(noted.pieces[i].columns, is_high ? ROWS : long_side);
            }
            free(a);
            free(b);
            finish_nn(nn);
        }
}

/* 'ulimit -v', in so many MiB more than are mapped now. */
static void limit_address_space(int more_mib)
{
    struct rlimit limit;
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    cr_assert(file && fscanf(file, "%ld", &pages) == 1);
    fclose(file);
    cr_assert_eq(getrlimit(RLIMIT_AS, &limit), 0);
    limit.rlim_cur = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + ((rlim_t)more_mib << 20);
    cr_assert_eq(setrlimit(RLIMIT_AS, &limit), 0);
}

/* OpenBLAS would map a buffer for each thread in its first call, and try that for ever. */
Test(nn_openblas, is_not_used_without_room_for_its_buffers, .timeout = 60)
{
    fsdp_nn *nn = NULL;
    fsdp_error err = {0};
    finish_nn(open_blas(1)); /* its code and one buffer are there */
    limit_address_space(350);
    cr_assert_eq(fsdp_nn_open_cpu(4, &nn, &err), FSDP_ERR_LIMIT);
    cr_assert(strstr(err.text, "for each of 4 threads; raise 'ulimit -v'"), "%s", err.text);
    cr_assert_null(nn);
    nn = open_blas(2);
    check_product(nn, describe(0, ROWS, COLUMNS, NULL));
    finish_nn(nn);
}

Test(nn_openblas, is_not_opened_without_room_for_it)
{
    fsdp_nn *nn = NULL;
    fsdp_error err = {0};
    setenv("FSDP_PRODUCTS", "openblas", 1);
    limit_address_space(150);
    cr_assert_eq(fsdp_nn_open_cpu(1, &nn, &err), FSDP_ERR_LIMIT);
    cr_assert(strstr(err.text, "FSDP_PRODUCTS=own"), "%s", err.text);
}

/* The products here take its place on processors where it is the default. */
Test(nn_openblas, gives_way_to_the_own_products_where_nobody_asked_for_it, .timeout = 60)
{
    fsdp_nn *nn = NULL;
    fsdp_error err = {0};
    setenv("FSDP_PRODUCTS", "auto", 1);
    (void)fsdp_nn_cpu_products();
    limit_address_space(150);
    cr_assert_eq(fsdp_nn_open_cpu(2, &nn, &err), FSDP_OK, "%s", err.text);
    cr_assert_str_eq(fsdp_nn_cpu_products(), fsdp_nn_cpu_variant());
    check_product(nn, describe(0, ROWS, COLUMNS, NULL));
    finish_nn(nn);
}

Test(nn_openblas, is_configured_without_a_change_that_other_programs_inherit)
{
    unsetenv("OPENBLAS_CORETYPE");
    setenv("OPENBLAS_NUM_THREADS", "3", 1);
    finish_nn(open_blas(1));
    cr_assert_null(getenv("OPENBLAS_CORETYPE"));
    cr_assert_str_eq(getenv("OPENBLAS_NUM_THREADS"), "3");
}

Test(nn_openblas, is_left_alone_when_the_own_products_are_asked_for)
{
    fsdp_nn *nn = NULL;
    fsdp_error err = {0};
    setenv("FSDP_PRODUCTS", "own", 1);
    cr_assert_eq(fsdp_nn_open_cpu(1, &nn, &err), FSDP_OK);
    cr_assert_str_eq(fsdp_nn_cpu_products(), fsdp_nn_cpu_variant());
    finish_nn(nn);
}

Test(nn_openblas, an_unknown_name_is_refused)
{
    fsdp_nn *nn = NULL;
    fsdp_error err = {0};
    setenv("FSDP_PRODUCTS", "mkl", 1);
    cr_assert_eq(fsdp_nn_open_cpu(1, &nn, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "FSDP_PRODUCTS is 'mkl'"), "%s", err.text);
    cr_assert_null(nn);
}

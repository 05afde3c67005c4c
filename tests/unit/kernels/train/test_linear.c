/*
 * kernels/linear.h against chains of fused multiply-adds, element by element, bit for bit. Registered twice,
 * the second time with FSDP_KERNELS=c, so that all variants agree.
 */
#include "kernels/linear.h"
#include "base/core/mem.h"
#include "kernels/matrix.h"
#include <fsdp/fsdp.h>

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 0x5a, GUARDED = 32 };

static fsdp_linear_scratch *scratch;

static void begin(void)
{
    cr_assert_eq(fsdp_linear_scratch_create(&scratch, NULL), FSDP_OK);
}

static void end(void)
{
    fsdp_linear_scratch_free(scratch);
}

TestSuite(linear, .init = begin, .fini = end);

/* --- values --- */

/* Numbers between -1 and 1, at an address that is not one of vectors. */
static float *make(const char *name, int64_t count)
{
    float *data = malloc(((size_t)count + 1 + GUARDED) * sizeof *data);
    cr_assert(data);
    for (int64_t i = 0; i < count; i++)
        data[1 + i] = (float)fsdp_uniform(3, name, (uint64_t)i);
    memset(data + 1 + count, GUARD, GUARDED * sizeof *data);
    return data + 1;
}

static void drop(float *data, int64_t count)
{
    const unsigned char *behind = (const unsigned char *)(data + count);
    for (size_t i = 0; i < GUARDED * sizeof *data; i++)
        cr_assert_eq(behind[i], GUARD, "written behind the end");
    free(data - 1);
}

/* a[0] b[0] + a[step] b[step] + ... as the header says */
static float chain(const float *a, int64_t a_step, const float *b, int64_t b_step, int64_t count)
{
    float sum = 0;
    for (int64_t p = 0; p < count; p++)
        sum = fmaf(a[p * a_step], b[p * b_step], sum);
    return sum;
}

static void check_forward(fsdp_linear_size size, const float *x, const float *w, const float *bias)
{
    float *y = make("y", size.rows * size.out);
    cr_assert_eq(fsdp_linear_forward(scratch, size, x, w, y, NULL), FSDP_OK);
    cr_assert_eq(y[0], chain(w, 1, x, 1, size.in));
    fsdp_linear_add_bias(y, bias, size.rows, size.out);
    for (int64_t r = 0; r < size.rows; r++)
        for (int64_t o = 0; o < size.out; o++)
            cr_assert_eq(y[r * size.out + o],
                         chain(w + o * size.in, 1, x + r * size.in, 1, size.in) + bias[o]);
    drop(y, size.rows * size.out);
}

static void check_backward(fsdp_linear_size size, const float *x, const float *w, const float *dy)
{
    float *dx = make("dx", size.rows * size.in), *dw = make("dw", size.out * size.in);
    float *db = make("db", size.out);
    fsdp_linear_grad_input(scratch, size, dy, w, dx);
    fsdp_linear_grad_weight(scratch, size, x, dy, dw);
    fsdp_linear_grad_bias(db, dy, size.rows, size.out);
    for (int64_t r = 0; r < size.rows; r++)
        for (int64_t k = 0; k < size.in; k++)
            cr_assert_eq(dx[r * size.in + k],
                         chain(dy + r * size.out, 1, w + k, size.in, size.out));
    for (int64_t o = 0; o < size.out; o++) {
        float sum = 0;
        for (int64_t r = 0; r < size.rows; r++)
            sum += dy[r * size.out + o];
        cr_assert_eq(db[o], sum);
        for (int64_t k = 0; k < size.in; k++)
            cr_assert_eq(dw[o * size.in + k], chain(dy + o, size.out, x + k, size.in, size.rows));
    }
    drop(dx, size.rows * size.in);
    drop(dw, size.out * size.in);
    drop(db, size.out);
}

static void check_size(int64_t rows, int64_t in, int64_t out)
{
    const fsdp_linear_size size = {rows, in, out};
    float *x = make("x", rows * in), *w = make("w", out * in), *bias = make("b", out);
    float *dy = make("dy", rows * out);
    check_forward(size, x, w, bias);
    check_backward(size, x, w, dy);
    drop(x, rows * in);
    drop(w, out * in);
    drop(bias, out);
    drop(dy, rows * out);
}

Test(linear, every_element_is_one_chain_whatever_the_size)
{
    static const int64_t odd[] = {1, 2, 3, 5, 7, 8, 15, 16, 17, 33};
    for (size_t r = 0; r < sizeof odd / sizeof *odd; r++)
        for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
            for (size_t o = 0; o < sizeof odd / sizeof *odd; o++)
                check_size(odd[r], odd[i], odd[o]);
}

Test(linear, blocks_do_not_show)
{
    check_size(FSDP_MATRIX_COLUMNS + 3, FSDP_MATRIX_INNER + 5, FSDP_MATRIX_ROWS + 1);
    check_size(4, 2 * FSDP_MATRIX_INNER + 1, FSDP_MATRIX_ROWS);
    check_size(2, FSDP_MATRIX_COLUMNS, 2 * FSDP_MATRIX_INNER);
}

/* --- between layers --- */

Test(linear, relu_keeps_what_is_positive_and_its_gradient)
{
    float x[5] = {-1, -0.0f, 0, 2, 3e38f}, dx[5] = {1, 2, 3, 4, 5};
    const float kept[5] = {0, 0, 0, 2, 3e38f}, passed[5] = {0, 0, 0, 4, 5};
    fsdp_relu(x, 5);
    fsdp_relu_grad(dx, x, 5);
    cr_assert_arr_eq(x, kept, sizeof kept);
    cr_assert_arr_eq(dx, passed, sizeof passed);
}

/* A network that went wrong must not look well. */
Test(linear, relu_keeps_nan_and_its_gradient)
{
    float x[2] = {NAN, 1}, dx[2] = {2, NAN};
    fsdp_relu(x, 2);
    fsdp_relu_grad(dx, x, 2);
    cr_assert(isnan(x[0]) && x[1] == 1);
    cr_assert(dx[0] == 2 && isnan(dx[1]));
}

/* --- failures --- */

Test(linear, a_lack_of_memory_is_an_error)
{
    fsdp_linear_scratch *none = NULL;
    fsdp_error err = {0};
    float one = 1, result;
    for (int64_t n = 0; n < 3; n++) {
        fsdp_mem_fail_after(n, false);
        cr_assert_eq(fsdp_linear_scratch_create(&none, &err), FSDP_ERR_LIMIT);
        cr_assert_null(none);
    }
    fsdp_mem_fail_after(0, false);
    cr_assert_eq(
        fsdp_linear_forward(scratch, (fsdp_linear_size){1, 1, 1}, &one, &one, &result, &err),
        FSDP_ERR_LIMIT);
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(
        fsdp_linear_forward(scratch, (fsdp_linear_size){1, 1, 1}, &one, &one, &result, &err),
        FSDP_OK);
}

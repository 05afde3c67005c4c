/* A linear layer in f32, on products of matrices (kernels/train/matrix.c). See linear.h. */
#include "kernels/matrix.h"
#include "kernels/linear.h"

#include "base/core/mem.h"

struct fsdp_linear_scratch {
    fsdp_matrix_scratch blocks;
    float *turned; /* a transposed result */
    int64_t turned_room;
};

/* --- memory ----------------------------------------------------------------------------------- */

void fsdp_linear_scratch_free(fsdp_linear_scratch *scratch)
{
    if (!scratch)
        return;
    fsdp_free(scratch->blocks.a);
    fsdp_free(scratch->blocks.b);
    fsdp_free(scratch->turned);
    fsdp_free(scratch);
}

fsdp_status fsdp_linear_scratch_create(fsdp_linear_scratch **scratch_out, fsdp_error *err)
{
    fsdp_linear_scratch *scratch = fsdp_alloc(1, sizeof *scratch);
    if (!scratch)
        return fsdp_fail_memory(err, "products of matrices");
    scratch->blocks.a = fsdp_alloc_pages(FSDP_MATRIX_A_BYTES);
    scratch->blocks.b = fsdp_alloc_pages(FSDP_MATRIX_B_BYTES);
    if (!scratch->blocks.a || !scratch->blocks.b) {
        fsdp_linear_scratch_free(scratch);
        return fsdp_fail_memory(err, "products of matrices");
    }
    *scratch_out = scratch;
    return FSDP_OK;
}

static fsdp_status need_turned(fsdp_linear_scratch *scratch, int64_t rows, int64_t columns,
                               fsdp_error *err)
{
    int64_t count;
    if (fsdp_mul_overflow(rows, columns, &count))
        return fsdp_fail_memory(err, "a layer's result");
    if (count <= scratch->turned_room)
        return FSDP_OK;
    fsdp_free(scratch->turned);
    scratch->turned_room = 0;
    scratch->turned = (uint64_t)count > SIZE_MAX / sizeof(float)
                          ? NULL
                          : fsdp_alloc_pages((size_t)count * sizeof(float));
    if (!scratch->turned)
        return fsdp_fail_memory(err, "a layer's result");
    scratch->turned_room = count;
    return FSDP_OK;
}

/* --- products --------------------------------------------------------------------------------- */

static fsdp_matrix rows_of(const float *data, int64_t columns)
{
    return (fsdp_matrix){data, columns, 1};
}

static fsdp_matrix turn(fsdp_matrix matrix)
{
    return (fsdp_matrix){matrix.data, matrix.column, matrix.row};
}

void fsdp_linear_add_bias(float *y, const float *bias, int64_t rows, int64_t out)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++)
            y[r * out + o] += bias[o];
}

/* y^T = W x^T: the weight, the larger one, is read where it lies. */
fsdp_status fsdp_linear_forward(fsdp_linear_scratch *scratch, fsdp_linear_size size, const float *x,
                                const float *weight, float *y, fsdp_error *err)
{
    FSDP_TRY(need_turned(scratch, size.out, size.rows, err));
    fsdp_matrix_product product = {.c = scratch->turned,
                                   .c_row = size.rows,
                                   .a = rows_of(weight, size.in),
                                   .b = turn(rows_of(x, size.in)),
                                   .m = size.out,
                                   .n = size.rows,
                                   .k = size.in};
    fsdp_matrix_multiply(&product, &scratch->blocks);
    fsdp_matrix_transpose(y, size.out, scratch->turned, size.rows, size.out, size.rows);
    return FSDP_OK;
}

void fsdp_linear_grad_input(fsdp_linear_scratch *scratch, fsdp_linear_size size, const float *dy,
                            const float *weight, float *dx)
{
    fsdp_matrix_product product = {.c = dx,
                                   .c_row = size.in,
                                   .a = rows_of(dy, size.out),
                                   .b = rows_of(weight, size.in),
                                   .m = size.rows,
                                   .n = size.in,
                                   .k = size.out};
    fsdp_matrix_multiply(&product, &scratch->blocks);
}

void fsdp_linear_grad_weight(fsdp_linear_scratch *scratch, fsdp_linear_size size, const float *x,
                             const float *dy, float *dweight)
{
    fsdp_matrix_product product = {.c = dweight,
                                   .c_row = size.in,
                                   .a = turn(rows_of(dy, size.out)),
                                   .b = rows_of(x, size.in),
                                   .m = size.out,
                                   .n = size.in,
                                   .k = size.rows};
    fsdp_matrix_multiply(&product, &scratch->blocks);
}

void fsdp_linear_grad_bias(float *dbias, const float *dy, int64_t rows, int64_t out)
{
    for (int64_t o = 0; o < out; o++)
        dbias[o] = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++)
            dbias[o] += dy[r * out + o];
}

/* --- between layers --------------------------------------------------------------------------- */

void fsdp_relu(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = x[i] <= 0 ? 0 : x[i]; /* NaN stays */
}

void fsdp_relu_grad(float *dx, const float *y, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        dx[i] = y[i] <= 0 ? 0 : dx[i];
}

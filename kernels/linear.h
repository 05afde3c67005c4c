/*
 * The mathematics of a linear layer, y = x W^T + b, forward and backward, in f32; kernels/train/linear.c.
 *
 * Matrices are row-major and dense: x is rows x in, the weight out x in, y rows x out. Every element of a
 * product is one chain of fused multiply-adds in the order of the inner dimension, begun with zero: its bits
 * depend on no block size, no number of rows, no processor. The bias is added at the end.
 */
#ifndef FSDP_LINEAR_H
#define FSDP_LINEAR_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Working memory of products; it grows as they need it. One thread at a time. */
typedef struct fsdp_linear_scratch fsdp_linear_scratch;
FSDP_CHECKED fsdp_status fsdp_linear_scratch_create(fsdp_linear_scratch **scratch_out,
                                                             fsdp_error *err);
void fsdp_linear_scratch_free(fsdp_linear_scratch *scratch);  /* accepts NULL */

typedef struct fsdp_linear_size { int64_t rows, in, out; } fsdp_linear_size;

/* y = x W^T */
FSDP_CHECKED fsdp_status fsdp_linear_forward(fsdp_linear_scratch *scratch, fsdp_linear_size size,
                                             const float *x, const float *weight, float *y, fsdp_error *err);
void fsdp_linear_add_bias(float *y, const float *bias, int64_t rows, int64_t out);
/* dx = dy W */
void fsdp_linear_grad_input(fsdp_linear_scratch *scratch, fsdp_linear_size size, const float *dy,
                            const float *weight, float *dx);
/* dweight = dy^T x */
void fsdp_linear_grad_weight(fsdp_linear_scratch *scratch, fsdp_linear_size size, const float *x,
                             const float *dy, float *dweight);
/* dbias: the sums of dy's columns, in the order of rows. */
void fsdp_linear_grad_bias(float *dbias, const float *dy, int64_t rows, int64_t out);

/* fsdp_relu: x = max(x, 0) in place. fsdp_relu_grad: dx = 0 where its result y is 0. */
void fsdp_relu(float *x, int64_t count);
void fsdp_relu_grad(float *dx, const float *y, int64_t count);

#ifdef __cplusplus
}
#endif
#endif

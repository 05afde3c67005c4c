/*
 * The inner loops of kernels/nn, over rows of f32. kernels/nn/row_loops.h defines them; it is compiled once
 * per processor, and dispatch.c chooses. Additions and products are rounded one by one, none is fused, so
 * that plain C, which has vectors too, gives the same bits as AVX2. Only the sign and payload of NaN may
 * differ.
 *
 * Sums over a row: element i goes to lane i % FSDP_NN_LANES in f64, then halves of the lanes are added.
 */
#ifndef FSDP_NN_LOOPS_H
#define FSDP_NN_LOOPS_H

#include "kernels/nn.h"

enum { FSDP_NN_LANES = 16 };

typedef struct fsdp_nn_loops {
    const char *name;
    void (*add)(float *to, const float *from, int64_t count);          /* to += from */
    void (*sum)(float *to, const float *a, const float *b, int64_t count);     /* to = a + b */
    void (*multiply)(float *x, int64_t count, float factor);
    double (*dot)(const float *a, const float *b, int64_t count);
    void (*norm)(const fsdp_nn_norm *call, int64_t row);
    void (*norm_grad)(const fsdp_nn_norm_grad *call, int64_t row);     /* dx of a row */
    /* dweight and dbias of the columns [first, last): the rows in their order */
    void (*norm_grad_columns)(const fsdp_nn_norm_grad *call, int64_t first, int64_t last);
    void (*activate)(const fsdp_nn_activation *call, int64_t first, int64_t last);
    void (*activate_grad)(const fsdp_nn_activation_grad *call, int64_t first, int64_t last);
    /* One head: sin is that of the angle, or with backward of the opposite one. */
    void (*rotate)(float *x, const float *cos, const float *sin, int64_t half, bool backward);
    float (*largest)(const float *x, int64_t count);                   /* count >= 1 */
    /* to = exp(x * factor - offset), and their sum. to may be x, or NULL: not stored. */
    double (*exponentials)(float *to, const float *x, int64_t count, float factor, float offset);
    /* A row of attention: scores becomes p = exp(scores * factor - log_sum), dp p (dp - delta) factor. */
    void (*attention_grad)(float *scores, float *dp, int64_t count, float factor, float log_sum, float delta);
} fsdp_nn_loops;

extern const fsdp_nn_loops fsdp_nn_loops_c;
#if defined(__x86_64__)
extern const fsdp_nn_loops fsdp_nn_loops_avx2;
#endif
/* The best for this processor; FSDP_KERNELS=c forces the plain one. */
const fsdp_nn_loops *fsdp_nn_loops_get(void);

#endif

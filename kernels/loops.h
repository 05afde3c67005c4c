/*
 * The inner loops of kernels/train/tensor.h, over arrays of one type, f32 or f64. kernels/train/real_loops.h
 * defines them; it is compiled once per type and processor, and dispatch.c chooses. The callers,
 * kernels/train/tensor_*.c, cut tensors into blocks and cast other types to these two and back. So pointers
 * are aligned and counts small; an output array is either one of the inputs or overlaps none of them.
 * NaN results are always the positive quiet NaN without payload: which of two NaNs an addition keeps would
 * depend on the compiler.
 */
#ifndef FSDP_LOOPS_H
#define FSDP_LOOPS_H

#include <stdbool.h>
#include <stddef.h>

enum {
    FSDP_LOOP_BLOCK = 1024,    /* elements: some blocks of f32 stay in the first cache */
    FSDP_LOOP_SOURCES = 4      /* of one sum */
};

/* The factors of a step of AdamW, computed in f64 and rounded once at their use. */
typedef struct fsdp_adamw_factors {
    double grad_scale, keep, weight1, beta2, weight2, step_size, root_bias2, eps;
    const double *clip;        /* of the step: no loop reads it, kernels of a GPU do */
} fsdp_adamw_factors;

typedef struct fsdp_sgd_factors {
    double grad_scale, weight_decay, momentum, weight, lr;
    const double *clip;
    bool has_momentum, is_first, nesterov;
} fsdp_sgd_factors;

typedef struct fsdp_loops {
    /* to = (from[0] + from[1] + ...) * factor, in that order, of 1 to FSDP_LOOP_SOURCES sources */
    void (*sum)(void *to, const void *const *from, int n, size_t count, double factor);
    /* Like sum, over bf16 numbers: summed in f32 and rounded once; NULL in the loops over f64. */
    void (*sum_bf16)(void *to, const void *const *from, int n, size_t count, double factor);
    void (*raise)(void *largest, const void *from, size_t count);      /* NaN wins */
    void (*multiply)(void *data, size_t count, double factor);
    void (*divide)(void *data, size_t count, double divisor);
    bool (*is_finite)(const void *data, size_t count);
    double (*power_sum)(const void *data, size_t count, double p);
    void (*adamw)(void *param, const void *grad, void *exp_avg, void *exp_avg_sq, size_t count,
                  const fsdp_adamw_factors *factors);
    void (*sgd)(void *param, const void *grad, void *momentum, size_t count, const fsdp_sgd_factors *factors);
} fsdp_loops;

extern const fsdp_loops fsdp_loops_f32_c, fsdp_loops_f64_c;
#if defined(__x86_64__)
extern const fsdp_loops fsdp_loops_f32_avx2, fsdp_loops_f64_avx2;
#endif

#endif

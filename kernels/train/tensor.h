/*
 * Kernels of a training step on host memory: rectangles of elements that are copied, cast or cleared
 * (rects.h), sums in rank order, and the arithmetic of optimizers and norms. Plain C, and variants per
 * processor with the same result bit for bit, whatever the size: a tail rounds as the body does. NaNs that
 * arithmetic makes are the one positive quiet NaN, so that even their bits depend on no order. Data may lie
 * at any address; aligned data is faster. Buffers are the same or do not overlap, unless a call says so.
 *
 * The room kernels/train takes and returns tensors in host memory. The runtime, kernels/nn and
 * statedict/expect call it; programs use rects.h.
 */
#ifndef FSDP_TENSOR_H
#define FSDP_TENSOR_H

#include <fsdp/dtype.h>
#include <fsdp/rects.h>
#include <fsdp/status.h>
#include <stddef.h>
#include <stdint.h>

/* Elements of one dtype: a tensor, or a part of one. */
typedef struct fsdp_span {
    void *data;
    fsdp_dtype dtype;
    size_t count;
} fsdp_span;

/* memcpy for parts of large copies. `together` is the size of the caller's whole copy: one that the caches do
 * not hold bypasses them. */
void fsdp_tensor_copy(void *to, const void *from, size_t size, size_t together);

/* A rectangle of `count` elements in one row. */
fsdp_rect fsdp_rect_line(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type, int64_t count);

/* to[i] += from[i], rounded once to to's type. Floating types. */
void fsdp_tensor_add(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type, size_t count);
/* data[i] = data[i] * factor or data[i] / factor in f32 (f64: f64), rounded once. */
void fsdp_tensor_multiply(void *data, fsdp_dtype dtype, size_t count, double factor);
void fsdp_tensor_divide(void *data, fsdp_dtype dtype, size_t count, double divisor);
/* True when all elements are finite. Floating types. */
bool fsdp_tensor_is_finite(const void *data, fsdp_dtype dtype, size_t count);

/* --- sums over ranks -------------------------------------------------------------------------- */

typedef enum fsdp_fold { FSDP_FOLD_SUM, FSDP_FOLD_MAX } fsdp_fold;

typedef struct fsdp_reduction {
    fsdp_fold fold;            /* MAX: NaN wins */
    double multiply;           /* each source by this, when it is not 1 */
    double divide;             /* the result by this, when it is not 1 */
} fsdp_reduction;

/*
 * to[i] = from[0][i] + from[1][i] + ... in that order, rounded once to dtype. f32, bf16 and f16 in f32; f64
 * in f64; integers in their own type, wrapping, without multiply and divide; n >= 1. to may be one of from.
 * Calls over pieces of a tensor give the bits of one call over the whole.
 */
void fsdp_tensor_fold(void *to, const void *const *from, int n, fsdp_dtype dtype, size_t count,
                      fsdp_reduction how);
bool fsdp_tensor_can_fold(fsdp_dtype dtype);

/* --- norms ------------------------------------------------------------------------------------ */

/* Sum of |x|^p in f64 over pieces of fixed size, added in order within groups of them, and then the groups in
 * order; p = infinity: the largest |x|. NaN wins. */
double fsdp_tensor_power_sum(const void *data, fsdp_dtype dtype, size_t count, double p);

/* Sums of parts become one, and that the factor by which gradients are clipped. */
typedef struct fsdp_norm_call {
    const double *sums;        /* n power sums */
    size_t n;
    double p, max_norm;
    bool skips;                /* a norm that is not finite gives the factor FSDP_SKIPPED */
    double *total_out;         /* the sums in their order, for infinity the largest: NaN wins; or NULL */
    double *factor_out;        /* fsdp_clip_factor of the total's norm; or NULL */
} fsdp_norm_call;
void fsdp_tensor_norm(const fsdp_norm_call *call);
/* The norm whose power sum is `total`. */
double fsdp_norm_of(double total, double p);
/* The step of an optimizer with this factor changes nothing. */
#define FSDP_SKIPPED (-1.0)
/* min(1, max_norm / (norm + 1e-6)); NaN for a norm that is NaN; 1 for max_norm infinity. */
double fsdp_clip_factor(double norm, double max_norm, bool skips);

/* --- optimizers ------------------------------------------------------------------------------- */

/* One run of elements of a shard, with its gradient and the optimizer's state. */
typedef struct fsdp_optim_tensors {
    void *param;
    fsdp_dtype param_type;
    float *master;             /* NULL, or the f32 weights of bf16 and f16 parameters: the step updates these,
                                * and param gets them rounded */
    const void *grad;
    fsdp_dtype grad_type;
    void *moments[2];          /* AdamW: exp_avg, exp_avg_sq; SGD: momentum, NULL where step->momentum is 0 */
    fsdp_dtype moment_type;
    size_t count;
} fsdp_optim_tensors;

typedef struct fsdp_adamw_step {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step;              /* 1 for the first */
    double grad_scale;         /* multiplies every gradient; 1: none */
    bool maximize;
    const double *clip;        /* NULL, or another such factor, in memory that the step's device reads when it
                                * runs. FSDP_SKIPPED: nothing changes */
} fsdp_adamw_step;

/*
 * One step of AdamW as PyTorch's single-tensor formula, in one pass. Arithmetic in f32 (f64 parameters: f64),
 * parameter and moments rounded once to their type.
 */
void fsdp_tensor_adamw(const fsdp_optim_tensors *tensors, const fsdp_adamw_step *step);

typedef struct fsdp_sgd_step {
    double lr, momentum, dampening, weight_decay;
    bool nesterov, is_first, maximize; /* is_first: the momentum buffer is set, not updated */
    double grad_scale;
    const double *clip;        /* as for AdamW */
} fsdp_sgd_step;

/* One step of SGD, like fsdp_tensor_adamw. */
void fsdp_tensor_sgd(const fsdp_optim_tensors *tensors, const fsdp_sgd_step *step);

#endif

/*
 * The loops of kernels/loops.h over `real` numbers. The including file defines real, float or double, and is
 * compiled for one processor; so all variants round alike. The compiler vectorizes each loop ("omp simd": no
 * element depends on another), and the result of element i never depends on its lane.
 */
#ifndef FSDP_REAL_LOOPS_H
#define FSDP_REAL_LOOPS_H

#include "kernels/loops.h"

#include <math.h>

enum { LANES = 64 };

static inline real settled(real x)
{
    return isnan(x) ? (real)NAN : x;
}

static inline real square_root(real x)
{
    return _Generic(x, float: sqrtf, double: sqrt)(x);
}

/* Callers inline it with a constant n. */
static inline void sum_some(real *to, const void *const *from, int n, size_t count, real factor)
{
    const real *a = from[0], *b = from[n > 1 ? 1 : 0], *c = from[n > 2 ? 2 : 0];
    const real *d = from[n > 3 ? 3 : 0];
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        real x = a[i];
        x = n > 1 ? x + b[i] : x;
        x = n > 2 ? x + c[i] : x;
        x = n > 3 ? x + d[i] : x;
        to[i] = settled(x * factor);
    }
}

static void sum(void *to, const void *const *from, int n, size_t count, double factor)
{
    switch (n) {
    case 1: sum_some(to, from, 1, count, (real)factor); break;
    case 2: sum_some(to, from, 2, count, (real)factor); break;
    case 3: sum_some(to, from, 3, count, (real)factor); break;
    default: sum_some(to, from, 4, count, (real)factor); break;
    }
}

/* The larger one; NaN wins, and the first of equal ones. */
static inline real larger(real a, real b)
{
    return b > a || isnan(b) ? b : a;
}

static void raise_to(void *largest, const void *from, size_t count)
{
    real *to = largest;
    const real *x = from;
#pragma omp simd
    for (size_t i = 0; i < count; i++)
        to[i] = larger(to[i], x[i]);
}

static void multiply(void *data, size_t count, double factor)
{
    real *x = data, by = (real)factor;
#pragma omp simd
    for (size_t i = 0; i < count; i++)
        x[i] = settled(x[i] * by);
}

static void divide(void *data, size_t count, double divisor)
{
    real *x = data, by = (real)divisor;
#pragma omp simd
    for (size_t i = 0; i < count; i++)
        x[i] = settled(x[i] / by);
}

/*
 * Folds one array into one number: element i goes to lane i % LANES, then halves of the lanes are folded into
 * each other. The code fixes this order, so the compiler cannot choose another.
 */

static bool is_finite(const void *data, size_t count)
{
    /* finite numbers times zero add up to zero */
    const real *x = data;
    real lane[LANES] = {0}, total = 0;
    for (size_t i = 0; i < count; i += LANES) {
        size_t n = count - i < LANES ? count - i : LANES;
#pragma omp simd
        for (size_t l = 0; l < n; l++)
            lane[l] += x[i + l] * 0;
    }
    for (size_t l = 0; l < LANES; l++)
        total += lane[l];
    return !isnan(total);
}

static double largest_magnitude(const real *x, size_t count)
{
    real lane[LANES] = {0};
    for (size_t i = 0; i < count; i += LANES) {
        size_t n = count - i < LANES ? count - i : LANES;
#pragma omp simd
        for (size_t l = 0; l < n; l++)
            lane[l] = larger(lane[l], (real)fabs(x[i + l]));
    }
    for (size_t l = 1; l < LANES; l++)
        lane[0] = larger(lane[0], lane[l]);
    return (double)lane[0];
}

static inline double power(double x, double p)
{
    return p == 2 ? x * x : p == 1 ? fabs(x) : pow(fabs(x), p);
}

/* Inlined with a constant p, the common ones become vectors. */
static inline double power_lanes(const real *x, size_t count, double p)
{
    double lane[LANES] = {0};
    for (size_t i = 0; i < count; i += LANES) {
        size_t n = count - i < LANES ? count - i : LANES;
#pragma omp simd
        for (size_t l = 0; l < n; l++)
            lane[l] += power((double)x[i + l], p);
    }
    for (size_t half = LANES / 2; half > 0; half /= 2) {
        for (size_t l = 0; l < half; l++)
            lane[l] += lane[half + l];
    }
    return lane[0];
}

static double power_sum(const void *data, size_t count, double p)
{
    if (p == 2)
        return power_lanes(data, count, 2);
    if (p == 1)
        return power_lanes(data, count, 1);
    return isinf(p) ? largest_magnitude(data, count) : power_lanes(data, count, p);
}

/* As torch.lerp: from the nearer end. */
static inline real between(real a, real b, real weight)
{
    return weight < (real)0.5 ? a + weight * (b - a) : b - (b - a) * (1 - weight);
}

static void adamw(void *param, const void *grad, void *exp_avg, void *exp_avg_sq, size_t count,
                  const fsdp_adamw_factors *factors)
{
    real *p = param, *m = exp_avg, *v = exp_avg_sq;
    const real *g = grad;
    const real grad_scale = (real)factors->grad_scale, keep = (real)factors->keep;
    const real weight1 = (real)factors->weight1, beta2 = (real)factors->beta2;
    const real weight2 = (real)factors->weight2, root_bias2 = (real)factors->root_bias2;
    const real eps = (real)factors->eps, step_size = (real)factors->step_size;
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        real x = g[i] * grad_scale;
        real mean = between(m[i], x, weight1);
        real square = v[i] * beta2 + weight2 * x * x;
        real spread = square_root(square) / root_bias2 + eps;
        p[i] = settled(p[i] * keep - step_size * mean / spread);
        m[i] = settled(mean);
        v[i] = settled(square);
    }
}

static void sgd(void *param, const void *grad, void *momentum, size_t count,
                const fsdp_sgd_factors *factors)
{
    real *p = param, *buf = momentum;
    const real *g = grad;
    const real grad_scale = (real)factors->grad_scale, decay = (real)factors->weight_decay;
    const real keep = (real)factors->momentum, weight = (real)factors->weight, lr = (real)factors->lr;
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        real x = g[i] * grad_scale;
        if (decay != 0)
            x = x + decay * p[i];
        if (factors->has_momentum) {
            real next = factors->is_first ? x : buf[i] * keep + weight * x;
            buf[i] = settled(next);
            x = factors->nesterov ? x + keep * next : next;
        }
        p[i] = settled(p[i] - lr * x);
    }
}

#endif

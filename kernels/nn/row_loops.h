/*
 * The loops of kernels/nn_loops.h. The including file is compiled for one processor and fills the table from
 * them. "omp simd": no element depends on another, and a result never depends on its lane.
 */
#ifndef FSDP_ROW_LOOPS_H
#define FSDP_ROW_LOOPS_H

#include "kernels/nn/row_functions.h"
#include "kernels/nn_loops.h"

enum { LANES = FSDP_NN_LANES };

/* --- sums of a row ---------------------------------------------------------------------------- */

static inline double fold(double *lane)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] += lane[half + l];
    return lane[0];
}

/* A loop over blocks of LANES elements and the rest: BODY sees i, the element, and l, its lane. */
#define FOR_LANES(count, BODY)                                                                     \
    do {                                                                                           \
        int64_t block_ = 0;                                                                        \
        for (; block_ + LANES <= (count); block_ += LANES) {                                       \
            _Pragma("omp simd") for (int l = 0; l < LANES; l++)                                    \
            {                                                                                      \
                int64_t i = block_ + l;                                                            \
                BODY                                                                               \
            }                                                                                      \
        }                                                                                          \
        for (int l = 0; block_ + l < (count); l++) {                                               \
            int64_t i = block_ + l;                                                                \
            BODY                                                                                   \
        }                                                                                          \
    } while (0)

static double dot(const float *a, const float *b, int64_t count)
{
    double lane[LANES] = {0};
    FOR_LANES(count, lane[l] += (double)a[i] * (double)b[i];);
    return fold(lane);
}

static float largest(const float *x, int64_t count)
{
    float lane[LANES];
    for (int l = 0; l < LANES; l++)
        lane[l] = x[0];
    FOR_LANES(count, lane[l] = x[i] > lane[l] ? x[i] : lane[l];);
    for (int l = 1; l < LANES; l++)
        lane[0] = lane[l] > lane[0] ? lane[l] : lane[0];
    return lane[0];
}

/* --- plain arithmetic ------------------------------------------------------------------------- */

static void add(float *to, const float *from, int64_t count)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        to[i] += from[i];
}

static void sum(float *to, const float *a, const float *b, int64_t count)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        to[i] = a[i] + b[i];
}

static void multiply(float *x, int64_t count, float factor)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        x[i] *= factor;
}

static void rotate(float *x, const float *cos, const float *sin, int64_t half, bool backward)
{
    float *other = x + half, sign = backward ? -1.0f : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = other[i], s = sign * sin[i];
        x[i] = a * cos[i] - b * s;
        other[i] = b * cos[i] + a * s;
    }
}

/* --- norms ------------------------------------------------------------------------------------ */

static double centred_squares(const float *x, int64_t count, double mean)
{
    double lane[LANES] = {0};
    FOR_LANES(count, double d = (double)x[i] - mean; lane[l] += d * d;);
    return fold(lane);
}

static double row_sum(const float *x, int64_t count)
{
    double lane[LANES] = {0};
    FOR_LANES(count, lane[l] += (double)x[i];);
    return fold(lane);
}

static void norm(const fsdp_nn_norm *call, int64_t row)
{
    const int64_t columns = call->columns;
    const float *x = call->x + row * columns, *weight = call->weight, *bias = call->bias;
    float *y = call->y + row * columns;
    double exact_mean = call->mean ? row_sum(x, columns) / (double)columns : 0;
    double variance = centred_squares(x, columns, exact_mean) / (double)columns;
    float mean = (float)exact_mean, inverse = (float)(1 / sqrt(variance + call->eps));
    call->inverse[row] = inverse;
    if (call->mean)
        call->mean[row] = mean;
    if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++)
            y[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
    } else {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++)
            y[i] = (x[i] - mean) * inverse * weight[i];
    }
}

static void norm_grad(const fsdp_nn_norm_grad *call, int64_t row)
{
    const int64_t columns = call->columns;
    const float *x = call->x + row * columns, *dy = call->dy + row * columns;
    const float *weight = call->weight;
    const float mean = call->mean ? call->mean[row] : 0, inverse = call->inverse[row];
    float *dx = call->dx + row * columns;
    double sums[LANES] = {0}, products[LANES] = {0};
    FOR_LANES(columns, float g = dy[i] * weight[i]; sums[l] += (double)g;
              products[l] += (double)(g * ((x[i] - mean) * inverse)););
    float shift = call->mean ? (float)(fold(sums) / (double)columns) : 0;
    float slope = (float)(fold(products) / (double)columns);
    const bool adds = call->adds_dx;
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) {
        float hat = (x[i] - mean) * inverse;
        float grad = inverse * ((dy[i] * weight[i] - shift) - hat * slope);
        dx[i] = adds ? dx[i] + grad : grad;
    }
}

static void norm_grad_columns(const fsdp_nn_norm_grad *call, int64_t first, int64_t last)
{
    float *dweight = call->dweight, *dbias = call->dbias;
    for (int64_t row = 0; row < call->rows; row++) {
        const float *x = call->x + row * call->columns, *dy = call->dy + row * call->columns;
        const float mean = call->mean ? call->mean[row] : 0, inverse = call->inverse[row];
        if (dweight) {
#pragma omp simd
            for (int64_t i = first; i < last; i++)
                dweight[i] += dy[i] * ((x[i] - mean) * inverse);
        }
        if (dbias)
            add(dbias + first, dy + first, last - first);
    }
}

/* --- activations ------------------------------------------------------------------------------ */

/* Callers inline it with a constant function, and so below. */
__attribute__((always_inline)) static inline void activate_with(fsdp_nn_function function,
                                                                const float *x, const float *gate,
                                                                float *y, int64_t count)
{
    if (gate) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            y[i] = function_of(function, x[i]) * gate[i];
    } else {
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            y[i] = function_of(function, x[i]);
    }
}

static void activate(const fsdp_nn_activation *call, int64_t first, int64_t last)
{
    const float *x = call->x + first, *gate = call->gate ? call->gate + first : NULL;
    float *y = call->y + first;
    int64_t count = last - first;
    switch (call->function) {
    case FSDP_NN_GELU: activate_with(FSDP_NN_GELU, x, gate, y, count); break;
    case FSDP_NN_GELU_TANH: activate_with(FSDP_NN_GELU_TANH, x, gate, y, count); break;
    case FSDP_NN_SILU: activate_with(FSDP_NN_SILU, x, gate, y, count); break;
    default: activate_with(FSDP_NN_RELU, x, gate, y, count); break;
    }
}

/* dx and dgate may be memory of the inputs: an element's inputs are read before its results are written. */
__attribute__((always_inline)) static inline void activate_grad_with(
    fsdp_nn_function function, const fsdp_nn_activation_grad *call, int64_t first, int64_t last)
{
    const float *x = call->x, *dy = call->dy, *gate = call->gate;
    float *dx = call->dx, *dgate = call->dgate;
    if (gate && dgate) {
#pragma omp simd
        for (int64_t i = first; i < last; i++) {
            float slope, value = slope_of(function, x[i], &slope), d = dy[i], by = gate[i];
            dx[i] = through(function, slope, d * by);
            dgate[i] = d * value;
        }
    } else if (gate) {
#pragma omp simd
        for (int64_t i = first; i < last; i++) {
            float slope;
            (void)slope_of(function, x[i], &slope);
            dx[i] = through(function, slope, dy[i] * gate[i]);
        }
    } else {
#pragma omp simd
        for (int64_t i = first; i < last; i++) {
            float slope;
            (void)slope_of(function, x[i], &slope);
            dx[i] = through(function, slope, dy[i]);
        }
    }
}

static void activate_grad(const fsdp_nn_activation_grad *call, int64_t first, int64_t last)
{
    switch (call->function) {
    case FSDP_NN_GELU: activate_grad_with(FSDP_NN_GELU, call, first, last); break;
    case FSDP_NN_GELU_TANH: activate_grad_with(FSDP_NN_GELU_TANH, call, first, last); break;
    case FSDP_NN_SILU: activate_grad_with(FSDP_NN_SILU, call, first, last); break;
    default: activate_grad_with(FSDP_NN_RELU, call, first, last); break;
    }
}

/* --- softmax ---------------------------------------------------------------------------------- */

static double exponentials(float *to, const float *x, int64_t count, float factor, float offset)
{
    double lane[LANES] = {0};
    if (to)
        FOR_LANES(count, float e = exp_of(x[i] * factor - offset); to[i] = e;
                  lane[l] += (double)e;);
    else
        FOR_LANES(count, lane[l] += (double)exp_of(x[i] * factor - offset););
    return fold(lane);
}

static void attention_grad(float *scores, float *dp, int64_t count, float factor, float log_sum,
                           float delta)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float p = exp_of(scores[i] * factor - log_sum);
        scores[i] = p;
        dp[i] = p * (dp[i] - delta) * factor;
    }
}

#define FSDP_NN_LOOPS(variant)                                                                     \
    {.name = variant,                                                                              \
     .add = add,                                                                                   \
     .sum = sum,                                                                                   \
     .multiply = multiply,                                                                         \
     .dot = dot,                                                                                   \
     .norm = norm,                                                                                 \
     .norm_grad = norm_grad,                                                                       \
     .norm_grad_columns = norm_grad_columns,                                                       \
     .activate = activate,                                                                         \
     .activate_grad = activate_grad,                                                               \
     .rotate = rotate,                                                                             \
     .largest = largest,                                                                           \
     .exponentials = exponentials,                                                                 \
     .attention_grad = attention_grad}

#endif

/*
 * exp and the functions of activations, element by element, without branches, so that compilers make vectors
 * of loops over them. row_loops.h includes this once per processor.
 *
 * The coefficients are those of polynomials with the smallest largest relative error: weighted least squares
 * over some thousand points in f64, the weight of a point multiplied by its error after each of 3,000 rounds
 * (Lawson's algorithm), rounded to f32.
 */
#ifndef FSDP_ROW_FUNCTIONS_H
#define FSDP_ROW_FUNCTIONS_H

#include "kernels/nn.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Keeps NaN. */
__attribute__((always_inline)) static inline float between_bounds(float x, float low, float high)
{
    x = x < low ? low : x;
    return x > high ? high : x;
}

/*
 * exp(x + rest), |x| < 170, |rest| < 0.01, within 1 ulp for rest 0: x = n ln 2 + r and
 * exp(r) = 1 + r + r^2 q(r); 2^n is a product of two powers, since the result may be subnormal or infinite.
 */
__attribute__((always_inline)) static inline float exp_of_sum(float x, float rest)
{
    const float whole = 12582912.0f; /* 1.5 * 2^23: adding it leaves an integer in the low bits */
    float shifted = x * 1.44269504f + whole;
    float n = shifted - whole;
    float r = (x - n * 0.693359375f) - n * -2.12194440e-4f + rest;
    float q = 0.0013814222f;
    q = q * r + 0.008368899f;
    q = q * r + 0.041668404f;
    q = q * r + 0.1666652f;
    q = q * r + 0.49999994f;
    float power = 1.0f + (r + r * r * q);
    int32_t exponent = (int32_t)(bits_of(shifted) - bits_of(whole));
    int32_t half = exponent >> 1;
    power *= float_of((uint32_t)(half + 127) << 23);
    return power * float_of((uint32_t)(exponent - half + 127) << 23);
}

__attribute__((always_inline)) static inline float exp_of(float x)
{
    return exp_of_sum(between_bounds(x, -110.0f, 90.0f), 0.0f);
}

/*
 * The normal distribution: *density_out = exp(-x^2 / 2); returns the probability P(X <= x), which is
 * (1 + erf(x / sqrt 2)) / 2. With s = 1 / (1 + 0.3 |x|), P(X <= -|x|) = exp(-x^2 / 2) s q(s); the square is
 * that of the upper half of the bits, which is exact, and a rest. The result is within 3 ulp for x >= 0,
 * within 6 below. Callers multiply the result by x, which brings NaN back.
 */
__attribute__((always_inline)) static inline float normal_of(float x, float *density_out)
{
    /* At most 16, as a minimum of integers, of which compilers make no branches. NaN is lost. */
    uint32_t magnitude = bits_of(x) & 0x7fffffffu, most = bits_of(16.0f);
    float far = float_of(magnitude < most ? magnitude : most);
    float high = float_of(bits_of(far) & 0xfffff000u);
    float density = exp_of_sum(-0.5f * high * high, -0.5f * (far - high) * (far + high));
    float s = 1.0f / (1.0f + 0.3f * far);
    float s2 = s * s, s4 = s2 * s2; /* pairs of terms: one chain of nine steps would take its time */
    float q01 = 0.11968666f + 0.11957236f * s, q23 = 0.11023116f + 0.078408584f * s;
    float q45 = 0.09610462f - 0.079330556f * s, q67 = 0.19167747f - 0.22813648f * s;
    float q89 = 0.112404026f - 0.020617854f * s;
    float q = (q01 + q23 * s2) + ((q45 + q67 * s2) + q89 * s4) * s4;
    float tail = density * (s * q);
    *density_out = density;
    return x < 0 ? tail : 1.0f - tail;
}

/*
 * tanh appears only as (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)): both SiLU and the tanh GELU are
 * x / (1 + exp(-v)), with v = x and with v = 2 sqrt(2/pi) (x + 0.044715 x^3).
 */
static inline float gelu_angle(float x)
{
    return 1.5957691216f * (x + 0.044715f * (x * x * x));
}

static inline float gelu_angle_slope(float x)
{
    return 1.5957691216f * (1.0f + 0.134145f * (x * x));
}

/* Inlined with a constant function, as is slope_of. */
__attribute__((always_inline)) static inline float function_of(fsdp_nn_function function, float x)
{
    float density;
    switch (function) {
    case FSDP_NN_GELU: return x * normal_of(x, &density);
    case FSDP_NN_GELU_TANH: return x / (1.0f + exp_of(-gelu_angle(x)));
    case FSDP_NN_SILU: return x / (1.0f + exp_of(-x));
    default: return x <= 0 ? 0.0f : x; /* NaN stays */
    }
}

/* d f'(x); 0 where relu's slope is 0, even for infinite d. */
__attribute__((always_inline)) static inline float through(fsdp_nn_function function, float slope,
                                                           float d)
{
    if (function == FSDP_NN_RELU)
        return slope > 0 ? d : 0.0f;
    return d * slope;
}

/* Returns f(x); *slope_out = f'(x). */
__attribute__((always_inline)) static inline float slope_of(fsdp_nn_function function, float x,
                                                            float *slope_out)
{
    if (function == FSDP_NN_RELU) {
        *slope_out = x <= 0 ? 0.0f : 1.0f;
        return x <= 0 ? 0.0f : x;
    }
    if (function == FSDP_NN_GELU) {
        float density, below = normal_of(x, &density);
        *slope_out = below + x * (density * 0.3989422804f);
        return x * below;
    }
    float e = exp_of(function == FSDP_NN_SILU ? -x : -gelu_angle(x));
    float s = 1.0f / (1.0f + e), opposite = e > 1 ? 1.0f - s : e * s; /* 1 - s */
    *slope_out = function == FSDP_NN_SILU ? s * (1.0f + x * opposite)
                                          : s + x * s * opposite * gelu_angle_slope(x);
    return x / (1.0f + e);
}

#endif

/*
 * The sum of bf16 numbers, in registers and rounded once: the hot loop of reduce-scatter in bf16. It is part
 * of the f32 loops and compiled with them.
 */
#ifndef FSDP_BF16_LOOPS_H
#define FSDP_BF16_LOOPS_H

#include "kernels/train/real_loops.h"

#include <stdint.h>
#include <string.h>

static inline float widen_bf16(uint16_t code)
{
    uint32_t wide = (uint32_t)code << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* To nearest, ties to even. The one NaN stays what it is: its lower half is zero. */
static inline uint16_t round_to_bf16(float x)
{
    uint32_t wide;
    memcpy(&wide, &x, sizeof wide);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

/* Callers inline it with a constant n. */
static inline void sum_some_bf16(uint16_t *to, const void *const *from, int n, size_t count,
                                 float factor)
{
    const uint16_t *a = from[0], *b = from[n > 1 ? 1 : 0], *c = from[n > 2 ? 2 : 0];
    const uint16_t *d = from[n > 3 ? 3 : 0];
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        float x = widen_bf16(a[i]);
        x = n > 1 ? x + widen_bf16(b[i]) : x;
        x = n > 2 ? x + widen_bf16(c[i]) : x;
        x = n > 3 ? x + widen_bf16(d[i]) : x;
        to[i] = round_to_bf16(settled(x * factor));
    }
}

static void sum_bf16(void *to, const void *const *from, int n, size_t count, double factor)
{
    switch (n) {
    case 1: sum_some_bf16(to, from, 1, count, (float)factor); break;
    case 2: sum_some_bf16(to, from, 2, count, (float)factor); break;
    case 3: sum_some_bf16(to, from, 3, count, (float)factor); break;
    default: sum_some_bf16(to, from, 4, count, (float)factor); break;
    }
}

#endif

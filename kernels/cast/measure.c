/*
 * Measures a cast in f32: counts values that became zero, infinite or NaN, and finds the largest relative
 * change of the others. Both sides are exact in f32, and so is their difference: only the quotient is
 * rounded.
 */
#include "kernels/variants.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float value_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Without branches: every case is computed and one selected, and floats >= 0 compare like their codes. */
void fsdp_measure_c(fsdp_cast_measure *sum, const float *before, const float *after, size_t count)
{
    const uint32_t magnitude = 0x7fffffff, infinity = 0x7f800000;
    uint32_t nans_before = 0, nans_after = 0, infinite = 0, underflows = 0;
    uint32_t rounding = bits_of(sum->max_rounding), lost = bits_of(sum->max_underflow);
    for (size_t i = 0; i < count; i++) {
        uint32_t old = bits_of(before[i]), new = bits_of(after[i]);
        uint32_t old_size = old & magnitude, new_size = new &magnitude;
        bool becomes_zero = (new_size == 0) & (old_size != 0);
        bool is_number = (old_size != 0) & (new_size != 0) & (old_size < infinity) &
                         (new_size < infinity) & ((old ^ new) <= magnitude);
        uint32_t moved = is_number ? bits_of(fabsf(after[i] - before[i]) / fabsf(before[i])) : 0;
        uint32_t vanished = becomes_zero ? old_size : 0;
        nans_before += old_size > infinity;
        nans_after += new_size > infinity;
        infinite += new_size == infinity;
        underflows += becomes_zero;
        rounding = moved > rounding ? moved : rounding;
        lost = vanished > lost ? vanished : lost;
    }
    sum->nans_before += nans_before;
    sum->nans_after += nans_after;
    sum->infinite_after += infinite;
    sum->underflows += underflows;
    sum->max_rounding = value_of(rounding);
    sum->max_underflow = value_of(lost);
}

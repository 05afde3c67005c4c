/*
 * The loops of a training step over f32, compiled for AVX2. The sum of bf16 numbers is written by hand:
 * two of them lie in each 32 bits, and both halves become f32 without moving.
 */
typedef float real;
#include "kernels/train/bf16_loops.h"

#include <immintrin.h>

enum { PAIRS = 8 };

static inline __m256 low_halves(__m256i pairs)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

static inline __m256 high_halves(__m256i pairs)
{
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}

/* As settled and round_to_bf16, in the upper half of each lane; the lower one is what was cut off. */
static inline __m256i round_lanes(__m256 sum, __m256 factor)
{
    __m256 x = _mm256_mul_ps(sum, factor);
    __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256i wide = _mm256_castps_si256(_mm256_blendv_ps(x, _mm256_set1_ps(NAN), is_nan));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(wide, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

/* Callers inline it with a constant n. Returns how many are done. */
static inline size_t sum_pairs(uint16_t *to, const void *const *from, int n, size_t count,
                               float factor)
{
    const __m256 by = _mm256_set1_ps(factor);
    size_t whole = count / (2 * PAIRS) * (2 * PAIRS);
    for (size_t i = 0; i < whole; i += 2 * PAIRS) {
        __m256 low = _mm256_setzero_ps(), high = low;
        for (int source = 0; source < n; source++) {
            const uint16_t *x = from[source];
            __m256i pairs = _mm256_loadu_si256((const __m256i *)(const void *)(x + i));
            low = source == 0 ? low_halves(pairs) : _mm256_add_ps(low, low_halves(pairs));
            high = source == 0 ? high_halves(pairs) : _mm256_add_ps(high, high_halves(pairs));
        }
        __m256i low_codes = _mm256_srli_epi32(round_lanes(low, by), 16);
        _mm256_storeu_si256((__m256i *)(void *)(to + i),
                            _mm256_blend_epi16(low_codes, round_lanes(high, by), 0xaa));
    }
    return whole;
}

static void sum_bf16_avx2(void *to, const void *const *from, int n, size_t count, double factor)
{
    const void *rest[FSDP_LOOP_SOURCES];
    size_t done;
    switch (n) {
    case 1: done = sum_pairs(to, from, 1, count, (float)factor); break;
    case 2: done = sum_pairs(to, from, 2, count, (float)factor); break;
    case 3: done = sum_pairs(to, from, 3, count, (float)factor); break;
    default: done = sum_pairs(to, from, 4, count, (float)factor); break;
    }
    for (int i = 0; i < n; i++)
        rest[i] = (const uint16_t *)from[i] + done;
    if (done < count)
        sum_bf16((uint16_t *)to + done, rest, n, count - done, factor);
}

const fsdp_loops fsdp_loops_f32_avx2 = {
    .sum = sum,
    .sum_bf16 = sum_bf16_avx2,
    .raise = raise_to,
    .multiply = multiply,
    .divide = divide,
    .is_finite = is_finite,
    .power_sum = power_sum,
    .adamw = adamw,
    .sgd = sgd,
};

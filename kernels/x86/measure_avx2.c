/*
 * Measures a cast with AVX2; the results equal those of kernels/cast/measure.c. Nearly all values stay
 * finite, keep their sign and change by no more than an earlier one; a product and comparisons show that
 * for eight values at a time. Any other eight go to the plain C version.
 *
 * A quotient above the largest so far is never missed: |new - old| / |old| > m means |new - old| >=
 * m * |old| with the product rounded, too, since rounding keeps order and the left side is exact.
 */
#include "kernels/variants.h"

#include <immintrin.h>

enum { LANES = 8, LARGEST_FINITE = 0x7f7fffff };

static inline __m256i load(const float *from)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)from);
}

/* True when one of the eight needs the plain C version. */
static inline int is_remarkable(__m256i old, __m256i new, __m256 largest)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), zero = _mm256_setzero_si256();
    __m256i old_size = _mm256_and_si256(old, magnitude);
    __m256i new_size = _mm256_and_si256(new, magnitude);
    __m256i old_is_zero = _mm256_cmpeq_epi32(old_size, zero);
    __m256i is_infinite =
        _mm256_cmpgt_epi32(_mm256_max_epi32(old_size, new_size), _mm256_set1_epi32(LARGEST_FINITE));
    __m256 apart = _mm256_sub_ps(_mm256_castsi256_ps(new), _mm256_castsi256_ps(old));
    __m256 most = _mm256_mul_ps(largest, _mm256_castsi256_ps(old_size));
    apart = _mm256_and_ps(apart, _mm256_castsi256_ps(magnitude));
    __m256i moves = _mm256_castps_si256(_mm256_cmp_ps(apart, most, _CMP_GE_OQ));
    __m256i becomes_zero = _mm256_cmpeq_epi32(new_size, zero);
    __m256i any = _mm256_andnot_si256(old_is_zero, _mm256_or_si256(moves, becomes_zero));
    any = _mm256_or_si256(any, _mm256_or_si256(is_infinite, _mm256_xor_si256(old, new)));
    return _mm256_movemask_ps(_mm256_castsi256_ps(any));
}

void fsdp_measure_avx2(fsdp_cast_measure *sum, const float *before, const float *after,
                       size_t count)
{
    size_t done = count / LANES * LANES;
    __m256 largest = _mm256_set1_ps(sum->max_rounding);
    for (size_t i = 0; i < done; i += LANES) {
        if (!is_remarkable(load(before + i), load(after + i), largest))
            continue;
        fsdp_measure_c(sum, before + i, after + i, LANES);
        largest = _mm256_set1_ps(sum->max_rounding);
    }
    fsdp_measure_c(sum, before + done, after + done, count - done);
}

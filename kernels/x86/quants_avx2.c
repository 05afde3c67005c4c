/*
 * Blocks of q8_0 with AVX2 and F16C: the scale is the largest magnitude / 127, and every number its
 * multiple of the scale, halves rounded away from zero. The bits are those of kernels/cast/q8_0.c.
 */
#include "kernels/variants.h"

#include <immintrin.h>

enum { VECTORS = 4, LANES = 8, BLOCK_BYTES = 2 + VECTORS * LANES };

static inline __m256i magnitude_of(__m256 value)
{
    return _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fffffff));
}

/* Compares bits, so that a NaN is larger than all numbers. */
static inline float largest_magnitude(const __m256 values[VECTORS])
{
    __m256i most =
        _mm256_max_epi32(_mm256_max_epi32(magnitude_of(values[0]), magnitude_of(values[1])),
                         _mm256_max_epi32(magnitude_of(values[2]), magnitude_of(values[3])));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    __m128i one = _mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(one));
}

/* Returns the nearest integers, and 0 outside the range. Half is the float below it, so that the largest
 * float below a half is not rounded up. */
static inline __m256i round_away(__m256 value)
{
    const __m256i bits_of_127_5 = _mm256_set1_epi32(0x42ff0000);
    __m256i magnitude = magnitude_of(value);
    __m256i is_within = _mm256_cmpgt_epi32(bits_of_127_5, magnitude);
    __m256 raised = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1.FFFFFEp-2F));
    __m256i whole = _mm256_and_si256(_mm256_cvttps_epi32(raised), is_within);
    return _mm256_sign_epi32(whole, _mm256_castps_si256(value));
}

/* Packing works on halves of registers, so that runs of four bytes are put in order after it. */
static inline __m256i join_bytes(const __m256i numbers[VECTORS])
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i low = _mm256_packs_epi32(numbers[0], numbers[1]);
    __m256i high = _mm256_packs_epi32(numbers[2], numbers[3]);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}

/* Returns 1 for a finite scale that f16 does not hold. */
static inline size_t encode(const float *from, uint8_t *block)
{
    __m256 values[VECTORS];
    __m256i numbers[VECTORS];
    for (int i = 0; i < VECTORS; i++)
        values[i] = _mm256_loadu_ps(from + i * LANES);
    float scale = largest_magnitude(values) / 127;
    __m256 inverse = _mm256_set1_ps(scale == 0 ? 0 : 1 / scale);
    for (int i = 0; i < VECTORS; i++)
        numbers[i] = round_away(_mm256_mul_ps(values[i], inverse));
    unsigned code = _cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT);
    block[0] = (uint8_t)code;
    block[1] = (uint8_t)(code >> 8);
    _mm256_storeu_si256((__m256i *)(block + 2), join_bytes(numbers));
    return code == 0x7c00 && scale < __builtin_inff();
}

size_t fsdp_encode_q8_0_avx2(const float *values, size_t count, void *blocks_out)
{
    uint8_t *block = blocks_out;
    size_t overflows = 0;
    for (size_t i = 0; i < count; i++, block += BLOCK_BYTES, values += VECTORS * LANES)
        overflows += encode(values, block);
    return overflows;
}

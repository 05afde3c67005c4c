/* Rounding to bf16 with AVX2, and counts of values that do not fit; for the kernels of this room. */
#ifndef FSDP_BF16_AVX2_H
#define FSDP_BF16_AVX2_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

enum { LANES = 8, LARGEST_THAT_FITS_BF16 = 0x7f7f7fff };

static inline __m256i load(const uint8_t *from)
{
    return _mm256_loadu_si256((const __m256i *)from);
}

/* Each lane counts by itself: masks are -1. */
static inline __m256i count_lanes(__m256i counts, __m256i mask)
{
    return _mm256_sub_epi32(counts, mask);
}

static inline size_t sum_lanes(__m256i counts)
{
    uint32_t lanes[LANES];
    size_t sum = 0;
    _mm256_storeu_si256((__m256i *)(void *)lanes, counts);
    for (int i = 0; i < LANES; i++)
        sum += lanes[i];
    return sum;
}

static inline __m256i magnitude_of(__m256i f32)
{
    return _mm256_and_si256(f32, _mm256_set1_epi32(0x7fffffff));
}

/* Lanes (given as magnitudes) that are finite and round to more than the target's largest value. */
static inline __m256i misfits_of(__m256i magnitude, int largest_that_fits)
{
    __m256i too_large = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(largest_that_fits));
    __m256i is_finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), magnitude);
    return _mm256_and_si256(too_large, is_finite);
}

/* Rounds to the upper half of each lane and moves it down. */
static inline __m256i round_to_bf16(__m256i f32, __m256i magnitude)
{
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(f32, 16), _mm256_set1_epi32(1));
    __m256i below_half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    __m256i rounded = _mm256_add_epi32(f32, below_half);
    __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    __m256i quiet = _mm256_or_si256(f32, _mm256_set1_epi32(0x00400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}

/* Two results of round_to_bf16 as neighbours. */
static inline void store_bf16(uint8_t *to, __m256i low, __m256i high)
{
    __m256i packed = _mm256_packus_epi32(low, high);
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(packed, 0xd8));
}

/* The f32 bits of bf16 numbers; a signaling NaN stays one. */
static inline __m256i widen_bf16(const uint8_t *from)
{
    __m128i narrow = _mm_loadu_si128((const __m128i *)from);
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16);
}

#endif

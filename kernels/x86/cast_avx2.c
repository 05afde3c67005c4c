/*
 * The casts that move training states, f32 <-> bf16 and f32 <-> f16, with AVX2 and F16C: the same
 * bits as kernels/cast.c, which does all other pairs, the clamping policy and what is left over
 * after the last whole register.
 */
#include "kernels/variants.h"

#include <immintrin.h>

enum { LANES = 8 };

typedef size_t block_cast(uint8_t *to, const uint8_t *from, size_t count);

static inline __m256i load(const uint8_t *from)
{
    return _mm256_loadu_si256((const __m256i *)from);
}

static inline size_t count_lanes(__m256i mask)
{
    return (size_t)__builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
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

static size_t f32_to_bf16(uint8_t *to, const uint8_t *from, size_t count)
{
    enum { LARGEST_THAT_FITS = 0x7f7f7fff };
    size_t misfits = 0;
    for (size_t i = 0; i < count; i += 2 * LANES) {
        __m256i low = load(from + 4 * i), high = load(from + 4 * (i + LANES));
        __m256i low_magnitude = magnitude_of(low), high_magnitude = magnitude_of(high);
        __m256i packed = _mm256_packus_epi32(round_to_bf16(low, low_magnitude),
                                             round_to_bf16(high, high_magnitude));
        _mm256_storeu_si256((__m256i *)(to + 2 * i), _mm256_permute4x64_epi64(packed, 0xd8));
        misfits += count_lanes(misfits_of(low_magnitude, LARGEST_THAT_FITS)) +
                   count_lanes(misfits_of(high_magnitude, LARGEST_THAT_FITS));
    }
    return misfits;
}

static size_t bf16_to_f32(uint8_t *to, const uint8_t *from, size_t count)
{
    for (size_t i = 0; i < count; i += LANES) {
        __m128i narrow = _mm_loadu_si128((const __m128i *)(from + 2 * i));
        __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16);
        __m256i is_nan = _mm256_cmpgt_epi32(magnitude_of(wide), _mm256_set1_epi32(0x7f800000));
        __m256i quiet = _mm256_and_si256(is_nan, _mm256_set1_epi32(0x00400000));
        _mm256_storeu_si256((__m256i *)(to + 4 * i), _mm256_or_si256(wide, quiet));
    }
    return 0;
}

static size_t f32_to_f16(uint8_t *to, const uint8_t *from, size_t count)
{
    enum { LARGEST_THAT_FITS = 0x477fefff };
    size_t misfits = 0;
    for (size_t i = 0; i < count; i += LANES) {
        __m256i wide = load(from + 4 * i);
        __m128i narrow = _mm256_cvtps_ph(_mm256_castsi256_ps(wide), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(to + 2 * i), narrow);
        misfits += count_lanes(misfits_of(magnitude_of(wide), LARGEST_THAT_FITS));
    }
    return misfits;
}

static size_t f16_to_f32(uint8_t *to, const uint8_t *from, size_t count)
{
    for (size_t i = 0; i < count; i += LANES) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i)));
        _mm256_storeu_ps((float *)(void *)(to + 4 * i), wide);
    }
    return 0;
}

static block_cast *find(fsdp_dtype to, fsdp_dtype from)
{
    if (from == FSDP_F32)
        return to == FSDP_BF16 ? f32_to_bf16 : to == FSDP_F16 ? f32_to_f16 : NULL;
    if (to == FSDP_F32)
        return from == FSDP_BF16 ? bf16_to_f32 : from == FSDP_F16 ? f16_to_f32 : NULL;
    return NULL;
}

size_t fsdp_cast_avx2(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                      size_t count, fsdp_on_overflow overflow)
{
    block_cast *cast = overflow == FSDP_OVERFLOW_CLAMP ? NULL : find(to_type, from_type);
    size_t done = cast ? count / (2 * LANES) * (2 * LANES) : 0;
    size_t misfits = cast ? cast(to, from, done) : 0;
    return misfits + fsdp_cast_c((uint8_t *)to + done * fsdp_dtype_size(to_type), to_type,
                                 (const uint8_t *)from + done * fsdp_dtype_size(from_type),
                                 from_type, count - done, overflow);
}

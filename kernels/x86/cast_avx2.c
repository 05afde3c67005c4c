/*
 * The casts that move training states, f32 <-> bf16 and f32 <-> f16, with AVX2 and F16C: the same
 * bits as kernels/cast/cast.c, which does all other pairs, the clamping policy and the elements after
 * the last whole register.
 */
#include "kernels/variants.h"

#include <immintrin.h>

enum { LANES = 8, MOST_AT_ONCE = 1 << 30 }; /* so that counts of lanes fit */

typedef size_t block_cast(uint8_t *to, const uint8_t *from, size_t count);

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

static size_t f32_to_bf16(uint8_t *to, const uint8_t *from, size_t count)
{
    enum { LARGEST_THAT_FITS = 0x7f7f7fff };
    __m256i misfits = _mm256_setzero_si256();
    for (size_t i = 0; i < count; i += 2 * LANES) {
        __m256i low = load(from + 4 * i), high = load(from + 4 * (i + LANES));
        __m256i low_magnitude = magnitude_of(low), high_magnitude = magnitude_of(high);
        __m256i packed = _mm256_packus_epi32(round_to_bf16(low, low_magnitude),
                                             round_to_bf16(high, high_magnitude));
        _mm256_storeu_si256((__m256i *)(to + 2 * i), _mm256_permute4x64_epi64(packed, 0xd8));
        misfits = count_lanes(misfits, misfits_of(low_magnitude, LARGEST_THAT_FITS));
        misfits = count_lanes(misfits, misfits_of(high_magnitude, LARGEST_THAT_FITS));
    }
    return sum_lanes(misfits);
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
    __m256i misfits = _mm256_setzero_si256();
    for (size_t i = 0; i < count; i += LANES) {
        __m256i wide = load(from + 4 * i);
        __m128i narrow = _mm256_cvtps_ph(_mm256_castsi256_ps(wide), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(to + 2 * i), narrow);
        misfits = count_lanes(misfits, misfits_of(magnitude_of(wide), LARGEST_THAT_FITS));
    }
    return sum_lanes(misfits);
}

static size_t f16_to_f32(uint8_t *to, const uint8_t *from, size_t count)
{
    for (size_t i = 0; i < count; i += LANES) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i)));
        _mm256_storeu_ps((float *)(void *)(to + 4 * i), wide);
    }
    return 0;
}

typedef struct fast_cast {
    fsdp_dtype to, from;
    size_t to_size, from_size;
    block_cast *cast;
} fast_cast;

static const fast_cast *find(fsdp_dtype to, fsdp_dtype from)
{
    static const fast_cast all[] = {{FSDP_BF16, FSDP_F32, 2, 4, f32_to_bf16},
                                    {FSDP_F32, FSDP_BF16, 4, 2, bf16_to_f32},
                                    {FSDP_F16, FSDP_F32, 2, 4, f32_to_f16},
                                    {FSDP_F32, FSDP_F16, 4, 2, f16_to_f32}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].to == to && all[i].from == from)
            return &all[i];
    return NULL;
}

size_t fsdp_cast_avx2(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                      size_t count, fsdp_on_overflow overflow)
{
    const fast_cast *fast = overflow == FSDP_OVERFLOW_CLAMP ? NULL : find(to_type, from_type);
    if (!fast)
        return fsdp_cast_c(to, to_type, from, from_type, count, overflow);
    uint8_t *target = to;
    const uint8_t *source = from;
    size_t whole = count / (2 * LANES) * (2 * LANES), misfits = 0;
    for (size_t done = 0; done < whole; done += MOST_AT_ONCE)
        misfits += fast->cast(target + done * fast->to_size, source + done * fast->from_size,
                              whole - done < MOST_AT_ONCE ? whole - done : MOST_AT_ONCE);
    if (whole == count)
        return misfits;
    return misfits + fsdp_cast_c(target + whole * fast->to_size, to_type,
                                 source + whole * fast->from_size, from_type, count - whole,
                                 overflow);
}

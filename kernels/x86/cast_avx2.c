/*
 * The casts that move training states, f32 <-> bf16 and f32 <-> f16, and those of e4m3fn and e5m2
 * to f32, with AVX2 and F16C: the same bits as kernels/cast/cast.c, which does all other pairs, the
 * clamping policy and the elements after the last whole register.
 */
#include "kernels/variants.h"
#include "kernels/x86/bf16_avx2.h"

enum { MOST_AT_ONCE = 1 << 30 }; /* so that counts of lanes fit */

typedef size_t block_cast(uint8_t *to, const uint8_t *from, size_t count);

static size_t f32_to_bf16(uint8_t *to, const uint8_t *from, size_t count)
{
    __m256i misfits = _mm256_setzero_si256();
    for (size_t i = 0; i < count; i += 2 * LANES) {
        __m256i low = load(from + 4 * i), high = load(from + 4 * (i + LANES));
        __m256i low_magnitude = magnitude_of(low), high_magnitude = magnitude_of(high);
        store_bf16(to + 2 * i, round_to_bf16(low, low_magnitude),
                   round_to_bf16(high, high_magnitude));
        misfits = count_lanes(misfits, misfits_of(low_magnitude, LARGEST_THAT_FITS_BF16));
        misfits = count_lanes(misfits, misfits_of(high_magnitude, LARGEST_THAT_FITS_BF16));
    }
    return sum_lanes(misfits);
}

static size_t bf16_to_f32(uint8_t *to, const uint8_t *from, size_t count)
{
    for (size_t i = 0; i < count; i += LANES) {
        __m256i wide = widen_bf16(from + 2 * i);
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

/* e5m2 is the upper byte of f16. */
static size_t e5m2_to_f32(uint8_t *to, const uint8_t *from, size_t count)
{
    for (size_t i = 0; i < count; i += LANES) {
        __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(from + i)));
        __m256 wide = _mm256_cvtph_ps(_mm_slli_epi16(codes, 8));
        _mm256_storeu_ps((float *)(void *)(to + 4 * i), wide);
    }
    return 0;
}

/* As bits of f16 a code means a number 2^8 times smaller, without a NaN. */
static size_t e4m3fn_to_f32(uint8_t *to, const uint8_t *from, size_t count)
{
    const __m128i digits = _mm_set1_epi16(0x7f), nans = _mm_set1_epi16(0x7e00);
    for (size_t i = 0; i < count; i += LANES) {
        __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(from + i)));
        __m128i magnitude = _mm_and_si128(codes, digits);
        __m128i sign = _mm_slli_epi16(_mm_andnot_si128(digits, codes), 8);
        __m128i is_nan = _mm_cmpeq_epi16(magnitude, digits);
        __m128i half = _mm_blendv_epi8(_mm_slli_epi16(magnitude, 7), nans, is_nan);
        __m256 wide = _mm256_cvtph_ps(_mm_or_si128(half, sign));
        _mm256_storeu_ps((float *)(void *)(to + 4 * i), _mm256_mul_ps(wide, _mm256_set1_ps(256)));
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
                                    {FSDP_F32, FSDP_F16, 4, 2, f16_to_f32},
                                    {FSDP_F32, FSDP_F8_E5M2, 4, 1, e5m2_to_f32},
                                    {FSDP_F32, FSDP_F8_E4M3FN, 4, 1, e4m3fn_to_f32}};
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

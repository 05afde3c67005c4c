/*
 * Numbers plus a factor times f32 numbers, with AVX2: bf16 and f32 in registers, other types by casts of
 * blocks that stay in the first cache. The bits are those of kernels/cast/add_scaled.c, which does the
 * elements after the last whole register.
 */
#include "kernels/variants.h"
#include "kernels/x86/bf16_avx2.h"

#include <math.h>

enum { BLOCK = 1024, LARGEST_OF_F32 = 0x7f7fffff };

static inline __m256 load_f32(const float *from)
{
    return _mm256_loadu_ps(from);
}

/* Sums, of numbers that were finite, whose magnitude is more than the largest one that fits. */
static inline __m256i lost_of(__m256 number, __m256i sum_magnitude, int largest_that_fits)
{
    __m256i was = magnitude_of(_mm256_castps_si256(number));
    __m256i was_finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), was);
    __m256i is_lost = _mm256_cmpgt_epi32(sum_magnitude, _mm256_set1_epi32(largest_that_fits));
    return _mm256_and_si256(was_finite, is_lost);
}

static size_t add_to_bf16(uint8_t *data, const float *values, float factor, size_t count)
{
    const __m256 factors = _mm256_set1_ps(factor);
    __m256i misfits = _mm256_setzero_si256();
    for (size_t i = 0; i < count; i += 2 * LANES) {
        __m256i sums[2], magnitudes[2];
        for (int half = 0; half < 2; half++) {
            size_t at = i + (size_t)half * LANES;
            __m256 number = _mm256_castsi256_ps(widen_bf16(data + 2 * at));
            __m256 product = _mm256_mul_ps(factors, load_f32(values + at));
            sums[half] = _mm256_castps_si256(_mm256_add_ps(number, product));
            magnitudes[half] = magnitude_of(sums[half]);
            misfits =
                count_lanes(misfits, lost_of(number, magnitudes[half], LARGEST_THAT_FITS_BF16));
        }
        store_bf16(data + 2 * i, round_to_bf16(sums[0], magnitudes[0]),
                   round_to_bf16(sums[1], magnitudes[1]));
    }
    return sum_lanes(misfits);
}

static size_t add_to_f32(float *data, const float *values, float factor, size_t count)
{
    const __m256 factors = _mm256_set1_ps(factor);
    __m256i misfits = _mm256_setzero_si256();
    for (size_t i = 0; i < count; i += LANES) {
        __m256 number = load_f32(data + i);
        __m256 sum = _mm256_add_ps(number, _mm256_mul_ps(factors, load_f32(values + i)));
        __m256i magnitude = magnitude_of(_mm256_castps_si256(sum));
        misfits = count_lanes(misfits, lost_of(number, magnitude, LARGEST_OF_F32));
        _mm256_storeu_ps(data + i, sum);
    }
    return sum_lanes(misfits);
}

static size_t add_by_casts(uint8_t *data, fsdp_dtype type, const float *values, float factor,
                           size_t count)
{
    size_t size = fsdp_dtype_size(type), misfits = 0;
    float sums[BLOCK];
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t n = count - done < BLOCK ? count - done : BLOCK;
        misfits += fsdp_cast_avx2(sums, FSDP_F32, data + done * size, type, n, FSDP_OVERFLOW_FAIL);
        size_t whole = n / LANES * LANES;
        misfits += add_to_f32(sums, values + done, factor, whole);
        for (size_t i = whole; i < n; i++) {
            float sum = sums[i] + factor * values[done + i];
            misfits += isfinite(sums[i]) && !isfinite(sum);
            sums[i] = sum;
        }
        misfits += fsdp_cast_avx2(data + done * size, type, sums, FSDP_F32, n, FSDP_OVERFLOW_FAIL);
    }
    return misfits;
}

size_t fsdp_add_scaled_avx2(void *data, fsdp_dtype type, const float *values, float factor,
                            size_t count)
{
    size_t whole = count / (2 * LANES) * (2 * LANES), misfits = 0;
    if (type != FSDP_BF16 && type != FSDP_F32)
        return add_by_casts(data, type, values, factor, count);
    if (type == FSDP_BF16)
        misfits = add_to_bf16(data, values, factor, whole);
    else
        misfits = add_to_f32((float *)(void *)data, values, factor, whole);
    return misfits + fsdp_add_scaled_c((uint8_t *)data + whole * fsdp_dtype_size(type), type,
                                       values + whole, factor, count - whole);
}

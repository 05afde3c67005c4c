/*
 * CRC-32 with carry-less multiplication: 64 bytes a step are folded onto the next 64, which leaves
 * the remainder as it was; the last 16 bytes and an incomplete step go through the tables.
 * The constants are powers of x that carry a 64-bit half over 512 and 128 bits, bits reversed.
 */
#include "kernels/variants.h"

#include <immintrin.h>

enum { LANE = 16, LANES = 4, STEP = LANE * LANES };

static __m128i load(const uint8_t *data)
{
    return _mm_loadu_si128((const __m128i *)data);
}

static inline __m128i fold(__m128i lane, __m128i over, __m128i onto)
{
    __m128i low = _mm_clmulepi64_si128(lane, over, 0x00);
    __m128i high = _mm_clmulepi64_si128(lane, over, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

/* Folds all whole steps into 16 bytes with the same remainder; at least one. */
static __m128i fold_steps(uint32_t state, const uint8_t *data, size_t steps)
{
    const __m128i over_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i over_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i lanes[LANES];
    for (int i = 0; i < LANES; i++)
        lanes[i] = load(data + i * LANE);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)state));
    while (--steps > 0) {
        data += STEP;
        for (int i = 0; i < LANES; i++)
            lanes[i] = fold(lanes[i], over_512, load(data + i * LANE));
    }
    for (int i = 1; i < LANES; i++)
        lanes[i] = fold(lanes[i - 1], over_128, lanes[i]);
    return lanes[LANES - 1];
}

uint32_t fsdp_crc32_add_clmul(uint32_t state, const uint8_t *data, size_t size)
{
    size_t steps = size / STEP;
    if (steps > 0) {
        uint8_t folded[LANE];
        _mm_storeu_si128((__m128i *)folded, fold_steps(state, data, steps));
        state = fsdp_crc32_add_c(0, folded, LANE);
    }
    return fsdp_crc32_add_c(state, data + steps * STEP, size - steps * STEP);
}

/* Encodes blocks of 8 bits (q8_0) in plain C, as ggml's reference code does: see kernels.h and quants.h. */
#include "kernels/variants.h"

#include "kernels/cast/f16.h"

#include <math.h>

enum { SMALL = 32, BLOCK_BYTES = 2 + SMALL };

/* The nearest integer, halves away from zero as roundf has them, and 0 outside the range. Selects
 * are of bits and half is the float below it, so that the loop over a block becomes vectors. */
static inline uint8_t round_to_byte(float value)
{
    const uint32_t bits_of_127_5 = 0x42FF0000;
    const float below_half = 0x1.FFFFFEp-2F;
    uint32_t bits, rest;
    float magnitude;
    memcpy(&bits, &value, sizeof bits);
    rest = bits & 0x7FFFFFFF;
    rest &= 0U - (rest < bits_of_127_5);
    memcpy(&magnitude, &rest, sizeof magnitude);
    uint32_t whole = (uint32_t)(int)(magnitude + below_half), minus = 0U - (bits >> 31);
    return (uint8_t)((whole ^ minus) - minus);
}

/* The largest magnitude; a NaN is larger than all, as its bits are. */
static float largest_magnitude(const float *values)
{
    uint32_t bits[SMALL], most_bits = 0;
    float most;
    memcpy(bits, values, sizeof bits);
    for (int i = 0; i < SMALL; i++) {
        uint32_t magnitude = bits[i] & 0x7FFFFFFF;
        most_bits = magnitude > most_bits ? magnitude : most_bits;
    }
    memcpy(&most, &most_bits, sizeof most);
    return most;
}

static float encode_q8_0(const float *values, uint8_t *block)
{
    float scale = largest_magnitude(values) / 127;
    float inverse = scale == 0 ? 0 : 1 / scale;
    uint8_t numbers[SMALL];
    for (int i = 0; i < SMALL; i++)
        numbers[i] = round_to_byte(values[i] * inverse);
    memcpy(block + 2, numbers, sizeof numbers);
    to_f16(scale, block);
    return scale;
}

size_t fsdp_encode_q8_0_c(const float *values, size_t count, void *blocks_out)
{
    uint8_t *block = blocks_out;
    size_t overflows = 0;
    for (size_t i = 0; i < count; i++, block += BLOCK_BYTES, values += SMALL) {
        float scale = encode_q8_0(values, block);
        overflows += isfinite(scale) && isinf(from_f16(block));
    }
    return overflows;
}

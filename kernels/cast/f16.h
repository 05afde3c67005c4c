/* Single f16 numbers, as scales of blocks are. kernels.h casts arrays. */
#ifndef FSDP_F16_H
#define FSDP_F16_H

#include <stdint.h>
#include <string.h>

static inline float from_f16(const uint8_t *from)
{
    uint32_t code = (uint32_t)from[0] | (uint32_t)from[1] << 8;
    uint32_t sign = (code & 0x8000) << 16, exponent = code >> 10 & 31, mantissa = code & 0x3FF;
    if (exponent == 0) { /* zero, or subnormal: mantissa * 2^-24 is exact */
        float value = (float)mantissa * 0x1p-24F;
        return sign ? -value : value;
    }
    uint32_t wide = exponent == 31 ? 0xFF : exponent + 127 - 15;
    uint32_t bits = sign | wide << 23 | mantissa << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds to nearest, ties to even. */
static inline void to_f16(float value, uint8_t *to)
{
    uint32_t bits, code;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) {
        code = 0x7E00 | (rest >> 13 & 0x3FF);
    } else if (rest >= 0x477FF000) { /* rounds to 2^16 or more */
        code = 0x7C00;
    } else if (rest <
               0x38800000) { /* subnormal: counts of 2^-24; adding 0.5 rounds at that digit */
        float magnitude;
        memcpy(&magnitude, &rest, sizeof magnitude);
        magnitude += 0.5F;
        memcpy(&code, &magnitude, sizeof code);
        code -= 0x3F000000;
    } else {
        code = (rest + 0xFFF + (rest >> 13 & 1) - ((127 - 15) << 23)) >> 13;
    }
    code |= sign;
    to[0] = (uint8_t)code;
    to[1] = (uint8_t)(code >> 8);
}

#endif

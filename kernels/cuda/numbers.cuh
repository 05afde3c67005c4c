/*
 * Elements of any floating type as f32 or f64, and back, 8 at a time: the casts of kernels/cast/cast.c, bit
 * for bit. All types but f64 pass through the bits of an f32, which holds each of their values. An f64 that
 * goes to a type narrower than f32 becomes an f32 that is rounded to odd: its last bit keeps that something
 * was cut off, so that the second rounding gives the bits of a single one.
 *
 * The type is the same for all threads of a block: switches over it do not diverge.
 */
#ifndef FSDP_NUMBERS_CUH
#define FSDP_NUMBERS_CUH

#include "kernels/cuda/units.cuh"

#include <fsdp/dtype.h>
#include <string.h>

constexpr uint32_t FSDP_F32_SIGN = 0x80000000u, FSDP_F32_INFINITY = 0x7f800000u, FSDP_F32_QUIET = 0x00400000u;
constexpr uint32_t FSDP_F32_FRACTION = 0x007fffffu, FSDP_F32_HIDDEN = 0x00800000u;

template <typename to, typename from> FSDP_DEVICE to fsdp_bits(from value)
{
    static_assert(sizeof(to) == sizeof(from), "bits are kept");
    to result;
    memcpy(&result, &value, sizeof result);
    return result;
}

FSDP_DEVICE uint32_t fsdp_type_size(uint32_t type)
{
    switch (type) {
    case FSDP_F64: return 8;
    case FSDP_F32: return 4;
    case FSDP_F16:
    case FSDP_BF16: return 2;
    default: return 1;
    }
}

/* --- types narrower than f32 ------------------------------------------------------------------ */

enum fsdp_specials { FSDP_IEEE, FSDP_ALL_ONES_NAN, FSDP_MINUS_ZERO_NAN };

/*
 * f16 and the types of 8 bits: bits of their exponent and mantissa. The numbers are in registers that all
 * threads share: one piece of code is short, and shifts by a register cost no more than others.
 */
struct fsdp_narrow {
    uint32_t exponent, mantissa, bias;
    fsdp_specials specials;
};

FSDP_DEVICE fsdp_narrow fsdp_narrow_of(uint32_t type)
{
    switch (type) {
    case FSDP_F8_E4M3FN: return {4, 3, 7, FSDP_ALL_ONES_NAN};
    case FSDP_F8_E5M2: return {5, 2, 15, FSDP_IEEE};
    case FSDP_F8_E4M3FNUZ: return {4, 3, 8, FSDP_MINUS_ZERO_NAN};
    case FSDP_F8_E5M2FNUZ: return {5, 2, 16, FSDP_MINUS_ZERO_NAN};
    default: return {5, 10, 15, FSDP_IEEE};
    }
}

FSDP_DEVICE uint32_t fsdp_sign_bit(const fsdp_narrow &type)
{
    return 1u << (type.exponent + type.mantissa);
}

/* The code of infinity, in IEEE's types. */
FSDP_DEVICE uint32_t fsdp_top(const fsdp_narrow &type)
{
    return ((1u << type.exponent) - 1) << type.mantissa;
}

/* The only NaN of the other types. */
FSDP_DEVICE uint32_t fsdp_nan_code(const fsdp_narrow &type)
{
    return type.specials == FSDP_ALL_ONES_NAN ? fsdp_sign_bit(type) - 1 : fsdp_sign_bit(type);
}

FSDP_DEVICE uint32_t fsdp_largest(const fsdp_narrow &type)
{
    return type.specials == FSDP_IEEE ? fsdp_top(type) - 1 : fsdp_nan_code(type) - 1;
}

FSDP_DEVICE uint32_t fsdp_decode_one(const fsdp_narrow &type, uint32_t code)
{
    uint32_t magnitude = code & (fsdp_sign_bit(type) - 1), shift = 23 - type.mantissa;
    uint32_t sign = (code & fsdp_sign_bit(type)) << (31 - type.exponent - type.mantissa);
    uint32_t unit = (127 + 1 - type.bias - type.mantissa) << 23; /* the smallest subnormal */
    uint32_t normal = (magnitude << shift) + ((127 - type.bias) << 23);
    uint32_t subnormal = fsdp_bits<uint32_t>((float)(int)magnitude * fsdp_bits<float>(unit));
    uint32_t bits = magnitude >> type.mantissa ? normal : subnormal;
    if (type.specials == FSDP_IEEE)
        return sign | (magnitude < fsdp_top(type)
                           ? bits
                           : FSDP_F32_INFINITY | (magnitude - fsdp_top(type)) << shift);
    uint32_t is_nan_of = type.specials == FSDP_ALL_ONES_NAN ? magnitude : code;
    if (is_nan_of != fsdp_nan_code(type))
        return sign | bits;
    sign = type.specials == FSDP_ALL_ONES_NAN ? sign : 0;
    return sign | FSDP_F32_INFINITY | FSDP_F32_QUIET;
}

/*
 * Rounds a finite magnitude to nearest, ties to even. The result may be larger than the largest code. An
 * f32 that is subnormal has no hidden bit, but is far below half of the smallest subnormal of these types.
 */
FSDP_DEVICE uint32_t fsdp_round_one(const fsdp_narrow &type, uint32_t magnitude)
{
    int exponent = (int)(magnitude >> 23) - 127 + (int)type.bias;
    uint32_t significand = (magnitude & FSDP_F32_FRACTION) | FSDP_F32_HIDDEN;
    uint32_t base = exponent >= 1 ? (uint32_t)(exponent - 1) << type.mantissa : 0;
    uint32_t shift = 23 - type.mantissa + (exponent >= 1 ? 0 : (uint32_t)(1 - exponent));
    shift = shift < 25 ? shift : 25;
    uint32_t odd = significand >> shift & 1;
    return base + ((significand + (1u << (shift - 1)) - 1 + odd) >> shift);
}

FSDP_DEVICE uint32_t fsdp_encode_one(const fsdp_narrow &type, uint32_t bits)
{
    uint32_t magnitude = bits & ~FSDP_F32_SIGN;
    uint32_t sign = bits >> (31 - type.exponent - type.mantissa) & fsdp_sign_bit(type);
    uint32_t payload = ((magnitude | FSDP_F32_QUIET) & FSDP_F32_FRACTION) >> (23 - type.mantissa);
    bool is_ieee = type.specials == FSDP_IEEE;
    uint32_t code = fsdp_round_one(type, magnitude);
    if (code > fsdp_largest(type))
        code = is_ieee ? fsdp_top(type) : fsdp_nan_code(type);
    if (magnitude > FSDP_F32_INFINITY)
        code = is_ieee ? fsdp_top(type) | payload : fsdp_nan_code(type);
    if (type.specials == FSDP_MINUS_ZERO_NAN && code == 0)
        return code;
    return code | sign; /* the NaN of minus zero has the sign's bit already */
}

FSDP_DEVICE uint32_t fsdp_quiet(uint32_t bits)
{
    return (bits & ~FSDP_F32_SIGN) > FSDP_F32_INFINITY ? bits | FSDP_F32_QUIET : bits;
}

/* bf16 is the upper half of an f32, subnormals included. */
FSDP_DEVICE uint32_t fsdp_encode_bf16(uint32_t bits)
{
    if ((bits & ~FSDP_F32_SIGN) > FSDP_F32_INFINITY)
        return (bits | FSDP_F32_QUIET) >> 16;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Powers of two without a sign: see kernels/cast/cast.c. The smallest one, 2^-127, is a subnormal f32. */
FSDP_DEVICE uint32_t fsdp_decode_e8m0(uint32_t code)
{
    if (code == 0xff)
        return FSDP_F32_INFINITY | FSDP_F32_QUIET;
    return code == 0 ? FSDP_F32_HIDDEN / 2 : code << 23;
}

FSDP_DEVICE uint32_t fsdp_encode_e8m0(uint32_t bits)
{
    uint32_t magnitude = bits & ~FSDP_F32_SIGN;
    if (magnitude >= FSDP_F32_INFINITY)
        return 0xff;
    if (magnitude < FSDP_F32_HIDDEN) /* between 2^-127 and 2^-126 the middle is rounded up, too */
        return magnitude >= FSDP_F32_HIDDEN / 4 * 3 ? 1 : 0;
    return (magnitude + FSDP_F32_HIDDEN / 2) >> 23;
}

/* Codes of a type of at most 4 bytes become bits of f32; NaN keeps its payload, and may be a signaling
 * one. */
FSDP_DEVICE void fsdp_decode(uint32_t codes[FSDP_UNIT], uint32_t type)
{
    if (type == FSDP_F32)
        return;
    if (type == FSDP_BF16) {
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] <<= 16;
    } else if (type == FSDP_F8_E8M0FNU) {
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] = fsdp_decode_e8m0(codes[i]);
    } else {
        const fsdp_narrow narrow = fsdp_narrow_of(type);
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] = fsdp_decode_one(narrow, codes[i]);
    }
}

FSDP_DEVICE void fsdp_encode(uint32_t codes[FSDP_UNIT], uint32_t type)
{
    if (type == FSDP_F32) {
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] = fsdp_quiet(codes[i]);
    } else if (type == FSDP_BF16) {
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] = fsdp_encode_bf16(codes[i]);
    } else if (type == FSDP_F8_E8M0FNU) {
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] = fsdp_encode_e8m0(codes[i]);
    } else {
        const fsdp_narrow narrow = fsdp_narrow_of(type);
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] = fsdp_encode_one(narrow, codes[i]);
    }
}

/* --- f64 -------------------------------------------------------------------------------------- */

FSDP_DEVICE uint32_t fsdp_f64_nan_to_f32(uint64_t bits)
{
    uint32_t sign = (uint32_t)(bits >> 32) & FSDP_F32_SIGN;
    uint32_t payload = (uint32_t)(bits >> 29) & FSDP_F32_FRACTION;
    return sign | FSDP_F32_INFINITY | FSDP_F32_QUIET | payload;
}

/* The bits of the nearest f32; is_odd: of one that still shows whether the number lies above or below it. */
FSDP_DEVICE uint32_t fsdp_f64_to_f32(double number, bool is_odd)
{
    if (number != number)
        return fsdp_f64_nan_to_f32(fsdp_bits<uint64_t>(number));
    float nearest = (float)number;
    uint32_t bits = fsdp_bits<uint32_t>(nearest);
    double size = fabs(number), rounded = fabs((double)nearest);
    if (is_odd && rounded != size)
        bits = (rounded > size ? bits - 1 : bits) | 1;
    return bits;
}

FSDP_DEVICE double fsdp_f32_to_f64(uint32_t bits)
{
    if ((bits & ~FSDP_F32_SIGN) > FSDP_F32_INFINITY) {
        uint64_t payload = bits & FSDP_F32_FRACTION;
        uint64_t sign = (uint64_t)(bits & FSDP_F32_SIGN) << 32;
        return fsdp_bits<double>(sign | (uint64_t)0x7ff8 << 48 | payload << 29);
    }
    return (double)fsdp_bits<float>(bits);
}

/* --- numbers of a unit ------------------------------------------------------------------------ */

/* Elements `unit` of a tensor at data; those that the mask leaves out become 0. */
FSDP_DEVICE void fsdp_read(float numbers[FSDP_UNIT], const uint8_t *data, uint32_t type, fsdp_unit unit)
{
    uint32_t codes[FSDP_UNIT];
    const uint8_t *from = data + unit.at * (int64_t)fsdp_type_size(type);
    if (type == FSDP_F64) {
        uint64_t wide[FSDP_UNIT];
        fsdp_load_codes(wide, from, unit.mask);
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] = fsdp_f64_to_f32(fsdp_bits<double>(wide[i]), false);
    } else {
        fsdp_load_codes(codes, from, fsdp_type_size(type), unit.mask);
        fsdp_decode(codes, type);
    }
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++)
        numbers[i] = fsdp_bits<float>(codes[i]);
}

FSDP_DEVICE void fsdp_read(double numbers[FSDP_UNIT], const uint8_t *data, uint32_t type, fsdp_unit unit)
{
    const uint8_t *from = data + unit.at * (int64_t)fsdp_type_size(type);
    if (type == FSDP_F64) {
        uint64_t wide[FSDP_UNIT];
        fsdp_load_codes(wide, from, unit.mask);
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            numbers[i] = fsdp_bits<double>(wide[i]);
        return;
    }
    uint32_t codes[FSDP_UNIT];
    fsdp_load_codes(codes, from, fsdp_type_size(type), unit.mask);
    fsdp_decode(codes, type);
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++)
        numbers[i] = fsdp_f32_to_f64(codes[i]);
}

FSDP_DEVICE void fsdp_write(uint8_t *data, uint32_t type, fsdp_unit unit, const float numbers[FSDP_UNIT])
{
    uint32_t codes[FSDP_UNIT];
    uint8_t *to = data + unit.at * (int64_t)fsdp_type_size(type);
    if (type == FSDP_F64) {
        uint64_t wide[FSDP_UNIT];
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            wide[i] = fsdp_bits<uint64_t>(fsdp_f32_to_f64(fsdp_bits<uint32_t>(numbers[i])));
        fsdp_store_codes(to, wide, unit.mask);
        return;
    }
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++)
        codes[i] = fsdp_bits<uint32_t>(numbers[i]);
    fsdp_encode(codes, type);
    fsdp_store_codes(to, codes, fsdp_type_size(type), unit.mask);
}

FSDP_DEVICE void fsdp_write(uint8_t *data, uint32_t type, fsdp_unit unit, const double numbers[FSDP_UNIT])
{
    uint8_t *to = data + unit.at * (int64_t)fsdp_type_size(type);
    if (type == FSDP_F64) {
        uint64_t wide[FSDP_UNIT];
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            wide[i] = fsdp_bits<uint64_t>(numbers[i]);
        fsdp_store_codes(to, wide, unit.mask);
        return;
    }
    uint32_t codes[FSDP_UNIT];
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++)
        codes[i] = fsdp_f64_to_f32(numbers[i], type != FSDP_F32);
    fsdp_encode(codes, type);
    fsdp_store_codes(to, codes, fsdp_type_size(type), unit.mask);
}

#endif

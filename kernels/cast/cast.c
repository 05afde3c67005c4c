/*
 * Casts between all real floating types in plain C. Every value of every type is exact in f64, so
 * a cast is two loops over a small block: decode to the bits of an f64, encode from them with one
 * rounding. Rounding is done on integers: the result does not depend on the processor's mode.
 *
 * - Rounding is to nearest, ties to even; values too small become subnormal or a signed zero.
 * - NaN becomes a quiet NaN of the same sign with the leading bits of the payload, or the one NaN
 *   that the type has.
 * - Infinity becomes infinity, or NaN in a type without one; CLAMP takes it to the largest finite
 *   value, as it does finite values that are too large.
 * - e8m0 has powers of two only, no sign and no zero: as in PyTorch the sign is dropped, and zero
 *   and everything smaller becomes 2^-127; halfway between two powers is rounded up. A negative
 *   value counts as one that did not fit.
 */
#include "kernels/variants.h"

#include <stdbool.h>
#include <string.h>

enum { BLOCK = 256, WIDE_MANTISSA = 52, WIDE_BIAS = 1023, WORTH_A_TABLE = 4096 };

#define WIDE_SIGN (UINT64_C(1) << 63)
#define WIDE_INFINITY (UINT64_C(0x7ff) << 52)
#define WIDE_HIDDEN (UINT64_C(1) << 52)
#define WIDE_FRACTION (WIDE_HIDDEN - 1)
#define WIDE_QUIET (UINT64_C(1) << 51)

typedef enum specials {
    WITH_INFINITY,  /* IEEE: the top exponent is infinity and NaNs */
    ALL_ONES_NAN,   /* fn: only the code of all ones is NaN */
    MINUS_ZERO_NAN, /* fnuz: the code of minus zero is the NaN */
} specials;

typedef struct float_layout {
    size_t size;
    int exponent; /* bits */
    int mantissa; /* bits */
    int bias;
    specials specials;
} float_layout;

static const float_layout f32 = {4, 8, 23, 127, WITH_INFINITY};
static const float_layout f16 = {2, 5, 10, 15, WITH_INFINITY};
static const float_layout bf16 = {2, 8, 7, 127, WITH_INFINITY};
static const float_layout e4m3fn = {1, 4, 3, 7, ALL_ONES_NAN};
static const float_layout e5m2 = {1, 5, 2, 15, WITH_INFINITY};
static const float_layout e4m3fnuz = {1, 4, 3, 8, MINUS_ZERO_NAN};
static const float_layout e5m2fnuz = {1, 5, 2, 16, MINUS_ZERO_NAN};

enum { E8M0_BIAS = 127, E8M0_MOST = 0xfe, E8M0_NAN = 0xff };

static inline uint64_t load(const uint8_t *from, size_t size)
{
    uint64_t code = 0;
    memcpy(&code, from, size);
    return code;
}

static inline void store(uint8_t *to, size_t size, uint64_t code)
{
    memcpy(to, &code, size);
}

static inline uint64_t sign_bit(const float_layout *layout)
{
    return UINT64_C(1) << (layout->exponent + layout->mantissa);
}

/* The code of infinity, where there is one. */
static inline uint64_t top_exponent(const float_layout *layout)
{
    return ((UINT64_C(1) << layout->exponent) - 1) << layout->mantissa;
}

static inline uint64_t largest_finite(const float_layout *layout)
{
    switch (layout->specials) {
    case WITH_INFINITY: return top_exponent(layout) - 1;
    case ALL_ONES_NAN: return sign_bit(layout) - 2;
    case MINUS_ZERO_NAN: break;
    }
    return sign_bit(layout) - 1;
}

/* An integer times a power of two: exact, and a normal f64 for every subnormal of the others. */
static inline uint64_t decode_subnormal(uint64_t magnitude, const float_layout *layout)
{
    uint64_t exponent = (uint64_t)(WIDE_BIAS + 1 - layout->bias - layout->mantissa);
    uint64_t wide = exponent << WIDE_MANTISSA;
    double unit, value;
    memcpy(&unit, &wide, sizeof unit);
    value = (double)(int32_t)magnitude * unit;
    memcpy(&wide, &value, sizeof wide);
    return wide;
}

/* decode and encode compute every case and select one, since weights mispredict every branch. */
static inline uint64_t decode(uint64_t code, const float_layout *layout)
{
    int shift = WIDE_MANTISSA - layout->mantissa;
    uint64_t magnitude = code & (sign_bit(layout) - 1);
    uint64_t sign = (code & sign_bit(layout)) << (63 - layout->exponent - layout->mantissa);
    uint64_t rebias = (uint64_t)(WIDE_BIAS - layout->bias) << WIDE_MANTISSA;
    uint64_t normal = (magnitude << shift) + rebias;
    uint64_t wide = magnitude >> layout->mantissa ? normal : decode_subnormal(magnitude, layout);
    switch (layout->specials) {
    case WITH_INFINITY: {
        uint64_t top = top_exponent(layout);
        return sign | (magnitude >= top ? WIDE_INFINITY | (magnitude - top) << shift : wide);
    }
    case ALL_ONES_NAN:
        return sign | (magnitude == sign_bit(layout) - 1 ? WIDE_INFINITY | WIDE_QUIET : wide);
    case MINUS_ZERO_NAN: break;
    }
    return code == sign_bit(layout) ? WIDE_INFINITY | WIDE_QUIET : sign | wide;
}

/* Rounds a finite magnitude; the result may lie past the largest finite code. */
static inline uint64_t round_magnitude(uint64_t magnitude, const float_layout *layout)
{
    int exponent = (int)(magnitude >> WIDE_MANTISSA) - WIDE_BIAS + layout->bias;
    uint64_t significand = (magnitude & WIDE_FRACTION) | WIDE_HIDDEN;
    uint64_t base = exponent >= 1 ? (uint64_t)(exponent - 1) << layout->mantissa : 0;
    int shift = WIDE_MANTISSA - layout->mantissa + (exponent >= 1 ? 0 : 1 - exponent);
    /* From here on a significand is below half of the smallest subnormal: zero, and f64's own. */
    shift = shift < WIDE_MANTISSA + 2 ? shift : WIDE_MANTISSA + 2;
    uint64_t below_half = (UINT64_C(1) << (shift - 1)) - 1;
    uint64_t odd = significand >> shift & 1;
    return base + ((significand + below_half + odd) >> shift);
}

/* NaN, without its sign. */
static inline uint64_t encode_nan(uint64_t wide, const float_layout *layout)
{
    uint64_t fraction = (wide | WIDE_QUIET) & WIDE_FRACTION;
    switch (layout->specials) {
    case WITH_INFINITY:
        return top_exponent(layout) | fraction >> (WIDE_MANTISSA - layout->mantissa);
    case ALL_ONES_NAN: return sign_bit(layout) - 1;
    case MINUS_ZERO_NAN: break;
    }
    return sign_bit(layout);
}

/* The code, without the sign, of infinity and of values that are too large. */
static inline uint64_t encode_overflow(const float_layout *layout, fsdp_on_overflow overflow)
{
    if (overflow == FSDP_OVERFLOW_CLAMP)
        return largest_finite(layout);
    return layout->specials == WITH_INFINITY ? top_exponent(layout) : encode_nan(0, layout);
}

static inline uint64_t encode(uint64_t wide, const float_layout *layout, fsdp_on_overflow overflow,
                              size_t *misfits)
{
    uint64_t magnitude = wide & ~WIDE_SIGN;
    uint64_t sign = wide >> (63 - layout->exponent - layout->mantissa) & sign_bit(layout);
    uint64_t rounded = round_magnitude(magnitude, layout);
    bool is_too_large = rounded > largest_finite(layout);
    uint64_t code = is_too_large ? encode_overflow(layout, overflow) : rounded;
    code = magnitude > WIDE_INFINITY ? encode_nan(wide, layout) : code;
    *misfits += is_too_large & (magnitude < WIDE_INFINITY);
    if (layout->specials == MINUS_ZERO_NAN)
        return code == 0 || code == sign_bit(layout) ? code : code | sign;
    return code | sign;
}

static inline uint64_t decode_e8m0(uint64_t code)
{
    if (code == E8M0_NAN)
        return WIDE_INFINITY | WIDE_QUIET;
    return (code + WIDE_BIAS - E8M0_BIAS) << WIDE_MANTISSA;
}

static inline uint64_t encode_e8m0(uint64_t wide, fsdp_on_overflow overflow, size_t *misfits)
{
    uint64_t magnitude = wide & ~WIDE_SIGN;
    uint64_t too_large = overflow == FSDP_OVERFLOW_CLAMP ? E8M0_MOST : E8M0_NAN;
    if (magnitude > WIDE_INFINITY)
        return E8M0_NAN;
    if (magnitude == WIDE_INFINITY)
        return too_large;
    /* Adding half of the hidden bit's worth rounds at 1.5 times a power of two. */
    int code = (int)((magnitude + WIDE_HIDDEN / 2) >> WIDE_MANTISSA) - WIDE_BIAS + E8M0_BIAS;
    bool fits = code <= E8M0_MOST && wide <= WIDE_SIGN;
    *misfits += !fits;
    if (code > E8M0_MOST)
        return too_large;
    return code < 0 ? 0 : (uint64_t)code;
}

/* The loops below become one tight loop per type: the layout is a constant where they inline. */

static inline void decode_all(uint64_t *wide, const uint8_t *from, size_t count,
                              const float_layout *layout)
{
    for (size_t i = 0; i < count; i++)
        wide[i] = decode(load(from + i * layout->size, layout->size), layout);
}

static inline size_t encode_all(uint8_t *to, const uint64_t *wide, size_t count,
                                const float_layout *layout, fsdp_on_overflow overflow)
{
    size_t misfits = 0;
    for (size_t i = 0; i < count; i++)
        store(to + i * layout->size, layout->size, encode(wide[i], layout, overflow, &misfits));
    return misfits;
}

static void decode_all_e8m0(uint64_t *wide, const uint8_t *from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        wide[i] = decode_e8m0(from[i]);
}

static size_t encode_all_e8m0(uint8_t *to, const uint64_t *wide, size_t count,
                              fsdp_on_overflow overflow)
{
    size_t misfits = 0;
    for (size_t i = 0; i < count; i++)
        to[i] = (uint8_t)encode_e8m0(wide[i], overflow, &misfits);
    return misfits;
}

/* From a narrower type everything fits. */
static size_t encode_all_f64(uint8_t *to, uint64_t *wide, size_t count, fsdp_on_overflow overflow)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t magnitude = wide[i] & ~WIDE_SIGN;
        if (magnitude > WIDE_INFINITY)
            wide[i] |= WIDE_QUIET;
        else if (magnitude == WIDE_INFINITY && overflow == FSDP_OVERFLOW_CLAMP)
            wide[i]--;
    }
    memcpy(to, wide, count * sizeof *wide);
    return 0;
}

static void decode_block(uint64_t *wide, const uint8_t *from, fsdp_dtype type, size_t count)
{
    switch (type) {
    case FSDP_F64: memcpy(wide, from, count * sizeof *wide); break;
    case FSDP_F32: decode_all(wide, from, count, &f32); break;
    case FSDP_F16: decode_all(wide, from, count, &f16); break;
    case FSDP_BF16: decode_all(wide, from, count, &bf16); break;
    case FSDP_F8_E4M3FN: decode_all(wide, from, count, &e4m3fn); break;
    case FSDP_F8_E5M2: decode_all(wide, from, count, &e5m2); break;
    case FSDP_F8_E4M3FNUZ: decode_all(wide, from, count, &e4m3fnuz); break;
    case FSDP_F8_E5M2FNUZ: decode_all(wide, from, count, &e5m2fnuz); break;
    case FSDP_F8_E8M0FNU: decode_all_e8m0(wide, from, count); break;
    default: memset(wide, 0, count * sizeof *wide); break;
    }
}

static size_t encode_block(uint8_t *to, fsdp_dtype type, uint64_t *wide, size_t count,
                           fsdp_on_overflow overflow)
{
    switch (type) {
    case FSDP_F64: return encode_all_f64(to, wide, count, overflow);
    case FSDP_F32: return encode_all(to, wide, count, &f32, overflow);
    case FSDP_F16: return encode_all(to, wide, count, &f16, overflow);
    case FSDP_BF16: return encode_all(to, wide, count, &bf16, overflow);
    case FSDP_F8_E4M3FN: return encode_all(to, wide, count, &e4m3fn, overflow);
    case FSDP_F8_E5M2: return encode_all(to, wide, count, &e5m2, overflow);
    case FSDP_F8_E4M3FNUZ: return encode_all(to, wide, count, &e4m3fnuz, overflow);
    case FSDP_F8_E5M2FNUZ: return encode_all(to, wide, count, &e5m2fnuz, overflow);
    case FSDP_F8_E8M0FNU: return encode_all_e8m0(to, wide, count, overflow);
    default: return 0;
    }
}

static size_t cast_blocks(uint8_t *to, fsdp_dtype to_type, const uint8_t *from,
                          fsdp_dtype from_type, size_t count, fsdp_on_overflow overflow)
{
    size_t to_size = fsdp_dtype_size(to_type);
    size_t from_size = fsdp_dtype_size(from_type);
    size_t misfits = 0;
    for (size_t first = 0; first < count; first += BLOCK) {
        size_t n = count - first < BLOCK ? count - first : BLOCK;
        uint64_t wide[BLOCK];
        decode_block(wide, from + first * from_size, from_type, n);
        misfits += encode_block(to + first * to_size, to_type, wide, n, overflow);
    }
    return misfits;
}

static inline size_t look_up(uint8_t *to, size_t to_size, const uint8_t *from, size_t count,
                             const uint64_t codes[256], const uint8_t misfits[256])
{
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        store(to + i * to_size, to_size, codes[from[i]]);
        total += misfits[from[i]];
    }
    return total;
}

/* An 8-bit type has so few codes that each is cast once and then looked up. */
static size_t cast_by_table(uint8_t *to, fsdp_dtype to_type, const uint8_t *from,
                            fsdp_dtype from_type, size_t count, fsdp_on_overflow overflow)
{
    uint64_t codes[256];
    uint8_t misfits[256];
    for (unsigned i = 0; i < 256; i++) {
        const uint64_t code = i;
        misfits[i] = (uint8_t)cast_blocks((uint8_t *)&codes[i], to_type, (const uint8_t *)&code,
                                          from_type, 1, overflow);
    }
    switch (fsdp_dtype_size(to_type)) {
    case 8: return look_up(to, 8, from, count, codes, misfits);
    case 4: return look_up(to, 4, from, count, codes, misfits);
    case 2: return look_up(to, 2, from, count, codes, misfits);
    default: return look_up(to, 1, from, count, codes, misfits);
    }
}

size_t fsdp_cast_c(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                   size_t count, fsdp_on_overflow overflow)
{
    if (to_type == from_type) {
        if (count > 0)
            memcpy(to, from, count * fsdp_dtype_size(to_type));
        return 0;
    }
    if (fsdp_dtype_size(from_type) == 1 && count >= WORTH_A_TABLE)
        return cast_by_table(to, to_type, from, from_type, count, overflow);
    return cast_blocks(to, to_type, from, from_type, count, overflow);
}

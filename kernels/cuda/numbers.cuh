/*
 * Elements of any floating type as f32 or f64, and back: the casts of kernels/cast/cast.c, bit for bit. All
 * types but f64 pass through the bits of an f32, which holds each of their values. An f64 that goes to a type
 * narrower than f32 becomes an f32 that is rounded to odd: its last bit keeps that something was cut off, so
 * that the second rounding gives the bits of a single one.
 *
 * The type is the same for all threads of a block, so that switches over it do not diverge; where it is a
 * constant, nothing of the switch is left. Words of CUDA convert f16, e4m3fn and e5m2; here is what they do
 * otherwise than C: NaNs, and numbers that are too large.
 */
#ifndef FSDP_NUMBERS_CUH
#define FSDP_NUMBERS_CUH

#include "kernels/cuda/units.cuh"

#include <fsdp/dtype.h>
#include <string.h>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

constexpr uint32_t FSDP_F32_SIGN = 0x80000000u, FSDP_F32_INFINITY = 0x7f800000u, FSDP_F32_QUIET = 0x00400000u;
constexpr uint32_t FSDP_F32_FRACTION = 0x007fffffu, FSDP_F32_HIDDEN = 0x00800000u;

template <typename to, typename from> FSDP_DEVICE to fsdp_bits(from value)
{
    static_assert(sizeof(to) == sizeof(from), "bits are kept");
    to result;
    memcpy(&result, &value, sizeof result);
    return result;
}

static constexpr __host__ __device__ uint32_t fsdp_type_size(uint32_t type)
{
    switch (type) {
    case FSDP_F64: return 8;
    case FSDP_F32: return 4;
    case FSDP_F16:
    case FSDP_BF16: return 2;
    default: return 1;
    }
}

/* One number for two types, or three, for switches. */
static constexpr __host__ __device__ uint32_t fsdp_types(uint32_t first, uint32_t second, uint32_t third = 0)
{
    return first | second << 8 | third << 16;
}

/* --- types with a conversion of CUDA ---------------------------------------------------------- */

/* CUDA's NaN has no payload. */
FSDP_DEVICE uint32_t fsdp_decode_f16(uint32_t code)
{
    uint32_t magnitude = code & 0x7fff;
    if (magnitude > 0x7c00)
        return (code & 0x8000) << 16 | FSDP_F32_INFINITY | (code & 0x3ff) << 13;
    return fsdp_bits<uint32_t>(__half2float(__ushort_as_half((uint16_t)code)));
}

FSDP_DEVICE uint32_t fsdp_encode_f16(uint32_t bits)
{
    if ((bits & ~FSDP_F32_SIGN) > FSDP_F32_INFINITY)
        return (bits >> 16 & 0x8000) | 0x7e00 | (bits & FSDP_F32_FRACTION) >> 13;
    return __half_as_ushort(__float2half_rn(fsdp_bits<float>(bits)));
}

/* Has one NaN of each sign, and no infinity. */
FSDP_DEVICE uint32_t fsdp_decode_e4m3(uint32_t code)
{
    if ((code & 0x7f) == 0x7f)
        return (code & 0x80) << 24 | FSDP_F32_INFINITY | FSDP_F32_QUIET;
    const __half_raw half = __nv_cvt_fp8_to_halfraw((uint8_t)code, __NV_E4M3);
    return fsdp_bits<uint32_t>(__half2float(__ushort_as_half(half.x)));
}

/* CUDA makes numbers that are too large the largest one, 448. Above the middle between it and the next one,
 * which the type lacks, they are NaN. */
FSDP_DEVICE uint32_t fsdp_encode_e4m3(uint32_t bits)
{
    if ((bits & ~FSDP_F32_SIGN) > fsdp_bits<uint32_t>(464.0f))
        return (bits >> 24 & 0x80) | 0x7f;
    return __nv_cvt_float_to_fp8(fsdp_bits<float>(bits), __NV_SATFINITE, __NV_E4M3);
}

/* An e5m2 is the upper byte of an f16, NaNs and infinities included. */
FSDP_DEVICE uint32_t fsdp_decode_e5m2(uint32_t code)
{
    return fsdp_decode_f16(code << 8);
}

/* The middle between the largest number and the next one is rounded to infinity, which is even. */
FSDP_DEVICE uint32_t fsdp_encode_e5m2(uint32_t bits)
{
    uint32_t magnitude = bits & ~FSDP_F32_SIGN, sign = bits >> 24 & 0x80;
    if (magnitude > FSDP_F32_INFINITY)
        return sign | 0x7e | (bits & FSDP_F32_FRACTION) >> 21;
    if (magnitude >= fsdp_bits<uint32_t>(61440.0f))
        return sign | 0x7c;
    return __nv_cvt_float_to_fp8(fsdp_bits<float>(bits), __NV_SATFINITE, __NV_E5M2);
}

/* --- other types narrower than f32 ------------------------------------------------------------ */

/* bf16 is the upper half of an f32, subnormals included. */
FSDP_DEVICE uint32_t fsdp_encode_bf16(uint32_t bits)
{
    if ((bits & ~FSDP_F32_SIGN) > FSDP_F32_INFINITY)
        return (bits | FSDP_F32_QUIET) >> 16;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* e4m3fnuz and e5m2fnuz: the code of minus zero is their only NaN, and the exponent has a bias of one more
 * than that of IEEE's types. */
constexpr uint32_t FSDP_FNUZ_NAN = 0x80;

FSDP_DEVICE uint32_t fsdp_decode_fnuz(uint32_t mantissa, uint32_t code)
{
    uint32_t magnitude = code & 0x7f, bias = 1u << (6 - mantissa);
    uint32_t unit = (127 + 1 - bias - mantissa) << 23; /* the smallest subnormal */
    uint32_t normal = (magnitude << (23 - mantissa)) + ((127 - bias) << 23);
    uint32_t subnormal = fsdp_bits<uint32_t>((float)(int)magnitude * fsdp_bits<float>(unit));
    if (code == FSDP_FNUZ_NAN)
        return FSDP_F32_INFINITY | FSDP_F32_QUIET;
    return (code & 0x80) << 24 | (magnitude >> mantissa ? normal : subnormal);
}

/*
 * Rounds a finite magnitude to nearest, ties to even. The result may be larger than the largest code. An
 * f32 that is subnormal has no hidden bit, but is far below half of the smallest subnormal of these types.
 */
FSDP_DEVICE uint32_t fsdp_round_fnuz(uint32_t mantissa, uint32_t magnitude)
{
    int exponent = (int)(magnitude >> 23) - 127 + (1 << (6 - mantissa));
    uint32_t significand = (magnitude & FSDP_F32_FRACTION) | FSDP_F32_HIDDEN;
    uint32_t base = exponent >= 1 ? (uint32_t)(exponent - 1) << mantissa : 0;
    uint32_t shift = 23 - mantissa + (exponent >= 1 ? 0 : (uint32_t)(1 - exponent));
    shift = shift < 25 ? shift : 25;
    uint32_t odd = significand >> shift & 1;
    return base + ((significand + (1u << (shift - 1)) - 1 + odd) >> shift);
}

FSDP_DEVICE uint32_t fsdp_encode_fnuz(uint32_t mantissa, uint32_t bits)
{
    uint32_t magnitude = bits & ~FSDP_F32_SIGN, code = fsdp_round_fnuz(mantissa, magnitude);
    if (magnitude >= FSDP_F32_INFINITY || code > 0x7f)
        return FSDP_FNUZ_NAN;
    return code == 0 ? 0 : code | (bits >> 24 & 0x80);
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

/* --- any type of at most 4 bytes -------------------------------------------------------------- */

/* Bits of an f32; NaN keeps its payload, and may be a signaling one. */
FSDP_DEVICE uint32_t fsdp_decode(uint32_t code, uint32_t type)
{
    switch (type) {
    case FSDP_F32: return code;
    case FSDP_BF16: return code << 16;
    case FSDP_F16: return fsdp_decode_f16(code);
    case FSDP_F8_E4M3FN: return fsdp_decode_e4m3(code);
    case FSDP_F8_E5M2: return fsdp_decode_e5m2(code);
    case FSDP_F8_E4M3FNUZ: return fsdp_decode_fnuz(3, code);
    case FSDP_F8_E5M2FNUZ: return fsdp_decode_fnuz(2, code);
    default: return fsdp_decode_e8m0(code);
    }
}

FSDP_DEVICE uint32_t fsdp_quiet(uint32_t bits)
{
    return (bits & ~FSDP_F32_SIGN) > FSDP_F32_INFINITY ? bits | FSDP_F32_QUIET : bits;
}

FSDP_DEVICE uint32_t fsdp_encode(uint32_t bits, uint32_t type)
{
    switch (type) {
    case FSDP_F32: return fsdp_quiet(bits);
    case FSDP_BF16: return fsdp_encode_bf16(bits);
    case FSDP_F16: return fsdp_encode_f16(bits);
    case FSDP_F8_E4M3FN: return fsdp_encode_e4m3(bits);
    case FSDP_F8_E5M2: return fsdp_encode_e5m2(bits);
    case FSDP_F8_E4M3FNUZ: return fsdp_encode_fnuz(3, bits);
    case FSDP_F8_E5M2FNUZ: return fsdp_encode_fnuz(2, bits);
    default: return fsdp_encode_e8m0(bits);
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

/* --- one element ------------------------------------------------------------------------------ */

/* An element has 1, 2, 4 or 8 bytes, at any address. */
FSDP_DEVICE uint64_t fsdp_load_code(const uint8_t *from, uint32_t size)
{
    uint64_t code = 0;
    if (fsdp_is_aligned(from, size)) {
        switch (size) {
        case 8: return *(const uint64_t *)from;
        case 4: return *(const uint32_t *)from;
        case 2: return *(const uint16_t *)from;
        default: return *from;
        }
    }
#pragma unroll 1
    for (uint32_t i = 0; i < size; i++)
        code |= (uint64_t)from[i] << 8 * i;
    return code;
}

FSDP_DEVICE void fsdp_store_code(uint8_t *to, uint32_t size, uint64_t code)
{
    if (fsdp_is_aligned(to, size)) {
        switch (size) {
        case 8: *(uint64_t *)to = code; return;
        case 4: *(uint32_t *)to = (uint32_t)code; return;
        case 2: *(uint16_t *)to = (uint16_t)code; return;
        default: *to = (uint8_t)code; return;
        }
    }
#pragma unroll 1
    for (uint32_t i = 0; i < size; i++)
        to[i] = (uint8_t)(code >> 8 * i);
}

/* Returns the bits of element `at` of a tensor, which fsdp_number decodes. */
FSDP_DEVICE uint64_t fsdp_code_at(const uint8_t *data, uint32_t type, int64_t at)
{
    const uint32_t size = fsdp_type_size(type);
    return fsdp_load_code(data + at * (int64_t)size, size);
}

/* fsdp_number<float>(code, type), and <double>. */
template <typename real> FSDP_DEVICE real fsdp_number(uint64_t code, uint32_t type)
{
    if constexpr (sizeof(real) == 8) {
        return type == FSDP_F64 ? fsdp_bits<double>(code)
                                : fsdp_f32_to_f64(fsdp_decode((uint32_t)code, type));
    } else {
        return fsdp_bits<float>(type == FSDP_F64 ? fsdp_f64_to_f32(fsdp_bits<double>(code), false)
                                                 : fsdp_decode((uint32_t)code, type));
    }
}

template <typename real> FSDP_DEVICE real fsdp_read(const uint8_t *data, uint32_t type, int64_t at)
{
    return fsdp_number<real>(fsdp_code_at(data, type, at), type);
}

FSDP_DEVICE void fsdp_write(uint8_t *data, uint32_t type, int64_t at, float number)
{
    const uint32_t size = fsdp_type_size(type), bits = fsdp_bits<uint32_t>(number);
    fsdp_store_code(data + at * (int64_t)size, size,
                    type == FSDP_F64 ? fsdp_bits<uint64_t>(fsdp_f32_to_f64(bits)) : fsdp_encode(bits, type));
}

FSDP_DEVICE void fsdp_write(uint8_t *data, uint32_t type, int64_t at, double number)
{
    const uint32_t size = fsdp_type_size(type);
    fsdp_store_code(data + at * (int64_t)size, size,
                    type == FSDP_F64 ? fsdp_bits<uint64_t>(number)
                                     : fsdp_encode(fsdp_f64_to_f32(number, type != FSDP_F32), type));
}

/* --- vectors ---------------------------------------------------------------------------------- */

/* LENGTH elements of at most 4 bytes, which a thread loads and stores at once, by at most 16 bytes. */
template <uint32_t TYPE, int LENGTH> struct fsdp_vector {
    enum { SIZE = fsdp_type_size(TYPE), BYTES = SIZE * LENGTH };
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "one load");
    alignas(BYTES) uint32_t words[BYTES / 4];
};

template <uint32_t TYPE, int LENGTH>
FSDP_DEVICE void fsdp_load(fsdp_vector<TYPE, LENGTH> *vector, const uint8_t *data, int64_t at)
{
    *vector = *(const fsdp_vector<TYPE, LENGTH> *)(data + at * (int64_t)vector->SIZE);
}

/* A vector at any address, of what was loaded around it. */
template <uint32_t TYPE, int LENGTH>
FSDP_DEVICE fsdp_vector<TYPE, LENGTH> fsdp_take(const fsdp_vectors &around, const uint8_t *from)
{
    const uint4 bytes = fsdp_take_16(around, from);
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    fsdp_vector<TYPE, LENGTH> vector;
#pragma unroll
    for (int i = 0; i < vector.BYTES / 4; i++)
        vector.words[i] = words[i];
    return vector;
}

/* A thread loads a vector of a tensor, or those around it where the tensor is shifted against the others. */
template <uint32_t TYPE, int LENGTH, bool IS_SHIFTED> struct fsdp_source;

template <uint32_t TYPE, int LENGTH> struct fsdp_source<TYPE, LENGTH, false> {
    fsdp_vector<TYPE, LENGTH> loaded;

    __device__ __forceinline__ void load(const uint8_t *data, int64_t at)
    {
        fsdp_load(&loaded, data, at);
    }

    __device__ __forceinline__ fsdp_vector<TYPE, LENGTH> take(const uint8_t *, int64_t) const
    {
        return loaded;
    }
};

template <uint32_t TYPE, int LENGTH> struct fsdp_source<TYPE, LENGTH, true> {
    fsdp_vectors loaded;

    static __device__ __forceinline__ const uint8_t *address(const uint8_t *data, int64_t at)
    {
        return data + at * (int64_t)fsdp_type_size(TYPE);
    }

    __device__ __forceinline__ void load(const uint8_t *data, int64_t at)
    {
        loaded = fsdp_load_around(address(data, at), LENGTH * fsdp_type_size(TYPE));
    }

    __device__ __forceinline__ fsdp_vector<TYPE, LENGTH> take(const uint8_t *data, int64_t at) const
    {
        return fsdp_take<TYPE, LENGTH>(loaded, address(data, at));
    }
};

template <uint32_t TYPE, int LENGTH>
FSDP_DEVICE float fsdp_get(const fsdp_vector<TYPE, LENGTH> &vector, int i)
{
    constexpr int EACH = 4 / fsdp_type_size(TYPE), BITS = 32 / EACH; /* of a word */
    uint32_t code = vector.words[i / EACH] >> i % EACH * BITS;
    return fsdp_bits<float>(fsdp_decode(code & (~0u >> (32 - BITS)), TYPE));
}

template <uint32_t TYPE, int LENGTH>
FSDP_DEVICE void fsdp_store(uint8_t *data, int64_t at, const float numbers[LENGTH])
{
    using vector_type = fsdp_vector<TYPE, LENGTH>;
    constexpr int EACH = 4 / vector_type::SIZE, BITS = 32 / EACH;
    vector_type vector = {};
#pragma unroll
    for (int i = 0; i < LENGTH; i++)
        vector.words[i / EACH] |= fsdp_encode(fsdp_bits<uint32_t>(numbers[i]), TYPE) << i % EACH * BITS;
    *(vector_type *)(data + at * (int64_t)vector_type::SIZE) = vector;
}

#endif

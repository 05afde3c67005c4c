/*
 * Units of work of one thread: 8 elements, or 16 bytes. Units of a row are aligned to the address that is
 * written, not to its beginning, so that all but the first and the last one of a row are whole, and a whole
 * unit is stored by vectors of 16 bytes. It is loaded so where the source is aligned alike, else by
 * elements.
 */
#ifndef FSDP_UNITS_CUH
#define FSDP_UNITS_CUH

#include "kernels/cuda/launch.cuh"

enum {
    FSDP_THREADS = 256,
    FSDP_UNITS_EACH = 4,                       /* of one thread in a tile */
    FSDP_TILE_UNITS = FSDP_THREADS * FSDP_UNITS_EACH,
    FSDP_UNIT = 8,                             /* elements */
    FSDP_PIECE = 16                            /* bytes: the unit of copies */
};

/* Some elements of a row: bit i of mask is set when element at + i is one of them. `at` may be negative. */
struct fsdp_unit {
    int64_t at;
    uint32_t mask;
};

/* Elements from the last multiple of 16 bytes, or of a unit, to this address; 0 where none is in reach. */
template <int LENGTH> FSDP_DEVICE uint32_t fsdp_skew(const void *address, uint32_t size)
{
    uint32_t vector = size * LENGTH < 16 ? size * LENGTH : 16;
    uint32_t behind = (uint32_t)(uintptr_t)address & (vector - 1);
    return (behind & (size - 1)) == 0 ? behind / size : 0;
}

/* Unit number `index` of a row of `count` elements, which begins `skew` elements after an aligned
 * address. */
template <int LENGTH> FSDP_DEVICE fsdp_unit fsdp_unit_at(uint64_t index, uint32_t skew, uint64_t count)
{
    fsdp_unit unit = {(int64_t)(index * LENGTH) - (int64_t)skew, (1u << LENGTH) - 1};
    int64_t behind = unit.at + LENGTH - (int64_t)count;
    if (unit.at < 0)
        unit.mask &= ~((1u << (uint32_t)-unit.at) - 1);
    if (behind > 0)
        unit.mask = behind < LENGTH ? unit.mask & ((1u << (uint32_t)(LENGTH - behind)) - 1) : 0;
    return unit;
}

template <int LENGTH> FSDP_DEVICE bool fsdp_unit_is_whole(const fsdp_unit &unit)
{
    return unit.mask == (1u << LENGTH) - 1;
}

/* Units that every row has capacity for, whatever its skew; the last one may be empty. */
template <int LENGTH> static inline __host__ __device__ uint64_t fsdp_row_units(uint64_t count)
{
    return (count + 2 * LENGTH - 2) / LENGTH;
}

static inline uint64_t fsdp_unit_tiles(uint64_t units)
{
    return (units + FSDP_TILE_UNITS - 1) / FSDP_TILE_UNITS;
}

/* --- rows ------------------------------------------------------------------------------------- */

/* Row and unit of a thread in a tile of a rectangle. */
struct fsdp_place {
    uint64_t row, unit;
};

FSDP_DEVICE fsdp_place fsdp_tile_begin(uint64_t tile, uint64_t row_units)
{
    uint64_t first = tile * FSDP_TILE_UNITS;
    if (first < row_units)
        return {0, first};
    if ((first | row_units) >> 32 == 0) {
        uint32_t row = (uint32_t)first / (uint32_t)row_units;
        return {row, (uint32_t)first - row * (uint32_t)row_units};
    }
    uint64_t row = first / row_units;
    return {row, first - row * row_units};
}

/* The place `offset` units after one, less than a tile: divisions are rare and short. */
FSDP_DEVICE fsdp_place fsdp_place_behind(fsdp_place from, uint32_t offset, uint64_t row_units)
{
    uint64_t unit = from.unit + offset;
    if (unit < row_units)
        return {from.row, unit};
    if (row_units >= FSDP_TILE_UNITS)
        return {from.row + 1, unit - row_units};
    uint32_t rows = (uint32_t)unit / (uint32_t)row_units;
    return {from.row + rows, (uint32_t)unit - rows * (uint32_t)row_units};
}

/* --- bytes ------------------------------------------------------------------------------------ */

FSDP_DEVICE bool fsdp_is_aligned(const void *address, uint32_t to)
{
    return ((uint32_t)(uintptr_t)address & (to - 1)) == 0;
}

FSDP_DEVICE uint32_t fsdp_load_u32(const uint8_t *from)
{
    if (fsdp_is_aligned(from, 4))
        return *(const uint32_t *)from;
    if (fsdp_is_aligned(from, 2))
        return ((const uint16_t *)from)[0] | (uint32_t)((const uint16_t *)from)[1] << 16;
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

/* 16 bytes from any address. */
FSDP_DEVICE uint4 fsdp_load_16(const uint8_t *from)
{
    if (fsdp_is_aligned(from, 16))
        return *(const uint4 *)from;
    return {fsdp_load_u32(from), fsdp_load_u32(from + 4), fsdp_load_u32(from + 8), fsdp_load_u32(from + 12)};
}

/* The bytes of a piece that the mask has; from NULL: zeros. */
FSDP_DEVICE void fsdp_copy_piece(uint8_t *to, const uint8_t *from, uint32_t mask)
{
    for (int i = 0; i < FSDP_PIECE; i++) {
        if (mask >> i & 1)
            to[i] = from ? from[i] : 0;
    }
}

/* --- codes: the bits of 8 elements ------------------------------------------------------------ */

/*
 * Three ways: whole units at aligned addresses move as vectors, elements at addresses that are aligned to
 * them one by one, and others byte by byte. Elements that the mask leaves out become 0 in a register, and no
 * memory is touched for them.
 */

template <typename element, typename code>
FSDP_DEVICE void fsdp_load_elements(code codes[FSDP_UNIT], const uint8_t *from, uint32_t mask)
{
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++)
        codes[i] = mask >> i & 1 ? ((const element *)from)[i] : 0;
}

template <typename element, typename code>
FSDP_DEVICE void fsdp_store_elements(uint8_t *to, const code codes[FSDP_UNIT], uint32_t mask)
{
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++) {
        if (mask >> i & 1)
            ((element *)to)[i] = (element)codes[i];
    }
}

/* The codes move by one register each time: code for 8 elements would be long, and an index needs memory. */
template <typename code> FSDP_DEVICE void fsdp_shift_codes(code codes[FSDP_UNIT], code last)
{
#pragma unroll
    for (int i = 0; i + 1 < FSDP_UNIT; i++)
        codes[i] = codes[i + 1];
    codes[FSDP_UNIT - 1] = last;
}

template <typename code>
FSDP_DEVICE void fsdp_load_bytes(code codes[FSDP_UNIT], const uint8_t *from, uint32_t size, uint32_t mask)
{
#pragma unroll 1
    for (uint32_t i = 0; i < FSDP_UNIT; i++) {
        code element = 0;
#pragma unroll 1
        for (uint32_t byte = 0; byte < size && (mask >> i & 1); byte++)
            element |= (code)from[i * size + byte] << 8 * byte;
        fsdp_shift_codes(codes, element);
    }
}

template <typename code>
FSDP_DEVICE void fsdp_store_bytes(uint8_t *to, const code codes[FSDP_UNIT], uint32_t size, uint32_t mask)
{
    code left[FSDP_UNIT];
#pragma unroll
    for (int i = 0; i < FSDP_UNIT; i++)
        left[i] = codes[i];
#pragma unroll 1
    for (uint32_t i = 0; i < FSDP_UNIT; i++) {
#pragma unroll 1
        for (uint32_t byte = 0; byte < size && (mask >> i & 1); byte++)
            to[i * size + byte] = (uint8_t)(left[0] >> 8 * byte);
        fsdp_shift_codes(left, left[0]);
    }
}

/* True when the unit moves as vectors: of 16 bytes, or 8 of elements of one byte. */
FSDP_DEVICE bool fsdp_is_vector(const void *address, uint32_t size, uint32_t mask)
{
    return mask == (1u << FSDP_UNIT) - 1 && fsdp_is_aligned(address, size == 1 ? 8 : 16);
}

FSDP_DEVICE void fsdp_load_vectors(uint32_t codes[FSDP_UNIT], const uint8_t *from, uint32_t size)
{
    if (size == 4) {
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i += 4) {
            uint4 four = ((const uint4 *)from)[i / 4];
            codes[i] = four.x;
            codes[i + 1] = four.y;
            codes[i + 2] = four.z;
            codes[i + 3] = four.w;
        }
    } else if (size == 2) {
        uint4 all = *(const uint4 *)from;
        const uint32_t pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] = pairs[i / 2] >> i % 2 * 16 & 0xffff;
    } else {
        uint2 all = *(const uint2 *)from;
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i++)
            codes[i] = (i < 4 ? all.x : all.y) >> i % 4 * 8 & 0xff;
    }
}

FSDP_DEVICE void fsdp_store_vectors(uint8_t *to, const uint32_t codes[FSDP_UNIT], uint32_t size)
{
    if (size == 4) {
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i += 4) {
            uint4 four = {codes[i], codes[i + 1], codes[i + 2], codes[i + 3]};
            ((uint4 *)to)[i / 4] = four;
        }
    } else if (size == 2) {
        uint4 all = {codes[0] | codes[1] << 16, codes[2] | codes[3] << 16, codes[4] | codes[5] << 16,
                     codes[6] | codes[7] << 16};
        *(uint4 *)to = all;
    } else {
        uint2 all = {codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24,
                     codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24};
        *(uint2 *)to = all;
    }
}

/* Codes of elements of 1, 2 or 4 bytes. */
FSDP_DEVICE void fsdp_load_codes(uint32_t codes[FSDP_UNIT], const uint8_t *from, uint32_t size, uint32_t mask)
{
    if (fsdp_is_vector(from, size, mask))
        fsdp_load_vectors(codes, from, size);
    else if (!fsdp_is_aligned(from, size))
        fsdp_load_bytes(codes, from, size, mask);
    else if (size == 4)
        fsdp_load_elements<uint32_t>(codes, from, mask);
    else if (size == 2)
        fsdp_load_elements<uint16_t>(codes, from, mask);
    else
        fsdp_load_elements<uint8_t>(codes, from, mask);
}

FSDP_DEVICE void fsdp_store_codes(uint8_t *to, const uint32_t codes[FSDP_UNIT], uint32_t size, uint32_t mask)
{
    if (fsdp_is_vector(to, size, mask))
        fsdp_store_vectors(to, codes, size);
    else if (!fsdp_is_aligned(to, size))
        fsdp_store_bytes(to, codes, size, mask);
    else if (size == 4)
        fsdp_store_elements<uint32_t>(to, codes, mask);
    else if (size == 2)
        fsdp_store_elements<uint16_t>(to, codes, mask);
    else
        fsdp_store_elements<uint8_t>(to, codes, mask);
}

/* Codes of elements of 8 bytes. */
FSDP_DEVICE void fsdp_load_codes(uint64_t codes[FSDP_UNIT], const uint8_t *from, uint32_t mask)
{
    if (fsdp_is_vector(from, 8, mask)) {
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i += 2) {
            uint4 two = ((const uint4 *)from)[i / 2];
            codes[i] = two.x | (uint64_t)two.y << 32;
            codes[i + 1] = two.z | (uint64_t)two.w << 32;
        }
    } else if (fsdp_is_aligned(from, 8)) {
        fsdp_load_elements<uint64_t>(codes, from, mask);
    } else {
        fsdp_load_bytes(codes, from, 8, mask);
    }
}

FSDP_DEVICE void fsdp_store_codes(uint8_t *to, const uint64_t codes[FSDP_UNIT], uint32_t mask)
{
    if (fsdp_is_vector(to, 8, mask)) {
#pragma unroll
        for (int i = 0; i < FSDP_UNIT; i += 2) {
            uint4 two = {(uint32_t)codes[i], (uint32_t)(codes[i] >> 32), (uint32_t)codes[i + 1],
                         (uint32_t)(codes[i + 1] >> 32)};
            ((uint4 *)to)[i / 2] = two;
        }
    } else if (fsdp_is_aligned(to, 8)) {
        fsdp_store_elements<uint64_t>(to, codes, mask);
    } else {
        fsdp_store_bytes(to, codes, 8, mask);
    }
}

#endif

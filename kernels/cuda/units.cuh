/*
 * Work of threads. A tile of bytes that are copied is 1,024 units of 16 bytes, 4 of a thread. Units of a
 * row are aligned to the address that is written, not to its beginning, so that all but the first and the
 * last one of a row are whole, and a whole unit is stored as a vector. Its source may have any address.
 */
#ifndef FSDP_UNITS_CUH
#define FSDP_UNITS_CUH

#include "kernels/cuda/launch.cuh"

enum {
    FSDP_THREADS = 256,
    FSDP_UNITS_EACH = 4,                       /* of one thread in a tile */
    FSDP_TILE_UNITS = FSDP_THREADS * FSDP_UNITS_EACH,
    FSDP_UNIT = 16                             /* bytes */
};

FSDP_DEVICE bool fsdp_is_aligned(const void *address, uint32_t to)
{
    return ((uint32_t)(uintptr_t)address & (to - 1)) == 0;
}

/* Elements of this size from the last multiple of 16 bytes to the address; 0 where none is in reach. */
static inline __host__ __device__ uint32_t fsdp_skew(const void *address, uint32_t size)
{
    uint32_t behind = (uint32_t)(uintptr_t)address & (FSDP_UNIT - 1);
    return (behind & (size - 1)) == 0 ? behind / size : 0;
}

/* Some bytes of a row: bit i of mask is set when byte at + i is one of them. `at` may be negative. */
struct fsdp_unit {
    int64_t at;
    uint32_t mask;
};

/* Unit number `index` of a row of `bytes` bytes, which begins `skew` bytes after an aligned address. */
FSDP_DEVICE fsdp_unit fsdp_unit_at(uint64_t index, uint32_t skew, uint64_t bytes)
{
    fsdp_unit unit = {(int64_t)(index * FSDP_UNIT) - (int64_t)skew, (1u << FSDP_UNIT) - 1};
    int64_t behind = unit.at + FSDP_UNIT - (int64_t)bytes;
    if (unit.at < 0)
        unit.mask &= ~((1u << (uint32_t)-unit.at) - 1);
    if (behind > 0)
        unit.mask = behind < FSDP_UNIT ? unit.mask & ((1u << (uint32_t)(FSDP_UNIT - behind)) - 1) : 0;
    return unit;
}

FSDP_DEVICE bool fsdp_unit_is_whole(const fsdp_unit &unit)
{
    return unit.mask == (1u << FSDP_UNIT) - 1;
}

/* Units that every row has capacity for, whatever its skew; the last one may be empty. */
static inline __host__ __device__ uint64_t fsdp_row_units(uint64_t bytes)
{
    return (bytes + 2 * FSDP_UNIT - 2) / FSDP_UNIT;
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

FSDP_DEVICE uint32_t fsdp_load_u32(const uint8_t *from)
{
    if (fsdp_is_aligned(from, 4))
        return *(const uint32_t *)from;
    if (fsdp_is_aligned(from, 2))
        return ((const uint16_t *)from)[0] | (uint32_t)((const uint16_t *)from)[1] << 16;
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

/*
 * Up to 16 bytes at any address, as the vector that contains the first of them and the one that contains
 * the last. Bytes around them are loaded, too: they are in vectors with bytes of the tensor, so the GPU may
 * read them.
 */
struct fsdp_vectors {
    uint4 first, last;
};

FSDP_DEVICE fsdp_vectors fsdp_load_around(const uint8_t *from, uint32_t size)
{
    const uint32_t behind = (uint32_t)(uintptr_t)from & 15;
    const uint4 *first = (const uint4 *)(from - behind);
    return {first[0], first[behind + size > 16]};
}

/* The bytes at `from` of what was loaded around them. */
FSDP_DEVICE uint4 fsdp_take_16(const fsdp_vectors &around, const uint8_t *from)
{
    const uint32_t behind = (uint32_t)(uintptr_t)from & 15, bits = behind % 4 * 8;
    uint32_t words[8] = {around.first.x, around.first.y, around.first.z, around.first.w,
                         around.last.x,  around.last.y,  around.last.z,  around.last.w};
#pragma unroll
    for (int i = 0; i < 6; i++)
        words[i] = behind & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; i++)
        words[i] = behind & 4 ? words[i + 1] : words[i];
    return {__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
            __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits)};
}

FSDP_DEVICE uint4 fsdp_load_16(const uint8_t *from)
{
    return fsdp_take_16(fsdp_load_around(from, 16), from);
}

/* The bytes of a unit that the mask has; from NULL: zeros. */
FSDP_DEVICE void fsdp_copy_part(uint8_t *to, const uint8_t *from, uint32_t mask)
{
    for (int i = 0; i < FSDP_UNIT; i++) {
        if (mask >> i & 1)
            to[i] = from ? from[i] : 0;
    }
}

#endif

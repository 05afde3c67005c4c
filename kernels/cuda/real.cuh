/*
 * Arithmetic as in kernels/train/real_loops.h, and the tiles of a tensor. NaN results are the one positive
 * quiet NaN; square root and division round correctly.
 */
#ifndef FSDP_REAL_CUH
#define FSDP_REAL_CUH

#include "kernels/cuda/numbers.cuh"

FSDP_DEVICE float fsdp_settled(float x)
{
    return x != x ? fsdp_bits<float>(FSDP_F32_INFINITY | FSDP_F32_QUIET) : x;
}

FSDP_DEVICE double fsdp_settled(double x)
{
    return x != x ? fsdp_bits<double>((uint64_t)0x7ff8 << 48) : x;
}

FSDP_DEVICE float fsdp_root(float x)
{
    return sqrtf(x);
}

FSDP_DEVICE double fsdp_root(double x)
{
    return sqrt(x);
}

/* The larger one; NaN wins, and the first of equal ones. */
template <typename real> FSDP_DEVICE real fsdp_larger(real a, real b)
{
    return b > a || b != b ? b : a;
}

/* --- tiles ------------------------------------------------------------------------------------ */

/*
 * A tile is TILE elements of a tensor, the work of one block. Tiles are aligned to the address that is
 * written, not to its beginning, so that a tensor at any address has whole tiles: the first tile may begin
 * before the tensor, and the last one may end after it. Where all tensors are aligned, a block takes a whole
 * tile by vectors, and its threads load all of it before they compute; else it takes one element at a time.
 */
template <int TILE> struct fsdp_tile {
    int64_t first;
    uint64_t count;

    __device__ __forceinline__ fsdp_tile(const void *data, uint32_t type, uint64_t elements,
                                         uint32_t first_tile)
        : first((int64_t)((uint64_t)(blockIdx.x - first_tile) * TILE) -
                (int64_t)fsdp_skew(data, fsdp_type_size(type))),
          count(elements)
    {
    }

    __device__ __forceinline__ bool is_whole() const
    {
        return first >= 0 && (uint64_t)first + TILE <= count;
    }

    /* NULL is a tensor that the item lacks. */
    __device__ __forceinline__ bool is_aligned(const uint8_t *data, uint32_t type) const
    {
        return !data || fsdp_is_aligned(data + first * (int64_t)fsdp_type_size(type), 16);
    }

    /* The first element of this thread's vector number i, each of `length` elements. */
    __device__ __forceinline__ int64_t vector_at(int i, int length) const
    {
        return first + ((int64_t)i * FSDP_THREADS + threadIdx.x) * length;
    }

    /* Calls take(at) for each element of this thread, one at a time. */
    template <typename taker> __device__ __forceinline__ void each(taker take) const
    {
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < TILE; i += FSDP_THREADS) {
            const int64_t at = first + i;
            if (at >= 0 && (uint64_t)at < count)
                take(at);
        }
    }
};

/* Tiles of a tensor of so many elements; none of an empty one. */
template <int TILE> static uint64_t fsdp_tiles(const void *data, uint32_t type, uint64_t count)
{
    return count == 0 ? 0 : (count + fsdp_skew(data, fsdp_type_size(type)) + TILE - 1) / TILE;
}

#endif

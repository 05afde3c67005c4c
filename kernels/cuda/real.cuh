/*
 * Arithmetic as in kernels/train/real_loops.h, on the units of a tensor. NaN results are the one positive
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

/* A thread's units of a tile of a tensor, aligned for the elements at `data`. */
struct fsdp_line {
    uint64_t index, count;
    uint32_t skew;
    int left;

    __device__ __forceinline__ fsdp_line(const void *data, uint32_t type, uint64_t elements,
                                         uint32_t first_tile)
        : index((uint64_t)(blockIdx.x - first_tile) * FSDP_TILE_UNITS + threadIdx.x), count(elements),
          skew(fsdp_skew<FSDP_UNIT>(data, fsdp_type_size(type))), left(FSDP_UNITS_EACH)
    {
    }

    __device__ __forceinline__ bool next(fsdp_unit *unit)
    {
        if (left-- == 0)
            return false;
        *unit = fsdp_unit_at<FSDP_UNIT>(index, skew, count);
        index += FSDP_THREADS;
        return unit->mask != 0;
    }
};

/* Tiles of a tensor of so many elements; none of an empty one. */
static inline uint64_t fsdp_line_tiles(uint64_t count)
{
    return count == 0 ? 0 : fsdp_unit_tiles(fsdp_row_units<FSDP_UNIT>(count));
}

#endif

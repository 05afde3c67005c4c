/*
 * The words of CUDA for the C++ compiler of the host, which includes this file before a .cu file. shim.c
 * runs the threads of a block as fibers of one thread, in an order that depends on a seed; so a kernel that
 * forgets a barrier gives other results. docs/gpu_kernels.md describes what the shim finds.
 */
#ifndef FSDP_SHIM_H
#define FSDP_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#include <math.h>
#include <string.h>
extern "C" {
#endif

/* --- for tests -------------------------------------------------------------------------------- */

/* All orders that follow depend on the seed only. */
void fsdp_shim_seed(uint64_t seed);
/* Launches since the seed was set. */
size_t fsdp_shim_launches(void);
/* Bytes of parameters of the last launch. */
size_t fsdp_shim_parameters(void);
/* The first failure of a kernel since the last call: a barrier that some threads do not reach, a shuffle with
 * lanes that are absent; NULL without one. Valid until the next launch. */
const char *fsdp_shim_failure(void);
/* Takes a launch over, which `run` makes and `drop` frees; NULL: it runs at once. For streams that are
 * threads. */
extern void (*fsdp_shim_enqueue)(void *stream, void (*run)(void *), void *closure, void (*drop)(void *));

/* --- for launch.cuh --------------------------------------------------------------------------- */

enum { FSDP_SHIM_LAUNCH_FAILED = 719 };        /* cudaErrorLaunchFailure */

/* Runs thread(launch) for each thread of each block; keeps a copy of the launch of `size` bytes. */
int fsdp_shim_launch(void (*thread)(const void *launch), const void *launch, size_t size, unsigned blocks,
                     unsigned threads, void *stream);

/* --- for kernels ------------------------------------------------------------------------------ */

typedef struct fsdp_shim_dim { unsigned x, y, z; } fsdp_shim_dim;
/* The running thread; each thread of the host runs blocks of its own. */
extern __thread fsdp_shim_dim fsdp_shim_thread, fsdp_shim_block, fsdp_shim_block_size, fsdp_shim_blocks;

/* Memory of the block, the same for all that name one line. It is filled with garbage first. */
void *fsdp_shim_shared(int line, size_t size);
void fsdp_shim_barrier(int line);
/* A barrier that tells all threads whether one of them brought true. */
bool fsdp_shim_barrier_or(bool value, int line);
/* The value that lane `from` brings; each lane of the mask brings one. */
uint64_t fsdp_shim_shuffle(unsigned mask, uint64_t value, unsigned from, int line);
/* A bit for each lane of the mask whose value is not 0. */
unsigned fsdp_shim_vote(unsigned mask, bool value, int line);

/* Formats with a sign, so many bits of exponent and mantissa, and IEEE's bias. */
typedef struct fsdp_shim_format { int exponent, mantissa; unsigned largest; } fsdp_shim_format;
/* The nearest code, ties to even, of a number that is not NaN; those that are too large get the code after
 * the largest one. */
unsigned fsdp_shim_encode(fsdp_shim_format format, float number);
/* The code is a finite one. */
float fsdp_shim_decode(fsdp_shim_format format, unsigned code);

#ifdef __cplusplus
}

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define FSDP_PARAMS(type) const type &
#define FSDP_SHARED(type, name) \
    type &name = *static_cast<type *>(fsdp_shim_shared(__LINE__, sizeof(type)))

/* Bugs that a second compilation of a kernel has, to show that its test fails. */
#ifdef FSDP_SHIM_SHIFTS_INDEX
#define threadIdx \
    (fsdp_shim_dim{fsdp_shim_thread.x + (fsdp_shim_thread.x + 1 < fsdp_shim_block_size.x), 0, 0})
#else
#define threadIdx fsdp_shim_thread
#endif
#define blockIdx fsdp_shim_block
#define blockDim fsdp_shim_block_size
#define gridDim fsdp_shim_blocks

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

#ifdef FSDP_SHIM_FORGETS_BARRIERS
#define __syncthreads() static_cast<void>(0)
#else
#define __syncthreads() fsdp_shim_barrier(__LINE__)
#endif
#define __syncthreads_or(value) static_cast<int>(fsdp_shim_barrier_or(value, __LINE__))
#define __shfl_sync(mask, value, ...) fsdp_shim_shuffled(__LINE__, mask, value, __VA_ARGS__)
#define __shfl_down_sync(mask, value, ...) fsdp_shim_shuffled_down(__LINE__, mask, value, __VA_ARGS__)
#define __shfl_xor_sync(mask, value, ...) fsdp_shim_shuffled_xor(__LINE__, mask, value, __VA_ARGS__)
#define __any_sync(mask, value) (fsdp_shim_vote(mask, value, __LINE__) != 0)

template <typename type> static inline type fsdp_shim_move(int line, unsigned mask, type value, unsigned from)
{
    static_assert(sizeof(type) <= sizeof(uint64_t), "one register, or two");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = fsdp_shim_shuffle(mask, bits, from, line);
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Lanes are numbered within groups of `width`; a lane that would read from another group reads itself. */
template <typename type>
static inline type fsdp_shim_shuffled(int line, unsigned mask, type value, unsigned from,
                                      unsigned width = 32)
{
    unsigned lane = fsdp_shim_thread.x % 32, group = lane / width * width;
    return fsdp_shim_move(line, mask, value, group + from % width);
}

template <typename type>
static inline type fsdp_shim_shuffled_down(int line, unsigned mask, type value, unsigned by,
                                           unsigned width = 32)
{
    unsigned lane = fsdp_shim_thread.x % 32;
    return fsdp_shim_move(line, mask, value, lane % width + by < width ? lane + by : lane);
}

template <typename type>
static inline type fsdp_shim_shuffled_xor(int line, unsigned mask, type value, unsigned by,
                                          unsigned width = 32)
{
    unsigned lane = fsdp_shim_thread.x % 32;
    return fsdp_shim_move(line, mask, value, (lane ^ by) / width == lane / width ? lane ^ by : lane);
}

/* The upper half of a product. */
static inline uint64_t __umul64hi(uint64_t a, uint64_t b)
{
    return (uint64_t)((unsigned __int128)a * b >> 64);
}

/* The lower half of two words that are shifted. */
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by)
{
    return (uint32_t)(((uint64_t)high << 32 | low) >> (by & 31));
}

/* --- conversions: as the PTX manual describes cvt, with NaNs that have no payload ------------- */

struct __half_raw {
    uint16_t x;
};
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
enum __nv_saturation_t { __NV_SATFINITE };

static constexpr fsdp_shim_format fsdp_shim_f16 = {5, 10, 0x7bff};

static inline __half_raw __ushort_as_half(uint16_t code)
{
    return {code};
}

static inline uint16_t __half_as_ushort(__half_raw half)
{
    return half.x;
}

static inline float __half2float(__half_raw half)
{
    unsigned magnitude = half.x & 0x7fff;
    float sign = half.x >> 15 ? -1.0f : 1.0f;
    if (magnitude > 0x7c00)
        return __builtin_nanf("0x3fffff");
    return magnitude == 0x7c00 ? sign * INFINITY : sign * fsdp_shim_decode(fsdp_shim_f16, magnitude);
}

static inline __half_raw __float2half_rn(float number)
{
    if (number != number)
        return {0x7fff};
    return {(uint16_t)(fsdp_shim_encode(fsdp_shim_f16, number) | (signbit(number) ? 0x8000 : 0))};
}

static inline fsdp_shim_format fsdp_shim_fp8(__nv_fp8_interpretation_t type)
{
    return type == __NV_E4M3 ? fsdp_shim_format{4, 3, 0x7e} : fsdp_shim_format{5, 2, 0x7b};
}

static inline uint8_t __nv_cvt_float_to_fp8(float number, __nv_saturation_t, __nv_fp8_interpretation_t type)
{
    const fsdp_shim_format format = fsdp_shim_fp8(type);
    if (number != number)
        return 0x7f;
    unsigned code = fsdp_shim_encode(format, number);
    return (uint8_t)((code < format.largest ? code : format.largest) | (signbit(number) ? 0x80 : 0));
}

/* Of a code that is finite: kernels look for others first. */
static inline __half_raw __nv_cvt_fp8_to_halfraw(uint8_t code, __nv_fp8_interpretation_t type)
{
    float magnitude = fsdp_shim_decode(fsdp_shim_fp8(type), code & 0x7f);
    return __float2half_rn(code & 0x80 ? -magnitude : magnitude);
}
#endif
#endif

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
#endif
#endif

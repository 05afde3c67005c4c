/*
 * Launches of kernels, for nvcc and for the C++ compiler of the host, which runs the same files in tests
 * (tests/cuda/shim.h, included before anything else, has the words of CUDA then).
 *
 * A kernel takes one struct, which travels as kernel parameters: no descriptor lies in device memory, and
 * none has to be staged. A list of tensors is a batch: its items have the number of their first tile, a
 * block of threads works on one tile and finds its item by binary search.
 */
#ifndef FSDP_LAUNCH_CUH
#define FSDP_LAUNCH_CUH

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define FSDP_PARAMS(type) const __grid_constant__ type
#define FSDP_SHARED(type, name) __shared__ type name
#endif

/* `blocks` of so many threads are to fit a multiprocessor at once, which bounds their registers. */
#define FSDP_KERNEL(threads, blocks) static __global__ void __launch_bounds__(threads, blocks)
#define FSDP_DEVICE static __device__ __forceinline__

enum {
    FSDP_PARAM_BYTES = 32764,  /* of one launch, since CUDA 12.1 */
    FSDP_CUDA_OK = 0,
    FSDP_CUDA_INVALID = 1      /* cudaErrorInvalidValue */
};
constexpr uint64_t FSDP_MOST_TILES = 0x7fffffff; /* blocks of one launch */

template <typename params> struct fsdp_grid {
    void (*kernel)(FSDP_PARAMS(params));
    unsigned threads;
    void *stream;
};

#ifdef __CUDACC__
template <typename params>
static int fsdp_launch(const fsdp_grid<params> &grid, unsigned blocks, const params &arguments)
{
    void *list[] = {const_cast<params *>(&arguments)};
    return (int)cudaLaunchKernel((const void *)grid.kernel, dim3(blocks), dim3(grid.threads), list, 0,
                                 (cudaStream_t)grid.stream);
}
#else
template <typename params> struct fsdp_host_launch {
    void (*kernel)(FSDP_PARAMS(params));
    params arguments;
    static void run_thread(const void *launch)
    {
        const fsdp_host_launch *self = static_cast<const fsdp_host_launch *>(launch);
        self->kernel(self->arguments);
    }
};

template <typename params>
static int fsdp_launch(const fsdp_grid<params> &grid, unsigned blocks, const params &arguments)
{
    const fsdp_host_launch<params> launch = {grid.kernel, arguments};
    return fsdp_shim_launch(fsdp_host_launch<params>::run_thread, &launch, sizeof launch, blocks,
                            grid.threads, grid.stream);
}
#endif

/* --- batches ---------------------------------------------------------------------------------- */

/* A launch copies its parameters, used or not: a list of at most FSDP_FEW items has a kernel with capacity
 * for so many. */
enum { FSDP_FEW = 8 };

/* `shared` is what all items have in common; an item has a field first_tile. */
template <typename common, typename item, uint32_t MOST> struct fsdp_batch {
    common shared;
    uint32_t n;
    item items[MOST];
};

/* The shared part of items that have nothing in common. */
struct no_common {
};

/* As many items as the parameters of a launch have capacity for. */
template <typename common, typename item> constexpr uint32_t fsdp_many()
{
    return (FSDP_PARAM_BYTES - (sizeof(common) + 15) / 8 * 8) / sizeof(item);
}

/* A kernel is there twice: for few items, and for as many as fit. */
template <typename common, typename item> struct fsdp_list_grid {
    using few_items = fsdp_batch<common, item, FSDP_FEW>;
    using many_items = fsdp_batch<common, item, fsdp_many<common, item>()>;
    void (*few)(FSDP_PARAMS(few_items));
    void (*many)(FSDP_PARAMS(many_items));
    unsigned threads;
    void *stream;
};

/* Collects items on the host and launches full batches. */
template <typename common, typename item> struct fsdp_batches {
    using grid_type = fsdp_list_grid<common, item>;
    grid_type grid;
    typename grid_type::many_items held;
    uint64_t tiles = 0;

    fsdp_batches(const grid_type &to, const common &shared) : grid(to)
    {
        held.shared = shared;
        held.n = 0;
    }

    int launch()
    {
        int error = FSDP_CUDA_OK;
        if (held.n > FSDP_FEW)
            error = launch_items({grid.many, grid.threads, grid.stream}, held);
        else if (held.n > 0)
            error = launch_few();
        held.n = 0;
        tiles = 0;
        return error;
    }

    int add(item one, uint64_t its_tiles)
    {
        if (its_tiles == 0)
            return FSDP_CUDA_OK;
        if (its_tiles > FSDP_MOST_TILES)
            return FSDP_CUDA_INVALID;
        if (held.n == fsdp_many<common, item>() || tiles + its_tiles > FSDP_MOST_TILES) {
            int error = launch();
            if (error)
                return error;
        }
        one.first_tile = (uint32_t)tiles;
        held.items[held.n++] = one;
        tiles += its_tiles;
        return FSDP_CUDA_OK;
    }

private:
    template <typename batch> int launch_items(const fsdp_grid<batch> &to, const batch &items)
    {
        return fsdp_launch(to, (unsigned)tiles, items);
    }

    int launch_few()
    {
        typename grid_type::few_items few = {};
        few.shared = held.shared;
        few.n = held.n;
        for (uint32_t i = 0; i < held.n; i++)
            few.items[i] = held.items[i];
        return launch_items({grid.few, grid.threads, grid.stream}, few);
    }
};

/* The item of this block: the last one whose first tile is not after the block. */
template <typename item> FSDP_DEVICE const item &fsdp_find_item(const item *items, uint32_t n)
{
    uint32_t low = 0, high = n;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (items[middle].first_tile <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    return items[low];
}

#endif

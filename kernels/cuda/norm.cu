/*
 * Sums of powers and the search for what is not finite. The order of additions is that of
 * kernels/train/tensor_norm.c and real_loops.h: element i of a piece goes to lane i % 64, halves of the lanes
 * are added to each other, then pieces to groups, and groups to the sum. Here a team of 8 threads has a
 * piece, a block of threads one group, and a second launch adds the groups of each span. See cuda_kernels.h.
 */
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/real.cuh"
#include "kernels/train/factors.h"

enum {
    PIECE = FSDP_LOOP_BLOCK,
    PIECES = FSDP_POWER_GROUP,
    LANES = 64,     /* of a piece */
    LANES_EACH = 8, /* of a thread: 4 * n to 4 * n + 3, and those 32 lanes later */
    TEAM = LANES / LANES_EACH,
    TEAMS = FSDP_THREADS / TEAM,
    ROWS = PIECE / LANES
};

struct norm_item {
    const uint8_t *data;
    uint64_t count;
    double *parts; /* of its groups */
    uint32_t first_tile, type;
};

struct norm_how {
    double p;
};

template <uint32_t MOST> using norm_batch = fsdp_batch<norm_how, norm_item, MOST>;

/* --- the groups ------------------------------------------------------------------------------- */

enum power_kind { POWER_1_2, POWER_MOST, POWER_ANY };

template <power_kind KIND> FSDP_DEVICE double power(double x, double p)
{
    switch (KIND) {
    case POWER_1_2: return p == 2 ? x * x : fabs(x);
    case POWER_MOST: return fabs(x);
    default: return pow(fabs(x), p);
    }
}

template <power_kind KIND> FSDP_DEVICE double take(double total, double part)
{
    return KIND == POWER_MOST ? fsdp_larger(total, part) : total + part;
}

/* Adds the lanes of a piece, which a team of 8 threads has: lane l takes lane l + half, 32 first. */
template <power_kind KIND> FSDP_DEVICE double fold_lanes(double lanes[LANES_EACH])
{
#pragma unroll
    for (int i = 0; i < LANES_EACH / 2; i++)
        lanes[i] = take<KIND>(lanes[i], lanes[i + LANES_EACH / 2]);
#pragma unroll
    for (uint32_t by = TEAM / 2; by > 0; by /= 2) {
#pragma unroll
        for (int i = 0; i < LANES_EACH / 2; i++)
            lanes[i] = take<KIND>(lanes[i], __shfl_down_sync(0xffffffffu, lanes[i], by, TEAM));
    }
    return take<KIND>(take<KIND>(lanes[0], lanes[2]), take<KIND>(lanes[1], lanes[3]));
}

/* Element of the first row whose lane is number i of this thread. */
FSDP_DEVICE uint64_t lane_at(uint32_t i)
{
    return threadIdx.x % TEAM * 4 + i % 4 + i / 4 * (LANES / 2);
}

/* A whole piece. Several rows are loaded at once. */
template <power_kind KIND, uint32_t TYPE, bool IS_SHIFTED>
FSDP_DEVICE void sum_whole(double lanes[LANES_EACH], const norm_item &item, uint64_t first,
                           double p)
{
    constexpr int AT_ONCE = IS_SHIFTED ? 2 : 4, HALVES = 2;
#pragma unroll 1
    for (int row = 0; row < ROWS; row += AT_ONCE) {
        fsdp_source<TYPE, 4, IS_SHIFTED> sources[AT_ONCE * HALVES];
        const int64_t begin = (int64_t)(first + lane_at(0)) + row * LANES;
#pragma unroll
        for (int i = 0; i < AT_ONCE * HALVES; i++)
            sources[i].load(item.data, begin + i * (LANES / HALVES));
#pragma unroll
        for (int i = 0; i < AT_ONCE * HALVES; i++) {
            const fsdp_vector<TYPE, 4> vector =
                sources[i].take(item.data, begin + i * (LANES / HALVES));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                double *lane = &lanes[i % HALVES * 4 + k];
                *lane = take<KIND>(*lane, power<KIND>((double)fsdp_get(vector, k), p));
            }
        }
    }
}

/* The end of a tensor, or any of another type; a piece after the end has sum 0. Four elements are loaded
 * at once. */
template <power_kind KIND>
FSDP_DEVICE void sum_elements(double lanes[LANES_EACH], const norm_item &item, uint64_t first,
                              double p)
{
#pragma unroll
    for (uint32_t half = 0; half < LANES_EACH; half += 4) {
        const uint64_t begin = first + lane_at(half);
#pragma unroll 1
        for (uint64_t at = begin; at < begin + PIECE && at < item.count; at += LANES) {
            uint64_t codes[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                codes[i] =
                    at + i < item.count ? fsdp_code_at(item.data, item.type, (int64_t)(at + i)) : 0;
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const double x = fsdp_number<double>(codes[i], item.type);
                if (at + i < item.count)
                    lanes[half + i] = take<KIND>(lanes[half + i], power<KIND>(x, p));
            }
        }
    }
}

template <power_kind KIND, bool IS_SHIFTED>
FSDP_DEVICE bool sum_plain(double lanes[LANES_EACH], const norm_item &item, uint64_t first,
                           double p)
{
    switch (item.type) {
    case FSDP_F32: sum_whole<KIND, FSDP_F32, IS_SHIFTED>(lanes, item, first, p); return true;
    case FSDP_BF16: sum_whole<KIND, FSDP_BF16, IS_SHIFTED>(lanes, item, first, p); return true;
    case FSDP_F16: sum_whole<KIND, FSDP_F16, IS_SHIFTED>(lanes, item, first, p); return true;
    default: return false;
    }
}

/* The sum of one piece, in the first thread of its team. */
template <power_kind KIND>
FSDP_DEVICE double sum_piece(const norm_item &item, uint64_t first, double p)
{
    double lanes[LANES_EACH] = {};
    bool is_done = false;
    if (KIND != POWER_ANY && first + PIECE <= item.count)
        is_done = fsdp_is_aligned(item.data, 16) ? sum_plain<KIND, false>(lanes, item, first, p)
                                                 : sum_plain<KIND, true>(lanes, item, first, p);
    if (!is_done)
        sum_elements<KIND>(lanes, item, first, p);
    return fold_lanes<KIND>(lanes);
}

struct piece_sums {
    double sums[PIECES];
};

/* pow needs many registers. */
template <power_kind KIND, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, KIND == POWER_ANY ? 2 : 4)
sum_groups(FSDP_PARAMS(norm_batch<MOST>) batch)
{
    FSDP_SHARED(piece_sums, shared);
    const norm_item &item = fsdp_find_item(batch.items, batch.n);
    const uint64_t group = blockIdx.x - item.first_tile;
    const uint64_t begin = group * PIECES * PIECE;
    const uint64_t left = (item.count - begin + PIECE - 1) / PIECE;
    const uint32_t pieces = left < PIECES ? (uint32_t)left : (uint32_t)PIECES;
#pragma unroll 1
    for (uint32_t first = 0; first < PIECES; first += TEAMS) {
        uint32_t piece = first + threadIdx.x / TEAM;
        double sum = sum_piece<KIND>(item, begin + (uint64_t)piece * PIECE, batch.shared.p);
        if (threadIdx.x % TEAM == 0)
            shared.sums[piece] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    double total = 0;
    for (uint32_t i = 0; i < pieces; i++)
        total = take<KIND>(total, shared.sums[i]);
    item.parts[group] = total;
}

/* --- the sums of the spans -------------------------------------------------------------------- */

struct total_item {
    const double *parts;
    uint64_t groups;
    double *sum_out;
    uint32_t first_tile;
};

template <uint32_t MOST> using total_batch = fsdp_batch<no_common, total_item, MOST>;

struct some_parts {
    double parts[FSDP_THREADS];
};

/* The pieces of all finite powers are added alike. */
template <power_kind KIND, uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 2)
sum_spans(FSDP_PARAMS(total_batch<MOST>) batch)
{
    FSDP_SHARED(some_parts, shared);
    const total_item &item = batch.items[blockIdx.x];
    double total = 0;
    for (uint64_t first = 0; first < item.groups; first += FSDP_THREADS) {
        uint64_t left = item.groups - first;
        uint32_t n = left < FSDP_THREADS ? (uint32_t)left : (uint32_t)FSDP_THREADS;
        if (threadIdx.x < n)
            shared.parts[threadIdx.x] = item.parts[first + threadIdx.x];
        __syncthreads();
        for (uint32_t i = 0; i < n && threadIdx.x == 0; i++)
            total = take<KIND>(total, shared.parts[i]);
        __syncthreads();
    }
    if (threadIdx.x == 0)
        *item.sum_out = fsdp_settled(total);
}

/* --- the host's side of sums ------------------------------------------------------------------ */

static uint64_t groups_of(const fsdp_cuda_span &span)
{
    return (span.count + PIECES * PIECE - 1) / (PIECES * PIECE);
}

size_t fsdp_cuda_power_partials(const fsdp_cuda_span *spans, size_t n)
{
    size_t groups = 0;
    for (size_t i = 0; i < n; i++)
        groups += groups_of(spans[i]);
    return groups;
}

struct sum_job {
    const fsdp_cuda_span *spans;
    size_t n;
    double p;
    double *partials, *sums_out;
    void *stream;
};

template <power_kind KIND> static int sum_all_groups(const sum_job &job)
{
    constexpr uint32_t MANY = fsdp_many<norm_how, norm_item>();
    fsdp_batches<norm_how, norm_item> batches(
        {sum_groups<KIND, FSDP_FEW>, sum_groups<KIND, MANY>, FSDP_THREADS, job.stream}, {job.p});
    double *parts = job.partials;
    for (size_t i = 0; i < job.n; i++) {
        const fsdp_cuda_span &span = job.spans[i];
        norm_item item = {(const uint8_t *)span.data, span.count, parts, 0, (uint32_t)span.dtype};
        parts += groups_of(span);
        int error = batches.add(item, groups_of(span));
        if (error)
            return error;
    }
    return batches.launch();
}

template <power_kind KIND> static int sum_all(const sum_job &job)
{
    constexpr power_kind ADDED = KIND == POWER_MOST ? POWER_MOST : POWER_1_2;
    int error = sum_all_groups<KIND>(job);
    constexpr uint32_t MANY = fsdp_many<no_common, total_item>();
    fsdp_batches<no_common, total_item> batches(
        {sum_spans<ADDED, FSDP_FEW>, sum_spans<ADDED, MANY>, FSDP_THREADS, job.stream}, {});
    const double *parts = job.partials;
    for (size_t i = 0; i < job.n && !error; i++) {
        uint64_t groups = groups_of(job.spans[i]);
        error = batches.add({parts, groups, job.sums_out + i, 0}, 1);
        parts += groups;
    }
    return error ? error : batches.launch();
}

int fsdp_cuda_power_sums(const fsdp_cuda_span *spans, size_t n, double p, double *partials,
                         double *sums_out, void *stream)
{
    const sum_job job = {spans, n, p, partials, sums_out, stream};
    if (p == 2 || p == 1)
        return sum_all<POWER_1_2>(job);
    return p == (double)INFINITY ? sum_all<POWER_MOST>(job) : sum_all<POWER_ANY>(job);
}

/* --- what is not finite ----------------------------------------------------------------------- */

struct finite_how {
    int *all_finite_out;
};

template <uint32_t MOST> using finite_batch = fsdp_batch<finite_how, norm_item, MOST>;

enum { FINITE_EACH = 16, FINITE_TILE = FSDP_THREADS * FINITE_EACH }; /* elements */
using finite_tile = fsdp_tile<FINITE_TILE>;

FSDP_KERNEL(32, 1) begin_finite(FSDP_PARAMS(finite_how) how)
{
    if (threadIdx.x == 0)
        *how.all_finite_out = 1;
}

template <uint32_t TYPE>
FSDP_DEVICE bool is_finite_whole(const norm_item &item, const finite_tile &tile)
{
    constexpr int LENGTH = 16 / fsdp_type_size(TYPE), VECTORS = FINITE_EACH / LENGTH;
    fsdp_vector<TYPE, LENGTH> numbers[VECTORS];
    bool all = true;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        fsdp_load(&numbers[i], item.data, tile.vector_at(i, LENGTH));
#pragma unroll
    for (int i = 0; i < FINITE_EACH; i++)
        all &=
            fabsf(fsdp_get(numbers[i / LENGTH], i % LENGTH)) < fsdp_bits<float>(FSDP_F32_INFINITY);
    return all;
}

/* Only f64 has finite values that f32 lacks; its own bits are looked at. */
FSDP_DEVICE bool are_finite_elements(const norm_item &item, const finite_tile &tile)
{
    bool all = true;
    tile.each([&](int64_t at) {
        all &= fabs(fsdp_read<double>(item.data, item.type, at)) <
               fsdp_bits<double>((uint64_t)0x7ff << 52);
    });
    return all;
}

FSDP_DEVICE bool is_finite_tile(const norm_item &item, const finite_tile &tile)
{
    if (!tile.is_whole() || !tile.is_aligned(item.data, item.type))
        return are_finite_elements(item, tile);
    switch (item.type) {
    case FSDP_F32: return is_finite_whole<FSDP_F32>(item, tile);
    case FSDP_BF16: return is_finite_whole<FSDP_BF16>(item, tile);
    case FSDP_F16: return is_finite_whole<FSDP_F16>(item, tile);
    default: return are_finite_elements(item, tile);
    }
}

/* The result may lie in memory of the host, far from the GPU: a block writes to it once at most. */
template <uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 4)
find_infinite(FSDP_PARAMS(finite_batch<MOST>) batch)
{
    const norm_item &item = fsdp_find_item(batch.items, batch.n);
    const finite_tile tile(item.data, item.type, item.count, item.first_tile);
    if (__syncthreads_or(!is_finite_tile(item, tile)) && threadIdx.x == 0)
        *batch.shared.all_finite_out = 0;
}

int fsdp_cuda_are_finite(const fsdp_cuda_span *spans, size_t n, int *all_finite_out, void *stream)
{
    const finite_how how = {all_finite_out};
    const fsdp_grid<finite_how> beginning = {begin_finite, 32, stream};
    constexpr uint32_t MANY = fsdp_many<finite_how, norm_item>();
    fsdp_batches<finite_how, norm_item> batches(
        {find_infinite<FSDP_FEW>, find_infinite<MANY>, FSDP_THREADS, stream}, how);
    int error = fsdp_launch(beginning, 1, how);
    for (size_t i = 0; i < n && !error; i++) {
        norm_item item = {(const uint8_t *)spans[i].data, spans[i].count, nullptr, 0,
                          (uint32_t)spans[i].dtype};
        error = batches.add(item, fsdp_tiles<FINITE_TILE>(item.data, item.type, item.count));
    }
    return error ? error : batches.launch();
}

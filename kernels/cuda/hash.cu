/*
 * XXH3-128 of many spans. A long input is blocks of 16 stripes of 64 bytes. All stripes of a block are
 * multiplied and added to 8 lanes, in any order; only the scrambling after each block depends on the blocks
 * before. So 8 warps compute the sums of 32 blocks, while a ninth one adds and scrambles those of the 32
 * before. Short inputs, of at most 240 bytes, have other formulas, and one thread. See cuda_kernels.h.
 */
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/units.cuh"

enum {
    WARP = 32,
    PRODUCERS = 8, /* warps */
    HASH_THREADS = (PRODUCERS + 1) * WARP,
    LANES = 8,
    STRIPE = 64,
    BLOCK = 1024,    /* bytes: 16 stripes */
    BLOCKS_EACH = 4, /* of a warp at once */
    BATCH = PRODUCERS * BLOCKS_EACH,
    SHORT = 240,
    SECRET = 192
};

constexpr uint32_t PRIME32_1 = 0x9e3779b1u, PRIME32_2 = 0x85ebca77u, PRIME32_3 = 0xc2b2ae3du;
constexpr uint64_t PRIME64_1 = 0x9e3779b185ebca87u, PRIME64_2 = 0xc2b2ae3d27d4eb4fu;
constexpr uint64_t PRIME64_3 = 0x165667b19e3779f9u, PRIME64_4 = 0x85ebca77c2b2ae63u;
constexpr uint64_t PRIME64_5 = 0x27d4eb2f165667c5u;
constexpr uint64_t PRIME_MX1 = 0x165667919e3779f9u, PRIME_MX2 = 0x9fb21c651e98df25u;

/* XXH3's secret, as words that begin at multiples of 8 bytes. */
static __constant__ const uint64_t secret_words[SECRET / 8] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
    0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
    0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
    0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
    0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};

struct hash_item {
    const uint8_t *data;
    uint64_t size;
    uint8_t *out;
    uint32_t first_tile;
};

template <uint32_t MOST> using hash_batch = fsdp_batch<no_common, hash_item, MOST>;

struct hash_value {
    uint64_t low, high;
};

FSDP_DEVICE uint64_t secret_at(uint32_t offset)
{
    uint32_t word = offset / 8, shift = offset % 8 * 8;
    if (shift == 0)
        return secret_words[word];
    return secret_words[word] >> shift | secret_words[word + 1] << (64 - shift);
}

FSDP_DEVICE uint64_t read_64(const uint8_t *from)
{
    return fsdp_load_u32(from) | (uint64_t)fsdp_load_u32(from + 4) << 32;
}

/* --- mixing ----------------------------------------------------------------------------------- */

FSDP_DEVICE uint64_t avalanche(uint64_t x)
{
    x = (x ^ x >> 37) * PRIME_MX1;
    return x ^ x >> 32;
}

FSDP_DEVICE uint64_t avalanche_64(uint64_t x)
{
    x = (x ^ x >> 33) * PRIME64_2;
    x = (x ^ x >> 29) * PRIME64_3;
    return x ^ x >> 32;
}

FSDP_DEVICE uint64_t fold_product(uint64_t a, uint64_t b)
{
    return a * b ^ __umul64hi(a, b);
}

FSDP_DEVICE uint64_t swap_64(uint64_t x)
{
    uint64_t swapped = 0;
    for (int i = 0; i < 8; i++)
        swapped |= (x >> 8 * i & 0xff) << (56 - 8 * i);
    return swapped;
}

/* --- up to 240 bytes -------------------------------------------------------------------------- */

FSDP_DEVICE hash_value hash_3(const uint8_t *data, uint32_t size)
{
    uint32_t low =
        (uint32_t)data[0] << 16 | (uint32_t)data[size / 2] << 24 | data[size - 1] | size << 8;
    uint32_t swapped = low >> 24 | (low >> 8 & 0xff00) | (low << 8 & 0xff0000) | low << 24;
    uint32_t high = swapped << 13 | swapped >> 19;
    uint64_t first = secret_at(0), second = secret_at(8);
    return {avalanche_64(low ^ ((first ^ first >> 32) & 0xffffffffu)),
            avalanche_64(high ^ ((second ^ second >> 32) & 0xffffffffu))};
}

FSDP_DEVICE hash_value hash_8(const uint8_t *data, uint32_t size)
{
    uint64_t input = fsdp_load_u32(data) | (uint64_t)fsdp_load_u32(data + size - 4) << 32;
    uint64_t keyed = input ^ secret_at(16) ^ secret_at(24), by = PRIME64_1 + (size << 2);
    uint64_t low = keyed * by, high = __umul64hi(keyed, by);
    high += low << 1;
    low ^= high >> 3;
    low = (low ^ low >> 35) * PRIME_MX2;
    return {low ^ low >> 28, avalanche(high)};
}

FSDP_DEVICE hash_value hash_16(const uint8_t *data, uint32_t size)
{
    uint64_t first = read_64(data), last = read_64(data + size - 8);
    uint64_t keyed = first ^ last ^ secret_at(32) ^ secret_at(40);
    uint64_t low = keyed * PRIME64_1 + ((uint64_t)(size - 1) << 54),
             high = __umul64hi(keyed, PRIME64_1);
    last ^= secret_at(48) ^ secret_at(56);
    high += last + (last & 0xffffffffu) * (PRIME32_2 - 1);
    low ^= swap_64(high);
    return {avalanche(low * PRIME64_2), avalanche(__umul64hi(low, PRIME64_2) + high * PRIME64_2)};
}

FSDP_DEVICE uint64_t mix_16(const uint8_t *data, uint32_t secret)
{
    return fold_product(read_64(data) ^ secret_at(secret),
                        read_64(data + 8) ^ secret_at(secret + 8));
}

FSDP_DEVICE hash_value mix_32(hash_value sum, const uint8_t *one, const uint8_t *other,
                              uint32_t secret)
{
    sum.low = (sum.low + mix_16(one, secret)) ^ (read_64(other) + read_64(other + 8));
    sum.high = (sum.high + mix_16(other, secret + 16)) ^ (read_64(one) + read_64(one + 8));
    return sum;
}

FSDP_DEVICE hash_value end_mixing(hash_value sum, uint32_t size)
{
    uint64_t high = sum.low * PRIME64_1 + sum.high * PRIME64_4 + size * PRIME64_2;
    return {avalanche(sum.low + sum.high), 0 - avalanche(high)};
}

FSDP_DEVICE hash_value hash_128(const uint8_t *data, uint32_t size)
{
    hash_value sum = {size * PRIME64_1, 0};
#pragma unroll 1
    for (uint32_t i = (size - 1) / 32 + 1; i-- > 0;)
        sum = mix_32(sum, data + 16 * i, data + size - 16 * (i + 1), 32 * i);
    return end_mixing(sum, size);
}

FSDP_DEVICE hash_value hash_240(const uint8_t *data, uint32_t size)
{
    hash_value sum = {size * PRIME64_1, 0};
#pragma unroll 1
    for (uint32_t i = 0; i < size / 32; i++) {
        if (i == 4)
            sum = {avalanche(sum.low), avalanche(sum.high)};
        sum = mix_32(sum, data + 32 * i, data + 32 * i + 16, i < 4 ? 32 * i : 3 + 32 * (i - 4));
    }
    if (size / 32 == 4)
        sum = {avalanche(sum.low), avalanche(sum.high)};
    sum = mix_32(sum, data + size - 16, data + size - 32, 103);
    return end_mixing(sum, size);
}

FSDP_DEVICE hash_value hash_short(const uint8_t *data, uint32_t size)
{
    if (size == 0)
        return {avalanche_64(secret_at(64) ^ secret_at(72)),
                avalanche_64(secret_at(80) ^ secret_at(88))};
    if (size <= 3)
        return hash_3(data, size);
    if (size <= 8)
        return hash_8(data, size);
    if (size <= 16)
        return hash_16(data, size);
    return size <= 128 ? hash_128(data, size) : hash_240(data, size);
}

/* --- sums of blocks --------------------------------------------------------------------------- */

struct block_sums {
    uint64_t lanes[2][BATCH][LANES]; /* written and read in turns */
};

FSDP_DEVICE uint64_t multiply_halves(uint64_t keyed)
{
    return (keyed & 0xffffffffu) * (keyed >> 32);
}

/* Four neighbours have the 8 lanes of one stripe, 2 each, so a warp has 8 stripes at once. */
struct stripe_keys {
    uint64_t keys[2][2]; /* of this thread's two stripes of a block */
};

FSDP_DEVICE stripe_keys keys_of_thread(uint32_t thread)
{
    stripe_keys keys;
    for (uint32_t half = 0; half < 2; half++) {
        for (uint32_t i = 0; i < 2; i++)
            keys.keys[half][i] = secret_words[thread / 4 + 8 * half + thread % 4 * 2 + i];
    }
    return keys;
}

/* A lane adds what its neighbour of the pair reads, and the product of its own keyed halves. */
FSDP_DEVICE void add_stripe(uint64_t sums[2], uint4 data, const uint64_t keys[2])
{
    uint64_t first = data.x | (uint64_t)data.y << 32, second = data.z | (uint64_t)data.w << 32;
    sums[0] += second + multiply_halves(first ^ keys[0]);
    sums[1] += first + multiply_halves(second ^ keys[1]);
}

/* Two stripes of each of 4 blocks, as a thread has them. */
struct warp_data {
    uint4 halves[BLOCKS_EACH][2];
};

/* All loads come before the first sum, so that 4 KiB of a warp are under way. */
FSDP_DEVICE void load_blocks(warp_data *data, const uint8_t *from)
{
#pragma unroll
    for (int i = 0; i < BLOCKS_EACH; i++) {
        data->halves[i][0] = *(const uint4 *)(from + i * BLOCK);
        data->halves[i][1] = *(const uint4 *)(from + i * BLOCK + BLOCK / 2);
    }
}

/* At any address, and as many of the blocks as there are. */
FSDP_DEVICE void load_some(warp_data *data, const uint8_t *from, uint64_t blocks)
{
#pragma unroll
    for (uint32_t i = 0; i < BLOCKS_EACH; i++) {
        if (i < blocks) {
            data->halves[i][0] = fsdp_load_16(from + i * BLOCK);
            data->halves[i][1] = fsdp_load_16(from + i * BLOCK + BLOCK / 2);
        }
    }
}

/* The sums of up to 4 blocks of a warp. */
FSDP_DEVICE void sum_blocks(const hash_item &item, uint64_t first, uint64_t blocks,
                            const stripe_keys &keys, uint64_t (*to)[LANES])
{
    const uint32_t thread = threadIdx.x % WARP;
    const uint8_t *from = item.data + first * BLOCK + thread * 16;
    warp_data data;
    if (first >= blocks)
        return;
    if (first + BLOCKS_EACH <= blocks && fsdp_is_aligned(item.data, 16))
        load_blocks(&data, from);
    else
        load_some(&data, from, blocks - first);
#pragma unroll
    for (uint32_t i = 0; i < BLOCKS_EACH; i++) {
        uint64_t sums[2] = {0, 0};
        if (first + i >= blocks)
            return;
        add_stripe(sums, data.halves[i][0], keys.keys[0]);
        add_stripe(sums, data.halves[i][1], keys.keys[1]);
#pragma unroll
        for (uint32_t by = 4; by < WARP; by *= 2) {
            sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], by);
            sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], by);
        }
        if (thread < 4) {
            to[i][2 * thread] = sums[0];
            to[i][2 * thread + 1] = sums[1];
        }
    }
}

/* --- the chain -------------------------------------------------------------------------------- */

FSDP_DEVICE uint64_t first_value(uint32_t lane)
{
    switch (lane) {
    case 0: return PRIME32_3;
    case 1: return PRIME64_1;
    case 2: return PRIME64_2;
    case 3: return PRIME64_3;
    case 4: return PRIME64_4;
    case 5: return PRIME32_2;
    case 6: return PRIME64_5;
    default: return PRIME32_1;
    }
}

FSDP_DEVICE uint64_t scramble(uint64_t value, uint32_t lane)
{
    value ^= value >> 47;
    return (value ^ secret_words[(SECRET - STRIPE) / 8 + lane]) * PRIME32_1;
}

FSDP_DEVICE uint64_t add_one_stripe(uint64_t value, const uint8_t *stripe, uint32_t secret,
                                    uint32_t lane)
{
    uint64_t own = read_64(stripe + 8 * lane), neighbour = read_64(stripe + 8 * (lane ^ 1));
    return value + neighbour + multiply_halves(own ^ secret_at(secret + 8 * lane));
}

/* The stripes after the last whole block, and the last 64 bytes, which may overlap them. */
FSDP_DEVICE uint64_t add_rest(uint64_t value, const hash_item &item, uint64_t blocks, uint32_t lane)
{
    const uint8_t *rest = item.data + blocks * BLOCK;
    uint32_t stripes = (uint32_t)((item.size - 1 - blocks * BLOCK) / STRIPE);
#pragma unroll 1
    for (uint32_t i = 0; i < stripes; i++)
        value = add_one_stripe(value, rest + STRIPE * i, 8 * i, lane);
    return add_one_stripe(value, item.data + item.size - STRIPE, SECRET - STRIPE - 7, lane);
}

FSDP_DEVICE uint64_t merge(uint64_t sum, const uint64_t values[LANES], uint32_t secret)
{
#pragma unroll
    for (uint32_t i = 0; i < LANES; i += 2)
        sum += fold_product(values[i] ^ secret_at(secret + 8 * i),
                            values[i + 1] ^ secret_at(secret + 8 * i + 8));
    return avalanche(sum);
}

/* Writes the canonical bytes: big-endian, the upper half first. */
FSDP_DEVICE void write_hash(uint8_t *to, hash_value value)
{
    for (int i = 0; i < 8; i++) {
        to[i] = (uint8_t)(value.high >> (56 - 8 * i));
        to[8 + i] = (uint8_t)(value.low >> (56 - 8 * i));
    }
}

FSDP_DEVICE void end_hash(uint64_t value, const hash_item &item, uint64_t blocks, uint32_t lane)
{
    uint64_t values[LANES];
    value = add_rest(value, item, blocks, lane);
#pragma unroll
    for (uint32_t i = 0; i < LANES; i++)
        values[i] = __shfl_sync(0xffffffffu, value, i);
    if (threadIdx.x % WARP == 0)
        write_hash(item.out, {merge(item.size * PRIME64_1, values, 11),
                              merge(~(item.size * PRIME64_2), values, SECRET - STRIPE - 11)});
}

/* The warp of the chain repeats its 8 lanes four times, so that all its threads take part in shuffles. */
template <uint32_t MOST>
FSDP_KERNEL(HASH_THREADS, 2)
hash_spans(FSDP_PARAMS(hash_batch<MOST>) batch)
{
    FSDP_SHARED(block_sums, shared);
    const hash_item &item = batch.items[blockIdx.x];
    if (item.size <= SHORT) {
        if (threadIdx.x == 0)
            write_hash(item.out, hash_short(item.data, (uint32_t)item.size));
        return;
    }
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % LANES;
    const uint64_t blocks = (item.size - 1) / BLOCK;
    const stripe_keys keys = keys_of_thread(threadIdx.x % WARP);
    uint64_t value = first_value(lane);
#pragma unroll 1
    for (uint64_t first = 0; first < blocks + BATCH; first += BATCH) {
        const uint64_t turn = first / BATCH % 2;
        if (warp < PRODUCERS) {
            uint32_t row = warp * BLOCKS_EACH;
            sum_blocks(item, first + row, blocks, keys, &shared.lanes[turn][row]);
        } else if (first > 0) {
            uint64_t left = blocks - (first - BATCH);
            for (uint32_t i = 0; i < BATCH && i < left; i++)
                value = scramble(value + shared.lanes[1 - turn][i][lane], lane);
        }
        __syncthreads();
    }
    if (warp == PRODUCERS)
        end_hash(value, item, blocks, lane);
}

int fsdp_cuda_hash(const fsdp_cuda_span *spans, size_t n, fsdp_hash *hashes_out, void *stream)
{
    constexpr uint32_t MANY = fsdp_many<no_common, hash_item>();
    fsdp_batches<no_common, hash_item> batches(
        {hash_spans<FSDP_FEW>, hash_spans<MANY>, HASH_THREADS, stream}, {});
    for (size_t i = 0; i < n; i++) {
        hash_item item = {(const uint8_t *)spans[i].data,
                          spans[i].count * fsdp_dtype_size(spans[i].dtype), hashes_out[i].bytes, 0};
        int error = batches.add(item, 1);
        if (error)
            return error;
    }
    return batches.launch();
}

/*
 * A keyed permutation of [0, count). See token_order.h. A Feistel network permutes the numbers of an
 * even number of bits; one that falls outside of [0, count) is permuted again until it is inside, less
 * than four times on average.
 */
#include "runtime/tokens/token_order.h"

#include "base/core/mix.h"

enum { ROUNDS = 6 };

uint64_t fsdp_token_order(uint64_t seed, uint64_t epoch, uint64_t count, uint64_t k)
{
    const uint64_t gamma = 0x9E3779B97F4A7C15u;
    uint64_t key = fsdp_mix(fsdp_mix(seed + gamma) ^ (epoch + 1) * gamma);
    unsigned half = 1;
    while (half < 32 && (count - 1) >> (2 * half))
        half++;
    uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t left = k >> half, right = k & mask;
        for (unsigned round = 0; round < ROUNDS; round++) {
            uint64_t next = left ^ (fsdp_mix(right ^ (key + round * gamma)) & mask);
            left = right;
            right = next;
        }
        k = left << half | right;
    } while (k >= count);
    return k;
}

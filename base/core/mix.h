/* SplitMix64's finaliser: numbers that are functions of a seed and an index, equal on every machine. */
#ifndef FSDP_MIX_H
#define FSDP_MIX_H

#include <stdint.h>

static inline uint64_t fsdp_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

#endif

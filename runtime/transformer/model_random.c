/* Random numbers that are functions of a key and an index, so that no rank and no step keeps a state. */
#include "runtime/transformer/transformer_internal.h"

#include "base/core/fnv.h"
#include "base/core/mix.h"

#include <math.h>
#include <string.h>

uint64_t fsdp_model_random_key(uint64_t seed, const char *purpose)
{
    return fsdp_mix(fsdp_mix(seed) ^ fsdp_fnv(FSDP_FNV_BEGIN, purpose, strlen(purpose)));
}

double fsdp_model_random_uniform(uint64_t key, uint64_t i)
{
    return ((double)(fsdp_mix(key + (i + 1) * 0x9E3779B97F4A7C15u) >> 11) + 0.5) * 0x1p-53;
}

/* Box and Muller's first number of two uniform ones. */
double fsdp_model_random_normal(uint64_t key, uint64_t i)
{
    const double two_pi = 6.283185307179586;
    return sqrt(-2 * log(fsdp_model_random_uniform(key, 2 * i))) *
           cos(two_pi * fsdp_model_random_uniform(key, 2 * i + 1));
}

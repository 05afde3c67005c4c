/* See dice.h. SplitMix64, and FNV-1a. */
#include "tests/random/dice.h"

static uint64_t spread(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

uint64_t mix(uint64_t a, uint64_t b)
{
    return spread(((a * 0x9E3779B97F4A7C15u) ^ b) + 0x9E3779B97F4A7C15u);
}

random_dice dice_for(uint64_t seed, uint64_t purpose, uint64_t number)
{
    return (random_dice){mix(mix(seed, purpose), number)};
}

uint64_t dice_bits(random_dice *dice)
{
    dice->state += 0x9E3779B97F4A7C15u;
    return spread(dice->state);
}

int dice_below(random_dice *dice, int n)
{
    return (int)(dice_bits(dice) % (uint64_t)n);
}

bool dice_hits(random_dice *dice, int percent)
{
    return dice_below(dice, 100) < percent;
}

uint64_t hash_bytes(uint64_t hash, const void *data, size_t size)
{
    const unsigned char *bytes = data;
    hash ^= 0xcbf29ce484222325u;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash ^ (hash >> 29);
}

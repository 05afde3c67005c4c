/*
 * XXH3-128, compiled by each file that includes this header with the instructions of that file. Values are in
 * the canonical byte order, which does not depend on the machine.
 */
#ifndef FSDP_XXH3_H
#define FSDP_XXH3_H

#include "kernels/variants.h"

#define XXH_INLINE_ALL
#include <string.h>
#include <xxhash.h>

static inline fsdp_hash fsdp_xxh3_canonical(XXH128_hash_t value)
{
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, value);
    fsdp_hash hash;
    memcpy(hash.bytes, bytes.digest, sizeof hash.bytes);
    return hash;
}

static inline fsdp_hash fsdp_xxh3(const void *data, size_t size)
{
    return fsdp_xxh3_canonical(XXH3_128bits(data, size));
}

static inline void fsdp_xxh3_reset(void *state)
{
    XXH3_128bits_reset(state);
}

static inline void fsdp_xxh3_add(void *state, const void *data, size_t size)
{
    XXH3_128bits_update(state, data, size);
}

static inline fsdp_hash fsdp_xxh3_value(const void *state)
{
    return fsdp_xxh3_canonical(XXH3_128bits_digest(state));
}

#define FSDP_XXH3_STREAM \
    {.state_size = sizeof(XXH3_state_t), .reset = fsdp_xxh3_reset, .add = fsdp_xxh3_add, \
     .value = fsdp_xxh3_value}

#endif

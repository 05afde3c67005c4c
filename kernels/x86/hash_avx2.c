/* The functions of kernels/bytes/hash.c (XXH3-128), compiled for AVX2. */
#include "kernels/variants.h"

#define XXH_INLINE_ALL
#include <string.h>
#include <xxhash.h>

static fsdp_hash canonical(XXH128_hash_t value)
{
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, value);
    fsdp_hash hash;
    memcpy(hash.bytes, bytes.digest, sizeof hash.bytes);
    return hash;
}

fsdp_hash fsdp_hash_avx2(const void *data, size_t size)
{
    return canonical(XXH3_128bits(data, size));
}

static void reset(void *state)
{
    XXH3_128bits_reset(state);
}

static void add(void *state, const void *data, size_t size)
{
    XXH3_128bits_update(state, data, size);
}

static fsdp_hash value(const void *state)
{
    return canonical(XXH3_128bits_digest(state));
}

const fsdp_hash_stream fsdp_hash_stream_avx2 = {
    .state_size = sizeof(XXH3_state_t),
    .reset = reset,
    .add = add,
    .value = value,
};

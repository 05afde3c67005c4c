/* FNV-1a: a short hash of little data, for comparing and naming. Files carry the hash of
 * kernels/bytes/hash.c instead. */
#ifndef FSDP_FNV_H
#define FSDP_FNV_H

#include <stddef.h>
#include <stdint.h>

#define FSDP_FNV_BEGIN UINT64_C(0xcbf29ce484222325)

/* Continues a hash over further bytes. */
static inline uint64_t fsdp_fnv(uint64_t hash, const void *data, size_t size)
{
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

#endif

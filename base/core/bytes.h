/* Reads little-endian and big-endian numbers at any address of a file's bytes. */
#ifndef FSDP_BYTES_H
#define FSDP_BYTES_H

#include <stdint.h>
#include <string.h>

static inline uint16_t fsdp_load_u16(const void *data)
{
    const uint8_t *bytes = data;
    return (uint16_t)(bytes[0] | bytes[1] << 8);
}

static inline uint32_t fsdp_load_u32(const void *data)
{
    const uint8_t *bytes = data;
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

static inline uint64_t fsdp_load_u64(const void *data)
{
    const uint8_t *bytes = data;
    return fsdp_load_u32(bytes) | (uint64_t)fsdp_load_u32(bytes + 4) << 32;
}

#endif

/*
 * Digests over the variants that dispatch.c chose: the streaming XXH3-128 of shard files, SHA-256 with its
 * buffering and padding, and CRC-32. See kernels.h and digest.h.
 */
#include "base/core/mem.h"
#include "kernels/variants.h"

#include <string.h>

/* --- XXH3-128 --------------------------------------------------------------------------------- */

/* A hasher is the state alone: pages, because XXH3 wants it aligned to 64 bytes. */
fsdp_hasher *fsdp_hasher_create(void)
{
    fsdp_hasher *hasher = fsdp_alloc_pages(fsdp_hash_stream_get()->state_size);
    if (!hasher)
        return NULL;
    memset(hasher, 0, fsdp_hash_stream_get()->state_size);
    fsdp_hasher_reset(hasher);
    return hasher;
}

void fsdp_hasher_free(fsdp_hasher *hasher)
{
    fsdp_free(hasher);
}

void fsdp_hasher_reset(fsdp_hasher *hasher)
{
    fsdp_hash_stream_get()->reset(hasher);
}

void fsdp_hasher_add(fsdp_hasher *hasher, const void *data, size_t size)
{
    if (size > 0)
        fsdp_hash_stream_get()->add(hasher, data, size);
}

fsdp_hash fsdp_hasher_value(const fsdp_hasher *hasher)
{
    return fsdp_hash_stream_get()->value(hasher);
}

/* --- SHA-256 ---------------------------------------------------------------------------------- */

enum { BLOCK = 64, SIZE_AT = 56 };

static void write_big32(uint8_t *data, uint32_t value)
{
    data[0] = (uint8_t)(value >> 24);
    data[1] = (uint8_t)(value >> 16);
    data[2] = (uint8_t)(value >> 8);
    data[3] = (uint8_t)value;
}

void fsdp_sha256_init(fsdp_sha256 *sha)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(sha->state, start, sizeof sha->state);
    sha->size = 0;
}

void fsdp_sha256_add(fsdp_sha256 *sha, const void *data, size_t size)
{
    fsdp_sha256_blocks *run_blocks = fsdp_sha256_blocks_get();
    const uint8_t *bytes = data;
    size_t held = (size_t)(sha->size % BLOCK);
    sha->size += size;
    if (held + size >= BLOCK && held > 0) {
        memcpy(sha->pending + held, bytes, BLOCK - held);
        run_blocks(sha->state, sha->pending, 1);
        bytes += BLOCK - held;
        size -= BLOCK - held;
        held = 0;
    }
    if (held == 0) {
        run_blocks(sha->state, bytes, size / BLOCK);
        bytes += size / BLOCK * BLOCK;
        size %= BLOCK;
    }
    if (size > 0)
        memcpy(sha->pending + held, bytes, size);
}

/* Works on a copy of the state, so that more can be added afterwards. */
void fsdp_sha256_value(const fsdp_sha256 *sha, uint8_t digest_out[32])
{
    uint32_t state[8];
    uint8_t tail[2 * BLOCK] = {0};
    size_t held = (size_t)(sha->size % BLOCK);
    size_t blocks = held < SIZE_AT ? 1 : 2;
    memcpy(state, sha->state, sizeof state);
    memcpy(tail, sha->pending, held);
    tail[held] = 0x80;
    uint64_t bits = sha->size * 8;
    write_big32(tail + (blocks - 1) * BLOCK + SIZE_AT, (uint32_t)(bits >> 32));
    write_big32(tail + (blocks - 1) * BLOCK + SIZE_AT + 4, (uint32_t)bits);
    fsdp_sha256_blocks_get()(state, tail, blocks);
    for (int i = 0; i < 8; i++)
        write_big32(digest_out + 4 * i, state[i]);
}

/* --- CRC-32 ----------------------------------------------------------------------------------- */

uint32_t fsdp_crc32(uint32_t crc, const void *data, size_t size)
{
    return ~fsdp_crc32_add_get()(~crc, data, size);
}

void fsdp_xxh3_hex(const void *data, size_t size, char hex_out[FSDP_XXH3_HEX])
{
    static const char digits[] = "0123456789abcdef";
    const fsdp_hash hash = fsdp_kernels_get()->hash(data, size);
    for (size_t i = 0; i < sizeof hash.bytes; i++) {
        hex_out[2 * i] = digits[hash.bytes[i] >> 4];
        hex_out[2 * i + 1] = digits[hash.bytes[i] & 15];
    }
    hex_out[FSDP_XXH3_HEX - 1] = '\0';
}

/*
 * Digests that people publish and compare: SHA-256 in pieces of any size, one fsdp_sha256 per thread, and
 * XXH3-128 of whole arrays.
 */
#ifndef FSDP_DIGEST_H
#define FSDP_DIGEST_H

#include <fsdp/status.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_SHA256_SIZE = 32 };

/* Nothing to release. */
typedef struct fsdp_sha256 {
    uint32_t state[8];
    uint64_t size;
    uint8_t pending[64];
} fsdp_sha256;

void fsdp_sha256_init(fsdp_sha256 *sha);
void fsdp_sha256_add(fsdp_sha256 *sha, const void *data, size_t size);
/* The digest of everything so far; more may be added afterwards. */
void fsdp_sha256_value(const fsdp_sha256 *sha, uint8_t digest_out[FSDP_SHA256_SIZE]);

enum { FSDP_XXH3_HEX = 33 };

/* 32 lower-case digits, as xxhsum prints them. */
void fsdp_xxh3_hex(const void *data, size_t size, char hex_out[FSDP_XXH3_HEX]);

#ifdef __cplusplus
}
#endif
#endif

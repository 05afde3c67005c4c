/*
 * SHA-256, for digests that people publish and compare. Callers add data in pieces of any size; processors
 * with SHA instructions use them. One fsdp_sha256 per thread.
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

#ifdef __cplusplus
}
#endif
#endif

/*
 * The variants of each kernel, seen only by kernels/dispatch.c, which chooses, by the variants
 * themselves, which fall back on the plain C one, and by the tests, which compare them.
 * kernels.h describes each kernel.
 *
 * The rooms kernels/bytes and kernels/x86 implement these functions and kernels.h: buffers in, buffers and
 * checksums out. Only dispatch.c and other kernels call them; callers outside use fsdp_kernels_get.
 */
#ifndef FSDP_VARIANTS_H
#define FSDP_VARIANTS_H

#include "kernels/kernels.h"
#include "kernels/loops.h"

/* The streaming hash of one variant. All variants keep the same state, so they can be mixed. */
typedef struct fsdp_hash_stream {
    size_t state_size;
    void (*reset)(void *state);
    void (*add)(void *state, const void *data, size_t size);
    fsdp_hash (*value)(const void *state);
} fsdp_hash_stream;

extern const uint32_t fsdp_sha256_constants[64];   /* of SHA-256's rounds, aligned to 16 bytes */
/* Runs whole 64-byte blocks through the SHA-256 state. */
typedef void fsdp_sha256_blocks(uint32_t state[8], const uint8_t *data, size_t blocks);

/* Carries a CRC-32 on, without the usual inversions before and after. */
typedef uint32_t fsdp_crc32_add(uint32_t state, const uint8_t *data, size_t size);

const fsdp_hash_stream *fsdp_hash_stream_get(void);
fsdp_sha256_blocks *fsdp_sha256_blocks_get(void);
fsdp_crc32_add *fsdp_crc32_add_get(void);

size_t fsdp_cast_c(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                   size_t count, fsdp_on_overflow overflow);
size_t fsdp_add_scaled_c(void *data, fsdp_dtype type, const float *values, float factor, size_t count);
size_t fsdp_encode_q8_0_c(const float *values, size_t count, void *blocks_out);
void fsdp_measure_c(fsdp_cast_measure *sum, const float *before, const float *after, size_t count);
void fsdp_copy_large_c(void *to, const void *from, size_t size);
void fsdp_shuffle_c(void *to, const void *from, size_t size, size_t element_size);
void fsdp_unshuffle_c(void *to, const void *from, size_t size, size_t element_size);
/* Elements [first, count) of an array of count elements, for variants that leave a rest. */
void fsdp_shuffle_rest(uint8_t *to, const uint8_t *from, size_t first, size_t count,
                       size_t element_size);
void fsdp_unshuffle_rest(uint8_t *to, const uint8_t *from, size_t first, size_t count,
                         size_t element_size);
fsdp_hash fsdp_hash_c(const void *data, size_t size);
extern const fsdp_hash_stream fsdp_hash_stream_c;
fsdp_sha256_blocks fsdp_sha256_blocks_c;
fsdp_crc32_add fsdp_crc32_add_c;

#if defined(__x86_64__)
size_t fsdp_cast_avx2(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                      size_t count, fsdp_on_overflow overflow);
size_t fsdp_add_scaled_avx2(void *data, fsdp_dtype type, const float *values, float factor,
                            size_t count);
size_t fsdp_encode_q8_0_avx2(const float *values, size_t count, void *blocks_out);
void fsdp_measure_avx2(fsdp_cast_measure *sum, const float *before, const float *after,
                       size_t count);
void fsdp_copy_large_avx2(void *to, const void *from, size_t size);
void fsdp_shuffle_avx2(void *to, const void *from, size_t size, size_t element_size);
void fsdp_unshuffle_avx2(void *to, const void *from, size_t size, size_t element_size);
fsdp_hash fsdp_hash_avx2(const void *data, size_t size);
extern const fsdp_hash_stream fsdp_hash_stream_avx2;
fsdp_sha256_blocks fsdp_sha256_blocks_ni;
fsdp_crc32_add fsdp_crc32_add_clmul;
#endif

#endif

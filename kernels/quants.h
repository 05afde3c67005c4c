/*
 * ggml's block types (fsdp_dtype_info.values > 1) as f32 and back, bit for bit as ggml's reference code
 * and gguf-py compute them. Callers: layers that compare quantized tensors, and turn them into
 * floats and floats into them.
 */
#ifndef FSDP_QUANTS_H
#define FSDP_QUANTS_H

#include <fsdp/dtype.h>

/* Values per block at most, and its bytes. */
enum { FSDP_QUANT_VALUES = 256, FSDP_QUANT_BYTES = 210 };

/* Decodes count blocks into count times fsdp_dtype_info.values numbers. dtype is any of the block types. */
void fsdp_blocks_to_f32(fsdp_dtype dtype, const void *blocks, size_t count, float *out);

/* True for the types that fsdp_blocks_from_f32 encodes: q8_0, q4_0. */
bool fsdp_blocks_can_encode(fsdp_dtype dtype);
/* Encodes count blocks. Returns how many of them hold finite values of which the largest is too large for the
 * block's scale; it is infinity then. */
size_t fsdp_blocks_from_f32(fsdp_dtype dtype, const float *values, size_t count, void *blocks_out);

#endif

/* Derived tensors of quantized weights: numbers that are stored as small ones and scales. See derived.h. */
#ifndef FSDP_DERIVED_SCALED_H
#define FSDP_DERIVED_SCALED_H

#include "statedict/derive/derived.h"

/* The weight times its scales, in f32. Both have the same number of dims; dim d of the scales has one row for
 * blocks[d] rows of the weight. A scale whose products f32 does not hold is an error of the read. */
fsdp_status fsdp_derive_block_scaled(fsdp_arena *arena, const fsdp_derived *weight,
                                     const fsdp_derived *scales, const int64_t *blocks,
                                     const fsdp_derived **out, fsdp_error *err);

/* MXFP4: u8 [..., n, 16] with two numbers of 4 bits in a byte, the lower half first, and their exponents u8
 * [..., n], biased by 127; f32 [..., 32 n]. FSDP_ERR_DAMAGED: they are not such a pair. A number that is not
 * finite is an error of the read. */
fsdp_status fsdp_derive_mxfp4(fsdp_arena *arena, const fsdp_derived *weight, const fsdp_derived *exponents,
                              const fsdp_derived **out, fsdp_error *err);

#endif

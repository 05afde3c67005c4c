/* Derived tensors of adapters: a weight plus a product of two thin matrices. See derived.h. */
#ifndef FSDP_DERIVED_PRODUCT_H
#define FSDP_DERIVED_PRODUCT_H

#include "statedict/derive/derived.h"

/* A LoRA pair: b is [out, rank], a is [rank, in]. */
typedef struct fsdp_low_rank {
    const fsdp_derived *b, *a;
    double factor;
} fsdp_low_rank;

/* weight + factor * b a, [out, in], computed in f32 and rounded once to the weight's dtype. */
fsdp_status fsdp_derive_low_rank(fsdp_arena *arena, const fsdp_derived *weight, const fsdp_low_rank *pair,
                                 const fsdp_derived **out, fsdp_error *err);

/* Rows of the weight, each divided by its length and times its magnitude ([out] or [out, 1]), as DoRA has it.
 * The weight is f32; a row has at most a million elements. */
fsdp_status fsdp_derive_row_lengths(fsdp_arena *arena, const fsdp_derived *weight,
                                    const fsdp_derived *magnitudes, const fsdp_derived **out,
                                    fsdp_error *err);

#endif

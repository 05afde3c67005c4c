/* Other element types than a cast of single elements makes: plain weights of quantized ones, and blocks. */
#ifndef FSDP_ELEMENT_TYPES_H
#define FSDP_ELEMENT_TYPES_H

#include "formats/target.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/derive/derived.h"
#include "statedict/models/config.h"

/* --- plain weights --- */

typedef struct fsdp_dequant_report {
    int64_t weights;           /* that were dequantized */
    int64_t scales;            /* and tensors that belong to them, which the result does not have */
} fsdp_dequant_report;

typedef struct fsdp_dequant_opts {
    fsdp_dtype dtype;          /* of the result: a floating type */
    const fsdp_config_file *config;    /* its quantization_config may have the size of blocks; NULL: none */
} fsdp_dequant_opts;

/*
 * Replaces the checkpoint by one with these weights dequantized: fp8 with scales of blocks, rows or tensors
 * (NAME_scale_inv, NAME_scale), MXFP4 (NAME_blocks and NAME_scales, whose last two dims transformers
 * exchanges), and ggml's blocks. The checkpoint is closed and NULL after a failure. FSDP_ERR_USAGE when there
 * is no such weight, or one whose scales are missing; FSDP_ERR_DAMAGED when scales do not fit their weight in
 * the blocks that config.json has, and when one that is read makes numbers that are not finite.
 */
fsdp_status fsdp_dequantize(const fsdp_dequant_opts *opts, fsdp_checkpoint **checkpoint,
                            fsdp_dequant_report *report_out, fsdp_error *err);

/* --- the tensors that this makes --- */

/* The numbers of ggml's blocks, in f32: the last dim is as many times longer as a block has values. */
fsdp_status fsdp_derive_values(fsdp_arena *arena, const fsdp_derived *part, const fsdp_derived **out,
                               fsdp_error *err);
/* Blocks of the numbers of a floating tensor; its rows must be whole blocks. */
fsdp_status fsdp_derive_blocks(fsdp_arena *arena, const fsdp_derived *part, fsdp_dtype dtype,
                               const fsdp_derived **out, fsdp_error *err);

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

/* --- the types of a target --- */

typedef struct fsdp_target_types {
    const fsdp_format *target;
    fsdp_dtype blocks;         /* of matrices whose rows are whole blocks; FSDP_DTYPE_NONE: none are made */
    const struct fsdp_cast_rules *casts;   /* no blocks are made of tensors with a rule; NULL: none have */
} fsdp_target_types;

typedef struct fsdp_type_report {
    int64_t decoded;           /* tensors of blocks that the target cannot hold: f32 now */
    int64_t encoded;           /* tensors that are blocks now */
    int64_t widened;           /* vectors that are f32 now */
} fsdp_type_report;

/* Replaces the checkpoint by one with such tensors, unless none changes; it is closed and NULL after a
 * failure. */
fsdp_status fsdp_derive_target_types(const fsdp_target_types *types, fsdp_checkpoint **checkpoint,
                                     fsdp_type_report *report_out, fsdp_error *err);

#endif

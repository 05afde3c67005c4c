/* Makes plain floating weights of a model's quantized ones. */
#ifndef FSDP_DEQUANT_H
#define FSDP_DEQUANT_H

#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/models/config.h"

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

#endif

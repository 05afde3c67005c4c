/* quantization_config of config.json: the blocks of a weight that have one scale. */
#ifndef FSDP_DEQUANT_CONFIG_H
#define FSDP_DEQUANT_CONFIG_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp_quant_blocks {
    int64_t size[2];           /* rows and columns, if they are given */
    bool is_given;             /* weight_block_size, or block_structure of compressed-tensors */
    bool is_none;              /* weight_block_size is null: there are no blocks */
    const char *member;        /* that gives the size */
} fsdp_quant_blocks;

/* FSDP_ERR_DAMAGED: the size is no pair of positive numbers; FSDP_ERR_USAGE: there are several sizes. */
fsdp_status fsdp_quant_blocks_read(const char *text, size_t size, const char *path,
                                   fsdp_quant_blocks *blocks_out, fsdp_error *err);

#endif

/* The formats that can be written, for the table in detect/targets.c. */
#ifndef FSDP_TARGET_FORMATS_H
#define FSDP_TARGET_FORMATS_H

#include "formats/target.h"

/* packed_target.c */
extern const fsdp_target_format fsdp_hf_target, fsdp_safetensors_target, fsdp_npz_target, fsdp_npy_target;
extern const fsdp_target_format fsdp_gguf_target, fsdp_llmc_target;
extern const fsdp_target_format fsdp_dcp_target;     /* dcp_write.c */
extern const fsdp_target_format fsdp_megatron_target;        /* dcp_megatron.c */
extern const fsdp_target_format fsdp_torch_target;   /* torch_write.c */
extern const fsdp_target_format fsdp_universal_target;   /* universal_write.c */

#endif

/* The formats that can be written, for the table in targets.c. */
#ifndef FSDP_TARGETS_H
#define FSDP_TARGETS_H

#include "formats/target.h"

extern const fsdp_target_format fsdp_target_hf, fsdp_target_safetensors, fsdp_target_npz;

#endif

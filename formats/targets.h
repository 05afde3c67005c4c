/* The formats of targets.c, each in its own file. */
#ifndef FSDP_TARGETS_H
#define FSDP_TARGETS_H

#include "formats/target.h"

extern const fsdp_target_format fsdp_dcp_target;
extern const fsdp_target_format fsdp_torch_target;

#endif

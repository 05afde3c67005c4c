/* Element types that a target needs, where a cast of single elements does not make them. */
#ifndef FSDP_TARGET_TYPES_H
#define FSDP_TARGET_TYPES_H

#include "formats/target.h"
#include "statedict/checkpoint/checkpoint_internal.h"

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

/*
 * A box copy as few long runs: neighbouring dims that are dense on both sides are merged, and a dense
 * innermost dim becomes the unit. For fsdp_copy_box and for the kernel of GPUs.
 */
#ifndef FSDP_COPY_PLAN_H
#define FSDP_COPY_PLAN_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_copy_plan {
    int ndim;                  /* of the merged dims, the innermost first: the rows of one call */
    int64_t len[FSDP_MAX_DIMS];
    int64_t to_strides[FSDP_MAX_DIMS];
    int64_t from_strides[FSDP_MAX_DIMS];
    size_t unit;               /* bytes copied together */
} fsdp_copy_plan;

/* False when the box is empty. */
bool fsdp_copy_plan_make(fsdp_copy_plan *plan_out, const fsdp_strided_copy *copy);

#ifdef __cplusplus
}
#endif
#endif

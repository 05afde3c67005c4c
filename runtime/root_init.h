/*
 * Sets the initial values of a root's parameters, whichever API made it: reproducible ones, the caller's, or
 * rank 0's. Call these functions between steps; f32 masters of optimizers follow.
 */
#ifndef FSDP_ROOT_INIT_H
#define FSDP_ROOT_INIT_H

#include <fsdp/root.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns number i of a named sequence of numbers in [-1, 1), which is the same on every machine and can be
 * computed in any language. Any thread may call it. */
FSDP_API double fsdp_uniform(uint64_t seed, const char *name, uint64_t i);

/* Sets element i of each parameter to fsdp_uniform(seed, its name, i) / sqrt(its last dimension); the
 * values are the same at any world size. Local. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_init_uniform(fsdp_root *root, uint64_t seed, fsdp_error *err);

/* Writes the elements of `box`, packed, in the parameter's dtype, or in that of the memory if a buffer is
 * kept in another one. If it fails, the call that was given it ends with that failure. */
typedef fsdp_status (*fsdp_param_fill)(void *context, const fsdp_param *param, const fsdp_box *box,
                                       void *data, fsdp_error *err);
/* Calls fill per parameter for the elements that this rank holds, in the same order on all ranks; several
 * times for a range of a flat parameter (wrap.h) that is not a box. Buffers are not changed. Local. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_init(fsdp_root *root, fsdp_param_fill fill, void *context,
                                                 fsdp_error *err);
/* Sets all parameters and buffers to the values of rank 0, where fill writes whole tensors; on the other
 * ranks it is not called. Sends them through one bounded buffer. If fill fails, the call fails on every rank.
 * Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_sync_from_rank0(fsdp_root *root, fsdp_param_fill fill,
                                                            void *context, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

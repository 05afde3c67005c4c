/*
 * Sets the first values of a root's parameters, whichever API made it: reproducible ones, the caller's, or
 * rank 0's. Call it between steps; f32 masters of optimizers follow.
 */
#ifndef FSDP_ROOT_INIT_H
#define FSDP_ROOT_INIT_H

#include <fsdp/root.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the i-th of a named sequence of numbers in [-1, 1), the same on every machine and in every
 * language. */
FSDP_API double fsdp_uniform(uint64_t seed, const char *name, uint64_t i);

/* Sets element i of each parameter to fsdp_uniform(seed, its name, i) / sqrt(its last dimension); the
 * values are the same at any world size. Local. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_init_uniform(fsdp_root *root, uint64_t seed, fsdp_error *err);

/* Writes the elements of `box`, packed, in the parameter's dtype (of a buffer that is kept in another dtype:
 * that one). A failure ends the call that it was given to. */
typedef fsdp_status (*fsdp_param_fill)(void *context, const fsdp_param *param, const fsdp_box *box,
                                       void *data, fsdp_error *err);
/* Calls fill per parameter for the elements that this rank holds, in the same order on all ranks, and
 * several times for a run of a flat parameter (wrap.h) that is not a box. Buffers are not changed. Local. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_init(fsdp_root *root, fsdp_param_fill fill, void *context,
                                                 fsdp_error *err);
/* Sets all parameters and buffers as rank 0 has them: there, fill brings whole tensors; on the other ranks
 * it is not called. One bounded buffer. A failure of fill is every rank's. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_sync_from_rank0(fsdp_root *root, fsdp_param_fill fill,
                                                            void *context, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

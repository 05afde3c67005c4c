/*
 * The first values of a root's parameters, whichever face made it: reproducible ones, the caller's, or rank
 * 0's. Between steps; f32 masters of optimizers follow.
 */
#ifndef FSDP_ROOT_INIT_H
#define FSDP_ROOT_INIT_H

#include <fsdp/root.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The i-th of a named sequence of numbers in [-1, 1), the same on every machine and in every language. */
FSDP_API double fsdp_uniform(uint64_t seed, const char *name, uint64_t i);

/* Local. Element i of a parameter becomes fsdp_uniform(seed, its name, i) / sqrt(its last dimension); the
 * same values at any world size. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_init_uniform(fsdp_root *root, uint64_t seed, fsdp_error *err);

/* Elements of `box`, packed, in the parameter's dtype (of a buffer that is kept in another dtype: that one).
 * A failure ends the call that it was given to. */
typedef fsdp_status (*fsdp_param_fill)(void *context, const fsdp_param *param, const fsdp_box *box,
                                       void *data, fsdp_error *err);
/* Local. fill is called per parameter for the elements that this rank holds, several times for a run of a
 * flat parameter (wrap.h) that is no box; in the same order on all ranks. Buffers stay as they are. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_init(fsdp_root *root, fsdp_param_fill fill, void *context,
                                                 fsdp_error *err);
/* Collective. All parameters and buffers as rank 0 has them: there, fill brings whole tensors; on the other
 * ranks it is not called. One bounded buffer. A failure of fill is every rank's. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_sync_from_rank0(fsdp_root *root, fsdp_param_fill fill,
                                                            void *context, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

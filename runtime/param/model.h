/*
 * A model as the runtime sees it: named parameters and buffers. Units take parameters by name prefix
 * (unit.h), and fsdp_root_create (root.h) freezes the structure and gives everything its memory.
 *
 * Until then a parameter is only described. Afterwards the library owns its memory: a shard always, the
 * whole between the unit's pre_forward and post_forward, and pre_backward and post_backward. Pointers that
 * are asked for in a wrong state are NULL; fsdp_param_complaint says why at once, otherwise the reason is the
 * error of the next call on that root.
 *
 * All ranks declare the same model in the same order.
 */
#ifndef FSDP_MODEL_H
#define FSDP_MODEL_H

#include <fsdp/box.h>
#include <fsdp/dtype.h>
#include <fsdp/layout.h>
#include <fsdp/world.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_model fsdp_model;
typedef struct fsdp_param fsdp_param;

/* Local. The world outlives the model. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_model_create(fsdp_world *world, fsdp_model **model_out,
                                                    fsdp_error *err);
/* Frees parameters, units and buffers; free the root first. Accepts NULL. */
FSDP_API void fsdp_model_free(fsdp_model *model);

/* Local. name: dotted, as in the module tree ("layers.0.weight"), used once. shape: global, 1 to 8 dims, each
 * at least 1. The parameter is the model's. param_out may be NULL. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_model_add_param(fsdp_model *model, const char *name, fsdp_dtype dtype,
                                                       int ndim, const int64_t *shape, fsdp_param **param_out,
                                                       fsdp_error *err);
/* A further name of a parameter that modules share: an alias in state dicts. Units go by its own name: where
 * the other module is in another unit, that unit's hooks do not gather it. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_model_add_alias(fsdp_model *model, const char *name, fsdp_param *param,
                                                       fsdp_error *err);
/* A buffer: whole on every rank, never reduced. Only persistent ones are in state dicts. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_model_add_buffer(fsdp_model *model, const char *name, fsdp_dtype dtype,
                                                        int ndim, const int64_t *shape, bool is_persistent,
                                                        fsdp_param **buffer_out, fsdp_error *err);

FSDP_API size_t fsdp_model_count(const fsdp_model *model);     /* parameters and buffers, in order */
FSDP_API fsdp_param *fsdp_model_at(const fsdp_model *model, size_t i);
/* Aliases, too; NULL when there is none. */
FSDP_API fsdp_param *fsdp_model_find(const fsdp_model *model, const char *name);

/* --- what a parameter is ---------------------------------------------------------------------- */

FSDP_API const char *fsdp_param_name(const fsdp_param *param);
FSDP_API size_t fsdp_param_alias_count(const fsdp_param *param);
FSDP_API const char *fsdp_param_alias(const fsdp_param *param, size_t i);
FSDP_API fsdp_dtype fsdp_param_dtype(const fsdp_param *param);         /* of shards, optimizer, state dicts */
FSDP_API fsdp_dtype fsdp_param_data_dtype(const fsdp_param *param);    /* gathered */
FSDP_API int fsdp_param_ndim(const fsdp_param *param);
FSDP_API const int64_t *fsdp_param_shape(const fsdp_param *param);     /* global */
FSDP_API bool fsdp_param_is_buffer(const fsdp_param *param);
FSDP_API bool fsdp_param_requires_grad(const fsdp_param *param);

/* Frozen parameters are gathered and have no gradient. Between steps only. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_set_requires_grad(fsdp_param *param, bool requires_grad,
                                                               fsdp_error *err);

/*
 * Tensor parallelism, before the parameter's unit is made: the placement on a mesh dim that is neither a
 * shard nor a replicate dim of the unit (default: replicated there). Gathering then gives this rank's part of
 * the tensor, and its box says which.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_set_placement(fsdp_param *param, const char *mesh_dim,
                                                           fsdp_placement placement, fsdp_error *err);

/* The layout over the unit's mesh, as state dicts have it; NULL before the root was made. */
FSDP_API const fsdp_layout *fsdp_param_layout(const fsdp_param *param);

/* --- its memory ------------------------------------------------------------------------------- */

/* This rank's rows, packed, dtype fsdp_param_dtype; *box_out (may be NULL) says which, an empty one included.
 * Buffers: the whole. */
FSDP_API void *fsdp_param_shard(fsdp_param *param, fsdp_box *box_out);

/* Gathered: what this rank's mathematics work on, row-major, dtype fsdp_param_data_dtype. */
FSDP_API void *fsdp_param_data(fsdp_param *param);
FSDP_API void fsdp_param_data_box(const fsdp_param *param, fsdp_box *box_out); /* of it; all but tensor
                                                                                 * parallel ones: the whole */

/* The gradient of this backward, as large as the data: zeroed on the first request, to be added to. */
FSDP_API void *fsdp_param_grad(fsdp_param *param);
/* The same without zeroing, all of it to be overwritten. */
FSDP_API void *fsdp_param_grad_raw(fsdp_param *param);
/* In which dtype: fsdp_param_data_dtype unless it is changed before the root is made. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_set_grad_dtype(fsdp_param *param, fsdp_dtype dtype,
                                                            fsdp_error *err);

/* The reduced gradient of this rank's rows, from end_backward to the optimizer's step; NULL: none. */
FSDP_API void *fsdp_param_shard_grad(fsdp_param *param);

/*
 * Local. Why one of these pointers was NULL, said at once:
 *
 *   float *weight = fsdp_param_data(param);
 *   if (!weight)
 *       return fsdp_param_complaint(param, err);
 *
 * It is what the next call on the root would fail with: the first reason, of any parameter of this root, that
 * was not told yet. It is told once. FSDP_OK when there is none: NULL was right then (no gradient has been
 * reduced).
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_complaint(const fsdp_param *param, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

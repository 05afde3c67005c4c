/*
 * To the runtime, a model is a list of named parameters and buffers. Units take parameters by the prefix of
 * their names (unit.h), and fsdp_root_create (root.h) freezes the structure and allocates all memory. Before
 * that a parameter is only a name, a dtype and a shape; after it, calls of unit.h return pointers to its
 * memory.
 *
 * All ranks declare the same model in the same order. Every call is local, and one thread at a time uses a
 * model.
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

/* Creates a model, which the caller frees. The world must outlive it. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_model_create(fsdp_world *world, fsdp_model **model_out,
                                                    fsdp_error *err);
/* Frees parameters, units and buffers; if a root exists, they live until it is freed. Accepts NULL. */
FSDP_API void fsdp_model_free(fsdp_model *model);

/* A parameter, or a buffer, which is whole on every rank and never reduced. */
typedef struct fsdp_param_spec {
    const char *name;          /* dotted, as in the module tree ("layers.0.weight"), used once */
    fsdp_dtype dtype;          /* of shards, optimizer state and state dicts */
    int ndim;                  /* a parameter: 1 to 8, a buffer: 0 to 8 */
    const int64_t *shape;      /* global; each dim of a parameter is at least 1 */
    bool is_buffer;
    bool is_transient;         /* a buffer that is not in state dicts */
} fsdp_param_spec;
/* Adds a parameter or a buffer, and copies `spec`. The model owns the parameter; param_out may be NULL.
 * FSDP_ERR_USAGE, and no change, after the root was made. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_model_add(fsdp_model *model, const fsdp_param_spec *spec,
                                                 fsdp_param **param_out, fsdp_error *err);
/* Adds a further name of a parameter that modules share: an alias in state dicts. Units use only the first
 * name: if another module is in another unit, the hooks of that unit do not gather the parameter.
 * FSDP_ERR_USAGE, and no change, after the root was made. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_model_add_alias(fsdp_model *model, const char *name, fsdp_param *param,
                                                       fsdp_error *err);

/* Returns the number of parameters and buffers. */
FSDP_API size_t fsdp_model_count(const fsdp_model *model);
/* Returns a parameter or buffer, in the order in which they were added; NULL after the last. The model owns
 * it. */
FSDP_API fsdp_param *fsdp_model_at(const fsdp_model *model, size_t i);
/* Finds a parameter by its name or an alias; NULL when there is none. */
FSDP_API fsdp_param *fsdp_model_find(const fsdp_model *model, const char *name);

/* --- what a parameter is ---------------------------------------------------------------------- */

/* Returns the parameter's name, which the model owns. */
FSDP_API const char *fsdp_param_name(const fsdp_param *param);

typedef struct fsdp_param_info {
    const char *name;
    fsdp_dtype dtype;                  /* of shards, optimizer state and state dicts */
    fsdp_dtype data_dtype;             /* gathered */
    fsdp_dtype grad_dtype;             /* of fsdp_param_grad; FSDP_DTYPE_NONE before its unit was made */
    int ndim;
    const int64_t *shape;              /* global */
    bool is_buffer;
    bool requires_grad;                /* default: true for parameters of floating dtypes */
    const char *const *aliases;
    size_t alias_count;
    const fsdp_layout *layout;         /* over the unit's mesh, as state dicts have it; NULL before the root
                                        * was made */
} fsdp_param_info;
/* Describes a parameter as it is now; the model owns what the pointers point to. */
FSDP_API fsdp_param_info fsdp_param_describe(const fsdp_param *param);

/* Sets the dtype of the parameter's gradient, the same on all ranks; default: its data_dtype.
 * FSDP_ERR_USAGE after the root was made, and for a dtype that is not floating. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_set_grad_dtype(fsdp_param *param, fsdp_dtype dtype,
                                                            fsdp_error *err);

/* Sets the placement on a mesh dim that is neither a shard nor a replicate dim of the unit (default:
 * replicated there), for tensor parallelism, the same on all ranks. Gathered data is then this rank's part of
 * the tensor, whose box is in the layout. FSDP_ERR_USAGE after the parameter's unit was made. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_set_placement(fsdp_param *param, const char *mesh_dim,
                                                           fsdp_placement placement, fsdp_error *err);

/* The cut of one parameter into shards. */
typedef struct fsdp_param_place {
    int dim;                   /* tensor dim; negative: from the end. Other than 0 must divide evenly */
    const fsdp_mesh *mesh;     /* NULL: the unit's. Parameters of several meshes are several groups */
} fsdp_param_place;

/* --- plug-ins of a parameter ------------------------------------------------------------------- */

/* Runs in end_backward for a parameter whose sharded gradient is complete; end_backward returns a failure. */
typedef fsdp_status (*fsdp_grad_hook)(void *context, fsdp_param *param, fsdp_error *err);
/* Replaces the hook; NULL: none. `context` must live as long as the root. */
FSDP_API void fsdp_param_set_post_accumulate_hook(fsdp_param *param, fsdp_grad_hook hook, void *context);

/* Replaces the bytes that are gathered for a parameter's shard, for example by narrow numbers and their
 * scales. `pre` computes `count` inputs from the padded shard; their sizes are fixed when the extension is
 * set, and equal on all ranks. `post` computes the parameter from the inputs of all ranks: input i of rank
 * r is at gathered[i] + r * stride bytes. Both run on a stream's thread. */
typedef struct fsdp_extension {
    void *context;
    size_t count;              /* 1..8 */
    const size_t *sizes;       /* bytes of each input, per rank */
    fsdp_status (*pre)(void *context, const fsdp_param *param, const void *shard, void *const *inputs,
                       fsdp_error *err);
    fsdp_status (*post)(void *context, const fsdp_param *param, const void *const *gathered, size_t stride,
                        void *data, fsdp_error *err);
} fsdp_extension;
/* Sets an extension, on all ranks. Copies `extension`; its context must live until model and root are freed.
 * FSDP_ERR_USAGE after the root was made. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_set_extension(fsdp_param *param, const fsdp_extension *extension,
                                                           fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

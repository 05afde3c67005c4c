/*
 * A unit gathers and reduces its parameters together. The program calls the unit's hooks around its
 * computation, since C has no autograd. One fully_shard call of PyTorch makes one unit. docs/runtime.md has
 * its states, docs/flow_step.md a whole step.
 *
 * Hooks, gathers by hand and the setting of a separate reduce-scatter group are collective in the unit's
 * groups: all ranks of these call them in the same order. Every other call is local, but all ranks set the
 * same values. A unit belongs to the model and is freed with it. One thread at a time uses the units of a
 * model. A call at the wrong time returns FSDP_ERR_USAGE and changes nothing; any other failure is kept by
 * the root (root.h).
 */
#ifndef FSDP_UNIT_H
#define FSDP_UNIT_H

#include <fsdp/model.h>
#include <fsdp/settings.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_unit fsdp_unit;

/* Decides how a unit is sharded. All zero but the mesh: FSDP over a mesh of one dim, HSDP over one of
 * several, computed in the stored dtype. A unit without a mesh is FSDP_ERR_USAGE. */
typedef struct fsdp_unit_opts {
    const fsdp_mesh *mesh;             /* connected, see fsdp_world_mesh */
    const char *shard_dims;            /* "dp": names of mesh dims, joined by commas; several are used as one.
                                        * NULL with replicate_dims NULL: a mesh of one dim shards; of a larger
                                        * mesh the first dim replicates and the second shards */
    const char *replicate_dims;        /* "" for none; with shard_dims "" the unit is replicated (DDP) */
    int reshard_after_forward;         /* FSDP_RESHARD_AUTO and below it, or a number of ranks */
    fsdp_dtype param_dtype;            /* of gathered parameters; FSDP_DTYPE_NONE: as stored */
    fsdp_dtype reduce_dtype;           /* of the reduction of gradients; NONE: the parameter's stored dtype */
    fsdp_dtype output_dtype;           /* NONE: as computed; see fsdp_unit_output_dtype */
    bool keep_input_dtype;             /* inputs are not cast to param_dtype; see fsdp_unit_input_dtype */
    bool offload;                      /* shards, their gradients and their optimizers' state live in host
                                        * memory, and the host steps them; on devices of the host this only
                                        * means that gradients are copied */
    /* Callbacks, each may be NULL. */
    void *context;
    void (*placement)(void *context, const fsdp_param *param, fsdp_param_place *place);
    /* The dtype of one gathered parameter: param_dtype, its stored dtype, or NONE, which is param_dtype. */
    fsdp_dtype (*param_dtype_of)(void *context, const fsdp_param *param);
    bool (*ignore)(void *context, const fsdp_param *param);       /* left whole, not reduced */
} fsdp_unit_opts;

/*
 * Creates a unit of all parameters that have no unit yet and whose name is `prefix` or begins with
 * "prefix.". Create inner units first. A unit has no parameters if inner units have taken them all or they
 * are ignored. `opts` are copied; NULL: all zero. The model owns the unit; unit_out may be NULL.
 *
 * FSDP_ERR_USAGE when no parameter, buffer or alias has such a name, with the nearest one that exists, when
 * a unit has that prefix already, and for "": fsdp_root_create makes the unit of the rest.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_create(fsdp_model *model, const char *prefix,
                                                   const fsdp_unit_opts *opts, fsdp_unit **unit_out,
                                                   fsdp_error *err);

/* Returns the unit's name: its members joined by ", ", or "root". */
FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit);
/* Returns the number of the unit's parameters. */
FSDP_API size_t fsdp_unit_param_count(const fsdp_unit *unit);
/* Returns a parameter of the unit; NULL after the last. */
FSDP_API fsdp_param *fsdp_unit_param_at(const fsdp_unit *unit, size_t i);

/* --- hooks ------------------------------------------------------------------------------------ */

/* A hook that is called twice in a row does nothing the second time. Activations may be recomputed in
 * backward: the pre_forward of a unit whose backward has begun, or of a unit inside it, gathers, and its
 * post_forward does not reshard. All hooks are collective in the unit's groups. */

/* Gathers the parameters, before the unit's forward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_pre_forward(fsdp_unit *unit, fsdp_error *err);
/* Reshards the parameters, after the unit's forward. FSDP_ERR_USAGE without pre_forward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_post_forward(fsdp_unit *unit, fsdp_error *err);
/* Gathers the parameters, before the unit's backward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_pre_backward(fsdp_unit *unit, fsdp_error *err);
/* Reshards the parameters and reduces the gradients that exist, also without pre_backward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_post_backward(fsdp_unit *unit, fsdp_error *err);

typedef enum fsdp_hook {
    FSDP_HOOK_PRE_FORWARD,
    FSDP_HOOK_POST_FORWARD,
    FSDP_HOOK_PRE_BACKWARD,
    FSDP_HOOK_POST_BACKWARD
} fsdp_hook;

/* --- memory of parameters, after the root is made ----------------------------------------------- */

/* The library owns this memory. A shard always exists; the gathered data exists between pre_forward and
 * post_forward, and between pre_backward and post_backward. In another state a call returns NULL;
 * fsdp_param_error returns the reason, or else the next call on that root does. */

/* Returns this rank's rows, packed, in the parameter's dtype; the whole of a buffer. *box_out (may be NULL)
 * becomes the box of these rows, which may be empty. */
FSDP_API void *fsdp_param_shard(fsdp_param *param, fsdp_box *box_out);

/* Returns the gathered data that this rank computes with, row-major, of its data_dtype
 * (fsdp_param_describe). */
FSDP_API void *fsdp_param_data(fsdp_param *param);
/* Gets the box of that data: the whole tensor, unless the parameter is tensor parallel. */
FSDP_API void fsdp_param_data_box(const fsdp_param *param, fsdp_box *box_out);

/* Returns the gradient of this backward, as large as the data. The first call zeroes it, and the caller adds
 * to it. */
FSDP_API void *fsdp_param_grad(fsdp_param *param);
/* Returns the gradient without zeroing it: the caller overwrites all of it. */
FSDP_API void *fsdp_param_grad_raw(fsdp_param *param);
/* Returns the reduced gradient of this rank's rows, from end_backward to the optimizer's step; NULL: none. */
FSDP_API void *fsdp_param_shard_grad(fsdp_param *param);

/*
 * Returns the reason why one of these pointers was NULL:
 *
 *   float *weight = fsdp_param_data(param);
 *   if (!weight)
 *       return fsdp_param_error(param, err);
 *
 * It is the reason of the first such failure of any parameter of this root, and is returned once: here, or
 * else by the next call on the root. FSDP_OK if nothing failed: no gradient has been reduced.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_error(const fsdp_param *param, fsdp_error *err);

/* Freezes a parameter (false) or makes it trainable (true, the default for floating dtypes), with the same
 * value on all ranks. A frozen parameter is gathered and has no gradient. FSDP_ERR_USAGE inside a forward
 * or backward, in a flat parameter (wrap.h), and for true with a buffer or a dtype that is not floating. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_set_requires_grad(fsdp_param *param, bool requires_grad,
                                                               fsdp_error *err);

/* --- gathers by hand -------------------------------------------------------------------------- */

typedef struct fsdp_unshard_handle fsdp_unshard_handle;
/* Gathers the parameters outside the hooks. The unit owns *handle_out, which may be NULL; fsdp_unshard_wait
 * or the next pre_forward waits for the gather. Collective in the unit's groups. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_unshard(fsdp_unit *unit, bool is_async,
                                                    fsdp_unshard_handle **handle_out, fsdp_error *err);
/* Waits for a gather of fsdp_unit_unshard. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unshard_wait(fsdp_unshard_handle *handle, fsdp_error *err);
/* Frees the gathered parameters at once. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_reshard(fsdp_unit *unit, fsdp_error *err);

/* --- settings, named as PyTorch's ------------------------------------------------------------- */

/* A setting is 1 or 0, unless its comment says otherwise. The last two change how a unit communicates, and
 * are FSDP_ERR_USAGE inside a forward or backward. The others take effect with the next hook. */
typedef enum fsdp_unit_setting {
    /* Default 1. 0: post_backward keeps gradients whole and adds them up. Also sets REQUIRES_ALL_REDUCE. */
    FSDP_UNIT_REQUIRES_GRADIENT_SYNC,
    /* Default 1. 0: HSDP reduce-scatters gradients and adds them up, until 1 all-reduces the sum. */
    FSDP_UNIT_REQUIRES_ALL_REDUCE,
    /* Default: the option's. 1 is FSDP_RESHARD_ALWAYS, 0 FSDP_RESHARD_NEVER; either replaces a number k. */
    FSDP_UNIT_RESHARD_AFTER_FORWARD,
    FSDP_UNIT_RESHARD_AFTER_BACKWARD,          /* default 1; 0: post_backward does not reshard */
    FSDP_UNIT_UNSHARD_IN_BACKWARD,             /* default 1; 0: pre_backward does not gather */
    FSDP_UNIT_KEEP_UNSHARDED_STORAGE,          /* default 0; 1: memory is kept for the next gather */
    FSDP_UNIT_UNSHARD_ASYNC_OP,                /* default 0; 1: hooks gather on the compute stream */
    FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS,   /* default 0; 1: collectives sum, a division follows */
    /* Default 0. 1: zeros for parameters without a gradient, so that ranks may use different ones. */
    FSDP_UNIT_REDUCE_SCATTER_UNUSED_PARAMS,
    /* Default 1. The number of inputs in flight, at least 1; units of one root share the largest. */
    FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS,
    /* Default 0. 1: reduce-scatter has another communicator than all-gather; the first call that sets this is
     * collective. */
    FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP,
    /* Default 0. 1: buffers are in memory that the communicator allocates; FSDP_ERR_USAGE with a custom
     * collective. */
    FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP
} fsdp_unit_setting;
/* Changes a setting of the unit; with `recurse` also of all units below the unit's prefixes. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set(fsdp_unit *unit, fsdp_unit_setting setting, int value,
                                                bool recurse, fsdp_error *err);
/* Divides the sum of gradients by a factor instead of the number of ranks; a call with the number of ranks
 * restores the mean. FSDP_ERR_USAGE unless the factor is positive and finite. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_gradient_divide_factor(fsdp_unit *unit, double factor,
                                                                       fsdp_error *err);
/* Sets the units that this unit's `hook`, FSDP_HOOK_PRE_FORWARD or FSDP_HOOK_PRE_BACKWARD, gathers ahead of
 * their own hooks. `units` are copied, and belong to one root. n 0 restores the default. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_prefetch(fsdp_unit *unit, fsdp_hook hook,
                                                         fsdp_unit *const *units, size_t n, fsdp_error *err);

/* --- units of several members ------------------------------------------------------------------ */

/* Creates one unit of n >= 1 different prefixes, its members; otherwise as fsdp_unit_create. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_create_list(fsdp_model *model, const char *const *prefixes,
                                                        size_t n, const fsdp_unit_opts *opts,
                                                        fsdp_unit **unit_out, fsdp_error *err);

/*
 * Calls the hook of one member of a unit of fsdp_unit_create_list; `member` is the index of its prefix. The
 * first pre_forward gathers, the last post_forward reshards. A backward ends with the last post_backward of
 * the members that ran in forward; a member that is called several times reduces as often. If not all
 * members ran, fsdp_root_end_forward ends the forward.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_member_hook(fsdp_unit *unit, size_t member, fsdp_hook hook,
                                                        fsdp_error *err);

/* --- plug-ins --------------------------------------------------------------------------------- */

/* Replaces the hook; NULL: none. Its context lives until the root has ended. */
FSDP_API void fsdp_unit_set_all_reduce_hook(fsdp_unit *unit, fsdp_all_reduce_hook hook, void *context);

/* Replaces the library's all-gather (FSDP_ALL_GATHER) or reduce-scatter (FSDP_REDUCE_SCATTER). `custom` is
 * copied; NULL restores the library's. FSDP_ERR_USAGE inside a forward or backward, and for units of
 * several groups, here or when the root is made. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_custom_collective(fsdp_unit *unit, fsdp_collective_kind kind,
                                                                  const fsdp_custom_collective *custom,
                                                                  fsdp_error *err);

/* --- mixed precision of activations ----------------------------------------------------------- */

/* Returns the dtype to which the caller casts the unit's inputs; `dtype` itself if it is not floating or no
 * cast is configured. */
FSDP_API fsdp_dtype fsdp_unit_input_dtype(const fsdp_unit *unit, fsdp_dtype dtype);
/* Returns the dtype to which the caller casts the unit's outputs; `dtype` itself as above. */
FSDP_API fsdp_dtype fsdp_unit_output_dtype(const fsdp_unit *unit, fsdp_dtype dtype);
/* Casts n elements; the buffers do not overlap. Cannot fail. */
FSDP_API void fsdp_cast(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type, size_t n);

#ifdef __cplusplus
}
#endif
#endif

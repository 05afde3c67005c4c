/*
 * Units: parameters that are gathered and reduced together, and the hooks around their mathematics, since C
 * has no autograd. A unit is what one fully_shard call makes in PyTorch. docs/runtime.md has its states,
 * docs/flow_step.md a whole step.
 *
 * The hooks are collective in the unit's groups. Setters are local and to be called alike on all ranks; with
 * recurse they go to all units below the unit's prefix, too. They may come at any time, and what comes next
 * goes by them; those that change how a unit communicates are FSDP_ERR_USAGE inside a forward or backward.
 */
#ifndef FSDP_UNIT_H
#define FSDP_UNIT_H

#include <fsdp/model.h>
#include <fsdp/settings.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_unit fsdp_unit;

typedef struct fsdp_unit_opts {
    const fsdp_mesh *mesh;             /* connected, see fsdp_world_mesh */
    const char *shard_dims;            /* "dp": names of mesh dims, joined by commas; several are seen as one.
                                        * NULL with replicate_dims NULL: of one dim, it; of more, the first
                                        * replicates and the second shards */
    const char *replicate_dims;        /* "" for none; with shard_dims "" the unit is replicated (DDP) */
    int reshard_after_forward;         /* default FSDP_RESHARD_AUTO: always, but never for the root */
    fsdp_dtype param_dtype;            /* of gathered parameters; FSDP_DTYPE_NONE: as stored */
    fsdp_dtype reduce_dtype;           /* gradients are reduced in; NONE: the parameter's stored dtype */
    fsdp_dtype output_dtype;           /* NONE: as computed; see fsdp_unit_output_dtype */
    bool cast_forward_inputs;          /* see fsdp_unit_input_dtype; default true */
    bool offload;                      /* shards and their gradients live in host memory, which on devices of
                                        * the host only means that gradients are copied */
    bool pin;                          /* of it: pinned, which means nothing on devices of the host; default
                                        * true */
    /* Callbacks, each may be NULL. */
    void *user;
    void (*placement)(void *user, const fsdp_param *param, fsdp_param_place *place);
    /* In place of param_dtype: it, the parameter's stored one, or NONE, which means param_dtype. */
    fsdp_dtype (*param_dtype_of)(void *user, const fsdp_param *param);
    bool (*ignore)(void *user, const fsdp_param *param);       /* left whole, not reduced */
} fsdp_unit_opts;
FSDP_API fsdp_unit_opts fsdp_unit_opts_default(const fsdp_mesh *mesh);

/*
 * Local. A unit of every parameter whose name is `prefix` or begins with "prefix." and that no unit has:
 * inner units first. "": all. It may have none, when inner units took them all or they are ignored; but
 * FSDP_ERR_USAGE when no parameter, buffer or alias is called like that, with the nearest name that is there,
 * or when a unit has that prefix already.
 * opts are copied, the mesh must outlive the model.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_create(fsdp_model *model, const char *prefix,
                                                   const fsdp_unit_opts *opts, fsdp_unit **unit_out,
                                                   fsdp_error *err);
/* The same for several prefixes as one unit of several members. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_create_list(fsdp_model *model, const char *const *prefixes,
                                                        size_t n, const fsdp_unit_opts *opts,
                                                        fsdp_unit **unit_out, fsdp_error *err);

FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit);    /* members joined by ", "; "root" */
FSDP_API size_t fsdp_unit_param_count(const fsdp_unit *unit);
FSDP_API fsdp_param *fsdp_unit_param(const fsdp_unit *unit, size_t i);

/* --- hooks ------------------------------------------------------------------------------------ */

/* One that comes twice in a row does nothing more than the first time, but for post_forward, which is
 * FSDP_ERR_USAGE without its pre_forward. post_backward may come without pre_backward: it reduces what is
 * there, if anything is.
 *
 * A pre_forward inside a backward, of a unit whose backward has begun or of one inside it, means that
 * activations are computed again: it gathers, and its post_forward gives nothing back. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_pre_forward(fsdp_unit *unit, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_post_forward(fsdp_unit *unit, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_pre_backward(fsdp_unit *unit, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_post_backward(fsdp_unit *unit, fsdp_error *err);

/* Units of several members: per member. The first pre gathers, the last post gives back. In backward the last
 * one is that of the members that ran in forward: one that is called several times reduces as often. A
 * forward that not all members came through ends with fsdp_root_end_forward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_pre_forward_member(fsdp_unit *unit, size_t member,
                                                               fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_post_forward_member(fsdp_unit *unit, size_t member,
                                                                fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_pre_backward_member(fsdp_unit *unit, size_t member,
                                                                fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_post_backward_member(fsdp_unit *unit, size_t member,
                                                                 fsdp_error *err);

/* Gathers outside the hooks, or gives back at once. A handle is waited for once or by pre_forward; it stays
 * the unit's. */
typedef struct fsdp_unshard_handle fsdp_unshard_handle;
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_unshard(fsdp_unit *unit, bool is_async,
                                                    fsdp_unshard_handle **handle_out, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unshard_wait(fsdp_unshard_handle *handle, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_reshard(fsdp_unit *unit, fsdp_error *err);

/* --- memory of parameters, once the root is made ------------------------------------------------ */

/* The library owns it: the shard always, the gathered data between pre_forward and post_forward, and between
 * pre_backward and post_backward. A pointer that is asked for in another state is NULL; fsdp_param_complaint
 * gives the reason at once, otherwise it is the error of the next call on that root. */

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

/* Frozen parameters are gathered and have no gradient. Between steps only. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_param_set_requires_grad(fsdp_param *param, bool requires_grad,
                                                               fsdp_error *err);

/* --- setters, named as PyTorch's -------------------------------------------------------------- */

FSDP_API void fsdp_unit_set_requires_gradient_sync(fsdp_unit *unit, bool sync, bool recurse);
FSDP_API void fsdp_unit_set_requires_all_reduce(fsdp_unit *unit, bool all_reduce, bool recurse);
FSDP_API void fsdp_unit_set_reshard_after_forward(fsdp_unit *unit, bool reshard, bool recurse);
FSDP_API void fsdp_unit_set_reshard_after_backward(fsdp_unit *unit, bool reshard, bool recurse);
FSDP_API void fsdp_unit_set_unshard_in_backward(fsdp_unit *unit, bool unshard);
FSDP_API void fsdp_unit_set_keep_unsharded_storage(fsdp_unit *unit, bool keep, bool recurse);
FSDP_API void fsdp_unit_set_unshard_async_op(fsdp_unit *unit, bool is_async, bool recurse);
FSDP_API void fsdp_unit_set_force_sum_reduction_for_comms(fsdp_unit *unit, bool force);
/* Zeros for parameters without a gradient, so that ranks may use different ones. */
FSDP_API void fsdp_unit_set_reduce_scatter_unused_params(fsdp_unit *unit, bool all, bool recurse);
/* factor > 0 replaces the number of ranks in the mean of gradients. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_gradient_divide_factor(fsdp_unit *unit, double factor,
                                                                       fsdp_error *err);
/* Copied; units of one root. n 0: back to the default. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_modules_to_forward_prefetch(fsdp_unit *unit,
                                                                            fsdp_unit *const *units, size_t n,
                                                                            fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_modules_to_backward_prefetch(fsdp_unit *unit,
                                                                             fsdp_unit *const *units,
                                                                             size_t n, fsdp_error *err);
/* Reduce-scatter inputs in flight, at least 1; units of one root share the largest. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_reduce_scatter_max_input_buffers(fsdp_unit *unit, int n,
                                                                                 bool recurse,
                                                                                 fsdp_error *err);
/* Collective when first set: reduce-scatter on a communicator of its own, beside all-gather. Not inside a
 * forward or backward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_separate_reduce_scatter_group(fsdp_unit *unit, bool separate,
                                                                              bool recurse, fsdp_error *err);
/* Buffers in memory that the communicator gives. FSDP_ERR_USAGE after a custom collective was set, and inside
 * a forward or backward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_allocate_memory_from_process_group_for_comm(fsdp_unit *unit,
                                                                                            bool from_comm,
                                                                                            fsdp_error *err);

/* --- plug-ins --------------------------------------------------------------------------------- */

FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_all_reduce_hook(fsdp_unit *unit, fsdp_all_reduce_hook hook,
                                                                void *user, fsdp_error *err);

/* Copied; NULL: the library's again. FSDP_ERR_USAGE inside a forward or backward, and for units of several
 * groups, here or when the root is made. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_custom_all_gather(fsdp_unit *unit,
                                                                  const fsdp_custom_collective *custom,
                                                                  fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_unit_set_custom_reduce_scatter(fsdp_unit *unit,
                                                                      const fsdp_custom_collective *custom,
                                                                      fsdp_error *err);

/* --- mixed precision of activations ----------------------------------------------------------- */

/* The dtype that inputs of the unit's mathematics are cast to, and its outputs; `dtype` itself when nothing
 * is to be done or it is not a floating type. */
FSDP_API fsdp_dtype fsdp_unit_input_dtype(const fsdp_unit *unit, fsdp_dtype dtype);
FSDP_API fsdp_dtype fsdp_unit_output_dtype(const fsdp_unit *unit, fsdp_dtype dtype);
/* Casts n elements; for the two above. */
FSDP_API void fsdp_cast(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type, size_t n);

#ifdef __cplusplus
}
#endif
#endif

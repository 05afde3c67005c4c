/*
 * A root holds all units of a model, and the state of a step. One step is
 *
 *    begin_forward -> per unit pre_forward, computation, post_forward -> end_forward
 *    -> per unit, backwards, pre_backward, computation, post_backward -> end_backward -> fsdp_optim_step
 *
 * end_backward completes missing hooks, in unit order, root first. Several roots may share one context
 * (pipeline stages).
 *
 * Roots, models, meshes, optimizers and savers are freed in any order: each of them keeps what it was made of
 * until it is freed itself, and the world ends last. Calls are local unless they are marked collective.
 *
 * A call at the wrong time returns FSDP_ERR_USAGE and changes nothing. The root keeps any other failure, and
 * every later call returns it, here and on the other ranks. One thread at a time uses a root, its model,
 * units and optimizers.
 */
#ifndef FSDP_ROOT_H
#define FSDP_ROOT_H

#include <fsdp/memory.h>
#include <fsdp/unit.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_root fsdp_root;

/* Creates a root, which the caller frees: makes the unit `root` of the parameters that no unit has, allocates
 * all shards (zeroed), and freezes the structure. FSDP_ERR_USAGE without opts->mesh, so also for opts NULL.
 * Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_create(fsdp_model *model, const fsdp_unit_opts *opts,
                                                   fsdp_root **root_out, fsdp_error *err);
/* Frees a root. Its memory lives until the last optimizer and saver that was made of it is freed. Accepts
 * NULL. */
FSDP_API void fsdp_root_free(fsdp_root *root);
/* Returns the unit `root`, which the model owns. */
FSDP_API fsdp_unit *fsdp_root_unit(fsdp_root *root);
/* Returns the number of units. */
FSDP_API size_t fsdp_root_unit_count(const fsdp_root *root);
/* Returns a unit: first the unit `root`, then the others in the order in which their first parameters were
 * declared, and last the units without parameters. NULL after the last. */
FSDP_API fsdp_unit *fsdp_root_unit_at(const fsdp_root *root, size_t i);

/* --- a step ----------------------------------------------------------------------------------- */

/* These three calls are collective in the groups of the units: all ranks make the calls of a step in the same
 * order. */

/* Starts a step. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_begin_forward(fsdp_root *root, fsdp_error *err);
/* Ends the forward: completes units whose members did not all run. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_end_forward(fsdp_root *root, fsdp_error *err);
/* Ends the backward: reduces the gradients that are not reduced yet, and waits for all reductions. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_end_backward(fsdp_root *root, fsdp_error *err);

/*
 * Declares that the forward and backward that follow are microbatch i of the n of a step: gradients are added
 * up unreduced, and the last microbatch reduces the sum and waits for it. Call it on all ranks, before
 * begin_forward; a step of one microbatch does not need the call. Sets FSDP_UNIT_REQUIRES_GRADIENT_SYNC of
 * all units, and makes each backward end with its microbatch. FSDP_ERR_USAGE inside a forward or backward,
 * and unless 0 <= i < n.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_begin_microbatch(fsdp_root *root, int64_t i, int64_t n,
                                                             fsdp_error *err);

/* Declares whether the following forwards have no backward (torch.no_grad): then any number of them may
 * follow each other, and pre_backward is FSDP_ERR_USAGE. Call it outside a forward and backward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_set_evaluating(fsdp_root *root, bool is_evaluating,
                                                           fsdp_error *err);

/* Drops the reduced gradients of all parameters. */
FSDP_API void fsdp_root_zero_grad(fsdp_root *root);

/* Discards the step after an error of the program itself: reshards every parameter, and drops the gradients
 * of the step, including those kept without sync and partial ones. FSDP_ERR_USAGE while another root on
 * this context has a backward that was not waited for. A later wait for a backward that the reset dropped is
 * FSDP_ERR_USAGE, too. Collective while a step is under way, else local. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_reset(fsdp_root *root, fsdp_error *err);

/* --- memory ----------------------------------------------------------------------------------- */

/* Returns the bytes on this rank, without the rounding of allocations. */
FSDP_API fsdp_memory fsdp_root_memory(const fsdp_root *root);
/* Starts peaks again from the current bytes, for all roots that share the context. */
FSDP_API void fsdp_root_reset_peak(fsdp_root *root);

/* --- rare calls ------------------------------------------------------------------------------- */

/*
 * Counts all values as missing from now on, so that training from the zeros of a new root is refused. The
 * calls of root_init.h set all values; fsdp_root_set_state and loads set those of their entries (partial
 * loads may follow each other); fsdp_param_shard counts as setting its parameter. While a value is missing,
 * begin_forward, gathers by hand, saves, and copies of state are FSDP_ERR_USAGE and name the missing values.
 * The call is not available for roots of the API of FSDP1.
 *
 * PyTorch uses the meta device for this, which also saves memory. Here a declared parameter has no memory in
 * any case, and fsdp_root_create allocates this rank's rows only.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_expect_values(fsdp_root *root, fsdp_error *err);

/* Joins the contexts of two roots: their units gather and reduce in one order, share buffers in flight, and
 * count memory together. Call it before the first step and before `root` has an optimizer. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_share_context(fsdp_root *root, fsdp_root *with, fsdp_error *err);

/* Declares whether the next backward is the last one of the step (default: true). Call it before the
 * backward, with the same value on all ranks. Only the last backward waits for reductions, for those of all
 * backwards. */
FSDP_API void fsdp_root_set_is_last_backward(fsdp_root *root, bool is_last);
/* Makes the gathers of the next forward, and of that one only, wait for the work that the compute stream has
 * now (the optimizer's step), but not for work that is added later. Call it on all ranks. */
FSDP_API void fsdp_root_set_post_optim_event(fsdp_root *root);

typedef struct fsdp_finalize_handle fsdp_finalize_handle;
/* Sets whether the caller ends each backward by fsdp_root_finalize_backward, the same on all ranks;
 * is_last_backward then has no effect. FSDP_ERR_USAGE between the first backward of a step and the end of
 * its last one. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_set_manual_backward_finalization(fsdp_root *root, bool manual,
                                                                             fsdp_error *err);
/* Ends a backward, after end_backward or instead of it. With is_async reductions continue, and the caller
 * calls fsdp_finalize_wait before the optimizer's step and the next forward. The root owns *handle_out, which
 * may be NULL. Collective as end_backward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_finalize_backward(fsdp_root *root, bool is_async,
                                                              fsdp_finalize_handle **handle_out,
                                                              fsdp_error *err);
/* Waits for the reductions; a second wait does nothing. FSDP_ERR_USAGE if a reset dropped this backward.
 * Collective as end_backward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_finalize_wait(fsdp_finalize_handle *handle, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

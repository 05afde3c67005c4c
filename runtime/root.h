/*
 * A root: all units of a model, and the state of a step. One step is
 *
 *   begin_forward -> per unit pre_forward, mathematics, post_forward -> end_forward
 *   -> per unit, backwards, pre_backward, mathematics, post_backward -> end_backward -> fsdp_optim_step
 *
 * end_backward completes what is missing, in unit order, root first. Several roots may share one context
 * (pipeline stages).
 *
 * Roots, models, meshes, optimizers and savers are freed in any order: each of them keeps what it was made of
 * until it is freed itself, and the world ends last.
 *
 * A call that comes at the wrong time is FSDP_ERR_USAGE and changes nothing. Any other failure stays the
 * root's: every later call returns it, here and on the other ranks. A root, its model, units and optimizers
 * are used by one thread at a time, as everything that is made of a world.
 */
#ifndef FSDP_ROOT_H
#define FSDP_ROOT_H

#include <fsdp/memory.h>
#include <fsdp/unit.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_root fsdp_root;

/* Collective. Makes the unit `root` of the parameters that no unit has, allocates all shards (zeroed), and
 * freezes the structure. *root_out is the caller's. opts NULL: all zero, which is FSDP_ERR_USAGE, as for
 * every unit without a mesh. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_create(fsdp_model *model, const fsdp_unit_opts *opts,
                                                   fsdp_root **root_out, fsdp_error *err);
/* Local. Root and memory end with the last optimizer and saver that was made of it. Accepts NULL. */
FSDP_API void fsdp_root_free(fsdp_root *root);
FSDP_API fsdp_unit *fsdp_root_unit(fsdp_root *root);   /* local; the unit `root`, which is the model's */
FSDP_API size_t fsdp_root_unit_count(const fsdp_root *root);
/* The unit `root` is first; the others follow in the order in which their first parameters were declared,
 * units without parameters last. NULL behind the last. */
FSDP_API fsdp_unit *fsdp_root_unit_at(const fsdp_root *root, size_t i);

/* Local, before the first step and before `root` has an optimizer. The units of both roots gather and reduce
 * in one order, share buffers in flight, and count memory as one. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_share_context(fsdp_root *root, fsdp_root *with, fsdp_error *err);

/* --- values ----------------------------------------------------------------------------------- */

/*
 * Local. All values count as missing from now on: training from the zeros of a new root is refused. The
 * calls of root_init.h bring all values; fsdp_root_set_state and loads bring those that they set (partial
 * ones may follow each other); fsdp_param_shard counts as bringing its parameter's. While one is missing,
 * begin_forward, gathers by hand, saving, and copies of state are FSDP_ERR_USAGE and name the missing ones.
 * Not for the FSDP1 face.
 *
 * PyTorch uses the meta device for this. Declaring saves memory as well here: a declared parameter has no
 * memory, and fsdp_root_create allocates this rank's rows, never the whole.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_expect_values(fsdp_root *root, fsdp_error *err);

/* --- a step ----------------------------------------------------------------------------------- */

/* Collective in the groups of the units: their ranks make the calls of a step in one order. begin_forward
 * starts a step, end_forward completes units whose members did not all run, end_backward reduces what was not
 * reduced yet and waits for all reductions. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_begin_forward(fsdp_root *root, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_end_forward(fsdp_root *root, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_end_backward(fsdp_root *root, fsdp_error *err);

/* Local, outside a forward and backward. While true, forwards have no backward (torch.no_grad): any number of
 * them may follow each other, and pre_backward is FSDP_ERR_USAGE. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_set_evaluating(fsdp_root *root, bool is_evaluating,
                                                           fsdp_error *err);

/* Collective while a step is under way, else local. For an error of the program's own inside a step: every
 * parameter is sharded again, and the gradients of the step are dropped, those kept without sync and partial
 * ones included. FSDP_ERR_USAGE while another root on this context has a backward that was not waited for; so
 * is a later wait for a backward that the reset dropped. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_reset(fsdp_root *root, fsdp_error *err);

/*
 * Local, on all ranks, before begin_forward. The forward and backward that follow are microbatch i of the n
 * of a step: gradients are added up whole, and the last microbatch reduces the sum and waits for it. Sets
 * FSDP_UNIT_REQUIRES_GRADIENT_SYNC of all units, and that each backward ends with its microbatch; a step of
 * one microbatch needs no call. FSDP_ERR_USAGE inside a forward or backward, and unless 0 <= i < n.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_begin_microbatch(fsdp_root *root, int64_t i, int64_t n,
                                                             fsdp_error *err);

/* Local, before backward, with the same value on all ranks. A backward that is not the last leaves its
 * reductions under way; the last one waits for all. Default true. */
FSDP_API void fsdp_root_set_is_last_backward(fsdp_root *root, bool is_last);
/* Local, on all ranks. The gathers of the next begin_forward, of that one only, wait for the work that the
 * compute stream has now (the optimizer's step), not for work that is added later. */
FSDP_API void fsdp_root_set_post_optim_event(fsdp_root *root);

typedef struct fsdp_finalize_handle fsdp_finalize_handle;
/* Local, with the same value on all ranks. While true, the caller ends a backward by
 * fsdp_root_finalize_backward, and is_last_backward has no effect. FSDP_ERR_USAGE between the first backward
 * of a step and the end of its last one. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_set_manual_backward_finalization(fsdp_root *root, bool manual,
                                                                             fsdp_error *err);
/* Collective as end_backward, after it or in its place. is_async: reductions go on, and fsdp_finalize_wait is
 * called before the optimizer's step and the next forward. *handle_out (may be NULL) is the root's. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_finalize_backward(fsdp_root *root, bool is_async,
                                                              fsdp_finalize_handle **handle_out,
                                                              fsdp_error *err);
/* Collective as end_backward. Waits for the reductions; does nothing when they were waited for.
 * FSDP_ERR_USAGE when a reset dropped this backward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_finalize_wait(fsdp_finalize_handle *handle, fsdp_error *err);

/* Local. Drops the reduced gradients of all parameters. */
FSDP_API void fsdp_root_zero_grad(fsdp_root *root);

/* --- memory ----------------------------------------------------------------------------------- */

/* Local. Bytes on this rank, rounding of allocations not counted. */
FSDP_API fsdp_memory fsdp_root_memory(const fsdp_root *root);
/* Local. Peaks start again from the bytes of now, for all roots that share the context. */
FSDP_API void fsdp_root_reset_peak(fsdp_root *root);

#ifdef __cplusplus
}
#endif
#endif

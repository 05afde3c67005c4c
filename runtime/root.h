/*
 * A root: all units of a model, and the state of a step. One step is
 *
 *   begin_forward -> per unit pre_forward, mathematics, post_forward -> end_forward
 *   -> per unit, backwards, pre_backward, mathematics, post_backward -> end_backward -> fsdp_optim_step
 *
 * end_backward completes what is missing, in unit order, root first. Several roots may share one context
 * (pipeline stages).
 *
 * A call that comes at the wrong time is FSDP_ERR_USAGE and changes nothing. Any other failure stays the
 * root's: every later call returns it, and so do those of the other ranks, which are told. As all that is
 * made of a world, a root, its model, units and optimizers are used by one thread at a time.
 */
#ifndef FSDP_ROOT_H
#define FSDP_ROOT_H

#include <fsdp/memory.h>
#include <fsdp/unit.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_root fsdp_root;

/* Collective. Makes the unit `root` of what no unit took, allocates all shards (zeroed), freezes the
 * structure. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_create(fsdp_model *model, const fsdp_unit_opts *opts,
                                                   fsdp_root **root_out, fsdp_error *err);
FSDP_API void fsdp_root_free(fsdp_root *root); /* local; accepts NULL */
FSDP_API fsdp_unit *fsdp_root_unit(fsdp_root *root);   /* the unit `root` */
FSDP_API size_t fsdp_root_unit_count(const fsdp_root *root);
FSDP_API fsdp_unit *fsdp_root_unit_at(const fsdp_root *root, size_t i); /* root first, then by name order
                                                                         * of their parameters */

/* Local. Units of both gather and reduce in one order, share buffers in flight, and count memory as one.
 * Before the first step, and before root has an optimizer. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_share_context(fsdp_root *root, fsdp_root *with, fsdp_error *err);

/* --- values ----------------------------------------------------------------------------------- */

/*
 * Local. Shards are zero when the root is made, and a parameter that is never given values would be trained
 * from there. After this call all count as missing until they come: of all by the calls of root_init.h, of
 * each by itself by fsdp_root_set_state or a load (which may bring one after the other with not_strict), or
 * by asking for its fsdp_param_shard. While one is missing, begin_forward, gathers by hand, saving, and state
 * that is got as copies are FSDP_ERR_USAGE, and name those that are. Not for the FSDP1 face.
 *
 * This is what a model on PyTorch's meta device is for. Nothing here needs one to save memory: a parameter
 * that was only declared has none, and fsdp_root_create gives it this rank's rows, never the whole.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_expect_values(fsdp_root *root, fsdp_error *err);

/* --- a step ----------------------------------------------------------------------------------- */

/* As the hooks of units, collective in the groups of these: their ranks make the calls of a step alike. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_begin_forward(fsdp_root *root, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_end_forward(fsdp_root *root, fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_end_backward(fsdp_root *root, fsdp_error *err);

/* Local. While true, forwards have no backward (torch.no_grad): their order is not noted, so that any number
 * of them may come one after the other, and pre_backward is FSDP_ERR_USAGE. Not inside a forward or
 * backward. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_set_evaluating(fsdp_root *root, bool is_evaluating,
                                                           fsdp_error *err);

/* After an error of the user's own in mid-step: everything back to sharded, gradients of this step dropped
 * (those kept without sync and partial ones included). To wait for an end of backward that it dropped is
 * FSDP_ERR_USAGE, and so is a reset while another root on this context has one that was not waited for.
 * Collective when calls are under way. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_reset(fsdp_root *root, fsdp_error *err);

/* Local, and alike on all ranks, as the two below. Before backward. One that is not the last leaves its
 * reductions under way: the last one waits for all. Default true. */
FSDP_API void fsdp_root_set_is_last_backward(fsdp_root *root, bool is_last);
/* The next begin_forward lets gathers wait only for what was done on the compute stream until now (the
 * optimizer's step), not for all that comes until then. Once. */
FSDP_API void fsdp_root_set_post_optim_event(fsdp_root *root);

typedef struct fsdp_finalize_handle fsdp_finalize_handle;
/* The caller ends backward by fsdp_root_finalize_backward; is_last_backward means nothing then. It cannot
 * change between the first backward of a step and the end of its last one. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_set_manual_backward_finalization(fsdp_root *root, bool manual,
                                                                             fsdp_error *err);
/* Collective as end_backward, behind it or in its place. is_async: reductions go on, and fsdp_finalize_wait
 * comes before the optimizer's step and the next forward. *handle_out (may be NULL) stays the root's. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_finalize_backward(fsdp_root *root, bool is_async,
                                                              fsdp_finalize_handle **handle_out,
                                                              fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_finalize_wait(fsdp_finalize_handle *handle, fsdp_error *err);

/* Local. Drops the reduced gradients of all parameters. */
FSDP_API void fsdp_root_zero_grad(fsdp_root *root);

/* --- memory ----------------------------------------------------------------------------------- */

/* Local. Bytes on this rank, rounding of allocations not counted. */
FSDP_API fsdp_memory fsdp_root_memory(const fsdp_root *root);
FSDP_API void fsdp_root_reset_peak(fsdp_root *root);

#ifdef __cplusplus
}
#endif
#endif

/*
 * Private interface of the FSDP1 face. The engine only sees that a parameter may lie in another one.
 *
 *   wrap.c          the tree of modules from names, among which a policy chooses the units; flat parameters:
 *                   their layout, and the inner model that declares them; strategies and settings
 *   wrap_hook.c     communication hooks
 *   wrap_summon.c   whole parameters, and writing them back
 *   wrap_rekey.c    optimizer state by name or by position
 *
 * First values, optimizers, state dicts and checkpoints are the root's (state_internal.h), which finds the
 * declared parameters through fsdp_root.declared.
 *
 * In: a model, names of its modules, a policy and a strategy. Out: a root with its units. Programs call
 * wrap.h; no room calls this one.
 */
#ifndef FSDP_WRAP_INTERNAL_H
#define FSDP_WRAP_INTERNAL_H

#include "runtime/step/step.h"
#include "runtime/state/state_internal.h"
#include <fsdp/wrap.h>
#include "base/text.h"

/* --- flat parameters (wrap.c) ----------------------------------------------------------- */

typedef struct fsdp_wrap_flat {
    char *module;
    fsdp_wrap_unit_opts opts;
    fsdp_unit *unit;
    fsdp_param *param;                 /* of the inner model; NULL: it is empty */
    fsdp_param **views;                /* the declared parameters in it, in order */
    size_t view_count;
    int64_t count;                     /* elements, with padding */
    void *summoned, *summoned_grad;    /* to be freed; NULL: none, or the shard itself */
    bool is_summoned;
    bool is_hybrid;                    /* its strategy shards inside replicas */
} fsdp_wrap_flat;

struct fsdp_wrap {
    fsdp_model *model;                 /* the caller's */
    fsdp_model *inner;                 /* flat parameters, and parameters and buffers that stay whole */
    fsdp_root *root;                   /* of the inner model */
    const fsdp_mesh *mesh;
    fsdp_mesh *made_mesh;               /* or NULL */
    bool use_orig_params;
    fsdp_dtype buffer_dtype;
    fsdp_wrap_flat *flats;               /* one per unit, in the order of creation, the root's last */
    size_t flat_count;
    fsdp_wrap_comm_hook hook;
    void *hook_context;
    fsdp_wrap_summon_opts summon;
    fsdp_host_view summoned_grads;     /* of gradients, while these are summoned */
};

/* --- states ----------------------------------------------------------------------------------- */

/* Between steps, and no full parameters are summoned. */
fsdp_status fsdp_wrap_check_idle(fsdp_wrap *wrap, const char *what, fsdp_error *err);

#endif

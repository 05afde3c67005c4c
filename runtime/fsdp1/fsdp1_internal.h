/*
 * The inside of the FSDP1 face. The engine knows nothing of it but that a parameter may lie in another one.
 *
 *   fsdp1_tree.c     the modules that names make, and which of them a policy makes units
 *   fsdp1_flat.c     parameters become flat ones, in a model of the face's own; where everything lies
 *   fsdp1.c          wrapping: units, strategies, settings
 *   fsdp1_hook.c     communication hooks
 *   fsdp1_summon.c   whole parameters, and back
 *   fsdp1_rekey.c    optimizer state by name or by position
 *
 * First values, optimizers, state dicts and checkpoints are the root's (state_internal.h), which finds the
 * declared parameters through fsdp_root.declared.
 */
#ifndef FSDP_FSDP1_INTERNAL_H
#define FSDP_FSDP1_INTERNAL_H

#include "runtime/unit/root_internal.h"
#include "runtime/state/state_internal.h"
#include <fsdp/fsdp1.h>
#include <fsdp/text.h>

/* --- the tree (fsdp1_tree.c) ------------------------------------------------------------------ */

/* A module that shall be a unit. */
typedef struct fsdp_v1_wish {
    char *module;
    fsdp_v1_unit_opts opts;
} fsdp_v1_wish;

typedef struct fsdp_v1_wishes {
    fsdp_v1_wish *items;               /* inner ones first; the root is not among them */
    size_t count, room;
} fsdp_v1_wishes;

/* One flag per parameter of the model. */
fsdp_status fsdp_v1_list_ignored(const fsdp_model *model, const fsdp_v1_opts *opts, bool *ignored_out,
                                 fsdp_error *err);
/* Ignored parameters count for no policy. */
fsdp_status fsdp_v1_choose(const fsdp_model *model, const fsdp_v1_opts *opts, const bool *ignored,
                           fsdp_v1_wishes *wishes_out, fsdp_error *err);
void fsdp_v1_wishes_release(fsdp_v1_wishes *wishes);

/* --- flat parameters (fsdp1_flat.c) ----------------------------------------------------------- */

typedef struct fsdp_v1_flat {
    char *module;
    fsdp_v1_unit_opts opts;
    fsdp_unit *unit;
    fsdp_param *param;                 /* of the inner model; NULL: nothing is in it */
    fsdp_param **views;                /* the declared parameters in it, in order */
    size_t view_count;
    int64_t count;                     /* elements, with padding */
    void *summoned, *summoned_grad;    /* to be freed; NULL: none, or the shard itself */
    bool is_summoned;
} fsdp_v1_flat;

struct fsdp_v1 {
    fsdp_model *model;                 /* the caller's */
    fsdp_model *inner;                 /* flat parameters, and what stays whole */
    fsdp_root *root;                   /* of the inner one */
    const fsdp_mesh *mesh;
    fsdp_mesh *own_mesh;               /* or NULL */
    bool use_orig_params;
    fsdp_dtype buffer_dtype;
    fsdp_v1_flat *flats;               /* one per unit, in the order of their making, the root's last */
    size_t flat_count;
    fsdp_v1_comm_hook hook;
    void *hook_context;
    fsdp_v1_summon_opts summon;
};

/* Lays out what a flat parameter holds and declares it in the inner model; ranks: its padded size is a
 * multiple of them (use_orig_params). Takes the parameters below its module that lie nowhere yet. */
fsdp_status fsdp_v1_flat_declare(fsdp_v1 *v1, fsdp_v1_flat *flat, const bool *ignored, int64_t ranks,
                                 fsdp_error *err);
void fsdp_v1_flat_release(fsdp_v1_flat *flat);
const char *fsdp_v1_flat_name(const fsdp_v1_flat *flat);       /* its module, "root": before it has a unit */
int64_t fsdp_v1_count(const fsdp_param *param);        /* elements of the whole */

/* --- states ----------------------------------------------------------------------------------- */

/* Between steps, and no full parameters are summoned. */
fsdp_status fsdp_v1_check_idle(fsdp_v1 *v1, const char *what, fsdp_error *err);
bool fsdp_v1_is_hybrid(fsdp_v1_strategy strategy);

#endif

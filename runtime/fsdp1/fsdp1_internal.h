/*
 * The inside of the FSDP1 face. The engine knows nothing of it but that a parameter may lie in another one.
 *
 *   fsdp1_tree.c     the modules that names make, and which of them a policy makes units
 *   fsdp1_flat.c     parameters become flat ones, in a model of the fsdp_v1's own; where everything lies
 *   fsdp1.c          wrapping: units, strategies, settings
 *   fsdp1_init.c     first values
 *   fsdp1_hook.c     communication hooks
 *   fsdp1_summon.c   whole parameters, and back
 *   fsdp1_pieces.c   one flat tensor (weights, a moment): gathered, taken from a state dict
 *   fsdp1_state.c    state dicts of the model
 *   fsdp1_optim.c    optimizers with runs; fsdp1_optim_state.c: state dicts of them
 *   fsdp1_checkpoint.c   checkpoints
 *   fsdp1_to_load.h  what one rank's optimizer loads, in four files; fsdp1_rekey.c: names and positions
 *   fsdp1_groups.c   hyper-parameters as param_groups, and back
 */
#ifndef FSDP_FSDP1_INTERNAL_H
#define FSDP_FSDP1_INTERNAL_H

#include "runtime/step/step.h"
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
    void *hook_state;
    fsdp_v1_summon_opts summon;
};

/* Lays out what a flat parameter holds and declares it in the inner model; ranks: its padded size is a
 * multiple of them (use_orig_params). Takes the parameters below its module that lie nowhere yet. */
fsdp_status fsdp_v1_flat_declare(fsdp_v1 *v1, fsdp_v1_flat *flat, const bool *ignored, int64_t ranks,
                                 fsdp_error *err);
void fsdp_v1_flat_release(fsdp_v1_flat *flat);
const char *fsdp_v1_flat_name(const fsdp_v1_flat *flat);       /* its module, "root": before it has a unit */
int64_t fsdp_v1_count(const fsdp_param *param);        /* elements of the whole */

/* --- one flat tensor (fsdp1_pieces.c) --------------------------------------------------------- */

/* The part that this rank holds of a tensor that lies as a flat parameter does: the shard, a moment. */
typedef struct fsdp_v1_piece {
    const fsdp_v1_flat *flat;
    void *own;
    fsdp_dtype dtype;
    const fsdp_optim *optim;           /* of state: only parameters that it steps; NULL: all */
} fsdp_v1_piece;
bool fsdp_v1_piece_has(const fsdp_v1_piece *piece, const fsdp_param *param);

/* Elements of the whole flat tensor as it is gathered: the ranks' chunks. */
int64_t fsdp_v1_gathered_count(const fsdp_v1_flat *flat);
/* Collective in the flat parameter's group. whole: room for them. */
fsdp_status fsdp_v1_gather(const fsdp_v1_piece *piece, void *whole, fsdp_error *err);
/* This rank's run of one parameter, of a state dict's entry that is whole here or this very run. to: where it
 * goes, as many elements as it has; NULL: the entry is only looked at. */
fsdp_status fsdp_v1_take_run(const fsdp_param *param, const fsdp_entry *entry, fsdp_dtype dtype, void *to,
                             fsdp_error *err);
/* Is the entry the whole parameter? Copies it, when `to` is not NULL. */
fsdp_status fsdp_v1_take_whole(const fsdp_param *param, const fsdp_entry *entry, fsdp_dtype dtype, void *to,
                               fsdp_error *err);
/* The entry of a name; NULL when there is none. Aliases are followed. */
const fsdp_entry *fsdp_v1_find(const fsdp_sd *sd, const fsdp_text *name);
/* Adds the tensors of what lies in a flat parameter: PREFIX + name + SUFFIX. */
typedef struct fsdp_v1_naming {
    const char *prefix, *suffix;
} fsdp_v1_naming;
fsdp_status fsdp_v1_spell(fsdp_text *text, const fsdp_v1_naming *naming, const char *name, fsdp_error *err);
/* Is it the memory of shards, not a copy? */
bool fsdp_v1_is_live(const fsdp_v1_state_opts *opts);
fsdp_status fsdp_v1_add_runs(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_piece *piece,
                             const fsdp_v1_naming *naming, const fsdp_v1_state_opts *opts, fsdp_error *err);
/* One whole tensor on every rank; data may be NULL. */
fsdp_status fsdp_v1_add_whole(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_param *param, fsdp_dtype dtype,
                              const fsdp_v1_naming *naming, void *data, fsdp_error *err);
/* Fills entries that fsdp_sd_allocate gave memory: gathered parts, or copies of own runs. Collective for
 * FULL; keeps: this rank has the entries. */
fsdp_status fsdp_v1_fill_runs(fsdp_sd *sd, const fsdp_v1_piece *piece,
                              const fsdp_v1_naming *naming, const fsdp_v1_state_opts *opts, bool keeps,
                              fsdp_error *err);

/* --- states ----------------------------------------------------------------------------------- */

fsdp_status fsdp_v1_check_idle(fsdp_v1 *v1, const char *what, fsdp_error *err);
/* There is a dict to be read. */
fsdp_status fsdp_v1_check_given(const fsdp_sd *sd, const char *what, fsdp_error *err);
/* The same for what changes values: nothing stays gathered. */
fsdp_status fsdp_v1_settle(fsdp_v1 *v1, const char *what, fsdp_error *err);
fsdp_status fsdp_v1_check_state_opts(fsdp_v1 *v1, const fsdp_v1_state_opts *opts, fsdp_error *err);
bool fsdp_v1_is_hybrid(fsdp_v1_strategy strategy);
/* Are its runs whole parameters on every rank? */
bool fsdp_v1_is_whole(const fsdp_v1_flat *flat);

/* A state dict of the model, or of the optimizer: `make` brings what is in it, which this rank keeps or not.
 * Collective for FULL. */
typedef fsdp_status (*fsdp_v1_dict_maker)(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts,
                                          bool keeps, fsdp_sd *sd, fsdp_error *err);
fsdp_status fsdp_v1_make_dict(fsdp_v1 *v1, fsdp_optim *optim, const char *call, fsdp_v1_dict_maker make,
                              const fsdp_v1_state_opts *opts, fsdp_sd **sd_out, fsdp_error *err);
/* A checkpoint's entries of the model, as fsdp_v1_state_dict makes them. */
fsdp_status fsdp_v1_add_model(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_state_opts *opts, fsdp_error *err);
fsdp_status fsdp_v1_fill_model(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_state_opts *opts, bool keeps,
                               fsdp_error *err);
/* Buffers that are kept in another dtype than that of state dicts. */
fsdp_status fsdp_v1_take_buffers(fsdp_v1 *v1, const fsdp_sd *sd, const char *prefix, fsdp_error *err);

/* --- optimizers ------------------------------------------------------------------------------- */

/* Tensors of an optimizer's state: moments, then the master. */
enum { FSDP_V1_SLOTS = FSDP_MOMENTS + 1 };
typedef struct fsdp_v1_slot {
    const char *name;
    void *own;
    fsdp_dtype dtype;
} fsdp_v1_slot;
size_t fsdp_v1_slots(const fsdp_optim *optim, const fsdp_optim_state *state, fsdp_v1_slot *slots_out);
/* The state of a flat parameter; NULL: the optimizer does not step it. */
fsdp_optim_state *fsdp_v1_state_of(const fsdp_optim *optim, const fsdp_param *flat);
/* The group that steps a declared parameter; false: none. */
bool fsdp_v1_group_of(const fsdp_optim *optim, const fsdp_param *param, size_t *group_out);

/* --- hyper-parameters (fsdp1_groups.c) -------------------------------------------------------- */

/* Those of one group, in the order of fsdp_state_list_hypers; a flag is 0 or 1. */
typedef struct fsdp_v1_hypers {
    double numbers[FSDP_STATE_HYPERS][2];
} fsdp_v1_hypers;
fsdp_v1_hypers fsdp_v1_hypers_get(fsdp_optim *optim, size_t group);
void fsdp_v1_hypers_set(fsdp_optim *optim, size_t group, const fsdp_v1_hypers *hypers);
/* One dict of param_groups: hyper-parameters, and `params`, which becomes the value's. */
fsdp_status fsdp_v1_hypers_to_value(fsdp_optim *optim, const fsdp_v1_hypers *hypers, fsdp_value *params,
                                    fsdp_value *dict_out, fsdp_error *err);
/* What the dict has; the rest stays. */
void fsdp_v1_hypers_from_value(fsdp_optim *optim, const fsdp_value *dict, fsdp_v1_hypers *hypers);
/* A checkpoint's entries of the optimizer, opts->prefix before each name. */
fsdp_status fsdp_v1_add_optim(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts, fsdp_sd *sd,
                              fsdp_error *err);
/* The same to load into: steps are copies, because a flat parameter has one. They are NaN (unset, once they
 * have memory) until they are loaded; take makes them the optimizer's, FSDP_ERR_USAGE when those of one flat
 * parameter differ. */
fsdp_status fsdp_v1_add_optim_to_load(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts,
                                      fsdp_sd *sd, fsdp_error *err);
fsdp_status fsdp_v1_unset_steps(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts, fsdp_sd *sd,
                                fsdp_error *err);
fsdp_status fsdp_v1_take_steps(fsdp_v1 *v1, fsdp_optim *optim, const char *prefix, const fsdp_sd *sd,
                               fsdp_error *err);
/* Of two parameters of one flat parameter; first NULL: there was none yet. */
fsdp_status fsdp_v1_check_step(const char *first, double first_step, const char *name, double step,
                               fsdp_error *err);
/* param_groups.NAME.lr, ... of every parameter: as fsdp_root_state names them. */
fsdp_status fsdp_v1_add_flat_hypers(const fsdp_v1 *v1, fsdp_optim *optim, const char *prefix, fsdp_sd *sd,
                                    fsdp_error *err);
fsdp_status fsdp_v1_take_flat_hypers(const fsdp_v1 *v1, fsdp_optim *optim, const char *prefix,
                                     const fsdp_sd *sd, fsdp_error *err);

#endif

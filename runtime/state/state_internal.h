/*
 * Private interface of state dicts. state.h is the public one; docs/runtime.md, "State dicts", has the steps.
 *
 * In: a root between steps, and a state dict or the path of a checkpoint. Out: a dict whose tensors are the
 * root's memory or copies, or a root with the values of one. Programs call state.h; background/ and wrap/
 * call this header.
 *
 *   state_names.c      the selected parameters and their names
 *   state_get.c        the dict of this rank's live memory, parameters inside flat ones included; whole
 *                      values, from all ranks; saves it, with the caller's entries
 *   state_set.c        matches a dict with it; takes whole values of rank 0; loads checkpoints
 *   state_groups.c     reads numbers of all types; puts hyper-parameters into a dict, takes them from one,
 *                      and refuses state that no optimizer here can continue
 *   state_move.c       entries of other dicts; the agreement of all ranks; parts of tensors between ranks
 *                      and boxes
 */
#ifndef FSDP_STATE_INTERNAL_H
#define FSDP_STATE_INTERNAL_H

#include "base/core/mem.h"
#include "runtime/optim/optim_internal.h"
#include "statedict/sd/names.h"
#include <fsdp/root_init.h>
#include <fsdp/state.h>

/* --- names (state_names.c) ---------------------------------------------------------------------- */

/* A parameter or buffer in state dicts. */
typedef struct fsdp_state_param {
    fsdp_param *param;         /* as it was declared */
    const char **names;        /* without prefix: the tensor's, then those of its aliases */
    size_t count;              /* 0: not selected */
    fsdp_optim *optim;         /* NULL: none keeps state of it */
    fsdp_optim_state *state;   /* of it, or of the flat parameter that it lies in */
    size_t group;              /* of the optimizer's */
} fsdp_state_param;

typedef struct fsdp_state_scope {
    fsdp_root *root;
    bool is_unviewed;          /* dicts point to the device's memory, not to the host's view of it */
    fsdp_optim *const *optims;
    size_t optim_count;
    fsdp_state_opts opts;      /* prefixes filled in, optims as above */
    fsdp_state_param *params;  /* in the model's order */
    size_t count;
    fsdp_sd *index;            /* every name -> number of its parameter */
    fsdp_arena arena;
} fsdp_state_scope;

/* Keeps is_unviewed. Release it also when this failed. */
fsdp_status fsdp_state_scope_init(fsdp_state_scope *scope, fsdp_root *root, const fsdp_state_opts *opts,
                                  fsdp_error *err);
void fsdp_state_scope_release(fsdp_state_scope *scope);

/* Checks the options of a save or load: some move state between ranks in memory, which checkpoints do not. */
fsdp_status fsdp_state_check_stored(const fsdp_state_opts *opts, fsdp_error *err);

/* True when it is selected, and not left out as frozen or not persistent. */
bool fsdp_state_has(const fsdp_state_scope *scope, const fsdp_state_param *param);
/* The parts of an entry's name: prefix, name of the parameter and, unless it is NULL, what. */
typedef struct fsdp_state_naming {
    const char *prefix, *more; /* "optim.", "state." */
    const char *what;          /* "exp_avg" */
} fsdp_state_naming;
fsdp_status fsdp_state_spell(fsdp_text *text, const fsdp_state_naming *naming, const char *name,
                             fsdp_error *err);
/* Finds a parameter by a name in the dict; NULL: no parameter has that name. */
fsdp_state_param *fsdp_state_find(const fsdp_state_scope *scope, const char *name, size_t size);

/* The rest of a name after a prefix of two parts; NULL when the name does not have that prefix. */
const char *fsdp_state_behind(const char *name, size_t size, const char *prefix, const char *more,
                              size_t *rest_out);

/* --- getting (state_get.c) --------------------------------------------------------------------- */

/* Reshards everything and waits for it; fails inside forward and backward. Local. Loads the host's view of a
 * device's memory; is_unviewed: neither does this, nor waits for a device with memory of its own. */
fsdp_status fsdp_state_settle(fsdp_root *root, bool is_unviewed, fsdp_error *err);
/* Local. The live dict that a save stores: the root's, the device's memory as it is, and the caller's extra
 * entries. */
fsdp_status fsdp_root_saved_state(fsdp_root *root, const fsdp_root_save_opts *opts, fsdp_sd **sd_out,
                                  fsdp_error *err);
/* fsdp_root_get_state of live memory, the device's as it is. */
fsdp_status fsdp_state_get_unviewed(fsdp_root *root, const fsdp_state_opts *opts, fsdp_sd **sd_out,
                                    fsdp_error *err);
/* Makes the live dict, which getting returns and setting writes to. Buffers that are stored in another dtype
 * than declared are copies in memory of the dict, in both cases. With `copies` all entries have memory of the
 * dict, without values yet. */
fsdp_status fsdp_state_build(const fsdp_state_scope *scope, bool copies, fsdp_sd **sd_out, fsdp_error *err);
/* True when the parameter is stored, whole, in another dtype than it was declared in. */
bool fsdp_state_is_cast(const fsdp_param *param);

/* --- setting (state_set.c) ---------------------------------------------------------------- */

/* The matched entries of a dict and the live one. */
typedef struct fsdp_state_match {
    const fsdp_state_scope *scope;
    const fsdp_sd *live, *sd;
    bool is_description;       /* sd has no memory: its tensors come later, from elsewhere */
    bool casts;                /* loading casts floating dtypes that differ */
    const fsdp_sd *extra;      /* the caller's extra entries, which sd should have, too; or NULL */
    int64_t *source;           /* per live entry: the entry of sd, -1: none */
    struct fsdp_state_groups *groups;  /* NULL: none were taken */
    fsdp_name_list missing, unexpected;
    size_t model_count, model_unexpected;
} fsdp_state_match;
/* Finds the live entry of optimizer state under another name of its parameter or its number
 * (state_groups.c). *param_out is that parameter, NULL: none has that name; *at_out stays as it is when
 * there is no such entry. */
fsdp_status fsdp_state_find_state(const fsdp_state_match *match, const fsdp_entry *entry,
                                  const fsdp_state_param **param_out, int64_t *at_out, fsdp_error *err);

/* --- hyper-parameters (state_groups.c) ------------------------------------------------------- */

fsdp_status fsdp_state_put_groups(const fsdp_state_scope *scope, fsdp_sd *sd, fsdp_error *err);

/* The hyper-parameters of a dict, checked and not applied yet; they point into the dict. */
typedef struct fsdp_state_groups fsdp_state_groups;
fsdp_status fsdp_state_take_groups(const fsdp_state_scope *scope, const fsdp_sd *sd, fsdp_name_list *missing,
                                   fsdp_name_list *unexpected, fsdp_state_groups **groups_out,
                                   fsdp_error *err);
void fsdp_state_groups_free(fsdp_state_groups *groups);        /* accepts NULL */
void fsdp_state_apply_groups(const fsdp_state_groups *groups);
/* FSDP_ERR_USAGE for state and hyper-parameters with which the optimizers here would not step as those that
 * saved them. */
fsdp_status fsdp_state_check_continues(const fsdp_state_match *match, fsdp_error *err);

/* --- numbers (state_groups.c) -------------------------------------------------------------------- */

/* An entry that is a number: a value, or a 0-d tensor of any real type. */
bool fsdp_state_number(const fsdp_entry *entry, double *number_out);
/* Sets the 0-d tensor `to` to the number `from`; false when from is no number. */
bool fsdp_state_set_number(const fsdp_entry *to, const fsdp_entry *from);

/* --- entries, agreement, moving (state_move.c) ------------------------------------------------------ */

/* Adds one of the caller's entries to a dict that is saved or loaded. */
fsdp_status fsdp_state_add_extra(const fsdp_sd *extra, const fsdp_entry *entry, fsdp_sd *sd, fsdp_error *err);
/* Adds another dict's entry under its name; a tensor gets that layout and memory. */
fsdp_status fsdp_state_add_entry(const fsdp_sd *from, const fsdp_entry *entry, const fsdp_layout *layout,
                                 void *data, fsdp_sd *sd, fsdp_error *err);
/* Collective. Checks that all ranks make this call with these options and equal dicts. */
fsdp_status fsdp_state_agree(const fsdp_state_scope *scope, const fsdp_sd *live, const char *call,
                             bool with_values, fsdp_status mine, fsdp_error *err);

/* Elements [first, first + count) of a box, in row-major order and packed in data. */
typedef struct fsdp_state_range {
    fsdp_box box;
    int64_t first, count;
    const void *data;
} fsdp_state_range;
/* Copies the elements that lie in box `to` to its packed memory. */
void fsdp_state_copy_range(const fsdp_state_range *from, const fsdp_box *to, void *to_data, size_t element);
/* Copies the elements that lie in a box of the rank to the entry's memory. */
void fsdp_state_copy_into(const fsdp_state_range *from, const fsdp_entry *to, int rank);

/* A bounded buffer through which elements of one rank reach all ranks. */
typedef struct fsdp_state_mover {
    fsdp_root *root;
    fsdp_ordered_comm *ordered;           /* NULL: a world of one rank */
    char *buffer;
    size_t room, used;
    int owner;                 /* of the elements in the buffer */
    const char *unit;
    struct fsdp_state_piece *pieces;
    size_t piece_count;
} fsdp_state_mover;
/* Collective; most: bytes of all tensors. Release it also when this failed. */
fsdp_status fsdp_state_mover_init(fsdp_state_mover *mover, fsdp_root *root, int64_t most, fsdp_status mine,
                                  fsdp_error *err);
void fsdp_state_mover_release(fsdp_state_mover *mover);
/* Collective. World rank `owner` has a box packed in data; every rank gets the elements in its boxes of `to`.
 * The entry must stay valid until the mover has ended. */
fsdp_status fsdp_state_move(fsdp_state_mover *mover, int owner, const fsdp_box *box, const void *data,
                            const fsdp_entry *to, fsdp_error *err);
fsdp_status fsdp_state_move_end(fsdp_state_mover *mover, fsdp_error *err);

#endif

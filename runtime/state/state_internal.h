/*
 * The inside of state dicts. state.h is the outside, docs/runtime.md, "State dicts", the way through:
 *
 *   state_names.c      which parameters, and what they are called
 *   state_get.c        the dict of this rank's live memory    state_set.c          a dict is matched with it
 *   state_views.c      of it, what lies in flat parameters
 *   state_full.c       every value whole, from all ranks      state_broadcast.c    as rank 0 has it
 *   state_groups.c     hyper-parameters into it               state_groups_take.c  and out of it
 *   state_move.c       parts of tensors between ranks and boxes; state_number.c  numbers of all types
 *   root_state.c       checkpoints                            state_own.c          the caller's entries
 */
#ifndef FSDP_STATE_INTERNAL_H
#define FSDP_STATE_INTERNAL_H

#include "base/core/mem.h"
#include "runtime/optim/optim_internal.h"
#include "statedict/sd/names.h"
#include <fsdp/root_init.h>
#include <fsdp/state.h>

/* --- names (state_names.c) ---------------------------------------------------------------------- */

/* A parameter or buffer as state dicts have it. */
typedef struct fsdp_state_param {
    fsdp_param *param;         /* as it was declared */
    const char **names;        /* without prefix: the tensor's, then those of its aliases */
    size_t count;              /* 0: it is not wanted */
    fsdp_optim *optim;         /* NULL: none keeps state of it */
    fsdp_optim_state *state;   /* of it, or of the flat parameter that it lies in */
    size_t group;              /* of the optimizer's */
} fsdp_state_param;

typedef struct fsdp_state_scope {
    fsdp_root *root;
    fsdp_optim *const *optims;
    size_t optim_count;
    fsdp_state_opts opts;      /* prefixes filled in, optims as above */
    fsdp_state_param *params;  /* in the model's order */
    size_t count;
    fsdp_sd *index;            /* every name -> number of its parameter */
    fsdp_arena arena;
} fsdp_state_scope;

/* Release it also when this failed. */
fsdp_status fsdp_state_scope_init(fsdp_state_scope *scope, fsdp_root *root, const fsdp_state_opts *opts,
                                  fsdp_error *err);
void fsdp_state_scope_release(fsdp_state_scope *scope);

/* It is wanted, and not left out as frozen or not persistent. */
bool fsdp_state_has(const fsdp_state_scope *scope, const fsdp_state_param *param);
/* Prefix, name and, unless it is NULL, what. */
typedef struct fsdp_state_naming {
    const char *prefix, *more; /* "optim.", "state." */
    const char *what;          /* "exp_avg" */
} fsdp_state_naming;
fsdp_status fsdp_state_spell(fsdp_text *text, const fsdp_state_naming *naming, const char *name,
                             fsdp_error *err);
/* NULL: no parameter has that name. */
fsdp_state_param *fsdp_state_find(const fsdp_state_scope *scope, const char *name, size_t size);

/* What is behind a prefix of two parts; NULL when the name has another beginning. */
const char *fsdp_state_behind(const char *name, size_t size, const char *prefix, const char *more,
                              size_t *rest_out);
/* "<name>.<what>": names hold dots, so it is cut behind the longest one that is known. */
typedef struct fsdp_state_key {
    fsdp_state_param *param;   /* NULL: number */
    int64_t number;
    const char *what;
    size_t what_size;
} fsdp_state_key;
bool fsdp_state_split(const fsdp_state_scope *scope, const char *text, size_t size, fsdp_state_key *key_out);

/* --- getting (state_get.c, state_full.c) -------------------------------------------------------- */

/* Outside forward and backward; everything resharded and complete. Local. */
fsdp_status fsdp_state_settle(fsdp_root *root, fsdp_error *err);
/* The live dict: what is got, and what is set into. Buffers that are kept in another dtype than they were
 * declared in are copies in memory of the dict, also there. With copies everything is: it has no values. */
fsdp_status fsdp_state_build(const fsdp_state_scope *scope, bool copies, fsdp_sd **sd_out, fsdp_error *err);
/* The whole of a parameter that is kept in another dtype; false: it is not. */
bool fsdp_state_is_cast(const fsdp_param *param);

/* A tensor of a parameter that lies in a flat one (state_views.c). */
typedef struct fsdp_state_view {
    const fsdp_state_scope *scope;
    const fsdp_state_param *param;
    const fsdp_mesh *mesh;     /* of what is whole on every rank */
    fsdp_state_naming naming;
    bool is_optim;             /* of optimizer state: parameters without have none */
    fsdp_dtype dtype;
    void *data;                /* this rank's part of the flat tensor; NULL: memory comes later */
} fsdp_state_view;
/* Adds it, or all of its flat parameter if they are one buffer. name: room for names. */
fsdp_status fsdp_state_add_view(const fsdp_state_view *view, fsdp_text *name, fsdp_sd *sd, fsdp_error *err);
/* What another dict has under the same name; a tensor with that layout and memory. */
fsdp_status fsdp_state_add_entry(const fsdp_sd *from, const fsdp_entry *entry, const fsdp_layout *layout,
                                 void *data, fsdp_sd *sd, fsdp_error *err);
/* Collective. A local failure (`mine`) fails it on all ranks. */
fsdp_status fsdp_state_gather(const fsdp_state_scope *scope, const fsdp_sd *live, fsdp_status mine,
                              fsdp_sd **full_out, fsdp_error *err);
/* Collective: this call, with these options, is everybody's, and the dicts are alike. */
fsdp_status fsdp_state_agree(const fsdp_state_scope *scope, const fsdp_sd *live, const char *call,
                             bool with_values, fsdp_status mine, fsdp_error *err);

/* --- setting (state_set.c, state_broadcast.c) --------------------------------------------------- */

/* As fsdp_state_settle, and there are no gradients that wait for a step. */
fsdp_status fsdp_state_settle_to_set(fsdp_root *root, fsdp_error *err);

/* Which entry of a dict goes where. */
typedef struct fsdp_state_match {
    const fsdp_state_scope *scope;
    const fsdp_sd *live, *sd;
    bool is_description;       /* sd has no memory: its tensors come later, from elsewhere */
    bool casts;                /* which is where floating dtypes that differ are cast */
    const fsdp_sd *own;        /* the caller's entries that sd should have, too; or NULL */
    int64_t *source;           /* per live entry: the entry of sd, -1: none */
    struct fsdp_state_groups *groups;  /* NULL: none were taken */
    fsdp_name_list missing, unexpected;
    size_t model_count, model_unexpected;
} fsdp_state_match;
/* Names and tensors, all of them checked; nothing is changed. Release it also when this failed. */
fsdp_status fsdp_state_match_all(fsdp_state_match *match, fsdp_error *err);
/* Names go to the report, which may be NULL. */
void fsdp_state_match_release(fsdp_state_match *match, fsdp_load_report *report);
/* Those of parameters that lie in one flat parameter, which has one step, do not differ. numbers: a dict that
 * has some under the names of match->sd, which counts otherwise. */
fsdp_status fsdp_state_check_steps(const fsdp_state_match *match, const fsdp_sd *numbers, fsdp_error *err);
/* What a live entry with a source gets, of sd or a dict with the same entries; of an alias, its target. */
const fsdp_entry *fsdp_state_source(const fsdp_state_match *match, const fsdp_sd *sd, size_t live);
/* Tensors have come: hyper-parameters and masters follow. */
fsdp_status fsdp_state_finish(const fsdp_state_match *match, fsdp_error *err);

/* What rank 0 has, told to all: names, shapes, values, 0-d tensors. Only rank 0's `sd` counts. */
typedef struct fsdp_state_message {
    fsdp_sd *sd;               /* as rank 0's, entry by entry; whole tensors without memory */
    char *bytes;               /* what 0-d tensors point to */
} fsdp_state_message;
/* Collective. Release it also when this failed. */
fsdp_status fsdp_state_tell(fsdp_root *root, const fsdp_sd *sd, fsdp_state_message *message_out,
                            fsdp_error *err);
void fsdp_state_message_release(fsdp_state_message *message);
/* Collective. data: rank 0's dict, of which match->sd is the description. */
fsdp_status fsdp_state_broadcast(const fsdp_state_match *match, const fsdp_sd *data, fsdp_error *err);

/* --- hyper-parameters (state_groups.c, state_groups_take.c) --------------------------------------- */

typedef struct fsdp_state_hyper {
    const char *name;
    double *numbers[2];        /* live; betas have two */
    bool *flag;                /* or this */
    bool is_shared;            /* by all groups of the optimizer */
} fsdp_state_hyper;
enum { FSDP_STATE_HYPERS = 6 };
size_t fsdp_state_list_hypers(fsdp_optim *optim, size_t group,
                              fsdp_state_hyper hypers_out[FSDP_STATE_HYPERS]);
/* Strings in values, and what a dict has under one; NULL: nothing. */
fsdp_status fsdp_state_put_text(const char *text, fsdp_value *value_out, fsdp_error *err);
bool fsdp_state_is_text(const fsdp_value *value, const char *text);
const fsdp_value *fsdp_state_member(const fsdp_value *dict, const char *key);
/* Groups of all optimizers before `until`. */
size_t fsdp_state_count_groups(const fsdp_state_scope *scope, const fsdp_optim *until);

fsdp_status fsdp_state_put_groups(const fsdp_state_scope *scope, fsdp_sd *sd, fsdp_error *err);

/* Those of a dict, checked and not applied; the dict outlives them. */
typedef struct fsdp_state_groups fsdp_state_groups;
fsdp_status fsdp_state_take_groups(const fsdp_state_scope *scope, const fsdp_sd *sd, fsdp_name_list *missing,
                                   fsdp_name_list *unexpected, fsdp_state_groups **groups_out,
                                   fsdp_error *err);
void fsdp_state_groups_free(fsdp_state_groups *groups);        /* accepts NULL */
void fsdp_state_apply_groups(const fsdp_state_groups *groups);
/* The parameter that has this number in the dict; NULL: none. */
fsdp_state_param *fsdp_state_numbered(const fsdp_state_groups *groups, int64_t number);

/* --- numbers (state_number.c) --------------------------------------------------------------------- */

bool fsdp_state_value_number(const fsdp_value *value, double *number_out);
/* An entry that is a number: a value, or a 0-d tensor of any real type. */
bool fsdp_state_number(const fsdp_entry *entry, double *number_out);
/* The 0-d tensor `to` becomes that of `from`; false when from is no number. */
bool fsdp_state_set_number(const fsdp_entry *to, const fsdp_entry *from);

/* --- the caller's own entries (state_own.c) ------------------------------------------------------- */

/* own may be NULL. Memory of tensors is borrowed. */
fsdp_status fsdp_state_save_own(const fsdp_sd *own, fsdp_sd *sd, fsdp_error *err);
/* Those that are stored: tensors get memory if they lack it, all are wanted. Then own takes the values. */
fsdp_status fsdp_state_want_own(fsdp_sd *own, const fsdp_sd *stored, int rank, fsdp_sd *wanted,
                                fsdp_error *err);
fsdp_status fsdp_state_take_own(fsdp_sd *own, const fsdp_sd *loaded, fsdp_error *err);

/* --- moving (state_move.c) ---------------------------------------------------------------------- */

/* Elements [first, first + count) of a box, in row-major order and packed in data. */
typedef struct fsdp_state_range {
    fsdp_box box;
    int64_t first, count;
    const void *data;
} fsdp_state_range;
/* Those that lie in box `to` go to its packed memory. */
void fsdp_state_copy_range(const fsdp_state_range *from, const fsdp_box *to, void *to_data, size_t element);
/* Those that lie in any box of the rank go to the entry's memory there. */
void fsdp_state_copy_into(const fsdp_state_range *from, const fsdp_entry *to, int rank);

/* One bounded buffer through which a rank's elements get to all. */
typedef struct fsdp_state_mover {
    fsdp_root *root;
    fsdp_ordered_comm *ordered;           /* NULL: this rank is alone */
    char *buffer;
    size_t room, used;
    int owner;                 /* of what lies in the buffer */
    const char *unit;
    struct fsdp_state_piece *pieces;
    size_t piece_count;
} fsdp_state_mover;
/* Collective; most: bytes of all tensors. Release it also when this failed. */
fsdp_status fsdp_state_mover_init(fsdp_state_mover *mover, fsdp_root *root, int64_t most, fsdp_status mine,
                                  fsdp_error *err);
void fsdp_state_mover_release(fsdp_state_mover *mover);
/* Collective. A box is packed in data on world rank `owner`; every rank gets what lies in its boxes of `to`,
 * an entry that stays where it is until moving has ended. */
fsdp_status fsdp_state_move(fsdp_state_mover *mover, int owner, const fsdp_box *box, const void *data,
                            const fsdp_entry *to, fsdp_error *err);
fsdp_status fsdp_state_move_end(fsdp_state_mover *mover, fsdp_error *err);

#endif

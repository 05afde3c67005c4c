/*
 * The selection of a conversion: the entries that the target gets, with their names and dtypes.
 *
 * In: the state dict of the source, the options of the user, the format of the target. Out: one fsdp_selected
 * per entry, and through relayout.h the state dict of the target. Local and without I/O;
 * convert/, save/ (full states) and diff/ (renaming) call this room.
 *
 * Steps, in this order:
 *   filter.c       patterns of names (include, exclude), by expression.c
 *   model_part.c   the model among what a trainer keeps beside it
 *   selection.c    the parts that are taken; what the format cannot hold; names that collide; tensors of
 *                  subclasses, with their members; the dtype of every tensor (cast_box.c casts later)
 *   drop_rules.c   --drop; kinds of tensors that are listed as values: quantized, sparse, ...
 *   expression.c   new names
 *   relayout.c     the layout of the result
 */
#ifndef FSDP_SELECTION_H
#define FSDP_SELECTION_H

#include "formats/target.h"
#include "statedict/select/model_part.h"
#include <fsdp/convert.h>
#include <fsdp/sd.h>

typedef struct fsdp_selected {
    bool is_kept;
    bool is_model, is_optim;   /* of the model, of the optimizer */
    bool is_tied;              /* not kept, since another name of the same tensor is kept */
    bool is_weight;            /* a tensor with elements, of a model or an average of one */
    const char *kind;          /* of a tensor that the library has no dtype or layout for (drop_rules.h) */
    size_t unit;               /* entry + 1 of the tensor of a subclass that this is or belongs to; 0: none */
    const char *name;          /* new; borrowed from the selection */
    size_t name_size;
    fsdp_dtype dtype;          /* of the result; values: FSDP_DTYPE_NONE */
} fsdp_selected;

typedef struct fsdp_selection fsdp_selection;

/* Two names of one tensor, of which one is left out. */
typedef struct fsdp_convert_tie {
    const char *dropped, *kept;
    size_t dropped_size, kept_size;
} fsdp_convert_tie;

enum { FSDP_CAST_PAIRS = 72 }; /* of two types that fsdp casts */

typedef struct fsdp_cast_pair {
    fsdp_dtype from, to;
    int64_t tensors;
} fsdp_cast_pair;

/* What a selection does to the entries. */
typedef struct fsdp_selection_counts {
    int64_t renamed;           /* names that change */
    int64_t left_out, dropped; /* by the part that is taken, by --drop */
    char prefix[64];           /* that all tensors of the model share ("model."), "" if none */
    int64_t cast;              /* tensors that get another dtype */
    fsdp_cast_pair casts[FSDP_CAST_PAIRS];     /* the first cast_pairs are filled in */
    int cast_pairs;
    int64_t optim_uncast;      /* floating tensors of the optimizer that a cast of the model leaves */
    int64_t quantized, quantized_known;        /* weights of integers with scales, which it leaves; of them,
                                                * those that --dequant knows */
} fsdp_selection_counts;

/* The source of a selection. */
typedef struct fsdp_select_from {
    const fsdp_sd *sd;
    const bool *is_missing;    /* per entry: incomplete in the source; NULL: none */
    fsdp_names_known known;
    bool looks_only;           /* nothing is written: values are left out, and a model may lack elements or
                                * have a name twice */
} fsdp_select_from;

/*
 * The native format holds everything but tensors inside values. FSDP_ERR_USAGE lists the entries that the
 * format cannot hold and, where weights remain, how to drop them, tensors that cannot be
 * cast, or two entries with one new name; also when the source has only optimizer state and the format omits
 * that by default, when --drop leaves nothing, or a part of a tensor of a subclass. FSDP_DIFFERS: no name
 * matches.
 */
fsdp_status fsdp_selection_create(const fsdp_select_from *from, const fsdp_select_opts *opts,
                                  const fsdp_format *target, fsdp_selection **selection_out,
                                  fsdp_error *err);
void fsdp_selection_free(fsdp_selection *selection); /* accepts NULL */

const fsdp_selected *fsdp_selection_at(const fsdp_selection *selection, size_t entry);

/* Removes an entry from the selection: another name of the same tensor is kept. */
void fsdp_selection_leave_out(fsdp_selection *selection, size_t entry);

/* True when the selection has a weight that --drop opaque leaves in. */
bool fsdp_selection_has_weights(const fsdp_selection *selection, const fsdp_sd *sd);

/* --dtype and --dtype-for. FSDP_ERR_USAGE for a malformed rule or a dtype that casts cannot produce. */
typedef struct fsdp_cast_rules fsdp_cast_rules;
fsdp_status fsdp_cast_rules_create(const fsdp_select_opts *opts, fsdp_cast_rules **rules_out,
                                   fsdp_error *err);
void fsdp_cast_rules_free(fsdp_cast_rules *rules);     /* accepts NULL */
/* True when a --dtype-for has the name, and decides in place of --dtype. */
bool fsdp_cast_rules_have(const fsdp_cast_rules *rules, const fsdp_entry *entry);

/* The parts that are taken and left out, for people: "model 29 · ema 29 left out · optimizer left out". */
typedef struct fsdp_part_text {
    fsdp_text line;
    fsdp_text other;           /* the label of weights that were left out; empty: none */
} fsdp_part_text;
/* Empty when nothing is left out. */
const fsdp_part_text *fsdp_selection_parts(const fsdp_selection *selection);

void fsdp_selection_count(const fsdp_selection *selection, fsdp_selection_counts *counts_out);

/* FSDP_ERR_USAGE when the state dict has names and the patterns (filter.h) select none: that is a mistake,
 * whatever a checkpoint holds. */
fsdp_status fsdp_filter_require(const fsdp_sd *sd, const char *include, const char *exclude, fsdp_error *err);

#endif

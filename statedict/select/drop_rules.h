/*
 * The rules of --drop: entries that a conversion leaves out. Callers: selection.c, and map, whose rules need
 * not take what is left out afterwards.
 *
 * Kinds of tensors are those for which no dtype or layout of the library stands: a source lists them as
 * values, by their class. They are weights in any case, so that only --drop tensors:KIND leaves them out.
 *
 *   quantized, sparse, jagged, meta   of PyTorch
 *   void                              arrays of NumPy whose elements have a size and no type
 *   flat                              a flat parameter of FSDP1: its names are not in the file
 *   other                             further classes of tensors, numbers of unusual size
 */
#ifndef FSDP_DROP_RULES_H
#define FSDP_DROP_RULES_H

#include "base/data/text_pairs.h"
#include <fsdp/convert.h>

/* Returns the kind of the tensor that an entry is, or that its value holds; NULL: none. Looks into an object
 * that a checkpoint holds as a blob. *is_subclass_out: the value is a tensor whose members may be listed, too
 * (selection.c). */
const char *fsdp_tensor_kind(const fsdp_entry *entry, bool *is_subclass_out);

/* True for a value that holds each rank's piece of a parameter: a flat parameter of its unit is next to
 * it. */
bool fsdp_is_flat_piece(const fsdp_sd *sd, const fsdp_entry *entry);

/* True for a value with a plain tensor in it. */
bool fsdp_value_holds_tensor(const fsdp_value *value);

/* Arguments begin with these, or are one of a few words, or an expression. */
#define FSDP_DROP_DTYPE "dtype:"
#define FSDP_DROP_TENSORS "tensors:"

typedef struct fsdp_drop_rules fsdp_drop_rules;

/* FSDP_ERR_USAGE for a wrong expression, dtype or kind of tensors. */
fsdp_status fsdp_drop_rules_create(const fsdp_select_opts *opts, fsdp_drop_rules **rules_out,
                                   fsdp_error *err);
void fsdp_drop_rules_free(fsdp_drop_rules *rules); /* accepts NULL */

/* An entry, and what is known of it. */
typedef struct fsdp_droppable {
    const fsdp_entry *entry;
    fsdp_dtype dtype;          /* of an alias that of its tensor; of a value NONE */
    const char *tensor_kind;   /* see above */
    bool is_optim;             /* of the optimizer */
} fsdp_droppable;
bool fsdp_drop_rules_take(const fsdp_drop_rules *rules, const fsdp_droppable *what);
/* "metadata" takes every key of the metadata, "metadata:REGEX" those that match; neither takes an entry. */
bool fsdp_drop_is_of_metadata(const char *drop);

/* FSDP_ERR_USAGE names an expression that matches no name: that is a mistake of the user. */
fsdp_status fsdp_drop_rules_check(const fsdp_drop_rules *rules, const fsdp_sd *sd, fsdp_error *err);

#endif

/* The rules of --drop: entries that a conversion leaves out. Callers: selection.c, and map, whose rules need
 * not take what is left out afterwards. */
#ifndef FSDP_DROP_RULES_H
#define FSDP_DROP_RULES_H

#include "base/data/text_pairs.h"
#include <fsdp/convert.h>

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
    const char *tensor_kind;   /* see tensor_kinds.h */
    bool is_optim;             /* of the optimizer */
} fsdp_droppable;
bool fsdp_drop_rules_take(const fsdp_drop_rules *rules, const fsdp_droppable *what);
/* "metadata" takes every key of the metadata, "metadata:REGEX" those that match; neither takes an entry. */
bool fsdp_drop_is_of_metadata(const char *drop);
bool fsdp_drop_rules_take_metadata(const fsdp_drop_rules *rules, const char *key, size_t size);

/* FSDP_ERR_USAGE names an expression that matches no name: that is a mistake of the user. */
fsdp_status fsdp_drop_rules_check(const fsdp_drop_rules *rules, const fsdp_sd *sd, fsdp_error *err);
/* FSDP_ERR_USAGE names an expression that matches no key of the metadata. */
fsdp_status fsdp_drop_rules_check_metadata(const fsdp_drop_rules *rules, const fsdp_text_pairs *metadata,
                                           fsdp_error *err);

#endif

/*
 * Tied weights: several names of one tensor. Finds them, chooses the name that stays, and leaves out the
 * others (--tied). docs/formats.md, "Tied weights".
 */
#ifndef FSDP_TIES_H
#define FSDP_TIES_H

#include "base/core/mem.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/select/selection.h"
#include <fsdp/convert.h>

/* Names that are left out, in the order of the source, and the name kept for each; all are new names. */
typedef struct fsdp_ties {
    fsdp_arena arena;
    fsdp_convert_tie *items;
    size_t count, room;
} fsdp_ties;

typedef struct fsdp_tie_rules {
    const fsdp_convert_opts *opts;
    const fsdp_format *target;
    int config;                /* tie_word_embeddings of config.json: 1, 0, or -1: missing */
    const char *class_name;    /* of the model, whose tied names are known by it; or "" */
    const char *to;            /* spool files go beside this path */
} fsdp_tie_rules;

/*
 * Takes tied names out of the selection. Known ties: aliases, and tensors of a foreign checkpoint that lie in
 * the same bytes. If the rules ask for it, also an output and an input embedding, and names that the class
 * ties, whose bytes are read and are equal. Zero-initialise ties; release them also after a failure.
 */
fsdp_status fsdp_ties_drop(fsdp_checkpoint *from, const fsdp_tie_rules *rules, fsdp_selection *selection,
                           fsdp_ties *ties, fsdp_error *err);
void fsdp_ties_release(fsdp_ties *ties);

/* True for an input embedding (fsdp_name_is_head: the weight of the output), by the end of the name. */
bool fsdp_name_is_embedding(const char *name, size_t size);
/* True for an input embedding of a vocabulary, with one row per word. */
bool fsdp_name_is_vocabulary(const char *name, size_t size);
bool fsdp_name_is_head(const char *name, size_t size);

#endif

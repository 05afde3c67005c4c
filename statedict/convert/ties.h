/*
 * Tied weights: names of one tensor. Which of them are known or found to be one, which name stays, and which
 * are left out (--tied). docs/formats.md, "Tied weights".
 */
#ifndef FSDP_TIES_H
#define FSDP_TIES_H

#include "base/core/mem.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/select/selection.h"
#include <fsdp/convert.h>

/* Names that are left out, in the order of the source, and what was kept for each: new names. */
typedef struct fsdp_ties {
    fsdp_arena arena;
    fsdp_convert_tie *items;
    size_t count, room;
} fsdp_ties;

typedef struct fsdp_tie_rules {
    const fsdp_convert_opts *opts;
    const fsdp_limits *limits; /* of the target, NULL: our own format */
    int config;                /* tie_word_embeddings of config.json: 1, 0, or -1 when it is not told */
    const char *to;            /* what has to be unpacked meanwhile is unpacked beside it */
} fsdp_tie_rules;

/*
 * Takes names out of the selection. Known to be one: aliases, and tensors of a foreign checkpoint that lie in
 * the same bytes. Found to be one, where the rules ask for it: an output and an input embedding whose bytes
 * are equal, which are read. Zero-initialise ties; release them also after a failure.
 */
fsdp_status fsdp_ties_drop(fsdp_checkpoint *from, const fsdp_tie_rules *rules, fsdp_selection *selection,
                           fsdp_ties *ties, fsdp_error *err);
void fsdp_ties_release(fsdp_ties *ties);

/* Per entry of the checkpoint the first that is the same tensor: what is known to be one, nothing is read. */
fsdp_status fsdp_ties_known(fsdp_checkpoint *from, size_t *one_out, fsdp_error *err);

/* The table of input embeddings, or the weight of the output: by the end of the name. */
bool fsdp_name_is_embedding(const char *name, size_t size);
/* The same, of names that are used for words only: it has a row for each. */
bool fsdp_name_is_vocabulary(const char *name, size_t size);
bool fsdp_name_is_head(const char *name, size_t size);

#endif

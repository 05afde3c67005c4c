/*
 * The names that a model of transformers has for one tensor. Files for the hub hold one of them, and loaders
 * of PyTorch ask for all.
 *
 * The names are data: tied_classes.txt, which tests/peers/tied_names.py makes of the classes of transformers.
 * Callers: convert.
 */
#ifndef FSDP_TIED_NAMES_H
#define FSDP_TIED_NAMES_H

#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/sd/names.h"

/* True for an input embedding (fsdp_name_is_head: the weight of the output), by the end of the name. */
bool fsdp_name_is_embedding(const char *name, size_t size);
/* True for an input embedding of a vocabulary, with one row per word. */
bool fsdp_name_is_vocabulary(const char *name, size_t size);
bool fsdp_name_is_head(const char *name, size_t size);

/* A model by its config.json. */
typedef struct fsdp_tied_model {
    const char *class_name;    /* the first of architectures */
    int says;                  /* tie_word_embeddings: 1, 0, or -1: missing, the class decides */
} fsdp_tied_model;

/* Two names of a tensor. */
typedef struct fsdp_tied_pair {
    const char *name, *other;
    size_t name_size, other_size;
} fsdp_tied_pair;

/* Pair `number` of the model; false: it has fewer, or is not tied. */
bool fsdp_tied_pair_at(const fsdp_tied_model *model, size_t number, fsdp_tied_pair *pair_out);

/* Adds the names that the checkpoint lacks, after all others, as aliases of those that it has, and to the
 * list. *checkpoint becomes a derived one, unless none is lacking; it is closed after a failure. */
fsdp_status fsdp_add_tied_names(const fsdp_tied_model *model, fsdp_checkpoint **checkpoint,
                                fsdp_name_list *added, fsdp_error *err);

#endif

/*
 * The parts of a state dict: the model, its optimizer, further weights such as averages (ema), and what only
 * a trainer needs (schedulers, loaders, generators, metrics). Programs nest them in many ways:
 * {"model": {...}, "optimizer": {...}, "step": 5}, {"app": {"model": {...}}}, or plain names.
 *
 * In: the names of a state dict and how they are nested. Out: the part of each entry. Local, without I/O.
 * selection.c and convert/ call this file.
 */
#ifndef FSDP_MODEL_PART_H
#define FSDP_MODEL_PART_H

#include "base/text.h"
#include <fsdp/sd.h>

typedef enum fsdp_part_kind {
    FSDP_PART_MODEL,
    FSDP_PART_OPTIM,
    FSDP_PART_WEIGHTS,         /* weights next to the model: ema */
    FSDP_PART_STATE            /* of a trainer: schedulers, loaders, generators, metrics */
} fsdp_part_kind;

/* Knowledge about the names that the names do not show. */
typedef struct fsdp_names_known {
    bool paths;                /* entries without a path are nested by default, as other programs nest them */
    bool only_tensors;         /* the model has no values: those that are there are the trainer's */
    const char *model_type;    /* of the config.json next to the weights; NULL: none */
} fsdp_names_known;

typedef struct fsdp_parts {
    const fsdp_sd *sd;
    fsdp_names_known known;
    bool state_is_optim;       /* fsdp_sd_state_is_optim */
    const char *root;          /* of the model: "app.model." or ""; borrowed from the state dict */
    size_t root_size;
} fsdp_parts;

/* Finds the model. part: its name as --part has it, or NULL. FSDP_ERR_USAGE when no name begins with it. */
fsdp_status fsdp_parts_find(const fsdp_sd *sd, fsdp_names_known known, const char *part,
                            fsdp_parts *parts_out, fsdp_error *err);

fsdp_part_kind fsdp_part_of(const fsdp_parts *parts, const fsdp_entry *entry);

/* The text under which people know the part of an entry: its first element, or the one after "app"
 * or after the keys that it shares with the model. */
const char *fsdp_part_label_of(const fsdp_parts *parts, const fsdp_entry *entry, size_t *size_out);

/* Adds the rule that gives the optimizer's state and groups their names of this library and of PyTorch's
 * examples: optim.state.NAME.KEY, optim.param_groups.N.KEY. None where they have them, or have no state. */
fsdp_status fsdp_parts_add_optim_rule(const fsdp_parts *parts, fsdp_text *rules, size_t *count,
                                      fsdp_error *err);

/* Adds the rules (s/REGEX/NEW/, a zero after each) that strip the root, and elements that wrappers put into
 * names, as far as names of the model have them. */
fsdp_status fsdp_parts_add_rules(const fsdp_parts *parts, fsdp_text *rules, size_t *count_out,
                                 fsdp_error *err);

#endif

/*
 * The parts of a source for people: "model 29 · ema 29 left out · optimizer left out". selection.c calls
 * this file, which knows the labels of model_part.h.
 */
#ifndef FSDP_PART_TEXT_H
#define FSDP_PART_TEXT_H

#include "statedict/select/model_part.h"

enum { FSDP_PART_LABELS = 40, FSDP_PART_SHOWN = 6 };

typedef struct fsdp_part_text {
    fsdp_text line;
    fsdp_text other;           /* the label of weights that were left out; empty: none */
} fsdp_part_text;

typedef struct fsdp_part_label {
    const char *label;
    size_t size;
    fsdp_part_kind kind;
    int64_t tensors;
    bool is_kept;
} fsdp_part_label;

/* Zero-initialised but for parts and part. */
typedef struct fsdp_part_list {
    const fsdp_parts *parts;
    const char *part;          /* of --part, or NULL */
    fsdp_part_label items[FSDP_PART_LABELS];
    size_t count, more;        /* more: entries under further labels */
} fsdp_part_list;

void fsdp_part_list_add(fsdp_part_list *list, const fsdp_entry *entry, bool is_kept);
fsdp_status fsdp_part_list_spell(const fsdp_part_list *list, fsdp_part_text *text_out, fsdp_error *err);
void fsdp_part_text_release(fsdp_part_text *text);

#endif

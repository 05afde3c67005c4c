/*
 * The notes of a plan. While a conversion is planned, its files write what they find into the facts; once all
 * is known, fsdp_plan_note makes a sentence of each fact (plan_notes.c), which tools print as they are.
 */
#ifndef FSDP_PLAN_NOTES_H
#define FSDP_PLAN_NOTES_H

#include "statedict/convert/copied.h"
#include "statedict/expect/export_check.h"
#include "statedict/select/selection.h"
#include "statedict/sd/names.h"

struct convert_job;

enum { FSDP_STAGES = 9, FSDP_STAGE_TEXT = 192 };

/* Tensors that are computed from those of the source, or of the stage before, while they are read. */
typedef struct fsdp_convert_stage {
    const char *name;          /* "name_optimizer", "adapter", "dequant", "decode", "map", "gguf", "megatron",
                                * "tied_names", "encode" */
    char text[FSDP_STAGE_TEXT];        /* "merge the adapter into 12 tensors, 0 replaced"; "" where another
                                        * note says it */
} fsdp_convert_stage;

typedef struct fsdp_note_list {
    fsdp_note_item *items;
    size_t count;
} fsdp_note_list;

typedef struct fsdp_plan_facts {
    fsdp_convert_stage stages[FSDP_STAGES];    /* the first stage_count, in the order of the work */
    int stage_count;
    char map[64];              /* a map that takes the source to the target, "" if there is none; map_from and
                                * map_to: its two sides */
    char map_from[32], map_to[32];
    bool is_mapped;            /* false: it is not used, since no config.json says that it is for the model */
    bool lacks_tokenizer;      /* gguf: none lies next to the weights, and llama.cpp runs no model without */
    bool has_tiktoken;         /* then: one lies there that is not read, since it lacks the special tokens */
    int64_t encoded;           /* tensors that become blocks (q8_0) */
    int64_t optim_named;       /* parameters that the optimizer numbers, and that got names */
    int64_t rounded;           /* weights of which the source has rounded copies alone, which are not read */
    fsdp_selection_counts selected;
    fsdp_optim_form optim_form;        /* that hyper-parameters get; DEFAULT: they stay as they are */
    int64_t in_tuples;         /* tensors of tuples that the format stores as lists (dcp) */
    int64_t short_tensors;     /* without a dim shard_dim: cut along dim 0; 0 for a world of 1 */
    int64_t model_tensors;     /* that the model of config.json must have */
    fsdp_note_list lists[FSDP_NOTE_KINDS];     /* of kinds whose items are found early */
} fsdp_plan_facts;

/* Notes what the selection does, before it is freed: lists of names, the entries that are kept, and values
 * that are code; FSDP_ERR_USAGE when there are some and the options do not copy them. Called once; the caller
 * releases plan->memory in any case. report: of the comparison with config.json. */
fsdp_status fsdp_plan_note_selected(fsdp_convert_plan *plan, struct convert_job *job,
                                    const fsdp_selection *selection, const fsdp_export_report *report,
                                    fsdp_error *err);
/* Makes the notes of the facts, and last. */
fsdp_status fsdp_plan_note(fsdp_convert_plan *plan, struct convert_job *job, fsdp_error *err);

#endif

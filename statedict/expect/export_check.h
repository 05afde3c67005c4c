/* The comparison of a model with its config.json before a conversion writes the two, or what it computes of
 * them. */
#ifndef FSDP_EXPORT_CHECK_H
#define FSDP_EXPORT_CHECK_H

#include "statedict/sd/access.h"
#include "statedict/sd/names.h"
#include "statedict/select/selection.h"
#include <fsdp/convert.h>

typedef struct fsdp_export_check {
    const struct fsdp_config_file *config;
    bool is_dequantized;       /* its quantization_config goes */
    bool is_untied;            /* its tie_word_embeddings becomes false */
    const char *weights;       /* the directory of config, which decides where the architecture is not known;
                                * NULL: none */
    fsdp_access access;        /* for it */
    int64_t memory;
    const char *from;          /* the path of the checkpoint, for messages */
    const fsdp_sd *sd;         /* what is written */
    const char *allow_missing; /* regex over names that may be missing; NULL: none */
    const fsdp_convert_tie *ties;      /* names that are left out for another one */
    size_t tie_count;
    bool is_copied;            /* the config is written with the model, and need not be */
    bool may_be_unnamed;       /* names that are none of the model's say nothing */
} fsdp_export_check;

typedef struct fsdp_export_report {
    char model[64];            /* "llama"; "" when the architecture is not known and nothing was compared */
    int64_t expected;          /* tensors that must be there */
    fsdp_name_list missing, extra;     /* allowed ones; those that the model has not */
    size_t lost;               /* missing ones that are not allowed */
} fsdp_export_report;

/* FSDP_ERR_DAMAGED names tensors that are missing, of another shape, or of a layer that config.json has not;
 * FSDP_ERR_USAGE says that no name is one of the model's. Release the report also after a failure. */
fsdp_status fsdp_export_compare(const fsdp_export_check *check, fsdp_export_report *report_out,
                                fsdp_error *err);
void fsdp_export_report_release(fsdp_export_report *report);

#endif

/*
 * config.json and similar files next to the weights of a model: edits members that would be wrong for the
 * result. All other bytes of the text stay.
 */
#ifndef FSDP_MODEL_CONFIG_H
#define FSDP_MODEL_CONFIG_H

#include "base/text.h"
#include <stdbool.h>

typedef struct fsdp_config_edits {
    const char *dtype;         /* the new "dtype" and "torch_dtype", where they are strings, also in members
                                * NAME_config (not quantization_config); NULL: unchanged */
    bool no_code;              /* remove every "auto_map" */
    bool no_quantization;      /* remove every "quantization_config" */
    bool untied;               /* "tie_word_embeddings" is false, also where the text lacks it */
} fsdp_config_edits;

typedef struct fsdp_edited_config {
    fsdp_text text;            /* the edited text, empty without edits; the caller releases it */
    char was[32];              /* the first dtype that was replaced, or "" */
} fsdp_edited_config;
/* FSDP_ERR_DAMAGED, with the position, for a text that is not a JSON object. */
fsdp_status fsdp_model_config_edit(const char *text, size_t size, const char *path,
                                   const fsdp_config_edits *edits, fsdp_edited_config *out,
                                   fsdp_error *err);

#endif

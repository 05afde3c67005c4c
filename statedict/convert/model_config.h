/*
 * config.json and its like, which lie beside the weights of a model: what they say of the tensors, and the
 * few edits that keep them true. Everything else of their text stays as it was, byte by byte.
 */
#ifndef FSDP_MODEL_CONFIG_H
#define FSDP_MODEL_CONFIG_H

#include "base/text.h"
#include <stdbool.h>

/* Of config.json, or where that has no such member, of its "text_config". */
typedef struct fsdp_model_config {
    int64_t vocab_size;        /* -1: not told */
    int tied;                  /* tie_word_embeddings: 1, 0, or -1: not told */
} fsdp_model_config;

/* FSDP_ERR_DAMAGED, with the place, for what is no JSON object or says one of these things twice. */
fsdp_status fsdp_model_config_read(const char *text, size_t size, const char *path,
                                   fsdp_model_config *config_out, fsdp_error *err);

typedef struct fsdp_config_edits {
    const char *dtype;         /* what "dtype" and "torch_dtype" are to be, where they are strings, also in
                                * members NAME_config (not quantization_config); NULL: as they are */
    bool no_code;              /* without "auto_map", wherever it stands */
} fsdp_config_edits;

typedef struct fsdp_edited_config {
    fsdp_text text;            /* empty when nothing is to be edited; the caller releases it */
    char was[32];              /* the first dtype that was another one, "" when none was */
} fsdp_edited_config;
fsdp_status fsdp_model_config_edit(const char *text, size_t size, const char *path,
                                   const fsdp_config_edits *edits, fsdp_edited_config *out,
                                   fsdp_error *err);

#endif

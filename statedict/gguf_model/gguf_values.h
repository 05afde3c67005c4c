/*
 * Room gguf_model: a model of Hugging Face as the key-value pairs of a GGUF file, as llama.cpp's
 * convert_hf_to_gguf.py writes them: general.*, the numbers of the architecture, and the tokenizer.
 *
 *   gguf_pairs.c       lists of pairs
 *   gguf_config.c      config.json -> general.*, llama.*, qwen2.*, ... with the keys of the family
 *   gguf_tokenizer.c   tokenizer.json, tokenizer_config.json -> gguf_vocab.h; all pairs of a model
 *   gguf_sentencepiece.c   tokenizer.model -> gguf_vocab.h
 *   gguf_vocab.c       tokens, scores, merges -> tokenizer.ggml.*
 *   gguf_model.c       the way back: key-value pairs -> config.json
 *
 * Callers: the room map. Families are described in statedict/models.
 */
#ifndef FSDP_GGUF_VALUES_H
#define FSDP_GGUF_VALUES_H

#include "base/core/mem.h"
#include "base/io/io.h"
#include "base/text.h"
#include "statedict/models/config.h"
#include <fsdp/sd.h>

typedef struct fsdp_named_value {
    char *name;
    fsdp_value value;
} fsdp_named_value;

/* Zero-initialise. */
typedef struct fsdp_named_values {
    fsdp_named_value *items;
    size_t count, capacity;
} fsdp_named_values;

void fsdp_named_values_release(fsdp_named_values *values);
/* Copies the name and takes over the contents of value, which becomes null; also after a failure. */
fsdp_status fsdp_named_values_add(fsdp_named_values *values, const char *name, fsdp_value *value,
                                  fsdp_error *err);
fsdp_status fsdp_named_values_add_text(fsdp_named_values *values, const char *name, const char *text,
                                       fsdp_error *err);

/* A model's config.json, and the directory of its tokenizer, which names the model, too. */
typedef struct fsdp_gguf_model {
    const fsdp_config_file *config;    /* has the description of its family, which tokens_out borrows */
    const char *directory;
    const fsdp_sd *sd;         /* its tensors under the names of GGUF, whose sizes count; NULL: not known */
    int64_t memory;            /* that its vocabulary may take, beside 32 MiB; 0: 256 MiB */
} fsdp_gguf_model;
typedef enum fsdp_gguf_found {
    FSDP_GGUF_NO_TOKENIZER,
    FSDP_GGUF_TIKTOKEN,        /* tokenizer.model is a list of tiktoken, which lacks the special tokens */
    FSDP_GGUF_TOKENIZER
} fsdp_gguf_found;
/* FSDP_ERR_USAGE: llama.cpp has no names for such a model; a tokenizer that is not there gives no pairs. The
 * caller releases out, also after a failure. */
fsdp_status fsdp_gguf_values(fsdp_io *io, const fsdp_gguf_model *model, fsdp_named_values *out,
                             fsdp_gguf_found *found_out, fsdp_error *err);

/* Appends the text of config.json that the pairs of a GGUF file ask for; sd has its names. FSDP_ERR_USAGE:
 * the architecture is not known, or a number is not there. */
fsdp_status fsdp_gguf_config_text(const fsdp_sd *sd, fsdp_text *out, fsdp_error *err);

/* --- gguf_config.c, gguf_tokenizer.c --- */

/* Members of config.json that the tokenizer's files may lack; -1: none. */
typedef struct fsdp_gguf_tokens {
    const char *pre;           /* the name of its pattern of words in llama.cpp */
    const char *unigram;       /* the name of its tokenizer of the model Unigram there; NULL: it is "llama" */
    int64_t vocab_size, bos, eos, pad;
    int64_t memory;            /* as of the model */
} fsdp_gguf_tokens;
fsdp_status fsdp_gguf_config(const fsdp_gguf_model *model, fsdp_named_values *out,
                             fsdp_gguf_tokens *tokens_out, fsdp_error *err);
fsdp_status fsdp_gguf_tokenizer(fsdp_io *io, const char *directory, const fsdp_gguf_tokens *tokens,
                                fsdp_named_values *out, fsdp_gguf_found *found_out, fsdp_error *err);

#endif

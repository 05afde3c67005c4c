/*
 * Room gguf_model: a model of Hugging Face as the key-value pairs of a GGUF file, as llama.cpp's
 * convert_hf_to_gguf.py writes them: general.*, the numbers of the architecture, and the tokenizer.
 *
 *   gguf_pairs.c       lists of pairs
 *   gguf_config.c      config.json -> general.*, llama.*, qwen2.*, ... with the keys of the family; all pairs
 *   gguf_tokenizer.c   tokenizer.json, tokenizer.model, vocab.txt, ... -> tokenizer.ggml.*
 *   gguf_pooling.c     modules.json of sentence-transformers -> *.pooling_type
 *   gguf_model.c       the way back: key-value pairs -> config.json
 *   gguf_files.c       likewise -> tokenizer.json, vocab.txt, ...
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

enum { FSDP_GGUF_KEY = 128 };
/* Spells a key of a description: "llama.block_count". One of the tokenizer is below no architecture. */
void fsdp_gguf_spell_key(char name_out[FSDP_GGUF_KEY], const char *architecture, const char *key);

/* The value of a pair of an opened GGUF file; NULL: it has none of the name. */
const fsdp_value *fsdp_gguf_pair(const fsdp_sd *sd, const char *name);

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

/* --- gguf_files.c --- */

/* A file that is made of the pairs; its name is static. */
typedef struct fsdp_gguf_file {
    const char *name;          /* below the directory of the model: "1_Pooling/config.json" */
    fsdp_text text;
} fsdp_gguf_file;
enum { FSDP_GGUF_FILES = 5 };
typedef struct fsdp_gguf_files {
    fsdp_gguf_file items[FSDP_GGUF_FILES];
    size_t count;
} fsdp_gguf_files;
/* Makes the files of a WordPiece tokenizer and of sentence-transformers' pooling where the pairs have one; of
 * other tokenizers none is made. FSDP_ERR_DAMAGED: its tokens make no tokenizer. Release them in any case. */
fsdp_status fsdp_gguf_make_files(const fsdp_sd *sd, fsdp_gguf_files *files_out, fsdp_error *err);
void fsdp_gguf_files_release(fsdp_gguf_files *files);

/* --- gguf_pooling.c --- */

/* A mode of pooling: sentence-transformers' names in its settings, and llama.cpp's number. */
typedef struct fsdp_gguf_pooling {
    const char *mode, *flag;
    int number;
} fsdp_gguf_pooling;
enum { FSDP_GGUF_POOLINGS = 3 };
#define FSDP_GGUF_POOLING_KEY "pooling_type"
extern const fsdp_gguf_pooling fsdp_gguf_poolings[FSDP_GGUF_POOLINGS];

/* Adds the pooling of an encoder that modules.json in the directory lists. FSDP_ERR_USAGE: the model has a
 * module or a mode that llama.cpp does not compute. */
fsdp_status fsdp_gguf_add_pooling(fsdp_io *io, const fsdp_gguf_model *model, fsdp_named_values *out,
                                  fsdp_error *err);

/* --- gguf_config.c, gguf_tokenizer.c --- */

/* Members of config.json that the tokenizer's files may lack; -1: none. */
typedef struct fsdp_gguf_tokens {
    const char *pre;           /* the name of its pattern of words in llama.cpp */
    fsdp_token_model tokenizer;        /* of the family */
    int64_t vocab_size, bos, eos, pad;
    int64_t memory;            /* as of the model */
} fsdp_gguf_tokens;
fsdp_status fsdp_gguf_config(const fsdp_gguf_model *model, fsdp_named_values *out,
                             fsdp_gguf_tokens *tokens_out, fsdp_error *err);
fsdp_status fsdp_gguf_tokenizer(fsdp_io *io, const char *directory, const fsdp_gguf_tokens *tokens,
                                fsdp_named_values *out, fsdp_gguf_found *found_out, fsdp_error *err);

#endif

/*
 * Room tokenizer: reads tokenizer.json, the file of a tokenizer of the `tokenizers` library.
 *
 * In: the text of the file. Out: what it says, without a vocabulary in memory: tokens, merges and added
 * tokens come one at a time, so that each caller keeps them in its own form and bounds their memory, and the
 * parts that say how text is treated come as plain data (fsdp_text_rules). Text that is not such a file is
 * FSDP_ERR_DAMAGED with line and column.
 *
 *   tokenizer_json.c  the members of the file; tokens, merges and added tokens
 *   tokenizer_rules.c  normalizer, pre-tokenizer, post-processor and decoder, of each model that is read
 *   sentencepiece.c   the other file of a tokenizer, tokenizer.model (sentencepiece.h)
 *   json_part.h       values of a JSON text that are read in another order than they stand in
 *
 * Callers: runtime/tokens, which encodes text, and statedict/expect, which writes tokenizers into GGUF files.
 */
#ifndef FSDP_TOKENIZER_JSON_H
#define FSDP_TOKENIZER_JSON_H

#include "base/data/json.h"
#include "base/text.h"

/* A value in a JSON text, found but not read yet. at NULL: it is absent, or null. */
typedef struct fsdp_json_part { const char *at, *end; } fsdp_json_part;

enum { FSDP_PART_TYPE = 64 };

/* The members of "model" but for its tokens; false where one is absent, null or empty. */
typedef struct fsdp_tokenizer_model {
    char type[FSDP_PART_TYPE]; /* "BPE", "Unigram", ...; "": none */
    bool has_dropout, has_unknown, has_prefix, has_suffix;
    bool byte_fallback, ignore_merges;
    bool is_scored;            /* the vocabulary lists tokens with their scores, as Unigram does */
    int64_t unknown_id;        /* of Unigram; -1: none */
    fsdp_json_part vocab, merges;
} fsdp_tokenizer_model;

typedef struct fsdp_tokenizer_json {
    fsdp_json json;            /* of the whole file, for messages */
    fsdp_json_part parts[6];   /* its members, for this room */
    fsdp_tokenizer_model model;
    bool has_model;
} fsdp_tokenizer_json;

/* Finds the members of the file and reads those of its model. Borrows text and path. Release it, also after a
 * failure. */
fsdp_status fsdp_tokenizer_json_open(fsdp_tokenizer_json *file, const char *text, size_t size,
                                     const char *path, fsdp_error *err);
void fsdp_tokenizer_json_release(fsdp_tokenizer_json *file);

/* Returns FSDP_ERR_USAGE "'PATH': the WHAT 'NAME' is not supported ...". */
fsdp_status fsdp_tokenizer_refuse(const fsdp_json *json, const char *what, const char *name, fsdp_error *err);

/* --- tokens, merges, added tokens -----------------------------------------------------------------
 * Each function calls `take` for every item in the order of the file and ends with its first error. Texts are
 * valid during the call. json stands after the item, for fsdp_json_fail. A part that is absent is empty. */

typedef struct fsdp_file_token {
    const char *text;
    size_t size;
    int64_t id;                /* any number: not checked */
    double score;              /* of a scored vocabulary, whose ids are the places in the list */
} fsdp_file_token;
typedef fsdp_status (*fsdp_take_token)(void *context, const fsdp_json *json, const fsdp_file_token *token,
                                       fsdp_error *err);
fsdp_status fsdp_tokenizer_json_tokens(const fsdp_tokenizer_json *file, fsdp_take_token take, void *context,
                                       fsdp_error *err);

typedef struct fsdp_file_merge {
    const char *text;          /* both parts, without a space between */
    size_t first_size, size;   /* of the first part, and of both */
} fsdp_file_merge;
typedef fsdp_status (*fsdp_take_merge)(void *context, const fsdp_json *json, const fsdp_file_merge *merge,
                                       fsdp_error *err);
fsdp_status fsdp_tokenizer_json_merges(const fsdp_tokenizer_json *file, fsdp_take_merge take, void *context,
                                       fsdp_error *err);

typedef struct fsdp_added_token {
    const char *text;
    size_t size;
    int64_t id;                /* -1: the file gives none */
    bool single_word;          /* not next to a word's character */
    bool lstrip, rstrip;       /* takes the white space before or after it along */
    bool normalized;           /* looked for in normalized text */
    bool special;
} fsdp_added_token;
typedef fsdp_status (*fsdp_take_added)(void *context, const fsdp_json *json, const fsdp_added_token *added,
                                       fsdp_error *err);
fsdp_status fsdp_tokenizer_json_added(const fsdp_tokenizer_json *file, fsdp_take_added take, void *context,
                                      fsdp_error *err);
/* Reads one such object, as tokenizer_config.json has them, too. Its text replaces the one in `text`, which
 * the caller releases. */
fsdp_status fsdp_read_added_token(fsdp_json *json, fsdp_text *text, fsdp_added_token *added_out,
                                  fsdp_error *err);

/* --- how text is treated -------------------------------------------------------------------------- */

/* The regular expressions that cut text into words. */
typedef enum fsdp_word_pattern {
    FSDP_WORDS_WHOLE,          /* none: nothing is cut */
    FSDP_WORDS_GPT2, FSDP_WORDS_LLAMA3, FSDP_WORDS_QWEN2
} fsdp_word_pattern;
/* Finds the pattern by its exact text; FSDP_WORDS_WHOLE when it is not one of these. */
fsdp_word_pattern fsdp_word_pattern_of(const char *text, size_t size);

enum { FSDP_SPLIT_STEPS = 8, FSDP_TEMPLATE_IDS = 64 };

/* One step of the pre-tokenizer: cuts each piece that the step before left. */
typedef struct fsdp_split_step {
    fsdp_word_pattern pattern;
    bool adds_space;           /* before a piece that begins with none */
} fsdp_split_step;

/* Special tokens of a template, on one side of the text. */
typedef struct fsdp_template_ids {
    int64_t ids[FSDP_TEMPLATE_IDS];
    int count;
} fsdp_template_ids;

typedef struct fsdp_text_rules {
    bool normalizes;           /* to normal form C */
    fsdp_split_step steps[FSDP_SPLIT_STEPS];
    int step_count;            /* the last one is ByteLevel */
    fsdp_template_ids before, after; /* of the template, around the text; not checked: any numbers */
} fsdp_text_rules;

/* Reads the rules for text. FSDP_ERR_USAGE, with its name: a part is not one of byte-level BPE as GPT-2,
 * Llama 3 and Qwen2 use it. */
fsdp_status fsdp_tokenizer_json_rules(const fsdp_tokenizer_json *file, fsdp_text_rules *rules_out,
                                     fsdp_error *err);

/* How a tokenizer of the model Unigram treats text, where that is what SentencePiece can do, too. */
typedef struct fsdp_unigram_rules {
    void *charsmap;            /* replacements of characters, in fresh memory; NULL: none */
    size_t charsmap_size;
    bool cuts_words;           /* no token is of several words */
    fsdp_template_ids before, after; /* as above */
} fsdp_unigram_rules;

/* Reads them. Spaces in a row are one, none are at the ends, and text gets one before it. FSDP_ERR_USAGE,
 * with its name: a part does something else. The caller frees charsmap, also after a failure. */
fsdp_status fsdp_tokenizer_json_unigram(const fsdp_tokenizer_json *file, fsdp_unigram_rules *rules_out,
                                       fsdp_error *err);

/* How a WordPiece tokenizer treats text, which it cuts as BERT does. */
typedef struct fsdp_wordpiece_rules {
    bool lowercase;
    int strips_accents;        /* 1, 0; -1: where it lowercases */
    int64_t before, after;     /* the special token on either side of a text; not checked: any numbers */
    char unknown[FSDP_PART_TYPE];      /* the token of a word that no tokens make */
} fsdp_wordpiece_rules;
/* Reads them. FSDP_ERR_USAGE names a part that is not BERT's. */
fsdp_status fsdp_tokenizer_json_wordpiece(const fsdp_tokenizer_json *file, fsdp_wordpiece_rules *rules_out,
                                          fsdp_error *err);

#endif

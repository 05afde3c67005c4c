/*
 * The vocabulary of a tokenizer on its way into a GGUF file: gguf_tokenizer.c fills it from tokenizer.json,
 * or gguf_sentencepiece.c from tokenizer.model, and fsdp_gguf_vocab_pairs makes tokenizer.ggml.* of it.
 */
#ifndef FSDP_GGUF_VOCAB_H
#define FSDP_GGUF_VOCAB_H

#include "base/core/mem.h"
#include "base/data/name_table.h"
#include "formats/tokenizer_json.h"
#include "statedict/gguf_model/gguf_values.h"
#include <fsdp/checkpoint.h>

/* NO_SCORE: of a token that no merge makes; those of merges are above it. */
enum { FSDP_GGUF_TOKENS_MOST = 4 << 20, FSDP_GGUF_NO_SCORE = -1000000 };

/* Bytes of a token, and of a merge, in all lists and copies that are made of it. */
enum { FSDP_GGUF_TOKEN_ROOM = 512, FSDP_GGUF_MERGE_ROOM = 256, FSDP_GGUF_MEMORY_BESIDE = 32 << 20 };

/* Types of tokens, as llama.cpp numbers them. */
typedef enum fsdp_gguf_token_type {
    FSDP_GGUF_NORMAL = 1, FSDP_GGUF_UNKNOWN = 2, FSDP_GGUF_CONTROL = 3, FSDP_GGUF_USER_DEFINED = 4,
    FSDP_GGUF_UNUSED = 5, FSDP_GGUF_BYTE = 6
} fsdp_gguf_token_type;

typedef struct fsdp_gguf_token {
    char *text;                /* NULL: no token has this number */
    size_t size;
    double score;
    fsdp_gguf_token_type type;
} fsdp_gguf_token;

typedef enum fsdp_gguf_special {
    FSDP_GGUF_BOS, FSDP_GGUF_EOS, FSDP_GGUF_UNK, FSDP_GGUF_PAD, FSDP_GGUF_SEP,
    FSDP_GGUF_CLS, FSDP_GGUF_MASK,     /* of WordPiece */
    FSDP_GGUF_SPECIALS
} fsdp_gguf_special;

/* What llama.cpp computes for the model Unigram, as SentencePiece does. */
typedef struct fsdp_gguf_unigram {
    bool is_used;              /* the tokens are those of such a model */
    bool adds_space, merges_spaces;
    const char *charsmap;      /* replacements of characters, in the arena; NULL: none */
    size_t charsmap_size;
    bool cuts_words;           /* no token is of several words, as llama.cpp does not know */
    bool has_template;         /* a tokenizer.json says which tokens are around the text: */
    fsdp_template_ids before, after;
} fsdp_gguf_unigram;

/* What tokenizer_config.json says of a WordPiece tokenizer, in the order of its members there. */
typedef enum fsdp_gguf_word_rule {
    FSDP_GGUF_LOWERCASE, FSDP_GGUF_STRIPS_ACCENTS, FSDP_GGUF_CUTS_CHINESE, FSDP_GGUF_WORD_RULES
} fsdp_gguf_word_rule;
#define FSDP_GGUF_WORDPIECE "bert"     /* tokenizer.ggml.model */
#define FSDP_GGUF_WORD_SIGN "\xE2\x96\x81"       /* U+2581, where a word begins; of Unigram, too */
#define FSDP_GGUF_CONTINUATION "##"    /* before one that continues a word, in tokenizer.json */
#define FSDP_GGUF_LOWERCASE_KEY "tokenizer.ggml.normalizer.lowercase"
#define FSDP_GGUF_STRIPS_KEY "tokenizer.ggml.normalizer.strip_accents"

typedef struct fsdp_gguf_vocab {
    const char *path;          /* of the file that is read, for messages */
    fsdp_arena arena;
    fsdp_text scratch;         /* of the token that is read */
    fsdp_name_table ids;       /* of tokens */
    fsdp_gguf_token *tokens;
    size_t count, capacity;
    char **merges;
    size_t merge_count, merge_capacity;
    int64_t memory;            /* that tokens may take (FSDP_GGUF_TOKEN_ROOM) */
    int64_t most;              /* tokens have lower numbers: the files that were read bound them */
    fsdp_token_model family;   /* that llama.cpp has for models of this family */
    int64_t rows;              /* tokens that config.json says the model has; below 1: it does not say */
    bool is_unigram, has_bytes; /* of tokenizer.json: the model "Unigram"; tokens <0x00> for bytes */
    bool is_sentencepiece;     /* of tokenizer.model: its tokens have their types and scores */
    bool is_wordpiece;         /* of tokenizer.json or of vocab.txt, which has no rules: is_word_list */
    bool is_word_list;
    fsdp_wordpiece_rules words;
    bool is_tiktoken;          /* tokenizer.model is of another kind, which was not read */
    int space_prefix;          /* whether text gets a space before it; -1: as llama.cpp does without a word */
    fsdp_gguf_unigram unigram;
    int64_t ids_of[FSDP_GGUF_SPECIALS];        /* that tokenizer_config.json names; -1: none */
    int64_t own_ids[FSDP_GGUF_SPECIALS];       /* that the file of the tokens names itself; -1: none */
} fsdp_gguf_vocab;

void fsdp_gguf_vocab_init(fsdp_gguf_vocab *vocab, int64_t rows);
void fsdp_gguf_vocab_release(fsdp_gguf_vocab *vocab);

/* Adds a merge, after all tokens. FSDP_ERR_LIMIT: it takes more memory than the tokens leave. */
fsdp_status fsdp_gguf_vocab_add_merge(fsdp_gguf_vocab *vocab, const fsdp_file_merge *merge, fsdp_error *err);
/* Gives the token of this number the score and type of `like`, and this text (copied) unless it has one. */
fsdp_status fsdp_gguf_vocab_set(fsdp_gguf_vocab *vocab, int64_t id, const char *text, size_t size,
                                const fsdp_gguf_token *like, fsdp_error *err);

/* Keeps a copy of the replacements of characters. FSDP_ERR_DAMAGED: llama.cpp does not load them. */
fsdp_status fsdp_gguf_take_charsmap(fsdp_gguf_vocab *vocab, const void *data, size_t size, fsdp_error *err);

/* "<0x0A>" */
bool fsdp_gguf_is_byte(const char *text, size_t size);

/* Adds tokenizer.ggml.* to out. Rows that have no token get one of the type UNUSED. */
fsdp_status fsdp_gguf_vocab_pairs(fsdp_gguf_vocab *vocab, const fsdp_gguf_tokens *tokens,
                                  fsdp_named_values *out, fsdp_error *err);

/* --- gguf_sentencepiece.c --- */

/* Takes the pieces of a tokenizer.model, and none of one of tiktoken. FSDP_ERR_USAGE: llama.cpp does not run
 * such a model. */
fsdp_status fsdp_gguf_take_sentencepiece(fsdp_gguf_vocab *vocab, const char *data, size_t size,
                                         fsdp_error *err);
/* Takes a token that another file adds to a tokenizer.model, or puts in place of one of its pieces. A token
 * after the rows of the model is left out, as by llama.cpp's converter. */
fsdp_status fsdp_gguf_add_to_sentencepiece(fsdp_gguf_vocab *vocab, int64_t id, const char *text, size_t size,
                                           bool is_special, fsdp_error *err);

#endif

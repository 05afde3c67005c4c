/* Words of the vocabularies of GGUF files: gguf_tokenizer.c makes them, and gguf_files.c reads them. */
#ifndef FSDP_GGUF_VOCAB_H
#define FSDP_GGUF_VOCAB_H

#include "statedict/gguf_model/gguf_values.h"

/* Types of tokens, as llama.cpp numbers them. */
typedef enum fsdp_gguf_token_type {
    FSDP_GGUF_NORMAL = 1, FSDP_GGUF_UNKNOWN = 2, FSDP_GGUF_CONTROL = 3, FSDP_GGUF_USER_DEFINED = 4,
    FSDP_GGUF_UNUSED = 5, FSDP_GGUF_BYTE = 6
} fsdp_gguf_token_type;

typedef enum fsdp_gguf_special {
    FSDP_GGUF_BOS, FSDP_GGUF_EOS, FSDP_GGUF_UNK, FSDP_GGUF_PAD, FSDP_GGUF_SEP,
    FSDP_GGUF_CLS, FSDP_GGUF_MASK,     /* of WordPiece */
    FSDP_GGUF_SPECIALS
} fsdp_gguf_special;

#define FSDP_GGUF_WORDPIECE "bert"     /* tokenizer.ggml.model */
#define FSDP_GGUF_WORD_SIGN "\xE2\x96\x81"       /* U+2581, where a word begins; of Unigram, too */
#define FSDP_GGUF_CONTINUATION "##"    /* before one that continues a word, in tokenizer.json */
#define FSDP_GGUF_LOWERCASE_KEY "tokenizer.ggml.normalizer.lowercase"
#define FSDP_GGUF_STRIPS_KEY "tokenizer.ggml.normalizer.strip_accents"

#endif

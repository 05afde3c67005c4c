/*
 * The tokens of a vocabulary, by their bytes and by their ids. ByteLevel spells each byte as a printable
 * character; a token of such characters alone is kept as the bytes that it spells, any other one as it is
 * written (raw).
 */
#ifndef FSDP_VOCAB_H
#define FSDP_VOCAB_H

#include "base/core/mem.h"
#include "base/data/name_table.h"

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp_token {
    const char *data;
    uint32_t size, id;
    bool is_raw;
    bool is_added;             /* one of the added tokens, whether the model has it or not */
    bool is_special;           /* left out when text is decoded, on request */
} fsdp_token;

/* Zero-initialise; release when done. */
typedef struct fsdp_vocab {
    fsdp_token *tokens;
    size_t count, capacity;
    size_t model_count;        /* the model's come first; later ones are not words of it */
    fsdp_name_table spelled;   /* indices of tokens by the bytes that they spell */
    fsdp_name_table raw;       /* indices of raw tokens */
    uint32_t *by_id;           /* indices of tokens in the order of ids, once sorted */
    fsdp_arena arena;
} fsdp_vocab;

void fsdp_vocab_release(fsdp_vocab *vocab);

/* Ids are below this, which keeps pairs of them and their ranks in 64 bits. */
#define FSDP_TOKEN_ID_LIMIT (UINT32_C(1) << 31)

/* Tokens as a tokenizer.json writes them. *added_out is false when there is one already. */
fsdp_status fsdp_vocab_add(fsdp_vocab *vocab, const char *text, size_t size, uint32_t id,
                           bool *added_out, fsdp_error *err);
/* The token that is written so, NULL when there is none. */
fsdp_token *fsdp_vocab_find(const fsdp_vocab *vocab, const char *text, size_t size);
/* The token of the model that stands for these bytes. */
const fsdp_token *fsdp_vocab_find_bytes(const fsdp_vocab *vocab, const char *data, size_t size);

/* Orders the tokens by id. *twice_out is a token whose id another one (before_out) has, NULL without one. */
fsdp_status fsdp_vocab_sort(fsdp_vocab *vocab, const fsdp_token **twice_out,
                            const fsdp_token **before_out, fsdp_error *err);
/* After fsdp_vocab_sort; NULL when no token has this id. */
const fsdp_token *fsdp_vocab_at(const fsdp_vocab *vocab, uint32_t id);
/* The highest id + 1; after fsdp_vocab_sort. */
int64_t fsdp_vocab_end(const fsdp_vocab *vocab);

/* The character by which ByteLevel spells a byte. */
uint32_t fsdp_alphabet_letter(uint8_t byte);

#endif

/*
 * Finds the tokens of a vocabulary by their bytes and by their ids. ByteLevel spells each byte as a printable
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

/* The character by which ByteLevel spells a byte. */
uint32_t fsdp_alphabet_letter(uint8_t byte);

#endif

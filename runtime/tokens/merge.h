/* Byte pair encoding: merges the bytes of a word to tokens. */
#ifndef FSDP_MERGE_H
#define FSDP_MERGE_H

#include "runtime/tokens/pair_table.h"
#include "runtime/tokens/tokenizer.h"
#include "runtime/tokens/vocab.h"

/* The model of a tokenizer; constant while words are merged. */
typedef struct fsdp_bpe {
    fsdp_vocab vocab;
    fsdp_pair_table merges;    /* two ids -> rank << 32 | id of both together */
    int64_t byte_ids[256];     /* -1: no token is this byte */
    bool ignore_merges;        /* a word that is a token needs no merges */
} fsdp_bpe;

/* Memory of one caller, reused from word to word. Zero-initialise; release when done. */
typedef struct fsdp_merging {
    struct fsdp_symbol *symbols;
    uint64_t *heap;
    size_t symbol_capacity, heap_capacity, heap_count;
    struct fsdp_word *words;   /* words seen lately; NULL: none are kept */
    size_t word_mask;
} fsdp_merging;

/* Words of long texts repeat: keeps the ids of some. Without memory for it nothing is kept. */
void fsdp_merging_begin(fsdp_merging *merging, size_t text_size);
void fsdp_merging_release(fsdp_merging *merging);

/* Appends the ids of a word of at least one byte. A byte that no token is: FSDP_ERR_USAGE. */
fsdp_status fsdp_bpe_add_word(const fsdp_bpe *bpe, fsdp_merging *merging, const char *word, size_t size,
                              fsdp_ids *ids, fsdp_error *err);

#endif

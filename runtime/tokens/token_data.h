/*
 * The data of a training: files of text or token ids, as sequences in an order.
 *
 * Data is a text file, a folder of text files (read recursively in the order of their paths; hidden names are
 * left out), or token files of llm.c (.bin: 2 or 4 bytes a token), one, a folder, or a pattern as
 * "dir/train_*.bin". Text must be UTF-8. It is encoded once, file by file, into memory; between two files
 * stands the tokenizer's end-of-text id, where it has one. Token files are read as they are needed, and
 * follow each other as they are.
 *
 * The tokens of all files make one row. Sequence i holds length + 1 of them from i * length on: inputs and
 * their targets, one token in common with the next. The tokens that are left at the end belong to no
 * sequence. Validation has the last 5 % of the row, or data of its own.
 *
 * In the order of an epoch, number k is one of the sequences: with shuffling a permutation that depends on
 * seed and epoch alone, else sequence k. So the world's size changes nothing.
 *
 * All calls are local. An opened object is constant: any number of threads may read.
 */
#ifndef FSDP_TOKEN_DATA_H
#define FSDP_TOKEN_DATA_H

#include "runtime/tokens/tokenizer.h"

#include <fsdp/value.h>

typedef struct fsdp_token_data fsdp_token_data;

typedef struct fsdp_token_options {
    const char *path;
    const char *val;           /* NULL: the last 5 % */
    const fsdp_tokenizer *tokenizer;   /* of text; borrowed during the open call */
    int64_t vocab;             /* ids are below this; 0: the tokenizer's */
    int64_t length;            /* of the inputs; a sequence has one id more */
    bool in_order;             /* sequences are not shuffled */
    uint64_t seed;             /* of the order */
} fsdp_token_options;

typedef enum fsdp_token_part { FSDP_TOKENS_TRAIN, FSDP_TOKENS_VAL } fsdp_token_part;

/* Empty data, less than one sequence for training, text that is not UTF-8 and ids beyond the vocabulary are
 * FSDP_ERR_DAMAGED, with file and position. */
fsdp_status fsdp_token_data_open(const fsdp_token_options *options, fsdp_token_data **data_out,
                                 fsdp_error *err);
void fsdp_token_data_close(fsdp_token_data *data);

/* Sequences of a part. 0 for validation when the last 5 % are less than one sequence. */
int64_t fsdp_token_data_count(const fsdp_token_data *data, fsdp_token_part part);
/* All tokens of a part, those included that belong to no sequence. */
int64_t fsdp_token_data_tokens(const fsdp_token_data *data, fsdp_token_part part);

/* Number k of an epoch, length + 1 ids. Validation is always in order, and has one epoch. */
fsdp_status fsdp_token_data_read(const fsdp_token_data *data, fsdp_token_part part, uint64_t epoch, int64_t k,
                                 int64_t *ids, fsdp_error *err);

/*
 * The identity of the data, for a checkpoint: {"train": [{"name", "size", "xxh3"}, ...], "val": a list as
 * well, or null for the last 5 %}. Names are those within the folder that was given; hashes are XXH3-128 in
 * hex. Reads every token file once: in a collective program one rank calls it.
 */
fsdp_status fsdp_token_data_identity(const fsdp_token_data *data, fsdp_value *value_out, fsdp_error *err);

#endif

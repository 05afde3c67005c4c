/*
 * Tokenizers: text to token ids and back, with the ids that the `tokenizers` library gives.
 *
 * The room runtime/tokens turns text and token files into sequences of ids for training. In come paths, the
 * text of a tokenizer.json, and text; out come ids, sequences in an order that depends on seed, epoch and
 * number alone (token_data.h), and errors that name file, part and position. Trainers and tools call it; it
 * calls base, the hash of kernels and the reader of tokenizer.json, and knows no ranks and no models. The
 * files, from the bottom:
 *
 *     unicode.c       classes of code points, normal form C; unicode_tables.h is made by a script
 *     pair_table.c    pairs of numbers -> number, for merges and compositions
 *     split.c         scanners of the patterns that cut text into words
 *     tokenizer.c     tokenizer.json, as formats/tokenizer_json.h reads it -> tokenizer: its tokens by
 *                     bytes and by ids, its merges, its added tokens; encodes, decodes
 *     tokenize_lines.c  lines of JSON in and out
 *     token_data.c    the files of a data path, their tokens, sequences and their order
 *
 * Supported is byte-level BPE: the model BPE; the pre-tokenizer ByteLevel, alone or after Split with the
 * patterns of GPT-2, Llama 3 or Qwen2; the normalizer NFC or none; the post-processors ByteLevel and
 * TemplateProcessing; the decoder ByteLevel; added tokens with all their options. Any other part is
 * FSDP_ERR_USAGE with its name. Truncation and padding are ignored, as transformers does.
 *
 * A tokenizer is constant once it is open: any number of threads may encode and decode with it.
 */
#ifndef FSDP_TOKENIZER_H
#define FSDP_TOKENIZER_H

#include "base/text.h"

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp_tokenizer fsdp_tokenizer;

/* Token ids that grow. Zero-initialise; release when done. */
typedef struct fsdp_ids {
    int64_t *ids;
    size_t count, capacity;
} fsdp_ids;
void fsdp_ids_release(fsdp_ids *ids);
fsdp_status fsdp_ids_add(fsdp_ids *ids, int64_t id, fsdp_error *err);

/* path: "bytes" (a token per byte, its id is the byte), a tokenizer.json, or a directory that holds one. */
fsdp_status fsdp_tokenizer_open(const char *path, fsdp_tokenizer **tokenizer_out, fsdp_error *err);
/* From the text of a tokenizer.json, as a checkpoint holds it, or the text "bytes". origin is for
 * messages. */
fsdp_status fsdp_tokenizer_parse(const char *text, size_t size, const char *origin,
                                 fsdp_tokenizer **tokenizer_out, fsdp_error *err);
void fsdp_tokenizer_free(fsdp_tokenizer *tokenizer);

/* The highest id + 1. */
int64_t fsdp_tokenizer_vocab(const fsdp_tokenizer *tokenizer);
/* The text that fsdp_tokenizer_parse reads back: that of the tokenizer.json, or "bytes". Borrowed. */
const char *fsdp_tokenizer_text(const fsdp_tokenizer *tokenizer, size_t *size_out);
/* The id of the special token that ends a text ("<|endoftext|>", "<|end_of_text|>", "</s>"), -1 without
 * one. */
int64_t fsdp_tokenizer_end_of_text(const fsdp_tokenizer *tokenizer);

/*
 * Appends to *ids the ids of the text, which may hold NUL and must be UTF-8 unless the tokenizer is "bytes":
 * else FSDP_ERR_DAMAGED with the byte's position. Special tokens that stand in the text are recognised.
 * with_special adds those of the template. After a failure *ids is as it was.
 */
fsdp_status fsdp_tokenizer_encode(const fsdp_tokenizer *tokenizer, const char *text, size_t size,
                                  bool with_special, fsdp_ids *ids, fsdp_error *err);

/*
 * Appends to *text the text of the ids; bytes that are not UTF-8 become U+FFFD. An id in [0, vocab) that no
 * token has gives no text; one beyond is FSDP_ERR_USAGE. skip_special leaves special tokens out.
 */
fsdp_status fsdp_tokenizer_decode(const fsdp_tokenizer *tokenizer, const int64_t *ids, size_t count,
                                  bool skip_special, fsdp_text *text, fsdp_error *err);

/* Appends to *text a tokenizer.json whose ids are those of "bytes", for programs that read nothing else.
 * Whether memory lacked is in text->failed. */
void fsdp_tokenizer_add_bytes_json(fsdp_text *text);

#endif

/*
 * Room tokenizer: tokenizer.model of SentencePiece, a ModelProto of its sentencepiece_model.proto. It is read
 * without a library of Protocol Buffers. In comes the whole file, out come its pieces; gguf_tokenizer.c
 * makes the tokens of GGUF of them. Files that SentencePiece itself does not load are FSDP_ERR_DAMAGED.
 */
#ifndef FSDP_SENTENCEPIECE_H
#define FSDP_SENTENCEPIECE_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The types of pieces by their numbers in the file, which are those of llama.cpp's tokens. */
typedef enum fsdp_piece_type {
    FSDP_PIECE_NORMAL = 1, FSDP_PIECE_UNKNOWN, FSDP_PIECE_CONTROL, FSDP_PIECE_USER_DEFINED, FSDP_PIECE_UNUSED,
    FSDP_PIECE_BYTE
} fsdp_piece_type;

typedef enum fsdp_piece_model {
    FSDP_PIECE_UNIGRAM = 1, FSDP_PIECE_BPE, FSDP_PIECE_WORD, FSDP_PIECE_CHAR
} fsdp_piece_model;

typedef struct fsdp_piece {
    const char *text;          /* UTF-8, in the bytes of the file */
    size_t size;               /* at least 1 */
    float score;               /* finite */
    fsdp_piece_type type;
} fsdp_piece;

typedef struct fsdp_sentencepiece {
    fsdp_piece *pieces;        /* the number of a piece is its place */
    size_t count, capacity;
    fsdp_piece_model model;
    int64_t unk, bos, eos, pad; /* numbers of pieces; -1: none */
    bool adds_space;           /* text gets a space before it (add_dummy_prefix) */
    bool merges_spaces;        /* spaces in a row are one, and none at the ends (remove_extra_whitespaces) */
    bool keeps_spaces;         /* spaces stay as they are in pieces (escape_whitespaces is false) */
    bool ends_words;           /* the sign for a space ends pieces (treat_whitespace_as_suffix) */
    const char *charsmap;      /* replacements of characters, in the bytes of the file; NULL: none */
    size_t charsmap_size;
} fsdp_sentencepiece;

/* Reads the file's bytes; path is for messages. More than `most` pieces are FSDP_ERR_LIMIT. The
 * caller releases *out, also after a failure; data must live as long. */
fsdp_status fsdp_sentencepiece_read(const char *data, size_t size, const char *path, size_t most,
                                    fsdp_sentencepiece *out, fsdp_error *err);
void fsdp_sentencepiece_release(fsdp_sentencepiece *model);

/* Returns true for the other kind of tokenizer.model, which Llama 3 has: a text of lines, each with a token
 * of tiktoken in base64 and its number. */
bool fsdp_sentencepiece_is_tiktoken(const char *data, size_t size);

#endif

/* The files of a data path, and the tokens of each. */
#ifndef FSDP_TOKEN_FILES_H
#define FSDP_TOKEN_FILES_H

#include "base/core/mem.h"
#include "kernels/kernels.h"
#include "runtime/tokens/tokenizer.h"

typedef struct fsdp_token_file {
    const char *path;
    const char *name;          /* within the folder that was given */
    int64_t size;              /* bytes */
    int64_t first, count;      /* its tokens among all */
    int width;                 /* bytes of a token in a .bin file of llm.c; 0: text */
    fsdp_hash hash;            /* of a text file */
} fsdp_token_file;

/* All files of a path, in the order of their paths. Zero-initialise; release when done. */
typedef struct fsdp_token_files {
    fsdp_token_file *items;
    size_t count, capacity;
    int64_t tokens;            /* of all files */
    bool are_bin;
    int width;                 /* bytes of a token in memory, for text */
    uint8_t *memory;           /* the tokens of text files */
    size_t memory_capacity;
    fsdp_arena arena;
} fsdp_token_files;

void fsdp_token_files_release(fsdp_token_files *files);

/* A file, a folder with all in it (hidden names are left out), or files whose last element matches a
 * pattern of '*' and '?'. Their sizes and kinds are known afterwards, and the counts of .bin files. */
fsdp_status fsdp_token_files_find(fsdp_token_files *files, const char *path, fsdp_error *err);

/* Reads and encodes text files; ids are below vocab. Nothing is read of .bin files. */
fsdp_status fsdp_token_files_encode(fsdp_token_files *files, const fsdp_tokenizer *tokenizer, int64_t vocab,
                                    fsdp_error *err);

/* Tokens [at, at + count) of all files, which must be there. An id at or beyond vocab is FSDP_ERR_DAMAGED. */
fsdp_status fsdp_token_files_read(const fsdp_token_files *files, int64_t at, int64_t count, int64_t vocab,
                                  int64_t *ids, fsdp_error *err);

/* The XXH3-128 of a file's bytes; .bin files are read for it. */
fsdp_status fsdp_token_file_hash(const fsdp_token_file *file, fsdp_hash *hash_out, fsdp_error *err);

#endif

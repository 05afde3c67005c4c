/*
 * Names that a format cannot spell stand percent-escaped in its files, and beside them a JSON object
 * {"escaped": "true name"}: "fsdp.names" in the metadata of safetensors, the array "%names" of an .npz.
 */
#ifndef FSDP_SPELLING_H
#define FSDP_SPELLING_H

#include "base/core/mem.h"
#include "base/data/name_table.h"

/* Zero-initialise; release when done, also after a failure. */
typedef struct fsdp_spelling {
    fsdp_arena arena;
    fsdp_name_table table;     /* escaped -> number */
    struct { const char *name; size_t size; } *names;
    size_t count, room;
} fsdp_spelling;

fsdp_status fsdp_spelling_parse(fsdp_spelling *spelling, const char *path, const char *text, size_t size,
                                fsdp_error *err);
void fsdp_spelling_release(fsdp_spelling *spelling);

/* The true name, valid until release; a name that was not escaped stays as it is. */
void fsdp_spelling_resolve(const fsdp_spelling *spelling, const char **name, size_t *size);

#endif

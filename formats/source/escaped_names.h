/*
 * Names that a format cannot spell stand percent-escaped in its files, and beside them a JSON object
 * {"escaped": "true name"}: "fsdp.names" in the metadata of safetensors, the array "%names" of an .npz.
 */
#ifndef FSDP_ESCAPED_NAMES_H
#define FSDP_ESCAPED_NAMES_H

#include "base/core/mem.h"
#include "base/data/name_table.h"

/* Zero-initialise; release when done, also after a failure. */
typedef struct fsdp_escaped_names {
    fsdp_arena arena;
    fsdp_name_table table;     /* escaped -> number */
    struct { const char *name; size_t size; } *names;
    size_t count, room;
} fsdp_escaped_names;

fsdp_status fsdp_escaped_names_parse(fsdp_escaped_names *escaped_names, const char *path, const char *text,
                                     size_t size, fsdp_error *err);
void fsdp_escaped_names_release(fsdp_escaped_names *escaped_names);

/* The true name, valid until release; a name that was not escaped stays as it is. */
void fsdp_escaped_names_resolve(const fsdp_escaped_names *escaped_names, const char **name, size_t *size);

#endif

/*
 * True names of escaped ones. A name that a format cannot store is percent-escaped in its files, and a
 * JSON object {"escaped": "true name"} holds the true one: "fsdp.names" in the metadata of safetensors,
 * the array "%names" of an .npz.
 */
#ifndef FSDP_ESCAPED_NAMES_H
#define FSDP_ESCAPED_NAMES_H

#include "base/core/mem.h"
#include "base/data/name_table.h"

/* Zero-initialise; release after use, also after a failure. */
typedef struct fsdp_escaped_names {
    fsdp_arena arena;
    fsdp_name_table table;     /* escaped -> number */
    struct { const char *name; size_t size; } *names;
    size_t count, room;
} fsdp_escaped_names;

fsdp_status fsdp_escaped_names_parse(fsdp_escaped_names *escaped_names, const char *path, const char *text,
                                     size_t size, fsdp_error *err);
void fsdp_escaped_names_release(fsdp_escaped_names *escaped_names);

/* Replaces an escaped name by its true name, valid until release; other names stay as they are. */
void fsdp_escaped_names_resolve(const fsdp_escaped_names *escaped_names, const char **name, size_t *size);

#endif

/*
 * Structures of a zip archive as bytes, for stored members. Everything is as Python's zipfile writes it,
 * with a fixed date; zip64 fields stand only where they are needed.
 */
#ifndef FSDP_ZIP_EMIT_H
#define FSDP_ZIP_EMIT_H

#include "base/text.h"
#include <stdint.h>

typedef struct fsdp_zip_member {
    const char *name;
    size_t name_size;          /* at most 65535 */
    int64_t header;            /* where its local header stands */
    int64_t size;
    uint32_t crc;
} fsdp_zip_member;

enum { FSDP_ZIP_NAME_AT = 30 };    /* where the name stands in a local header */

/* The local header; its extra field is padded so that what follows begins at a multiple of alignment. */
void fsdp_zip_emit_local(fsdp_text *out, const fsdp_zip_member *member, int alignment);
void fsdp_zip_emit_central(fsdp_text *out, const fsdp_zip_member *member);
/* The end of an archive whose directory stands at `offset`. */
void fsdp_zip_emit_end(fsdp_text *out, int64_t count, int64_t offset, int64_t size);

#endif

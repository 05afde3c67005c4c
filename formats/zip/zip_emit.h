/*
 * Structures of a zip archive as bytes, for stored members. The bytes equal those of Python's zipfile with
 * a fixed date; zip64 fields are written only where they are needed.
 */
#ifndef FSDP_ZIP_EMIT_H
#define FSDP_ZIP_EMIT_H

#include "base/text.h"
#include <stdint.h>

typedef struct fsdp_zip_member {
    const char *name;
    size_t name_size;          /* at most 65535 */
    int64_t header;            /* offset of its local header */
    int64_t size;
    uint32_t crc;
} fsdp_zip_member;

enum { FSDP_ZIP_NAME_AT = 30 };    /* offset of the name in a local header */

/* Adds the local header. Its extra field is padded so that the data begins at a multiple of alignment. */
void fsdp_zip_emit_local(fsdp_text *out, const fsdp_zip_member *member, int alignment);
void fsdp_zip_emit_central(fsdp_text *out, const fsdp_zip_member *member);
/* Adds the end records of an archive whose directory begins at `offset`. */
void fsdp_zip_emit_end(fsdp_text *out, int64_t count, int64_t offset, int64_t size);

#endif

/*
 * Zip archives as torch.save writes them, the mirror of zip.h: stored entries, bytes at multiples of 64,
 * checksums after the bytes. Every offset is known before the first byte is written. The offsets follow
 * torch's own rules, because torch computes them when it reads (".format_version" 1).
 *
 * These functions compute offsets and bytes; the caller writes them, in any order:
 *
 *   place every record -> header, bytes, trailer of each -> directory
 */
#ifndef FSDP_ZIP_WRITE_H
#define FSDP_ZIP_WRITE_H

#include <fsdp/status.h>
#include "base/text.h"
#include <stdbool.h>
#include <stdint.h>

enum { FSDP_ZIP_ALIGNMENT = 64, FSDP_ZIP_NAME = 40 };

typedef struct fsdp_zip_record {
    char name[FSDP_ZIP_NAME];
    int64_t size;              /* the caller sets name and size */
    int64_t header, data;      /* offsets in the archive */
    uint32_t crc;              /* known before the trailer is made; 0 for a record of no bytes */
} fsdp_zip_record;

/* Places the record at *place and advances *place after its trailer. FSDP_ERR_LIMIT beyond 2^62 bytes. */
FSDP_CHECKED fsdp_status fsdp_zip_place(fsdp_zip_record *record, int64_t *place, fsdp_error *err);

/* Adds the bytes in front of the data: from header to data. */
void fsdp_zip_add_header(fsdp_text *text, const fsdp_zip_record *record);
/* Adds the bytes after the data; a record of no bytes has none. */
void fsdp_zip_add_trailer(fsdp_text *text, const fsdp_zip_record *record);
/* Adds a small record whole. */
void fsdp_zip_add_record(fsdp_text *text, const fsdp_zip_record *record, const void *data);

/* The offset at which the trailer of a placed record ends. */
int64_t fsdp_zip_record_end(const fsdp_zip_record *record);

/* Adds the directory and end records of an archive whose records end at `place`. */
void fsdp_zip_add_directory(fsdp_text *text, const fsdp_zip_record *records, size_t count, int64_t place);
int64_t fsdp_zip_directory_size(const fsdp_zip_record *records, size_t count);

/*
 * The checksum of bytes that are written in pieces. The caller begins with 0 and XORs the result for every
 * piece once, in any order. `after` is the number of bytes that follow the piece.
 */
uint32_t fsdp_zip_crc_part(const void *data, size_t size, int64_t behind);

#endif

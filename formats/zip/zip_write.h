/*
 * Zip archives as torch.save writes them, the mirror of zip.h: entries stored as they are, their bytes at
 * multiples of 64, checksums behind the bytes. Every place is known before the first byte, and the rules for
 * places are torch's own, since it computes them, too (".format_version" 1).
 *
 * The pieces here only place and spell; writing is up to the caller, in any order:
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
    int64_t header, data;      /* where they begin in the archive */
    uint32_t crc;              /* must be known before the trailer; 0 for no bytes */
} fsdp_zip_record;

/* Puts the record at *place and moves that behind its trailer. FSDP_ERR_LIMIT beyond 2^62 bytes. */
FSDP_CHECKED fsdp_status fsdp_zip_place(fsdp_zip_record *record, int64_t *place, fsdp_error *err);

/* Everything before the bytes; header up to data. */
void fsdp_zip_add_header(fsdp_text *text, const fsdp_zip_record *record);
/* Everything behind them: nothing for a record of no bytes. */
void fsdp_zip_add_trailer(fsdp_text *text, const fsdp_zip_record *record);
/* A small record as a whole. */
void fsdp_zip_add_record(fsdp_text *text, const fsdp_zip_record *record, const void *data);

/* Where the trailer of a placed record ends. */
int64_t fsdp_zip_record_end(const fsdp_zip_record *record);

/* The end of an archive whose records end at `place`. */
void fsdp_zip_add_directory(fsdp_text *text, const fsdp_zip_record *records, size_t count, int64_t place);
int64_t fsdp_zip_directory_size(const fsdp_zip_record *records, size_t count);

/*
 * The checksum of bytes that are written in pieces: it begins with 0, and every piece is mixed in once with
 * XOR, in any order. `behind` is how many bytes follow the piece.
 */
uint32_t fsdp_zip_crc_part(const void *data, size_t size, int64_t behind);

#endif

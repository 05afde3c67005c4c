/*
 * Room zip: the structure of zip archives, for the formats that are built on them (torch, npy, dcp).
 *
 * In: a range of a file that may be hostile (fsdp_zip_input), or the names, sizes and checksums of members
 * to be written. Out: a checked list of entries with the offset of their bytes, or the bytes of headers,
 * trailers and directories. The room neither opens nor writes files: its callers do both.
 *
 *   zip.c         end record, central directory, local headers, names in code page 437: fsdp_zip_open;
 *                 bytes of an entry, inflated and compared with their CRC: fsdp_zip_read
 *   zip_write.c   archives laid out as torch.save does (zip_write.h)
 *   zip_emit.c    headers as Python's zipfile writes them, for .npz (zip_emit.h)
 *
 * zip_open reads the directory only; the bytes of an entry lie at `offset` as they are (stored) or as a
 * raw deflate stream. It refuses an archive in which two readers could see different things: central and
 * local headers must agree, entries must not overlap, names must be unique, the directory must lie where
 * the end record says, and there must be one end record only. torch.save, NumPy and DCP (archives inside a
 * larger file) write no others.
 *
 * Callers: npy, torch, dcp. The room calls base and, for CRC-32, kernels.
 */
#ifndef FSDP_ZIP_H
#define FSDP_ZIP_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A range of a file and the function that reads it. */
typedef struct fsdp_zip_input {
    /* Reads exactly size bytes at offset in the file (not in the range). */
    fsdp_status (*read)(void *context, void *data, size_t size, int64_t offset, fsdp_error *err);
    void *context;
    const char *path;          /* for messages; borrowed while the zip is open */
    int64_t offset, size;      /* the archive; the caller checks that the file holds it */
} fsdp_zip_input;

enum {
    FSDP_ZIP_NAMES_ARE_DATA = 1    /* names may contain ".." and "/": they are not paths (npz). Names without
                                    * the flag of UTF-8 are in code page 437, and are listed in UTF-8 */
};

typedef struct fsdp_zip_entry {
    const char *name;          /* zero-terminated after its end */
    size_t name_size;
    bool is_deflated;          /* false: stored */
    bool has_crc;              /* false: the writer computed none for any entry of the archive */
    uint32_t crc;              /* of the decoded bytes; may be 0 */
    int64_t offset;            /* of its data in the file */
    int64_t stored, size;      /* bytes in the file, and decoded */
} fsdp_zip_entry;

typedef struct fsdp_zip fsdp_zip;

/* Directories ("name/" of size 0) are not listed as entries. */
fsdp_status fsdp_zip_open(const fsdp_zip_input *input, unsigned flags, fsdp_zip **zip_out, fsdp_error *err);
void fsdp_zip_close(fsdp_zip *zip);                    /* accepts NULL */

size_t fsdp_zip_count(const fsdp_zip *zip);
/* In the order of the central directory. */
const fsdp_zip_entry *fsdp_zip_at(const fsdp_zip *zip, size_t number);
/* NULL when there is none. */
const fsdp_zip_entry *fsdp_zip_find(const fsdp_zip *zip, const char *name, size_t name_size);

/*
 * Reads a small entry whole, decodes it and checks its CRC (FSDP_ERR_DAMAGED). An entry of more than
 * max_size bytes is FSDP_ERR_LIMIT. *data_out is freed with fsdp_free and has a zero byte after its end.
 */
fsdp_status fsdp_zip_read(const fsdp_zip *zip, const fsdp_zip_entry *entry, size_t max_size, char **data_out,
                          fsdp_error *err);

#endif

/*
 * The directory of a zip archive that nobody vouches for: what torch.save and NumPy write, alone in a
 * file or at an offset of one (items of DCP). Only the directory is read here; the bytes of an entry lie
 * as they are at `offset` (stored) or are a raw deflate stream there.
 *
 * An archive is refused when two readers could see different things in it: central and local headers
 * must agree, entries must not overlap, names must be unique, the directory must lie where its end says,
 * and there is one end only.
 */
#ifndef FSDP_ZIP_H
#define FSDP_ZIP_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The bytes of a range of a file. */
typedef struct fsdp_zip_input {
    /* Exactly size bytes at offset in the file (not in the range). */
    fsdp_status (*read)(void *user, void *data, size_t size, int64_t offset, fsdp_error *err);
    void *user;
    const char *path;          /* for messages; borrowed while the zip is open */
    int64_t offset, size;      /* the range that is the archive; checked by the caller to lie in the file */
} fsdp_zip_input;

enum {
    FSDP_ZIP_NAMES_ARE_DATA = 1    /* ".." and "/" and NUL in names are no paths (npz) */
};

typedef struct fsdp_zip_entry {
    const char *name;          /* zero-terminated behind its end */
    size_t name_size;
    bool is_deflated;          /* false: stored */
    uint32_t crc;              /* of the decoded bytes; 0: not computed */
    int64_t offset;            /* of its data in the file */
    int64_t stored, size;      /* bytes in the file, and decoded */
} fsdp_zip_entry;

typedef struct fsdp_zip fsdp_zip;

/* Directories ("name/" of size 0) are no entries. */
fsdp_status fsdp_zip_open(const fsdp_zip_input *input, unsigned flags, fsdp_zip **zip_out, fsdp_error *err);
void fsdp_zip_close(fsdp_zip *zip);                    /* accepts NULL */

/* As given to open. */
const fsdp_zip_input *fsdp_zip_input_of(const fsdp_zip *zip);

size_t fsdp_zip_count(const fsdp_zip *zip);
/* In the order of the central directory. */
const fsdp_zip_entry *fsdp_zip_at(const fsdp_zip *zip, size_t number);
/* NULL when there is none. */
const fsdp_zip_entry *fsdp_zip_find(const fsdp_zip *zip, const char *name, size_t name_size);

/*
 * A small entry as a whole, decoded and its CRC checked (FSDP_ERR_DAMAGED). More than max_size bytes is
 * FSDP_ERR_LIMIT. *data_out is freed with fsdp_free and has a zero byte after its end.
 */
fsdp_status fsdp_zip_read(const fsdp_zip *zip, const fsdp_zip_entry *entry, size_t max_size, char **data_out,
                          fsdp_error *err);

/* Compares the CRC of an entry with its bytes, reading them through a small buffer; 0 needs no check. */
fsdp_status fsdp_zip_check(const fsdp_zip *zip, const fsdp_zip_entry *entry, fsdp_error *err);

#endif

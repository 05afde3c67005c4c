/*
 * The shared part of the writers of PyTorch's files, the mirror of torch_internal.h: the archive of
 * torch.save, and tensors as nodes of its pickle. A storage holds exactly one tensor, row-major.
 *
 *   leading records (the pickle, marks)   storages   closing records (version, identity, directory)
 *
 * Users: torch_write.c (a file of many storages), dcp_write.c (an archive per item).
 */
#ifndef FSDP_TORCH_EMIT_H
#define FSDP_TORCH_EMIT_H

#include "base/io/io.h"
#include "formats/pickle/pickle_write.h"
#include "formats/target.h"
#include "formats/zip/zip_write.h"

#include <stdatomic.h>

/* True for every dtype but f6 and blocks, which torch does not have. */
bool torch_holds_dtype(fsdp_dtype dtype);

enum { TORCH_LEADING = 4, TORCH_CLOSING = 2, TORCH_FIXED = TORCH_LEADING + TORCH_CLOSING };

/* Writes a tensor whose bytes are storage `key`. FSDP_ERR_USAGE for a dtype that torch does not have. */
FSDP_CHECKED fsdp_status torch_emit_tensor(fsdp_pickler *pickler, fsdp_dtype dtype, int ndim,
                                           const int64_t *shape, size_t key, fsdp_error *err);

/*
 * Computes the offsets of an archive. records has TORCH_FIXED + storages members; the caller sets the
 * sizes of those from TORCH_LEADING on, the storages. All other fields are filled in, except checksums of
 * storages.
 */
FSDP_CHECKED fsdp_status torch_place_archive(fsdp_zip_record *records, size_t storages,
                                             const fsdp_text *pickle, int64_t *size_out, fsdp_error *err);
/* Adds the archive up to the header of the first storage. */
void torch_emit_leading(fsdp_text *text, const fsdp_zip_record *records, const fsdp_text *pickle);
/* Adds the records after the last storage's trailer; checksums must be known. */
void torch_emit_closing(fsdp_text *text, fsdp_zip_record *records, size_t storages);

/* Appends a whole archive that holds a value without tensors. */
FSDP_CHECKED fsdp_status torch_emit_value(fsdp_text *text, fsdp_pickler *pickler, const fsdp_value *value,
                                          fsdp_error *err);

/* A storage that several threads write in pieces. */
typedef struct torch_part {
    _Atomic uint32_t crc;
    _Atomic int64_t left;      /* bytes not yet written */
} torch_part;

/* Adds the checksum of a piece which `behind` bytes follow; true after the last piece: crc is then
 * complete. */
bool torch_part_take(torch_part *part, const void *data, size_t size, int64_t behind);

/* A piece of a storage, and the records written with it. */
typedef struct torch_piece {
    const void *data;
    size_t size;
    int64_t offset;            /* in the file */
    fsdp_text before;          /* records in front of the storage, with its first piece */
    fsdp_text behind;          /* records after the storage, with the piece that completes it */
    int64_t end;               /* end of the storage in the file */
} torch_piece;

/* Writes the piece and its records in few calls, and releases the texts. sync: starts writeback of large
 * pieces. */
FSDP_CHECKED fsdp_status torch_write_piece(fsdp_file *file, const char *path, torch_piece *piece, bool sync,
                                           fsdp_error *err);

/* Bytes of the elements; the shape was checked before. */
int64_t torch_bytes_of(fsdp_dtype dtype, int ndim, const int64_t *shape);

/* Adds the entry's name to an error. */
fsdp_status torch_blame_entry(const fsdp_target_entry *entry, fsdp_status status, fsdp_error *err);

extern const fsdp_format_writer fsdp_torch_writer;   /* torch_write.c */

/* --- torch_write.c --- */

/* Pickles one dict of all entries of opts, nested by their paths (nesting.h); the callback emit pickles one
 * entry and is called once for each. */
FSDP_CHECKED fsdp_status torch_emit_tree(fsdp_pickler *pickler, const fsdp_target_opts *opts,
                                         fsdp_status (*emit)(void *context, size_t entry, fsdp_error *err),
                                         void *context, fsdp_error *err);

#endif

/*
 * Room npy: NumPy arrays, one .npy file or the members of an .npz.
 *
 * In: a file whose bytes may be hostile, or the tensors of a packed target. Out: the catalog of a source
 * (source.h), or files that numpy.load reads.
 *
 *   npz_read.c    the header of an array (fsdp_npy_place, fsdp_npy_parse), and the formats "npy" and "npz" as
 *                 sources
 *   npz_write.c   the formats "npy" and "npz" as packed targets (target/packed.h)
 *
 * The header is a Python dict literal, which is parsed, never evaluated:
 *
 *     "\x93NUMPY", version (two bytes), length (u16, from version 2 on u32), "{'descr': '<f4', ...}"
 *
 * Only the list of detect refers to this room. It calls zip, source and target.
 */
#ifndef FSDP_NPY_H
#define FSDP_NPY_H

#include "formats/target.h"
#include <fsdp/box.h>
#include <fsdp/dtype.h>

enum {
    FSDP_NPY_PREFIX = 12,      /* bytes that hold the length of the header */
    FSDP_NPY_LONGEST = 1 << 20
};

typedef struct fsdp_npy {
    fsdp_dtype dtype;          /* FSDP_DTYPE_NONE: no dtype of the library */
    bool is_swapped, is_fortran;
    bool has_objects;          /* a pickle follows */
    bool is_void;              /* elements of item_size bytes without a type, as |V2 */
    int64_t item_size;         /* of one element; 0 for objects */
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    char descr[120];           /* for messages, cut when it is long */
} fsdp_npy;

/* Finds the literal from the first FSDP_NPY_PREFIX bytes (fewer at the end of a file). */
fsdp_status fsdp_npy_place(const char *path, const uint8_t *prefix, size_t prefix_size, int64_t *offset_out,
                           size_t *size_out, fsdp_error *err);

fsdp_status fsdp_npy_parse(const char *path, const char *text, size_t size, fsdp_npy *npy_out,
                           fsdp_error *err);

extern const fsdp_format_writer fsdp_npz_writer, fsdp_npy_writer;    /* npz_write.c */

#endif

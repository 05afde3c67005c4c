/*
 * The header of a .npy array: a Python dict literal that is read, never run.
 *
 *     "\x93NUMPY", version (two bytes), length (u16, from version 2 on u32), "{'descr': '<f4', ...}"
 */
#ifndef FSDP_NPY_HEADER_H
#define FSDP_NPY_HEADER_H

#include <fsdp/box.h>
#include <fsdp/dtype.h>

enum {
    FSDP_NPY_PREFIX = 12,      /* bytes that tell the length of the header */
    FSDP_NPY_LONGEST = 1 << 20
};

typedef struct fsdp_npy {
    fsdp_dtype dtype;          /* FSDP_DTYPE_NONE: not one of ours */
    bool is_swapped, is_fortran;
    bool has_objects;          /* a pickle follows */
    int64_t item_size;         /* of one element; 0 when it has objects */
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    char descr[120];           /* for people, cut when it is long */
} fsdp_npy;

/* True for the six bytes that every array begins with. */
bool fsdp_npy_is_magic(const void *data, size_t size);

/* Where the literal lies, from the first FSDP_NPY_PREFIX bytes (fewer are there at the end of a file). */
fsdp_status fsdp_npy_place(const char *path, const uint8_t *prefix, size_t prefix_size, int64_t *offset_out,
                           size_t *size_out, fsdp_error *err);

fsdp_status fsdp_npy_parse(const char *path, const char *text, size_t size, fsdp_npy *npy_out,
                           fsdp_error *err);

#endif

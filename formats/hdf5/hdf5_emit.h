/*
 * Encodes structures of the HDF5 file format (File Format Specification 3.0, sections as named below) for
 * the view. libhdf5 needs 90 us for each dataset of a view, this code 1 us, and the other ranks wait while
 * the view of 40,000 tensors is written. The bytes are those of libhdf5 1.10 with the oldest format that
 * it can write; only virtual layouts need a reader of 1.10 or newer.
 *
 * All numbers are little-endian, addresses and lengths have 8 bytes. Bytes are added to an fsdp_text,
 * which remembers a failed allocation.
 */
#ifndef FSDP_HDF5_EMIT_H
#define FSDP_HDF5_EMIT_H

#include "base/text.h"
#include <stdint.h>

void fsdp_h5_put_u32(fsdp_text *out, uint32_t value);

/* Fills in a number whose value was unknown when its place was written. */
void fsdp_h5_set_u64(fsdp_text *out, size_t at, uint64_t value);

/* The checksum of HDF5's metadata (Jenkins' lookup3 with initial value 0). */
uint32_t fsdp_h5_checksum(const void *data, size_t size);

/* --- object headers, version 1 (IV.A.1.a) --- */

enum { FSDP_H5_REFERENCES_AT = 4 };   /* offset of the number of links in an object header */

/* Begins a header of `messages` messages and returns its offset. fsdp_h5_end_header fills in its size. */
size_t fsdp_h5_begin_header(fsdp_text *out, unsigned messages);
void fsdp_h5_end_header(fsdp_text *out, size_t header);

/* Each adds one message, padded. */
void fsdp_h5_put_dataspace(fsdp_text *out, int ndim, const int64_t *shape);
/* type: an encoded datatype (the body of the message). */
void fsdp_h5_put_datatype(fsdp_text *out, const void *type, size_t size);
/* All bytes 0xFF. */
void fsdp_h5_put_fill(fsdp_text *out, size_t element_size);
/* The layout of a dataset without elements. */
void fsdp_h5_put_empty_layout(fsdp_text *out);
/* Returns the offset of the heap address, which the caller fills in later. */
size_t fsdp_h5_put_virtual_layout(fsdp_text *out, uint32_t heap_object);
/* A scalar string. */
void fsdp_h5_put_string_attribute(fsdp_text *out, const char *name, const char *value);

/* --- virtual mappings (III.E, VII.B) --- */

/* A box of a dataspace; a box of the whole dataspace is encoded as "all". */
void fsdp_h5_put_selection(fsdp_text *out, int ndim, const int64_t *shape, const int64_t *lo,
                           const int64_t *len);
/* Begins the block that a virtual layout points to. The caller adds, `count` times: file name, dataset
 * name (both with a zero byte), selection in the source, selection in the dataset. */
size_t fsdp_h5_begin_mappings(fsdp_text *out, size_t count);
void fsdp_h5_end_mappings(fsdp_text *out, size_t block);

/* --- the global heap (III.E): objects 1, 2, ... one after the other --- */

enum { FSDP_H5_HEAP_HEADER = 16, FSDP_H5_HEAP_OBJECTS = 65535 };
void fsdp_h5_begin_heap(fsdp_text *out);
size_t fsdp_h5_begin_heap_object(fsdp_text *out, unsigned number);
void fsdp_h5_end_heap_object(fsdp_text *out, size_t object);
/* Fills in the size and pads the heap to the minimum size. */
void fsdp_h5_end_heap(fsdp_text *out);

/* --- the file and its root group (II.A, III.A.1, III.B, III.C, III.D) --- */

enum { FSDP_H5_SUPERBLOCK = 96 };

typedef struct fsdp_h5_symbol {
    const char *link;
    int64_t address;           /* of the object header */
    uint64_t name_at;          /* out: offset of the link name in the group's heap */
} fsdp_h5_symbol;

/*
 * Adds the root group of symbols sorted by link (strcmp), which lies at file position `at`, and makes the
 * superblock for it and for the end of the file behind it.
 */
void fsdp_h5_put_root_group(fsdp_text *out, int64_t at, fsdp_h5_symbol *symbols, size_t count,
                            fsdp_text *superblock_out);

#endif

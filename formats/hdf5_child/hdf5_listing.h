/* Checks the child's listing of a file (hdf5_protocol.h) and fills a catalog. No field of it is trusted. */
#ifndef FSDP_HDF5_LISTING_H
#define FSDP_HDF5_LISTING_H

#include "formats/source.h"

/* A tensor of the catalog, by its number there. */
typedef struct fsdp_h5_tensor {
    int64_t dataset;           /* its number in the child */
    bool is_plain;             /* its bytes are plain in the file */
    int64_t *chunk;            /* shape of its chunks; NULL: not chunked */
    int64_t chunk_bytes;
    int64_t stored;            /* bytes in the file */
} fsdp_h5_tensor;

typedef struct fsdp_h5_tensors {
    fsdp_h5_tensor *items;
    size_t count, room;
    fsdp_arena arena;
    int64_t index_offset;      /* of a native file; 0: another file */
} fsdp_h5_tensors;

void fsdp_h5_tensors_release(fsdp_h5_tensors *tensors);

/* The place of the HDF5 file: a file of the source, or a part of one. */
typedef struct fsdp_h5_place {
    int file;
    int stream;                /* FSDP_NO_STREAM: the bytes of the file as they are */
    int64_t offset, size;      /* in the file, or in the decoded stream */
} fsdp_h5_place;

/* Fills the catalog. */
fsdp_status fsdp_h5_listing_take(const char *data, size_t size, fsdp_source *source,
                                 const fsdp_h5_place *place, fsdp_h5_tensors *tensors, fsdp_error *err);

#endif

/*
 * HDF5 files as the native checkpoint needs them: libhdf5 lays out objects, our own code moves the
 * data. This is the whole interface between the project and libhdf5 for files of ours; hdf5.h is
 * included by the hdf5_*.c files of this folder only. libhdf5 calls are serialised by a lock in
 * hdf5_library.c. All bytes go through fsdp_io (hdf5_vfd.c).
 */
#ifndef FSDP_HDF5_FILE_H
#define FSDP_HDF5_FILE_H

#include "base/io/io.h"
#include <fsdp/dtype.h>
#include <fsdp/status.h>

/* A dataset to be created. Names are final link names (escaped, see native_name.c). */
typedef struct fsdp_h5_dataset {
    const char *link;
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    const int64_t *chunk;      /* NULL: contiguous; else a chunk shape, with shuffle + zstd filters */
    int64_t offset;            /* out, contiguous: where its bytes begin; -1 when it has none */
} fsdp_h5_dataset;

typedef struct fsdp_h5_file fsdp_h5_file;

/*
 * Creates PATH (exclusive) with all datasets and, when index_size > 0, the u8 dataset "%index" of
 * that size, contiguous and aligned, created last; its offset goes to *index_offset_out. Space of
 * contiguous datasets is allocated early, never filled. level goes into the zstd filter's parameters.
 * The file stays open for fsdp_h5_write_chunk until fsdp_h5_close, or fsdp_h5_discard.
 */
fsdp_status fsdp_h5_create(fsdp_io *io, const char *path, fsdp_h5_dataset *datasets, size_t count,
                           int64_t index_size, int level, fsdp_h5_file **file_out,
                           int64_t *index_offset_out, fsdp_error *err);

/* Stores one already filtered chunk; coord is the chunk's first element. Tells where it lies. */
fsdp_status fsdp_h5_write_chunk(fsdp_h5_file *file, size_t dataset, const int64_t *coord,
                                const void *frame, size_t size, int64_t *offset_out, fsdp_error *err);

/* Adds the contiguous u8 dataset "%index" to a file created with index_size 0 (compressed files,
 * whose index size is known only at the end). */
fsdp_status fsdp_h5_add_index(fsdp_h5_file *file, int64_t index_size, int64_t *index_offset_out,
                              fsdp_error *err);

/* A second name of a dataset of this file. */
fsdp_status fsdp_h5_link(fsdp_h5_file *file, const char *link, const char *target, fsdp_error *err);

/* Writes libhdf5's own metadata and closes; *size_out is the file's size. No fsync. */
fsdp_status fsdp_h5_close(fsdp_h5_file *file, int64_t *size_out, fsdp_error *err);
/* Closes without writing any more; what is left of the file is the caller's to delete. Accepts NULL. */
void fsdp_h5_discard(fsdp_h5_file *file);

/*
 * --- the view: virtual datasets over the shard files ---
 * Written without libhdf5 (hdf5_emit.h), so it takes no lock. A link that is there twice and an
 * alias of nothing are found by fsdp_h5_view_close.
 */

/* Part of a virtual dataset: a box of it is the same-sized box of a dataset in another file. */
typedef struct fsdp_h5_source {
    const char *file;          /* relative to the view's directory */
    const char *link;
    int source_ndim;
    const int64_t *source_shape;   /* whole source dataset */
    const int64_t *source_lo, *source_len;
    const int64_t *lo, *len;       /* in the virtual dataset; the same number of elements */
} fsdp_h5_source;

typedef struct fsdp_h5_view fsdp_h5_view;
fsdp_status fsdp_h5_view_create(fsdp_io *io, const char *path, fsdp_h5_view **view_out, fsdp_error *err);
/* No sources: an empty (zero-size) dataset. The fill value is all bytes 0xFF. */
fsdp_status fsdp_h5_view_add(fsdp_h5_view *view, const char *link, fsdp_dtype dtype, int ndim,
                             const int64_t *shape, const fsdp_h5_source *sources, size_t count,
                             fsdp_error *err);
/* A hard link: a second name of a dataset of this view. */
fsdp_status fsdp_h5_view_link(fsdp_h5_view *view, const char *link, const char *target, fsdp_error *err);
fsdp_status fsdp_h5_view_close(fsdp_h5_view *view, int64_t *size_out, fsdp_error *err);
void fsdp_h5_view_discard(fsdp_h5_view *view);       /* accepts NULL */

#endif

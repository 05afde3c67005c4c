/*
 * Room hdf5: HDF5 files of the native checkpoint, written through libhdf5 or byte by byte.
 *
 * In: descriptions of datasets, encoded chunks, and for a view the boxes of shard files. Out: HDF5 files
 * that any HDF5 program reads, and the offsets at which native_write.c writes raw bytes.
 *
 *   hdf5_file.c       shard files: datasets, chunks, the index dataset; below them libhdf5 in this process
 *                     (its lock, errors, property lists), its file driver on fsdp_io, and dtypes as HDF5
 *                     types
 *   hdf5_view.c       index.h5, the file of virtual datasets, written without libhdf5, structure by structure
 *   hdf5_link_name.c  tensor names as link names, and back
 *   hdf5_zstd.c       the zstd filter; hdf5_plugin.c makes a plugin of it for other programs
 *
 * Only this room and hdf5_child include hdf5.h. A lock in hdf5_file.c serialises the calls of libhdf5.
 * Callers: native; hdf5_child uses hdf5_internal.h and link names. The room calls base and kernels.
 */
#ifndef FSDP_HDF5_FILE_H
#define FSDP_HDF5_FILE_H

#include "base/io/io.h"
#include <fsdp/dtype.h>
#include <fsdp/status.h>

/* A dataset to create. Names are final link names (escaped, see hdf5_link_name.h). */
typedef struct fsdp_h5_dataset {
    const char *link;
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    const int64_t *chunk;      /* NULL: contiguous; else a chunk shape, with shuffle + zstd filters */
    int64_t offset;            /* out, contiguous: offset of its bytes; -1 when it has none */
} fsdp_h5_dataset;

typedef struct fsdp_h5_file fsdp_h5_file;

/* The objects of a new file. */
typedef struct fsdp_h5_layout {
    fsdp_h5_dataset *datasets;
    size_t count;
    int64_t index_size;        /* bytes of the u8 dataset "%index", 0: none */
    int level;                 /* parameter of the zstd filter */
} fsdp_h5_layout;

/*
 * Creates PATH (exclusive) with all datasets and, as the last one, the index: contiguous and aligned; its
 * offset goes to *index_offset_out. Space of contiguous datasets is allocated early, never filled. The file
 * stays open for fsdp_h5_write_chunk until fsdp_h5_close or fsdp_h5_discard.
 */
fsdp_status fsdp_h5_create(fsdp_io *io, const char *path, const fsdp_h5_layout *layout,
                           fsdp_h5_file **file_out, int64_t *index_offset_out, fsdp_error *err);

/* A filtered chunk of a dataset. */
typedef struct fsdp_h5_chunk {
    size_t dataset;
    const int64_t *coord;      /* of its first element */
    const void *data;
    size_t size;
} fsdp_h5_chunk;

/* Stores a chunk; *offset_out is its offset in the file. */
fsdp_status fsdp_h5_write_chunk(fsdp_h5_file *file, const fsdp_h5_chunk *chunk, int64_t *offset_out,
                                fsdp_error *err);

/* Adds the contiguous u8 dataset "%index" to a file created with index_size 0 (compressed files,
 * whose index size is known only at the end). */
fsdp_status fsdp_h5_add_index(fsdp_h5_file *file, int64_t index_size, int64_t *index_offset_out,
                              fsdp_error *err);

/* Adds a second name of a dataset of this file. */
fsdp_status fsdp_h5_link(fsdp_h5_file *file, const char *link, const char *target, fsdp_error *err);

/* Writes the metadata that libhdf5 holds and closes; *size_out is the file's size. No fsync. */
fsdp_status fsdp_h5_close(fsdp_h5_file *file, int64_t *size_out, fsdp_error *err);
/* Closes without further writes; the caller deletes the file. Accepts NULL. */
void fsdp_h5_discard(fsdp_h5_file *file);

/*
 * --- the view: virtual datasets over the shard files ---
 * Written without libhdf5 (hdf5_view.c), so it takes no lock. fsdp_h5_view_close finds duplicate links
 * and aliases without a target.
 */

/* A part of a virtual dataset: a box, which shows a box of the same size of a dataset in another file. */
typedef struct fsdp_h5_source {
    const char *file;          /* relative to the view's directory */
    const char *link;
    int source_ndim;
    const int64_t *source_shape;   /* shape of the whole source dataset */
    const int64_t *source_lo, *source_len;
    const int64_t *lo, *len;       /* box in the virtual dataset, with the same number of elements */
} fsdp_h5_source;

typedef struct fsdp_h5_view fsdp_h5_view;
fsdp_status fsdp_h5_view_create(fsdp_io *io, const char *path, fsdp_h5_view **view_out, fsdp_error *err);
/* Adds a tensor, whose chunk and offset are not used. Without sources: an empty (zero-size) dataset. The
 * fill value is all bytes 0xFF. */
fsdp_status fsdp_h5_view_add(fsdp_h5_view *view, const fsdp_h5_dataset *tensor, const fsdp_h5_source *sources,
                             size_t count, fsdp_error *err);
/* A hard link: a second name of a dataset of this view. */
fsdp_status fsdp_h5_view_link(fsdp_h5_view *view, const char *link, const char *target, fsdp_error *err);
fsdp_status fsdp_h5_view_close(fsdp_h5_view *view, int64_t *size_out, fsdp_error *err);
void fsdp_h5_view_discard(fsdp_h5_view *view);       /* accepts NULL */

#endif

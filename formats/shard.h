/*
 * Room native: shard files of the native checkpoint. This header is what statedict sees of them.
 *
 * In: stored boxes (name, dtype, box, bytes) of one rank, or of several in turn. Out: a shard file and its
 * fsdp_file_record, which the manifest keeps; or, in reverse, the boxes of such a file.
 *
 * A shard file is a plain HDF5 file. Its unit is the *stored box*: a box of a tensor with the place of its
 * bytes. The bytes of a stored box, packed row-major, are cut into *blocks*, each with its own XXH3-128: 4
 * MiB of a raw box, one chunk of an encoded box (byte shuffle + zstd frame). A block is always a range of
 * the packed order. The shard index, last dataset of the file, lists boxes and blocks;
 * docs/native_format.md has its bytes.
 *
 *   write: create (libhdf5 lays the file out) -> write -> finish (index, fsync, close)
 *   read:  open (index checked) -> find -> read raw ranges or decode blocks; no libhdf5
 *
 *   native_write.c        the file, raw boxes, pieces cut into blocks; blocks as frames, on worker threads;
 *                         the index segment, fsync, close
 *   native_index.c        how boxes are cut into blocks, for writer and reader
 *   native_read.c         the reader: index, bounds, frames
 *   native_view.c         index.h5 by way of hdf5/hdf5_view.c
 *   native_check.c        compares libhdf5's listing of a file with the index
 *
 * Caller: statedict. The room calls hdf5, hdf5_child (native_check.c), kernels and base.
 */
#ifndef FSDP_SHARD_H
#define FSDP_SHARD_H

#include "base/io/io.h"
#include "kernels/kernels.h"
#include <fsdp/box.h>
#include <fsdp/dtype.h>
#include <fsdp/status.h>
#include "base/text.h"

enum { FSDP_BLOCK_BYTES = 4 << 20 };     /* of a raw box; upper limit for a chunk of an encoded one */
enum { FSDP_CHUNK_BYTES = 1 << 20 };     /* of an encoded box, unless less is asked for: stays in the cache */
enum { FSDP_DATASET_DIMS = 32 };         /* HDF5's limit: the dims beyond it are merged into the last one */
enum { FSDP_SHARD_INDEX_LEAST = 96 };    /* bytes of index for every rank that writes into a file */
enum { FSDP_PIECE_BYTES = 256 << 10 };   /* bytes hashed and written at a time, while they are in the cache */

/* Written into every index, so that a file of another rank, step or run is recognised. */
typedef struct fsdp_shard_id {
    uint8_t run[16];
    int64_t step;
    uint32_t rank, world;
} fsdp_shard_id;

/* --- writing ---------------------------------------------------------------------------------- */

typedef struct fsdp_shard_dataset {
    const char *name;
    size_t name_size;
    unsigned part;             /* 0, or k for the link NAME%#k */
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    int64_t offset;            /* out: offset of its bytes, -1 when it is empty or encoded */
} fsdp_shard_dataset;

/* A second link to a dataset in the same file (an alias in a full file). */
typedef struct fsdp_shard_link {
    const char *name;
    size_t name_size;
    size_t dataset;
} fsdp_shard_link;

/* A box to store, and its place in a dataset. */
typedef struct fsdp_shard_box {
    const char *name;          /* of the tensor; the dataset of a flat buffer has another */
    size_t name_size;
    uint32_t tensor;           /* entry number in the manifest */
    uint32_t part;             /* number among the boxes of this tensor in this rank */
    uint32_t dataset;
    bool packed;               /* its bytes are one run; otherwise a box of a tensor-shaped dataset */
    int ndim;
    int64_t first;             /* first element in the dataset */
    const int64_t *lo, *len;   /* in the tensor; borrowed */
} fsdp_shard_box;

fsdp_box fsdp_shard_box_box(const fsdp_shard_box *box);

/* The threads and buffers that encode blocks. Several writers may share one, used one after another. */
typedef struct fsdp_encoder fsdp_encoder;
fsdp_status fsdp_encoder_create(int threads, int level, int64_t chunk_bytes, fsdp_encoder **encoder_out,
                                fsdp_error *err);
void fsdp_encoder_free(fsdp_encoder *encoder);       /* accepts NULL */

typedef struct fsdp_shard_opts {
    fsdp_io *io;
    const char *path;
    fsdp_shard_id id;
    bool encode;
    int level;
    int64_t chunk_bytes;       /* encode: 0 means FSDP_CHUNK_BYTES */
    fsdp_encoder *encoder;     /* encode: borrowed until finish; NULL: the writer creates one */
    int64_t index_room;        /* bytes reserved for the index; 0: enough for the boxes of this writer */
    int threads;
    bool sync;
    /* Progress callback, called by every thread that works for the writer. true: a long wait follows,
     * during which there will be no call. NULL: none. */
    void (*alive)(void *context, bool long_wait);
    void *alive_user;
} fsdp_shard_opts;

/* Describes a finished file, as the manifest keeps it. */
typedef struct fsdp_file_record {
    int64_t size;
    int64_t index_offset, index_size;
    fsdp_hash index_hash;
    bool follows_links;        /* reading: the user named the path; it is not a path within a checkpoint */
} fsdp_file_record;

typedef struct fsdp_shard_writer fsdp_shard_writer;

/* Estimates the memory of a writer of that many boxes, without libhdf5's layout. */
int64_t fsdp_shard_writer_room(size_t box_count);
enum { FSDP_OPEN_LAYOUT_BYTES = 3 << 19 };   /* measured: an encoded file, open in libhdf5 */

/* Returns the bytes of the index segment for these raw boxes. */
int64_t fsdp_shard_index_bytes(const fsdp_shard_dataset *datasets, const fsdp_shard_box *boxes,
                               size_t box_count);

/* The objects of a new file; borrowed until discard or finish. */
typedef struct fsdp_shard_layout {
    fsdp_shard_dataset *datasets;      /* create fills in their offsets */
    size_t dataset_count;
    const fsdp_shard_link *links;
    size_t link_count;
    const fsdp_shard_box *boxes;       /* sorted by (tensor, part) */
    size_t box_count;
} fsdp_shard_layout;

fsdp_status fsdp_shard_create(const fsdp_shard_opts *opts, const fsdp_shard_layout *layout,
                              fsdp_shard_writer **writer_out, fsdp_error *err);

/* Opens a raw file that another rank created, to write boxes of this rank into it. The caller has filled
 * in the offsets of datasets. */
fsdp_status fsdp_shard_join(const fsdp_shard_opts *opts, const fsdp_shard_dataset *datasets,
                            const fsdp_shard_box *boxes, size_t box_count,
                            fsdp_shard_writer **writer_out, fsdp_error *err);

/* `count` elements of a box's packed order, beginning at `first`. The pieces of one box arrive in order
 * without gaps; different boxes in any order. */
typedef struct fsdp_shard_piece {
    size_t box;
    int64_t first, count;
    const void *data;
} fsdp_shard_piece;

/* Hashes (and encodes) and writes pieces, on the writer's threads. Several threads may call a raw writer
 * at once with pieces of different boxes. */
fsdp_status fsdp_shard_write(fsdp_shard_writer *writer, const fsdp_shard_piece *pieces, size_t count,
                             fsdp_error *err);

/* Makes the index segment of this writer: every box must be complete. */
fsdp_status fsdp_shard_segment(fsdp_shard_writer *writer, fsdp_text *segment, fsdp_error *err);

/* Writes index segments (of all ranks in rank order, each possibly in parts) one after another. */
fsdp_status fsdp_shard_put_index(fsdp_shard_writer *writer, const void *data, size_t size, fsdp_error *err);

/* Writes the segment of this writer unless fsdp_shard_put_index wrote an index, syncs, closes, frees. A
 * joined writer has no index: it only syncs and closes (record_out may be NULL). */
fsdp_status fsdp_shard_finish(fsdp_shard_writer *writer, fsdp_file_record *record_out, fsdp_error *err);

/* Closes and frees without finishing; the caller removes the file. Accepts NULL. */
void fsdp_shard_discard(fsdp_shard_writer *writer);

/* --- the view: every tensor whole, for other programs --- */

/* The part of a view's tensor that one shard file holds: a box of a dataset there. */
typedef struct fsdp_view_source {
    const char *file;          /* name in the same directory */
    const char *name;          /* of the dataset */
    size_t name_size;
    unsigned part;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS], lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS];   /* the dataset; the part of it */
    fsdp_box box;              /* the box in the tensor */
} fsdp_view_source;

typedef struct fsdp_view fsdp_view;
fsdp_status fsdp_view_create(fsdp_io *io, const char *path, fsdp_view **view_out, fsdp_error *err);
fsdp_status fsdp_view_add(fsdp_view *view, const fsdp_shard_dataset *tensor, const fsdp_view_source *sources,
                          size_t count, fsdp_error *err);
fsdp_status fsdp_view_alias(fsdp_view *view, const char *name, size_t name_size, const char *target,
                            size_t target_size, fsdp_error *err);
/* Closes, syncs if requested, frees. */
fsdp_status fsdp_view_finish(fsdp_view *view, bool sync, fsdp_error *err);
void fsdp_view_discard(fsdp_view *view);             /* accepts NULL */

/* --- reading ---------------------------------------------------------------------------------- */

typedef struct fsdp_frame { int64_t offset, size; } fsdp_frame;

typedef struct fsdp_stored_box {
    uint32_t tensor, part;
    fsdp_dtype dtype;
    size_t element_size;
    bool encoded, packed;
    int ndim;
    const int64_t *lo, *len;
    const int64_t *stride;     /* raw: byte stride in the file per dim */
    const int64_t *chunk;      /* encoded: chunk shape */
    int64_t count;             /* elements */
    int64_t offset;            /* raw: offset of the first element in the file */
    const char *name;
    size_t name_size;
    int64_t block_count;
    const fsdp_hash *hashes;   /* one per block */
    const fsdp_frame *frames;  /* encoded: one per block */
} fsdp_stored_box;

typedef struct fsdp_shard_reader fsdp_shard_reader;

/*
 * Opens a shard file and reads its index. Size, index hash and identity must be as expected (id->rank: of
 * the first segment); every number in the index is checked against the file's bounds. Afterwards any
 * thread may use the reader.
 */
fsdp_status fsdp_shard_open(fsdp_io *io, const char *path, const fsdp_file_record *record,
                            const fsdp_shard_id *id, fsdp_shard_reader **reader_out, fsdp_error *err);
void fsdp_shard_close(fsdp_shard_reader *reader);            /* accepts NULL */

const char *fsdp_shard_path(const fsdp_shard_reader *reader);
size_t fsdp_shard_box_count(const fsdp_shard_reader *reader);
const fsdp_stored_box *fsdp_shard_box_at(const fsdp_shard_reader *reader, size_t index);
/* Finds a box by the writer's rank, tensor and part: NULL without one. */
const fsdp_stored_box *fsdp_shard_find(const fsdp_shard_reader *reader, uint32_t rank, uint32_t tensor,
                                       uint32_t part);

fsdp_box fsdp_stored_box_box(const fsdp_stored_box *box);
/* Returns the range of a block: elements [*first, *first + *count) of the packed order. */
void fsdp_block_range(const fsdp_stored_box *box, int64_t block, int64_t *first, int64_t *count);

/* Reads elements of a raw box's packed order without verifying hashes. */
fsdp_status fsdp_shard_read(fsdp_shard_reader *reader, const fsdp_stored_box *box, int64_t first,
                            int64_t count, void *data, fsdp_error *err);

/* Holds the buffers of one reading thread for encoded blocks. */
typedef struct fsdp_decoder {
    fsdp_codec *codec;
    void *frame;
    size_t frame_room;
    void *chunk;
    size_t chunk_room;
} fsdp_decoder;                /* zero-initialise */
void fsdp_decoder_release(fsdp_decoder *decoder);
/* Reads and decodes one block of an encoded box without verifying its hash. *data_out points into the
 * decoder until its next use. */
fsdp_status fsdp_shard_decode(fsdp_shard_reader *reader, const fsdp_stored_box *box, int64_t block,
                              fsdp_decoder *decoder, const void **data_out, fsdp_error *err);

/*
 * Checks the HDF5 structures, which other programs read and fsdp_shard_open does not (native_check.c):
 * libhdf5, in a child process, must find a dataset for every box of the index, at the place that the index
 * states. is_exact: datasets are named for tensors, not for flat buffers. FSDP_ERR_DAMAGED: they differ,
 * and the message says how; FSDP_ERR_REFUSED: this system has no sandbox for the child.
 */
fsdp_status fsdp_shard_check_structure(fsdp_io *io, const fsdp_shard_reader *reader, int64_t index_offset,
                                       bool is_exact, fsdp_error *err);

/* Returns FSDP_ERR_DAMAGED with file, tensor, block and its rows. */
fsdp_status fsdp_block_damaged(const fsdp_shard_reader *reader, const fsdp_stored_box *box, int64_t block,
                               fsdp_error *err);

#endif

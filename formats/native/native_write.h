/*
 * The private state of a shard writer, shared by native_write.c (files, raw boxes, pieces),
 * native_encode.c (blocks that become frames) and native_index_write.c (the index).
 */
#ifndef FSDP_NATIVE_WRITE_H
#define FSDP_NATIVE_WRITE_H

#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "formats/hdf5/hdf5_file.h"
#include "formats/native/native_index.h"

/* The progress of a box. */
typedef struct box_state {
    size_t element_size;
    bool encode;
    int64_t count, block_count;
    int64_t *chunk;            /* encoded: chunk shape */
    fsdp_hash *hashes;
    fsdp_frame *frames;
    int64_t done;              /* elements written */
    fsdp_hasher *hasher;       /* raw: hash state of an incomplete block */
    char *partial;             /* encoded: bytes of an incomplete chunk */
} box_state;

struct fsdp_shard_writer {
    fsdp_io *io;
    char *path;
    fsdp_shard_id id;
    bool encode, sync, joined;
    int level, threads;
    int64_t chunk_bytes;
    const fsdp_shard_dataset *datasets;
    const fsdp_shard_box *boxes;
    size_t box_count;
    box_state *states;
    fsdp_arena arena;
    fsdp_h5_file *h5;          /* open while chunks are stored */
    fsdp_file *file;           /* open while raw bytes are written */
    int64_t index_offset, index_room, index_done;
    fsdp_hasher *index_hasher;
    fsdp_encoder *encoder;
    bool owns_encoder;
    void (*alive)(void *context, bool long_wait);
    void *alive_user;
};

/* Reports progress; see fsdp_shard_opts. */
static inline void fsdp_writer_alive(const fsdp_shard_writer *w, bool long_wait)
{
    if (w->alive)
        w->alive(w->alive_user, long_wait);
}

static inline const fsdp_shard_dataset *fsdp_writer_dataset(const fsdp_shard_writer *w, size_t box)
{
    return &w->datasets[w->boxes[box].dataset];
}

/* The offset of a raw box in the file. */
static inline int64_t fsdp_writer_offset(const fsdp_shard_writer *w, size_t box)
{
    return fsdp_writer_dataset(w, box)->offset + w->boxes[box].first * (int64_t)w->states[box].element_size;
}

/* Its byte strides there. */
static inline void fsdp_writer_strides(const fsdp_shard_writer *w, size_t box, int64_t *strides_out)
{
    const fsdp_shard_box *it = &w->boxes[box];
    fsdp_box_strides(it->ndim, it->packed ? it->len : fsdp_writer_dataset(w, box)->shape, strides_out);
    for (int d = 0; d < it->ndim; d++)
        strides_out[d] *= (int64_t)w->states[box].element_size;
}

/* Writes the index, syncs and closes the file. */
fsdp_status fsdp_writer_close(fsdp_shard_writer *w, fsdp_file_record *record_out, fsdp_error *err);

/* Elements [first, first + count) of a box, all in one block. */
typedef struct block_span {
    size_t box;
    int64_t block, first, count;
    bool starts, ends;         /* begins at the block's first element; ends at its last */
    const char *data;
} block_span;

/*
 * Blocks in an encoder. Its slots form two halves, used alternately: while workers encode one half, the
 * calling thread stores the frames of the other, in order.
 */
typedef struct encode_queue {
    fsdp_shard_writer *writer;
    size_t half;               /* the half being filled: 0 or 1 */
    size_t filled, ready;      /* blocks in the half being filled, and in the other one */
} encode_queue;

/* Creates an encoder unless the options supplied one. */
fsdp_status fsdp_encode_begin(fsdp_shard_writer *w, encode_queue *queue, fsdp_error *err);
fsdp_status fsdp_encode_span(encode_queue *queue, const block_span *span, fsdp_error *err);
/* Encodes and stores all remaining blocks. */
fsdp_status fsdp_encode_drain(encode_queue *queue, fsdp_error *err);

#endif

/*
 * Writes a shard file: libhdf5 lays out the datasets (hdf5_file.c), then worker threads hash and
 * write their bytes. The mirror is native_read.c; native_index.h has the layout of the index.
 *
 * Raw boxes: libhdf5 closes the file right after the layout, and pwrite puts the bytes at the
 * offsets of the datasets, each piece hashed while it is in the cache. Encoded boxes go through
 * workers that make frames of their blocks. The index is written last.
 */
#include "formats/hdf5/hdf5_link_name.h"
#include "base/core/mem.h"
#include "base/core/pool.h"
#include "base/data/box_internal.h"
#include "base/data/flow.h"
#include "formats/hdf5/hdf5_file.h"
#include "formats/native/native_index.h"

#include <string.h>

/* The progress of a box. */
typedef struct box_state {
    size_t element_size;
    bool encode;
    int64_t count, block_count;
    int64_t *chunk; /* encoded: chunk shape */
    fsdp_hash *hashes;
    fsdp_frame *frames;
    int64_t done;        /* elements written */
    fsdp_hasher *hasher; /* raw: hash state of an incomplete block */
    char *partial;       /* encoded: bytes of an incomplete chunk */
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
    fsdp_h5_file *h5; /* open while chunks are stored */
    fsdp_file *file;  /* open while raw bytes are written */
    int64_t index_offset, index_room, index_done;
    fsdp_hasher *index_hasher;
    fsdp_encoder *encoder;
    bool owns_encoder;
    void (*alive)(void *context, bool long_wait);
    void *alive_user;
};

/* Reports progress; see fsdp_shard_opts. */
static void writer_alive(const fsdp_shard_writer *w, bool long_wait)
{
    if (w->alive)
        w->alive(w->alive_user, long_wait);
}

static const fsdp_shard_dataset *writer_dataset(const fsdp_shard_writer *w, size_t box)
{
    return &w->datasets[w->boxes[box].dataset];
}

/* The offset of a raw box in the file. */
static int64_t writer_offset(const fsdp_shard_writer *w, size_t box)
{
    return writer_dataset(w, box)->offset +
           w->boxes[box].first * (int64_t)w->states[box].element_size;
}

/* Its byte strides there. */
static void writer_strides(const fsdp_shard_writer *w, size_t box, int64_t *strides_out)
{
    const fsdp_shard_box *it = &w->boxes[box];
    fsdp_box_strides(it->ndim, it->packed ? it->len : writer_dataset(w, box)->shape, strides_out);
    for (int d = 0; d < it->ndim; d++)
        strides_out[d] *= (int64_t)w->states[box].element_size;
}

/* === encoding ================================================================================= */

/*
 * Blocks encoded into frames: workers hash, shuffle and compress; one thread stores the frames
 * in order, so that the file does not depend on the number of workers. The mirror is
 * fsdp_shard_decode in native_read.c.
 */

/* Elements [first, first + count) of a box, all in one block. */
typedef struct block_span {
    size_t box;
    int64_t block, first, count;
    bool starts, ends; /* begins at the block's first element; ends at its last */
    const char *data;
} block_span;

/*
 * Blocks in an encoder. Its slots form two halves, used alternately: while workers encode one half, the
 * calling thread stores the frames of the other, in order.
 */
typedef struct encode_queue {
    fsdp_shard_writer *writer;
    size_t half;          /* the half being filled: 0 or 1 */
    size_t filled, ready; /* blocks in the half being filled, and in the other one */
} encode_queue;

/* A whole block to encode, and its frame. */
typedef struct encode_slot {
    fsdp_shard_writer *writer;
    fsdp_codec *codec;
    char *frame, *padded;
    size_t room, size;
    size_t box;
    int64_t block, count;
    const void *data;
} encode_slot;

struct fsdp_encoder {
    int threads;
    encode_slot *slots; /* two halves, used alternately */
    size_t slot_count;
    fsdp_pool *pool;
};

/* --- encoders --- */

static int64_t chunk_elements(const fsdp_shard_writer *w, size_t i)
{
    int64_t count = 1;
    for (int d = 0; d < w->boxes[i].ndim; d++)
        count *= w->states[i].chunk[d];
    return count;
}

static fsdp_status make_slot(encode_slot *slot, int level, int64_t chunk_bytes, fsdp_error *err)
{
    slot->room = fsdp_codec_bound((size_t)chunk_bytes);
    slot->frame = fsdp_alloc_pages(slot->room);
    if (!slot->frame)
        return fsdp_fail_memory(err, "an encoder's buffer");
    return fsdp_codec_create(level, &slot->codec, err);
}

static fsdp_status make_encoder(fsdp_encoder *encoder, int level, int64_t chunk_bytes,
                                fsdp_error *err)
{
    encoder->slot_count = 4 * (size_t)encoder->threads;
    encoder->slots = fsdp_alloc(encoder->slot_count, sizeof *encoder->slots);
    if (!encoder->slots)
        return fsdp_fail_memory(err, "encoders");
    for (size_t s = 0; s < encoder->slot_count; s++)
        FSDP_TRY(make_slot(&encoder->slots[s], level, chunk_bytes, err));
    return fsdp_pool_create(encoder->threads > 1 ? encoder->threads : 0, encoder->slot_count,
                            &encoder->pool, err);
}

fsdp_status fsdp_encoder_create(int threads, int level, int64_t chunk_bytes,
                                fsdp_encoder **encoder_out, fsdp_error *err)
{
    fsdp_encoder *encoder = fsdp_alloc(1, sizeof *encoder);
    if (!encoder)
        return fsdp_fail_memory(err, "encoders");
    encoder->threads = threads > 0 ? threads : 1;
    fsdp_status st =
        make_encoder(encoder, level, chunk_bytes > 0 ? chunk_bytes : FSDP_CHUNK_BYTES, err);
    if (st != FSDP_OK) {
        fsdp_encoder_free(encoder);
        return st;
    }
    *encoder_out = encoder;
    return FSDP_OK;
}

void fsdp_encoder_free(fsdp_encoder *encoder)
{
    if (!encoder)
        return;
    fsdp_pool_free(encoder->pool);
    for (size_t s = 0; encoder->slots && s < encoder->slot_count; s++) {
        fsdp_codec_free(encoder->slots[s].codec);
        fsdp_free(encoder->slots[s].frame);
        fsdp_free(encoder->slots[s].padded);
    }
    fsdp_free(encoder->slots);
    fsdp_free(encoder);
}

/* HDF5 chunks are always whole: a chunk at the edge is padded with zeros. */
static const void *padded_chunk(encode_slot *slot, size_t size, size_t whole)
{
    if (size == whole)
        return slot->data;
    if (!slot->padded && !(slot->padded = fsdp_alloc_pages(slot->room)))
        return NULL;
    memcpy(slot->padded, slot->data, size);
    memset(slot->padded + size, 0, whole - size);
    return slot->padded;
}

static fsdp_status encode_block(void *context, fsdp_error *err)
{
    encode_slot *slot = context;
    fsdp_shard_writer *w = slot->writer;
    box_state *state = &w->states[slot->box];
    size_t size = (size_t)slot->count * state->element_size;
    size_t whole = (size_t)chunk_elements(w, slot->box) * state->element_size;
    state->hashes[slot->block] = fsdp_kernels_get()->hash(slot->data, size);
    const void *chunk = padded_chunk(slot, size, whole);
    if (!chunk)
        return fsdp_fail_memory(err, "a padded chunk");
    return fsdp_codec_encode(
        slot->codec, &(fsdp_coding){chunk, whole, slot->frame, slot->room, state->element_size},
        &slot->size, err);
}

static fsdp_status store_block(encode_slot *slot, fsdp_error *err)
{
    fsdp_shard_writer *w = slot->writer;
    const fsdp_shard_box *box = &w->boxes[slot->box];
    box_state *state = &w->states[slot->box];
    int64_t first, count, coord[FSDP_MAX_DIMS];
    fsdp_native_block_range(
        &(fsdp_blocking){box->ndim, box->len, state->chunk, state->element_size}, slot->block,
        &first, &count);
    for (int d = box->ndim - 1; d >= 0; d--) {
        coord[d] = first % box->len[d];
        first /= box->len[d];
    }
    fsdp_frame *frame = &state->frames[slot->block];
    fsdp_flow("formats/native/native_write.c", "block %lld: frame", (long long)slot->block);
    frame->size = (int64_t)slot->size;
    FSDP_TRY(fsdp_h5_write_chunk(w->h5,
                                 &(fsdp_h5_chunk){box->dataset, coord, slot->frame, slot->size},
                                 &frame->offset, err));
    if (w->sync)
        fsdp_io_begin_sync(w->file, frame->offset, frame->size);
    writer_alive(w, false);
    return FSDP_OK;
}

static encode_slot *half_of(const encode_queue *queue, size_t half)
{
    const fsdp_encoder *encoder = queue->writer->encoder;
    return encoder->slots + half * (encoder->slot_count / 2);
}

static fsdp_status turn_halves(encode_queue *queue, fsdp_error *err)
{
    fsdp_pool *pool = queue->writer->encoder->pool;
    for (size_t s = 0; s < queue->filled; s++)
        fsdp_pool_submit(pool, encode_block, half_of(queue, queue->half) + s);
    fsdp_status st = FSDP_OK;
    for (size_t s = 0; s < queue->ready && st == FSDP_OK; s++)
        st = store_block(half_of(queue, 1 - queue->half) + s, err);
    fsdp_status waited = fsdp_pool_wait(pool, st == FSDP_OK ? err : NULL);
    queue->ready = queue->filled;
    queue->filled = 0;
    queue->half = 1 - queue->half;
    return st != FSDP_OK ? st : waited;
}

static fsdp_status queue_block(encode_queue *queue, size_t box, int64_t block, int64_t count,
                               const void *data, fsdp_error *err)
{
    encode_slot *slot = half_of(queue, queue->half) + queue->filled++;
    slot->writer = queue->writer;
    slot->box = box;
    slot->block = block;
    slot->count = count;
    slot->data = data;
    if (queue->filled < queue->writer->encoder->slot_count / 2)
        return FSDP_OK;
    return turn_halves(queue, err);
}

/* Encodes and stores all remaining blocks. */
static fsdp_status encode_drain(encode_queue *queue, fsdp_error *err)
{
    FSDP_TRY(turn_halves(queue, err));
    return turn_halves(queue, err);
}

/* --- spans --- */

/* Creates an encoder unless the options supplied one. */
static fsdp_status encode_begin(fsdp_shard_writer *w, encode_queue *queue, fsdp_error *err)
{
    *queue = (encode_queue){.writer = w};
    if (w->encoder)
        return FSDP_OK;
    w->owns_encoder = true;
    return fsdp_encoder_create(w->threads, w->level, w->chunk_bytes, &w->encoder, err);
}

static fsdp_status keep_part(fsdp_shard_writer *w, const block_span *s, fsdp_error *err)
{
    box_state *state = &w->states[s->box];
    const fsdp_shard_box *box = &w->boxes[s->box];
    int64_t first, count;
    fsdp_native_block_range(
        &(fsdp_blocking){box->ndim, box->len, state->chunk, state->element_size}, s->block, &first,
        &count);
    if (!state->partial &&
        !(state->partial = fsdp_alloc_pages((size_t)count * state->element_size)))
        return fsdp_fail_memory(err, "a chunk in part");
    memcpy(state->partial + (size_t)(s->first - first) * state->element_size, s->data,
           (size_t)s->count * state->element_size);
    return FSDP_OK;
}

static fsdp_status encode_span(encode_queue *queue, const block_span *s, fsdp_error *err)
{
    fsdp_shard_writer *w = queue->writer;
    if (s->starts && s->ends)
        return queue_block(queue, s->box, s->block, s->count, s->data, err);
    FSDP_TRY(keep_part(w, s, err));
    if (!s->ends)
        return FSDP_OK;
    int64_t first, count;
    const fsdp_shard_box *box = &w->boxes[s->box];
    box_state *state = &w->states[s->box];
    fsdp_native_block_range(
        &(fsdp_blocking){box->ndim, box->len, state->chunk, state->element_size}, s->block, &first,
        &count);
    FSDP_TRY(queue_block(queue, s->box, s->block, count, state->partial, err));
    /* the workers must be done with the buffer before it is reused */
    FSDP_TRY(encode_drain(queue, err));
    fsdp_free(state->partial);
    state->partial = NULL;
    return FSDP_OK;
}

/* === the index ================================================================================ */

/*
 * Writes the index of a shard file: makes the segment, puts it into its place and hashes it.
 * native_index.h has the layout; the mirror is the first half of native_read.c.
 */

int64_t fsdp_shard_index_bytes(const fsdp_shard_dataset *datasets, const fsdp_shard_box *boxes,
                               size_t box_count)
{
    uint64_t dims = 0, blocks = 0, names = 0;
    for (size_t i = 0; i < box_count; i++) {
        const fsdp_shard_dataset *dataset = &datasets[boxes[i].dataset];
        const fsdp_shard_box *box = &boxes[i];
        dims += 3 * (uint64_t)box->ndim;
        blocks += (uint64_t)fsdp_native_blocks(
            &(fsdp_blocking){box->ndim, box->len, NULL, fsdp_dtype_size(dataset->dtype)});
        names += boxes[i].name_size;
    }
    return (int64_t)(sizeof(index_head) + box_count * sizeof(index_record) +
                     dims * sizeof(int64_t) + blocks * sizeof(fsdp_hash) + (names + 7) / 8 * 8);
}

typedef struct index_sizes {
    uint64_t dims, blocks, frames, name_bytes, total;
} index_sizes;

static index_sizes measure_index(const fsdp_shard_writer *w)
{
    index_sizes sizes = {0};
    for (size_t i = 0; i < w->box_count; i++) {
        sizes.dims += 3 * (uint64_t)w->boxes[i].ndim;
        sizes.blocks += (uint64_t)w->states[i].block_count;
        sizes.frames += w->states[i].encode ? (uint64_t)w->states[i].block_count : 0;
        sizes.name_bytes += w->boxes[i].name_size;
    }
    sizes.name_bytes = (sizes.name_bytes + 7) / 8 * 8;
    sizes.total = sizeof(index_head) + w->box_count * sizeof(index_record) +
                  sizes.dims * sizeof(int64_t) + sizes.blocks * sizeof(fsdp_hash) +
                  sizes.frames * sizeof(fsdp_frame) + sizes.name_bytes;
    return sizes;
}

static void add_head(const fsdp_shard_writer *w, const index_sizes *sizes, fsdp_text *text)
{
    index_head head = {.version = 1,
                       .rank = w->id.rank,
                       .world = w->id.world,
                       .step = w->id.step,
                       .size = sizes->total,
                       .boxes = w->box_count,
                       .dims = sizes->dims,
                       .blocks = sizes->blocks,
                       .frames = sizes->frames,
                       .name_bytes = sizes->name_bytes};
    memcpy(head.magic, FSDP_INDEX_MAGIC, sizeof head.magic);
    memcpy(head.run, w->id.run, sizeof head.run);
    fsdp_text_add(text, (const char *)&head, sizeof head);
}

static void add_records(const fsdp_shard_writer *w, fsdp_text *text)
{
    index_sizes at = {0};
    for (size_t i = 0; i < w->box_count; i++) {
        const fsdp_shard_box *box = &w->boxes[i];
        const box_state *state = &w->states[i];
        const fsdp_shard_dataset *dataset = writer_dataset(w, i);
        index_record record = {.tensor = box->tensor,
                               .part = box->part,
                               .dtype = (uint16_t)dataset->dtype,
                               .ndim = (uint16_t)box->ndim,
                               .flags = (state->encode ? FSDP_INDEX_ENCODED : 0) |
                                        (box->packed ? FSDP_INDEX_PACKED : 0),
                               .offset = state->encode ? 0 : writer_offset(w, i),
                               .dims = at.dims,
                               .hashes = at.blocks,
                               .frames = at.frames,
                               .block_count = (uint64_t)state->block_count,
                               .name = at.name_bytes,
                               .name_size = box->name_size};
        fsdp_text_add(text, (const char *)&record, sizeof record);
        at.dims += 3 * (uint64_t)box->ndim;
        at.blocks += (uint64_t)state->block_count;
        at.frames += state->encode ? (uint64_t)state->block_count : 0;
        at.name_bytes += box->name_size;
    }
}

static void add_dims(const fsdp_shard_writer *w, fsdp_text *text)
{
    for (size_t i = 0; i < w->box_count; i++) {
        const fsdp_shard_box *box = &w->boxes[i];
        size_t size = (size_t)box->ndim * sizeof(int64_t);
        int64_t strides[FSDP_MAX_DIMS];
        writer_strides(w, i, strides);
        fsdp_text_add(text, (const char *)box->lo, size);
        fsdp_text_add(text, (const char *)box->len, size);
        fsdp_text_add(text, (const char *)(w->states[i].encode ? w->states[i].chunk : strides),
                      size);
    }
}

fsdp_status fsdp_shard_segment(fsdp_shard_writer *w, fsdp_text *text, fsdp_error *err)
{
    for (size_t i = 0; i < w->box_count; i++)
        if (w->states[i].done != w->states[i].count)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': box %zu is incomplete", w->path, i);
    index_sizes sizes = measure_index(w);
    size_t before = text->size;
    add_head(w, &sizes, text);
    add_records(w, text);
    add_dims(w, text);
    for (size_t i = 0; i < w->box_count; i++)
        fsdp_text_add(text, (const char *)w->states[i].hashes,
                      (size_t)w->states[i].block_count * sizeof(fsdp_hash));
    for (size_t i = 0; i < w->box_count; i++)
        if (w->states[i].encode)
            fsdp_text_add(text, (const char *)w->states[i].frames,
                          (size_t)w->states[i].block_count * sizeof(fsdp_frame));
    for (size_t i = 0; i < w->box_count; i++)
        fsdp_text_add(text, w->boxes[i].name, w->boxes[i].name_size);
    while (!text->failed && text->size - before < sizes.total)
        fsdp_text_add(text, "", 1);
    return text->failed ? fsdp_fail_memory(err, "a shard index") : FSDP_OK;
}

/* Adds the index dataset of an encoded file, whose size is known only now, and closes libhdf5's
 * file. */
static fsdp_status close_layout(fsdp_shard_writer *w, int64_t index_size, fsdp_error *err)
{
    fsdp_h5_file *h5 = w->h5;
    int64_t size = 0;
    w->index_room = index_size;
    FSDP_TRY(fsdp_h5_add_index(h5, index_size, &w->index_offset, err));
    w->h5 = NULL;
    return fsdp_h5_close(h5, &size, err);
}

fsdp_status fsdp_shard_put_index(fsdp_shard_writer *w, const void *data, size_t size,
                                 fsdp_error *err)
{
    if (w->h5)
        FSDP_TRY(close_layout(w, (int64_t)size, err));
    if (w->joined || (int64_t)size > w->index_room - w->index_done)
        return fsdp_fail(err, FSDP_ERR_INTERNAL,
                         "'%s': the index does not fit into the space reserved for it", w->path);
    fsdp_flow("formats/native/native_write.c", "index: %zu bytes", size);
    fsdp_hasher_add(w->index_hasher, data, size);
    FSDP_TRY(fsdp_io_write(w->file, w->path, data, size, w->index_offset + w->index_done, err));
    w->index_done += (int64_t)size;
    return FSDP_OK;
}

static fsdp_status put_local_index(fsdp_shard_writer *w, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = fsdp_shard_segment(w, &text, err);
    if (st == FSDP_OK)
        st = fsdp_shard_put_index(w, text.data, text.size, err);
    fsdp_text_release(&text);
    return st;
}

/* Syncs a large file part after part, which takes long, so that peers see progress. */
static fsdp_status sync_in_parts(fsdp_shard_writer *w, int64_t size, fsdp_error *err)
{
    const int64_t part = 16 << 20;
    for (int64_t at = 0; w->alive && at < size; at += part) {
        w->alive(w->alive_user, false);
        fsdp_io_await_sync(w->file, at, size - at < part ? size - at : part);
    }
    writer_alive(w, true);
    return fsdp_io_sync(w->file, w->path, err);
}

static fsdp_status writer_close(fsdp_shard_writer *w, fsdp_file_record *record_out, fsdp_error *err)
{
    if (!w->joined && w->index_done == 0)
        FSDP_TRY(put_local_index(w, err));
    if (w->index_done != w->index_room)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': the index is incomplete", w->path);
    fsdp_file_record record = {.index_offset = w->index_offset,
                               .index_size = w->index_done,
                               .index_hash = fsdp_hasher_value(w->index_hasher)};
    int errnum = w->file->ops->size(w->file, &record.size);
    if (errnum < 0)
        return fsdp_fail_errno(err, -errnum, "cannot get the size of '%s'", w->path);
    if (w->sync)
        FSDP_TRY(sync_in_parts(w, record.size, err));
    FSDP_TRY(fsdp_io_close(&w->file, w->path, err));
    if (record_out)
        *record_out = record;
    return FSDP_OK;
}

/* === the file ================================================================================= */

fsdp_box fsdp_shard_box_box(const fsdp_shard_box *box)
{
    fsdp_box whole = {.ndim = box->ndim};
    size_t size = (size_t)box->ndim * sizeof(int64_t);
    if (size > 0) {
        memcpy(whole.lo, box->lo, size);
        memcpy(whole.len, box->len, size);
    }
    return whole;
}

/* --- set-up ----------------------------------------------------------------------------------- */

enum { SMALLEST_ENCODED = 4096 };

/* False for boxes that are stored raw: too small to gain from encoding, scalars, more dims than a dataset. */
static bool is_encoded(int ndim, const int64_t *len, size_t element_size)
{
    int64_t bytes = (int64_t)element_size;
    for (int d = 0; d < ndim; d++)
        bytes *= len[d];
    return ndim > 0 && ndim <= FSDP_DATASET_DIMS && bytes >= SMALLEST_ENCODED;
}

/* Chooses a chunk shape of at most chunk_bytes for a box of this shape: whole rows where they fit. */
static void choose_chunk(int ndim, const int64_t *len, size_t element_size, int64_t chunk_bytes,
                         int64_t *chunk_out)
{
    int64_t room = chunk_bytes / (int64_t)element_size;
    int64_t inner = 1;
    int d = ndim - 1;
    for (; d >= 0 && inner * len[d] <= room; d--) {
        chunk_out[d] = len[d];
        inner *= len[d];
    }
    if (d >= 0) {
        chunk_out[d] = room / inner > 0 ? room / inner : 1;
        d--;
    }
    for (; d >= 0; d--)
        chunk_out[d] = 1;
}

static fsdp_status init_state(fsdp_shard_writer *w, size_t i, fsdp_error *err)
{
    const fsdp_shard_box *box = &w->boxes[i];
    box_state *state = &w->states[i];
    state->element_size = fsdp_dtype_size(writer_dataset(w, i)->dtype);
    fsdp_box whole = fsdp_shard_box_box(box);
    state->count = fsdp_box_count(&whole);
    state->encode = w->encode && is_encoded(box->ndim, box->len, state->element_size);
    if (state->encode) {
        state->chunk = fsdp_arena_alloc(&w->arena, (size_t)box->ndim, sizeof *state->chunk);
        if (!state->chunk)
            return fsdp_fail_memory(err, "a chunk shape");
        choose_chunk(box->ndim, box->len, state->element_size, w->chunk_bytes, state->chunk);
    }
    state->block_count = fsdp_native_blocks(
        &(fsdp_blocking){box->ndim, box->len, state->chunk, state->element_size});
    state->hashes = fsdp_arena_alloc(&w->arena, (size_t)state->block_count, sizeof *state->hashes);
    if (state->encode)
        state->frames =
            fsdp_arena_alloc(&w->arena, (size_t)state->block_count, sizeof *state->frames);
    if (!state->hashes || (state->encode && !state->frames))
        return fsdp_fail_memory(err, "block hashes");
    return FSDP_OK;
}

int64_t fsdp_shard_writer_room(size_t box_count)
{
    enum { FILE_BYTES = 4096 }; /* the struct, its path, hash state and file */
    size_t box_bytes = sizeof(box_state) + 2 * sizeof(fsdp_hash);
    return FILE_BYTES + (int64_t)(box_count * box_bytes);
}

static fsdp_status new_writer(const fsdp_shard_opts *opts, const fsdp_shard_dataset *datasets,
                              const fsdp_shard_box *boxes, size_t box_count,
                              fsdp_shard_writer **writer_out, fsdp_error *err)
{
    fsdp_shard_writer *w = fsdp_alloc(1, sizeof *w);
    if (!w)
        return fsdp_fail_memory(err, "a shard writer");
    *writer_out = w;
    w->io = opts->io;
    w->id = opts->id;
    w->encode = opts->encode;
    w->level = opts->level;
    w->sync = opts->sync;
    w->alive = opts->alive;
    w->alive_user = opts->alive_user;
    w->encoder = opts->encoder;
    w->threads = opts->threads > 0 ? opts->threads : 1;
    w->chunk_bytes = opts->chunk_bytes > 0 ? opts->chunk_bytes : FSDP_CHUNK_BYTES;
    w->datasets = datasets;
    w->boxes = boxes;
    w->box_count = box_count;
    w->path = fsdp_strndup(opts->path, strlen(opts->path));
    w->states = fsdp_alloc(box_count, sizeof *w->states);
    w->index_hasher = fsdp_hasher_create();
    if (!w->path || !w->states || !w->index_hasher)
        return fsdp_fail_memory(err, "a shard writer");
    for (size_t i = 0; i < box_count; i++)
        FSDP_TRY(init_state(w, i, err));
    return FSDP_OK;
}

/* Makes a shape with fewer dims and the same elements in the same order. */
static bool fold_shape(fsdp_arena *arena, fsdp_h5_dataset *dataset)
{
    if (dataset->ndim <= FSDP_DATASET_DIMS)
        return true;
    int64_t *shape = fsdp_arena_alloc(arena, FSDP_DATASET_DIMS, sizeof *shape);
    if (!shape)
        return false;
    memcpy(shape, dataset->shape, FSDP_DATASET_DIMS * sizeof *shape);
    for (int d = FSDP_DATASET_DIMS; d < dataset->ndim; d++)
        shape[FSDP_DATASET_DIMS - 1] *= dataset->shape[d];
    dataset->shape = shape;
    dataset->ndim = FSDP_DATASET_DIMS;
    return true;
}

static fsdp_status lay_out(fsdp_shard_writer *w, const fsdp_shard_layout *layout, fsdp_error *err)
{
    fsdp_shard_dataset *datasets = layout->datasets;
    const fsdp_shard_link *links = layout->links;
    size_t dataset_count = layout->dataset_count;
    fsdp_status st = FSDP_OK;
    fsdp_arena names = {0};
    fsdp_h5_dataset *h5 = fsdp_alloc(dataset_count, sizeof *h5);
    if (!h5)
        return fsdp_fail_memory(err, "a file's datasets");
    for (size_t i = 0; i < dataset_count && st == FSDP_OK; i++) {
        char link[FSDP_NATIVE_LINK_ROOM];
        fsdp_native_link(datasets[i].name, datasets[i].name_size, datasets[i].part, link);
        h5[i] = (fsdp_h5_dataset){.link = fsdp_arena_strndup(&names, link, strlen(link)),
                                  .dtype = datasets[i].dtype,
                                  .ndim = datasets[i].ndim,
                                  .shape = datasets[i].shape};
        if (!h5[i].link || !fold_shape(&names, &h5[i]))
            st = fsdp_fail_memory(err, "a dataset's description");
    }
    if (w->encode) {
        /* the chunk shape of each dataset is that of its box: encoded datasets hold one */
        for (size_t i = 0; i < w->box_count; i++)
            h5[w->boxes[i].dataset].chunk = w->states[i].chunk;
    }
    if (st == FSDP_OK)
        st = fsdp_h5_create(w->io, w->path,
                            &(fsdp_h5_layout){h5, dataset_count, w->index_room, w->level}, &w->h5,
                            &w->index_offset, err);
    for (size_t i = 0; i < dataset_count && st == FSDP_OK; i++)
        datasets[i].offset = h5[i].offset;
    for (size_t i = 0; i < layout->link_count && st == FSDP_OK; i++) {
        char link[FSDP_NATIVE_LINK_ROOM];
        fsdp_native_link(links[i].name, links[i].name_size, 0, link);
        st = fsdp_h5_link(w->h5, link, h5[links[i].dataset].link, err);
    }
    fsdp_arena_release(&names);
    fsdp_free(h5);
    return st;
}

static fsdp_status open_raw(fsdp_shard_writer *w, int64_t size, fsdp_error *err)
{
    FSDP_TRY(fsdp_io_open(w->io, w->path, FSDP_IO_WRITE, &w->file, err));
    if (size > 0)
        FSDP_TRY(fsdp_io_reserve(w->file, w->path, size, err));
    return FSDP_OK;
}

static fsdp_status create(const fsdp_shard_opts *opts, const fsdp_shard_layout *layout,
                          fsdp_shard_writer *w, fsdp_error *err)
{
    fsdp_flow("formats/native/native_write.c", "lay out %zu datasets", layout->dataset_count);
    if (!w->encode)
        w->index_room = opts->index_room > 0
                            ? opts->index_room
                            : fsdp_shard_index_bytes(layout->datasets, w->boxes, w->box_count);
    FSDP_TRY(lay_out(w, layout, err));
    /* an encoded file stays open for its chunks; raw boxes in it have their space already */
    if (w->encode)
        return open_raw(w, 0, err);
    int64_t size = 0;
    fsdp_h5_file *h5 = w->h5;
    w->h5 = NULL;
    FSDP_TRY(fsdp_h5_close(h5, &size, err));
    return open_raw(w, size, err);
}

fsdp_status fsdp_shard_create(const fsdp_shard_opts *opts, const fsdp_shard_layout *layout,
                              fsdp_shard_writer **writer_out, fsdp_error *err)
{
    fsdp_shard_writer *w = NULL;
    fsdp_status st = new_writer(opts, layout->datasets, layout->boxes, layout->box_count, &w, err);
    if (st == FSDP_OK)
        st = create(opts, layout, w, err);
    if (st != FSDP_OK) {
        fsdp_shard_discard(w);
        return st;
    }
    *writer_out = w;
    return FSDP_OK;
}

fsdp_status fsdp_shard_join(const fsdp_shard_opts *opts, const fsdp_shard_dataset *datasets,
                            const fsdp_shard_box *boxes, size_t box_count,
                            fsdp_shard_writer **writer_out, fsdp_error *err)
{
    fsdp_shard_writer *w = NULL;
    fsdp_status st = new_writer(opts, datasets, boxes, box_count, &w, err);
    if (st == FSDP_OK) {
        w->joined = true;
        st = open_raw(w, 0, err);
    }
    if (st != FSDP_OK) {
        fsdp_shard_discard(w);
        return st;
    }
    *writer_out = w;
    return FSDP_OK;
}

/* --- raw boxes -------------------------------------------------------------------------------- */

static fsdp_status write_strided(fsdp_shard_writer *w, size_t i, int64_t first, int64_t count,
                                 const char *data, fsdp_error *err)
{
    size_t element_size = w->states[i].element_size;
    fsdp_file_runs runs;
    int64_t strides[FSDP_MAX_DIMS], offset, size;
    writer_strides(w, i, strides);
    fsdp_file_runs_begin(&runs,
                         &(fsdp_file_place){w->boxes[i].ndim, w->boxes[i].len, strides,
                                            writer_offset(w, i), element_size},
                         first, count);
    while (fsdp_file_runs_next(&runs, &offset, &size)) {
        FSDP_TRY(fsdp_io_write(w->file, w->path, data, (size_t)size, offset, err));
        data += size;
    }
    return FSDP_OK;
}

static fsdp_status write_raw(fsdp_shard_writer *w, size_t i, int64_t first, int64_t count,
                             const char *data, fsdp_error *err)
{
    if (!w->boxes[i].packed)
        return write_strided(w, i, first, count, data, err);
    size_t element_size = w->states[i].element_size;
    return fsdp_io_write(w->file, w->path, data, (size_t)count * element_size,
                         writer_offset(w, i) + first * (int64_t)element_size, err);
}

/* Hashes and writes a range inside one block, piece by piece, while each is in the cache. */
static fsdp_status hash_and_write(fsdp_shard_writer *w, const block_span *s, fsdp_hasher *hasher,
                                  fsdp_error *err)
{
    int64_t element_size = (int64_t)w->states[s->box].element_size;
    int64_t step = FSDP_PIECE_BYTES / element_size;
    const char *data = s->data;
    for (int64_t done = 0; done < s->count; done += step) {
        int64_t n = s->count - done < step ? s->count - done : step;
        fsdp_hasher_add(hasher, data, (size_t)(n * element_size));
        FSDP_TRY(write_raw(w, s->box, s->first + done, n, data, err));
        writer_alive(w, false);
        data += n * element_size;
    }
    return FSDP_OK;
}

enum { BEGIN_SYNC_BYTES = 1 << 20 };

/* Starts writeback early, so that the disk works in parallel and the final fsync waits for
 * little. */
static void begin_sync(const fsdp_shard_writer *w, int64_t offset, int64_t size)
{
    if (w->sync && size >= BEGIN_SYNC_BYTES)
        fsdp_io_begin_sync(w->file, offset, size);
}

static fsdp_status put_raw_block(fsdp_shard_writer *w, const block_span *s, fsdp_error *err)
{
    box_state *state = &w->states[s->box];
    size_t size = (size_t)s->count * state->element_size;
    if (size <= FSDP_PIECE_BYTES) {
        writer_alive(w, false);
        state->hashes[s->block] = fsdp_kernels_get()->hash(s->data, size);
        return write_raw(w, s->box, s->first, s->count, s->data, err);
    }
    fsdp_hasher *hasher = fsdp_hasher_create();
    if (!hasher)
        return fsdp_fail_memory(err, "a hash state");
    fsdp_status st = hash_and_write(w, s, hasher, err);
    state->hashes[s->block] = fsdp_hasher_value(hasher);
    fsdp_hasher_free(hasher);
    if (st == FSDP_OK && w->boxes[s->box].packed)
        begin_sync(w, writer_offset(w, s->box) + s->first * (int64_t)state->element_size,
                   (int64_t)size);
    return st;
}

/* Writes a part of a block: the box keeps the hash state until the block is complete. */
static fsdp_status put_raw_part(fsdp_shard_writer *w, const block_span *s, fsdp_error *err)
{
    box_state *state = &w->states[s->box];
    if (!state->hasher && !(state->hasher = fsdp_hasher_create()))
        return fsdp_fail_memory(err, "a hash state");
    FSDP_TRY(hash_and_write(w, s, state->hasher, err));
    if (s->ends) {
        state->hashes[s->block] = fsdp_hasher_value(state->hasher);
        fsdp_hasher_free(state->hasher);
        state->hasher = NULL;
    }
    return FSDP_OK;
}

/* --- pieces cut into blocks ------------------------------------------------------------------- */

/* The part of a piece from element `at` to the end of a block. */
static block_span next_span(const fsdp_shard_writer *w, const fsdp_shard_piece *piece, int64_t at)
{
    const fsdp_shard_box *box = &w->boxes[piece->box];
    const box_state *state = &w->states[piece->box];
    int64_t first, count;
    block_span s = {.box = piece->box, .first = at};
    s.block = fsdp_native_block_of(
        &(fsdp_blocking){box->ndim, box->len, state->chunk, state->element_size}, at);
    fsdp_native_block_range(
        &(fsdp_blocking){box->ndim, box->len, state->chunk, state->element_size}, s.block, &first,
        &count);
    int64_t end =
        piece->first + piece->count < first + count ? piece->first + piece->count : first + count;
    s.count = end - at;
    s.starts = at == first;
    s.ends = end == first + count;
    s.data = (const char *)piece->data + (size_t)(at - piece->first) * state->element_size;
    return s;
}

static fsdp_status put_span(fsdp_shard_writer *w, const block_span *s, fsdp_error *err)
{
    fsdp_flow("formats/native/native_write.c", "block %lld, %lld elements: hash and write",
              (long long)s->block, (long long)s->count);
    if (s->starts && s->ends)
        return put_raw_block(w, s, err);
    return put_raw_part(w, s, err);
}

static fsdp_status check_piece(fsdp_shard_writer *w, const fsdp_shard_piece *piece, fsdp_error *err)
{
    box_state *state = &w->states[piece->box];
    if (piece->first != state->done || piece->count > state->count - piece->first)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': box %zu is written out of order", w->path,
                         piece->box);
    state->done += piece->count;
    return FSDP_OK;
}

static fsdp_status write_piece(fsdp_shard_writer *w, encode_queue *queue,
                               const fsdp_shard_piece *piece, fsdp_error *err)
{
    FSDP_TRY(check_piece(w, piece, err));
    bool encode = w->states[piece->box].encode;
    for (int64_t at = piece->first; at < piece->first + piece->count;) {
        block_span s = next_span(w, piece, at);
        FSDP_TRY(encode ? encode_span(queue, &s, err) : put_span(w, &s, err));
        at += s.count;
    }
    return FSDP_OK;
}

typedef struct raw_work {
    fsdp_shard_writer *writer;
    const fsdp_shard_piece *pieces;
    size_t count;
    size_t *first_block; /* per piece: number of its first span, counted over all pieces */
} raw_work;

static fsdp_status write_raw_task(void *context, size_t task, fsdp_error *err)
{
    raw_work *work = context;
    size_t low = 0, high = work->count;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (work->first_block[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    const fsdp_shard_piece *piece = &work->pieces[low];
    fsdp_shard_writer *w = work->writer;
    int64_t per_block = FSDP_BLOCK_BYTES / (int64_t)w->states[piece->box].element_size;
    int64_t at = piece->first + (int64_t)(task - work->first_block[low]) * per_block;
    block_span s = next_span(w, piece, at);
    return put_span(w, &s, err);
}

/* Cuts pieces that are whole boxes into blocks, which any worker may take. */
static fsdp_status write_raw_parallel(fsdp_shard_writer *w, const fsdp_shard_piece *pieces,
                                      size_t count, fsdp_error *err)
{
    raw_work work = {w, pieces, count, fsdp_alloc(count + 1, sizeof(size_t))};
    if (!work.first_block)
        return fsdp_fail_memory(err, "a list of blocks");
    fsdp_status st = FSDP_OK;
    for (size_t p = 0; p < count && st == FSDP_OK; p++) {
        st = check_piece(w, &pieces[p], err);
        work.first_block[p + 1] =
            work.first_block[p] + (size_t)w->states[pieces[p].box].block_count;
    }
    if (st == FSDP_OK)
        st = fsdp_parallel(w->threads, work.first_block[count], write_raw_task, &work, err);
    fsdp_free(work.first_block);
    return st;
}

static bool pieces_are_whole(const fsdp_shard_writer *w, const fsdp_shard_piece *pieces,
                             size_t count)
{
    for (size_t p = 0; p < count; p++)
        if (pieces[p].first != 0 || pieces[p].count != w->states[pieces[p].box].count)
            return false;
    return true;
}

static fsdp_status write_pieces(fsdp_shard_writer *writer, const fsdp_shard_piece *pieces,
                                size_t count, fsdp_error *err)
{
    if (!writer->encode && writer->threads > 1 && pieces_are_whole(writer, pieces, count))
        return write_raw_parallel(writer, pieces, count, err);
    encode_queue queue = {0};
    if (writer->encode)
        FSDP_TRY(encode_begin(writer, &queue, err));
    fsdp_status st = FSDP_OK;
    for (size_t p = 0; p < count && st == FSDP_OK; p++)
        st = write_piece(writer, &queue, &pieces[p], err);
    if (writer->encode) {
        fsdp_status drained = encode_drain(&queue, st == FSDP_OK ? err : NULL);
        st = st != FSDP_OK ? st : drained;
    }
    return st;
}

/* Starts writeback for small boxes together, because they are adjacent. */
static void begin_sync_pieces(const fsdp_shard_writer *w, const fsdp_shard_piece *pieces,
                              size_t count)
{
    if (w->encode || count == 0)
        return;
    const fsdp_shard_piece *last = &pieces[count - 1];
    int64_t from = writer_offset(w, pieces[0].box), to = writer_offset(w, last->box);
    begin_sync(w, from, to + last->count * (int64_t)w->states[last->box].element_size - from);
}

fsdp_status fsdp_shard_write(fsdp_shard_writer *writer, const fsdp_shard_piece *pieces,
                             size_t count, fsdp_error *err)
{
    FSDP_TRY(write_pieces(writer, pieces, count, err));
    begin_sync_pieces(writer, pieces, count);
    return FSDP_OK;
}

/* --- the end --- */

fsdp_status fsdp_shard_finish(fsdp_shard_writer *writer, fsdp_file_record *record_out,
                              fsdp_error *err)
{
    fsdp_status st = writer_close(writer, record_out, err);
    fsdp_shard_discard(writer);
    return st;
}

void fsdp_shard_discard(fsdp_shard_writer *w)
{
    if (!w)
        return;
    if (w->owns_encoder)
        fsdp_encoder_free(w->encoder);
    fsdp_h5_discard(w->h5);
    (void)fsdp_io_close(&w->file, w->path, NULL);
    for (size_t i = 0; w->states && i < w->box_count; i++) {
        fsdp_hasher_free(w->states[i].hasher);
        fsdp_free(w->states[i].partial);
    }
    fsdp_hasher_free(w->index_hasher);
    fsdp_arena_release(&w->arena);
    fsdp_free(w->states);
    fsdp_free(w->path);
    fsdp_free(w);
}

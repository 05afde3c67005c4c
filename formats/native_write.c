/*
 * Writing a shard file: libhdf5 lays out the datasets (hdf5_file.c), then our own workers hash and
 * write their bytes. The mirror is native_read.c; what the index looks like is in native_index.h.
 *
 * Raw boxes: HDF5 is closed right after the layout and the bytes go to the dataset offsets with
 * pwrite, hashed piece by piece while they are in the cache. Encoded boxes: workers make frames,
 * and one thread stores them in order, so that the file does not depend on the number of workers.
 */
#include "formats/hdf5_file.h"
#include "formats/native_index.h"
#include "formats/native_name.h"

#include "base/flow.h"
#include "base/mem.h"
#include "base/pool.h"

#include <stdatomic.h>
#include <string.h>

/* What is known of a box while it is written. */
typedef struct box_state {
    size_t element_size;
    bool encode;
    int64_t count, block_count;
    int64_t *chunk;            /* encoded: chunk shape */
    fsdp_hash *hashes;
    fsdp_frame *frames;
    int64_t done;              /* elements taken */
    fsdp_hasher *hasher;       /* raw: of a block that came in part */
    char *partial;             /* encoded: bytes of a chunk that came in part */
} box_state;

/* A whole block to be encoded, and where its frame goes. */
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
    encode_slot *slots;        /* two halves that take turns */
    size_t slot_count;
    fsdp_pool *pool;
};

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
};

/* --- set-up ------------------------------------------------------------------------------------ */

static const fsdp_shard_dataset *dataset_of(const fsdp_shard_writer *w, size_t box)
{
    return &w->datasets[w->boxes[box].dataset];
}

static fsdp_status init_state(fsdp_shard_writer *w, size_t i, fsdp_error *err)
{
    const fsdp_shard_box *box = &w->boxes[i];
    box_state *state = &w->states[i];
    state->element_size = fsdp_dtype_size(dataset_of(w, i)->dtype);
    state->count = fsdp_box_count(&box->box);
    state->encode = w->encode && fsdp_native_encodes(box->box.ndim, box->box.len, state->element_size);
    if (state->encode) {
        state->chunk = fsdp_arena_alloc(&w->arena, (size_t)box->box.ndim, sizeof *state->chunk);
        if (!state->chunk)
            return fsdp_fail_memory(err, "a chunk shape");
        fsdp_native_chunk(box->box.ndim, box->box.len, state->element_size, w->chunk_bytes, state->chunk);
    }
    state->block_count = fsdp_native_blocks(box->box.ndim, box->box.len, state->chunk, state->element_size);
    state->hashes = fsdp_arena_alloc(&w->arena, (size_t)state->block_count, sizeof *state->hashes);
    if (state->encode)
        state->frames = fsdp_arena_alloc(&w->arena, (size_t)state->block_count, sizeof *state->frames);
    if (!state->hashes || (state->encode && !state->frames))
        return fsdp_fail_memory(err, "block hashes");
    return FSDP_OK;
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
    w->encoder = opts->encoder;
    w->threads = opts->threads > 0 ? opts->threads : 1;
    w->chunk_bytes = opts->chunk_bytes > 0 ? opts->chunk_bytes : FSDP_BLOCK_BYTES;
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

int64_t fsdp_shard_index_bytes(const fsdp_shard_dataset *datasets, const fsdp_shard_box *boxes,
                               size_t box_count)
{
    uint64_t dims = 0, blocks = 0, names = 0;
    for (size_t i = 0; i < box_count; i++) {
        const fsdp_shard_dataset *dataset = &datasets[boxes[i].dataset];
        const fsdp_box *box = &boxes[i].box;
        dims += 3 * (uint64_t)box->ndim;
        blocks += (uint64_t)fsdp_native_blocks(box->ndim, box->len, NULL, fsdp_dtype_size(dataset->dtype));
        names += boxes[i].name_size;
    }
    return (int64_t)(sizeof(index_head) + box_count * sizeof(index_record) + dims * sizeof(int64_t) +
                     blocks * sizeof(fsdp_hash) + (names + 7) / 8 * 8);
}

/* The chunk shape of a dataset is that of its box: encoded datasets hold exactly one. */
static void set_chunks(const fsdp_shard_writer *w, fsdp_h5_dataset *datasets)
{
    for (size_t i = 0; i < w->box_count; i++)
        datasets[w->boxes[i].dataset].chunk = w->states[i].chunk;
}

static fsdp_status lay_out(fsdp_shard_writer *w, fsdp_shard_dataset *datasets, size_t dataset_count,
                           const fsdp_shard_link *links, size_t link_count, fsdp_error *err)
{
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
        if (!h5[i].link)
            st = fsdp_fail_memory(err, "a link name");
    }
    if (w->encode)
        set_chunks(w, h5);
    if (st == FSDP_OK)
        st = fsdp_h5_create(w->io, w->path, h5, dataset_count, w->index_room, w->level, &w->h5,
                            &w->index_offset, err);
    for (size_t i = 0; i < dataset_count && st == FSDP_OK; i++)
        datasets[i].offset = h5[i].offset;
    for (size_t i = 0; i < link_count && st == FSDP_OK; i++) {
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

static fsdp_status create(const fsdp_shard_opts *opts, fsdp_shard_dataset *datasets, size_t dataset_count,
                          const fsdp_shard_link *links, size_t link_count, fsdp_shard_writer *w,
                          fsdp_error *err)
{
    fsdp_flow("formats/native_write.c", "lay out %zu datasets", dataset_count);
    if (!w->encode)
        w->index_room = opts->index_room > 0 ? opts->index_room
                                             : fsdp_shard_index_bytes(datasets, w->boxes, w->box_count);
    FSDP_TRY(lay_out(w, datasets, dataset_count, links, link_count, err));
    /* An encoded file stays open for its chunks; its raw boxes go to space that is already theirs. */
    if (w->encode)
        return open_raw(w, 0, err);
    int64_t size = 0;
    fsdp_h5_file *h5 = w->h5;
    w->h5 = NULL;
    FSDP_TRY(fsdp_h5_close(h5, &size, err));
    return open_raw(w, size, err);
}

fsdp_status fsdp_shard_create(const fsdp_shard_opts *opts, fsdp_shard_dataset *datasets,
                              size_t dataset_count, const fsdp_shard_link *links, size_t link_count,
                              const fsdp_shard_box *boxes, size_t box_count,
                              fsdp_shard_writer **writer_out, fsdp_error *err)
{
    fsdp_shard_writer *w = NULL;
    fsdp_status st = new_writer(opts, datasets, boxes, box_count, &w, err);
    if (st == FSDP_OK)
        st = create(opts, datasets, dataset_count, links, link_count, w, err);
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

/* --- raw boxes --------------------------------------------------------------------------------- */

/* Byte strides of a box in its dataset. */
static void file_strides(const fsdp_shard_writer *w, size_t i, int64_t *strides_out)
{
    const fsdp_shard_box *box = &w->boxes[i];
    const fsdp_shard_dataset *dataset = dataset_of(w, i);
    fsdp_box_strides(box->box.ndim, box->packed ? box->box.len : dataset->shape, strides_out);
    for (int d = 0; d < box->box.ndim; d++)
        strides_out[d] *= (int64_t)w->states[i].element_size;
}

static int64_t file_offset(const fsdp_shard_writer *w, size_t i)
{
    return dataset_of(w, i)->offset + w->boxes[i].first * (int64_t)w->states[i].element_size;
}

static fsdp_status write_strided(fsdp_shard_writer *w, size_t i, int64_t first, int64_t count,
                                 const char *data, fsdp_error *err)
{
    size_t element_size = w->states[i].element_size;
    fsdp_file_runs runs;
    int64_t strides[FSDP_MAX_DIMS], offset, size;
    file_strides(w, i, strides);
    fsdp_file_runs_begin(&runs, w->boxes[i].box.ndim, w->boxes[i].box.len, strides, file_offset(w, i),
                         element_size, first, count);
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
                         file_offset(w, i) + first * (int64_t)element_size, err);
}

/* One range inside one block: every piece is hashed and written while it is in the cache. */
static fsdp_status hash_and_write(fsdp_shard_writer *w, size_t i, int64_t first, int64_t count,
                                  const char *data, fsdp_hasher *hasher, fsdp_error *err)
{
    int64_t element_size = (int64_t)w->states[i].element_size;
    int64_t step = FSDP_PIECE_BYTES / element_size;
    for (int64_t done = 0; done < count; done += step) {
        int64_t n = count - done < step ? count - done : step;
        fsdp_hasher_add(hasher, data, (size_t)(n * element_size));
        FSDP_TRY(write_raw(w, i, first + done, n, data, err));
        data += n * element_size;
    }
    return FSDP_OK;
}

static fsdp_status put_raw_block(fsdp_shard_writer *w, size_t i, int64_t block, int64_t first,
                                 int64_t count, const char *data, fsdp_error *err)
{
    size_t size = (size_t)count * w->states[i].element_size;
    if (size <= FSDP_PIECE_BYTES) {
        w->states[i].hashes[block] = fsdp_kernels_get()->hash(data, size);
        return write_raw(w, i, first, count, data, err);
    }
    fsdp_hasher *hasher = fsdp_hasher_create();
    if (!hasher)
        return fsdp_fail_memory(err, "a hash state");
    fsdp_status st = hash_and_write(w, i, first, count, data, hasher, err);
    w->states[i].hashes[block] = fsdp_hasher_value(hasher);
    fsdp_hasher_free(hasher);
    return st;
}

/* Part of a block: the hash state waits in the box until the block is complete. */
static fsdp_status put_raw_part(fsdp_shard_writer *w, size_t i, int64_t block, bool completes,
                                int64_t first, int64_t count, const char *data, fsdp_error *err)
{
    box_state *state = &w->states[i];
    if (!state->hasher && !(state->hasher = fsdp_hasher_create()))
        return fsdp_fail_memory(err, "a hash state");
    FSDP_TRY(hash_and_write(w, i, first, count, data, state->hasher, err));
    if (completes) {
        state->hashes[block] = fsdp_hasher_value(state->hasher);
        fsdp_hasher_free(state->hasher);
        state->hasher = NULL;
    }
    return FSDP_OK;
}

/* --- encoded boxes ------------------------------------------------------------------------------ */

static int64_t chunk_elements(const fsdp_shard_writer *w, size_t i)
{
    int64_t count = 1;
    for (int d = 0; d < w->boxes[i].box.ndim; d++)
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

static fsdp_status make_encoder(fsdp_encoder *encoder, int level, int64_t chunk_bytes, fsdp_error *err)
{
    encoder->slot_count = 4 * (size_t)encoder->threads;
    encoder->slots = fsdp_alloc(encoder->slot_count, sizeof *encoder->slots);
    if (!encoder->slots)
        return fsdp_fail_memory(err, "encoders");
    for (size_t s = 0; s < encoder->slot_count; s++)
        FSDP_TRY(make_slot(&encoder->slots[s], level, chunk_bytes, err));
    return fsdp_pool_create(encoder->threads > 1 ? encoder->threads : 0, encoder->slot_count, &encoder->pool, err);
}

fsdp_status fsdp_encoder_create(int threads, int level, int64_t chunk_bytes, fsdp_encoder **encoder_out,
                                fsdp_error *err)
{
    fsdp_encoder *encoder = fsdp_alloc(1, sizeof *encoder);
    if (!encoder)
        return fsdp_fail_memory(err, "encoders");
    encoder->threads = threads > 0 ? threads : 1;
    fsdp_status st = make_encoder(encoder, level, chunk_bytes > 0 ? chunk_bytes : FSDP_BLOCK_BYTES, err);
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

static fsdp_status need_encoder(fsdp_shard_writer *w, fsdp_error *err)
{
    if (w->encoder)
        return FSDP_OK;
    w->owns_encoder = true;
    return fsdp_encoder_create(w->threads, w->level, w->chunk_bytes, &w->encoder, err);
}

/* HDF5 chunks are always whole: an edge chunk is padded with zeros. */
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

static fsdp_status encode_block(void *user, fsdp_error *err)
{
    encode_slot *slot = user;
    fsdp_shard_writer *w = slot->writer;
    box_state *state = &w->states[slot->box];
    size_t size = (size_t)slot->count * state->element_size;
    size_t whole = (size_t)chunk_elements(w, slot->box) * state->element_size;
    state->hashes[slot->block] = fsdp_kernels_get()->hash(slot->data, size);
    const void *chunk = padded_chunk(slot, size, whole);
    if (!chunk)
        return fsdp_fail_memory(err, "a padded chunk");
    return fsdp_codec_encode(slot->codec, chunk, whole, state->element_size, slot->frame, slot->room,
                             &slot->size, err);
}

static fsdp_status store_block(encode_slot *slot, fsdp_error *err)
{
    fsdp_shard_writer *w = slot->writer;
    const fsdp_shard_box *box = &w->boxes[slot->box];
    box_state *state = &w->states[slot->box];
    int64_t first, count, coord[FSDP_MAX_DIMS];
    fsdp_native_block_range(box->box.ndim, box->box.len, state->chunk, state->element_size, slot->block,
                            &first, &count);
    for (int d = box->box.ndim - 1; d >= 0; d--) {
        coord[d] = first % box->box.len[d];
        first /= box->box.len[d];
    }
    fsdp_frame *frame = &state->frames[slot->block];
    fsdp_flow("formats/native_write.c", "block %lld: frame", (long long)slot->block);
    frame->size = (int64_t)slot->size;
    return fsdp_h5_write_chunk(w->h5, box->dataset, coord, slot->frame, slot->size, &frame->offset, err);
}

/*
 * Two halves of the slots take turns: while the workers encode one half, this thread stores the
 * frames of the other, in order.
 */
typedef struct encode_queue {
    fsdp_shard_writer *writer;
    size_t half;               /* 0 or 1: being filled */
    size_t filled, ready;      /* blocks in the half being filled, and in the other one */
} encode_queue;

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

static fsdp_status drain_queue(encode_queue *queue, fsdp_error *err)
{
    FSDP_TRY(turn_halves(queue, err));
    return turn_halves(queue, err);
}

/* --- pieces -> blocks ---------------------------------------------------------------------------- */

/* A range inside one block. */
typedef struct span {
    size_t box;
    int64_t block, first, count;
    bool starts, ends;         /* at the block's first element; at its last */
    const char *data;
} span;

/* The span of a piece that begins at element `at`. */
static span next_span(const fsdp_shard_writer *w, const fsdp_shard_piece *piece, int64_t at)
{
    const fsdp_box *box = &w->boxes[piece->box].box;
    const box_state *state = &w->states[piece->box];
    int64_t first, count;
    span s = {.box = piece->box, .first = at};
    s.block = fsdp_native_block_of(box->ndim, box->len, state->chunk, state->element_size, at);
    fsdp_native_block_range(box->ndim, box->len, state->chunk, state->element_size, s.block, &first, &count);
    int64_t end = piece->first + piece->count < first + count ? piece->first + piece->count : first + count;
    s.count = end - at;
    s.starts = at == first;
    s.ends = end == first + count;
    s.data = (const char *)piece->data + (size_t)(at - piece->first) * state->element_size;
    return s;
}

static fsdp_status keep_part(fsdp_shard_writer *w, const span *s, fsdp_error *err)
{
    box_state *state = &w->states[s->box];
    const fsdp_box *box = &w->boxes[s->box].box;
    int64_t first, count;
    fsdp_native_block_range(box->ndim, box->len, state->chunk, state->element_size, s->block, &first, &count);
    if (!state->partial && !(state->partial = fsdp_alloc_pages((size_t)count * state->element_size)))
        return fsdp_fail_memory(err, "a chunk in part");
    memcpy(state->partial + (size_t)(s->first - first) * state->element_size, s->data,
           (size_t)s->count * state->element_size);
    return FSDP_OK;
}

static fsdp_status encode_span(encode_queue *queue, const span *s, fsdp_error *err)
{
    fsdp_shard_writer *w = queue->writer;
    if (s->starts && s->ends)
        return queue_block(queue, s->box, s->block, s->count, s->data, err);
    FSDP_TRY(keep_part(w, s, err));
    if (!s->ends)
        return FSDP_OK;
    int64_t first, count;
    const fsdp_box *box = &w->boxes[s->box].box;
    box_state *state = &w->states[s->box];
    fsdp_native_block_range(box->ndim, box->len, state->chunk, state->element_size, s->block, &first, &count);
    FSDP_TRY(queue_block(queue, s->box, s->block, count, state->partial, err));
    /* The workers must be done with the buffer before the next part goes into it. */
    FSDP_TRY(drain_queue(queue, err));
    fsdp_free(state->partial);
    state->partial = NULL;
    return FSDP_OK;
}

static fsdp_status put_span(fsdp_shard_writer *w, const span *s, fsdp_error *err)
{
    fsdp_flow("formats/native_write.c", "block %lld, %lld elements: hash and write",
              (long long)s->block, (long long)s->count);
    if (s->starts && s->ends)
        return put_raw_block(w, s->box, s->block, s->first, s->count, s->data, err);
    return put_raw_part(w, s->box, s->block, s->ends, s->first, s->count, s->data, err);
}

static fsdp_status check_piece(fsdp_shard_writer *w, const fsdp_shard_piece *piece, fsdp_error *err)
{
    box_state *state = &w->states[piece->box];
    if (piece->first != state->done || piece->count > state->count - piece->first)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': box %zu is written out of order", w->path, piece->box);
    state->done += piece->count;
    return FSDP_OK;
}

static fsdp_status write_piece(fsdp_shard_writer *w, encode_queue *queue, const fsdp_shard_piece *piece,
                               fsdp_error *err)
{
    FSDP_TRY(check_piece(w, piece, err));
    bool encode = w->states[piece->box].encode;
    for (int64_t at = piece->first; at < piece->first + piece->count;) {
        span s = next_span(w, piece, at);
        FSDP_TRY(encode ? encode_span(queue, &s, err) : put_span(w, &s, err));
        at += s.count;
    }
    return FSDP_OK;
}

typedef struct raw_work {
    fsdp_shard_writer *writer;
    const fsdp_shard_piece *pieces;
    size_t count;
    size_t *first_block;       /* per piece: number of its first span over all pieces */
} raw_work;

static fsdp_status write_raw_task(void *user, size_t task, fsdp_error *err)
{
    raw_work *work = user;
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
    span s = next_span(w, piece, at);
    return put_span(w, &s, err);
}

/* Pieces that are whole boxes are cut into blocks that any worker may take. */
static fsdp_status write_raw_parallel(fsdp_shard_writer *w, const fsdp_shard_piece *pieces, size_t count,
                                      fsdp_error *err)
{
    raw_work work = {w, pieces, count, fsdp_alloc(count + 1, sizeof(size_t))};
    if (!work.first_block)
        return fsdp_fail_memory(err, "a list of blocks");
    fsdp_status st = FSDP_OK;
    for (size_t p = 0; p < count && st == FSDP_OK; p++) {
        st = check_piece(w, &pieces[p], err);
        work.first_block[p + 1] = work.first_block[p] + (size_t)w->states[pieces[p].box].block_count;
    }
    if (st == FSDP_OK)
        st = fsdp_parallel(w->threads, work.first_block[count], write_raw_task, &work, err);
    fsdp_free(work.first_block);
    return st;
}

static bool pieces_are_whole(const fsdp_shard_writer *w, const fsdp_shard_piece *pieces, size_t count)
{
    for (size_t p = 0; p < count; p++)
        if (pieces[p].first != 0 || pieces[p].count != w->states[pieces[p].box].count)
            return false;
    return true;
}

fsdp_status fsdp_shard_write(fsdp_shard_writer *writer, const fsdp_shard_piece *pieces, size_t count,
                             fsdp_error *err)
{
    if (!writer->encode && writer->threads > 1 && pieces_are_whole(writer, pieces, count))
        return write_raw_parallel(writer, pieces, count, err);
    encode_queue queue = {.writer = writer};
    if (writer->encode)
        FSDP_TRY(need_encoder(writer, err));
    fsdp_status st = FSDP_OK;
    for (size_t p = 0; p < count && st == FSDP_OK; p++)
        st = write_piece(writer, &queue, &pieces[p], err);
    if (writer->encode) {
        fsdp_status drained = drain_queue(&queue, st == FSDP_OK ? err : NULL);
        st = st != FSDP_OK ? st : drained;
    }
    return st;
}

/* --- the index ----------------------------------------------------------------------------------- */

typedef struct index_sizes {
    uint64_t dims, blocks, frames, name_bytes, total;
} index_sizes;

static index_sizes measure_index(const fsdp_shard_writer *w)
{
    index_sizes sizes = {0};
    for (size_t i = 0; i < w->box_count; i++) {
        sizes.dims += 3 * (uint64_t)w->boxes[i].box.ndim;
        sizes.blocks += (uint64_t)w->states[i].block_count;
        sizes.frames += w->states[i].encode ? (uint64_t)w->states[i].block_count : 0;
        sizes.name_bytes += w->boxes[i].name_size;
    }
    sizes.name_bytes = (sizes.name_bytes + 7) / 8 * 8;
    sizes.total = sizeof(index_head) + w->box_count * sizeof(index_record) + sizes.dims * sizeof(int64_t) +
                  sizes.blocks * sizeof(fsdp_hash) + sizes.frames * sizeof(fsdp_frame) + sizes.name_bytes;
    return sizes;
}

static void add_head(const fsdp_shard_writer *w, const index_sizes *sizes, fsdp_text *text)
{
    index_head head = {.version = 1, .rank = w->id.rank, .world = w->id.world, .step = w->id.step,
                       .size = sizes->total, .boxes = w->box_count, .dims = sizes->dims,
                       .blocks = sizes->blocks, .frames = sizes->frames, .name_bytes = sizes->name_bytes};
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
        const fsdp_shard_dataset *dataset = dataset_of(w, i);
        index_record record = {.tensor = box->tensor, .part = box->part,
                               .dtype = (uint16_t)dataset->dtype, .ndim = (uint16_t)box->box.ndim,
                               .flags = (state->encode ? FSDP_INDEX_ENCODED : 0) |
                                        (box->packed ? FSDP_INDEX_PACKED : 0),
                               .offset = state->encode ? 0 : file_offset(w, i),
                               .dims = at.dims, .hashes = at.blocks, .frames = at.frames,
                               .block_count = (uint64_t)state->block_count,
                               .name = at.name_bytes, .name_size = box->name_size};
        fsdp_text_add(text, (const char *)&record, sizeof record);
        at.dims += 3 * (uint64_t)box->box.ndim;
        at.blocks += (uint64_t)state->block_count;
        at.frames += state->encode ? (uint64_t)state->block_count : 0;
        at.name_bytes += box->name_size;
    }
}

static void add_dims(const fsdp_shard_writer *w, fsdp_text *text)
{
    for (size_t i = 0; i < w->box_count; i++) {
        const fsdp_box *box = &w->boxes[i].box;
        size_t size = (size_t)box->ndim * sizeof(int64_t);
        int64_t strides[FSDP_MAX_DIMS];
        file_strides(w, i, strides);
        fsdp_text_add(text, (const char *)box->lo, size);
        fsdp_text_add(text, (const char *)box->len, size);
        fsdp_text_add(text, (const char *)(w->states[i].encode ? w->states[i].chunk : strides), size);
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

/* An encoded file gets its index dataset now that the size is known, and libhdf5 is done with it. */
static fsdp_status close_layout(fsdp_shard_writer *w, int64_t index_size, fsdp_error *err)
{
    fsdp_h5_file *h5 = w->h5;
    int64_t size = 0;
    w->index_room = index_size;
    FSDP_TRY(fsdp_h5_add_index(h5, index_size, &w->index_offset, err));
    w->h5 = NULL;
    return fsdp_h5_close(h5, &size, err);
}

fsdp_status fsdp_shard_put_index(fsdp_shard_writer *w, const void *data, size_t size, fsdp_error *err)
{
    if (w->h5)
        FSDP_TRY(close_layout(w, (int64_t)size, err));
    if (w->joined || (int64_t)size > w->index_room - w->index_done)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': the index does not fit in its place", w->path);
    fsdp_flow("formats/native_write.c", "index: %zu bytes", size);
    fsdp_hasher_add(w->index_hasher, data, size);
    FSDP_TRY(fsdp_io_write(w->file, w->path, data, size, w->index_offset + w->index_done, err));
    w->index_done += (int64_t)size;
    return FSDP_OK;
}

static fsdp_status put_own_index(fsdp_shard_writer *w, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = fsdp_shard_segment(w, &text, err);
    if (st == FSDP_OK)
        st = fsdp_shard_put_index(w, text.data, text.size, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status seal_file(fsdp_shard_writer *w, fsdp_shard_seal *seal_out, fsdp_error *err)
{
    if (!w->joined && w->index_done == 0)
        FSDP_TRY(put_own_index(w, err));
    if (w->index_done != w->index_room)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': the index is incomplete", w->path);
    fsdp_shard_seal seal = {.index_offset = w->index_offset, .index_size = w->index_done,
                            .index_hash = fsdp_hasher_value(w->index_hasher)};
    int errnum = w->file->ops->size(w->file, &seal.size);
    if (errnum < 0)
        return fsdp_fail_errno(err, -errnum, "cannot get the size of '%s'", w->path);
    if (w->sync)
        FSDP_TRY(fsdp_io_sync(w->file, w->path, err));
    FSDP_TRY(fsdp_io_close(&w->file, w->path, err));
    if (seal_out)
        *seal_out = seal;
    return FSDP_OK;
}

fsdp_status fsdp_shard_finish(fsdp_shard_writer *writer, fsdp_shard_seal *seal_out, fsdp_error *err)
{
    fsdp_status st = seal_file(writer, seal_out, err);
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

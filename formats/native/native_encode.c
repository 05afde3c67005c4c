/*
 * Blocks encoded into frames: workers hash, shuffle and compress; one thread stores the frames
 * in order, so that the file does not depend on the number of workers. The mirror is
 * fsdp_shard_decode in native_read.c.
 */
#include "formats/native/native_write.h"

#include "base/data/flow.h"
#include "base/core/pool.h"

#include <string.h>

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
    fsdp_flow("formats/native/native_encode.c", "block %lld: frame", (long long)slot->block);
    frame->size = (int64_t)slot->size;
    FSDP_TRY(fsdp_h5_write_chunk(w->h5,
                                 &(fsdp_h5_chunk){box->dataset, coord, slot->frame, slot->size},
                                 &frame->offset, err));
    if (w->sync)
        fsdp_io_begin_sync(w->file, frame->offset, frame->size);
    fsdp_writer_alive(w, false);
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

fsdp_status fsdp_encode_drain(encode_queue *queue, fsdp_error *err)
{
    FSDP_TRY(turn_halves(queue, err));
    return turn_halves(queue, err);
}

/* --- spans --- */

fsdp_status fsdp_encode_begin(fsdp_shard_writer *w, encode_queue *queue, fsdp_error *err)
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

fsdp_status fsdp_encode_span(encode_queue *queue, const block_span *s, fsdp_error *err)
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
    FSDP_TRY(fsdp_encode_drain(queue, err));
    fsdp_free(state->partial);
    state->partial = NULL;
    return FSDP_OK;
}

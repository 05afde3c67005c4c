/*
 * Writes a shard file: libhdf5 lays out the datasets (hdf5_file.c), then worker threads hash and
 * write their bytes. The mirror is native_read.c; native_index.h has the layout of the index.
 *
 * Raw boxes: libhdf5 closes the file right after the layout, and pwrite puts the bytes at the
 * offsets of the datasets, each piece hashed while it is in the cache. Encoded boxes go through
 * native_encode.c; native_index_write.c writes the index.
 */
#include "formats/hdf5/hdf5_link_name.h"
#include "formats/native/native_write.h"

#include "base/data/box_internal.h"
#include "base/data/flow.h"
#include "base/core/pool.h"

#include <string.h>

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

static fsdp_status init_state(fsdp_shard_writer *w, size_t i, fsdp_error *err)
{
    const fsdp_shard_box *box = &w->boxes[i];
    box_state *state = &w->states[i];
    state->element_size = fsdp_dtype_size(fsdp_writer_dataset(w, i)->dtype);
    fsdp_box whole = fsdp_shard_box_box(box);
    state->count = fsdp_box_count(&whole);
    state->encode = w->encode && fsdp_native_encodes(box->ndim, box->len, state->element_size);
    if (state->encode) {
        state->chunk = fsdp_arena_alloc(&w->arena, (size_t)box->ndim, sizeof *state->chunk);
        if (!state->chunk)
            return fsdp_fail_memory(err, "a chunk shape");
        fsdp_native_chunk(box->ndim, box->len, state->element_size, w->chunk_bytes, state->chunk);
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

/* Sets the chunk shape of each dataset to that of its box: encoded datasets hold one box. */
static void set_chunks(const fsdp_shard_writer *w, fsdp_h5_dataset *datasets)
{
    for (size_t i = 0; i < w->box_count; i++)
        datasets[w->boxes[i].dataset].chunk = w->states[i].chunk;
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
    if (w->encode)
        set_chunks(w, h5);
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
    fsdp_writer_strides(w, i, strides);
    fsdp_file_runs_begin(&runs,
                         &(fsdp_file_place){w->boxes[i].ndim, w->boxes[i].len, strides,
                                            fsdp_writer_offset(w, i), element_size},
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
                         fsdp_writer_offset(w, i) + first * (int64_t)element_size, err);
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
        fsdp_writer_alive(w, false);
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
        fsdp_writer_alive(w, false);
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
        begin_sync(w, fsdp_writer_offset(w, s->box) + s->first * (int64_t)state->element_size,
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
        FSDP_TRY(encode ? fsdp_encode_span(queue, &s, err) : put_span(w, &s, err));
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
        FSDP_TRY(fsdp_encode_begin(writer, &queue, err));
    fsdp_status st = FSDP_OK;
    for (size_t p = 0; p < count && st == FSDP_OK; p++)
        st = write_piece(writer, &queue, &pieces[p], err);
    if (writer->encode) {
        fsdp_status drained = fsdp_encode_drain(&queue, st == FSDP_OK ? err : NULL);
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
    int64_t from = fsdp_writer_offset(w, pieces[0].box), to = fsdp_writer_offset(w, last->box);
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
    fsdp_status st = fsdp_writer_close(writer, record_out, err);
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

/*
 * Reads a shard file without libhdf5: the index has the place of every block. The mirror is
 * native_write.c. Every number of the index is checked against the file's bounds although its
 * hash came from the manifest, because a hostile manifest is consistent with itself.
 */
#include "formats/native/native_index.h"

#include "base/data/box_internal.h"
#include "base/data/flow.h"
#include "base/core/mem.h"

#include <string.h>

typedef struct segment {
    uint32_t rank;
    size_t first, count; /* range of its boxes in the reader's array */
} segment;

struct fsdp_shard_reader {
    fsdp_file *file;
    char *path;
    int64_t size;
    int64_t unclaimed; /* while the index is checked: bytes that no box claims yet */
    char *index;       /* bytes of the index; boxes point into it */
    fsdp_stored_box *boxes;
    size_t box_count;
    segment *segments;
    size_t segment_count;
};

/* --- checking the index ----------------------------------------------------------------------- */

/* The arrays of a segment in memory, and their lengths. */
typedef struct segment_view {
    const index_head *head;
    const index_record *records;
    const int64_t *dims;
    const fsdp_hash *hashes;
    const fsdp_frame *frames;
    const char *names;
} segment_view;

static fsdp_status bad_index(const fsdp_shard_reader *reader, fsdp_error *err, const char *what)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the shard index is damaged: %s", reader->path,
                     what);
}

static bool take(uint64_t count, uint64_t size, uint64_t *left)
{
    if (count > *left / size)
        return false;
    *left -= count * size;
    return true;
}

static fsdp_status view_segment(const fsdp_shard_reader *reader, const char *at, uint64_t left,
                                segment_view *view, fsdp_error *err)
{
    if (left < sizeof(index_head))
        return bad_index(reader, err, "it ends inside a head");
    const index_head *head = (const index_head *)(const void *)at;
    if (memcmp(head->magic, FSDP_INDEX_MAGIC, sizeof head->magic) != 0)
        return bad_index(reader, err, "it does not begin with its mark");
    if (head->version != 1)
        return fsdp_fail(
            err, FSDP_ERR_NOT_FOUND,
            "'%s': its shard index has version %u, which this fsdp cannot read; use a newer fsdp",
            reader->path, head->version);
    if (head->size > left || head->size < sizeof *head || head->size % 8 != 0)
        return bad_index(reader, err, "a segment is longer than the index");
    uint64_t room = head->size - sizeof *head;
    bool fits = take(head->boxes, sizeof(index_record), &room) &&
                take(head->dims, sizeof(int64_t), &room) &&
                take(head->blocks, sizeof(fsdp_hash), &room) &&
                take(head->frames, sizeof(fsdp_frame), &room) && take(head->name_bytes, 1, &room);
    if (!fits || room != 0)
        return bad_index(reader, err, "its parts do not add up");
    view->head = head;
    view->records = (const index_record *)(const void *)(at + sizeof *head);
    view->dims = (const int64_t *)(const void *)(view->records + head->boxes);
    view->hashes = (const fsdp_hash *)(const void *)(view->dims + head->dims);
    view->frames = (const fsdp_frame *)(const void *)(view->hashes + head->blocks);
    view->names = (const char *)(view->frames + head->frames);
    return FSDP_OK;
}

static bool range_inside(uint64_t first, uint64_t count, uint64_t total)
{
    return first <= total && count <= total - first;
}

/* True when the bytes of a raw box lie inside the file and no byte belongs to two elements. */
static bool raw_inside(const fsdp_stored_box *box, int64_t file_size)
{
    if (box->offset < 0 || box->offset > file_size)
        return false;
    int64_t room = file_size - box->offset, reach = (int64_t)box->element_size;
    for (int d = box->ndim - 1; d >= 0; d--) {
        int64_t step;
        if (box->stride[d] < 0 || (box->len[d] > 1 && box->stride[d] < reach) ||
            fsdp_mul_overflow(box->stride[d], box->len[d] - 1, &step) ||
            fsdp_add_overflow(reach, step, &reach))
            return false;
    }
    return reach <= room;
}

/* A packed box must be one run: its strides are the row-major ones. */
static bool strides_are_packed(const fsdp_stored_box *box)
{
    int64_t step = (int64_t)box->element_size;
    for (int d = box->ndim - 1; d >= 0; d--) {
        if (box->stride[d] != step)
            return false;
        step *= box->len[d];
    }
    return true;
}

static bool chunks_are_sound(const fsdp_stored_box *box, int64_t file_size)
{
    int64_t bytes = (int64_t)box->element_size;
    bool split = false;
    for (int d = box->ndim - 1; d >= 0; d--) {
        if (box->chunk[d] < 1 || box->chunk[d] > box->len[d] || (split && box->chunk[d] != 1))
            return false;
        split = split || box->chunk[d] != box->len[d];
        bytes *= box->chunk[d];
        if (bytes > FSDP_BLOCK_BYTES && bytes != (int64_t)box->element_size)
            return false;
    }
    for (int64_t b = 0; b < box->block_count; b++) {
        const fsdp_frame *frame = &box->frames[b];
        if (frame->offset < 0 || frame->size < 1 || frame->offset > file_size ||
            frame->size > file_size - frame->offset ||
            frame->size > (int64_t)fsdp_codec_bound(FSDP_BLOCK_BYTES))
            return false;
    }
    return true;
}

/* Claims the bytes of a box. Boxes do not overlap, so together they cannot claim more bytes than
 * the file has. Boxes or frames that share bytes would let a small file hold a large tensor. */
static bool take_file_bytes(fsdp_shard_reader *reader, const fsdp_stored_box *box)
{
    if (!box->encoded)
        reader->unclaimed -= box->count * (int64_t)box->element_size;
    for (int64_t b = 0; box->encoded && b < box->block_count && reader->unclaimed >= 0; b++)
        reader->unclaimed -= box->frames[b].size;
    return reader->unclaimed >= 0;
}

static fsdp_status read_record(fsdp_shard_reader *reader, const segment_view *view,
                               const index_record *record, fsdp_stored_box *box, fsdp_error *err)
{
    const index_head *head = view->head;
    uint64_t ndim = record->ndim;
    bool encoded = record->flags & FSDP_INDEX_ENCODED;
    if (ndim > FSDP_MAX_DIMS || !range_inside(record->dims, 3 * ndim, head->dims) ||
        !range_inside(record->hashes, record->block_count, head->blocks) ||
        (encoded && !range_inside(record->frames, record->block_count, head->frames)) ||
        !range_inside(record->name, record->name_size, head->name_bytes))
        return bad_index(reader, err, "a record points outside the index");
    const int64_t *dims = view->dims + record->dims;
    *box = (fsdp_stored_box){.tensor = record->tensor,
                             .part = record->part,
                             .dtype = (fsdp_dtype)record->dtype,
                             .element_size = fsdp_dtype_size((fsdp_dtype)record->dtype),
                             .encoded = encoded,
                             .packed = record->flags & FSDP_INDEX_PACKED,
                             .ndim = (int)ndim,
                             .lo = dims,
                             .len = dims + ndim,
                             .stride = encoded ? NULL : dims + 2 * ndim,
                             .chunk = encoded ? dims + 2 * ndim : NULL,
                             .offset = record->offset,
                             .name = view->names + record->name,
                             .name_size = record->name_size,
                             .hashes = view->hashes + record->hashes,
                             .block_count = (int64_t)record->block_count,
                             .frames = encoded ? view->frames + record->frames : NULL};
    if (box->element_size == 0)
        return bad_index(reader, err, "a record has an unknown dtype");
    if (fsdp_shape_check(box->ndim, box->len, box->element_size, NULL) != FSDP_OK)
        return bad_index(reader, err, "a box has an impossible shape");
    box->count = 1;
    for (int d = 0; d < box->ndim; d++) {
        if (box->lo[d] < 0 || box->len[d] < 1 || box->lo[d] > INT64_MAX / 2 - box->len[d])
            return bad_index(reader, err, "a box is empty or has an impossible offset");
        box->count *= box->len[d];
    }
    if (encoded ? box->ndim == 0 || !chunks_are_sound(box, reader->size)
                : !raw_inside(box, reader->size))
        return bad_index(reader, err, "a box lies outside the file");
    if (!encoded && box->packed && !strides_are_packed(box))
        return bad_index(reader, err, "a packed box has gaps");
    if (box->block_count !=
        fsdp_native_blocks(&(fsdp_blocking){box->ndim, box->len, box->chunk, box->element_size}))
        return bad_index(reader, err, "a box has the wrong number of blocks");
    if (!take_file_bytes(reader, box))
        return bad_index(reader, err, "its boxes hold more bytes than the file");
    return FSDP_OK;
}

static bool in_order(const fsdp_stored_box *a, const fsdp_stored_box *b)
{
    return a->tensor < b->tensor || (a->tensor == b->tensor && a->part < b->part);
}

static fsdp_status read_segment(fsdp_shard_reader *reader, const segment_view *view, size_t first,
                                fsdp_error *err)
{
    for (uint64_t i = 0; i < view->head->boxes; i++) {
        fsdp_stored_box *box = &reader->boxes[first + i];
        FSDP_TRY(read_record(reader, view, &view->records[i], box, err));
        if (i > 0 && !in_order(box - 1, box))
            return bad_index(reader, err, "its records are not in order");
    }
    return FSDP_OK;
}

static fsdp_status check_identity(const fsdp_shard_reader *reader, const index_head *head,
                                  uint32_t rank, const fsdp_shard_id *id, fsdp_error *err)
{
    if (memcmp(head->run, id->run, sizeof id->run) != 0 || head->step != id->step)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' belongs to a different run or step (step %lld)", reader->path,
                         (long long)head->step);
    if (head->world != id->world || head->rank != rank || rank >= id->world)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is the file of rank %u of %u, not of rank %u of %u", reader->path,
                         head->rank, head->world, rank, id->world);
    return FSDP_OK;
}

/* Walks the segments twice: the first walk counts, the second fills. */
static fsdp_status walk_segments(fsdp_shard_reader *reader, uint64_t size, const fsdp_shard_id *id,
                                 bool fill, fsdp_error *err)
{
    size_t boxes = 0, segments = 0;
    for (uint64_t at = 0; at < size; segments++) {
        segment_view view = {0};
        FSDP_TRY(view_segment(reader, reader->index + at, size - at, &view, err));
        FSDP_TRY(check_identity(reader, view.head, id->rank + (uint32_t)segments, id, err));
        if (fill) {
            reader->segments[segments] = (segment){view.head->rank, boxes, view.head->boxes};
            FSDP_TRY(read_segment(reader, &view, boxes, err));
        }
        boxes += view.head->boxes;
        at += view.head->size;
    }
    reader->box_count = boxes;
    reader->segment_count = segments;
    return FSDP_OK;
}

static fsdp_status read_index(fsdp_shard_reader *reader, const fsdp_file_record *record,
                              const fsdp_shard_id *id, fsdp_error *err)
{
    if (record->index_offset < 0 || record->index_size < (int64_t)sizeof(index_head) ||
        record->index_offset > reader->size ||
        record->index_size > reader->size - record->index_offset)
        return bad_index(reader, err, "the manifest places it outside the file");
    reader->index = fsdp_alloc_pages((size_t)record->index_size);
    if (!reader->index)
        return fsdp_fail_memory(err, "a shard index");
    FSDP_TRY(fsdp_io_read(reader->file, reader->path, reader->index, (size_t)record->index_size,
                          record->index_offset, err));
    fsdp_hash hash = fsdp_kernels_get()->hash(reader->index, (size_t)record->index_size);
    if (memcmp(&hash, &record->index_hash, sizeof hash) != 0)
        return bad_index(reader, err, "its hash is not the one in the manifest");
    fsdp_flow("formats/native/native_read.c", "index: %lld bytes", (long long)record->index_size);
    FSDP_TRY(walk_segments(reader, (uint64_t)record->index_size, id, false, err));
    reader->boxes = fsdp_alloc(reader->box_count, sizeof *reader->boxes);
    reader->segments = fsdp_alloc(reader->segment_count, sizeof *reader->segments);
    if (!reader->boxes || !reader->segments)
        return fsdp_fail_memory(err, "a shard index");
    return walk_segments(reader, (uint64_t)record->index_size, id, true, err);
}

/* --- opening ---------------------------------------------------------------------------------- */

static fsdp_status open_reader(fsdp_io *io, const char *path, const fsdp_file_record *record,
                               const fsdp_shard_id *id, fsdp_shard_reader *reader, fsdp_error *err)
{
    reader->path = fsdp_strndup(path, strlen(path));
    if (!reader->path)
        return fsdp_fail_memory(err, "a path");
    /* a checkpoint holds plain files; a link could lead out of it */
    unsigned flags = record->follows_links ? FSDP_IO_READ : fsdp_io_read_beneath(io);
    FSDP_TRY(fsdp_io_open(io, path, flags, &reader->file, err));
    int errnum = reader->file->ops->size(reader->file, &reader->size);
    if (errnum < 0)
        return fsdp_fail_errno(err, -errnum, "cannot get the size of '%s'", path);
    if (reader->size != record->size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' has %lld bytes, %lld were saved", path,
                         (long long)reader->size, (long long)record->size);
    reader->unclaimed = reader->size;
    return read_index(reader, record, id, err);
}

fsdp_status fsdp_shard_open(fsdp_io *io, const char *path, const fsdp_file_record *record,
                            const fsdp_shard_id *id, fsdp_shard_reader **reader_out,
                            fsdp_error *err)
{
    fsdp_shard_reader *reader = fsdp_alloc(1, sizeof *reader);
    if (!reader)
        return fsdp_fail_memory(err, "a shard reader");
    fsdp_status st = open_reader(io, path, record, id, reader, err);
    if (st != FSDP_OK) {
        fsdp_shard_close(reader);
        return st;
    }
    *reader_out = reader;
    return FSDP_OK;
}

void fsdp_shard_close(fsdp_shard_reader *reader)
{
    if (!reader)
        return;
    (void)fsdp_io_close(&reader->file, reader->path, NULL);
    fsdp_free(reader->segments);
    fsdp_free(reader->boxes);
    fsdp_free(reader->index);
    fsdp_free(reader->path);
    fsdp_free(reader);
}

/* --- boxes and blocks ------------------------------------------------------------------------- */

const char *fsdp_shard_path(const fsdp_shard_reader *reader)
{
    return reader->path;
}

size_t fsdp_shard_box_count(const fsdp_shard_reader *reader)
{
    return reader->box_count;
}

const fsdp_stored_box *fsdp_shard_box_at(const fsdp_shard_reader *reader, size_t index)
{
    return &reader->boxes[index];
}

static const segment *segment_of_rank(const fsdp_shard_reader *reader, uint32_t rank)
{
    uint32_t first = reader->segments[0].rank;
    if (rank < first || rank - first >= reader->segment_count)
        return NULL;
    return &reader->segments[rank - first];
}

const fsdp_stored_box *fsdp_shard_find(const fsdp_shard_reader *reader, uint32_t rank,
                                       uint32_t tensor, uint32_t part)
{
    const segment *stored = segment_of_rank(reader, rank);
    if (!stored)
        return NULL;
    const fsdp_stored_box wanted = {.tensor = tensor, .part = part};
    size_t low = stored->first, high = stored->first + stored->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (in_order(&reader->boxes[middle], &wanted))
            low = middle + 1;
        else
            high = middle;
    }
    if (low == stored->first + stored->count || in_order(&wanted, &reader->boxes[low]))
        return NULL;
    return &reader->boxes[low];
}

fsdp_box fsdp_stored_box_box(const fsdp_stored_box *stored)
{
    fsdp_box box = {.ndim = stored->ndim};
    memcpy(box.lo, stored->lo, (size_t)stored->ndim * sizeof(int64_t));
    memcpy(box.len, stored->len, (size_t)stored->ndim * sizeof(int64_t));
    return box;
}

void fsdp_block_range(const fsdp_stored_box *box, int64_t block, int64_t *first, int64_t *count)
{
    fsdp_native_block_range(&(fsdp_blocking){box->ndim, box->len, box->chunk, box->element_size},
                            block, first, count);
}

/* --- bytes ------------------------------------------------------------------------------------ */

static fsdp_status read_elements(fsdp_shard_reader *reader, const fsdp_stored_box *box,
                                 int64_t first, int64_t count, void *data, fsdp_error *err)
{
    if (box->packed)
        return fsdp_io_read(reader->file, reader->path, data, (size_t)count * box->element_size,
                            box->offset + first * (int64_t)box->element_size, err);
    fsdp_file_runs runs;
    int64_t offset, size;
    char *at = data;
    fsdp_file_runs_begin(
        &runs, &(fsdp_file_place){box->ndim, box->len, box->stride, box->offset, box->element_size},
        first, count);
    while (fsdp_file_runs_next(&runs, &offset, &size)) {
        FSDP_TRY(fsdp_io_read(reader->file, reader->path, at, (size_t)size, offset, err));
        at += size;
    }
    return FSDP_OK;
}

fsdp_status fsdp_shard_read(fsdp_shard_reader *reader, const fsdp_stored_box *box, int64_t first,
                            int64_t count, void *data, fsdp_error *err)
{
    FSDP_TRY(read_elements(reader, box, first, count, data, err));
    fsdp_flow("formats/native/native_read.c",
              "%lld elements at element %lld of box %u of tensor %u", (long long)count,
              (long long)first, box->part, box->tensor);
    return FSDP_OK;
}

void fsdp_decoder_release(fsdp_decoder *decoder)
{
    fsdp_codec_free(decoder->codec);
    fsdp_free(decoder->frame);
    fsdp_free(decoder->chunk);
    *decoder = (fsdp_decoder){0};
}

static bool fit_room(void **buffer, size_t *room, size_t need)
{
    if (*room >= need)
        return true;
    fsdp_free(*buffer);
    *buffer = fsdp_alloc_pages(need);
    *room = *buffer ? need : 0;
    return *buffer != NULL;
}

fsdp_status fsdp_shard_decode(fsdp_shard_reader *reader, const fsdp_stored_box *box, int64_t block,
                              fsdp_decoder *decoder, const void **data_out, fsdp_error *err)
{
    const fsdp_frame *frame = &box->frames[block];
    size_t whole = box->element_size;
    for (int d = 0; d < box->ndim; d++)
        whole *= (size_t)box->chunk[d];
    if (!decoder->codec)
        FSDP_TRY(fsdp_codec_create(0, &decoder->codec, err));
    if (!fit_room(&decoder->frame, &decoder->frame_room, (size_t)frame->size) ||
        !fit_room(&decoder->chunk, &decoder->chunk_room, whole))
        return fsdp_fail_memory(err, "a decoded block");
    FSDP_TRY(fsdp_io_read(reader->file, reader->path, decoder->frame, (size_t)frame->size,
                          frame->offset, err));
    fsdp_coding coding = {decoder->frame, (size_t)frame->size, decoder->chunk, whole,
                          box->element_size};
    fsdp_status st = fsdp_codec_decode(decoder->codec, &coding, NULL);
    if (st == FSDP_ERR_DAMAGED)
        return fsdp_block_damaged(reader, box, block, err);
    fsdp_flow("formats/native/native_read.c", "block %lld: frame decoded", (long long)block);
    *data_out = decoder->chunk;
    return st == FSDP_OK ? st : fsdp_fail_memory(err, "a decoder");
}

fsdp_status fsdp_block_damaged(const fsdp_shard_reader *reader, const fsdp_stored_box *box,
                               int64_t block, fsdp_error *err)
{
    char name[160];
    int64_t first, count, row = box->count;
    fsdp_block_range(box, block, &first, &count);
    if (box->ndim > 0)
        row = box->count / box->len[0];
    int64_t top = box->ndim > 0 ? box->lo[0] : 0;
    return fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s' block %lld is damaged: tensor '%s' rows %lld..%lld do not match their xxh3",
        reader->path, (long long)block,
        fsdp_printable(box->name, box->name_size, name, sizeof name),
        (long long)(top + first / row), (long long)(top + (first + count - 1) / row));
}

/*
 * Directories of torch.distributed.checkpoint as a source. A pickled `.metadata` (or one
 * `__R.metadata` per rank) maps boxes of tensors to ranges of the files next to it. Every range
 * ("item") is a whole torch.save zip.
 *
 *   .metadata -> dcp_metadata.c (names, boxes, items) -> here: tensors with items as chunks, values
 *
 * There may be hundreds of thousands of items, so the zip of a tensor's item is opened at its
 * first read.
 */
#include "formats/dcp/dcp.h"

#include "base/data/flow.h"
#include "base/text.h"
#include "formats/zip/zip.h"
#include "kernels/kernels.h"

#include <pthread.h>
#include <string.h>

enum { BITS_OF_METADATA = 100, BITS_OF_RANKS = 90, BITS_OF_REMAINS = 50 };

/* The place of an item's elements. */
typedef struct placed_item {
    int64_t offset;
    unsigned fix;
    torch_storage storage;
    int64_t strides[FSDP_MAX_DIMS];
} placed_item;

typedef struct tensor_item {
    int64_t offset, length;
    const int64_t *shape; /* shared between items */
    placed_item *placed;  /* NULL until first needed */
    int file;
    uint8_t ndim, dtype;
} tensor_item;
_Static_assert(FSDP_MAX_DIMS <= UINT8_MAX && FSDP_DTYPE_COUNT <= UINT8_MAX, "they fit in an item");

typedef struct dcp_state {
    fsdp_source *source;
    fsdp_arena arena;
    tensor_item *items;
    size_t count, room;
    pthread_mutex_t lock; /* guards the places of items */
} dcp_state;

/* --- items of tensors, when they are read ------------------------------------------------------- */

static fsdp_status read_place(const dcp_state *state, const tensor_item *item,
                              const torch_opening *opening, placed_item *place, fsdp_error *err)
{
    torch_archive archive;
    torch_tensor tensor;
    torch_wrapper wrapper;
    torch_kind kind;
    (void)state;
    FSDP_TRY(torch_zip_open(opening, item->offset, item->length, false, &archive, err));
    fsdp_status st =
        torch_tensor_read(&archive, archive.pickle.root, &kind, &tensor, &wrapper, err);
    if (st == FSDP_OK &&
        (kind != TORCH_KIND_TENSOR || tensor.data || tensor.dtype != item->dtype ||
         tensor.ndim != item->ndim ||
         memcmp(tensor.shape, item->shape, (size_t)item->ndim * sizeof(int64_t)) != 0))
        st = fsdp_fail(err, FSDP_ERR_DAMAGED,
                       "%s: the item at byte %lld is not the tensor that the metadata describes",
                       opening->where, (long long)item->offset);
    torch_archive_release(&archive);
    if (st != FSDP_OK)
        return st;
    place->offset = tensor.offset;
    place->fix = tensor.fix;
    place->storage = tensor.storage;
    memcpy(place->strides, tensor.strides, sizeof place->strides);
    return FSDP_OK;
}

/* Two threads may find the same place at once: the first result is kept. */
static fsdp_status find_place(dcp_state *state, tensor_item *item, const placed_item **place_out,
                              fsdp_error *err)
{
    pthread_mutex_lock(&state->lock);
    *place_out = item->placed;
    pthread_mutex_unlock(&state->lock);
    if (*place_out)
        return FSDP_OK;
    torch_opening opening = {.source = state->source,
                             .file = item->file,
                             .stream = FSDP_NO_STREAM,
                             .where = fsdp_source_file_path(state->source, (size_t)item->file)};
    placed_item place;
    FSDP_TRY(read_place(state, item, &opening, &place, err));
    fsdp_flow("formats/dcp/dcp_read.c", "the item at byte %lld has its elements at byte %lld",
              (long long)item->offset, (long long)place.offset);
    size_t size = offsetof(placed_item, strides) + (size_t)item->ndim * sizeof(int64_t);
    pthread_mutex_lock(&state->lock);
    if (!item->placed) {
        item->placed = fsdp_arena_alloc(&state->arena, 1, size);
        if (item->placed)
            memcpy(item->placed, &place, size);
    }
    *place_out = item->placed;
    pthread_mutex_unlock(&state->lock);
    return *place_out ? FSDP_OK : fsdp_fail_memory(err, "the place of an item");
}

static fsdp_status place_chunk(void *context, size_t tensor, fsdp_source_chunk *chunk,
                               int64_t *strides, fsdp_error *err)
{
    dcp_state *state = context;
    tensor_item *item = &state->items[chunk->offset];
    const placed_item *place;
    (void)tensor;
    FSDP_TRY(find_place(state, item, &place, err));
    memcpy(strides, place->strides, (size_t)item->ndim * sizeof *strides);
    chunk->strides = strides;
    chunk->offset = place->offset;
    chunk->file = place->storage.file;
    chunk->stream = place->storage.stream;
    chunk->fix = place->fix;
    return FSDP_OK;
}

static size_t count_checks(void *context)
{
    return ((const dcp_state *)context)->count;
}

static int64_t count_bytes(void *context)
{
    const dcp_state *state = context;
    int64_t bytes = 0;
    for (size_t i = 0; i < state->count; i++)
        if (__builtin_add_overflow(bytes, state->items[i].length, &bytes))
            return FSDP_SOURCE_CHECK_MOST;
    return bytes;
}

/* Compares the checksum of an item's storage. */
static fsdp_status check_storage(dcp_state *state, const torch_storage *storage,
                                 fsdp_source_reader *reader, fsdp_error *err)
{
    enum { PIECE = 256 << 10 };
    const char *path = fsdp_source_file_path(state->source, (size_t)storage->file);
    uint8_t *data = fsdp_realloc(NULL, PIECE, 1);
    uint32_t crc = 0;
    fsdp_status st = data ? FSDP_OK : fsdp_fail_memory(err, "checking an item");
    for (int64_t at = 0; st == FSDP_OK && at < storage->size; at += PIECE) {
        size_t piece = storage->size - at < PIECE ? (size_t)(storage->size - at) : PIECE;
        st =
            fsdp_source_pread(state->source, storage->file, data, piece, storage->offset + at, err);
        if (st == FSDP_OK)
            crc = fsdp_crc32(crc, data, piece);
        if (st == FSDP_OK)
            st = fsdp_reader_count(reader, (int64_t)piece, path, err);
    }
    fsdp_source_count_checked(state->source, storage->size);
    fsdp_free(data);
    if (st == FSDP_OK && crc != storage->crc)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': bytes %lld to %lld do not have the checksum of their item", path,
                         (long long)storage->offset, (long long)(storage->offset + storage->size));
    return st;
}

/* Counts the whole item: bytes next to the storage are few, and those without a checksum are not read. */
static fsdp_status check_item(void *context, size_t number, fsdp_source_reader *reader,
                              fsdp_error *err)
{
    dcp_state *state = context;
    const tensor_item *item = &state->items[number];
    const placed_item *place;
    int64_t before = reader->bytes_read;
    FSDP_TRY(find_place(state, &state->items[number], &place, err));
    if (place->storage.has_crc)
        FSDP_TRY(check_storage(state, &place->storage, reader, err));
    return fsdp_reader_count(reader, item->length - (reader->bytes_read - before),
                             fsdp_source_file_path(state->source, (size_t)item->file), err);
}

static void close_state(void *context)
{
    dcp_state *state = context;
    fsdp_arena_release(&state->arena);
    fsdp_free(state->items);
    pthread_mutex_destroy(&state->lock);
    fsdp_free(state);
}

static const fsdp_source_ops dcp_ops = {.place = place_chunk,
                                        .check_count = count_checks,
                                        .check_bytes = count_bytes,
                                        .check = check_item,
                                        .close = close_state};

/* --- tensors ------------------------------------------------------------------------------------ */

void dcp_expect(dcp_state *state, size_t pieces)
{
    (void)fsdp_grow(&state->items, &state->room, state->count + pieces, sizeof *state->items);
}

/* Copies the shape, or shares that of the item before, which is mostly equal. */
static const int64_t *keep_shape(dcp_state *state, const dcp_piece *piece)
{
    size_t bytes = (size_t)piece->ndim * sizeof *piece->len;
    const tensor_item *before = state->count > 0 ? &state->items[state->count - 1] : NULL;
    if (before && before->ndim == piece->ndim && memcmp(before->shape, piece->len, bytes) == 0)
        return before->shape;
    int64_t *shape = fsdp_arena_alloc(&state->arena, bytes, 1);
    if (shape)
        memcpy(shape, piece->len, bytes);
    return shape;
}

static fsdp_status add_item(dcp_state *state, const dcp_piece *piece, fsdp_dtype dtype,
                            fsdp_source_chunk *chunk, fsdp_error *err)
{
    const int64_t *shape = keep_shape(state, piece);
    if (!shape || !fsdp_grow(&state->items, &state->room, state->count + 1, sizeof *state->items))
        return fsdp_fail_memory(err, "the items of a checkpoint");
    chunk->offset = (int64_t)state->count;
    state->items[state->count++] = (tensor_item){.file = piece->item.file,
                                                 .ndim = (uint8_t)piece->ndim,
                                                 .dtype = (uint8_t)dtype,
                                                 .offset = piece->item.offset,
                                                 .length = piece->item.length,
                                                 .shape = shape};
    return FSDP_OK;
}

/* A compressed item is opened at once: its stream must be known before the source is complete. */
static fsdp_status add_packed(dcp_state *state, const dcp_piece *piece, fsdp_dtype dtype,
                              size_t number, fsdp_source_chunk *chunk, fsdp_error *err)
{
    fsdp_source_stream stream = {.file = piece->item.file,
                                 .packing = FSDP_PACKING_ZSTD,
                                 .offset = piece->item.offset,
                                 .stored = piece->item.length,
                                 .size = -1};
    torch_opening opening = {.source = state->source,
                             .file = piece->item.file,
                             .where =
                                 fsdp_source_file_path(state->source, (size_t)piece->item.file)};
    FSDP_TRY(fsdp_source_add_stream(state->source, &stream, &opening.stream, err));
    tensor_item item = {.file = piece->item.file,
                        .ndim = (uint8_t)piece->ndim,
                        .dtype = (uint8_t)dtype,
                        .length = fsdp_source_stream_size(state->source, opening.stream),
                        .shape = piece->len};
    placed_item place;
    FSDP_TRY(read_place(state, &item, &opening, &place, err));
    chunk->strides = place.strides;
    chunk->offset = place.offset;
    chunk->file = place.storage.file;
    chunk->stream = place.storage.stream;
    chunk->fix = place.fix;
    return fsdp_source_add_chunk(state->source, number, chunk, err);
}

static fsdp_status add_from_safetensors(dcp_state *state, const dcp_tensor *tensor,
                                        const dcp_piece *piece, size_t number,
                                        fsdp_source_chunk *chunk, fsdp_error *err)
{
    const fsdp_safetensors *header = piece->item.header;
    const uint64_t *found = fsdp_name_table_find(&header->names, tensor->name, tensor->name_size);
    const fsdp_safetensors_entry *entry = found ? &header->entries[*found] : NULL;
    if (!entry || entry->dtype != tensor->dtype || entry->ndim != piece->ndim ||
        memcmp(entry->shape, piece->len, (size_t)piece->ndim * sizeof *piece->len) != 0) {
        char shown[200];
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' does not hold tensor '%s' as the metadata says",
                         fsdp_source_file_path(state->source, (size_t)piece->item.file),
                         fsdp_printable(tensor->name, tensor->name_size, shown, sizeof shown));
    }
    chunk->file = piece->item.file;
    chunk->offset = entry->begin;
    return fsdp_source_add_chunk(state->source, number, chunk, err);
}

fsdp_status dcp_add_piece(dcp_state *state, const dcp_tensor *tensor, size_t number,
                          const dcp_piece *piece, fsdp_error *err)
{
    fsdp_source_chunk chunk = {.lo = piece->lo,
                               .len = piece->len,
                               .file = -1,
                               .origin = piece->item.file,
                               .stream = FSDP_NO_STREAM};
    if (piece->item.header)
        return add_from_safetensors(state, tensor, piece, number, &chunk, err);
    if (piece->item.is_packed)
        return add_packed(state, piece, tensor->dtype, number, &chunk, err);
    FSDP_TRY(add_item(state, piece, tensor->dtype, &chunk, err));
    return fsdp_source_add_chunk(state->source, number, &chunk, err);
}

/* --- values ------------------------------------------------------------------------------------- */

fsdp_status dcp_add_value(dcp_state *state, const char *name, size_t name_size,
                          const dcp_item *item, fsdp_error *err)
{
    torch_archive archive;
    torch_opening opening = {.source = state->source,
                             .file = item->file,
                             .stream = FSDP_NO_STREAM,
                             .where = fsdp_source_file_path(state->source, (size_t)item->file)};
    int64_t offset = item->offset, length = item->length;
    if (item->is_packed) {
        fsdp_source_stream stream = {.file = item->file,
                                     .packing = FSDP_PACKING_ZSTD,
                                     .offset = offset,
                                     .stored = length,
                                     .size = -1};
        FSDP_TRY(fsdp_source_add_stream(state->source, &stream, &opening.stream, err));
        offset = 0;
        length = fsdp_source_stream_size(state->source, opening.stream);
    }
    FSDP_TRY(torch_zip_open(&opening, offset, length, true, &archive, err));
    fsdp_value value = {0};
    fsdp_source_blob blob = {item->file, item->offset, item->length};
    fsdp_status st = torch_value_read(&archive, archive.pickle.root, &value, err);
    if (st == FSDP_OK)
        st = fsdp_source_add_value(state->source, name, name_size, &value,
                                   item->is_packed ? NULL : &blob, err);
    fsdp_value_release(&value);
    torch_archive_release(&archive);
    return st;
}

/* --- the format --------------------------------------------------------------------------------- */

/* "__12.metadata" */
bool dcp_is_rank_metadata(const char *name)
{
    size_t digits = strncmp(name, "__", 2) == 0 ? strspn(name + 2, "0123456789") : 0;
    return digits > 0 && strcmp(name + 2 + digits, ".metadata") == 0;
}

/* DCP writes .metadata last, first under another name; without it the save did not finish. */
static bool is_without_metadata(const fsdp_probe *probe)
{
    static const char suffix[] = ".distcp";
    if (fsdp_probe_has(probe, ".metadata.tmp"))
        return true;
    for (size_t i = 0; i < probe->name_count; i++) {
        size_t size = strlen(probe->names[i]);
        if (size >= sizeof suffix &&
            strcmp(probe->names[i] + size - sizeof suffix + 1, suffix) == 0)
            return true;
    }
    return false;
}

/* Refuses a directory in which metadata was being replaced: its files are of the new save. */
static fsdp_status check_names(const fsdp_probe *probe, fsdp_error *err)
{
    static const char suffix[] = ".tmp";
    for (size_t i = 0; i < probe->name_count; i++) {
        const char *name = probe->names[i];
        size_t size = strlen(name);
        char finished[64];
        if (!fsdp_bytes_end(name, size, suffix) || size - strlen(suffix) >= sizeof finished)
            continue;
        memcpy(finished, name, size - strlen(suffix));
        finished[size - strlen(suffix)] = '\0';
        bool is_metadata = strcmp(finished, ".metadata") == 0 || dcp_is_rank_metadata(finished);
        if (is_metadata && fsdp_probe_has(probe, finished))
            return fsdp_fail(
                err, FSDP_ERR_DAMAGED,
                "'%s' holds '%s' next to '%s': a save over it was interrupted, and the files may "
                "be from two saves; use --from dcp to read what '%s' says",
                probe->path, name, finished, finished);
    }
    return FSDP_OK;
}

static int bid(const fsdp_probe *probe)
{
    if (!probe->is_directory)
        return 0;
    if (fsdp_probe_has(probe, ".metadata"))
        return BITS_OF_METADATA;
    for (size_t i = 0; i < probe->name_count; i++)
        if (dcp_is_rank_metadata(probe->names[i]))
            return BITS_OF_RANKS;
    return is_without_metadata(probe) ? BITS_OF_REMAINS : 0;
}

static fsdp_status create(const fsdp_probe *probe, dcp_state **state_out, fsdp_source **source_out,
                          fsdp_error *err)
{
    *state_out = fsdp_alloc(1, sizeof **state_out);
    if (!*state_out)
        return fsdp_fail_memory(err, probe->path);
    pthread_mutex_init(&(*state_out)->lock, NULL);
    fsdp_status st = fsdp_source_create(probe->io, probe->path, "dcp", source_out, err);
    if (st != FSDP_OK) {
        close_state(*state_out);
        return st;
    }
    (*state_out)->source = *source_out;
    fsdp_source_tolerate(*source_out, probe->opts);
    fsdp_source_set_ops(*source_out, &dcp_ops, *state_out);
    return FSDP_OK;
}

static fsdp_status open_dcp(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    dcp_state *state;
    *source_out = NULL;
    if (bid(probe) == BITS_OF_REMAINS)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' holds files of DCP but no .metadata, which is written last; check "
                         "that the save finished and that all files were copied",
                         probe->path);
    if (bid(probe) == 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "'%s' is not a checkpoint of DCP: it holds no .metadata", probe->path);
    if (!probe->opts || !probe->opts->format)
        FSDP_TRY(check_names(probe, err));
    FSDP_TRY(create(probe, &state, source_out, err));
    fsdp_status st = dcp_read_metadata(probe, state, *source_out, err);
    if (st == FSDP_OK)
        st = fsdp_source_complete(*source_out, err);
    if (st != FSDP_OK) {
        fsdp_source_close(*source_out);
        *source_out = NULL;
    }
    return st;
}

const fsdp_format_reader fsdp_dcp_reader = {.bid = bid, .open = open_dcp};

/*
 * HDF5 files of other programs (h5py, Keras) as a source, also the one in a .keras file. A sandboxed
 * child process runs libhdf5 on them (hdf5_session.c, hdf5_child.c) and lists their contents. Plain bytes
 * are then read from the file as in any format; all others (chunked, compressed, virtual) are fetched
 * from the child box by box.
 */
#include "base/data/box_internal.h"
#include "base/core/bytes.h"
#include "formats/hdf5_child/hdf5_listing.h"
#include "formats/hdf5_child/hdf5_session.h"
#include "formats/zip/zip.h"
#include "kernels/kernels.h"

#include <inttypes.h>
#include <string.h>

/* === the file in a .keras file ================================================================ */

/* A file of Keras 3: a zip around "model.weights.h5", metadata.json and config.json. */

enum { LOCAL_HEADER = 30, NAME_SIZE_AT = 26 };

static const char first_member[] = "metadata.json";
static const char weights_member[] = "model.weights.h5";
static const char several_member[] = "model.weights.json";

/* True for a zip whose first member is the one that Keras writes first. */
static bool keras_begins(const uint8_t *head, size_t size)
{
    size_t name_size = sizeof first_member - 1;
    return size >= LOCAL_HEADER + name_size && memcmp(head, "PK\3\4", 4) == 0 &&
           fsdp_load_u16(head + NAME_SIZE_AT) == name_size &&
           memcmp(head + LOCAL_HEADER, first_member, name_size) == 0;
}

typedef struct keras_file {
    fsdp_source *source;
    int file;
} keras_file;

static fsdp_status read_zip(void *context, void *data, size_t size, int64_t offset, fsdp_error *err)
{
    const keras_file *keras = context;
    return fsdp_source_pread(keras->source, keras->file, data, size, offset, err);
}

static fsdp_status place_member(const keras_file *keras, const fsdp_zip_entry *entry,
                                fsdp_h5_place *place, fsdp_error *err)
{
    place->size = entry->size;
    place->offset = entry->is_deflated ? 0 : entry->offset;
    if (entry->is_deflated) {
        const fsdp_source_stream stream = {.file = keras->file,
                                           .packing = FSDP_PACKING_DEFLATE,
                                           .offset = entry->offset,
                                           .stored = entry->stored,
                                           .size = entry->size,
                                           .has_crc = entry->has_crc,
                                           .crc = entry->crc};
        return fsdp_source_add_stream(keras->source, &stream, &place->stream, err);
    }
    const fsdp_source_crc check = {weights_member, keras->file, entry->offset, entry->size,
                                   entry->crc};
    return entry->has_crc ? fsdp_source_add_crc(keras->source, &check, err) : FSDP_OK;
}

static fsdp_status fail_without_weights(const fsdp_zip *zip, const char *path, fsdp_error *err)
{
    bool are_several = fsdp_zip_find(zip, several_member, sizeof several_member - 1) != NULL;
    return fsdp_fail(
        err, FSDP_ERR_NOT_FOUND, "'%s' is a zip of Keras that lacks '%s'%s", path, weights_member,
        are_several ? "; its weights are in several files; save it without max_shard_size" : "");
}

/* Finds the HDF5 file in the zip; place holds its file and becomes the place of the member, whose checksum
 * the source gets. */
static fsdp_status keras_find(fsdp_source *source, fsdp_h5_place *place, fsdp_error *err)
{
    keras_file keras = {source, place->file};
    const fsdp_zip_input input = {
        .read = read_zip, .context = &keras, .path = fsdp_source_path(source), .size = place->size};
    fsdp_zip *zip = NULL;
    FSDP_TRY(fsdp_zip_open(&input, 0, &zip, err));
    const fsdp_zip_entry *entry = fsdp_zip_find(zip, weights_member, sizeof weights_member - 1);
    fsdp_status st = entry ? place_member(&keras, entry, place, err)
                           : fail_without_weights(zip, input.path, err);
    fsdp_zip_close(zip);
    return st;
}

/* === the format =============================================================================== */

static const uint8_t signature[] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1A, '\n'};
enum { FIRST_USER_BLOCK = 512, SIGNATURE_BITS = 64, USER_BLOCK_BITS = 24, CACHE_SHARE = 4 };

typedef struct hdf5_state {
    fsdp_source *source;
    fsdp_h5_place place;
    fsdp_h5_session *session;
    fsdp_h5_tensors tensors;
} hdf5_state;

/* --- probing ---------------------------------------------------------------------------------- */

/* True for a signature after a user block of 512 bytes, or twice as many, and so on. */
static bool is_behind_user_block(const fsdp_probe *probe)
{
    const int64_t largest = (int64_t)1 << 40;
    fsdp_file *file = NULL;
    bool is_found = false;
    for (int64_t at = FIRST_USER_BLOCK; !is_found && at < largest; at *= 2) {
        uint8_t bytes[sizeof signature];
        if (at > probe->size - (int64_t)sizeof signature)
            break;
        if (at + (int64_t)sizeof bytes <= (int64_t)probe->head_size) {
            is_found = memcmp(probe->head + at, signature, sizeof signature) == 0;
            continue;
        }
        if ((!file && fsdp_io_open(probe->io, probe->path, FSDP_IO_READ, &file, NULL) != FSDP_OK) ||
            fsdp_io_read(file, probe->path, bytes, sizeof bytes, at, NULL) != FSDP_OK)
            break;
        is_found = memcmp(bytes, signature, sizeof signature) == 0;
    }
    (void)fsdp_io_close(&file, probe->path, NULL);
    return is_found;
}

/* Another format may contain the signature by chance, so after a user block it bids less. */
static int bid(const fsdp_probe *probe)
{
    if (probe->is_directory || probe->size < (int64_t)sizeof signature)
        return 0;
    if (probe->head_size >= sizeof signature &&
        memcmp(probe->head, signature, sizeof signature) == 0)
        return SIGNATURE_BITS;
    if (keras_begins(probe->head, probe->head_size))
        return SIGNATURE_BITS;
    return is_behind_user_block(probe) ? USER_BLOCK_BITS : 0;
}

/* --- reading ---------------------------------------------------------------------------------- */

/* A read of a box, split into cells that are fetched one after another. */
typedef struct cell_walk {
    hdf5_state *state;
    const fsdp_source_tensor *tensor;
    const fsdp_h5_tensor *stored;
    const fsdp_box *box;
    size_t element_size;
    int64_t cell[FSDP_MAX_DIMS];
    uint8_t *data, *piece;
    fsdp_error *err;
} cell_walk;

/* A cell is a block of whole chunks, as many as one reply holds, so that no chunk is decoded
 * twice. */
static void choose_cell(cell_walk *walk)
{
    int64_t bytes = walk->stored->chunk ? walk->stored->chunk_bytes : (int64_t)walk->element_size;
    for (int dim = walk->box->ndim - 1; dim >= 0; dim--) {
        int64_t unit = walk->stored->chunk ? walk->stored->chunk[dim] : 1;
        int64_t needed = (walk->tensor->shape[dim] + unit - 1) / unit;
        int64_t room = FSDP_H5_REPLY_ROOM / bytes;
        int64_t count = needed < room ? needed : room;
        if (count < 1)
            count = 1;
        walk->cell[dim] = unit * count;
        bytes *= count;
    }
}

static fsdp_status fetch_piece(const cell_walk *walk, const fsdp_box *piece)
{
    const fsdp_h5_request request = {.dataset = walk->stored->dataset,
                                     .box = piece,
                                     .size = (size_t)fsdp_box_count(piece) * walk->element_size,
                                     .chunk = walk->stored->chunk_bytes,
                                     .cache =
                                         fsdp_source_memory(walk->state->source) / CACHE_SHARE};
    FSDP_TRY(fsdp_h5_session_read(walk->state->session, &request, walk->piece, walk->err));
    fsdp_copy_shared(walk->box, walk->data, piece, walk->piece, walk->element_size);
    return FSDP_OK;
}

/* A chunk larger than a reply is fetched in several. */
static fsdp_status fetch_cell(const cell_walk *walk, const int64_t *lo)
{
    fsdp_box cell = {.ndim = walk->box->ndim}, shared, pieces[FSDP_BOX_PIECES];
    size_t dims = (size_t)cell.ndim * sizeof *lo;
    memcpy(cell.lo, lo, dims);
    memcpy(cell.len, walk->cell, dims);
    if (!fsdp_box_intersect(&cell, walk->box, &shared))
        return FSDP_OK;
    int64_t count = fsdp_box_count(&shared),
            most = FSDP_H5_REPLY_ROOM / (int64_t)walk->element_size;
    for (int64_t first = 0; first < count; first += most) {
        int n = fsdp_box_cut(&shared, first, most < count - first ? most : count - first, pieces);
        for (int i = 0; i < n; i++)
            FSDP_TRY(fetch_piece(walk, &pieces[i]));
    }
    return FSDP_OK;
}

static fsdp_status fetch_cells(const cell_walk *walk)
{
    const fsdp_box *box = walk->box;
    int64_t lo[FSDP_MAX_DIMS];
    for (int dim = 0; dim < box->ndim; dim++)
        lo[dim] = box->lo[dim] / walk->cell[dim] * walk->cell[dim];
    for (int dim = 0; dim >= 0;) {
        FSDP_TRY(fetch_cell(walk, lo));
        for (dim = box->ndim - 1; dim >= 0; dim--) {
            lo[dim] += walk->cell[dim];
            if (lo[dim] < box->lo[dim] + box->len[dim])
                break;
            lo[dim] = box->lo[dim] / walk->cell[dim] * walk->cell[dim];
        }
    }
    return FSDP_OK;
}

/* libhdf5 holds a chunk in its stored and in its decoded form. */
static fsdp_status check_chunk(const hdf5_state *state, const fsdp_h5_tensor *stored,
                               fsdp_error *err)
{
    int64_t memory = fsdp_source_memory(state->source), needed = stored->chunk_bytes;
    if (needed <= memory)
        return FSDP_OK;
    int64_t mebibytes = (needed + (1 << 20) - 1) >> 20;
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "one chunk has %" PRId64
                     " bytes and cannot be read in parts; allow more with --mem %" PRId64 "M",
                     needed, mebibytes);
}

static fsdp_status blame_dataset(const hdf5_state *state, const fsdp_source_tensor *tensor,
                                 fsdp_status status, fsdp_error *err)
{
    char shown[200];
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "'%s': dataset '%s'", fsdp_source_path(state->source),
                          fsdp_printable(tensor->name, tensor->name_size, shown, sizeof shown));
    return status;
}

static fsdp_status check_memory(void *context, size_t number, fsdp_error *err)
{
    const hdf5_state *state = context;
    if (number >= state->tensors.count)
        return FSDP_OK;
    return blame_dataset(state, fsdp_source_tensor_at(state->source, number),
                         check_chunk(state, &state->tensors.items[number], err), err);
}

static fsdp_status read_box(void *context, size_t number, const fsdp_box *box, void *data,
                            fsdp_error *err)
{
    hdf5_state *state = context;
    if (number >= state->tensors.count)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the file has no such tensor");
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(state->source, number);
    cell_walk walk = {.state = state,
                      .tensor = tensor,
                      .stored = &state->tensors.items[number],
                      .box = box,
                      .element_size = fsdp_dtype_size(tensor->dtype),
                      .data = data,
                      .err = err};
    fsdp_status status = check_chunk(state, walk.stored, err);
    if (status == FSDP_OK) {
        walk.piece = fsdp_alloc_pages(FSDP_H5_REPLY_ROOM);
        if (!walk.piece)
            status = fsdp_fail_memory(err, "a part of an HDF5 dataset");
    }
    if (status == FSDP_OK) {
        choose_cell(&walk);
        status = fetch_cells(&walk);
    }
    fsdp_free(walk.piece);
    return blame_dataset(state, tensor, status, err);
}

/* --- opening ---------------------------------------------------------------------------------- */

static void close_state(void *context)
{
    hdf5_state *state = context;
    fsdp_h5_session_stop(state->session);
    fsdp_h5_tensors_release(&state->tensors);
    fsdp_free(state);
}

static const fsdp_source_ops ops = {
    .read = read_box, .check_memory = check_memory, .close = close_state};

static fsdp_status read_file(void *context, void *data, size_t size, int64_t offset,
                             fsdp_error *err)
{
    const hdf5_state *state = context;
    const fsdp_h5_place *place = &state->place;
    if (place->stream != FSDP_NO_STREAM)
        return fsdp_source_stream_pread(state->source, place->stream, data, size,
                                        place->offset + offset, err);
    return fsdp_source_pread(state->source, place->file, data, size, place->offset + offset, err);
}

/* The limit of the listing: it grows with the file, times a factor, because shared groups are
 * listed under each of their names. */
static size_t most_listed(int64_t file_size)
{
    const size_t base = 64 << 20, ratio = 64, limit = (size_t)1 << 30;
    return (uint64_t)file_size > limit / ratio ? limit : base + (size_t)file_size * ratio;
}

/* False when all bytes are plain, as in most files: the child is then stopped after the listing. */
static bool needs_child(const hdf5_state *state)
{
    for (size_t i = 0; i < state->tensors.count; i++)
        if (!state->tensors.items[i].is_plain)
            return true;
    return false;
}

static fsdp_status list_file(hdf5_state *state, fsdp_error *err)
{
    const fsdp_h5_file_view view = {
        .path = fsdp_source_file_path(state->source, (size_t)state->place.file),
        .size = state->place.size,
        .pread = read_file,
        .context = state,
        .limits_only = fsdp_source_io(state->source)->trust & FSDP_TRUST_LIMITS,
    };
    fsdp_text listing = {0};
    FSDP_TRY(fsdp_h5_session_start(&view, &state->session, err));
    fsdp_status status =
        fsdp_h5_session_list(state->session, most_listed(view.size), &listing, err);
    if (status == FSDP_OK)
        status = fsdp_h5_listing_take(listing.data, listing.size, state->source, &state->place,
                                      &state->tensors, err);
    fsdp_text_release(&listing);
    if (status == FSDP_OK && !needs_child(state)) {
        fsdp_h5_session_stop(state->session);
        state->session = NULL;
    }
    return status;
}

static fsdp_status find_file(hdf5_state *state, const fsdp_probe *probe, fsdp_error *err)
{
    fsdp_h5_place *place = &state->place;
    FSDP_TRY(fsdp_source_add_file(state->source, probe->path, false, &place->file, err));
    place->stream = FSDP_NO_STREAM;
    place->size = fsdp_source_file_size(state->source, (size_t)place->file);
    return keras_begins(probe->head, probe->head_size) ? keras_find(state->source, place, err)
                                                       : FSDP_OK;
}

static fsdp_status open_hdf5(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    fsdp_source *source;
    *source_out = NULL;
    FSDP_TRY(fsdp_source_create(probe->io, probe->path, "hdf5", &source, err));
    hdf5_state *state = fsdp_alloc(1, sizeof *state);
    fsdp_status status = state ? FSDP_OK : fsdp_fail_memory(err, probe->path);
    if (status == FSDP_OK) {
        state->source = source;
        fsdp_source_set_ops(source, &ops, state);
        status = find_file(state, probe, err);
    }
    if (status == FSDP_OK)
        status = list_file(state, err);
    if (status == FSDP_OK)
        status = fsdp_source_complete(source, err);
    if (status != FSDP_OK) {
        fsdp_source_close(source);
        return status;
    }
    *source_out = source;
    return FSDP_OK;
}

/* Reads files of other programs. A target of this name is the native "fsdp-file". */
const fsdp_format fsdp_format_hdf5 = {
    .name = "hdf5",
    .reads_file = true,
    .caps = {.whole_chunks = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_hdf5}};

/*
 * Compares the HDF5 structures of a shard file with its index. native_read.c needs only the
 * index; other programs need superblock, groups, object headers and B-trees, which no hash
 * covers. So libhdf5 lists the file in the sandboxed child (hdf5_session.h), and each box of the
 * index is looked up in that listing. See fsdp_shard_check_structure in shard.h.
 */
#include "formats/shard.h"
#include "formats/hdf5_child/hdf5_listing.h"
#include "formats/hdf5_child/hdf5_sandbox.h"
#include "formats/hdf5_child/hdf5_session.h"
#include "base/data/name_table.h"
#include "formats/hdf5/hdf5_link_name.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* HDF5's limit: a box with more dims is a dataset with fewer. */
enum { MOST_DIMS = 32 };

/* The plain bytes of a dataset. */
typedef struct place {
    int64_t offset;
    size_t tensor;
} place;

typedef struct structure {
    const fsdp_shard_reader *reader;
    bool is_exact;
    fsdp_source *source; /* the listing of libhdf5 */
    int file;
    fsdp_h5_tensors tensors;
    fsdp_name_table names; /* -> number in tensors */
    place *places;         /* by offset */
    size_t place_count;
    int64_t *frame_bytes; /* per tensor: bytes of frames in the index */
} structure;

static fsdp_status fail_box(const fsdp_stored_box *box, const char *what, fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "tensor '%s' %s",
                     fsdp_printable(box->name, box->name_size, shown, sizeof shown), what);
}

/* --- the listing of libhdf5 ------------------------------------------------------------------- */

static fsdp_status read_file(void *context, void *data, size_t size, int64_t offset,
                             fsdp_error *err)
{
    const structure *with = context;
    return fsdp_source_pread(with->source, with->file, data, size, offset, err);
}

static fsdp_status list(structure *with, fsdp_text *listing, fsdp_error *err)
{
    const size_t most = (size_t)1 << 30;
    fsdp_h5_file_view view = {
        .path = fsdp_shard_path(with->reader),
        .size = fsdp_source_file_size(with->source, (size_t)with->file),
        .pread = read_file,
        .context = with,
        .limits_only = fsdp_source_io(with->source)->trust & FSDP_TRUST_LIMITS,
    };
    fsdp_h5_session *session = NULL;
    FSDP_TRY(fsdp_h5_session_start(&view, &session, err));
    fsdp_status st = fsdp_h5_session_list(session, most, listing, err);
    fsdp_h5_session_stop(session);
    return st;
}

static fsdp_status take_listing(structure *with, fsdp_io *io, fsdp_error *err)
{
    fsdp_text listing = {0};
    const char *path = fsdp_shard_path(with->reader);
    FSDP_TRY(fsdp_source_create(io, path, "hdf5", &with->source, err));
    FSDP_TRY(fsdp_source_add_file(with->source, path, false, &with->file, err));
    const fsdp_h5_place whole = {.file = with->file,
                                 .stream = FSDP_NO_STREAM,
                                 .size = fsdp_source_file_size(with->source, (size_t)with->file)};
    fsdp_status st = list(with, &listing, err);
    if (st == FSDP_OK)
        st = fsdp_h5_listing_take(listing.data, listing.size, with->source, &whole, &with->tensors,
                                  err);
    fsdp_text_release(&listing);
    return st == FSDP_OK ? fsdp_source_complete(with->source, err) : st;
}

/* --- finding ---------------------------------------------------------------------------------- */

static int compare_places(const void *a, const void *b)
{
    const place *x = a, *y = b;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

static fsdp_status index_datasets(structure *with, fsdp_error *err)
{
    size_t count = with->tensors.count;
    with->places = fsdp_alloc(count, sizeof *with->places);
    with->frame_bytes = fsdp_alloc(count, sizeof *with->frame_bytes);
    if (!with->places || !with->frame_bytes)
        return fsdp_fail_memory(err, "the datasets of a shard");
    for (size_t i = 0; i < count; i++) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(with->source, i);
        if (!fsdp_name_table_put(&with->names, tensor->name, tensor->name_size, i))
            return fsdp_fail_memory(err, "the datasets of a shard");
        if (with->tensors.items[i].is_plain && tensor->chunk_count > 0)
            with->places[with->place_count++] = (place){tensor->chunks[0].offset, i};
    }
    if (with->place_count > 0)
        qsort(with->places, with->place_count, sizeof *with->places, compare_places);
    return FSDP_OK;
}

/* The last place at or before the offset. */
static const fsdp_source_tensor *find_place(const structure *with, int64_t offset)
{
    size_t low = 0, high = with->place_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (with->places[middle].offset <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 ? fsdp_source_tensor_at(with->source, with->places[low - 1].tensor) : NULL;
}

/* Finds a dataset as the listing names it: by the tensor's name, or by the link when that is a
 * hash. */
static const uint64_t *find_named(const structure *with, const fsdp_stored_box *box)
{
    char link[FSDP_NATIVE_LINK_ROOM];
    const uint64_t *found = NULL;
    if (box->part > 0 || box->name_size > FSDP_NATIVE_NAME_PLAIN) {
        size_t size = fsdp_native_link(box->name, box->name_size, box->part, link);
        found = fsdp_name_table_find(&with->names, link, size);
        if (!found && box->part > 0) { /* or a part of a whole tensor */
            size = fsdp_native_link(box->name, box->name_size, 0, link);
            found = fsdp_name_table_find(&with->names, link, size);
        }
    }
    return found ? found : fsdp_name_table_find(&with->names, box->name, box->name_size);
}

/* --- comparing -------------------------------------------------------------------------------- */

/* True when the dataset is the box, or a whole tensor that contains it. */
static bool fits(const fsdp_source_tensor *tensor, const fsdp_stored_box *box)
{
    bool is_box = tensor->ndim == box->ndim, is_within = is_box;
    if (box->ndim > MOST_DIMS)
        return true;
    for (int dim = 0; dim < box->ndim && tensor->ndim == box->ndim; dim++) {
        is_box = is_box && tensor->shape[dim] == box->len[dim];
        is_within = is_within && tensor->shape[dim] >= box->lo[dim] + box->len[dim];
    }
    return is_box || is_within;
}

static bool holds_bytes(const fsdp_source_tensor *tensor, const fsdp_stored_box *box)
{
    int64_t end = box->offset + (int64_t)box->element_size, count = 1;
    for (int dim = 0; dim < box->ndim; dim++)
        end += (box->len[dim] - 1) * box->stride[dim];
    for (int dim = 0; dim < tensor->ndim; dim++)
        count *= tensor->shape[dim];
    int64_t first = tensor->chunk_count > 0 ? tensor->chunks[0].offset : 0;
    return tensor->chunk_count > 0 && tensor->chunks[0].file >= 0 && first <= box->offset &&
           end <= first + count * (int64_t)fsdp_dtype_size(tensor->dtype);
}

static fsdp_status check_raw(const structure *with, const fsdp_stored_box *box, fsdp_error *err)
{
    const uint64_t *number = find_named(with, box);
    const fsdp_source_tensor *tensor =
        number ? fsdp_source_tensor_at(with->source, (size_t)*number) : NULL;
    bool is_there = tensor && holds_bytes(tensor, box) && fits(tensor, box);
    if (!is_there && !with->is_exact) {
        tensor = find_place(with, box->offset);
        is_there = tensor && holds_bytes(tensor, box);
    }
    if (!tensor)
        return fail_box(box, "has no dataset", err);
    if (!is_there)
        return fail_box(box, "has a different offset or shape for libhdf5", err);
    if (tensor->dtype != box->dtype)
        return fail_box(box, "has a different dtype for libhdf5", err);
    return FSDP_OK;
}

static fsdp_status check_encoded(structure *with, const fsdp_stored_box *box, fsdp_error *err)
{
    const uint64_t *number = find_named(with, box);
    if (!number)
        return fail_box(box, "has no dataset", err);
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(with->source, (size_t)*number);
    if (with->tensors.items[*number].is_plain || tensor->dtype != box->dtype || !fits(tensor, box))
        return fail_box(box, "has a different dtype, shape or form for libhdf5", err);
    for (int64_t block = 0; block < box->block_count; block++)
        with->frame_bytes[*number] += box->frames[block].size;
    return FSDP_OK;
}

/* A dataset's B-tree must hold as many bytes as its frames together. */
static fsdp_status check_frames(const structure *with, fsdp_error *err)
{
    for (size_t i = 0; i < with->tensors.count; i++) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(with->source, i);
        char shown[200];
        if (with->frame_bytes[i] == 0 || with->frame_bytes[i] == with->tensors.items[i].stored)
            continue;
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "dataset '%s' has %" PRId64 " bytes of chunks for libhdf5, and %" PRId64
                         " were saved",
                         fsdp_printable(tensor->name, tensor->name_size, shown, sizeof shown),
                         with->tensors.items[i].stored, with->frame_bytes[i]);
    }
    return FSDP_OK;
}

static fsdp_status compare(structure *with, int64_t index_offset, fsdp_error *err)
{
    if (with->tensors.index_offset != index_offset)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the dataset '%%index' is not where the index is");
    FSDP_TRY(index_datasets(with, err));
    for (size_t i = 0; i < fsdp_shard_box_count(with->reader); i++) {
        const fsdp_stored_box *box = fsdp_shard_box_at(with->reader, i);
        FSDP_TRY(box->encoded ? check_encoded(with, box, err) : check_raw(with, box, err));
    }
    return check_frames(with, err);
}

/* --- the call --------------------------------------------------------------------------------- */

/* Maps errors: a structure that libhdf5 cannot read is damage in a native file, even if it were
 * only unsupported in another program's. */
static fsdp_status judge(const structure *with, fsdp_status status, const fsdp_error *found,
                         fsdp_error *err)
{
    char quoted[sizeof found->text];
    bool is_fault = status == FSDP_ERR_DAMAGED || status == FSDP_ERR_REFUSED;
    if (status == FSDP_OK)
        return FSDP_OK;
    if (!is_fault || strstr(found->text, FSDP_HDF5_NO_SANDBOX)) {
        if (err)
            *err = *found;
        return status;
    }
    const char *path = fsdp_shard_path(with->reader), *text = found->text;
    int size = snprintf(quoted, sizeof quoted, "'%s': ", path);
    if (size > 0 && (size_t)size < sizeof quoted && strncmp(text, quoted, (size_t)size) == 0)
        text += size;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': the HDF5 structure for other programs is damaged: %s; fsdp does not "
                     "need it; for other programs, make a new one with fsdp-convert",
                     path, text);
}

fsdp_status fsdp_shard_check_structure(fsdp_io *io, const fsdp_shard_reader *reader,
                                       int64_t index_offset, bool is_exact, fsdp_error *err)
{
    structure with = {.reader = reader, .is_exact = is_exact};
    fsdp_error found = {0};
    fsdp_status st = take_listing(&with, io, &found);
    if (st == FSDP_OK)
        st = compare(&with, index_offset, &found);
    st = judge(&with, st, &found, err);
    fsdp_source_close(with.source);
    fsdp_h5_tensors_release(&with.tensors);
    fsdp_name_table_release(&with.names);
    fsdp_free(with.places);
    fsdp_free(with.frame_bytes);
    return st;
}

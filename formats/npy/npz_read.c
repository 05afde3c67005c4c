/*
 * NumPy arrays as a source: one .npy file, or the members of an .npz. Numeric arrays become
 * tensors, in any element order and byte order; all others become values that describe their
 * type.
 */
#include "base/core/bytes.h"
#include "formats/npy/npy_header.h"
#include "formats/source.h"
#include "formats/source/escaped_names.h"
#include "formats/zip/zip.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char names_member[] = "%names.npy";
enum { LONGEST_SPELLING = 64 << 20 };

/* The bytes of one array, header included. */
typedef struct array_place {
    fsdp_source *source;
    const char *name;
    size_t name_size;
    int file, stream;
    int64_t offset, size; /* in the file, or in the stream */
    bool is_member;
    const fsdp_source_opts *opts;
} array_place;

static fsdp_status read_at(const array_place *place, void *data, size_t size, int64_t offset,
                           fsdp_error *err)
{
    if (place->stream >= 0)
        return fsdp_source_stream_pread(place->source, place->stream, data, size,
                                        place->offset + offset, err);
    return fsdp_source_pread(place->source, place->file, data, size, place->offset + offset, err);
}

/* --- one array -------------------------------------------------------------------------------- */

/* Reads and parses the header; *data_out is the offset of the elements. */
static fsdp_status read_header(const array_place *place, fsdp_npy *npy, int64_t *data_out,
                               fsdp_error *err)
{
    const char *path = fsdp_source_file_path(place->source, (size_t)place->file);
    uint8_t prefix[FSDP_NPY_PREFIX];
    size_t prefix_size = place->size < FSDP_NPY_PREFIX ? (size_t)place->size : FSDP_NPY_PREFIX;
    int64_t offset;
    size_t size;
    FSDP_TRY(read_at(place, prefix, prefix_size, 0, err));
    FSDP_TRY(fsdp_npy_place(path, prefix, prefix_size, &offset, &size, err));
    if ((int64_t)size > place->size - offset)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the header of an array is cut off", path);
    char *text = fsdp_realloc(NULL, size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, path);
    fsdp_status status = read_at(place, text, size, offset, err);
    if (status == FSDP_OK)
        status = fsdp_npy_parse(path, text, size, npy, err);
    fsdp_free(text);
    *data_out = offset + (int64_t)size;
    return status;
}

/* The elements must fill the rest of the array exactly. */
static fsdp_status check_size(const array_place *place, const fsdp_npy *npy, int64_t data,
                              fsdp_error *err)
{
    int64_t size = npy->item_size;
    bool is_over = false, is_empty = false;
    for (int dim = 0; dim < npy->ndim; dim++) {
        is_empty = is_empty || npy->shape[dim] == 0;
        is_over = fsdp_mul_overflow(size, npy->shape[dim], &size) || is_over;
    }
    if (is_empty)
        size = 0;
    if ((is_over && !is_empty) || size != place->size - data)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': its header at byte %" PRId64 " does not fit the %" PRId64
                         " bytes that follow it",
                         fsdp_source_file_path(place->source, (size_t)place->file), place->offset,
                         place->size - data);
    return FSDP_OK;
}

static fsdp_status add_array(const array_place *place, const fsdp_npy *npy, int64_t data,
                             fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    size_t tensor;
    FSDP_TRY(fsdp_source_add_tensor(place->source, place->name, place->name_size,
                                    &(fsdp_source_shape){npy->dtype, npy->ndim, npy->shape},
                                    &tensor, err));
    int64_t strides[FSDP_MAX_DIMS], stride = npy->item_size;
    for (int dim = 0; dim < npy->ndim; dim++) {
        strides[dim] = stride;
        stride *= npy->shape[dim] > 0 ? npy->shape[dim] : 1;
    }
    fsdp_source_chunk chunk = {.lo = origin,
                               .len = npy->shape,
                               .strides = npy->is_fortran ? strides : NULL,
                               .offset = place->offset + data,
                               .file = place->file,
                               .stream = place->stream,
                               .fix = npy->is_swapped && npy->item_size > 1 ? FSDP_FIX_SWAP : 0};
    return fsdp_source_add_chunk(place->source, tensor, &chunk, err);
}

static fsdp_status add_opaque(const array_place *place, const char *text, fsdp_error *err)
{
    fsdp_value value = {.kind = FSDP_VALUE_NULL};
    char shown[200]; /* the text of a header need not be UTF-8 */
    fsdp_printable(text, strlen(text), shown, sizeof shown);
    FSDP_TRY(fsdp_value_set_bytes(&value, FSDP_VALUE_CLASS, shown, strlen(shown), err));
    fsdp_status status =
        fsdp_source_add_value(place->source, place->name, place->name_size, &value, NULL, err);
    fsdp_value_release(&value);
    return status;
}

/* The next dtype of a list "bf16,f8_e4m3fn"; false at the end. */
static bool next_dtype(const char **list, fsdp_dtype *dtype_out)
{
    const char *name = *list;
    size_t size = strcspn(name, ",");
    if (*name == '\0')
        return false;
    *list += size + (name[size] == ',');
    *dtype_out = fsdp_dtype_from_typed(name, size);
    return true;
}

/* Every item is a dtype, and no two have the same size. */
static fsdp_status check_options(const fsdp_source_opts *opts, fsdp_error *err)
{
    enum { MOST_BYTES = 16 }; /* of an element: c128 */
    fsdp_dtype dtype, of_size[MOST_BYTES + 1] = {FSDP_DTYPE_NONE};
    const char *list = opts ? opts->void_as : NULL;
    for (bool more = list != NULL; more; more = *list != '\0') {
        const char *name = list;
        if (!next_dtype(&list, &dtype) || dtype == FSDP_DTYPE_NONE)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "--void-as: '%.*s' is not a dtype, such as bf16 or f8_e4m3fn",
                             (int)strcspn(name, ","), name);
        fsdp_dtype *other = &of_size[fsdp_dtype_size(dtype)];
        if (*other != FSDP_DTYPE_NONE && *other != dtype)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "--void-as: elements of %zu bytes are %s or %s; name one of them",
                             fsdp_dtype_size(dtype), fsdp_dtype_name(*other),
                             fsdp_dtype_name(dtype));
        *other = dtype;
    }
    return FSDP_OK;
}

/* NumPy has no name for the dtypes of other programs and writes their elements as bytes. */
static void name_void(const array_place *place, fsdp_npy *npy)
{
    fsdp_dtype dtype;
    const char *list = place->opts && place->opts->void_as ? place->opts->void_as : "";
    while (npy->is_void && npy->dtype == FSDP_DTYPE_NONE && next_dtype(&list, &dtype))
        if ((int64_t)fsdp_dtype_size(dtype) == npy->item_size)
            npy->dtype = dtype;
}

static fsdp_status add_one(const array_place *place, fsdp_error *err)
{
    fsdp_npy npy;
    int64_t data = 0;
    FSDP_TRY(read_header(place, &npy, &data, err));
    name_void(place, &npy);
    if (npy.has_objects && !place->is_member)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s' is not an array of numbers but a pickle of Python objects",
                         fsdp_source_path(place->source));
    if (!npy.has_objects)
        FSDP_TRY(check_size(place, &npy, data, err));
    if (npy.dtype != FSDP_DTYPE_NONE && !npy.has_objects)
        return add_array(place, &npy, data, err);
    char text[sizeof npy.descr + 20];
    snprintf(text, sizeof text, "numpy array of %s", npy.descr);
    if (npy.has_objects)
        FSDP_TRY(fsdp_source_note_code(place->source, place->file, "numpy arrays of objects", err));
    return add_opaque(place, text, err);
}

/* --- the members of an archive ---------------------------------------------------------------- */

typedef struct npz_archive {
    fsdp_source *source;
    int file;
    const fsdp_source_opts *opts;
} npz_archive;

static fsdp_status read_zip(void *context, void *data, size_t size, int64_t offset, fsdp_error *err)
{
    const npz_archive *file = context;
    return fsdp_source_pread(file->source, file->file, data, size, offset, err);
}

static fsdp_status place_member(fsdp_source *source, int file, const fsdp_zip_entry *entry,
                                array_place *place, fsdp_error *err)
{
    *place = (array_place){.source = source,
                           .name = entry->name,
                           .name_size = entry->name_size,
                           .file = file,
                           .stream = FSDP_NO_STREAM,
                           .offset = entry->offset,
                           .size = entry->size,
                           .is_member = true};
    if (place->name_size >= 4 && memcmp(entry->name + place->name_size - 4, ".npy", 4) == 0)
        place->name_size -= 4;
    if (entry->is_deflated) {
        fsdp_source_stream stream = {.file = file,
                                     .packing = FSDP_PACKING_DEFLATE,
                                     .offset = entry->offset,
                                     .stored = entry->stored,
                                     .size = entry->size,
                                     .has_crc = entry->has_crc,
                                     .crc = entry->crc};
        place->offset = 0;
        return fsdp_source_add_stream(source, &stream, &place->stream, err);
    }
    if (!entry->has_crc)
        return FSDP_OK;
    char what[200], shown[150];
    snprintf(what, sizeof what, "member '%s'",
             fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    return fsdp_source_add_crc(
        source, &(fsdp_source_crc){what, file, entry->offset, entry->size, entry->crc}, err);
}

static fsdp_status add_member(const npz_archive *archive, const fsdp_zip_entry *entry,
                              const fsdp_escaped_names *escaped, fsdp_error *err)
{
    array_place place;
    uint8_t head[6] = {0};
    fsdp_source *source = archive->source;
    FSDP_TRY(place_member(source, archive->file, entry, &place, err));
    place.opts = archive->opts;
    fsdp_escaped_names_resolve(escaped, &place.name, &place.name_size);
    size_t size = place.size < (int64_t)sizeof head ? (size_t)place.size : sizeof head;
    FSDP_TRY(read_at(&place, head, size, 0, err));
    if (!fsdp_npy_is_magic(head, size))
        return add_opaque(&place, "member of a zip that is not an array", err);
    return add_one(&place, err);
}

/* Reads the array that holds the true names of escaped members. */
static fsdp_status read_escaped_names(fsdp_source *source, int file, const fsdp_zip_entry *entry,
                                      fsdp_escaped_names *escaped, fsdp_error *err)
{
    array_place place;
    fsdp_npy npy;
    int64_t data;
    FSDP_TRY(place_member(source, file, entry, &place, err));
    FSDP_TRY(read_header(&place, &npy, &data, err));
    FSDP_TRY(check_size(&place, &npy, data, err));
    size_t size = (size_t)(place.size - data);
    if (size > LONGEST_SPELLING)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': the list of names is too long",
                         fsdp_source_path(source));
    char *text = fsdp_realloc(NULL, size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, fsdp_source_path(source));
    fsdp_status status = read_at(&place, text, size, data, err);
    if (status == FSDP_OK)
        status = fsdp_escaped_names_parse(escaped, fsdp_source_path(source), text, size, err);
    fsdp_free(text);
    return status;
}

static fsdp_status add_members(npz_archive *archive, fsdp_error *err)
{
    fsdp_source *source = archive->source;
    int file = archive->file;
    fsdp_zip_input input = {.read = read_zip,
                            .context = archive,
                            .path = fsdp_source_path(source),
                            .size = fsdp_source_file_size(source, (size_t)file)};
    fsdp_zip *zip = NULL;
    FSDP_TRY(fsdp_zip_open(&input, FSDP_ZIP_NAMES_ARE_DATA, &zip, err));
    fsdp_status status = FSDP_OK;
    fsdp_escaped_names escaped = {0};
    const fsdp_zip_entry *names = fsdp_zip_find(zip, names_member, strlen(names_member));
    if (names)
        status = read_escaped_names(source, file, names, &escaped, err);
    for (size_t i = 0; i < fsdp_zip_count(zip) && status == FSDP_OK; i++) {
        const fsdp_zip_entry *entry = fsdp_zip_at(zip, i);
        if (entry == names)
            continue;
        status = add_member(archive, entry, &escaped, err);
        char shown[200];
        if (status != FSDP_OK)
            fsdp_error_prefix(err, "member '%s'",
                              fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    }
    fsdp_escaped_names_release(&escaped);
    fsdp_zip_close(zip);
    return status;
}

/* --- the formats ------------------------------------------------------------------------------ */

static fsdp_status finish(fsdp_source *source, fsdp_status status, fsdp_source **source_out,
                          fsdp_error *err)
{
    if (status == FSDP_OK)
        status = fsdp_source_complete(source, err);
    if (status != FSDP_OK) {
        fsdp_source_close(source);
        source = NULL;
    }
    *source_out = source;
    return status;
}

static int bid_npy(const fsdp_probe *probe)
{
    return !probe->is_directory && fsdp_npy_is_magic(probe->head, probe->head_size) ? 48 : 0;
}

static fsdp_status open_npy(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    fsdp_source *source = NULL;
    FSDP_TRY(check_options(probe->opts, err));
    FSDP_TRY(fsdp_source_create(probe->io, probe->path, "npy", &source, err));
    array_place place = {
        .source = source, .name = "", .stream = FSDP_NO_STREAM, .opts = probe->opts};
    fsdp_status status = fsdp_source_add_file(source, probe->path, false, &place.file, err);
    if (status == FSDP_OK) {
        place.size = fsdp_source_file_size(source, (size_t)place.file);
        status = add_one(&place, err);
    }
    return finish(source, status, source_out, err);
}

/* A bid for a zip whose first member is named like an array, or that has no members. A name that
 * is longer than the probe is an array's, since torch.save names its records after a file. */
static int bid_npz(const fsdp_probe *probe)
{
    enum { LOCAL_HEADER = 30, EMPTY_ZIP = 22 };
    if (probe->is_directory || probe->head_size < EMPTY_ZIP)
        return 0;
    if (memcmp(probe->head, "PK\5\6", 4) == 0)
        return probe->size == EMPTY_ZIP ? 32 : 0;
    if (probe->head_size < LOCAL_HEADER || memcmp(probe->head, "PK\3\4", 4) != 0)
        return 0;
    size_t size = fsdp_load_u16(probe->head + 26);
    if (size > probe->head_size - LOCAL_HEADER)
        return probe->size > (int64_t)probe->head_size ? 64 : 0;
    return size >= 4 && memcmp(probe->head + LOCAL_HEADER + size - 4, ".npy", 4) == 0 ? 64 : 0;
}

static fsdp_status open_npz(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    npz_archive archive = {.opts = probe->opts};
    FSDP_TRY(check_options(probe->opts, err));
    FSDP_TRY(fsdp_source_create(probe->io, probe->path, "npz", &archive.source, err));
    fsdp_status status =
        fsdp_source_add_file(archive.source, probe->path, false, &archive.file, err);
    if (status == FSDP_OK)
        status = add_members(&archive, err);
    return finish(archive.source, status, source_out, err);
}

const fsdp_format fsdp_format_npz = {
    .name = "npz",
    .suffixes = {".npz"},
    .reads_file = true,
    .writes_file = true,
    .caps = {.maps_names = true, .takes_void = true},
    .reader = &(const fsdp_format_reader){.bid = bid_npz, .open = open_npz},
    .writer = &fsdp_npz_writer};

const fsdp_format fsdp_format_npy = {
    .name = "npy",
    .suffixes = {".npy"},
    .base = "npz",
    .reads_file = true,
    .writes_file = true,
    .caps = {.nameless = true, .maps_names = true, .takes_void = true},
    .reader = &(const fsdp_format_reader){.bid = bid_npy, .open = open_npy},
    .writer = &fsdp_npy_writer};

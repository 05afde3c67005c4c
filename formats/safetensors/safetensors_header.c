/*
 * Parses the header of a safetensors file, which is untrusted JSON. It accepts what the format's
 * own library accepts: every tensor's size follows from its dtype and shape, and together the
 * tensors fill the file, each byte once.
 */
#include "formats/safetensors/safetensors.h"

#include "base/data/json.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH_BYTES = 8 };

typedef struct header_reader {
    fsdp_safetensors *header;
    fsdp_json json;
    const char *path;
    int64_t file_size, data; /* offset of the data */
} header_reader;

void fsdp_safetensors_release(fsdp_safetensors *header)
{
    fsdp_free(header->entries);
    fsdp_name_table_release(&header->names);
    fsdp_text_pairs_release(&header->metadata);
    fsdp_escaped_names_release(&header->escaped_names);
    fsdp_arena_release(&header->arena);
    *header = (fsdp_safetensors){0};
}

/* --- dtypes ----------------------------------------------------------------------------------- */

static fsdp_dtype dtype_of(const char *name, size_t size)
{
    for (fsdp_dtype dtype = FSDP_DTYPE_NONE + 1; dtype < FSDP_DTYPE_COUNT; dtype++) {
        const char *theirs = fsdp_dtype_describe(dtype)->safetensors;
        if (theirs && strlen(theirs) == size && memcmp(theirs, name, size) == 0)
            return dtype;
    }
    return FSDP_DTYPE_NONE;
}

static int bits_of(fsdp_dtype dtype)
{
    if (dtype == FSDP_F4_E2M1FN_X2)
        return 4;
    if (dtype == FSDP_F6_E2M3 || dtype == FSDP_F6_E3M2)
        return 6;
    return (int)fsdp_dtype_size(dtype) * 8;
}

/* Converts the last dim of sub-byte dtypes from values to bytes; rows must be whole bytes for
 * that. */
static fsdp_status pack_shape(const header_reader *reader, const fsdp_safetensors_entry *entry,
                              int64_t *shape, fsdp_error *err)
{
    int bits = bits_of(entry->dtype);
    if (bits >= 8)
        return FSDP_OK;
    int64_t *last = entry->ndim > 0 ? &shape[entry->ndim - 1] : NULL;
    int64_t row;
    if (!last || fsdp_mul_overflow(*last, bits, &row) || row % 8 != 0) {
        char shown[200];
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s': rows of tensor '%s' of %s do not fill whole bytes", reader->path,
                         fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                         fsdp_dtype_name(entry->dtype));
    }
    *last = row / 8;
    return FSDP_OK;
}

/* --- one tensor ------------------------------------------------------------------------------- */

typedef struct tensor_text {
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    int64_t begin, end;
} tensor_text;

static fsdp_status read_dtype(fsdp_json *json, fsdp_dtype *dtype_out, fsdp_error *err)
{
    const char *name;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &name, &size, err));
    *dtype_out = dtype_of(name, size);
    char shown[100];
    if (*dtype_out == FSDP_DTYPE_NONE)
        return fsdp_json_fail(json, err, "the dtype '%s' is unknown",
                              fsdp_printable(name, size, shown, sizeof shown));
    return FSDP_OK;
}

/* Reads natural numbers, at most `room` of them. */
static fsdp_status read_numbers(fsdp_json *json, int64_t *numbers, int room, int *count_out,
                                fsdp_error *err)
{
    *count_out = 0;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        if (*count_out == room) {
            fsdp_json_fail(json, err, "there are more than %d numbers", room);
            if (err)
                err->status = FSDP_ERR_LIMIT;
            return FSDP_ERR_LIMIT;
        }
        uint64_t number;
        FSDP_TRY(fsdp_json_u64(json, &number, err));
        if (number > INT64_MAX)
            return fsdp_json_fail(json, err, "the integer is out of range");
        numbers[(*count_out)++] = (int64_t)number;
    }
}

static fsdp_status read_range(fsdp_json *json, tensor_text *tensor, fsdp_error *err)
{
    int64_t range[3];
    int count;
    FSDP_TRY(read_numbers(json, range, 3, &count, err));
    if (count != 2 || range[0] > range[1])
        return fsdp_json_fail(json, err, "data_offsets are not a start and an end after it");
    tensor->begin = range[0];
    tensor->end = range[1];
    return FSDP_OK;
}

static fsdp_status read_tensor(header_reader *reader, tensor_text *tensor, fsdp_error *err)
{
    static const char *const names[] = {"dtype", "shape", "data_offsets"};
    fsdp_json *json = &reader->json;
    fsdp_json_members members = {.names = names, .count = 3};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        if (which == 0)
            FSDP_TRY(read_dtype(json, &tensor->dtype, err));
        else if (which == 1)
            FSDP_TRY(read_numbers(json, tensor->shape, FSDP_MAX_DIMS, &tensor->ndim, err));
        else
            FSDP_TRY(read_range(json, tensor, err));
    }
    if (members.seen != 7)
        return fsdp_json_fail(json, err, "the tensor has no dtype, shape or data_offsets");
    return FSDP_OK;
}

/* The range must have the size of dtype and shape, and lie in the file. */
static fsdp_status check_size(header_reader *reader, const tensor_text *tensor, fsdp_error *err)
{
    int64_t bits = bits_of(tensor->dtype);
    bool is_over = false;
    for (int dim = 0; dim < tensor->ndim; dim++)
        is_over = fsdp_mul_overflow(bits, tensor->shape[dim], &bits) || is_over;
    if (is_over)
        return fsdp_json_fail(&reader->json, err, "the shape is too large");
    if (bits % 8 != 0 || bits / 8 != tensor->end - tensor->begin)
        return fsdp_json_fail(&reader->json, err,
                              "the shape needs %" PRId64 " bits, and %" PRId64 " bytes are given",
                              bits, tensor->end - tensor->begin);
    if (tensor->end > reader->file_size - reader->data)
        return fsdp_json_fail(&reader->json, err,
                              "the data ends at byte %" PRId64 ", but only %" PRId64 " are there",
                              tensor->end, reader->file_size - reader->data);
    return FSDP_OK;
}

static fsdp_status keep_tensor(header_reader *reader, const char *name, size_t size,
                               const tensor_text *tensor, fsdp_error *err)
{
    fsdp_safetensors *header = reader->header;
    int64_t *shape = fsdp_arena_alloc(&header->arena, (size_t)tensor->ndim, sizeof *shape);
    if (!shape ||
        !fsdp_grow(&header->entries, &header->room, header->count + 1, sizeof *header->entries))
        return fsdp_fail_memory(err, reader->path);
    memcpy(shape, tensor->shape, (size_t)tensor->ndim * sizeof *shape);
    fsdp_safetensors_entry *entry = &header->entries[header->count++];
    *entry = (fsdp_safetensors_entry){.name = name,
                                      .name_size = size,
                                      .true_name = name,
                                      .true_size = size,
                                      .dtype = tensor->dtype,
                                      .ndim = tensor->ndim,
                                      .shape = shape,
                                      .begin = reader->data + tensor->begin,
                                      .end = reader->data + tensor->end};
    return pack_shape(reader, entry, shape, err);
}

/* --- metadata --------------------------------------------------------------------------------- */

static fsdp_status read_offsets(header_reader *reader, fsdp_json *json, const uint64_t *number,
                                fsdp_error *err)
{
    int64_t lo[FSDP_MAX_DIMS];
    int count;
    FSDP_TRY(read_numbers(json, lo, FSDP_MAX_DIMS, &count, err));
    if (!number || *number >= reader->header->count)
        return FSDP_OK; /* a tensor of another file */
    fsdp_safetensors_entry *entry = &reader->header->entries[*number];
    if (count != entry->ndim)
        return fsdp_json_fail(json, err, "there are %d saved_offsets for a tensor of %d dims",
                              count, entry->ndim);
    int64_t *kept = fsdp_arena_alloc(&reader->header->arena, (size_t)count, sizeof *kept);
    if (!kept)
        return fsdp_fail_memory(err, reader->path);
    memcpy(kept, lo, (size_t)count * sizeof *kept);
    entry->lo = kept;
    return FSDP_OK;
}

/* {"saved_offsets": [...]} */
static fsdp_status read_box(header_reader *reader, fsdp_json *json, const uint64_t *number,
                            fsdp_error *err)
{
    static const char *const names[] = {"saved_offsets"};
    fsdp_json_members members = {.names = names, .count = 1};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        FSDP_TRY(read_offsets(reader, json, number, err));
    }
}

/* The true shape of a tensor that is stored flat because its rows are not whole bytes. */
static fsdp_status read_true_shape(header_reader *reader, fsdp_json *json, const uint64_t *number,
                                   fsdp_error *err)
{
    int64_t shape[FSDP_MAX_DIMS], size = 1;
    int ndim;
    bool is_over = false;
    FSDP_TRY(read_numbers(json, shape, FSDP_MAX_DIMS, &ndim, err));
    if (!number || *number >= reader->header->count)
        return FSDP_OK;
    fsdp_safetensors_entry *entry = &reader->header->entries[*number];
    for (int dim = 0; dim < ndim; dim++)
        is_over = fsdp_mul_overflow(size, shape[dim], &size) || is_over;
    if (is_over || bits_of(entry->dtype) >= 8 || size != entry->end - entry->begin)
        return fsdp_json_fail(json, err, "the shape is not that of the tensor");
    int64_t *kept = fsdp_arena_alloc(&reader->header->arena, (size_t)ndim, sizeof *kept);
    if (!kept)
        return fsdp_fail_memory(err, reader->path);
    memcpy(kept, shape, (size_t)ndim * sizeof *kept);
    entry->ndim = ndim;
    entry->shape = kept;
    return FSDP_OK;
}

typedef fsdp_status (*read_item)(header_reader *reader, fsdp_json *json, const uint64_t *number,
                                 fsdp_error *err);

/* Reads a text of the metadata that is a JSON object with a member per tensor. */
static fsdp_status read_native_text(header_reader *reader, const fsdp_text_pair *pair,
                                    read_item read, fsdp_error *err)
{
    fsdp_json json;
    fsdp_json_init(&json, pair->text, pair->text_size, reader->path);
    fsdp_status status = fsdp_json_enter_object(&json, err);
    while (status == FSDP_OK) {
        const char *key;
        size_t size;
        bool more = false;
        status = fsdp_json_next_key(&json, &key, &size, &more, err);
        if (status != FSDP_OK || !more)
            break;
        status = read(reader, &json, fsdp_name_table_find(&reader->header->names, key, size), err);
    }
    if (status == FSDP_OK)
        status = fsdp_json_finish(&json, err);
    fsdp_json_release(&json);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "%s", pair->key);
    return status;
}

/* Keys of the metadata whose texts are JSON. */
static const char sharding_key[] = FSDP_SAFETENSORS_SHARDING, names_key[] = "fsdp.names",
                  shapes_key[] = "fsdp.shapes";

static fsdp_status read_metadata(header_reader *reader, fsdp_error *err)
{
    if (fsdp_json_peek(&reader->json) == FSDP_JSON_NULL) /* as MLX writes it */
        return fsdp_json_null(&reader->json, err);
    reader->header->has_metadata = true;
    return fsdp_text_pairs_take(&reader->header->metadata, &reader->json, err);
}

/* --- the whole header ------------------------------------------------------------------------- */

static fsdp_status read_member(header_reader *reader, const char *key, size_t size, fsdp_error *err)
{
    fsdp_safetensors *header = reader->header;
    if (fsdp_name_table_find(&header->names, key, size))
        return fsdp_json_fail(&reader->json, err, "the name appears twice");
    const char *name = fsdp_arena_strndup(&header->arena, key, size);
    bool is_metadata = fsdp_bytes_are(key, size, "__metadata__");
    uint64_t number = is_metadata ? UINT64_MAX : header->count;
    if (!name || !fsdp_name_table_put(&header->names, name, size, number))
        return fsdp_fail_memory(err, reader->path);
    if (is_metadata)
        return read_metadata(reader, err);
    tensor_text tensor = {0};
    fsdp_status status = read_tensor(reader, &tensor, err);
    if (status == FSDP_OK)
        status = check_size(reader, &tensor, err);
    if (status == FSDP_OK)
        return keep_tensor(reader, name, size, &tensor, err);
    char shown[200];
    fsdp_error_prefix(err, "tensor '%s'", fsdp_printable(name, size, shown, sizeof shown));
    return status;
}

static fsdp_status resolve_names(header_reader *reader, const char *text, size_t size,
                                 fsdp_error *err)
{
    fsdp_safetensors *header = reader->header;
    FSDP_TRY(fsdp_escaped_names_parse(&header->escaped_names, reader->path, text, size, err));
    for (size_t i = 0; i < header->count; i++)
        fsdp_escaped_names_resolve(&header->escaped_names, &header->entries[i].true_name,
                                   &header->entries[i].true_size);
    return FSDP_OK;
}

static const fsdp_text_pair *metadata_of(const header_reader *reader, const char *key)
{
    return fsdp_text_pairs_find(&reader->header->metadata, key, strlen(key));
}

/* Shapes come first, because the offsets must have as many dims. */
static fsdp_status read_native_texts(header_reader *reader, fsdp_error *err)
{
    const fsdp_text_pair *shapes = metadata_of(reader, shapes_key);
    const fsdp_text_pair *names = metadata_of(reader, names_key);
    const fsdp_text_pair *sharding = metadata_of(reader, sharding_key);
    reader->header->is_sharded = sharding != NULL;
    if (shapes)
        FSDP_TRY(read_native_text(reader, shapes, read_true_shape, err));
    if (names)
        FSDP_TRY(resolve_names(reader, names->text, names->text_size, err));
    return sharding ? read_native_text(reader, sharding, read_box, err) : FSDP_OK;
}

static fsdp_status read_members(header_reader *reader, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_object(&reader->json, err));
    for (;;) {
        const char *key;
        size_t size;
        bool more;
        FSDP_TRY(fsdp_json_next_key(&reader->json, &key, &size, &more, err));
        if (!more)
            break;
        FSDP_TRY(read_member(reader, key, size, err));
    }
    FSDP_TRY(fsdp_json_finish(&reader->json, err));
    return read_native_texts(reader, err);
}

static int compare_places(const void *a, const void *b)
{
    const fsdp_safetensors_entry *x = *(const fsdp_safetensors_entry *const *)a;
    const fsdp_safetensors_entry *y = *(const fsdp_safetensors_entry *const *)b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static fsdp_status fail_place(const header_reader *reader, const fsdp_safetensors_entry *entry,
                              int64_t at, fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': tensor '%s' begins at byte %" PRId64 " and should begin at %" PRId64
                     "; tensors must follow one another",
                     reader->path,
                     fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                     entry->begin, at);
}

/* The tensors must follow one another from the header to the end of the file. */
static fsdp_status check_places(const header_reader *reader, fsdp_error *err)
{
    const fsdp_safetensors *header = reader->header;
    const fsdp_safetensors_entry **order = fsdp_alloc(header->count, sizeof *order);
    if (!order)
        return fsdp_fail_memory(err, reader->path);
    for (size_t i = 0; i < header->count; i++)
        order[i] = &header->entries[i];
    qsort(order, header->count, sizeof *order, compare_places);
    fsdp_status status = FSDP_OK;
    int64_t at = reader->data;
    for (size_t i = 0; i < header->count && status == FSDP_OK; i++) {
        if (order[i]->begin != at)
            status = fail_place(reader, order[i], at, err);
        at = order[i]->end;
    }
    fsdp_free(order);
    if (status == FSDP_OK && at != reader->file_size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' has %" PRId64 " bytes, and its tensors end at byte %" PRId64,
                         reader->path, reader->file_size, at);
    return status;
}

static fsdp_status read_length(const fsdp_source *source, int file, header_reader *reader,
                               size_t *size_out, fsdp_error *err)
{
    uint8_t bytes[LENGTH_BYTES] = {0};
    if (reader->file_size < LENGTH_BYTES)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' has only %" PRId64 " bytes", reader->path,
                         reader->file_size);
    FSDP_TRY(fsdp_source_pread(source, file, bytes, sizeof bytes, 0, err));
    uint64_t size = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        size = size << 8 | bytes[i];
    if (size > (uint64_t)(reader->file_size - LENGTH_BYTES))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': its header has %" PRIu64 " bytes, but the file has only %" PRId64,
                         reader->path, size, reader->file_size);
    if (size > FSDP_SAFETENSORS_HEADER_MOST)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s': its header has %" PRIu64 " bytes, at most %d are allowed",
                         reader->path, size, FSDP_SAFETENSORS_HEADER_MOST);
    *size_out = (size_t)size;
    reader->data = LENGTH_BYTES + (int64_t)size;
    return FSDP_OK;
}

static fsdp_status parse(header_reader *reader, const char *text, size_t size, fsdp_error *err)
{
    if (size == 0 || text[0] != '{')
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': its header is not a JSON object",
                         reader->path);
    fsdp_json_init(&reader->json, text, size, reader->path);
    fsdp_status status = read_members(reader, err);
    fsdp_json_release(&reader->json);
    return status == FSDP_OK ? check_places(reader, err) : status;
}

fsdp_status fsdp_safetensors_read(const fsdp_source *source, int file, fsdp_safetensors *header,
                                  fsdp_error *err)
{
    header_reader reader = {.header = header,
                            .path = fsdp_source_file_path(source, (size_t)file),
                            .file_size = fsdp_source_file_size(source, (size_t)file)};
    size_t size = 0;
    FSDP_TRY(read_length(source, file, &reader, &size, err));
    char *text = fsdp_realloc(NULL, size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, reader.path);
    fsdp_status status = fsdp_source_pread(source, file, text, size, LENGTH_BYTES, err);
    if (status == FSDP_OK)
        status = parse(&reader, text, size, err);
    fsdp_free(text);
    return status;
}

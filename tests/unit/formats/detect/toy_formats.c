/*
 * The list of formats with one more: "toy", whose room is this file. It takes the place of
 * formats/detect/formats.c, and nothing else of the product knows of it; test_toy_format.c converts to it and
 * from it. This is what docs/architecture.md, "How to add a format", asks for.
 *
 * A toy file is "TOY1", the number of tensors, for each a record (bytes of the name, dims, their lengths, the
 * name), and the f32 elements of all tensors, in that order. Numbers are 4 bytes, little-endian.
 */
#include "base/core/bytes.h"
#include "formats/source.h"
#include "formats/target/packed_internal.h"

#include <string.h>

enum { NAME_MOST = 200, HEADER_MOST = 1 << 16 };
static const char magic[4] = {'T', 'O', 'Y', '1'};

/* --- reading ---------------------------------------------------------------------------------- */

static int bid(const fsdp_probe *probe)
{
    return !probe->is_directory && probe->head_size >= 8 && memcmp(probe->head, magic, 4) == 0 ? 32
                                                                                               : 0;
}

typedef struct toy_reader {
    fsdp_source *source;
    int file;
    int64_t at; /* of the next number or name */
} toy_reader;

static fsdp_status take(toy_reader *reader, void *data, size_t size, fsdp_error *err)
{
    const char *path = fsdp_source_file_path(reader->source, (size_t)reader->file);
    if (reader->at + (int64_t)size > fsdp_source_file_size(reader->source, (size_t)reader->file))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' ends in its header", path);
    FSDP_TRY(fsdp_source_pread(reader->source, reader->file, data, size, reader->at, err));
    reader->at += (int64_t)size;
    return FSDP_OK;
}

static fsdp_status take_number(toy_reader *reader, uint32_t most, uint32_t *number_out,
                               fsdp_error *err)
{
    uint8_t bytes[4];
    FSDP_TRY(take(reader, bytes, sizeof bytes, err));
    *number_out = fsdp_load_u32(bytes);
    return *number_out <= most
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_DAMAGED, "a toy file with the number %u in its header",
                           *number_out);
}

static fsdp_status take_tensor(toy_reader *reader, fsdp_error *err)
{
    char name[NAME_MOST];
    int64_t shape[FSDP_MAX_DIMS];
    uint32_t name_size = 0, ndim = 0, length = 0;
    size_t number;
    FSDP_TRY(take_number(reader, NAME_MOST, &name_size, err));
    FSDP_TRY(take_number(reader, FSDP_MAX_DIMS, &ndim, err));
    for (uint32_t dim = 0; dim < ndim; dim++) {
        FSDP_TRY(take_number(reader, UINT32_MAX, &length, err));
        shape[dim] = length;
    }
    FSDP_TRY(take(reader, name, name_size, err));
    return fsdp_source_add_tensor(reader->source, name, name_size,
                                  &(fsdp_source_shape){FSDP_F32, (int)ndim, shape}, &number, err);
}

/* Gives each tensor its elements; the builder refuses those that the file does not have. */
static fsdp_status add_chunks(const toy_reader *reader, fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    int64_t at = reader->at;
    for (size_t i = 0; i < fsdp_source_tensor_count(reader->source); i++) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(reader->source, i);
        FSDP_TRY(fsdp_source_add_chunk(reader->source, i,
                                       &(fsdp_source_chunk){.lo = origin,
                                                            .len = tensor->shape,
                                                            .offset = at,
                                                            .file = reader->file,
                                                            .stream = FSDP_NO_STREAM},
                                       err));
        at += 4 * fsdp_shape_count(tensor->ndim, tensor->shape);
    }
    return FSDP_OK;
}

static fsdp_status fill(fsdp_source *source, const char *path, fsdp_error *err)
{
    toy_reader reader = {.source = source, .at = sizeof magic};
    uint32_t count = 0;
    FSDP_TRY(fsdp_source_add_file(source, path, false, &reader.file, err));
    FSDP_TRY(take_number(&reader, HEADER_MOST, &count, err));
    for (uint32_t i = 0; i < count; i++)
        FSDP_TRY(take_tensor(&reader, err));
    FSDP_TRY(add_chunks(&reader, err));
    return fsdp_source_complete(source, err);
}

static fsdp_status open_toy(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_source_create(probe->io, probe->path, "toy", source_out, err));
    fsdp_status st = fill(*source_out, probe->path, err);
    if (st != FSDP_OK) {
        fsdp_source_close(*source_out);
        *source_out = NULL;
    }
    return st;
}

/* --- writing ---------------------------------------------------------------------------------- */

static bool holds_dtype(fsdp_dtype dtype)
{
    return dtype == FSDP_F32;
}

static bool holds_name(const char *name, size_t size)
{
    (void)name;
    return size <= NAME_MOST;
}

static void add_number(fsdp_text *text, int64_t number)
{
    const uint8_t bytes[4] = {(uint8_t)number, (uint8_t)(number >> 8), (uint8_t)(number >> 16),
                              (uint8_t)(number >> 24)};
    fsdp_text_add(text, (const char *)bytes, sizeof bytes);
}

static void add_header(fsdp_text *text, const fsdp_packed *target)
{
    fsdp_text_add(text, magic, sizeof magic);
    add_number(text, (int64_t)target->tensor_count);
    for (size_t i = 0; i < target->tensor_count; i++) {
        const fsdp_packed_tensor *what = &target->tensors[i].what;
        add_number(text, (int64_t)what->name_size);
        add_number(text, what->ndim);
        for (int dim = 0; dim < what->ndim; dim++)
            add_number(text, what->shape[dim]);
        fsdp_text_add(text, what->name, what->name_size);
    }
}

static fsdp_status write_header(fsdp_packed *target, const fsdp_text *text, fsdp_error *err)
{
    int64_t at = (int64_t)text->size;
    int file;
    for (size_t i = 0; i < target->tensor_count; i++) {
        target->tensors[i].offset = at;
        at += target->tensors[i].size;
    }
    FSDP_TRY(fsdp_packed_add_file(target, NULL, at, &file, err));
    for (size_t i = 0; i < target->tensor_count; i++)
        target->tensors[i].file = file;
    return fsdp_packed_put(target, file, text->data, text->size, 0, err);
}

static fsdp_status lay_out(fsdp_packed *target, fsdp_error *err)
{
    fsdp_text text = {0};
    add_header(&text, target);
    fsdp_status st =
        text.failed ? fsdp_fail_memory(err, "a header") : write_header(target, &text, err);
    fsdp_text_release(&text);
    return st;
}

/* --- the formats ------------------------------------------------------------------------------ */

static const fsdp_format_reader toy_reader_functions = {.bid = bid, .open = open_toy};
static const fsdp_packed_format toy_layout = {.holds_name = holds_name, .lay_out = lay_out};
static const fsdp_format_writer toy_writer = {
    .ops = &fsdp_packed_ops, .packed = &toy_layout, .holds_dtype = holds_dtype};
static const fsdp_format fsdp_format_toy = {.name = "toy",
                                            .alias = "toys",
                                            .suffixes = {".toy"},
                                            .reads_file = true,
                                            .writes_file = true,
                                            .reader = &toy_reader_functions,
                                            .writer = &toy_writer};

#define FORMAT(x) extern const fsdp_format fsdp_format_##x;
#include "formats/detect/format_list.inc"
#undef FORMAT

#define FORMAT(x) &fsdp_format_##x,
static const fsdp_format *const formats[] = {
#include "formats/detect/format_list.inc"
    &fsdp_format_toy};

const fsdp_format *fsdp_format_at(size_t i)
{
    return i < sizeof formats / sizeof *formats ? formats[i] : NULL;
}

/*
 * GGUF as a source: key-value pairs become values, tensors are plain bytes of the file. A model may be
 * split over files NAME-00001-of-00003.gguf, each with the header of its own tensors; the first one
 * holds the pairs. The mirror of gguf_write.c.
 */
#include "formats/gguf/gguf.h"
#include "base/core/bytes.h"

#include <inttypes.h>
#include <string.h>

/* === input ==================================================================================== */

typedef struct gguf_input {
    const fsdp_source *source;
    const char *path;
    int file;
    bool is_big;      /* big-endian numbers */
    int64_t at, size; /* the next byte, the bytes of the file */
    uint8_t *buf;     /* bytes from buf_at on */
    int64_t buf_at, buf_size;
    size_t items;         /* of all arrays so far */
    int64_t memory, most; /* bytes of all arrays, twice: the state dict has a copy; and the limit */
} gguf_input;

enum { BUFFER = 64 << 10 };

/* memory: bytes that arrays may take; 0: 256 MiB. */
static fsdp_status gguf_input_init(gguf_input *in, fsdp_source *source, int file, int64_t memory,
                                   fsdp_error *err)
{
    *in = (gguf_input){.source = source,
                       .file = file,
                       .path = fsdp_source_file_path(source, (size_t)file),
                       .size = fsdp_source_file_size(source, (size_t)file),
                       .most = memory > 0 ? memory : (int64_t)256 << 20,
                       .buf = fsdp_realloc(NULL, BUFFER, 1)};
    return in->buf ? FSDP_OK : fsdp_fail_memory(err, in->path);
}

static void gguf_input_release(gguf_input *in)
{
    fsdp_free(in->buf);
    in->buf = NULL;
}

/* Fills the buffer from in->at on. */
static fsdp_status fill(gguf_input *in, fsdp_error *err)
{
    int64_t left = in->size - in->at;
    in->buf_at = in->at;
    in->buf_size = left < BUFFER ? left : BUFFER;
    return fsdp_source_pread(in->source, in->file, in->buf, (size_t)in->buf_size, in->at, err);
}

/* FSDP_ERR_DAMAGED when fewer bytes remain; what names them. */
static fsdp_status gguf_take(gguf_input *in, size_t size, const char *what, void *out,
                             fsdp_error *err)
{
    if ((uint64_t)size > (uint64_t)(in->size - in->at))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': %s at byte %" PRId64
                         " takes %zu bytes, but the file ends after %" PRId64,
                         in->path, what, in->at, size, in->size - in->at);
    if (size > BUFFER) {
        FSDP_TRY(fsdp_source_pread(in->source, in->file, out, size, in->at, err));
        in->at += (int64_t)size;
        return FSDP_OK;
    }
    if (in->at < in->buf_at || in->at + (int64_t)size > in->buf_at + in->buf_size)
        FSDP_TRY(fill(in, err));
    if (size > 0)
        memcpy(out, in->buf + (in->at - in->buf_at), size);
    in->at += (int64_t)size;
    return FSDP_OK;
}

static void turn(uint8_t *bytes, size_t size)
{
    for (size_t low = 0, high = size - 1; low < high; low++, high--) {
        uint8_t byte = bytes[low];
        bytes[low] = bytes[high];
        bytes[high] = byte;
    }
}

static fsdp_status gguf_take_u32(gguf_input *in, const char *what, uint32_t *out, fsdp_error *err)
{
    uint8_t bytes[4];
    FSDP_TRY(gguf_take(in, sizeof bytes, what, bytes, err));
    if (in->is_big)
        turn(bytes, sizeof bytes);
    *out = fsdp_load_u32(bytes);
    return FSDP_OK;
}

static fsdp_status gguf_take_u64(gguf_input *in, const char *what, uint64_t *out, fsdp_error *err)
{
    uint8_t bytes[8];
    FSDP_TRY(gguf_take(in, sizeof bytes, what, bytes, err));
    if (in->is_big)
        turn(bytes, sizeof bytes);
    *out = fsdp_load_u64(bytes);
    return FSDP_OK;
}

/* A number that counts things of at least `least` bytes each: they must fit into the rest of the file. */
static fsdp_status gguf_take_count(gguf_input *in, size_t least, const char *what, size_t *out,
                                   fsdp_error *err)
{
    uint64_t count;
    FSDP_TRY(gguf_take_u64(in, what, &count, err));
    if (count > (uint64_t)(in->size - in->at) / least)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': %s is %" PRIu64 ", which does not fit into the %" PRId64
                         " bytes that follow",
                         in->path, what, count, in->size - in->at);
    *out = (size_t)count;
    return FSDP_OK;
}

/* The caller frees *out, which ends with a zero byte. */
static fsdp_status gguf_take_string(gguf_input *in, size_t most, const char *what, char **out,
                                    size_t *size_out, fsdp_error *err)
{
    size_t size = 0;
    *out = NULL;
    FSDP_TRY(gguf_take_count(in, 1, what, &size, err));
    if (size > most)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': %s has %zu bytes, at most %zu are allowed",
                         in->path, what, size, most);
    char *text = fsdp_realloc(NULL, size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, in->path);
    fsdp_status st = gguf_take(in, size, what, text, err);
    if (st != FSDP_OK) {
        fsdp_free(text);
        return st;
    }
    text[size] = '\0';
    *out = text;
    *size_out = size;
    return FSDP_OK;
}

/* === values =================================================================================== */

/* One value of a GGUF file. An array becomes a list, and holds no other arrays. */

/* Limits of a file: a vocabulary has less than a million tokens and as many merges. */
enum { MOST_ITEMS = 16 << 20, LONGEST_STRING = 64 << 20, SHOWN = 100 };
/* Bytes of an item, and of the memory of a short string. */
enum { ITEM = sizeof(fsdp_value) };
/* Bytes of an entry in addition to its name and its value; charge() doubles them. */
enum { PAIR = 512 };

static fsdp_status fail_kind(const gguf_input *in, const char *key, uint32_t kind, fsdp_error *err)
{
    char shown[SHOWN];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the value of '%s' has the unknown type %" PRIu32,
                     in->path, fsdp_printable(key, strlen(key), shown, sizeof shown), kind);
}

static fsdp_status take_bool(gguf_input *in, fsdp_value *value, fsdp_error *err)
{
    uint8_t byte;
    FSDP_TRY(gguf_take(in, 1, "a boolean", &byte, err));
    if (byte > 1)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the boolean at byte %" PRId64 " is %u",
                         in->path, in->at - 1, byte);
    *value = fsdp_value_bool(byte == 1);
    return FSDP_OK;
}

/* Bytes that are not UTF-8 (tokens of some tokenizers) stay bytes. */
static fsdp_status take_text(gguf_input *in, fsdp_value *value, fsdp_error *err)
{
    char *text;
    size_t size;
    FSDP_TRY(gguf_take_string(in, LONGEST_STRING, "a string", &text, &size, err));
    fsdp_value_kind kind = fsdp_utf8_valid(text, size) ? FSDP_VALUE_STRING : FSDP_VALUE_BYTES;
    fsdp_status st = fsdp_value_set_bytes(value, kind, text, size, err);
    fsdp_free(text);
    return st;
}

/* The bits of a number of 1, 2, 4 or 8 bytes. */
static fsdp_status take_bits(gguf_input *in, size_t size, uint64_t *bits_out, fsdp_error *err)
{
    uint8_t bytes[8];
    FSDP_TRY(gguf_take(in, size, "a number", bytes, err));
    *bits_out = 0;
    for (size_t i = 0; i < size; i++)
        *bits_out |= (uint64_t)bytes[in->is_big ? size - 1 - i : i] << 8 * i;
    return FSDP_OK;
}

static double float_of(uint64_t bits, size_t size)
{
    uint32_t low = (uint32_t)bits;
    float narrow;
    double wide;
    memcpy(&narrow, &low, sizeof narrow);
    memcpy(&wide, &bits, sizeof wide);
    return size == sizeof narrow ? (double)narrow : wide;
}

static fsdp_status take_number(gguf_input *in, gguf_kind kind, fsdp_value *value, fsdp_error *err)
{
    size_t size = gguf_kind_size(kind);
    int unused = 64 - 8 * (int)size;
    uint64_t bits;
    FSDP_TRY(take_bits(in, size, &bits, err));
    switch (kind) {
    case GGUF_F32:
    case GGUF_F64: *value = fsdp_value_f64(float_of(bits, size)); break;
    case GGUF_I8:
    case GGUF_I16:
    case GGUF_I32:
    case GGUF_I64: *value = fsdp_value_i64((int64_t)(bits << unused) >> unused); break;
    default:
        *value = bits > INT64_MAX ? fsdp_value_u64(bits) : fsdp_value_i64((int64_t)bits);
        break;
    }
    return FSDP_OK;
}

static fsdp_status take_one(gguf_input *in, gguf_kind kind, fsdp_value *value, fsdp_error *err)
{
    return kind == GGUF_STRING ? take_text(in, value, err)
           : kind == GGUF_BOOL ? take_bool(in, value, err)
                               : take_number(in, kind, value, err);
}

/* Counts bytes of a value before they are allocated. */
static fsdp_status charge(gguf_input *in, int64_t bytes, const char *shown, fsdp_error *err)
{
    in->memory += 2 * bytes;
    return in->memory <= in->most ? FSDP_OK
                                  : fsdp_fail(err, FSDP_ERR_LIMIT,
                                              "'%s': its values up to '%s' take more than %" PRId64
                                              " MiB of memory; allow more with --mem",
                                              in->path, shown, in->most >> 20);
}

static fsdp_status take_array(gguf_input *in, const char *shown, fsdp_value *value, fsdp_error *err)
{
    uint32_t kind;
    size_t count;
    FSDP_TRY(gguf_take_u32(in, "the type of an array", &kind, err));
    if (kind == GGUF_ARRAY)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s': the value of '%s' is an array of arrays, which is not supported",
                         in->path, shown);
    if (gguf_kind_size(kind) == 0)
        return fail_kind(in, shown, kind, err);
    FSDP_TRY(gguf_take_count(in, gguf_kind_size(kind), "the length of an array", &count, err));
    in->items += count;
    if (count > MOST_ITEMS || in->items > MOST_ITEMS)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': up to '%s' its arrays hold more than %d items",
                         in->path, shown, MOST_ITEMS);
    FSDP_TRY(charge(in, (int64_t)count * (kind == GGUF_STRING ? 2 * ITEM : ITEM), shown, err));
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_LIST, count, err));
    for (size_t i = 0; i < count; i++) {
        fsdp_value *item = &value->as.list.items[i];
        FSDP_TRY(take_one(in, (gguf_kind)kind, item, err));
        if (kind == GGUF_STRING && item->as.bytes.size > ITEM)
            FSDP_TRY(charge(in, (int64_t)item->as.bytes.size, shown, err));
    }
    return FSDP_OK;
}

/* A value and the type that it is stored with, which may be an array. */
static fsdp_status gguf_take_value(gguf_input *in, const char *key, fsdp_value *value,
                                   fsdp_error *err)
{
    uint32_t kind;
    FSDP_TRY(gguf_take_u32(in, "the type of a value", &kind, err));
    if (gguf_kind_size(kind) == 0)
        return fail_kind(in, key, kind, err);
    char shown[SHOWN];
    fsdp_printable(key, strlen(key), shown, sizeof shown);
    FSDP_TRY(charge(in, PAIR + (int64_t)strlen(key), shown, err));
    if (kind == GGUF_ARRAY)
        return take_array(in, shown, value, err);
    FSDP_TRY(take_one(in, (gguf_kind)kind, value, err));
    return kind == GGUF_STRING ? charge(in, (int64_t)value->as.bytes.size, shown, err) : FSDP_OK;
}

/* === the file ================================================================================= */

enum { MOST_PARTS = 99999, LEAST_PAIR = 8 + 4 + 1, LEAST_TENSOR = 8 + 4 + 4 + 8 };

static const char suffix[] = ".gguf";

/* A tensor as the header describes it; its place is known when the header was read. */
typedef struct gguf_tensor {
    char *name;
    size_t name_size;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[GGUF_DIMS];
    uint64_t offset;
} gguf_tensor;

typedef struct gguf_model {
    fsdp_source *source;
    gguf_input in; /* of the file that is read now */
    gguf_tensor *tensors;
    size_t tensor_count;
    size_t all_tensors; /* of all files so far */
    int number, count;  /* of the file that is read, from 0 on, and of all its parts */
    int64_t alignment;
    int64_t split_no, split_count, split_tensors; /* -1: the file does not say */
    int64_t memory; /* that arrays of values may take; 0: the default */
    int64_t kept;   /* bytes of those of the parts before */
} gguf_model;

/* --- key-value pairs -------------------------------------------------------------------------- */

/* Notes a pair about the file itself. False: it is a pair of the model. */
static bool note_split(gguf_model *model, const char *key, const fsdp_value *value)
{
    int64_t number = value->kind == FSDP_VALUE_I64 ? value->as.i64 : -1;
    if (strcmp(key, "split.no") == 0)
        model->split_no = number;
    else if (strcmp(key, "split.count") == 0)
        model->split_count = number;
    else if (strcmp(key, "split.tensors.count") == 0)
        model->split_tensors = number;
    else
        return false;
    return model->count > 1;
}

static fsdp_status note_alignment(gguf_model *model, const char *key, const fsdp_value *value,
                                  fsdp_error *err)
{
    if (strcmp(key, "general.alignment") != 0)
        return FSDP_OK;
    int64_t number = value->kind == FSDP_VALUE_I64 ? value->as.i64 : -1;
    if (number <= 0 || number > INT32_MAX || (number & (number - 1)) != 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': general.alignment is not a power of two (%" PRId64 ")",
                         model->in.path, number);
    model->alignment = number;
    return FSDP_OK;
}

/* Parts after the first one repeat pairs of it. */
static fsdp_status keep_pair(gguf_model *model, const char *key, size_t size, fsdp_value *value,
                             fsdp_error *err)
{
    char shown[SHOWN];
    FSDP_TRY(note_alignment(model, key, value, err));
    if (note_split(model, key, value))
        return FSDP_OK;
    if (!fsdp_source_has(model->source, key, size)) {
        model->kept = model->in.memory;
        return fsdp_source_add_value(model->source, key, size, value, NULL, err);
    }
    if (model->number > 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' holds '%s' twice", model->in.path,
                     fsdp_printable(key, size, shown, sizeof shown));
}

static fsdp_status read_pair(gguf_model *model, fsdp_error *err)
{
    char *key;
    size_t size;
    fsdp_value value = {.kind = FSDP_VALUE_NULL};
    FSDP_TRY(gguf_take_string(&model->in, GGUF_LONGEST_KEY, "a key", &key, &size, err));
    model->in.memory = model->kept; /* a value that was not kept is gone */
    fsdp_status st = gguf_take_value(&model->in, key, &value, err);
    if (st == FSDP_OK)
        st = keep_pair(model, key, size, &value, err);
    fsdp_value_release(&value);
    fsdp_free(key);
    return st;
}

/* --- tensors ---------------------------------------------------------------------------------- */

/* The dims of a file are the fastest one first. */
static fsdp_status read_shape(gguf_model *model, gguf_tensor *tensor, const char *shown,
                              fsdp_error *err)
{
    uint32_t ndim;
    FSDP_TRY(gguf_take_u32(&model->in, "the number of dims", &ndim, err));
    if (ndim > GGUF_DIMS)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': tensor '%s' has %" PRIu32 " dims, at most %d are allowed",
                         model->in.path, shown, ndim, GGUF_DIMS);
    tensor->ndim = (int)ndim;
    for (int dim = tensor->ndim - 1; dim >= 0; dim--) {
        uint64_t length;
        FSDP_TRY(gguf_take_u64(&model->in, "a dim", &length, err));
        if (length > INT64_MAX)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s': tensor '%s' has a dim of %" PRIu64 ", which is too large",
                             model->in.path, shown, length);
        tensor->shape[dim] = (int64_t)length;
    }
    return FSDP_OK;
}

/* The last dim of the catalog counts blocks. */
static fsdp_status count_blocks(const gguf_model *model, gguf_tensor *tensor, const char *shown,
                                fsdp_error *err)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(tensor->dtype);
    if (info->values == 1)
        return FSDP_OK;
    if (model->in.is_big)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s': tensor '%s' is %s in a big-endian file, which is not supported",
                         model->in.path, shown, info->name);
    int64_t values = (int64_t)info->values;
    int64_t *row = tensor->ndim > 0 ? &tensor->shape[tensor->ndim - 1] : NULL;
    if (!row || *row % values != 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': tensor '%s' is %s, and its rows are not a multiple of %" PRId64
                         " values",
                         model->in.path, shown, info->name, values);
    *row /= values;
    return FSDP_OK;
}

static fsdp_status read_type(gguf_model *model, gguf_tensor *tensor, const char *shown,
                             fsdp_error *err)
{
    uint32_t type;
    FSDP_TRY(gguf_take_u32(&model->in, "the type of a tensor", &type, err));
    const gguf_type *known = type < GGUF_TYPES ? &gguf_types[type] : NULL;
    if (!known || !known->name)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': tensor '%s' has the unknown type %" PRIu32,
                         model->in.path, shown, type);
    tensor->dtype = known->dtype;
    if (tensor->dtype == FSDP_DTYPE_NONE)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s': tensor '%s' has the type %s, which is not supported",
                         model->in.path, shown, known->name);
    return count_blocks(model, tensor, shown, err);
}

static fsdp_status read_tensor(gguf_model *model, gguf_tensor *tensor, fsdp_error *err)
{
    char shown[SHOWN];
    FSDP_TRY(gguf_take_string(&model->in, GGUF_LONGEST_KEY, "the name of a tensor", &tensor->name,
                              &tensor->name_size, err));
    fsdp_printable(tensor->name, tensor->name_size, shown, sizeof shown);
    FSDP_TRY(read_shape(model, tensor, shown, err));
    FSDP_TRY(read_type(model, tensor, shown, err));
    FSDP_TRY(gguf_take_u64(&model->in, "the offset of a tensor", &tensor->offset, err));
    if (tensor->offset % (uint64_t)model->alignment != 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': tensor '%s' is at %" PRIu64 ", which is not a multiple of %" PRId64,
                         model->in.path, shown, tensor->offset, model->alignment);
    return FSDP_OK;
}

static fsdp_status add_tensor(gguf_model *model, const gguf_tensor *tensor, int64_t data,
                              fsdp_error *err)
{
    static const int64_t origin[GGUF_DIMS];
    char shown[SHOWN];
    size_t number;
    fsdp_printable(tensor->name, tensor->name_size, shown, sizeof shown);
    if (fsdp_source_has(model->source, tensor->name, tensor->name_size))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' holds '%s' twice", model->in.path, shown);
    if (tensor->offset > (uint64_t)(model->in.size - data))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': tensor '%s' begins after the end of the file", model->in.path,
                         shown);
    FSDP_TRY(fsdp_source_add_tensor(
        model->source, tensor->name, tensor->name_size,
        &(fsdp_source_shape){tensor->dtype, tensor->ndim, tensor->shape}, &number, err));
    bool swaps = model->in.is_big && fsdp_dtype_size(tensor->dtype) > 1;
    fsdp_source_chunk chunk = {.lo = origin,
                               .len = tensor->shape,
                               .offset = data + (int64_t)tensor->offset,
                               .file = model->in.file,
                               .stream = FSDP_NO_STREAM,
                               .fix = swaps ? FSDP_FIX_SWAP : 0};
    return fsdp_source_add_chunk(model->source, number, &chunk, err);
}

/* The bytes of tensors begin at the next multiple of the alignment. */
static fsdp_status add_tensors(gguf_model *model, fsdp_error *err)
{
    int64_t over = model->in.at % model->alignment;
    int64_t data = over > 0 ? model->in.at + (model->alignment - over) : model->in.at;
    if (data > model->in.size) /* a file without tensors need not be padded */
        data = model->in.size;
    for (size_t i = 0; i < model->tensor_count; i++)
        FSDP_TRY(add_tensor(model, &model->tensors[i], data, err));
    model->all_tensors += model->tensor_count;
    return FSDP_OK;
}

/* --- one file --------------------------------------------------------------------------------- */

/* A version of few units in the other byte order says that the file is big-endian. */
static fsdp_status read_version(gguf_model *model, fsdp_error *err)
{
    char magic[GGUF_MAGIC];
    uint32_t version;
    FSDP_TRY(gguf_take(&model->in, sizeof magic, "the head", magic, err));
    if (memcmp(magic, "GGUF", sizeof magic) != 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' does not begin with GGUF", model->in.path);
    FSDP_TRY(gguf_take_u32(&model->in, "the version", &version, err));
    model->in.is_big = (version & 0xFFFF) == 0;
    if (model->in.is_big)
        version = version >> 24 | (version >> 8 & 0xFF00);
    if (version != 2 && version != 3)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' is a GGUF file of version %" PRIu32 "; this fsdp reads versions 2 and 3%s",
            model->in.path, version, version == 1 ? "; convert it with llama.cpp's gguf-py" : "");
    return FSDP_OK;
}

static fsdp_status read_infos(gguf_model *model, size_t count, fsdp_error *err)
{
    model->tensors = fsdp_alloc(count, sizeof *model->tensors);
    if (!model->tensors)
        return fsdp_fail_memory(err, model->in.path);
    model->tensor_count = count;
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(read_tensor(model, &model->tensors[i], err));
    return FSDP_OK;
}

static fsdp_status read_header(gguf_model *model, fsdp_error *err)
{
    size_t tensors, pairs;
    FSDP_TRY(read_version(model, err));
    FSDP_TRY(gguf_take_count(&model->in, LEAST_TENSOR, "the number of tensors", &tensors, err));
    FSDP_TRY(gguf_take_count(&model->in, LEAST_PAIR, "the number of key-value pairs", &pairs, err));
    for (size_t i = 0; i < pairs; i++)
        FSDP_TRY(read_pair(model, err));
    FSDP_TRY(read_infos(model, tensors, err));
    return add_tensors(model, err);
}

static void release_file(gguf_model *model)
{
    for (size_t i = 0; i < model->tensor_count; i++)
        fsdp_free(model->tensors[i].name);
    fsdp_free(model->tensors);
    model->tensors = NULL;
    model->tensor_count = 0;
    gguf_input_release(&model->in);
}

/* The parts must be those that they say. */
static fsdp_status check_split(const gguf_model *model, fsdp_error *err)
{
    int64_t count = model->split_count, number = model->split_no;
    if (count <= 1 && model->count == 1)
        return FSDP_OK;
    if (model->count == 1)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is one of %" PRId64
                         " parts of a model, but its name is not like NAME-00001-of-%05" PRId64
                         "%s",
                         model->in.path, count, count, suffix);
    if (count != model->count || number != model->number)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' says that it is part %" PRId64 " of %" PRId64
                         ", but its name says part %d of %d",
                         model->in.path, number + 1, count, model->number + 1, model->count);
    return FSDP_OK;
}

static fsdp_status read_file(gguf_model *model, const char *path, bool beneath, fsdp_error *err)
{
    int file;
    model->alignment = GGUF_ALIGNMENT;
    model->split_no = model->split_count = -1;
    FSDP_TRY(fsdp_source_add_file(model->source, path, beneath, &file, err));
    fsdp_status st = gguf_input_init(&model->in, model->source, file, model->memory, err);
    if (st == FSDP_OK)
        st = read_header(model, err);
    if (st == FSDP_OK)
        st = check_split(model, err);
    release_file(model);
    return st;
}

/* --- parts ------------------------------------------------------------------------------------ */

enum { DIGITS = 5, PART_END = 1 + DIGITS + 4 + DIGITS + sizeof suffix - 1 };

static int digits_at(const char *text)
{
    int number = 0;
    for (int i = 0; i < DIGITS; i++) {
        if (text[i] < '0' || text[i] > '9')
            return -1;
        number = 10 * number + (text[i] - '0');
    }
    return number;
}

/* NAME-00002-of-00003.gguf: the bytes of NAME and 3. 0: another name. */
static size_t parse_part(const char *name, int *count_out)
{
    size_t size = strlen(name);
    if (size <= PART_END || name[size - PART_END] != '-')
        return 0;
    const char *number = name + size - PART_END + 1, *count = number + DIGITS + 4;
    *count_out = digits_at(count);
    bool fits = digits_at(number) >= 1 && digits_at(number) <= *count_out &&
                memcmp(number + DIGITS, "-of-", 4) == 0 && strcmp(count + DIGITS, suffix) == 0;
    return fits && *count_out > 1 && *count_out <= MOST_PARTS ? size - PART_END : 0;
}

static fsdp_status read_parts(gguf_model *model, const char *name, size_t stem, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    model->split_tensors = -1;
    for (model->number = 0; model->number < model->count && st == FSDP_OK; model->number++) {
        fsdp_text path = {0};
        fsdp_text_addf(&path, "%s/%.*s-%05d-of-%05d%s", fsdp_source_path(model->source), (int)stem,
                       name, model->number + 1, model->count, suffix);
        fsdp_error why = {0};
        st = path.failed ? fsdp_fail_memory(err, name) : read_file(model, path.data, true, &why);
        if (st == FSDP_ERR_NOT_FOUND && model->count > 1 && why.errnum != 0)
            st = fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' is missing: the model has %d parts",
                           path.data, model->count);
        else if (st != FSDP_OK && !path.failed && err)
            *err = why;
        fsdp_text_release(&path);
    }
    if (st == FSDP_OK && model->split_tensors >= 0 &&
        (uint64_t)model->split_tensors != model->all_tensors)
        st = fsdp_fail(err, FSDP_ERR_DAMAGED,
                       "'%s': its parts hold %zu tensors, but the first one says %" PRId64,
                       fsdp_source_path(model->source), model->all_tensors, model->split_tensors);
    return st;
}

/* --- the format ------------------------------------------------------------------------------- */

static bool is_gguf(const char *name)
{
    size_t size = strlen(name);
    return size >= sizeof suffix && strcmp(name + size - (sizeof suffix - 1), suffix) == 0;
}

/* The file, or first part, that a directory holds. */
static fsdp_status choose(const fsdp_probe *probe, const char **name_out, fsdp_error *err)
{
    *name_out = NULL;
    for (size_t i = 0; i < probe->name_count; i++) {
        const char *name = probe->names[i];
        int count, other = 0;
        if (!is_gguf(name))
            continue;
        size_t stem = parse_part(name, &count);
        bool is_same = *name_out && stem > 0 && parse_part(*name_out, &other) == stem &&
                       other == count && memcmp(*name_out, name, stem) == 0;
        if (*name_out && !is_same)
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "'%s' holds several models, '%s' and '%s' among them; name one of its files",
                probe->path, *name_out, name);
        *name_out = *name_out ? *name_out : name;
    }
    return *name_out ? FSDP_OK
                     : fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' holds no file NAME%s", probe->path,
                                 suffix);
}

static int bid(const fsdp_probe *probe)
{
    if (!probe->is_directory)
        return probe->head_size >= GGUF_MAGIC && memcmp(probe->head, "GGUF", GGUF_MAGIC) == 0 ? 40
                                                                                              : 0;
    for (size_t i = 0; i < probe->name_count; i++)
        if (is_gguf(probe->names[i]))
            return 20; /* weights of any other format in the directory come first */
    return 0;
}

/* A source of parts has the path of their directory, which no part may leave. */
static fsdp_status fill_source(const fsdp_probe *probe, gguf_model *model, fsdp_error *err)
{
    const char *name = NULL, *slash = strrchr(probe->path, '/');
    if (probe->is_directory)
        FSDP_TRY(choose(probe, &name, err));
    else
        name = slash ? slash + 1 : probe->path;
    size_t stem = parse_part(name, &model->count);
    bool is_alone = stem == 0 && !probe->is_directory;
    char *folder =
        probe->is_directory || is_alone ? fsdp_strndup(probe->path, strlen(probe->path))
        : slash ? fsdp_strndup(probe->path, (size_t)(slash - probe->path) + (slash == probe->path))
                : fsdp_strndup(".", 1);
    if (!folder)
        return fsdp_fail_memory(err, probe->path);
    fsdp_status st = fsdp_source_create(probe->io, folder, "gguf", &model->source, err);
    fsdp_free(folder);
    FSDP_TRY(st);
    if (stem > 0)
        return read_parts(model, name, stem, err);
    model->count = 1;
    char *path = is_alone ? NULL : fsdp_path_join(probe->path, name);
    if (!is_alone && !path)
        return fsdp_fail_memory(err, probe->path);
    st = read_file(model, is_alone ? probe->path : path, !is_alone, err);
    fsdp_free(path);
    return st;
}

static fsdp_status open_gguf(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    gguf_model model = {.memory = probe->opts ? probe->opts->memory : 0};
    fsdp_status st = fill_source(probe, &model, err);
    if (st == FSDP_OK)
        st = fsdp_source_complete(model.source, err);
    if (st != FSDP_OK) {
        fsdp_source_close(model.source);
        model.source = NULL;
    }
    *source_out = model.source;
    return st;
}

const fsdp_format fsdp_format_gguf = {
    .name = "gguf",
    .suffixes = {".gguf"},
    .reads_file = true,
    .reads_directory = true,
    .writes_file = true,
    .caps = {.values = true,
             .model_only = true,
             .maps_names = true,
             .f32_vectors = true,
             .takes_config = true,
             .needs_config = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_gguf},
    .writer = &fsdp_gguf_writer};

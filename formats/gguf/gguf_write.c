/*
 * GGUF as a target: one file of version 3, little-endian. Values become key-value pairs, in the smallest
 * of the types that llama.cpp's readers take: u32 and i32, f32 where that loses nothing. The mirror of
 * gguf_read.c; names, permuted rows and dtypes of tensors are the caller's.
 */
#include "formats/gguf/gguf.h"
#include "formats/target/packed_internal.h"

#include <math.h>
#include <string.h>

enum { VERSION = 3, SHOWN = 100 };

/* The number of a dtype in ggml, -1 where ggml has none. */
static int type_of(fsdp_dtype dtype)
{
    for (int type = 0; type < GGUF_TYPES; type++)
        if (gguf_types[type].name && gguf_types[type].dtype == dtype && dtype != FSDP_DTYPE_NONE)
            return type;
    return -1;
}

static bool holds_dtype(fsdp_dtype dtype)
{
    return type_of(dtype) >= 0;
}

/* --- numbers and strings ---------------------------------------------------------------------- */

static void put_number(fsdp_text *out, uint64_t bits, size_t size)
{
    char bytes[8];
    for (size_t i = 0; i < size; i++, bits >>= 8)
        bytes[i] = (char)(bits & 0xFF);
    fsdp_text_add(out, bytes, size);
}

static void put_string(fsdp_text *out, const char *data, size_t size)
{
    put_number(out, size, 8);
    fsdp_text_add(out, data, size);
}

/* --- the type of a value ---------------------------------------------------------------------- */

static bool is_text(const fsdp_value *value)
{
    return value->kind == FSDP_VALUE_STRING || value->kind == FSDP_VALUE_BYTES;
}

static bool is_integer(const fsdp_value *value)
{
    return value->kind == FSDP_VALUE_I64 || value->kind == FSDP_VALUE_U64;
}

static bool fits_f32(double value)
{
    return isnan(value) || (double)(float)value == value;
}

static double number_of(const fsdp_value *value)
{
    return value->kind == FSDP_VALUE_F64   ? value->as.f64
           : value->kind == FSDP_VALUE_I64 ? (double)value->as.i64
                                           : (double)value->as.u64;
}

/* Properties that all items of a list have. */
typedef struct common_kind {
    bool texts, booleans, integers, numbers, f32;
    int64_t least;
    uint64_t most;
} common_kind;

static void take_common(common_kind *common, const fsdp_value *value)
{
    bool is_number = is_integer(value) || value->kind == FSDP_VALUE_F64;
    common->texts = common->texts && is_text(value);
    common->booleans = common->booleans && value->kind == FSDP_VALUE_BOOL;
    common->integers = common->integers && is_integer(value);
    common->numbers = common->numbers && is_number;
    common->f32 = common->f32 && is_number && fits_f32(number_of(value));
    if (value->kind == FSDP_VALUE_I64 && value->as.i64 < 0)
        common->least = value->as.i64 < common->least ? value->as.i64 : common->least;
    else if (is_integer(value)) /* of equal bits where it is not negative */
        common->most = value->as.u64 > common->most ? value->as.u64 : common->most;
}

static gguf_kind integer_kind(const common_kind *common, bool prefers_signed)
{
    bool is_small = common->least >= INT32_MIN && common->most <= INT32_MAX;
    if (is_small && (prefers_signed || common->least < 0))
        return GGUF_I32;
    if (common->least >= 0)
        return common->most <= UINT32_MAX ? GGUF_U32 : GGUF_U64;
    return common->most <= INT64_MAX ? GGUF_I64 : GGUF_KINDS;
}

/* llama.cpp reads the items of this list as bytes. */
static bool is_bytes(const target_value *pair)
{
    static const char charsmap[] = "tokenizer.ggml.precompiled_charsmap";
    return fsdp_bytes_are(pair->name, pair->name_size, charsmap);
}

/* The type of one value, or of all `count` items of a list; KINDS where there is none. */
static gguf_kind kind_of(const fsdp_value *items, size_t count, bool is_list)
{
    common_kind common = {true, true, true, true, true, 0, 0};
    for (size_t i = 0; i < count; i++)
        take_common(&common, &items[i]);
    if (common.integers)
        return integer_kind(&common, is_list);
    return common.texts      ? GGUF_STRING
           : common.booleans ? GGUF_BOOL
           : common.f32      ? GGUF_F32
           : common.numbers  ? GGUF_F64
                             : GGUF_KINDS;
}

static bool fit_bytes(const fsdp_value *items, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!is_integer(&items[i]) || items[i].as.u64 > UINT8_MAX)
            return false;
    return true;
}

/* --- key-value pairs -------------------------------------------------------------------------- */

static void put_one(fsdp_text *out, gguf_kind kind, const fsdp_value *value)
{
    uint64_t bits = 0;
    double wide;
    float narrow;
    switch (kind) {
    case GGUF_STRING: put_string(out, value->as.bytes.data, value->as.bytes.size); return;
    case GGUF_BOOL: bits = value->as.boolean; break;
    case GGUF_F32:
        narrow = (float)number_of(value);
        memcpy(&bits, &narrow, sizeof narrow);
        break;
    case GGUF_F64:
        wide = number_of(value);
        memcpy(&bits, &wide, sizeof wide);
        break;
    default: bits = value->as.u64; break;
    }
    put_number(out, bits, gguf_kind_size(kind));
}

static fsdp_status put_value(const target_value *pair, fsdp_text *out, fsdp_error *err)
{
    char shown[SHOWN];
    const fsdp_value *value = &pair->value, *items = value;
    bool is_list = value->kind == FSDP_VALUE_LIST;
    size_t count = is_list ? value->as.list.count : 1;
    if (is_list)
        items = value->as.list.items;
    gguf_kind kind = kind_of(items, count, is_list);
    if (is_list && is_bytes(pair) && fit_bytes(items, count))
        kind = GGUF_U8;
    if (kind == GGUF_KINDS)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "gguf cannot hold the value '%s': values are numbers, booleans, strings "
                         "and lists of one of these; leave it out with --exclude",
                         fsdp_printable(pair->name, pair->name_size, shown, sizeof shown));
    put_string(out, pair->name, pair->name_size);
    put_number(out, is_list ? GGUF_ARRAY : kind, 4);
    if (is_list) {
        put_number(out, kind, 4);
        put_number(out, count, 8);
    }
    for (size_t i = 0; i < count; i++)
        put_one(out, kind, &items[i]);
    return FSDP_OK;
}

static const fsdp_value *find_value(const fsdp_packed *target, const char *name)
{
    for (size_t i = 0; i < target->value_count; i++)
        if (target->values[i].name_size == strlen(name) &&
            memcmp(target->values[i].name, name, strlen(name)) == 0)
            return &target->values[i].value;
    return NULL;
}

static fsdp_status check_pairs(const fsdp_packed *target, int64_t *alignment_out, fsdp_error *err)
{
    const fsdp_value *architecture = find_value(target, "general.architecture");
    const fsdp_value *alignment = find_value(target, "general.alignment");
    if (!architecture || architecture->kind != FSDP_VALUE_STRING)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a GGUF file needs an architecture, but the source has no value "
                         "'general.architecture': 'llama', 'qwen2', ...");
    int64_t number = !alignment                          ? GGUF_ALIGNMENT
                     : alignment->kind == FSDP_VALUE_I64 ? alignment->as.i64
                                                         : 0;
    if (number <= 0 || number > INT32_MAX || (number & (number - 1)) != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the value 'general.alignment' is not a power of two");
    *alignment_out = number;
    return FSDP_OK;
}

/* --- tensors ---------------------------------------------------------------------------------- */

static fsdp_status check_tensor(const target_tensor *tensor, fsdp_error *err)
{
    const fsdp_packed_tensor *what = &tensor->what;
    char shown[SHOWN];
    fsdp_printable(what->name, what->name_size, shown, sizeof shown);
    if (what->name_size > GGUF_LONGEST_NAME)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the name '%s' has %zu bytes, at most %d are allowed in a GGUF file",
                         shown, what->name_size, GGUF_LONGEST_NAME);
    if (what->ndim > GGUF_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has %d dims, at most %d are allowed in a GGUF file", shown,
                         what->ndim, GGUF_DIMS);
    return FSDP_OK;
}

static void put_info(fsdp_text *out, const target_tensor *tensor, int64_t offset)
{
    const fsdp_packed_tensor *what = &tensor->what;
    const int64_t values = (int64_t)fsdp_dtype_describe(what->dtype)->values;
    put_string(out, what->name, what->name_size);
    put_number(out, (uint64_t)what->ndim, 4);
    for (int dim = what->ndim - 1; dim >= 0; dim--)
        put_number(out, (uint64_t)(what->shape[dim] * (dim == what->ndim - 1 ? values : 1)), 8);
    put_number(out, (uint64_t)type_of(what->dtype), 4);
    put_number(out, (uint64_t)offset, 8);
}

/* False when the sum is too large. */
static bool round_up(int64_t *size, int64_t alignment)
{
    int64_t over = *size % alignment;
    return over == 0 || !fsdp_add_overflow(*size, alignment - over, size);
}

/* Gives each tensor its offset from the first one. */
static fsdp_status put_infos(fsdp_packed *target, int64_t alignment, fsdp_text *out,
                             int64_t *size_out, fsdp_error *err)
{
    int64_t at = 0;
    for (size_t i = 0; i < target->tensor_count; i++) {
        target_tensor *tensor = &target->tensors[i];
        FSDP_TRY(check_tensor(tensor, err));
        put_info(out, tensor, at);
        tensor->offset = at;
        if (fsdp_add_overflow(at, tensor->size, &at) || !round_up(&at, alignment))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", target->path);
    }
    *size_out = at;
    return FSDP_OK;
}

/* --- the file --------------------------------------------------------------------------------- */

static fsdp_status put_header(fsdp_packed *target, int64_t alignment, fsdp_text *out,
                              int64_t *size_out, fsdp_error *err)
{
    fsdp_text_add(out, "GGUF", GGUF_MAGIC);
    put_number(out, VERSION, 4);
    put_number(out, target->tensor_count, 8);
    put_number(out, target->value_count, 8);
    for (size_t i = 0; i < target->value_count; i++)
        FSDP_TRY(put_value(&target->values[i], out, err));
    return put_infos(target, alignment, out, size_out, err);
}

static fsdp_status create_file(fsdp_packed *target, const fsdp_text *header, int64_t alignment,
                               int64_t data_size, fsdp_error *err)
{
    int64_t data = (int64_t)header->size, size;
    int file;
    if (header->failed)
        return fsdp_fail_memory(err, target->path);
    if (!round_up(&data, alignment) || fsdp_add_overflow(data, data_size, &size))
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", target->path);
    FSDP_TRY(fsdp_packed_add_file(target, NULL, size, &file, err));
    for (size_t i = 0; i < target->tensor_count; i++) {
        target->tensors[i].file = file;
        target->tensors[i].offset += data;
    }
    return fsdp_packed_put(target, file, header->data, header->size, 0, err);
}

static fsdp_status lay_out(fsdp_packed *target, fsdp_error *err)
{
    fsdp_text header = {0};
    int64_t alignment = GGUF_ALIGNMENT, size = 0;
    FSDP_TRY(check_pairs(target, &alignment, err));
    fsdp_status st = put_header(target, alignment, &header, &size, err);
    if (st == FSDP_OK)
        st = create_file(target, &header, alignment, size, err);
    fsdp_text_release(&header);
    return st;
}

const fsdp_format_writer fsdp_gguf_writer = {.ops = &fsdp_packed_ops,
                                             .packed =
                                                 &(const fsdp_packed_format){.lay_out = lay_out},
                                             .holds_dtype = holds_dtype};

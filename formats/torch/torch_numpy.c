/*
 * NumPy arrays and scalars inside torch pickles. Arrays whose bytes are plain in the file are
 * read from there; others (protocol 2 stores bytes as text) are decoded into memory. See
 * torch_internal.h.
 */
#include "formats/torch/torch_internal.h"

#include <stdlib.h>
#include <string.h>

/* The parts of an array, from either of its pickled forms. */
typedef struct array_parts {
    fsdp_node dtype, shape, bytes;
    bool is_fortran;
} array_parts;

static bool is_call(const torch_archive *archive, fsdp_node node, fsdp_known known)
{
    const fsdp_pickle_node *call = torch_node(archive, node);
    return call->kind == FSDP_NODE_CALL && call->known == known;
}

/* --- bytes -------------------------------------------------------------------------------------- */

/* Decodes text whose characters are bytes. */
static char *decode_latin1(const char *text, size_t size, size_t *size_out)
{
    char *data = fsdp_realloc(NULL, size + 1, 1);
    size_t used = 0;
    for (size_t i = 0; data && i < size; i++) {
        unsigned lead = (uint8_t)text[i];
        if (lead >= 0x80) {
            if (lead > 0xC3 || i + 1 == size) {
                fsdp_free(data);
                return NULL;
            }
            lead = (lead & 3) << 6 | ((uint8_t)text[++i] & 0x3F);
        }
        data[used++] = (char)lead;
    }
    *size_out = used;
    return data;
}

bool torch_bytes(const torch_archive *archive, fsdp_node node, const char **data_out,
                 size_t *size_out, char **owned_out)
{
    const fsdp_pickle_node *at = torch_node(archive, node);
    *owned_out = NULL;
    *data_out = "";
    *size_out = 0;
    bool is_made =
        is_call(archive, node, FSDP_KNOWN_BYTES) || is_call(archive, node, FSDP_KNOWN_BYTEARRAY);
    if (is_made) {
        if (torch_node(archive, at->as.call->args)->count == 0)
            return true;
        node = torch_element(archive, at->as.call->args, 0);
        at = torch_node(archive, node);
        /* bytearray(text, "latin-1") of Python 2 */
    }
    if (at->kind == FSDP_NODE_BYTES || at->kind == FSDP_NODE_BYTEARRAY) {
        *data_out = at->as.text;
        *size_out = at->count;
        return true;
    }
    if (is_call(archive, node, FSDP_KNOWN_CODECS_ENCODE)) {
        fsdp_node coding = torch_element(archive, at->as.call->args, 1);
        if (!fsdp_pickle_is_text(&archive->pickle, coding, "latin1") &&
            !fsdp_pickle_is_text(&archive->pickle, coding, "latin-1"))
            return false;
        at = torch_node(archive, torch_element(archive, at->as.call->args, 0));
    } else if (!is_made) {
        return false;
    }
    if (at->kind != FSDP_NODE_STR)
        return false;
    *owned_out = decode_latin1(at->as.text, at->count, size_out);
    *data_out = *owned_out;
    return *owned_out != NULL;
}

/* --- dtypes ------------------------------------------------------------------------------------- */

static fsdp_dtype dtype_by_code(const char *code)
{
    for (int i = FSDP_DTYPE_NONE + 1; i < FSDP_DTYPE_COUNT; i++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe((fsdp_dtype)i);
        if (info->numpy && strcmp(info->numpy + 1, code) == 0) /* compares after the byte order */
            return (fsdp_dtype)i;
    }
    return FSDP_DTYPE_NONE;
}

/* dtype('f4', False, True) with the state (3, '<', None, None, None, -1, -1, 0). */
static fsdp_dtype read_dtype(const torch_archive *archive, fsdp_node node, bool *is_swapped_out)
{
    *is_swapped_out = false;
    if (!is_call(archive, node, FSDP_KNOWN_NUMPY_DTYPE))
        return FSDP_DTYPE_NONE;
    const fsdp_pickle_call *call = torch_node(archive, node)->as.call;
    const fsdp_pickle_node *code = torch_node(archive, torch_element(archive, call->args, 0));
    fsdp_node state = call->state;
    char text[8] = "";
    if (code->kind != FSDP_NODE_STR || code->count >= sizeof text)
        return FSDP_DTYPE_NONE;
    memcpy(text, code->as.text, code->count);
    const char *plain = strchr("<>|=", text[0]) && text[0] ? text + 1 : text;
    *is_swapped_out = text[0] == '>' ||
                      fsdp_pickle_is_text(&archive->pickle, torch_element(archive, state, 1), ">");
    for (size_t part = 2; part <= 4; part++) { /* subarrays, names, fields */
        fsdp_node_kind kind = torch_node(archive, torch_element(archive, state, part))->kind;
        if (kind != FSDP_NODE_NONE && kind != FSDP_NODE_ABSENT)
            return FSDP_DTYPE_NONE;
    }
    return dtype_by_code(strcmp(plain, "?") == 0 ? "b1" : plain);
}

/* --- arrays ------------------------------------------------------------------------------------- */

/* Finds the parts of _reconstruct(ndarray, (0,), b'b') with the state (version, shape, dtype,
 * is_fortran, bytes), or of _frombuffer(bytes, dtype, shape, order). */
static bool find_parts(const torch_archive *archive, fsdp_node node, array_parts *parts)
{
    const fsdp_pickle_node *call = torch_node(archive, node);
    if (is_call(archive, node, FSDP_KNOWN_NUMPY_RECONSTRUCT) ||
        is_call(archive, node, FSDP_KNOWN_NUMPY_ARRAY)) {
        fsdp_node state = call->as.call->state;
        const fsdp_pickle_node *fortran = torch_node(archive, torch_element(archive, state, 3));
        *parts =
            (array_parts){torch_element(archive, state, 2), torch_element(archive, state, 1),
                          torch_element(archive, state, 4),
                          (fortran->kind == FSDP_NODE_BOOL || fortran->kind == FSDP_NODE_INT) &&
                              fortran->as.i64 != 0};
        return true;
    }
    if (!is_call(archive, node, FSDP_KNOWN_NUMPY_FROMBUFFER))
        return false;
    fsdp_node args = call->as.call->args;
    *parts =
        (array_parts){torch_element(archive, args, 1), torch_element(archive, args, 2),
                      torch_element(archive, args, 0),
                      fsdp_pickle_is_text(&archive->pickle, torch_element(archive, args, 3), "F")};
    return true;
}

bool torch_numpy_is_array(const torch_archive *archive, fsdp_node node)
{
    array_parts parts;
    return find_parts(archive, node, &parts);
}

/* True for ndarray itself, not for subclasses: masked arrays and records hold more than numbers. */
static bool is_plain(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *call = torch_node(archive, node);
    if (call->known != FSDP_KNOWN_NUMPY_RECONSTRUCT)
        return true;
    return torch_node(archive, torch_element(archive, call->as.call->args, 0))->known ==
           FSDP_KNOWN_NUMPY_ARRAY;
}

bool torch_numpy_is_numeric(const torch_archive *archive, fsdp_node node)
{
    array_parts parts;
    bool is_swapped;
    return find_parts(archive, node, &parts) && is_plain(archive, node) &&
           read_dtype(archive, parts.dtype, &is_swapped) != FSDP_DTYPE_NONE;
}

static void set_strides(torch_tensor *tensor, bool is_fortran)
{
    int64_t step = (int64_t)fsdp_dtype_size(tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++) {
        int dim = is_fortran ? i : tensor->ndim - 1 - i;
        tensor->strides[dim] = step;
        step *= tensor->shape[dim] > 0 ? tensor->shape[dim] : 1;
    }
}

static void swap_bytes(char *data, size_t size, size_t width)
{
    for (size_t at = 0; at + width <= size; at += width)
        for (size_t i = 0; i < width / 2; i++) {
            char byte = data[at + i];
            data[at + i] = data[at + width - 1 - i];
            data[at + width - 1 - i] = byte;
        }
}

static size_t number_width(fsdp_dtype dtype)
{
    bool is_pair = dtype == FSDP_C64 || dtype == FSDP_C128;
    return is_pair ? fsdp_dtype_size(dtype) / 2 : fsdp_dtype_size(dtype);
}

/* Converts the bytes to the final form: row-major, little-endian. */
static fsdp_status decode(torch_tensor *tensor, const char *from, size_t size, fsdp_error *err)
{
    char *data = fsdp_alloc(size, 1);
    if (!data)
        return fsdp_fail_memory(err, "an array");
    int64_t index[FSDP_MAX_DIMS] = {0}, place = 0;
    size_t element = fsdp_dtype_size(tensor->dtype);
    for (size_t at = 0; at < size; at += element) {
        memcpy(data + at, from + place, element);
        for (int dim = tensor->ndim - 1; dim >= 0; dim--) {
            place += tensor->strides[dim];
            if (++index[dim] < tensor->shape[dim])
                break;
            place -= tensor->strides[dim] * tensor->shape[dim];
            index[dim] = 0;
        }
    }
    if (tensor->fix & FSDP_FIX_SWAP)
        swap_bytes(data, size, number_width(tensor->dtype));
    tensor->data = data;
    return FSDP_OK;
}

static fsdp_status place_bytes(const torch_archive *archive, torch_tensor *tensor, const char *data,
                               size_t size, bool is_in_file, fsdp_error *err)
{
    int64_t wanted = (int64_t)fsdp_dtype_size(tensor->dtype);
    for (int dim = 0; dim < tensor->ndim; dim++)
        wanted *= tensor->shape[dim];
    if ((uint64_t)wanted != size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s: an array has %zu bytes, but its shape needs %lld", archive->where,
                         size, (long long)wanted);
    if (!is_in_file)
        return decode(tensor, data, size, err);
    tensor->offset = archive->data_offset + (data - archive->data);
    return FSDP_OK;
}

fsdp_status torch_numpy_read(const torch_archive *archive, fsdp_node node, torch_tensor *tensor_out,
                             fsdp_error *err)
{
    array_parts parts = {0};
    bool is_swapped = false;
    *tensor_out = (torch_tensor){.storage = {.file = archive->file, .stream = FSDP_NO_STREAM}};
    if (find_parts(archive, node, &parts))
        tensor_out->dtype = read_dtype(archive, parts.dtype, &is_swapped);
    if (tensor_out->dtype == FSDP_DTYPE_NONE)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: an array has no numbers", archive->where);
    FSDP_TRY(
        torch_read_sizes(archive, parts.shape, "sizes", &tensor_out->ndim, tensor_out->shape, err));
    FSDP_TRY(
        torch_check_shape(archive, tensor_out->ndim, tensor_out->shape, tensor_out->dtype, err));
    set_strides(tensor_out, parts.is_fortran);
    if (is_swapped && fsdp_dtype_size(tensor_out->dtype) > 1)
        tensor_out->fix = FSDP_FIX_SWAP;
    const char *data;
    char *owned;
    size_t size;
    if (!torch_bytes(archive, parts.bytes, &data, &size, &owned))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: an array has no bytes", archive->where);
    bool is_in_file = !owned && archive->data_offset >= 0 && size > 0;
    fsdp_status st = place_bytes(archive, tensor_out, data, size, is_in_file, err);
    fsdp_free(owned);
    return st;
}

/* --- scalars ------------------------------------------------------------------------------------ */

static double half_value(uint16_t bits)
{
    int exponent = bits >> 10 & 31;
    double value = bits & 1023;
    if (exponent == 31)
        value = value == 0 ? __builtin_inf() : __builtin_nan("");
    else if (exponent > 0)
        value = (value + 1024) * __builtin_ldexp(1, exponent - 25);
    else
        value *= __builtin_ldexp(1, -24);
    return bits & 0x8000 ? -value : value;
}

static double float_value(const char *data, size_t size)
{
    uint16_t half;
    float single;
    double wide;
    if (size == 2) {
        memcpy(&half, data, sizeof half);
        return half_value(half);
    }
    if (size == 4) {
        memcpy(&single, data, sizeof single);
        return (double)single;
    }
    memcpy(&wide, data, sizeof wide);
    return wide;
}

static fsdp_value integer_value(const char *data, size_t size, bool is_signed)
{
    uint64_t bits = 0;
    memcpy(&bits, data, size);
    if (is_signed)
        return fsdp_value_i64((int64_t)(bits << (64 - 8 * size)) >> (64 - 8 * size));
    return bits <= INT64_MAX ? fsdp_value_i64((int64_t)bits) : fsdp_value_u64(bits);
}

static fsdp_value scalar_value(fsdp_dtype dtype, const char *data)
{
    size_t size = fsdp_dtype_size(dtype);
    switch (dtype) {
    case FSDP_BOOL: return fsdp_value_bool(data[0] != 0);
    case FSDP_F64:
    case FSDP_F32:
    case FSDP_F16: return fsdp_value_f64(float_value(data, size));
    case FSDP_C64:
    case FSDP_C128: {
        fsdp_value value = {.kind = FSDP_VALUE_COMPLEX};
        value.as.complex_parts[0] = float_value(data, size / 2);
        value.as.complex_parts[1] = float_value(data + size / 2, size / 2);
        return value;
    }
    case FSDP_I64:
    case FSDP_I32:
    case FSDP_I16:
    case FSDP_I8: return integer_value(data, size, true);
    default: return integer_value(data, size, false);
    }
}

fsdp_dtype torch_numpy_scalar_dtype(const torch_archive *archive, fsdp_node node)
{
    bool is_swapped;
    if (!is_call(archive, node, FSDP_KNOWN_NUMPY_SCALAR))
        return FSDP_DTYPE_NONE;
    return read_dtype(archive, torch_element(archive, torch_node(archive, node)->as.call->args, 0),
                      &is_swapped);
}

bool torch_numpy_scalar(const torch_archive *archive, fsdp_node node, fsdp_value *value_out)
{
    if (!is_call(archive, node, FSDP_KNOWN_NUMPY_SCALAR))
        return false;
    fsdp_node args = torch_node(archive, node)->as.call->args;
    bool is_swapped;
    fsdp_dtype dtype = read_dtype(archive, torch_element(archive, args, 0), &is_swapped);
    const char *data;
    char *owned, copy[16];
    size_t size;
    if (dtype == FSDP_DTYPE_NONE ||
        !torch_bytes(archive, torch_element(archive, args, 1), &data, &size, &owned))
        return false;
    bool fits = size == fsdp_dtype_size(dtype) && size <= sizeof copy;
    if (fits) {
        memcpy(copy, data, size);
        if (is_swapped)
            swap_bytes(copy, size, number_width(dtype));
        *value_out = scalar_value(dtype, copy);
    }
    fsdp_free(owned);
    return fits;
}

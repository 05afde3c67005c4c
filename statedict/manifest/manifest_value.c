/*
 * Values in the manifest, and those that are too large for it (large_value.h). A value is an object
 * with one member, the type, e.g. {"i64": 5}. Every bit comes back: integers as integers, finite
 * doubles as the shortest decimal that reads back the same, the others by name (NaN with its bits),
 * bytes in base64.
 */
#include "statedict/manifest/manifest_internal.h"
#include "base/core/mem.h"
#include "statedict/manifest/large_value.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* === large values ============================================================================= */

static bool has_bytes(fsdp_value_kind kind)
{
    return kind == FSDP_VALUE_STRING || kind == FSDP_VALUE_BYTES || kind == FSDP_VALUE_OPAQUE ||
           kind == FSDP_VALUE_INTEGER || kind == FSDP_VALUE_CLASS;
}

/* About the length of the text; stops counting above `most`. */
static size_t weigh(const fsdp_value *value, size_t most)
{
    enum { PER_ITEM = 16 };
    size_t weight = PER_ITEM;
    if (has_bytes(value->kind))
        return weight + value->as.bytes.size;
    if (value->kind != FSDP_VALUE_LIST && value->kind != FSDP_VALUE_DICT)
        return weight;
    for (size_t i = 0; i < value->as.list.count && weight <= most; i++)
        weight += weigh(&value->as.list.items[i], most);
    return weight;
}

size_t fsdp_value_bytes(const fsdp_value *value)
{
    return weigh(value, SIZE_MAX);
}

bool fsdp_value_is_large(const fsdp_value *value)
{
    return weigh(value, FSDP_VALUE_INLINE) > FSDP_VALUE_INLINE;
}

fsdp_status fsdp_value_pack(const fsdp_value *value, fsdp_text *bytes, fsdp_error *err)
{
    if (has_bytes(value->kind))
        fsdp_text_add(bytes, value->as.bytes.data, value->as.bytes.size);
    else
        FSDP_TRY(fsdp_manifest_put_value(bytes, value, err));
    return bytes->failed ? fsdp_fail_memory(err, "a value") : FSDP_OK;
}

fsdp_status fsdp_value_unpack(fsdp_value_kind kind, const char *bytes, size_t size,
                              const char *name, fsdp_value *value_out, fsdp_error *err)
{
    *value_out = (fsdp_value){0};
    if (has_bytes(kind))
        return fsdp_value_set_bytes(value_out, kind, bytes, size, err);
    fsdp_json json;
    fsdp_json_init(&json, bytes, size, name);
    fsdp_status st = fsdp_manifest_take_value(&json, value_out, err);
    if (st == FSDP_OK)
        st = fsdp_json_finish(&json, err);
    if (st == FSDP_OK && value_out->kind != kind)
        st = fsdp_json_fail(&json, err, "its kind is not the one in the manifest");
    if (st != FSDP_OK)
        fsdp_value_release(value_out);
    fsdp_json_release(&json);
    return st;
}

/* === values as JSON =========================================================================== */

/* In the order of fsdp_value_kind. */
static const char *const tags[] = {"null",    "bool",    "i64",   "u64",  "f64",
                                   "string",  "bytes",   "list",  "dict", "opaque",
                                   "integer", "complex", "class", "tuple"};
/* "tuple" is not a type: a member after "list", which older readers ignore. */
enum { TUPLE_MEMBER = 13, TAG_COUNT = TUPLE_MEMBER };

/* --- doubles ---------------------------------------------------------------------------------- */

static void put_f64(fsdp_text *text, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (isfinite(value))
        fsdp_text_add_f64(text, value);
    else if (isnan(value))
        fsdp_text_addf(text, "\"nan %016" PRIx64 "\"", bits);
    else
        fsdp_text_addf(text, "\"%s\"", value < 0 ? "-inf" : "inf");
}

static bool nan_from_text(const char *text, size_t size, double *value_out)
{
    if (size != 4 + 16 || memcmp(text, "nan ", 4) != 0)
        return false;
    uint64_t bits = 0;
    for (size_t i = 4; i < size; i++) {
        const char *digit = text[i] ? strchr("0123456789abcdef", text[i]) : NULL;
        if (!digit)
            return false;
        bits = bits << 4 | (uint64_t)(digit - "0123456789abcdef");
    }
    memcpy(value_out, &bits, sizeof bits);
    return isnan(*value_out);
}

static fsdp_status take_f64(fsdp_json *json, double *value_out, fsdp_error *err)
{
    if (fsdp_json_peek(json) != FSDP_JSON_STRING)
        return fsdp_json_f64(json, value_out, err);
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    if (size == 3 && memcmp(text, "inf", 3) == 0)
        *value_out = INFINITY;
    else if (size == 4 && memcmp(text, "-inf", 4) == 0)
        *value_out = -INFINITY;
    else if (!nan_from_text(text, size, value_out))
        return fsdp_json_fail(json, err,
                              "a number, \"inf\", \"-inf\" or \"nan BITS\" was expected");
    return FSDP_OK;
}

static fsdp_status take_complex(fsdp_json *json, double parts_out[2], fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (int i = 0;; i++) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more != (i < 2))
            return fsdp_json_fail(json, err, "a complex number has two parts");
        if (!more)
            return FSDP_OK;
        FSDP_TRY(take_f64(json, &parts_out[i], err));
    }
}

/* --- writing ---------------------------------------------------------------------------------- */

static void put_complex(fsdp_text *text, const double parts[2])
{
    fsdp_text_add(text, "[", 1);
    put_f64(text, parts[0]);
    fsdp_text_add(text, ", ", 2);
    put_f64(text, parts[1]);
    fsdp_text_add(text, "]", 1);
}

static fsdp_status put_at(fsdp_text *text, const fsdp_value *value, int depth, fsdp_error *err);

static fsdp_status put_items(fsdp_text *text, const fsdp_value *value, int depth, fsdp_error *err)
{
    if (depth >= FSDP_VALUE_DEPTH)
        return fsdp_fail(err, FSDP_ERR_USAGE, "lists and dicts are nested more than %d deep",
                         FSDP_VALUE_DEPTH);
    bool is_dict = value->kind == FSDP_VALUE_DICT;
    fsdp_text_add(text, "[", 1);
    for (size_t i = 0; i < value->as.list.count; i++) {
        if (i > 0)
            fsdp_text_add(text, ", ", 2);
        if (is_dict && i % 2 == 0)
            fsdp_text_add(text, "[", 1);
        FSDP_TRY(put_at(text, &value->as.list.items[i], depth + 1, err));
        if (is_dict && i % 2 == 1)
            fsdp_text_add(text, "]", 1);
    }
    fsdp_text_add(text, "]", 1);
    return FSDP_OK;
}

static void put_bytes(fsdp_text *text, const fsdp_value *value)
{
    fsdp_text_add(text, "\"", 1);
    fsdp_text_add_base64(text, value->as.bytes.data, value->as.bytes.size);
    fsdp_text_add(text, "\"", 1);
}

static fsdp_status put_at(fsdp_text *text, const fsdp_value *value, int depth, fsdp_error *err)
{
    if ((unsigned)value->kind >= TAG_COUNT)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the value has the unknown kind %d",
                         (int)value->kind);
    fsdp_text_addf(text, "{\"%s\": ", tags[value->kind]);
    switch (value->kind) {
    case FSDP_VALUE_NULL: fsdp_text_add(text, "null", 4); break;
    case FSDP_VALUE_BOOL: fsdp_text_addf(text, "%s", value->as.boolean ? "true" : "false"); break;
    case FSDP_VALUE_I64: fsdp_text_addf(text, "%" PRId64, value->as.i64); break;
    case FSDP_VALUE_U64: fsdp_text_addf(text, "%" PRIu64, value->as.u64); break;
    case FSDP_VALUE_F64: put_f64(text, value->as.f64); break;
    case FSDP_VALUE_COMPLEX: put_complex(text, value->as.complex_parts); break;
    case FSDP_VALUE_STRING:
    case FSDP_VALUE_INTEGER:
    case FSDP_VALUE_CLASS:
        fsdp_text_add_json_string(text, value->as.bytes.data, value->as.bytes.size);
        break;
    case FSDP_VALUE_TENSOR: /* kinds after the tags occur only in other programs' checkpoints */
    case FSDP_VALUE_BYTES:
    case FSDP_VALUE_OPAQUE: put_bytes(text, value); break;
    case FSDP_VALUE_LIST:
    case FSDP_VALUE_DICT: FSDP_TRY(put_items(text, value, depth, err)); break;
    }
    if (value->kind == FSDP_VALUE_LIST && value->is_tuple)
        fsdp_text_addf(text, ", \"%s\": true", tags[TUPLE_MEMBER]);
    fsdp_text_add(text, "}", 1);
    return FSDP_OK;
}

fsdp_status fsdp_manifest_put_value(fsdp_text *text, const fsdp_value *value, fsdp_error *err)
{
    size_t before = text->size;
    FSDP_TRY(put_at(text, value, 0, err));
    if (text->size - before > FSDP_MANIFEST_VALUE_MAX)
        return fsdp_fail(
            err, FSDP_ERR_LIMIT,
            "the value takes %zu bytes of text, at most %d are allowed; store it as a tensor of u8",
            text->size - before, FSDP_MANIFEST_VALUE_MAX);
    return FSDP_OK;
}

void fsdp_manifest_put_stored(fsdp_text *text, fsdp_value_kind kind, size_t size)
{
    fsdp_text_addf(text, "{\"%s\": %zu}", tags[kind], size);
}

/* --- reading ---------------------------------------------------------------------------------- */

typedef struct item_list {
    fsdp_value *items;
    size_t count, capacity;
} item_list;

static void release_items(item_list *list)
{
    for (size_t i = 0; i < list->count; i++)
        fsdp_value_release(&list->items[i]);
    fsdp_free(list->items);
}

static fsdp_status take_at(fsdp_json *json, fsdp_value *value_out, int depth, fsdp_error *err);

static fsdp_status take_item(fsdp_json *json, item_list *list, int depth, fsdp_error *err)
{
    if (!fsdp_grow(&list->items, &list->capacity, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, "a value");
    list->items[list->count] = (fsdp_value){0};
    FSDP_TRY(take_at(json, &list->items[list->count], depth, err));
    list->count++;
    return FSDP_OK;
}

static fsdp_status take_pair(fsdp_json *json, item_list *list, int depth, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (int i = 0;; i++) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more != (i < 2))
            return fsdp_json_fail(json, err, "a key and a value were expected");
        if (!more)
            return FSDP_OK;
        FSDP_TRY(take_item(json, list, depth, err));
    }
}

static fsdp_status take_list(fsdp_json *json, fsdp_value_kind kind, item_list *list, int depth,
                             fsdp_error *err)
{
    if (depth >= FSDP_VALUE_DEPTH)
        return fsdp_json_fail(json, err, "lists and dicts are nested more than %d deep",
                              FSDP_VALUE_DEPTH);
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        if (kind == FSDP_VALUE_DICT)
            FSDP_TRY(take_pair(json, list, depth + 1, err));
        else
            FSDP_TRY(take_item(json, list, depth + 1, err));
    }
}

static fsdp_status take_items(fsdp_json *json, fsdp_value_kind kind, fsdp_value *value_out,
                              int depth, fsdp_error *err)
{
    item_list list = {0};
    fsdp_status status = take_list(json, kind, &list, depth, err);
    if (status == FSDP_OK && list.count == 0)
        return fsdp_value_set_items(value_out, kind, 0, err);
    if (status != FSDP_OK) {
        release_items(&list);
        return status;
    }
    value_out->kind = kind;
    value_out->as.list.items = list.items;
    value_out->as.list.count = list.count;
    return FSDP_OK;
}

static bool is_integer(const char *text, size_t size)
{
    size_t sign = size > 0 && text[0] == '-';
    for (size_t i = sign; i < size; i++)
        if (text[i] < '0' || text[i] > '9')
            return false;
    return size > sign;
}

static fsdp_status take_text(fsdp_json *json, fsdp_value_kind kind, fsdp_value *value_out,
                             fsdp_error *err)
{
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    if (kind == FSDP_VALUE_INTEGER && !is_integer(text, size))
        return fsdp_json_fail(json, err, "the integer is malformed");
    if (kind == FSDP_VALUE_STRING || kind == FSDP_VALUE_INTEGER || kind == FSDP_VALUE_CLASS)
        return fsdp_value_set_bytes(value_out, kind, text, size, err);
    void *bytes;
    fsdp_error reason = {0};
    fsdp_status status = fsdp_base64_decode(text, size, &bytes, &size, &reason);
    if (status == FSDP_ERR_DAMAGED)
        return fsdp_json_fail(json, err, "%s", reason.text);
    if (status != FSDP_OK)
        return fsdp_fail(err, status, "%s", reason.text);
    value_out->kind = kind;
    value_out->as.bytes.data = bytes;
    value_out->as.bytes.size = size;
    return FSDP_OK;
}

static fsdp_status take_tagged(fsdp_json *json, int tag, fsdp_value *value_out, int depth,
                               fsdp_error *err)
{
    fsdp_value value = {.kind = (fsdp_value_kind)tag};
    switch (value.kind) {
    case FSDP_VALUE_NULL: FSDP_TRY(fsdp_json_null(json, err)); break;
    case FSDP_VALUE_BOOL: FSDP_TRY(fsdp_json_bool(json, &value.as.boolean, err)); break;
    case FSDP_VALUE_I64: FSDP_TRY(fsdp_json_i64(json, &value.as.i64, err)); break;
    case FSDP_VALUE_U64: FSDP_TRY(fsdp_json_u64(json, &value.as.u64, err)); break;
    case FSDP_VALUE_F64: FSDP_TRY(take_f64(json, &value.as.f64, err)); break;
    case FSDP_VALUE_STRING:
    case FSDP_VALUE_BYTES:
    case FSDP_VALUE_OPAQUE:
    case FSDP_VALUE_INTEGER:
    case FSDP_VALUE_CLASS: return take_text(json, value.kind, value_out, err);
    case FSDP_VALUE_COMPLEX: FSDP_TRY(take_complex(json, value.as.complex_parts, err)); break;
    case FSDP_VALUE_TENSOR: return fsdp_json_fail(json, err, "a value has an unknown type");
    case FSDP_VALUE_LIST:
    case FSDP_VALUE_DICT: return take_items(json, value.kind, value_out, depth, err);
    }
    *value_out = value;
    return FSDP_OK;
}

static fsdp_status take_members(fsdp_json *json, fsdp_value *value_out, int depth, fsdp_error *err)
{
    fsdp_json_members members = {.names = tags, .count = TAG_COUNT + 1};
    int tag;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    FSDP_TRY(fsdp_json_next_member(json, &members, &tag, err));
    if (tag < 0 || tag == TUPLE_MEMBER)
        return fsdp_json_fail(json, err, "a value has no known type");
    FSDP_TRY(take_tagged(json, tag, value_out, depth, err));
    FSDP_TRY(fsdp_json_next_member(json, &members, &tag, err));
    if (tag == TUPLE_MEMBER && value_out->kind == FSDP_VALUE_LIST) {
        FSDP_TRY(fsdp_json_bool(json, &value_out->is_tuple, err));
        FSDP_TRY(fsdp_json_next_member(json, &members, &tag, err));
    }
    return tag < 0 ? FSDP_OK : fsdp_json_fail(json, err, "a value has two types");
}

static fsdp_status take_at(fsdp_json *json, fsdp_value *value_out, int depth, fsdp_error *err)
{
    /* A value of FSDP_VALUE_DEPTH levels takes three times as many brackets, more than the reader
     * allows: values bound their own depth, so the reader's count starts again for each. */
    int outside = json->depth;
    json->depth = 0;
    fsdp_status status = take_members(json, value_out, depth, err);
    json->depth = outside;
    if (status != FSDP_OK)
        fsdp_value_release(value_out);
    return status;
}

fsdp_status fsdp_manifest_take_value(fsdp_json *json, fsdp_value *value_out, fsdp_error *err)
{
    *value_out = (fsdp_value){0};
    return take_at(json, value_out, 0, err);
}

fsdp_status fsdp_manifest_take_stored(fsdp_json *json, fsdp_value_kind *kind_out, int64_t *size_out,
                                      fsdp_error *err)
{
    fsdp_json_members members = {.names = tags, .count = TAG_COUNT};
    int tag;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    FSDP_TRY(fsdp_json_next_member(json, &members, &tag, err));
    if (tag < FSDP_VALUE_STRING)
        return fsdp_json_fail(json, err, "a stored value has an unknown type");
    *kind_out = (fsdp_value_kind)tag;
    FSDP_TRY(fsdp_json_i64(json, size_out, err));
    FSDP_TRY(fsdp_json_next_member(json, &members, &tag, err));
    if (tag >= 0 || *size_out < 1)
        return fsdp_json_fail(json, err, "a stored value has no size, or two");
    return FSDP_OK;
}

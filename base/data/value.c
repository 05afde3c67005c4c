/*
 * Values: what a state dict holds besides tensors. Lists and dicts nest at most FSDP_VALUE_DEPTH
 * deep in anything that is copied, so walking a value cannot exhaust the stack.
 */
#include <fsdp/value.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/data/value_internal.h"
#include "base/text.h"

#include <string.h>

fsdp_value fsdp_value_bool(bool value)
{
    return (fsdp_value){.kind = FSDP_VALUE_BOOL, .as.boolean = value};
}

fsdp_value fsdp_value_i64(int64_t value)
{
    return (fsdp_value){.kind = FSDP_VALUE_I64, .as.i64 = value};
}

fsdp_value fsdp_value_u64(uint64_t value)
{
    return (fsdp_value){.kind = FSDP_VALUE_U64, .as.u64 = value};
}

fsdp_value fsdp_value_f64(double value)
{
    return (fsdp_value){.kind = FSDP_VALUE_F64, .as.f64 = value};
}

static bool holds_text(fsdp_value_kind kind)
{
    return kind == FSDP_VALUE_STRING || kind == FSDP_VALUE_INTEGER || kind == FSDP_VALUE_CLASS;
}

static bool holds_bytes(fsdp_value_kind kind)
{
    return holds_text(kind) || kind == FSDP_VALUE_BYTES || kind == FSDP_VALUE_OPAQUE;
}

static bool holds_items(fsdp_value_kind kind)
{
    return kind == FSDP_VALUE_LIST || kind == FSDP_VALUE_DICT;
}

fsdp_status fsdp_value_set_bytes(fsdp_value *value, fsdp_value_kind kind, const void *data,
                                 size_t size, fsdp_error *err)
{
    FSDP_NEED(err, value);
    if (!holds_bytes(kind))
        return fsdp_fail(err, FSDP_ERR_USAGE, "a value of kind %d does not hold bytes", (int)kind);
    if (!data && size > 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%zu bytes have no address", size);
    const char *bytes = data ? data : "";
    if (holds_text(kind) && !fsdp_utf8_valid(bytes, size)) {
        char text[200];
        return fsdp_fail(err, FSDP_ERR_USAGE, "the string is not UTF-8: '%s'",
                         fsdp_printable(bytes, size, text, sizeof text));
    }
    char *copy = fsdp_strndup(bytes, size);
    if (!copy)
        return fsdp_fail_memory(err, "a value");
    fsdp_value_release(value);
    value->kind = kind;
    value->as.bytes.data = copy;
    value->as.bytes.size = size;
    return FSDP_OK;
}

fsdp_status fsdp_value_set_items(fsdp_value *value, fsdp_value_kind kind, size_t count,
                                 fsdp_error *err)
{
    FSDP_NEED(err, value);
    if (!holds_items(kind))
        return fsdp_fail(err, FSDP_ERR_USAGE, "a value of kind %d does not hold items", (int)kind);
    if (kind == FSDP_VALUE_DICT && count % 2 != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a dict of %zu keys and values: the last key has no value", count);
    fsdp_value *items = fsdp_alloc(count, sizeof *items);
    if (!items)
        return fsdp_fail_memory(err, "a value");
    fsdp_value_release(value);
    value->kind = kind;
    value->as.list.items = items;
    value->as.list.count = count;
    return FSDP_OK;
}

/* A dict whose one key is a class that no module holds. */
static const char per_rank_key[] = "per_rank";

fsdp_status fsdp_value_set_per_rank(fsdp_value *value, size_t count, fsdp_error *err)
{
    fsdp_value dict = {0};
    FSDP_TRY(fsdp_value_set_items(&dict, FSDP_VALUE_DICT, 2, err));
    fsdp_value *items = dict.as.list.items;
    fsdp_status st = fsdp_value_set_bytes(&items[0], FSDP_VALUE_CLASS, per_rank_key,
                                          sizeof per_rank_key - 1, err);
    if (st == FSDP_OK)
        st = fsdp_value_set_items(&items[1], FSDP_VALUE_LIST, count, err);
    if (st != FSDP_OK) {
        fsdp_value_release(&dict);
        return st;
    }
    fsdp_value_release(value);
    *value = dict;
    return FSDP_OK;
}

const fsdp_value *fsdp_value_per_rank(const fsdp_value *value)
{
    if (!value)
        return NULL;
    if (value->kind != FSDP_VALUE_DICT || value->as.list.count != 2)
        return NULL;
    const fsdp_value *key = &value->as.list.items[0], *list = &value->as.list.items[1];
    bool is_per_rank = key->kind == FSDP_VALUE_CLASS && list->kind == FSDP_VALUE_LIST &&
                       strcmp(key->as.bytes.data, per_rank_key) == 0;
    return is_per_rank ? list : NULL;
}

static fsdp_status copy_at(const fsdp_value *from, fsdp_value *to, int depth, fsdp_error *err);

static fsdp_status copy_items(const fsdp_value *from, fsdp_value *to, int depth, fsdp_error *err)
{
    if (depth >= FSDP_VALUE_DEPTH)
        return fsdp_fail(err, FSDP_ERR_USAGE, "lists and dicts are nested more than %d deep",
                         FSDP_VALUE_DEPTH);
    FSDP_TRY(fsdp_value_set_items(to, from->kind, from->as.list.count, err));
    to->is_tuple = from->is_tuple;
    for (size_t i = 0; i < from->as.list.count; i++)
        FSDP_TRY(copy_at(&from->as.list.items[i], &to->as.list.items[i], depth + 1, err));
    return FSDP_OK;
}

/* *to is null and may be half a copy after a failure. */
static fsdp_status copy_at(const fsdp_value *from, fsdp_value *to, int depth, fsdp_error *err)
{
    if (holds_items(from->kind))
        return copy_items(from, to, depth, err);
    if (holds_bytes(from->kind))
        return fsdp_value_set_bytes(to, from->kind, from->as.bytes.data, from->as.bytes.size, err);
    if ((int)from->kind < FSDP_VALUE_NULL || from->kind > FSDP_VALUE_TENSOR)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the value has the unknown kind %d", (int)from->kind);
    *to = *from;
    return FSDP_OK;
}

fsdp_status fsdp_value_copy(const fsdp_value *from, fsdp_value *to_out, fsdp_error *err)
{
    FSDP_NEED(err, from, to_out);
    fsdp_value copy = {0};
    fsdp_status status = copy_at(from, &copy, 0, err);
    if (status != FSDP_OK)
        fsdp_value_release(&copy);
    *to_out = copy;
    return status;
}

static bool equal_at(const fsdp_value *a, const fsdp_value *b, int depth);

static bool equal_items(const fsdp_value *a, const fsdp_value *b, int depth)
{
    bool is_other = a->kind == FSDP_VALUE_LIST && a->is_tuple != b->is_tuple;
    if (is_other || a->as.list.count != b->as.list.count || depth >= FSDP_VALUE_DEPTH)
        return false;
    for (size_t i = 0; i < a->as.list.count; i++) {
        if (!equal_at(&a->as.list.items[i], &b->as.list.items[i], depth + 1))
            return false;
    }
    return true;
}

static bool equal_bytes(const fsdp_value *a, const fsdp_value *b)
{
    size_t size = a->as.bytes.size;
    return size == b->as.bytes.size &&
           (size == 0 || memcmp(a->as.bytes.data, b->as.bytes.data, size) == 0);
}

static bool equal_at(const fsdp_value *a, const fsdp_value *b, int depth)
{
    if (a->kind != b->kind)
        return false;
    switch (a->kind) {
    case FSDP_VALUE_NULL: return true;
    case FSDP_VALUE_BOOL: return a->as.boolean == b->as.boolean;
    case FSDP_VALUE_I64: return a->as.i64 == b->as.i64;
    case FSDP_VALUE_U64: return a->as.u64 == b->as.u64;
    case FSDP_VALUE_F64: return memcmp(&a->as.f64, &b->as.f64, sizeof a->as.f64) == 0;
    case FSDP_VALUE_COMPLEX:
        return memcmp(a->as.complex_parts, b->as.complex_parts, sizeof a->as.complex_parts) == 0;
    case FSDP_VALUE_TENSOR: return a->as.tensor == b->as.tensor;
    case FSDP_VALUE_STRING:
    case FSDP_VALUE_BYTES:
    case FSDP_VALUE_OPAQUE:
    case FSDP_VALUE_INTEGER:
    case FSDP_VALUE_CLASS: return equal_bytes(a, b);
    case FSDP_VALUE_LIST:
    case FSDP_VALUE_DICT: return equal_items(a, b, depth);
    }
    return false;
}

bool fsdp_value_equal(const fsdp_value *a, const fsdp_value *b)
{
    if (!a || !b)
        return false;
    return equal_at(a, b, 0);
}

void fsdp_value_release(fsdp_value *value)
{
    if (!value)
        return;
    if (holds_bytes(value->kind))
        fsdp_free(value->as.bytes.data);
    if (holds_items(value->kind)) {
        for (size_t i = 0; i < value->as.list.count; i++)
            fsdp_value_release(&value->as.list.items[i]);
        fsdp_free(value->as.list.items);
    }
    *value = (fsdp_value){0};
}

bool fsdp_value_is_opaque(const fsdp_value *value)
{
    switch (value->kind) {
    case FSDP_VALUE_OPAQUE:
    case FSDP_VALUE_CLASS:
    case FSDP_VALUE_TENSOR: return true;
    case FSDP_VALUE_LIST:
    case FSDP_VALUE_DICT:
        for (size_t i = 0; i < value->as.list.count; i++)
            if (fsdp_value_is_opaque(&value->as.list.items[i]))
                return true;
        return false;
    default: return false;
    }
}

/* One value of a GGUF file: see gguf.h. An array becomes a list, and holds no other arrays. */
#include "formats/gguf/gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Limits of a file: a vocabulary has less than a million tokens and as many merges. */
enum { MOST_ITEMS = 16 << 20, LONGEST_STRING = 64 << 20, SHOWN = 100 };
/* Bytes of an item, and of the memory of a short string. */
enum { ITEM = sizeof(fsdp_value) };
/* Bytes of an entry beside its name and its value; charge() doubles them. */
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

/* Bytes that are no UTF-8 (tokens of some tokenizers) stay bytes. */
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
                                              " MiB of memory: allow more (--mem)",
                                              in->path, shown, in->most >> 20);
}

static fsdp_status take_array(gguf_input *in, const char *shown, fsdp_value *value, fsdp_error *err)
{
    uint32_t kind;
    size_t count;
    FSDP_TRY(gguf_take_u32(in, "the type of an array", &kind, err));
    if (kind == GGUF_ARRAY)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "'%s': the value of '%s' is an array of arrays",
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

fsdp_status gguf_take_value(gguf_input *in, const char *key, fsdp_value *value, fsdp_error *err)
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

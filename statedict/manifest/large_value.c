/* Large values as bytes, both ways: see large_value.h. */
#include "statedict/manifest/large_value.h"

#include "base/core/mem.h"
#include "statedict/manifest/manifest_internal.h"

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
        st = fsdp_json_fail(&json, err, "a value of another kind was promised");
    if (st != FSDP_OK)
        fsdp_value_release(value_out);
    fsdp_json_release(&json);
    return st;
}

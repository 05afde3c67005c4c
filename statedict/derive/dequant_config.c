/* Reads the blocks of scales from config.json: see dequant_config.h. */
#include "statedict/derive/dequant_config.h"

#include "base/data/json.h"
#include "base/text.h"

#include <inttypes.h>

static const char whole_size[] = "weight_block_size", group_size[] = "block_structure";

/* "[128, 128]" */
static fsdp_status read_pair(fsdp_json *json, int64_t pair[2], fsdp_error *err)
{
    bool more = true;
    int count = 0;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;; count++) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more || count == 2)
            break;
        FSDP_TRY(fsdp_json_i64(json, &pair[count], err));
    }
    return !more && count == 2 && pair[0] > 0 && pair[1] > 0
               ? FSDP_OK
               : fsdp_json_fail(json, err, "the size of blocks is no pair of positive numbers");
}

static fsdp_status read_size(fsdp_json *json, const char *member, fsdp_quant_blocks *blocks,
                             fsdp_error *err)
{
    int64_t pair[2];
    if (fsdp_json_peek(json) == FSDP_JSON_NULL) {
        blocks->is_none = blocks->is_none || member == whole_size;
        return fsdp_json_null(json, err);
    }
    FSDP_TRY(read_pair(json, pair, err));
    if (blocks->is_given && (pair[0] != blocks->size[0] || pair[1] != blocks->size[1]))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has blocks of %" PRId64 " x %" PRId64 " and of %" PRId64
                         " x %" PRId64 ", and --dequant takes one size",
                         json->name, blocks->size[0], blocks->size[1], pair[0], pair[1]);
    *blocks = (fsdp_quant_blocks){.size = {pair[0], pair[1]}, .is_given = true, .member = member};
    return FSDP_OK;
}

/* Groups of compressed-tensors have their sizes some levels below. */
static fsdp_status read_quantization(fsdp_json *json, fsdp_quant_blocks *blocks, fsdp_error *err)
{
    const char *key;
    size_t size;
    bool more;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        const char *member = fsdp_bytes_are(key, size, whole_size)   ? whole_size
                             : fsdp_bytes_are(key, size, group_size) ? group_size
                                                                     : NULL;
        if (member)
            FSDP_TRY(read_size(json, member, blocks, err));
        else if (fsdp_json_peek(json) == FSDP_JSON_OBJECT)
            FSDP_TRY(read_quantization(json, blocks, err));
        else
            FSDP_TRY(fsdp_json_skip(json, err));
    }
}

/* The model itself, or its part for text. */
static fsdp_status read_model(fsdp_json *json, bool is_part, fsdp_quant_blocks *blocks,
                              fsdp_error *err)
{
    const char *key;
    size_t size;
    bool more;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        bool is_object = fsdp_json_peek(json) == FSDP_JSON_OBJECT;
        if (is_object && fsdp_bytes_are(key, size, "quantization_config"))
            FSDP_TRY(read_quantization(json, blocks, err));
        else if (is_object && !is_part && fsdp_bytes_are(key, size, "text_config"))
            FSDP_TRY(read_model(json, true, blocks, err));
        else
            FSDP_TRY(fsdp_json_skip(json, err));
    }
}

fsdp_status fsdp_quant_blocks_read(const char *text, size_t size, const char *path,
                                   fsdp_quant_blocks *blocks_out, fsdp_error *err)
{
    fsdp_json json;
    *blocks_out = (fsdp_quant_blocks){.is_given = false};
    fsdp_json_init(&json, text, size, path ? path : "config.json");
    fsdp_status st = read_model(&json, false, blocks_out, err);
    fsdp_json_release(&json);
    return st;
}

/* Parts of a JSON text, which are read in another order than they stand in. See json_part.h. */
#include "formats/tokenizer/json_part.h"

#include <string.h>

fsdp_json fsdp_json_part_open(const fsdp_json *whole, fsdp_json_part part)
{
    fsdp_json json = *whole;
    json.at = part.at;
    json.end = part.end;
    json.depth = 0;
    json.first = false;
    json.scratch = NULL;
    json.scratch_capacity = 0;
    return json;
}

fsdp_status fsdp_json_take_part(fsdp_json *json, fsdp_json_part *part_out, fsdp_error *err)
{
    fsdp_json_kind kind = fsdp_json_peek(json);
    *part_out = (fsdp_json_part){.at = json->at};
    FSDP_TRY(fsdp_json_skip(json, err));
    part_out->end = json->at;
    if (kind == FSDP_JSON_NULL)
        *part_out = (fsdp_json_part){0};
    return FSDP_OK;
}

fsdp_status fsdp_json_take_type(fsdp_json *json, char type_out[FSDP_PART_TYPE], fsdp_error *err)
{
    const char *type;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &type, &size, err));
    if (size >= FSDP_PART_TYPE || strlen(type) != size)
        return fsdp_json_fail(json, err, "a type is longer than any known one");
    memcpy(type_out, type, size + 1);
    return FSDP_OK;
}

/* Parts of a JSON text, which are read in another order than they stand in. */
#ifndef FSDP_JSON_PART_H
#define FSDP_JSON_PART_H

#include "formats/tokenizer_json.h"

/* The places of members in fsdp_tokenizer_json.parts. */
enum {
    FSDP_PART_ADDED, FSDP_PART_NORMALIZER, FSDP_PART_PRE_TOKENIZER, FSDP_PART_POST_PROCESSOR,
    FSDP_PART_DECODER, FSDP_PART_MODEL, FSDP_PARTS
};

/* A reader of a part of `whole`. Release it with fsdp_json_release. */
fsdp_json fsdp_json_part_open(const fsdp_json *whole, fsdp_json_part part);
/* Skips the next value and says where it lies. */
fsdp_status fsdp_json_take_part(fsdp_json *json, fsdp_json_part *part_out, fsdp_error *err);
/* Takes a string as the type of a part. */
fsdp_status fsdp_json_take_type(fsdp_json *json, char type_out[FSDP_PART_TYPE], fsdp_error *err);

#endif

/*
 * tokenizer.json -> tokenizer: finds the members, then reads each in the order in which they need each other, since
 * a file may hold them in any order. tokenizer_model.c reads the tokens, tokenizer_parts.c the other parts.
 */
#include "runtime/tokens/tokenizer_internal.h"

#include "base/core/mem.h"

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

static fsdp_status read_type(fsdp_json *json, char type_out[FSDP_PART_TYPE], fsdp_error *err)
{
    static const char *const names[] = {"type"};
    fsdp_json_members members = {names, 1, 0};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        const char *type;
        size_t size;
        FSDP_TRY(fsdp_json_string(json, &type, &size, err));
        if (size >= FSDP_PART_TYPE || strlen(type) != size)
            return fsdp_json_fail(json, err, "a type is longer than any known one");
        memcpy(type_out, type, size + 1);
    }
}

fsdp_status fsdp_json_part_type(const fsdp_json *whole, fsdp_json_part part,
                                char type_out[FSDP_PART_TYPE], fsdp_error *err)
{
    type_out[0] = '\0';
    if (!part.at)
        return FSDP_OK;
    fsdp_json json = fsdp_json_part_open(whole, part);
    fsdp_status status = read_type(&json, type_out, err);
    fsdp_json_release(&json);
    return status;
}

fsdp_status fsdp_tokenizer_refuse(const fsdp_json *json, const char *what, const char *name,
                                  fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "'%s': the %s '%s' is not supported; supported is byte-level BPE as GPT-2, Llama 3 "
        "and Qwen2 have it",
        json->name, what, fsdp_printable(name, strlen(name), shown, sizeof shown));
}

enum { ADDED, NORMALIZER, PRE_TOKENIZER, POST_PROCESSOR, DECODER, MODEL, PARTS };

static fsdp_status find_parts(fsdp_json *json, fsdp_json_part parts[PARTS], fsdp_error *err)
{
    static const char *const names[] = {"added_tokens",   "normalizer", "pre_tokenizer",
                                        "post_processor", "decoder",    "model"};
    fsdp_json_members members = {names, PARTS, 0};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return fsdp_json_finish(json, err);
        FSDP_TRY(fsdp_json_take_part(json, &parts[which], err));
    }
}

static fsdp_status sort_tokens(const fsdp_json *json, fsdp_vocab *vocab, fsdp_error *err)
{
    const fsdp_token *twice, *before;
    FSDP_TRY(fsdp_vocab_sort(vocab, &twice, &before, err));
    if (!twice)
        return FSDP_OK;
    char one[100], other[100];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the tokens '%s' and '%s' both have the id %u",
                     json->name, fsdp_printable(before->data, before->size, one, sizeof one),
                     fsdp_printable(twice->data, twice->size, other, sizeof other), twice->id);
}

static fsdp_status read_parts(fsdp_tokenizer *tokenizer, fsdp_json *json, fsdp_error *err)
{
    fsdp_json_part parts[PARTS] = {0};
    FSDP_TRY(find_parts(json, parts, err));
    FSDP_TRY(fsdp_tokenizer_read_model(tokenizer, json, parts[MODEL], err));
    FSDP_TRY(fsdp_tokenizer_read_normalizer(tokenizer, json, parts[NORMALIZER], err));
    FSDP_TRY(fsdp_unicode_init(tokenizer->unicode, tokenizer->normalizes, err));
    FSDP_TRY(fsdp_tokenizer_read_added(tokenizer, json, parts[ADDED], err));
    FSDP_TRY(sort_tokens(json, &tokenizer->bpe.vocab, err));
    FSDP_TRY(fsdp_tokenizer_read_splits(tokenizer, json, parts[PRE_TOKENIZER], err));
    if (!tokenizer->has_byte_level)
        return fsdp_tokenizer_refuse(json, "pre-tokenizer", "none with ByteLevel", err);
    FSDP_TRY(fsdp_tokenizer_read_template(tokenizer, json, parts[POST_PROCESSOR], err));
    FSDP_TRY(fsdp_tokenizer_read_decoder(tokenizer, json, parts[DECODER], err));
    if (!tokenizer->has_decoder)
        return fsdp_tokenizer_refuse(json, "decoder", "none with ByteLevel", err);
    return FSDP_OK;
}

fsdp_status fsdp_tokenizer_read(fsdp_tokenizer *tokenizer, const char *origin, fsdp_error *err)
{
    tokenizer->unicode = fsdp_alloc(1, sizeof *tokenizer->unicode);
    if (!tokenizer->unicode)
        return fsdp_fail_memory(err, "a tokenizer");
    fsdp_json json;
    fsdp_json_init(&json, tokenizer->text, tokenizer->text_size, origin);
    fsdp_status status = read_parts(tokenizer, &json, err);
    fsdp_json_release(&json);
    return status;
}

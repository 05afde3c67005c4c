/*
 * tokenizer.json -> tokenizer: finds the members, then reads each in the order in which they need each
 * other, since a file may hold them in any order. tokenizer_model.c reads the tokens, tokenizer_parts.c
 * the other parts.
 */
#include "runtime/tokens/tokenizer_internal.h"

#include "base/core/mem.h"

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

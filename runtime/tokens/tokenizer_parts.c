/* The parts of a tokenizer.json around its model: normalizer, pre-tokenizer, post-processor, decoder. */
#include "runtime/tokens/tokenizer_internal.h"

#include "base/core/mem.h"

#include <string.h>

typedef fsdp_status (*part_reader)(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                   fsdp_json_part part, fsdp_error *err);

/* The members of an object as parts; those that it lacks are zero. */
static fsdp_status read_members(const fsdp_json *json, fsdp_json_part part,
                                fsdp_json_members *members, fsdp_json_part *parts, fsdp_error *err)
{
    fsdp_json text = fsdp_json_part_open(json, part);
    fsdp_status status = fsdp_json_enter_object(&text, err);
    for (int which = 0; status == FSDP_OK && which >= 0;) {
        status = fsdp_json_next_member(&text, members, &which, err);
        if (status == FSDP_OK && which >= 0)
            status = fsdp_json_take_part(&text, &parts[which], err);
    }
    fsdp_json_release(&text);
    return status;
}

static fsdp_status read_items(fsdp_tokenizer *tokenizer, fsdp_json *text, part_reader read,
                              fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(text, err));
    for (;;) {
        bool more;
        fsdp_json_part item;
        FSDP_TRY(fsdp_json_next_item(text, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_take_part(text, &item, err));
        FSDP_TRY(read(tokenizer, text, item, err));
    }
}

/* Reads the parts of a Sequence, which are the items of this member. */
static fsdp_status read_sequence(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                 fsdp_json_part part, const char *member, part_reader read,
                                 fsdp_error *err)
{
    fsdp_json_members members = {&member, 1, 0};
    fsdp_json_part items = {0};
    FSDP_TRY(read_members(json, part, &members, &items, err));
    fsdp_json text = fsdp_json_part_open(json, items.at ? items : part);
    if (!items.at)
        return fsdp_json_fail(&text, err, "a Sequence has no %s", member);
    fsdp_status status = read_items(tokenizer, &text, read, err);
    fsdp_json_release(&text);
    return status;
}

/* A bool; *value stays where it is absent. */
static fsdp_status read_flag(const fsdp_json *json, fsdp_json_part part, bool *value,
                             fsdp_error *err)
{
    if (!part.at)
        return FSDP_OK;
    fsdp_json text = fsdp_json_part_open(json, part);
    return fsdp_json_bool(&text, value, err);
}

/* A string in fresh memory; "" where it is absent. */
static fsdp_status read_string(const fsdp_json *json, fsdp_json_part part, char **data_out,
                               size_t *size_out, fsdp_error *err)
{
    *data_out = NULL;
    fsdp_json text = fsdp_json_part_open(json, part);
    const char *data = "";
    *size_out = 0;
    fsdp_status status = part.at ? fsdp_json_string(&text, &data, size_out, err) : FSDP_OK;
    if (status == FSDP_OK && !(*data_out = fsdp_strndup(data, *size_out)))
        status = fsdp_fail_memory(err, "a tokenizer");
    fsdp_json_release(&text);
    return status;
}

/* --- normalizer --- */

fsdp_status fsdp_tokenizer_read_normalizer(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                           fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    if (!part.at)
        return FSDP_OK;
    FSDP_TRY(fsdp_json_part_type(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(tokenizer, json, part, "normalizers", fsdp_tokenizer_read_normalizer,
                             err);
    if (strcmp(type, "NFC") != 0)
        return fsdp_tokenizer_refuse(json, "normalizer", type, err);
    tokenizer->normalizes = true;
    return FSDP_OK;
}

/* --- pre-tokenizer --- */

static fsdp_status add_step(fsdp_tokenizer *tokenizer, const fsdp_json *json, fsdp_split_step step,
                            fsdp_error *err)
{
    if (tokenizer->has_byte_level)
        return fsdp_tokenizer_refuse(json, "pre-tokenizer", "a step behind ByteLevel", err);
    if (tokenizer->step_count == FSDP_SPLIT_STEPS)
        return fsdp_tokenizer_refuse(json, "pre-tokenizer", "more than 8 steps", err);
    tokenizer->steps[tokenizer->step_count++] = step;
    return FSDP_OK;
}

static fsdp_status read_byte_level(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                   fsdp_json_part part, fsdp_error *err)
{
    static const char *const names[] = {"add_prefix_space", "use_regex"};
    fsdp_json_members members = {names, 2, 0};
    fsdp_json_part parts[2] = {0};
    bool adds_space = true, uses_regex = true;
    FSDP_TRY(read_members(json, part, &members, parts, err));
    FSDP_TRY(read_flag(json, parts[0], &adds_space, err));
    FSDP_TRY(read_flag(json, parts[1], &uses_regex, err));
    fsdp_split_step step = {uses_regex ? fsdp_split_gpt2 : NULL, adds_space};
    FSDP_TRY(add_step(tokenizer, json, step, err));
    tokenizer->has_byte_level = true;
    return FSDP_OK;
}

static fsdp_status find_pattern(const fsdp_json *json, fsdp_json_part pattern,
                                fsdp_split *split_out, fsdp_error *err)
{
    static const char *const names[] = {"Regex", "String"};
    fsdp_json_members members = {names, 2, 0};
    fsdp_json_part parts[2] = {0};
    if (!pattern.at)
        return fsdp_json_fail(json, err, "a Split has no pattern");
    FSDP_TRY(read_members(json, pattern, &members, parts, err));
    char *text;
    size_t size;
    FSDP_TRY(read_string(json, parts[parts[0].at ? 0 : 1], &text, &size, err));
    *split_out = parts[0].at ? fsdp_split_of_pattern(text, size) : NULL;
    fsdp_status status =
        *split_out ? FSDP_OK : fsdp_tokenizer_refuse(json, "pattern of a Split", text, err);
    fsdp_free(text);
    return status;
}

static fsdp_status read_split(fsdp_tokenizer *tokenizer, const fsdp_json *json, fsdp_json_part part,
                              fsdp_error *err)
{
    static const char *const names[] = {"pattern", "behavior", "invert"};
    fsdp_json_members members = {names, 3, 0};
    fsdp_json_part parts[3] = {0};
    bool inverts = false;
    fsdp_split_step step = {0};
    char *behavior;
    size_t size;
    FSDP_TRY(read_members(json, part, &members, parts, err));
    FSDP_TRY(read_flag(json, parts[2], &inverts, err));
    FSDP_TRY(find_pattern(json, parts[0], &step.split, err));
    FSDP_TRY(read_string(json, parts[1], &behavior, &size, err));
    /* the patterns match everywhere: to remove all between the matches removes nothing */
    bool isolates =
        strcmp(behavior, "Isolated") == 0 || (inverts && strcmp(behavior, "Removed") == 0);
    fsdp_status status = isolates
                             ? add_step(tokenizer, json, step, err)
                             : fsdp_tokenizer_refuse(json, "behavior of a Split", behavior, err);
    fsdp_free(behavior);
    return status;
}

fsdp_status fsdp_tokenizer_read_splits(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                       fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    FSDP_TRY(fsdp_json_part_type(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(tokenizer, json, part, "pretokenizers", fsdp_tokenizer_read_splits,
                             err);
    if (strcmp(type, "ByteLevel") == 0)
        return read_byte_level(tokenizer, json, part, err);
    if (strcmp(type, "Split") == 0)
        return read_split(tokenizer, json, part, err);
    return fsdp_tokenizer_refuse(json, "pre-tokenizer", part.at ? type : "null", err);
}

/* --- post-processor --- */

enum { TEMPLATE_PIECES = 64 };

/* Reads a template; the ids of its next special token go before the text, or behind it. */
typedef struct template_reader {
    fsdp_tokenizer *tokenizer;
    fsdp_json_part special; /* the member special_tokens */
    fsdp_ids ids[2];
    int texts, pieces;
} template_reader;

static fsdp_status take_ids(template_reader *reader, fsdp_json *text, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(text, err));
    for (;;) {
        bool more;
        int64_t id;
        FSDP_TRY(fsdp_json_next_item(text, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_i64(text, &id, err));
        if (id < 0 || id >= FSDP_TOKEN_ID_LIMIT ||
            !fsdp_vocab_at(&reader->tokenizer->bpe.vocab, (uint32_t)id))
            return fsdp_json_fail(text, err, "no token has the id %lld of the template",
                                  (long long)id);
        FSDP_TRY(fsdp_ids_add(&reader->ids[reader->texts], id, err));
    }
}

/* The ids of a special token: a member of special_tokens. */
static fsdp_status take_special(template_reader *reader, const fsdp_json *json, const char *name,
                                fsdp_error *err)
{
    static const char *const names[] = {"ids"};
    fsdp_json_members one = {&name, 1, 0}, members = {names, 1, 0};
    fsdp_json_part token = {0}, ids = {0};
    if (reader->special.at)
        FSDP_TRY(read_members(json, reader->special, &one, &token, err));
    if (token.at)
        FSDP_TRY(read_members(json, token, &members, &ids, err));
    if (!ids.at) {
        char shown[100];
        return fsdp_json_fail(json, err,
                              "special_tokens has no ids of '%s', which the template adds",
                              fsdp_printable(name, strlen(name), shown, sizeof shown));
    }
    fsdp_json text = fsdp_json_part_open(json, ids);
    fsdp_status status = take_ids(reader, &text, err);
    fsdp_json_release(&text);
    return status;
}

static fsdp_status take_piece_named(template_reader *reader, const fsdp_json *json, bool is_text,
                                    const char *name, fsdp_error *err)
{
    if (!is_text)
        return take_special(reader, json, name, err);
    if (strcmp(name, "A") != 0 || reader->texts++ > 0)
        return fsdp_tokenizer_refuse(json, "template with", "another text than one A", err);
    return FSDP_OK;
}

/* {"SpecialToken": {"id": NAME}} or {"Sequence": {"id": "A"}} */
static fsdp_status take_piece(template_reader *reader, fsdp_json *json, fsdp_error *err)
{
    static const char *const kinds[] = {"SpecialToken", "Sequence"}, *const names[] = {"id"};
    fsdp_json_members kind_members = {kinds, 2, 0}, members = {names, 1, 0};
    fsdp_json_part piece, parts[2] = {0}, id = {0};
    FSDP_TRY(fsdp_json_take_part(json, &piece, err));
    if (reader->pieces++ == TEMPLATE_PIECES)
        return fsdp_tokenizer_refuse(json, "template with", "more than 64 pieces", err);
    if (piece.at)
        FSDP_TRY(read_members(json, piece, &kind_members, parts, err));
    bool is_text = parts[1].at != NULL;
    if (is_text == (parts[0].at != NULL))
        return fsdp_json_fail(json, err, "a piece of the template is neither text nor token");
    FSDP_TRY(read_members(json, parts[is_text], &members, &id, err));
    char *name;
    size_t size;
    FSDP_TRY(read_string(json, id, &name, &size, err));
    fsdp_status status = take_piece_named(reader, json, is_text, name, err);
    fsdp_free(name);
    return status;
}

static fsdp_status take_pieces(template_reader *reader, fsdp_json *text, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(text, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(text, &more, err));
        if (!more)
            break;
        FSDP_TRY(take_piece(reader, text, err));
    }
    return reader->texts == 1 ? FSDP_OK
                              : fsdp_json_fail(text, err, "the template lacks the text A");
}

static fsdp_status read_template(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                 fsdp_json_part part, fsdp_error *err)
{
    static const char *const names[] = {"single", "special_tokens"};
    fsdp_json_members members = {names, 2, 0};
    fsdp_json_part parts[2] = {0};
    if (tokenizer->has_template)
        return fsdp_tokenizer_refuse(json, "post-processor", "a second TemplateProcessing", err);
    FSDP_TRY(read_members(json, part, &members, parts, err));
    template_reader reader = {.tokenizer = tokenizer, .special = parts[1]};
    fsdp_json text = fsdp_json_part_open(json, parts[0].at ? parts[0] : part);
    if (!parts[0].at)
        return fsdp_json_fail(&text, err, "a TemplateProcessing has no single");
    fsdp_status status = take_pieces(&reader, &text, err);
    fsdp_json_release(&text);
    tokenizer->before = reader.ids[0];
    tokenizer->after = reader.ids[1];
    tokenizer->has_template = true;
    return status;
}

fsdp_status fsdp_tokenizer_read_template(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                         fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    if (!part.at)
        return FSDP_OK;
    FSDP_TRY(fsdp_json_part_type(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(tokenizer, json, part, "processors", fsdp_tokenizer_read_template,
                             err);
    if (strcmp(type, "ByteLevel") == 0)
        return FSDP_OK; /* moves offsets, which nobody asks for */
    if (strcmp(type, "TemplateProcessing") == 0)
        return read_template(tokenizer, json, part, err);
    return fsdp_tokenizer_refuse(json, "post-processor", type, err);
}

/* --- decoder --- */

fsdp_status fsdp_tokenizer_read_decoder(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                        fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    FSDP_TRY(fsdp_json_part_type(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(tokenizer, json, part, "decoders", fsdp_tokenizer_read_decoder, err);
    if (strcmp(type, "ByteLevel") != 0 || tokenizer->has_decoder)
        return fsdp_tokenizer_refuse(json, "decoder", part.at ? type : "null", err);
    tokenizer->has_decoder = true;
    return FSDP_OK;
}

/*
 * The parts of a tokenizer.json around its model: normalizer, pre-tokenizer, post-processor, decoder, and the
 * patterns that cut text into words. See tokenizer_json.h.
 */
#include "formats/tokenizer_json.h"

#include "base/core/mem.h"
#include "formats/tokenizer/json_part.h"

#include <string.h>

typedef struct rules_reader {
    fsdp_text_rules *rules;
    const char *model;                /* "Unigram" or "WordPiece"; NULL: byte-level BPE */
    fsdp_unigram_rules *unigram;      /* of that model */
    bool merges, strips, cuts, marks; /* of Unigram: what its parts do with spaces */
    bool has_byte_level;              /* among the steps; the last one */
    bool has_template, has_decoder;
} rules_reader;

/* SentencePiece's sign for a space, U+2581. */
static const char space_sign[] = "\xE2\x96\x81";

typedef fsdp_status (*part_reader)(rules_reader *reader, const fsdp_json *json, fsdp_json_part part,
                                   fsdp_error *err);

static fsdp_status read_type(fsdp_json *json, char type_out[FSDP_PART_TYPE], fsdp_error *err)
{
    static const char *const names[] = {"type"};
    fsdp_json_members members = {names, 1, 0};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_take_type(json, type_out, err));
    }
}

/* The member "type" of an object, "" without one. An array or a scalar is FSDP_ERR_DAMAGED. */
static fsdp_status type_of(const fsdp_json *whole, fsdp_json_part part,
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

static fsdp_status read_items(rules_reader *reader, fsdp_json *text, part_reader read,
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
        FSDP_TRY(read(reader, text, item, err));
    }
}

/* Reads the parts of a Sequence, which are the items of this member. */
static fsdp_status read_sequence(rules_reader *reader, const fsdp_json *json, fsdp_json_part part,
                                 const char *member, part_reader read, fsdp_error *err)
{
    fsdp_json_members members = {&member, 1, 0};
    fsdp_json_part items = {0};
    FSDP_TRY(read_members(json, part, &members, &items, err));
    fsdp_json text = fsdp_json_part_open(json, items.at ? items : part);
    if (!items.at)
        return fsdp_json_fail(&text, err, "a Sequence has no %s", member);
    fsdp_status status = read_items(reader, &text, read, err);
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

/* Byte-level BPE is read for training, too, and other models for llama.cpp alone. */
static fsdp_status refuse(const rules_reader *reader, const fsdp_json *json, const char *what,
                          const char *name, fsdp_error *err)
{
    char shown[200];
    const char *remedy = reader->unigram ? "; a directory without tokenizer.json but with "
                                           "spiece.model may have the same tokens"
                                         : "";
    if (!reader->model)
        return fsdp_tokenizer_refuse(json, what, name, err);
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': llama.cpp has no %s '%s' for the model %s%s",
                     json->name, what, fsdp_printable(name, strlen(name), shown, sizeof shown),
                     reader->model, remedy);
}

/* --- normalizer --- */

static fsdp_status read_normalizer_part(rules_reader *reader, const fsdp_json *json,
                                        fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    if (!part.at)
        return FSDP_OK;
    FSDP_TRY(type_of(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(reader, json, part, "normalizers", read_normalizer_part, err);
    if (strcmp(type, "NFC") != 0)
        return fsdp_tokenizer_refuse(json, "normalizer", type, err);
    reader->rules->normalizes = true;
    return FSDP_OK;
}

/* --- pre-tokenizer --- */

#define GPT2_REST "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define NEWER(numbers)                                                    \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" numbers \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

fsdp_word_pattern fsdp_word_pattern_of(const char *text, size_t size)
{
    static const struct {
        const char *text;
        fsdp_word_pattern pattern;
    } patterns[] = {
        {"'s|'t|'re|'ve|'m|'ll|'d" GPT2_REST, FSDP_WORDS_GPT2},
        {"'(?:[sdmt]|ll|ve|re)" GPT2_REST, FSDP_WORDS_GPT2},
        {NEWER("\\p{N}{1,3}"), FSDP_WORDS_LLAMA3},
        {NEWER("\\p{N}"), FSDP_WORDS_QWEN2},
    };
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        if (fsdp_bytes_are(text, size, patterns[i].text))
            return patterns[i].pattern;
    }
    return FSDP_WORDS_WHOLE;
}

static fsdp_status add_step(rules_reader *reader, const fsdp_json *json, fsdp_split_step step,
                            fsdp_error *err)
{
    if (reader->has_byte_level)
        return fsdp_tokenizer_refuse(json, "pre-tokenizer", "a step after ByteLevel", err);
    if (reader->rules->step_count == FSDP_SPLIT_STEPS)
        return fsdp_tokenizer_refuse(json, "pre-tokenizer", "more than 8 steps", err);
    reader->rules->steps[reader->rules->step_count++] = step;
    return FSDP_OK;
}

static fsdp_status read_byte_level(rules_reader *reader, const fsdp_json *json, fsdp_json_part part,
                                   fsdp_error *err)
{
    static const char *const names[] = {"add_prefix_space", "use_regex"};
    fsdp_json_members members = {names, 2, 0};
    fsdp_json_part parts[2] = {0};
    bool adds_space = true, uses_regex = true;
    FSDP_TRY(read_members(json, part, &members, parts, err));
    FSDP_TRY(read_flag(json, parts[0], &adds_space, err));
    FSDP_TRY(read_flag(json, parts[1], &uses_regex, err));
    fsdp_split_step step = {uses_regex ? FSDP_WORDS_GPT2 : FSDP_WORDS_WHOLE, adds_space};
    FSDP_TRY(add_step(reader, json, step, err));
    reader->has_byte_level = true;
    return FSDP_OK;
}

static fsdp_status find_pattern(const fsdp_json *json, fsdp_json_part pattern,
                                fsdp_word_pattern *pattern_out, fsdp_error *err)
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
    *pattern_out = parts[0].at ? fsdp_word_pattern_of(text, size) : FSDP_WORDS_WHOLE;
    fsdp_status status = *pattern_out != FSDP_WORDS_WHOLE
                             ? FSDP_OK
                             : fsdp_tokenizer_refuse(json, "pattern of a Split", text, err);
    fsdp_free(text);
    return status;
}

static fsdp_status read_split(rules_reader *reader, const fsdp_json *json, fsdp_json_part part,
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
    FSDP_TRY(find_pattern(json, parts[0], &step.pattern, err));
    FSDP_TRY(read_string(json, parts[1], &behavior, &size, err));
    /* the patterns match everywhere: to remove all between the matches removes nothing */
    bool isolates =
        strcmp(behavior, "Isolated") == 0 || (inverts && strcmp(behavior, "Removed") == 0);
    fsdp_status status = isolates
                             ? add_step(reader, json, step, err)
                             : fsdp_tokenizer_refuse(json, "behavior of a Split", behavior, err);
    fsdp_free(behavior);
    return status;
}

static fsdp_status read_splits_part(rules_reader *reader, const fsdp_json *json,
                                    fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    FSDP_TRY(type_of(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(reader, json, part, "pretokenizers", read_splits_part, err);
    if (strcmp(type, "ByteLevel") == 0)
        return read_byte_level(reader, json, part, err);
    if (strcmp(type, "Split") == 0)
        return read_split(reader, json, part, err);
    return fsdp_tokenizer_refuse(json, "pre-tokenizer", part.at ? type : "null", err);
}

/* --- post-processor --- */

enum { TEMPLATE_PIECES = 64 };

/* Reads a template; the ids of its next special token go before the text, or after it. */
typedef struct template_reader {
    const rules_reader *of;
    fsdp_json_part special; /* the member special_tokens */
    int texts, pieces;
} template_reader;

static fsdp_status take_ids(template_reader *reader, fsdp_json *text, fsdp_error *err)
{
    fsdp_text_rules *rules = reader->of->rules;
    fsdp_template_ids *ids = reader->texts > 0 ? &rules->after : &rules->before;
    FSDP_TRY(fsdp_json_enter_array(text, err));
    for (;;) {
        bool more;
        int64_t id;
        FSDP_TRY(fsdp_json_next_item(text, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_i64(text, &id, err));
        if (ids->count == FSDP_TEMPLATE_IDS)
            return refuse(reader->of, text, "template with", "more than 64 ids", err);
        ids->ids[ids->count++] = id;
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
        return refuse(reader->of, json, "template with", "a text other than one A", err);
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
        return refuse(reader->of, json, "template with", "more than 64 pieces", err);
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

static fsdp_status read_template(rules_reader *reader, const fsdp_json *json, fsdp_json_part part,
                                 fsdp_error *err)
{
    static const char *const names[] = {"single", "special_tokens"};
    fsdp_json_members members = {names, 2, 0};
    fsdp_json_part parts[2] = {0};
    if (reader->has_template)
        return refuse(reader, json, "post-processor", "a second TemplateProcessing", err);
    FSDP_TRY(read_members(json, part, &members, parts, err));
    template_reader pieces = {.of = reader, .special = parts[1]};
    fsdp_json text = fsdp_json_part_open(json, parts[0].at ? parts[0] : part);
    if (!parts[0].at)
        return fsdp_json_fail(&text, err, "a TemplateProcessing has no single");
    fsdp_status status = take_pieces(&pieces, &text, err);
    fsdp_json_release(&text);
    reader->has_template = true;
    return status;
}

/* ["[SEP]", 102] */
static fsdp_status read_processing_id(const fsdp_json *json, fsdp_json_part part,
                                      fsdp_template_ids *ids_out, fsdp_error *err)
{
    bool more;
    fsdp_json text = fsdp_json_part_open(json, part);
    fsdp_status st = fsdp_json_enter_array(&text, err);
    if (st == FSDP_OK)
        st = fsdp_json_next_item(&text, &more, err);
    if (st == FSDP_OK)
        st = fsdp_json_skip(&text, err);
    if (st == FSDP_OK)
        st = fsdp_json_next_item(&text, &more, err);
    if (st == FSDP_OK)
        st = fsdp_json_i64(&text, &ids_out->ids[0], err);
    ids_out->count = 1;
    fsdp_json_release(&text);
    return st;
}

/* It adds [CLS] before the text, and [SEP] after it. */
static fsdp_status read_bert_processing(rules_reader *reader, const fsdp_json *json,
                                        fsdp_json_part part, fsdp_error *err)
{
    static const char *const names[] = {"cls", "sep"};
    fsdp_json_members members = {names, 2, 0};
    fsdp_json_part parts[2] = {0};
    if (reader->has_template)
        return refuse(reader, json, "post-processor", "BertProcessing after a template", err);
    FSDP_TRY(read_members(json, part, &members, parts, err));
    if (!parts[0].at || !parts[1].at)
        return fsdp_json_fail(json, err, "a BertProcessing has no %s", names[parts[0].at != NULL]);
    FSDP_TRY(read_processing_id(json, parts[0], &reader->rules->before, err));
    FSDP_TRY(read_processing_id(json, parts[1], &reader->rules->after, err));
    reader->has_template = true;
    return FSDP_OK;
}

static fsdp_status read_template_part(rules_reader *reader, const fsdp_json *json,
                                      fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    if (!part.at)
        return FSDP_OK;
    FSDP_TRY(type_of(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(reader, json, part, "processors", read_template_part, err);
    if (strcmp(type, "ByteLevel") == 0)
        return FSDP_OK; /* moves offsets, which nobody asks for */
    if (strcmp(type, "TemplateProcessing") == 0)
        return read_template(reader, json, part, err);
    if (reader->model && strcmp(type, "BertProcessing") == 0)
        return read_bert_processing(reader, json, part, err);
    return refuse(reader, json, "post-processor", type, err);
}

/* --- decoder --- */

static fsdp_status read_decoder_part(rules_reader *reader, const fsdp_json *json,
                                     fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    FSDP_TRY(type_of(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(reader, json, part, "decoders", read_decoder_part, err);
    if (strcmp(type, "ByteLevel") != 0 || reader->has_decoder)
        return fsdp_tokenizer_refuse(json, "decoder", part.at ? type : "null", err);
    reader->has_decoder = true;
    return FSDP_OK;
}

/* --- all of them --- */

fsdp_status fsdp_tokenizer_json_rules(const fsdp_tokenizer_json *file, fsdp_text_rules *rules_out,
                                      fsdp_error *err)
{
    const fsdp_json *json = &file->json;
    const fsdp_json_part *parts = file->parts;
    rules_reader reader = {.rules = rules_out};
    *rules_out = (fsdp_text_rules){.normalizes = false};
    FSDP_TRY(read_normalizer_part(&reader, json, parts[FSDP_PART_NORMALIZER], err));
    FSDP_TRY(read_splits_part(&reader, json, parts[FSDP_PART_PRE_TOKENIZER], err));
    if (!reader.has_byte_level)
        return fsdp_tokenizer_refuse(json, "pre-tokenizer", "none with ByteLevel", err);
    FSDP_TRY(read_template_part(&reader, json, parts[FSDP_PART_POST_PROCESSOR], err));
    FSDP_TRY(read_decoder_part(&reader, json, parts[FSDP_PART_DECODER], err));
    if (!reader.has_decoder)
        return fsdp_tokenizer_refuse(json, "decoder", "none with ByteLevel", err);
    return FSDP_OK;
}

/* --- Unigram ---------------------------------------------------------------------------------- */

static fsdp_status read_charsmap(rules_reader *reader, const fsdp_json *json, fsdp_json_part part,
                                 fsdp_error *err)
{
    static const char *const names[] = {"precompiled_charsmap"};
    fsdp_json_members members = {names, 1, 0};
    fsdp_json_part text = {0};
    fsdp_unigram_rules *rules = reader->unigram;
    char *data;
    size_t size;
    if (rules->charsmap || reader->merges || reader->strips)
        return refuse(reader, json, "normalizer before", "Precompiled", err);
    FSDP_TRY(read_members(json, part, &members, &text, err));
    FSDP_TRY(read_string(json, text, &data, &size, err));
    fsdp_status status =
        size > 0 ? fsdp_base64_decode(data, size, &rules->charsmap, &rules->charsmap_size, err)
                 : FSDP_OK;
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "'%s', precompiled_charsmap", json->name);
    fsdp_free(data);
    return status;
}

/* Several spaces become one. */
static fsdp_status read_replace(rules_reader *reader, const fsdp_json *json, fsdp_json_part part,
                                fsdp_error *err)
{
    static const char *const names[] = {"pattern", "content"}, *const kinds[] = {"Regex"};
    fsdp_json_members members = {names, 2, 0}, kind_members = {kinds, 1, 0};
    fsdp_json_part parts[2] = {0}, regex = {0};
    char *texts[2] = {NULL, NULL};
    size_t sizes[2];
    FSDP_TRY(read_members(json, part, &members, parts, err));
    if (parts[0].at)
        FSDP_TRY(read_members(json, parts[0], &kind_members, &regex, err));
    fsdp_status status = read_string(json, regex, &texts[0], &sizes[0], err);
    if (status == FSDP_OK)
        status = read_string(json, parts[1], &texts[1], &sizes[1], err);
    reader->merges = status == FSDP_OK && strcmp(texts[0], " {2,}") == 0 &&
                     (strcmp(texts[1], " ") == 0 || strcmp(texts[1], space_sign) == 0);
    if (status == FSDP_OK && !reader->merges)
        status = refuse(reader, json, "normalizer Replace of", texts[0], err);
    fsdp_free(texts[0]);
    fsdp_free(texts[1]);
    return status;
}

static fsdp_status read_unigram_normalizer(rules_reader *reader, const fsdp_json *json,
                                           fsdp_json_part part, fsdp_error *err)
{
    static const char *const names[] = {"strip_right"};
    fsdp_json_members members = {names, 1, 0};
    fsdp_json_part right = {0};
    char type[FSDP_PART_TYPE];
    if (!part.at)
        return FSDP_OK;
    FSDP_TRY(type_of(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(reader, json, part, "normalizers", read_unigram_normalizer, err);
    if (strcmp(type, "Precompiled") == 0)
        return read_charsmap(reader, json, part, err);
    if (strcmp(type, "Replace") == 0)
        return read_replace(reader, json, part, err);
    if (strcmp(type, "Strip") != 0)
        return refuse(reader, json, "normalizer", type, err);
    FSDP_TRY(read_members(json, part, &members, &right, err));
    return read_flag(json, right, &reader->strips, err);
}

/* Older files say add_prefix_space in place of prepend_scheme. */
static fsdp_status read_metaspace(rules_reader *reader, const fsdp_json *json, fsdp_json_part part,
                                  fsdp_error *err)
{
    static const char *const names[] = {"replacement", "prepend_scheme", "add_prefix_space",
                                        "split"};
    fsdp_json_members members = {names, 4, 0};
    fsdp_json_part parts[4] = {0};
    char *texts[2] = {NULL, NULL};
    size_t sizes[2];
    bool adds_space = true;
    FSDP_TRY(read_members(json, part, &members, parts, err));
    FSDP_TRY(read_flag(json, parts[2], &adds_space, err));
    reader->unigram->cuts_words = true;
    FSDP_TRY(read_flag(json, parts[3], &reader->unigram->cuts_words, err));
    fsdp_status status = read_string(json, parts[0], &texts[0], &sizes[0], err);
    if (status == FSDP_OK)
        status = read_string(json, parts[1], &texts[1], &sizes[1], err);
    if (status == FSDP_OK && strcmp(texts[0], space_sign) != 0)
        status = refuse(reader, json, "Metaspace with the replacement", texts[0], err);
    else if (status == FSDP_OK && (!adds_space || strcmp(texts[1], "never") == 0))
        status = refuse(reader, json, "Metaspace with the prepend_scheme", "never", err);
    else if (status == FSDP_OK && reader->cuts && strcmp(texts[1], "first") == 0)
        status = refuse(reader, json, "Metaspace after WhitespaceSplit with the prepend_scheme",
                        "first", err);
    reader->marks = true;
    fsdp_free(texts[0]);
    fsdp_free(texts[1]);
    return status;
}

static fsdp_status read_unigram_splits(rules_reader *reader, const fsdp_json *json,
                                       fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    FSDP_TRY(type_of(json, part, type, err));
    if (strcmp(type, "Sequence") == 0)
        return read_sequence(reader, json, part, "pretokenizers", read_unigram_splits, err);
    if (strcmp(type, "Metaspace") == 0 && !reader->marks)
        return read_metaspace(reader, json, part, err);
    if (strcmp(type, "WhitespaceSplit") != 0 || reader->marks)
        return refuse(reader, json, "pre-tokenizer", part.at ? type : "null", err);
    reader->cuts = true;
    return FSDP_OK;
}

fsdp_status fsdp_tokenizer_json_unigram(const fsdp_tokenizer_json *file,
                                        fsdp_unigram_rules *rules_out, fsdp_error *err)
{
    const fsdp_json *json = &file->json;
    const fsdp_json_part *parts = file->parts;
    fsdp_text_rules rules = {.normalizes = false};
    rules_reader reader = {.rules = &rules, .model = "Unigram", .unigram = rules_out};
    *rules_out = (fsdp_unigram_rules){.charsmap = NULL};
    if (file->model.byte_fallback)
        return refuse(&reader, json, "member", "byte_fallback", err);
    if (file->model.unknown_id < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': the model has no unk_id, and llama.cpp needs a token for unknown "
                         "characters",
                         json->name);
    FSDP_TRY(read_unigram_normalizer(&reader, json, parts[FSDP_PART_NORMALIZER], err));
    FSDP_TRY(read_unigram_splits(&reader, json, parts[FSDP_PART_PRE_TOKENIZER], err));
    if (!reader.marks)
        return refuse(&reader, json, "pre-tokenizer without", "Metaspace", err);
    if (!reader.cuts && !(reader.merges && reader.strips))
        return refuse(&reader, json, "pre-tokenizer that keeps several spaces after", "Metaspace",
                      err);
    FSDP_TRY(read_template_part(&reader, json, parts[FSDP_PART_POST_PROCESSOR], err));
    rules_out->cuts_words = rules_out->cuts_words || reader.cuts;
    rules_out->before = rules.before;
    rules_out->after = rules.after;
    return FSDP_OK;
}

/* --- WordPiece ------------------------------------------------------------------------------ */

/* BERT's normalizer: a flag that is absent is set. */
static fsdp_status read_bert_normalizer(const rules_reader *reader, const fsdp_json *json,
                                        fsdp_json_part part, fsdp_wordpiece_rules *rules,
                                        fsdp_error *err)
{
    static const char *const names[] = {"lowercase", "strip_accents", "clean_text",
                                        "handle_chinese_chars"};
    fsdp_json_members members = {names, 4, 0};
    fsdp_json_part parts[4] = {0};
    char type[FSDP_PART_TYPE];
    bool strips = false, cleans = true, cuts_chinese = true;
    FSDP_TRY(type_of(json, part, type, err));
    if (strcmp(type, "BertNormalizer") != 0)
        return refuse(reader, json, "normalizer", part.at ? type : "null", err);
    FSDP_TRY(read_members(json, part, &members, parts, err));
    rules->lowercase = true;
    FSDP_TRY(read_flag(json, parts[0], &rules->lowercase, err));
    FSDP_TRY(read_flag(json, parts[1], &strips, err));
    FSDP_TRY(read_flag(json, parts[2], &cleans, err));
    FSDP_TRY(read_flag(json, parts[3], &cuts_chinese, err));
    rules->strips_accents = parts[1].at ? strips : -1;
    if (!cleans || !cuts_chinese)
        return refuse(reader, json, "normalizer without",
                      cleans ? "handle_chinese_chars" : "clean_text", err);
    return FSDP_OK;
}

static fsdp_status check_bert_words(const rules_reader *reader, const fsdp_json *json,
                                    fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    FSDP_TRY(type_of(json, part, type, err));
    return strcmp(type, "BertPreTokenizer") == 0
               ? FSDP_OK
               : refuse(reader, json, "pre-tokenizer", part.at ? type : "null", err);
}

static fsdp_status read_pieces(const rules_reader *reader, const fsdp_json *json,
                               fsdp_json_part part, fsdp_wordpiece_rules *rules, fsdp_error *err)
{
    static const char *const names[] = {"continuing_subword_prefix", "unk_token"};
    fsdp_json_members members = {names, 2, 0};
    fsdp_json_part parts[2] = {0};
    char *prefix, *unknown = NULL;
    size_t size;
    FSDP_TRY(read_members(json, part, &members, parts, err));
    FSDP_TRY(read_string(json, parts[0], &prefix, &size, err));
    fsdp_status st = read_string(json, parts[1], &unknown, &size, err);
    if (st == FSDP_OK && strcmp(prefix, "##") != 0)
        st = refuse(reader, json, "continuing_subword_prefix", prefix, err);
    else if (st == FSDP_OK && (size == 0 || size >= sizeof rules->unknown))
        st = refuse(reader, json, "unk_token", unknown, err);
    else if (st == FSDP_OK)
        memcpy(rules->unknown, unknown, size + 1);
    fsdp_free(unknown);
    fsdp_free(prefix);
    return st;
}

fsdp_status fsdp_tokenizer_json_wordpiece(const fsdp_tokenizer_json *file,
                                          fsdp_wordpiece_rules *rules_out, fsdp_error *err)
{
    const fsdp_json *json = &file->json;
    const fsdp_json_part *parts = file->parts;
    fsdp_text_rules around = {.normalizes = false};
    rules_reader reader = {.rules = &around, .model = "WordPiece"};
    *rules_out = (fsdp_wordpiece_rules){.lowercase = true};
    FSDP_TRY(read_bert_normalizer(&reader, json, parts[FSDP_PART_NORMALIZER], rules_out, err));
    FSDP_TRY(check_bert_words(&reader, json, parts[FSDP_PART_PRE_TOKENIZER], err));
    FSDP_TRY(read_template_part(&reader, json, parts[FSDP_PART_POST_PROCESSOR], err));
    if (around.before.count != 1 || around.after.count != 1)
        return refuse(&reader, json, "template without", "a token on each side of the text", err);
    rules_out->before = around.before.ids[0];
    rules_out->after = around.after.ids[0];
    return read_pieces(&reader, json, parts[FSDP_PART_MODEL], rules_out, err);
}

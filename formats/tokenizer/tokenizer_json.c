/*
 * The members of a tokenizer.json, and its lists: tokens, merges and added tokens. See tokenizer_json.h.
 * Members may stand in any order: a first pass finds them, and the caller's calls read them.
 */
#include "formats/tokenizer_json.h"

#include "base/core/mem.h"
#include "formats/tokenizer/json_part.h"

#include <string.h>

/* Copies a string of JSON, which lives until the next call of the reader. */
static fsdp_status keep(fsdp_text *text, const char *data, size_t size, fsdp_error *err)
{
    fsdp_text_add(text, data, size);
    return text->failed ? fsdp_fail_memory(err, "a token") : FSDP_OK;
}

static fsdp_status keep_string(fsdp_json *json, fsdp_text *text, fsdp_error *err)
{
    const char *data;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &data, &size, err));
    return keep(text, data, size, err);
}

/* --- the model's members ---------------------------------------------------------------------- */

/* Whether a text is neither null nor empty. */
static fsdp_status take_presence(fsdp_json *json, bool *is_there_out, fsdp_error *err)
{
    const char *text;
    size_t size;
    if (fsdp_json_peek(json) == FSDP_JSON_NULL)
        return fsdp_json_null(json, err);
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    *is_there_out = size > 0;
    return FSDP_OK;
}

static fsdp_status take_dropout(fsdp_json *json, bool *is_there_out, fsdp_error *err)
{
    double dropout;
    if (fsdp_json_peek(json) == FSDP_JSON_NULL)
        return fsdp_json_null(json, err);
    FSDP_TRY(fsdp_json_f64(json, &dropout, err));
    *is_there_out = dropout != 0;
    return FSDP_OK;
}

static fsdp_status take_unknown(fsdp_json *json, bool *is_there_out, fsdp_error *err)
{
    *is_there_out = fsdp_json_peek(json) != FSDP_JSON_NULL;
    return fsdp_json_skip(json, err);
}

enum {
    TYPE,
    DROPOUT,
    UNKNOWN,
    UNKNOWN_ID,
    PREFIX,
    SUFFIX,
    FALLBACK,
    IGNORE_MERGES,
    VOCAB,
    MERGES,
    MEMBERS
};

static fsdp_status take_member(fsdp_tokenizer_model *model, fsdp_json *json, int which,
                               fsdp_error *err)
{
    switch (which) {
    case TYPE: return fsdp_json_take_type(json, model->type, err);
    case DROPOUT: return take_dropout(json, &model->has_dropout, err);
    case UNKNOWN: return take_unknown(json, &model->has_unknown, err);
    case UNKNOWN_ID:
        return fsdp_json_peek(json) == FSDP_JSON_NULL
                   ? fsdp_json_null(json, err)
                   : fsdp_json_i64(json, &model->unknown_id, err);
    case PREFIX: return take_presence(json, &model->has_prefix, err);
    case SUFFIX: return take_presence(json, &model->has_suffix, err);
    case FALLBACK: return fsdp_json_bool(json, &model->byte_fallback, err);
    case IGNORE_MERGES: return fsdp_json_bool(json, &model->ignore_merges, err);
    case VOCAB:
        model->is_scored = fsdp_json_peek(json) == FSDP_JSON_ARRAY;
        return fsdp_json_take_part(json, &model->vocab, err);
    default: return fsdp_json_take_part(json, &model->merges, err);
    }
}

static fsdp_status read_model(fsdp_tokenizer_model *model, fsdp_json *json, fsdp_error *err)
{
    static const char *const names[] = {"type",
                                        "dropout",
                                        "unk_token",
                                        "unk_id",
                                        "continuing_subword_prefix",
                                        "end_of_word_suffix",
                                        "byte_fallback",
                                        "ignore_merges",
                                        "vocab",
                                        "merges"};
    fsdp_json_members members = {names, MEMBERS, 0};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        FSDP_TRY(take_member(model, json, which, err));
    }
}

/* --- the file's members ----------------------------------------------------------------------- */

static fsdp_status find_parts(fsdp_json *json, fsdp_json_part parts[FSDP_PARTS], fsdp_error *err)
{
    static const char *const names[] = {"added_tokens",   "normalizer", "pre_tokenizer",
                                        "post_processor", "decoder",    "model"};
    fsdp_json_members members = {names, FSDP_PARTS, 0};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return fsdp_json_finish(json, err);
        FSDP_TRY(fsdp_json_take_part(json, &parts[which], err));
    }
}

fsdp_status fsdp_tokenizer_json_open(fsdp_tokenizer_json *file, const char *text, size_t size,
                                     const char *path, fsdp_error *err)
{
    *file = (fsdp_tokenizer_json){.model.unknown_id = -1};
    fsdp_json_init(&file->json, text, size, path);
    FSDP_TRY(find_parts(&file->json, file->parts, err));
    file->has_model = file->parts[FSDP_PART_MODEL].at != NULL;
    if (!file->has_model)
        return FSDP_OK;
    fsdp_json json = fsdp_json_part_open(&file->json, file->parts[FSDP_PART_MODEL]);
    fsdp_status status = read_model(&file->model, &json, err);
    fsdp_json_release(&json);
    return status;
}

void fsdp_tokenizer_json_release(fsdp_tokenizer_json *file)
{
    fsdp_json_release(&file->json);
}

fsdp_status fsdp_tokenizer_refuse(const fsdp_json *json, const char *what, const char *name,
                                  fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s': the %s '%s' is not supported; only byte-level BPE is, as GPT-2, Llama "
                     "3 and Qwen2 use it",
                     json->name, what, fsdp_printable(name, strlen(name), shown, sizeof shown));
}

/* --- items of a list -------------------------------------------------------------------------- */

/* Reads the items of one part, and hands each to the caller. */
typedef struct item_reader {
    fsdp_json json;
    fsdp_text text; /* of the item */
    void *context;  /* of the caller's function, which is one of these */
    fsdp_take_token take_token;
    fsdp_take_merge take_merge;
    fsdp_take_added take_added;
} item_reader;

static fsdp_status read_part(item_reader *reader, const fsdp_json *whole, fsdp_json_part part,
                             fsdp_status (*read)(item_reader *reader, fsdp_error *err),
                             fsdp_error *err)
{
    if (!part.at)
        return FSDP_OK;
    reader->json = fsdp_json_part_open(whole, part);
    fsdp_status status = read(reader, err);
    fsdp_json_release(&reader->json);
    fsdp_text_release(&reader->text);
    return status;
}

/* {"a": 0, ...} */
static fsdp_status read_tokens(item_reader *reader, fsdp_error *err)
{
    fsdp_json *json = &reader->json;
    if (fsdp_json_peek(json) != FSDP_JSON_OBJECT)
        return fsdp_json_fail(json, err, "the vocabulary is not an object");
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        const char *key;
        fsdp_file_token token = {.score = 0};
        bool more;
        FSDP_TRY(fsdp_json_next_key(json, &key, &token.size, &more, err));
        if (!more)
            return FSDP_OK;
        reader->text.size = 0;
        FSDP_TRY(keep(&reader->text, key, token.size, err));
        FSDP_TRY(fsdp_json_i64(json, &token.id, err));
        token.text = reader->text.data;
        FSDP_TRY(reader->take_token(reader->context, json, &token, err));
    }
}

/* ["<unk>", 0.0] */
static fsdp_status read_scored_token(item_reader *reader, fsdp_file_token *token, fsdp_error *err)
{
    fsdp_json *json = &reader->json;
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    FSDP_TRY(fsdp_json_next_item(json, &more, err));
    reader->text.size = 0;
    FSDP_TRY(keep_string(json, &reader->text, err));
    FSDP_TRY(fsdp_json_next_item(json, &more, err));
    FSDP_TRY(fsdp_json_f64(json, &token->score, err));
    FSDP_TRY(fsdp_json_next_item(json, &more, err));
    if (more)
        return fsdp_json_fail(json, err, "a token with its score has a third item");
    token->text = reader->text.data;
    token->size = reader->text.size;
    return FSDP_OK;
}

/* Unigram: [["<unk>", 0.0], ["a", -3.5], ...] */
static fsdp_status read_scored_tokens(item_reader *reader, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(&reader->json, err));
    for (int64_t id = 0;; id++) {
        fsdp_file_token token = {.id = id};
        FSDP_TRY(fsdp_json_next_item(&reader->json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(read_scored_token(reader, &token, err));
        FSDP_TRY(reader->take_token(reader->context, &reader->json, &token, err));
    }
}

fsdp_status fsdp_tokenizer_json_tokens(const fsdp_tokenizer_json *file, fsdp_take_token take,
                                       void *context, fsdp_error *err)
{
    item_reader reader = {.context = context, .take_token = take};
    return read_part(&reader, &file->json, file->model.vocab,
                     file->model.is_scored ? read_scored_tokens : read_tokens, err);
}

/* ["a", "b"] */
static fsdp_status read_merge_pair(item_reader *reader, fsdp_file_merge *merge, fsdp_error *err)
{
    fsdp_json *json = &reader->json;
    int count = 0;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (bool more;; count++) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            break;
        if (count == 1)
            merge->first_size = reader->text.size;
        FSDP_TRY(keep_string(json, &reader->text, err));
    }
    return count == 2 ? FSDP_OK : fsdp_json_fail(json, err, "a merge has %d parts, not 2", count);
}

/* "a b" */
static fsdp_status split_merge_line(item_reader *reader, fsdp_file_merge *merge, fsdp_error *err)
{
    fsdp_text *text = &reader->text;
    char *space = memchr(text->data, ' ', text->size);
    merge->first_size = space ? (size_t)(space - text->data) : text->size;
    if (!space || memchr(space + 1, ' ', text->size - merge->first_size - 1))
        return fsdp_json_fail(&reader->json, err, "a merge is not two parts with a space between");
    memmove(space, space + 1, text->size - merge->first_size);
    text->size--;
    return FSDP_OK;
}

/* The first line may be a version, as in merges.txt. */
static fsdp_status read_merges(item_reader *reader, fsdp_error *err)
{
    fsdp_json *json = &reader->json;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        fsdp_file_merge merge = {.first_size = 0};
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        reader->text.size = 0;
        if (fsdp_json_peek(json) == FSDP_JSON_ARRAY) {
            FSDP_TRY(read_merge_pair(reader, &merge, err));
        } else {
            FSDP_TRY(keep_string(json, &reader->text, err));
            if (strncmp(reader->text.data, "#version", 8) == 0)
                continue;
            FSDP_TRY(split_merge_line(reader, &merge, err));
        }
        merge.text = reader->text.data;
        merge.size = reader->text.size;
        FSDP_TRY(reader->take_merge(reader->context, json, &merge, err));
    }
}

fsdp_status fsdp_tokenizer_json_merges(const fsdp_tokenizer_json *file, fsdp_take_merge take,
                                       void *context, fsdp_error *err)
{
    item_reader reader = {.context = context, .take_merge = take};
    return read_part(&reader, &file->json, file->model.merges, read_merges, err);
}

/* --- added tokens ----------------------------------------------------------------------------- */

enum { ID, CONTENT, SINGLE_WORD, LSTRIP, RSTRIP, NORMALIZED, SPECIAL, ADDED_MEMBERS };

static fsdp_status take_added_member(fsdp_json *json, int which, fsdp_text *text,
                                     fsdp_added_token *added, fsdp_error *err)
{
    switch (which) {
    case ID: return fsdp_json_i64(json, &added->id, err);
    case CONTENT: return keep_string(json, text, err);
    case SINGLE_WORD: return fsdp_json_bool(json, &added->single_word, err);
    case LSTRIP: return fsdp_json_bool(json, &added->lstrip, err);
    case RSTRIP: return fsdp_json_bool(json, &added->rstrip, err);
    case NORMALIZED: return fsdp_json_bool(json, &added->normalized, err);
    default: return fsdp_json_bool(json, &added->special, err);
    }
}

fsdp_status fsdp_read_added_token(fsdp_json *json, fsdp_text *text, fsdp_added_token *added_out,
                                  fsdp_error *err)
{
    static const char *const names[] = {"id",     "content",    "single_word", "lstrip",
                                        "rstrip", "normalized", "special"};
    fsdp_json_members members = {names, ADDED_MEMBERS, 0};
    *added_out = (fsdp_added_token){.id = -1};
    text->size = 0;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        FSDP_TRY(take_added_member(json, which, text, added_out, err));
    }
    if (!(members.seen & 1u << CONTENT))
        return fsdp_json_fail(json, err, "an added token has no content");
    added_out->text = text->data;
    added_out->size = text->size;
    return FSDP_OK;
}

static fsdp_status read_added(item_reader *reader, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(&reader->json, err));
    for (;;) {
        bool more;
        fsdp_added_token added;
        FSDP_TRY(fsdp_json_next_item(&reader->json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_read_added_token(&reader->json, &reader->text, &added, err));
        FSDP_TRY(reader->take_added(reader->context, &reader->json, &added, err));
    }
}

fsdp_status fsdp_tokenizer_json_added(const fsdp_tokenizer_json *file, fsdp_take_added take,
                                      void *context, fsdp_error *err)
{
    item_reader reader = {.context = context, .take_added = take};
    return read_part(&reader, &file->json, file->parts[FSDP_PART_ADDED], read_added, err);
}

/*
 * The tokenizer of a model as key-value pairs of GGUF: see gguf_values.h. tokenizer.json has the tokens
 * and merges, tokenizer_config.json the special ones and the chat template.
 */
#include "statedict/expect/gguf_vocab.h"

#include "base/data/json.h"
#include "base/text.h"

#include <string.h>

enum { LARGEST_FILE = 256 << 20, LARGEST_CONFIG = 16 << 20 };

/* --- tokens ----------------------------------------------------------------------------------- */

static fsdp_status take_vocab(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    const char *key;
    size_t size;
    int64_t id;
    bool more;
    if (fsdp_json_peek(json) != FSDP_JSON_OBJECT)
        return fsdp_json_fail(json, err, "the vocabulary is no object");
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        char *copy = fsdp_arena_strndup(&vocab->arena, key, size);
        if (!copy)
            return fsdp_fail_memory(err, vocab->path);
        FSDP_TRY(fsdp_json_i64(json, &id, err));
        fsdp_gguf_token like = {.score = FSDP_GGUF_NO_SCORE, .type = FSDP_GGUF_NORMAL};
        FSDP_TRY(fsdp_gguf_vocab_set(vocab, id, copy, size, &like, err));
    }
}

/* Unigram: [["<unk>", 0.0], ["a", -3.5], ...] */
static fsdp_status take_scores(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (int64_t id = 0;; id++) {
        const char *text;
        size_t size;
        fsdp_gguf_token like = {.type = FSDP_GGUF_NORMAL};
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_enter_array(json, err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        char *copy = fsdp_arena_strndup(&vocab->arena, text, size);
        if (!copy)
            return fsdp_fail_memory(err, vocab->path);
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        FSDP_TRY(fsdp_json_f64(json, &like.score, err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more)
            return fsdp_json_fail(json, err, "a token with its score has a third item");
        FSDP_TRY(fsdp_gguf_vocab_set(vocab, id, copy, size, &like, err));
    }
}

/* "a b", or ["a", "b"] */
static fsdp_status take_merge(fsdp_json *json, fsdp_text *out, fsdp_error *err)
{
    const char *text;
    size_t size;
    bool more;
    out->size = 0;
    if (fsdp_json_peek(json) == FSDP_JSON_STRING) {
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        fsdp_text_add(out, text, size);
        return FSDP_OK;
    }
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (int i = 0;; i++) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        if (i > 0)
            fsdp_text_add(out, " ", 1);
        fsdp_text_add(out, text, size);
    }
}

static fsdp_status take_merges(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = fsdp_json_enter_array(json, err);
    for (bool more = true; st == FSDP_OK;) {
        st = fsdp_json_next_item(json, &more, err);
        if (st != FSDP_OK || !more)
            break;
        st = take_merge(json, &text, err);
        char *copy =
            st == FSDP_OK && !text.failed
                ? fsdp_arena_strndup(&vocab->arena, text.size > 0 ? text.data : "", text.size)
                : NULL;
        if (st == FSDP_OK && (!copy || !fsdp_grow(&vocab->merges, &vocab->merge_capacity,
                                                  vocab->merge_count + 1, sizeof *vocab->merges)))
            st = fsdp_fail_memory(err, vocab->path);
        if (st == FSDP_OK)
            vocab->merges[vocab->merge_count++] = copy;
    }
    fsdp_text_release(&text);
    return st;
}

static fsdp_status take_model(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    static const char *const names[] = {"vocab", "merges", "byte_fallback"};
    fsdp_json_members members = {.names = names, .count = 3};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        bool is_list = fsdp_json_peek(json) == FSDP_JSON_ARRAY;
        vocab->is_unigram = vocab->is_unigram || (which == 0 && is_list);
        if (which == 0)
            FSDP_TRY(is_list ? take_scores(json, vocab, err) : take_vocab(json, vocab, err));
        else if (which == 1)
            FSDP_TRY(take_merges(json, vocab, err));
        else if (fsdp_json_peek(json) == FSDP_JSON_BOOL)
            FSDP_TRY(fsdp_json_bool(json, &vocab->has_bytes, err));
        else
            FSDP_TRY(fsdp_json_skip(json, err));
    }
}

static fsdp_status take_added(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    static const char *const names[] = {"id", "content", "special"};
    fsdp_json_members members = {.names = names, .count = 3};
    int64_t id = -1;
    bool is_special = false;
    const char *text = NULL;
    size_t size = 0;
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        if (which == 0)
            FSDP_TRY(fsdp_json_i64(json, &id, err));
        else if (which == 2)
            FSDP_TRY(fsdp_json_bool(json, &is_special, err));
        else {
            FSDP_TRY(fsdp_json_string(json, &text, &size, err));
            text = fsdp_arena_strndup(&vocab->arena, text, size);
            if (!text)
                return fsdp_fail_memory(err, vocab->path);
        }
    }
    if (!text)
        return fsdp_json_fail(json, err, "an added token has no content");
    fsdp_gguf_token like = {.score = FSDP_GGUF_NO_SCORE,
                            .type = is_special ? FSDP_GGUF_CONTROL : FSDP_GGUF_USER_DEFINED};
    return fsdp_gguf_vocab_set(vocab, id, text, size, &like, err);
}

static fsdp_status read_tokenizer(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    static const char *const names[] = {"model", "added_tokens"};
    fsdp_json_members members = {.names = names, .count = 2};
    int which;
    bool more;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return fsdp_json_finish(json, err);
        if (which == 0) {
            FSDP_TRY(take_model(json, vocab, err));
            continue;
        }
        FSDP_TRY(fsdp_json_enter_array(json, err));
        for (;;) {
            FSDP_TRY(fsdp_json_next_item(json, &more, err));
            if (!more)
                break;
            FSDP_TRY(take_added(json, vocab, err));
        }
    }
}

/* --- tokenizer_config.json -------------------------------------------------------------------- */

static void note_special(fsdp_gguf_vocab *vocab, fsdp_gguf_special which, const char *text,
                         size_t size)
{
    const uint64_t *id = fsdp_name_table_find(&vocab->ids, text, size);
    if (id)
        vocab->ids_of[which] = (int64_t)*id;
}

/* "<s>", or {"content": "<s>", ...} */
static fsdp_status take_special(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_gguf_special which,
                                fsdp_error *err)
{
    static const char *const names[] = {"content"};
    fsdp_json_members members = {.names = names, .count = 1};
    const char *text;
    size_t size;
    int member;
    if (fsdp_json_peek(json) == FSDP_JSON_STRING) {
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        note_special(vocab, which, text, size);
        return FSDP_OK;
    }
    if (fsdp_json_peek(json) != FSDP_JSON_OBJECT)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &member, err));
        if (member < 0)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        note_special(vocab, which, text, size);
    }
}

static fsdp_status take_bool(fsdp_json *json, const char *key, fsdp_named_values *out,
                             fsdp_error *err)
{
    bool answer;
    if (fsdp_json_peek(json) != FSDP_JSON_BOOL)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_bool(json, &answer, err));
    fsdp_value value = fsdp_value_bool(answer);
    return fsdp_named_values_add(out, key, &value, err);
}

static fsdp_status take_template(fsdp_json *json, fsdp_named_values *out, fsdp_error *err)
{
    const char *text;
    size_t size;
    fsdp_value value = {.kind = FSDP_VALUE_NULL};
    if (fsdp_json_peek(json) != FSDP_JSON_STRING)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    FSDP_TRY(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, text, size, err));
    return fsdp_named_values_add(out, "tokenizer.chat_template", &value, err);
}

static fsdp_status read_config(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_named_values *out,
                               fsdp_error *err)
{
    enum { ADD_BOS = FSDP_GGUF_SPECIALS, ADD_EOS, TEMPLATE, MEMBERS };
    static const char *const names[MEMBERS] = {"bos_token",     "eos_token",    "unk_token",
                                               "pad_token",     "sep_token",    "add_bos_token",
                                               "add_eos_token", "chat_template"};
    fsdp_json_members members = {.names = names, .count = MEMBERS};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return fsdp_json_finish(json, err);
        if (which < FSDP_GGUF_SPECIALS)
            FSDP_TRY(take_special(json, vocab, (fsdp_gguf_special)which, err));
        else if (which == TEMPLATE)
            FSDP_TRY(take_template(json, out, err));
        else
            FSDP_TRY(take_bool(json,
                               which == ADD_BOS ? "tokenizer.ggml.add_bos_token"
                                                : "tokenizer.ggml.add_eos_token",
                               out, err));
    }
}

/* --- the files -------------------------------------------------------------------------------- */

static fsdp_status read_json(const char *text, size_t size, bool is_config, fsdp_gguf_vocab *vocab,
                             fsdp_named_values *out, fsdp_error *err)
{
    fsdp_json json;
    fsdp_json_init(&json, text, size, vocab->path);
    fsdp_status st =
        is_config ? read_config(&json, vocab, out, err) : read_tokenizer(&json, vocab, err);
    fsdp_json_release(&json);
    return st;
}

/* A file that is not there holds nothing. */
static fsdp_status take_file(fsdp_io *io, const char *directory, bool is_config,
                             fsdp_gguf_vocab *vocab, fsdp_named_values *out, fsdp_error *err)
{
    char *text = NULL;
    char *path = fsdp_path_join(directory, is_config ? "tokenizer_config.json" : "tokenizer.json");
    size_t size = 0, most = is_config ? LARGEST_CONFIG : LARGEST_FILE;
    fsdp_status st = FSDP_OK;
    if (!path)
        return fsdp_fail_memory(err, directory);
    vocab->path = path;
    if (fsdp_io_exists(io, path)) {
        st = fsdp_io_read_file(io, path, most, &text, &size, err);
        if (st == FSDP_OK)
            st = read_json(text, size, is_config, vocab, out, err);
    }
    fsdp_free(text);
    vocab->path = directory;
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_gguf_tokenizer(fsdp_io *io, const char *directory, const fsdp_gguf_tokens *tokens,
                                fsdp_named_values *out, fsdp_error *err)
{
    fsdp_gguf_vocab vocab;
    fsdp_gguf_vocab_init(&vocab);
    fsdp_status st = take_file(io, directory, false, &vocab, out, err);
    if (st == FSDP_OK && vocab.count > 0)
        st = take_file(io, directory, true, &vocab, out, err);
    if (st == FSDP_OK && vocab.count > 0)
        st = fsdp_gguf_vocab_pairs(&vocab, tokens, out, err);
    fsdp_gguf_vocab_release(&vocab);
    return st;
}

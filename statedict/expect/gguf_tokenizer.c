/*
 * The tokenizer of a model as key-value pairs of GGUF: see gguf_values.h. tokenizer.json has the tokens
 * and merges, tokenizer_config.json the special ones and the chat template.
 */
#include "statedict/expect/gguf_values.h"

#include "base/core/mem.h"
#include "base/data/json.h"
#include "base/data/name_table.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MOST_TOKENS = 4 << 20, LARGEST_FILE = 256 << 20, LARGEST_CONFIG = 16 << 20 };

/* Types of tokens, as llama.cpp numbers them. */
enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };

/* The score of a token that no merge makes; those of merges are above it. */
static const double no_score = -1e6;

typedef struct vocab_token {
    char *text; /* NULL: no token has this number */
    size_t size;
    double score;
    int type;
} vocab_token;

typedef enum special_token { BOS, EOS, UNK, PAD, SEP, SPECIALS } special_token;

static const struct {
    const char *member, *key;
} specials[SPECIALS] = {
    {"bos_token", "tokenizer.ggml.bos_token_id"},
    {"eos_token", "tokenizer.ggml.eos_token_id"},
    {"unk_token", "tokenizer.ggml.unknown_token_id"},
    {"pad_token", "tokenizer.ggml.padding_token_id"},
    {"sep_token", "tokenizer.ggml.seperator_token_id"}}; /* llama.cpp's spelling */

typedef struct vocab {
    const char *path;
    fsdp_arena arena;
    fsdp_name_table ids; /* of tokens */
    vocab_token *tokens;
    size_t count, capacity;
    char **merges;
    size_t merge_count, merge_capacity;
    bool is_unigram, has_bytes; /* the model "Unigram"; tokens <0x00> for bytes */
    int64_t ids_of[SPECIALS];   /* -1: none */
} vocab;

/* --- tokens ----------------------------------------------------------------------------------- */

static fsdp_status set_token(vocab *all, int64_t id, const char *text, size_t size,
                             const vocab_token *like, fsdp_error *err)
{
    char shown[100];
    if (id < 0 || id >= MOST_TOKENS)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': token '%s' has the number %" PRId64,
                         all->path, fsdp_printable(text, size, shown, sizeof shown), id);
    size_t need = (size_t)id + 1, before = all->count;
    if (!fsdp_grow(&all->tokens, &all->capacity, need, sizeof *all->tokens))
        return fsdp_fail_memory(err, all->path);
    for (; all->count < need; all->count++)
        all->tokens[all->count] = (vocab_token){.text = NULL};
    vocab_token *token = &all->tokens[id];
    bool is_new = (size_t)id >= before || !token->text;
    *token =
        (vocab_token){.text = is_new ? fsdp_arena_strndup(&all->arena, text, size) : token->text,
                      .size = is_new ? size : token->size,
                      .score = like->score,
                      .type = like->type};
    if (!token->text)
        return fsdp_fail_memory(err, all->path);
    if (!fsdp_name_table_find(&all->ids, token->text, token->size) &&
        !fsdp_name_table_put(&all->ids, token->text, token->size, (uint64_t)id))
        return fsdp_fail_memory(err, all->path);
    return FSDP_OK;
}

/* "<0x0A>" */
static bool is_byte(const char *text, size_t size)
{
    return size == 6 && memcmp(text, "<0x", 3) == 0 && text[5] == '>' &&
           strspn(text + 3, "0123456789ABCDEFabcdef") == 2;
}

static fsdp_status take_vocab(fsdp_json *json, vocab *all, fsdp_error *err)
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
        char *copy = fsdp_arena_strndup(&all->arena, key, size);
        if (!copy)
            return fsdp_fail_memory(err, all->path);
        FSDP_TRY(fsdp_json_i64(json, &id, err));
        vocab_token like = {.score = no_score, .type = NORMAL};
        FSDP_TRY(set_token(all, id, copy, size, &like, err));
    }
}

/* Unigram: [["<unk>", 0.0], ["a", -3.5], ...] */
static fsdp_status take_scores(fsdp_json *json, vocab *all, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (int64_t id = 0;; id++) {
        const char *text;
        size_t size;
        vocab_token like = {.type = NORMAL};
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_enter_array(json, err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        char *copy = fsdp_arena_strndup(&all->arena, text, size);
        if (!copy)
            return fsdp_fail_memory(err, all->path);
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        FSDP_TRY(fsdp_json_f64(json, &like.score, err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more)
            return fsdp_json_fail(json, err, "a token with its score has a third item");
        FSDP_TRY(set_token(all, id, copy, size, &like, err));
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

static fsdp_status take_merges(fsdp_json *json, vocab *all, fsdp_error *err)
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
                ? fsdp_arena_strndup(&all->arena, text.size > 0 ? text.data : "", text.size)
                : NULL;
        if (st == FSDP_OK && (!copy || !fsdp_grow(&all->merges, &all->merge_capacity,
                                                  all->merge_count + 1, sizeof *all->merges)))
            st = fsdp_fail_memory(err, all->path);
        if (st == FSDP_OK)
            all->merges[all->merge_count++] = copy;
    }
    fsdp_text_release(&text);
    return st;
}

static fsdp_status take_model(fsdp_json *json, vocab *all, fsdp_error *err)
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
        all->is_unigram = all->is_unigram || (which == 0 && is_list);
        if (which == 0)
            FSDP_TRY(is_list ? take_scores(json, all, err) : take_vocab(json, all, err));
        else if (which == 1)
            FSDP_TRY(take_merges(json, all, err));
        else if (fsdp_json_peek(json) == FSDP_JSON_BOOL)
            FSDP_TRY(fsdp_json_bool(json, &all->has_bytes, err));
        else
            FSDP_TRY(fsdp_json_skip(json, err));
    }
}

static fsdp_status take_added(fsdp_json *json, vocab *all, fsdp_error *err)
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
            text = fsdp_arena_strndup(&all->arena, text, size);
            if (!text)
                return fsdp_fail_memory(err, all->path);
        }
    }
    if (!text)
        return fsdp_json_fail(json, err, "an added token has no content");
    vocab_token like = {.score = no_score, .type = is_special ? CONTROL : USER_DEFINED};
    return set_token(all, id, text, size, &like, err);
}

static fsdp_status read_tokenizer(fsdp_json *json, vocab *all, fsdp_error *err)
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
            FSDP_TRY(take_model(json, all, err));
            continue;
        }
        FSDP_TRY(fsdp_json_enter_array(json, err));
        for (;;) {
            FSDP_TRY(fsdp_json_next_item(json, &more, err));
            if (!more)
                break;
            FSDP_TRY(take_added(json, all, err));
        }
    }
}

/* --- tokenizer_config.json -------------------------------------------------------------------- */

static void note_special(vocab *all, special_token which, const char *text, size_t size)
{
    const uint64_t *id = fsdp_name_table_find(&all->ids, text, size);
    if (id)
        all->ids_of[which] = (int64_t)*id;
}

/* "<s>", or {"content": "<s>", ...} */
static fsdp_status take_special(fsdp_json *json, vocab *all, special_token which, fsdp_error *err)
{
    static const char *const names[] = {"content"};
    fsdp_json_members members = {.names = names, .count = 1};
    const char *text;
    size_t size;
    int member;
    if (fsdp_json_peek(json) == FSDP_JSON_STRING) {
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        note_special(all, which, text, size);
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
        note_special(all, which, text, size);
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

static fsdp_status read_config(fsdp_json *json, vocab *all, fsdp_named_values *out, fsdp_error *err)
{
    enum { ADD_BOS = SPECIALS, ADD_EOS, TEMPLATE, MEMBERS };
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
        if (which < SPECIALS)
            FSDP_TRY(take_special(json, all, (special_token)which, err));
        else if (which == TEMPLATE)
            FSDP_TRY(take_template(json, out, err));
        else
            FSDP_TRY(take_bool(json,
                               which == ADD_BOS ? "tokenizer.ggml.add_bos_token"
                                                : "tokenizer.ggml.add_eos_token",
                               out, err));
    }
}

/* --- pairs ------------------------------------------------------------------------------------ */

/* llama.cpp merges the pair first whose token has the highest score. That is the first merge of
 * tokenizer.json when a token's score counts down with the merge that makes it, as in SentencePiece's own
 * files. */
static fsdp_status score_merges(vocab *all, fsdp_error *err)
{
    fsdp_text text = {0};
    for (size_t i = all->merge_count; i-- > 0;) {
        char *merge = all->merges[i], *space = strchr(merge, ' ');
        if (!space)
            continue;
        text.size = 0;
        fsdp_text_add(&text, merge, (size_t)(space - merge));
        fsdp_text_addf(&text, "%s", space + 1);
        const uint64_t *id =
            text.failed ? NULL : fsdp_name_table_find(&all->ids, text.data, text.size);
        if (id && all->tokens[*id].type == NORMAL)
            all->tokens[*id].score = -(double)i;
    }
    bool has_failed = text.failed;
    fsdp_text_release(&text);
    return has_failed ? fsdp_fail_memory(err, all->path) : FSDP_OK;
}

/* A vocabulary that is padded has tokens of no text for the rest of its rows. */
static fsdp_status pad(vocab *all, int64_t vocab_size, fsdp_error *err)
{
    size_t rows = vocab_size > 0 && vocab_size <= MOST_TOKENS ? (size_t)vocab_size : 0;
    for (size_t id = 0; id < all->count || id < rows; id++) {
        char name[32];
        if (id < all->count && all->tokens[id].text)
            continue;
        snprintf(name, sizeof name, "[PAD%zu]", id);
        vocab_token like = {.score = no_score, .type = UNUSED};
        FSDP_TRY(set_token(all, (int64_t)id, name, strlen(name), &like, err));
    }
    return FSDP_OK;
}

static fsdp_status begin_list(fsdp_value *list, size_t count, fsdp_error *err)
{
    *list = (fsdp_value){.kind = FSDP_VALUE_NULL};
    return fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err);
}

static fsdp_status add_tokens(const vocab *all, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    FSDP_TRY(begin_list(&list, all->count, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < all->count && st == FSDP_OK; i++)
        st = fsdp_value_set_bytes(&list.as.list.items[i], FSDP_VALUE_STRING, all->tokens[i].text,
                                  all->tokens[i].size, err);
    if (st == FSDP_OK)
        return fsdp_named_values_add(out, "tokenizer.ggml.tokens", &list, err);
    fsdp_value_release(&list);
    return st;
}

static fsdp_status add_types(const vocab *all, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    bool has_bytes = all->has_bytes || all->is_unigram;
    FSDP_TRY(begin_list(&list, all->count, err));
    for (size_t i = 0; i < all->count; i++) {
        const vocab_token *token = &all->tokens[i];
        int type = token->type == NORMAL && has_bytes && is_byte(token->text, token->size)
                       ? BYTE
                       : token->type;
        if (has_bytes && (int64_t)i == all->ids_of[UNK])
            type = UNKNOWN;
        list.as.list.items[i] = fsdp_value_i64(type);
    }
    return fsdp_named_values_add(out, "tokenizer.ggml.token_type", &list, err);
}

static fsdp_status add_scores(const vocab *all, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    FSDP_TRY(begin_list(&list, all->count, err));
    for (size_t i = 0; i < all->count; i++)
        list.as.list.items[i] = fsdp_value_f64((double)(float)all->tokens[i].score);
    return fsdp_named_values_add(out, "tokenizer.ggml.scores", &list, err);
}

static fsdp_status add_merges(const vocab *all, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    FSDP_TRY(begin_list(&list, all->merge_count, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < all->merge_count && st == FSDP_OK; i++)
        st = fsdp_value_set_bytes(&list.as.list.items[i], FSDP_VALUE_STRING, all->merges[i],
                                  strlen(all->merges[i]), err);
    if (st == FSDP_OK)
        return fsdp_named_values_add(out, "tokenizer.ggml.merges", &list, err);
    fsdp_value_release(&list);
    return st;
}

static fsdp_status add_text(fsdp_named_values *out, const char *key, const char *text,
                            fsdp_error *err)
{
    fsdp_value value = {.kind = FSDP_VALUE_NULL};
    FSDP_TRY(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, text, strlen(text), err));
    return fsdp_named_values_add(out, key, &value, err);
}

static fsdp_status add_vocab(vocab *all, const fsdp_gguf_tokens *tokens, fsdp_named_values *out,
                             fsdp_error *err)
{
    bool is_spm = all->is_unigram || all->has_bytes;
    FSDP_TRY(pad(all, tokens->vocab_size, err));
    if (all->has_bytes && !all->is_unigram)
        FSDP_TRY(score_merges(all, err));
    FSDP_TRY(add_text(out, "tokenizer.ggml.model", is_spm ? "llama" : "gpt2", err));
    FSDP_TRY(add_text(out, "tokenizer.ggml.pre", is_spm ? "default" : tokens->pre, err));
    FSDP_TRY(add_tokens(all, out, err));
    if (is_spm)
        FSDP_TRY(add_scores(all, out, err));
    FSDP_TRY(add_types(all, out, err));
    if (all->merge_count > 0)
        FSDP_TRY(add_merges(all, out, err));
    for (int i = 0; i < SPECIALS; i++) {
        int64_t id = all->ids_of[i];
        id = id < 0 && i == BOS ? tokens->bos : id < 0 && i == EOS ? tokens->eos : id;
        fsdp_value value = fsdp_value_i64(id);
        if (id >= 0)
            FSDP_TRY(fsdp_named_values_add(out, specials[i].key, &value, err));
    }
    return FSDP_OK;
}

/* --- the files -------------------------------------------------------------------------------- */

static fsdp_status read_json(const char *text, size_t size, bool is_config, vocab *all,
                             fsdp_named_values *out, fsdp_error *err)
{
    fsdp_json json;
    fsdp_json_init(&json, text, size, all->path);
    fsdp_status st =
        is_config ? read_config(&json, all, out, err) : read_tokenizer(&json, all, err);
    fsdp_json_release(&json);
    return st;
}

/* A file that is not there holds nothing. */
static fsdp_status take_file(fsdp_io *io, const char *directory, bool is_config, vocab *all,
                             fsdp_named_values *out, fsdp_error *err)
{
    char *text = NULL;
    char *path = fsdp_path_join(directory, is_config ? "tokenizer_config.json" : "tokenizer.json");
    size_t size = 0, most = is_config ? LARGEST_CONFIG : LARGEST_FILE;
    fsdp_status st = FSDP_OK;
    if (!path)
        return fsdp_fail_memory(err, directory);
    all->path = path;
    if (fsdp_io_exists(io, path)) {
        st = fsdp_io_read_file(io, path, most, &text, &size, err);
        if (st == FSDP_OK)
            st = read_json(text, size, is_config, all, out, err);
    }
    fsdp_free(text);
    all->path = directory;
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_gguf_tokenizer(fsdp_io *io, const char *directory, const fsdp_gguf_tokens *tokens,
                                fsdp_named_values *out, fsdp_error *err)
{
    vocab all = {.ids_of = {-1, -1, -1, -1, -1}};
    fsdp_status st = take_file(io, directory, false, &all, out, err);
    if (st == FSDP_OK && all.count > 0)
        st = take_file(io, directory, true, &all, out, err);
    if (st == FSDP_OK && all.count > 0)
        st = add_vocab(&all, tokens, out, err);
    fsdp_free(all.tokens);
    fsdp_free(all.merges);
    fsdp_name_table_release(&all.ids);
    fsdp_arena_release(&all.arena);
    return st;
}

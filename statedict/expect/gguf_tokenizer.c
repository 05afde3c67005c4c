/*
 * The tokenizer of a model as key-value pairs of GGUF: see gguf_values.h. tokenizer.json has the tokens
 * and merges, tokenizer_config.json the special ones and the chat template. A directory without
 * tokenizer.json has the tokens in tokenizer.model, added_tokens.json and tokenizer_config.json.
 */
#include "statedict/expect/gguf_vocab.h"

#include "base/data/json.h"
#include "base/text.h"
#include "formats/source.h"

#include <string.h>

enum { LARGEST_FILE = 256 << 20, LARGEST_CONFIG = 16 << 20 };

/* --- tokens ----------------------------------------------------------------------------------- */

/* A token of the model; one that is an added token, too, has the type of that, whichever comes first. */
static fsdp_status set_plain(fsdp_gguf_vocab *vocab, int64_t id, const char *text, size_t size,
                             double score, fsdp_error *err)
{
    fsdp_gguf_token like = {.score = score, .type = FSDP_GGUF_NORMAL};
    if (id >= 0 && id < (int64_t)vocab->count && vocab->tokens[id].text)
        like.type = vocab->tokens[id].type;
    return fsdp_gguf_vocab_set(vocab, id, text, size, &like, err);
}

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
        FSDP_TRY(set_plain(vocab, id, copy, size, FSDP_GGUF_NO_SCORE, err));
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
        double score;
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
        FSDP_TRY(fsdp_json_f64(json, &score, err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more)
            return fsdp_json_fail(json, err, "a token with its score has a third item");
        FSDP_TRY(set_plain(vocab, id, copy, size, score, err));
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
        st = fsdp_gguf_vocab_check_merges(vocab, err);
        if (st == FSDP_OK)
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

typedef struct added_token {
    int64_t id;
    const char *text;
    size_t size;
    bool is_special;
} added_token;

/* {"id": 3, "content": "<s>", "special": true, ...}; the id may stand elsewhere. */
static fsdp_status read_added(fsdp_json *json, fsdp_gguf_vocab *vocab, added_token *out,
                              fsdp_error *err)
{
    static const char *const names[] = {"id", "content", "special"};
    fsdp_json_members members = {.names = names, .count = 3};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        if (which == 0)
            FSDP_TRY(fsdp_json_i64(json, &out->id, err));
        else if (which == 2)
            FSDP_TRY(fsdp_json_bool(json, &out->is_special, err));
        else {
            FSDP_TRY(fsdp_json_string(json, &out->text, &out->size, err));
            out->text = fsdp_arena_strndup(&vocab->arena, out->text, out->size);
            if (!out->text)
                return fsdp_fail_memory(err, vocab->path);
        }
    }
    return out->text ? FSDP_OK : fsdp_json_fail(json, err, "an added token has no content");
}

static fsdp_status take_added(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    added_token token = {.id = -1};
    FSDP_TRY(read_added(json, vocab, &token, err));
    fsdp_gguf_token like = {.score = FSDP_GGUF_NO_SCORE,
                            .type = token.is_special ? FSDP_GGUF_CONTROL : FSDP_GGUF_USER_DEFINED};
    return fsdp_gguf_vocab_set(vocab, token.id, token.text, token.size, &like, err);
}

static fsdp_status read_tokenizer(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_named_values *out,
                                  fsdp_error *err)
{
    static const char *const names[] = {"model", "added_tokens"};
    fsdp_json_members members = {.names = names, .count = 2};
    int which;
    bool more;
    (void)out;
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

/* --- tokens beside tokenizer.model ------------------------------------------------------------ */

/* added_tokens.json: {"<tool>": 32000, ...} */
static fsdp_status read_added_list(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_named_values *out,
                                   fsdp_error *err)
{
    const char *key;
    size_t size;
    int64_t id;
    bool more;
    (void)out;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return fsdp_json_finish(json, err);
        char *copy = fsdp_arena_strndup(&vocab->arena, key, size);
        if (!copy)
            return fsdp_fail_memory(err, vocab->path);
        FSDP_TRY(fsdp_json_i64(json, &id, err));
        FSDP_TRY(fsdp_gguf_add_to_sentencepiece(vocab, id, copy, size, false, err));
    }
}

/* "32000" */
static fsdp_status read_id(const fsdp_json *json, const char *text, size_t size, int64_t *id_out,
                           fsdp_error *err)
{
    int64_t id = 0;
    for (size_t i = 0; i < size; i++) {
        if (text[i] < '0' || text[i] > '9' || i > 9)
            return fsdp_json_fail(json, err, "an added token has no number");
        id = 10 * id + (text[i] - '0');
    }
    *id_out = id;
    return size > 0 ? FSDP_OK : fsdp_json_fail(json, err, "an added token has no number");
}

/* added_tokens_decoder: {"32000": {"content": "<tool>", "special": false}, ...} */
static fsdp_status take_decoder(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    const char *key;
    size_t size;
    bool more;
    if (fsdp_json_peek(json) != FSDP_JSON_OBJECT)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        int64_t id;
        added_token token = {.id = -1};
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(read_id(json, key, size, &id, err));
        FSDP_TRY(read_added(json, vocab, &token, err));
        FSDP_TRY(fsdp_gguf_add_to_sentencepiece(vocab, id, token.text, token.size, token.is_special,
                                                err));
    }
}

/* --- tokenizer_config.json -------------------------------------------------------------------- */

typedef struct special_name {
    const char *text; /* NULL: none is named */
    size_t size;
} special_name;

/* Names of tokens that another member of the file may add only later. */
static void find_specials(fsdp_gguf_vocab *vocab, const special_name *names)
{
    for (int i = 0; i < FSDP_GGUF_SPECIALS; i++) {
        const uint64_t *id =
            names[i].text ? fsdp_name_table_find(&vocab->ids, names[i].text, names[i].size) : NULL;
        const fsdp_gguf_token *token = id ? &vocab->tokens[*id] : NULL;
        bool is_replaced = token && (token->size != names[i].size ||
                                     memcmp(token->text, names[i].text, token->size) != 0);
        if (token && !is_replaced)
            vocab->ids_of[i] = (int64_t)*id;
    }
}

static fsdp_status note_special(fsdp_json *json, fsdp_gguf_vocab *vocab, special_name *out,
                                fsdp_error *err)
{
    FSDP_TRY(fsdp_json_string(json, &out->text, &out->size, err));
    out->text = fsdp_arena_strndup(&vocab->arena, out->text, out->size);
    return out->text ? FSDP_OK : fsdp_fail_memory(err, vocab->path);
}

/* "<s>", or {"content": "<s>", ...} */
static fsdp_status take_special(fsdp_json *json, fsdp_gguf_vocab *vocab, special_name *out,
                                fsdp_error *err)
{
    static const char *const names[] = {"content"};
    fsdp_json_members members = {.names = names, .count = 1};
    int member;
    if (fsdp_json_peek(json) == FSDP_JSON_STRING)
        return note_special(json, vocab, out, err);
    if (fsdp_json_peek(json) != FSDP_JSON_OBJECT)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &member, err));
        if (member < 0)
            return FSDP_OK;
        FSDP_TRY(note_special(json, vocab, out, err));
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

static fsdp_status take_space_prefix(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    bool answer;
    if (fsdp_json_peek(json) != FSDP_JSON_BOOL)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_bool(json, &answer, err));
    vocab->space_prefix = answer;
    return FSDP_OK;
}

/* The last two members are there for tokenizer.model; tokenizer.json has its own. */
static fsdp_status read_config(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_named_values *out,
                               fsdp_error *err)
{
    enum { ADD_BOS = FSDP_GGUF_SPECIALS, ADD_EOS, TEMPLATE, DECODER, SPACE_PREFIX, MEMBERS };
    static const char *const names[MEMBERS] = {
        "bos_token",       "eos_token",     "unk_token",
        "pad_token",       "sep_token",     "add_bos_token",
        "add_eos_token",   "chat_template", "added_tokens_decoder",
        "add_prefix_space"};
    fsdp_json_members members = {.names = names,
                                 .count = vocab->is_sentencepiece ? MEMBERS : DECODER};
    special_name specials[FSDP_GGUF_SPECIALS] = {{NULL, 0}};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        if (which < FSDP_GGUF_SPECIALS)
            FSDP_TRY(take_special(json, vocab, &specials[which], err));
        else if (which == TEMPLATE)
            FSDP_TRY(take_template(json, out, err));
        else if (which == DECODER)
            FSDP_TRY(take_decoder(json, vocab, err));
        else if (which == SPACE_PREFIX)
            FSDP_TRY(take_space_prefix(json, vocab, err));
        else
            FSDP_TRY(take_bool(json,
                               which == ADD_BOS ? "tokenizer.ggml.add_bos_token"
                                                : "tokenizer.ggml.add_eos_token",
                               out, err));
    }
    find_specials(vocab, specials);
    return fsdp_json_finish(json, err);
}

/* --- the files -------------------------------------------------------------------------------- */

typedef struct tokenizer_file {
    const char *name;
    size_t most; /* bytes */
    fsdp_status (*read)(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_named_values *out,
                        fsdp_error *err); /* NULL: it is no JSON, but tokenizer.model */
} tokenizer_file;

static const tokenizer_file tokenizer_json = {"tokenizer.json", LARGEST_FILE, read_tokenizer},
                            tokenizer_model = {"tokenizer.model", LARGEST_FILE, NULL},
                            added_tokens = {"added_tokens.json", LARGEST_CONFIG, read_added_list},
                            config_json = {"tokenizer_config.json", LARGEST_CONFIG, read_config};

typedef struct tokenizer_reader {
    fsdp_io *io;
    const char *directory;
    fsdp_gguf_vocab vocab;
    fsdp_named_values *out;
} tokenizer_reader;

/* A token takes a byte at least, so a short file with a large number makes no long list; rows of the model
 * may lack tokens. */
static void bound_tokens(fsdp_gguf_vocab *vocab, size_t size)
{
    int64_t most = (int64_t)(vocab->count + size);
    most = most < vocab->rows ? vocab->rows : most;
    vocab->most = most < FSDP_GGUF_TOKENS_MOST ? most : FSDP_GGUF_TOKENS_MOST;
}

static fsdp_status read_text(tokenizer_reader *reader, const tokenizer_file *file, const char *text,
                             size_t size, fsdp_error *err)
{
    fsdp_json json;
    bound_tokens(&reader->vocab, size);
    if (!file->read)
        return fsdp_gguf_take_sentencepiece(&reader->vocab, text, size, err);
    fsdp_json_init(&json, text, size, reader->vocab.path);
    fsdp_status st = file->read(&json, &reader->vocab, reader->out, err);
    fsdp_json_release(&json);
    return st;
}

/* A file that is not there holds nothing. */
static fsdp_status take_file(tokenizer_reader *reader, const tokenizer_file *file,
                             bool *is_there_out, fsdp_error *err)
{
    char *text = NULL, *path = fsdp_path_join(reader->directory, file->name);
    size_t size = 0;
    fsdp_status st = FSDP_OK;
    if (!path)
        return fsdp_fail_memory(err, reader->directory);
    reader->vocab.path = path;
    *is_there_out = fsdp_io_exists(reader->io, path);
    if (*is_there_out) {
        st = fsdp_source_read_file(reader->io, path, file->most, &text, &size, err);
        if (st == FSDP_OK)
            st = read_text(reader, file, text, size, err);
    }
    fsdp_free(text);
    reader->vocab.path = reader->directory;
    fsdp_free(path);
    return st;
}

/* The tokens: those of tokenizer.json, else of tokenizer.model and what adds to it. */
static fsdp_status take_tokens(tokenizer_reader *reader, fsdp_error *err)
{
    bool is_there;
    FSDP_TRY(take_file(reader, &tokenizer_json, &is_there, err));
    if (is_there)
        return FSDP_OK;
    FSDP_TRY(take_file(reader, &tokenizer_model, &is_there, err));
    return reader->vocab.is_sentencepiece ? take_file(reader, &added_tokens, &is_there, err)
                                          : FSDP_OK;
}

fsdp_status fsdp_gguf_tokenizer(fsdp_io *io, const char *directory, const fsdp_gguf_tokens *tokens,
                                fsdp_named_values *out, fsdp_gguf_found *found_out, fsdp_error *err)
{
    tokenizer_reader reader = {.io = io, .directory = directory, .out = out};
    bool is_there;
    fsdp_gguf_vocab_init(&reader.vocab, tokens->vocab_size);
    if (tokens->memory > 0)
        reader.vocab.memory = FSDP_GGUF_MEMORY_BESIDE + tokens->memory;
    fsdp_status st = take_tokens(&reader, err);
    if (st == FSDP_OK && reader.vocab.count > 0)
        st = take_file(&reader, &config_json, &is_there, err);
    if (st == FSDP_OK && reader.vocab.count > 0)
        st = fsdp_gguf_vocab_pairs(&reader.vocab, tokens, out, err);
    *found_out = reader.vocab.count > 0     ? FSDP_GGUF_TOKENIZER
                 : reader.vocab.is_tiktoken ? FSDP_GGUF_TIKTOKEN
                                            : FSDP_GGUF_NO_TOKENIZER;
    fsdp_gguf_vocab_release(&reader.vocab);
    return st;
}

fsdp_status fsdp_gguf_values(fsdp_io *io, const fsdp_gguf_model *model, fsdp_named_values *out,
                             fsdp_gguf_found *found_out, fsdp_error *err)
{
    fsdp_gguf_tokens tokens = {.pre = "default"};
    *found_out = FSDP_GGUF_NO_TOKENIZER;
    FSDP_TRY(fsdp_gguf_config(model, out, &tokens, err));
    tokens.memory = model->memory;
    return fsdp_gguf_tokenizer(io, model->directory, &tokens, out, found_out, err);
}

/*
 * The files of a tokenizer and of pooling out of the key-value pairs of a GGUF file: the inverse of
 * gguf_tokenizer.c and gguf_pooling.c. See gguf_values.h.
 */
#include "base/data/name_table.h"
#include "statedict/gguf_model/gguf_vocab.h"

#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define POOLING_FOLDER "1_Pooling"

enum { NO_TOKEN = -1 };

static const fsdp_value *find_list(const fsdp_sd *sd, const char *name)
{
    const fsdp_value *value = fsdp_gguf_pair(sd, name);
    return value && value->kind == FSDP_VALUE_LIST ? value : NULL;
}

static bool is_text(const fsdp_value *value, const char *text)
{
    return value && value->kind == FSDP_VALUE_STRING &&
           fsdp_bytes_are(value->as.bytes.data, value->as.bytes.size, text);
}

/* --- tokens --------------------------------------------------------------------------------------- */

/* The special tokens of WordPiece, in the order of tokenizer_config.json. */
enum { CLS, SEP, UNK, PAD, MASK, SPECIALS, LAST_NEEDED = UNK };

/* llama.cpp has numbers for those that text needs and a file does not name. The last key is that of earlier
 * versions. */
static const struct {
    const char *member, *keys[2];
    int64_t usual;
} specials[SPECIALS] = {
    {"cls_token", {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.cls_token_id"}, 101},
    {"sep_token", {"tokenizer.ggml.seperator_token_id", "tokenizer.ggml.eos_token_id"}, 102},
    {"unk_token", {"tokenizer.ggml.unknown_token_id"}, 100},
    {"pad_token", {"tokenizer.ggml.padding_token_id"}, NO_TOKEN},
    {"mask_token", {"tokenizer.ggml.mask_token_id"}, NO_TOKEN},
};

/* A token in tokenizer.json. */
typedef struct known_word {
    const char *text;
    size_t size;
    bool is_added, is_special;
} known_word;

typedef struct vocabulary {
    const fsdp_value *tokens, *types;
    fsdp_arena arena;
    fsdp_name_table known; /* the words */
    known_word *words;
    size_t count; /* of words: rows at the end have no token */
    int64_t ids[SPECIALS];
    int lowercase, strips_accents; /* 1, 0; -1: as llama.cpp does without the key */
} vocabulary;

static int64_t type_of(const vocabulary *vocab, size_t id)
{
    const fsdp_value *type =
        vocab->types && id < vocab->types->as.list.count ? &vocab->types->as.list.items[id] : NULL;
    return type && type->kind == FSDP_VALUE_I64 ? type->as.i64 : FSDP_GGUF_NORMAL;
}

/* "[PAD7]" of a row without a token. */
static bool is_padding(const vocabulary *vocab, size_t id)
{
    char name[40];
    const fsdp_value *token = &vocab->tokens->as.list.items[id];
    snprintf(name, sizeof name, FSDP_GGUF_WORD_SIGN "[PAD%zu]", id);
    return type_of(vocab, id) == FSDP_GGUF_UNUSED &&
           (is_text(token, name) || is_text(token, name + strlen(FSDP_GGUF_WORD_SIGN)));
}

/* Earlier converters left "[unused0]" without the sign of a word. No continuation looks so, since words end
 * at brackets. */
static bool is_bracketed(const known_word *word)
{
    return word->size > 2 && word->text[0] == '[' && word->text[word->size - 1] == ']';
}

/* Puts the "##" of a continuation before it. */
static fsdp_status continue_word(vocabulary *vocab, known_word *word, fsdp_error *err)
{
    const size_t size = strlen(FSDP_GGUF_CONTINUATION);
    char *text = fsdp_arena_alloc(&vocab->arena, size + word->size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, "tokenizer.json");
    memcpy(text, FSDP_GGUF_CONTINUATION, size);
    memcpy(text + size, word->text, word->size);
    word->text = text;
    word->size += size;
    return FSDP_OK;
}

static fsdp_status fail_token(size_t id, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "cannot make a tokenizer.json: token %zu of 'tokenizer.ggml.tokens' %s", id,
                     why);
}

static fsdp_status read_word(vocabulary *vocab, size_t id, fsdp_error *err)
{
    const fsdp_value *token = &vocab->tokens->as.list.items[id];
    const size_t sign = strlen(FSDP_GGUF_WORD_SIGN);
    const int64_t type = type_of(vocab, id);
    known_word *word = &vocab->words[id];
    if (token->kind != FSDP_VALUE_STRING)
        return fail_token(id, "is not UTF-8", err);
    word->text = token->as.bytes.data;
    word->size = token->as.bytes.size;
    word->is_special = type == FSDP_GGUF_CONTROL;
    for (int i = 0; i < SPECIALS; i++)
        word->is_special |= vocab->ids[i] == (int64_t)id;
    word->is_added = word->is_special || type == FSDP_GGUF_USER_DEFINED;
    if (word->size >= sign && memcmp(word->text, FSDP_GGUF_WORD_SIGN, sign) == 0) {
        word->text += sign;
        word->size -= sign;
    } else if (!word->is_added && !is_bracketed(word)) {
        FSDP_TRY(continue_word(vocab, word, err));
    }
    if (memchr(word->text, '\n', word->size) || memchr(word->text, '\0', word->size))
        return fail_token(id, "has the end of a line in it", err);
    if (fsdp_name_table_find(&vocab->known, word->text, word->size))
        return fail_token(id, "is there twice", err);
    return fsdp_name_table_put(&vocab->known, word->text, word->size, id)
               ? FSDP_OK
               : fsdp_fail_memory(err, "tokenizer.json");
}

static void find_special(const fsdp_sd *sd, vocabulary *vocab, int which)
{
    int64_t id = specials[which].usual;
    for (int i = 2; i-- > 0;) {
        const fsdp_value *value =
            specials[which].keys[i] ? fsdp_gguf_pair(sd, specials[which].keys[i]) : NULL;
        if (value && value->kind == FSDP_VALUE_I64)
            id = value->as.i64;
    }
    bool is_there = id >= 0 && id < (int64_t)vocab->tokens->as.list.count;
    vocab->ids[which] = is_there ? id : NO_TOKEN;
}

static fsdp_status take_words(vocabulary *vocab, fsdp_error *err)
{
    vocab->count = vocab->tokens->as.list.count;
    while (vocab->count > 0 && is_padding(vocab, vocab->count - 1))
        vocab->count--;
    for (int i = 0; i <= LAST_NEEDED; i++)
        if (vocab->ids[i] < 0 || vocab->ids[i] >= (int64_t)vocab->count)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "cannot make a tokenizer.json: no token is the %s",
                             specials[i].member);
    vocab->words = fsdp_arena_alloc(&vocab->arena, vocab->count, sizeof *vocab->words);
    if (!vocab->words)
        return fsdp_fail_memory(err, "tokenizer.json");
    for (size_t id = 0; id < vocab->count; id++)
        FSDP_TRY(read_word(vocab, id, err));
    return FSDP_OK;
}

static int read_flag(const fsdp_sd *sd, const char *name, int otherwise)
{
    const fsdp_value *value = fsdp_gguf_pair(sd, name);
    return value && value->kind == FSDP_VALUE_BOOL ? value->as.boolean : otherwise;
}

static fsdp_status read_vocabulary(const fsdp_sd *sd, vocabulary *vocab, fsdp_error *err)
{
    vocab->tokens = find_list(sd, "tokenizer.ggml.tokens");
    vocab->types = find_list(sd, "tokenizer.ggml.token_type");
    vocab->lowercase = read_flag(sd, FSDP_GGUF_LOWERCASE_KEY, 1);
    vocab->strips_accents = read_flag(sd, FSDP_GGUF_STRIPS_KEY, -1);
    if (!vocab->tokens)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "cannot make a tokenizer.json: 'tokenizer.ggml.tokens' is missing");
    for (int i = 0; i < SPECIALS; i++)
        find_special(sd, vocab, i);
    return take_words(vocab, err);
}

/* --- texts of the tokenizer ----------------------------------------------------------------------- */

static const char *say(int flag)
{
    return flag < 0 ? "null" : flag > 0 ? "true" : "false";
}

static void add_string(fsdp_text *out, const known_word *word)
{
    fsdp_text_add_json_string(out, word->text, word->size);
}

static void add_added(const vocabulary *vocab, fsdp_text *out)
{
    const char *between = "";
    fsdp_text_addf(out, "  \"added_tokens\": [");
    for (size_t id = 0; id < vocab->count; id++) {
        const known_word *word = &vocab->words[id];
        if (!word->is_added)
            continue;
        fsdp_text_addf(out, "%s\n    {\"id\": %zu, \"content\": ", between, id);
        add_string(out, word);
        fsdp_text_addf(out,
                       ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                       "\"normalized\": false, \"special\": %s}",
                       say(word->is_special));
        between = ",";
    }
    fsdp_text_addf(out, "\n  ],\n");
}

/* {"SpecialToken": {"id": "[CLS]", "type_id": 0}} */
static void add_piece(const vocabulary *vocab, int which, int type, const char *after,
                      fsdp_text *out)
{
    fsdp_text_addf(out, "{\"SpecialToken\": {\"id\": ");
    add_string(out, &vocab->words[vocab->ids[which]]);
    fsdp_text_addf(out, ", \"type_id\": %d}}%s", type, after);
}

static void add_template_token(const vocabulary *vocab, int which, fsdp_text *out)
{
    const known_word *word = &vocab->words[vocab->ids[which]];
    add_string(out, word);
    fsdp_text_addf(out, ": {\"id\": ");
    add_string(out, word);
    fsdp_text_addf(out, ", \"ids\": [%" PRId64 "], \"tokens\": [", vocab->ids[which]);
    add_string(out, word);
    fsdp_text_addf(out, "]}");
}

/* [CLS] A [SEP], and [CLS] A [SEP] B [SEP] of a pair. */
static void add_template(const vocabulary *vocab, fsdp_text *out)
{
    static const char text[] = "{\"Sequence\": {\"id\": \"%s\", \"type_id\": %d}}, ";
    fsdp_text_addf(out, "  \"post_processor\": {\n    \"type\": \"TemplateProcessing\"");
    for (int pair = 0; pair < 2; pair++) {
        fsdp_text_addf(out, ",\n    \"%s\": [", pair ? "pair" : "single");
        add_piece(vocab, CLS, 0, ", ", out);
        fsdp_text_addf(out, text, "A", 0);
        add_piece(vocab, SEP, 0, pair ? ", " : "]", out);
        if (!pair)
            continue;
        fsdp_text_addf(out, text, "B", 1);
        add_piece(vocab, SEP, 1, "]", out);
    }
    fsdp_text_addf(out, ",\n    \"special_tokens\": {");
    add_template_token(vocab, CLS, out);
    if (vocab->ids[SEP] != vocab->ids[CLS]) {
        fsdp_text_addf(out, ", ");
        add_template_token(vocab, SEP, out);
    }
    fsdp_text_addf(out, "}\n  },\n");
}

static void write_tokenizer(const vocabulary *vocab, fsdp_text *out)
{
    fsdp_text_addf(out, "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n"
                        "  \"padding\": null,\n");
    add_added(vocab, out);
    fsdp_text_addf(out,
                   "  \"normalizer\": {\"type\": \"BertNormalizer\", \"clean_text\": true, "
                   "\"handle_chinese_chars\": true, \"strip_accents\": %s, \"lowercase\": %s},\n"
                   "  \"pre_tokenizer\": {\"type\": \"BertPreTokenizer\"},\n",
                   say(vocab->strips_accents), say(vocab->lowercase));
    add_template(vocab, out);
    fsdp_text_addf(out, "  \"decoder\": {\"type\": \"WordPiece\", \"prefix\": \"##\", "
                        "\"cleanup\": true},\n  \"model\": {\n    \"type\": \"WordPiece\",\n"
                        "    \"unk_token\": ");
    add_string(out, &vocab->words[vocab->ids[UNK]]);
    fsdp_text_addf(out, ",\n    \"continuing_subword_prefix\": \"##\",\n"
                        "    \"max_input_chars_per_word\": 100,\n    \"vocab\": {");
    for (size_t id = 0; id < vocab->count; id++) {
        fsdp_text_addf(out, "%s\n      ", id > 0 ? "," : "");
        add_string(out, &vocab->words[id]);
        fsdp_text_addf(out, ": %zu", id);
    }
    fsdp_text_addf(out, "\n    }\n  }\n}\n");
}

static void write_list(const vocabulary *vocab, fsdp_text *out)
{
    for (size_t id = 0; id < vocab->count; id++) {
        fsdp_text_add(out, vocab->words[id].text, vocab->words[id].size);
        fsdp_text_addf(out, "\n");
    }
}

static void write_config(const vocabulary *vocab, fsdp_text *out)
{
    fsdp_text_addf(out, "{\n  \"tokenizer_class\": \"BertTokenizer\"");
    for (int i = 0; i < SPECIALS; i++) {
        if (vocab->ids[i] < 0 || vocab->ids[i] >= (int64_t)vocab->count)
            continue;
        fsdp_text_addf(out, ",\n  \"%s\": ", specials[i].member);
        add_string(out, &vocab->words[vocab->ids[i]]);
    }
    fsdp_text_addf(out,
                   ",\n  \"do_lower_case\": %s,\n  \"strip_accents\": %s,\n"
                   "  \"tokenize_chinese_chars\": true\n}\n",
                   say(vocab->lowercase), say(vocab->strips_accents));
}

/* --- the files ------------------------------------------------------------------------------------ */

static fsdp_text *add_file(fsdp_gguf_files *files, const char *name)
{
    files->items[files->count] = (fsdp_gguf_file){.name = name};
    return &files->items[files->count++].text;
}

static fsdp_status make_tokenizer(const fsdp_sd *sd, fsdp_gguf_files *files, fsdp_error *err)
{
    vocabulary vocab = {.words = NULL};
    fsdp_status st = read_vocabulary(sd, &vocab, err);
    if (st == FSDP_OK) {
        write_tokenizer(&vocab, add_file(files, "tokenizer.json"));
        write_config(&vocab, add_file(files, "tokenizer_config.json"));
        write_list(&vocab, add_file(files, "vocab.txt"));
    }
    fsdp_name_table_release(&vocab.known);
    fsdp_arena_release(&vocab.arena);
    return st;
}

/* The number of the pooling below the name of the file's architecture; 0: none. */
static int64_t pooling_of(const fsdp_sd *sd)
{
    const fsdp_value *architecture = fsdp_gguf_pair(sd, "general.architecture"), *number;
    char key[FSDP_GGUF_KEY];
    if (!architecture || architecture->kind != FSDP_VALUE_STRING)
        return 0;
    fsdp_gguf_spell_key(key, architecture->as.bytes.data, FSDP_GGUF_POOLING_KEY);
    number = fsdp_gguf_pair(sd, key);
    return number && number->kind == FSDP_VALUE_I64 ? number->as.i64 : 0;
}

static void write_modules(fsdp_text *out)
{
    static const char *const modules[][2] = {{"", "Transformer"}, {POOLING_FOLDER, "Pooling"}};
    for (int i = 0; i < 2; i++)
        fsdp_text_addf(out,
                       "%s\n  {\"idx\": %d, \"name\": \"%d\", \"path\": \"%s\", \"type\": "
                       "\"sentence_transformers.models.%s\"}",
                       i == 0 ? "[" : ",", i, i, modules[i][0], modules[i][1]);
    fsdp_text_addf(out, "\n]\n");
}

/* As llama.cpp numbers the modes; of rank it pools with a head, which the file's tensors are. */
static fsdp_status make_pooling(const fsdp_sd *sd, fsdp_gguf_files *files, fsdp_error *err)
{
    const int64_t number = pooling_of(sd);
    const fsdp_value *width = fsdp_gguf_pair(sd, "bert.embedding_length");
    size_t at = 0;
    if (number <= 0)
        return FSDP_OK;
    while (at < FSDP_GGUF_POOLINGS && fsdp_gguf_poolings[at].number != number)
        at++;
    if (at == FSDP_GGUF_POOLINGS || !width || width->kind != FSDP_VALUE_I64)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot make the settings of the pooling %" PRId64
                         "; take the model's with --copy-from DIR",
                         number);
    write_modules(add_file(files, "modules.json"));
    fsdp_text *out = add_file(files, POOLING_FOLDER "/config.json");
    fsdp_text_addf(out, "{\n  \"word_embedding_dimension\": %" PRId64, width->as.i64);
    for (size_t i = 0; i < FSDP_GGUF_POOLINGS; i++)
        fsdp_text_addf(out, ",\n  \"%s\": %s", fsdp_gguf_poolings[i].flag, say(i == at));
    fsdp_text_addf(out, "\n}\n");
    return FSDP_OK;
}

fsdp_status fsdp_gguf_make_files(const fsdp_sd *sd, fsdp_gguf_files *files_out, fsdp_error *err)
{
    *files_out = (fsdp_gguf_files){.count = 0};
    if (is_text(fsdp_gguf_pair(sd, "tokenizer.ggml.model"), FSDP_GGUF_WORDPIECE))
        FSDP_TRY(make_tokenizer(sd, files_out, err));
    FSDP_TRY(make_pooling(sd, files_out, err));
    for (size_t i = 0; i < files_out->count; i++)
        if (files_out->items[i].text.failed)
            return fsdp_fail_memory(err, files_out->items[i].name);
    return FSDP_OK;
}

void fsdp_gguf_files_release(fsdp_gguf_files *files)
{
    for (size_t i = 0; i < files->count; i++)
        fsdp_text_release(&files->items[i].text);
    *files = (fsdp_gguf_files){.count = 0};
}

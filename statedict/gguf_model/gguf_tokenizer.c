/*
 * The tokenizer of a model as key-value pairs of GGUF: see gguf_values.h. tokenizer.json has the tokens
 * and merges, tokenizer_config.json the special ones and the chat template. A directory without
 * tokenizer.json has the tokens in tokenizer.model, spiece.model or vocab.txt, added_tokens.json and
 * tokenizer_config.json.
 */
#include "statedict/gguf_model/gguf_vocab.h"

#include "base/data/json.h"
#include "base/text.h"
#include "formats/source.h"
#include "formats/tokenizer_json.h"

#include <inttypes.h>
#include <string.h>

enum { LARGEST_FILE = 256 << 20, LARGEST_CONFIG = 16 << 20 };

/* --- WordPiece: tokens as llama.cpp spells them, and what vocab.txt says ------------------------ */

enum {
    WORD_SIGN = sizeof FSDP_GGUF_WORD_SIGN - 1,
    CONTINUATION = sizeof FSDP_GGUF_CONTINUATION - 1
};

static bool begins(const char *text, size_t size, const char *with)
{
    return size >= strlen(with) && memcmp(text, with, strlen(with)) == 0;
}

static fsdp_status take_wordpiece(fsdp_gguf_vocab *vocab, const fsdp_tokenizer_json *file,
                                  fsdp_error *err)
{
    vocab->is_wordpiece = true;
    FSDP_TRY(fsdp_tokenizer_json_wordpiece(file, &vocab->words, err));
    vocab->own_ids[FSDP_GGUF_CLS] = vocab->words.before;
    vocab->own_ids[FSDP_GGUF_SEP] = vocab->words.after;
    const char *unknown = vocab->words.unknown;
    const uint64_t *id = fsdp_name_table_find(&vocab->ids, unknown, strlen(unknown));
    char shown[100];
    if (!id)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the unk_token '%s' is not in the vocabulary",
                         vocab->path,
                         fsdp_printable(unknown, strlen(unknown), shown, sizeof shown));
    vocab->own_ids[FSDP_GGUF_UNK] = (int64_t)*id;
    return FSDP_OK;
}

/* A token is a line. */
static fsdp_status take_word_list(fsdp_gguf_vocab *vocab, const char *text, size_t size,
                                  fsdp_error *err)
{
    const fsdp_gguf_token like = {.score = FSDP_GGUF_NO_SCORE, .type = FSDP_GGUF_NORMAL};
    const char *end = text + size;
    vocab->is_wordpiece = vocab->is_word_list = true;
    vocab->words = (fsdp_wordpiece_rules){.lowercase = true, .strips_accents = -1};
    for (int64_t id = 0; text < end; id++) {
        const char *line_end = memchr(text, '\n', (size_t)(end - text));
        line_end = line_end ? line_end : end;
        size_t n = (size_t)(line_end - text);
        n -= n > 0 && text[n - 1] == '\r';
        if (!fsdp_utf8_valid(text, n) || memchr(text, '\0', n))
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': line %" PRId64 " is not UTF-8",
                             vocab->path, id + 1);
        const uint64_t *same = fsdp_name_table_find(&vocab->ids, text, n);
        if (same)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s': lines %" PRIu64 " and %" PRId64 " are the same token",
                             vocab->path, *same + 1, id + 1);
        FSDP_TRY(fsdp_gguf_vocab_set(vocab, id, text, n, &like, err));
        text = line_end + (line_end < end);
    }
    return FSDP_OK;
}

static fsdp_status add_to_wordpiece(fsdp_gguf_vocab *vocab, int64_t id, const char *text,
                                    size_t size, bool is_special, fsdp_error *err)
{
    const fsdp_gguf_token like = {.score = FSDP_GGUF_NO_SCORE,
                                  .type = is_special ? FSDP_GGUF_CONTROL : FSDP_GGUF_USER_DEFINED};
    const uint64_t *known = fsdp_name_table_find(&vocab->ids, text, size);
    bool is_taken = id >= 0 && id < (int64_t)vocab->count && vocab->tokens[id].text;
    char shown[100];
    if (known ? (int64_t)*known != id : is_taken)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': the added token '%s' has the number %" PRId64
                         ", but vocab.txt says otherwise",
                         vocab->path, fsdp_printable(text, size, shown, sizeof shown), id);
    return fsdp_gguf_vocab_set(vocab, id, text, size, &like, err);
}

/* tokenizer.json says it already, and programs differ in which of the two they believe. */
static fsdp_status set_word_rule(fsdp_gguf_vocab *vocab, fsdp_gguf_word_rule rule, bool is_set,
                                 fsdp_error *err)
{
    static const char *const names[] = {"do_lower_case", "strip_accents", "tokenize_chinese_chars"};
    fsdp_wordpiece_rules *words = &vocab->words;
    if (!vocab->is_wordpiece)
        return FSDP_OK;
    if (rule == FSDP_GGUF_CUTS_CHINESE && !is_set)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' says tokenize_chinese_chars false, but llama.cpp makes each of "
                         "these letters a word",
                         vocab->path);
    if (rule == FSDP_GGUF_CUTS_CHINESE)
        return FSDP_OK;
    bool is_known = rule == FSDP_GGUF_LOWERCASE || words->strips_accents < 0
                        ? words->lowercase
                        : words->strips_accents > 0;
    if (!vocab->is_word_list)
        return is_known == is_set
                   ? FSDP_OK
                   : fsdp_fail(
                         err, FSDP_ERR_USAGE,
                         "'%s' says %s %s, but tokenizer.json says the opposite; make them agree",
                         vocab->path, names[rule], is_set ? "true" : "false");
    if (rule == FSDP_GGUF_LOWERCASE)
        words->lowercase = is_set;
    else
        words->strips_accents = is_set;
    return FSDP_OK;
}

/* BERT's, where tokenizer_config.json names none. */
static const char *const usual[FSDP_GGUF_SPECIALS] = {[FSDP_GGUF_UNK] = "[UNK]",
                                                      [FSDP_GGUF_PAD] = "[PAD]",
                                                      [FSDP_GGUF_SEP] = "[SEP]",
                                                      [FSDP_GGUF_CLS] = "[CLS]",
                                                      [FSDP_GGUF_MASK] = "[MASK]"};

static bool is_token(const fsdp_gguf_vocab *vocab, int64_t id)
{
    return id >= 0 && id < (int64_t)vocab->count && vocab->tokens[id].text;
}

/* llama.cpp has numbers of its own for those that a file does not name. */
static fsdp_status complete_specials(fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    static const fsdp_gguf_special needed[] = {FSDP_GGUF_CLS, FSDP_GGUF_SEP, FSDP_GGUF_UNK};
    for (int i = 0; i < FSDP_GGUF_SPECIALS; i++) {
        const uint64_t *id =
            usual[i] ? fsdp_name_table_find(&vocab->ids, usual[i], strlen(usual[i])) : NULL;
        if (vocab->own_ids[i] >= 0)
            vocab->ids_of[i] = vocab->own_ids[i]; /* with which text is encoded */
        else if (vocab->ids_of[i] < 0 && id)
            vocab->ids_of[i] = (int64_t)*id;
        if (vocab->is_word_list && is_token(vocab, vocab->ids_of[i]))
            vocab->tokens[vocab->ids_of[i]].type = FSDP_GGUF_CONTROL;
    }
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!is_token(vocab, vocab->ids_of[needed[i]]))
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s': the tokenizer has no token that stands for %s, which llama.cpp "
                             "needs",
                             vocab->path, usual[needed[i]]);
    vocab->ids_of[FSDP_GGUF_BOS] = vocab->ids_of[FSDP_GGUF_CLS];
    vocab->ids_of[FSDP_GGUF_EOS] = vocab->ids_of[FSDP_GGUF_SEP];
    return FSDP_OK;
}

/* Added tokens are looked for in the text itself. Others have the sign where they begin a word, and lose the
 * '##' where they continue one. */
static fsdp_status spell(fsdp_gguf_vocab *vocab, fsdp_gguf_token *token, fsdp_error *err)
{
    char shown[100];
    if (token->type == FSDP_GGUF_CONTROL || token->type == FSDP_GGUF_USER_DEFINED)
        return FSDP_OK;
    if (begins(token->text, token->size, FSDP_GGUF_CONTINUATION)) {
        token->text += CONTINUATION;
        token->size -= CONTINUATION;
        if (!begins(token->text, token->size, FSDP_GGUF_WORD_SIGN))
            return FSDP_OK;
        fsdp_printable(token->text, token->size, shown, sizeof shown);
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': llama.cpp would take the token '##%s' for the beginning of a word",
                         vocab->path, shown);
    }
    char *text = fsdp_arena_alloc(&vocab->arena, token->size + WORD_SIGN + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, vocab->path);
    memcpy(text, FSDP_GGUF_WORD_SIGN, WORD_SIGN);
    memcpy(text + WORD_SIGN, token->text, token->size);
    token->text = text;
    token->size += WORD_SIGN;
    return FSDP_OK;
}

static fsdp_status spell_wordpieces(fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    char shown[100];
    FSDP_TRY(complete_specials(vocab, err));
    fsdp_name_table_clear(&vocab->ids);
    for (size_t id = 0; id < vocab->count; id++) {
        fsdp_gguf_token *token = &vocab->tokens[id];
        FSDP_TRY(spell(vocab, token, err));
        const uint64_t *same = fsdp_name_table_find(&vocab->ids, token->text, token->size);
        if (same)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s': llama.cpp would spell the tokens %" PRIu64
                             " and %zu alike, as '%s'",
                             vocab->path, *same, id,
                             fsdp_printable(token->text, token->size, shown, sizeof shown));
        if (!fsdp_name_table_put(&vocab->ids, token->text, token->size, id))
            return fsdp_fail_memory(err, vocab->path);
    }
    return FSDP_OK;
}

static fsdp_status add_word_rules(const fsdp_gguf_vocab *vocab, fsdp_named_values *out,
                                  fsdp_error *err)
{
    const fsdp_wordpiece_rules *words = &vocab->words;
    fsdp_value value = fsdp_value_bool(words->lowercase);
    FSDP_TRY(fsdp_named_values_add(out, FSDP_GGUF_LOWERCASE_KEY, &value, err));
    value = fsdp_value_bool(words->strips_accents > 0);
    return words->strips_accents < 0
               ? FSDP_OK
               : fsdp_named_values_add(out, FSDP_GGUF_STRIPS_KEY, &value, err);
}

/* --- tokenizer.json --------------------------------------------------------------------------- */

/* One after the rows of the model is of no use to it, as the token for images of Gemma 3. */
static fsdp_status take_added(void *context, const fsdp_json *json, const fsdp_added_token *added,
                              fsdp_error *err)
{
    fsdp_gguf_vocab *vocab = context;
    fsdp_gguf_token like = {.score = FSDP_GGUF_NO_SCORE,
                            .type = added->special ? FSDP_GGUF_CONTROL : FSDP_GGUF_USER_DEFINED};
    (void)json;
    return vocab->rows > 0 && added->id >= vocab->rows
               ? FSDP_OK
               : fsdp_gguf_vocab_set(vocab, added->id, added->text, added->size, &like, err);
}

/* A space in a token but for its beginning, by SentencePiece's sign. */
static bool spans_words(const fsdp_file_token *token)
{
    return token->size > 0 &&
           memmem(token->text + 1, token->size - 1, FSDP_GGUF_WORD_SIGN, WORD_SIGN) != NULL;
}

/* A token of the model that is an added token, too, has the type of that. */
static fsdp_status take_token(void *context, const fsdp_json *json, const fsdp_file_token *token,
                              fsdp_error *err)
{
    fsdp_gguf_vocab *vocab = context;
    fsdp_gguf_token like = {.score = vocab->is_unigram ? token->score : FSDP_GGUF_NO_SCORE,
                            .type = FSDP_GGUF_NORMAL};
    (void)json;
    if (token->id >= 0 && token->id < (int64_t)vocab->count && vocab->tokens[token->id].text)
        like.type = vocab->tokens[token->id].type;
    if (vocab->unigram.cuts_words && like.type == FSDP_GGUF_NORMAL && spans_words(token))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': token %" PRId64 " is of several words, which the pre-tokenizer "
                         "keeps apart, but llama.cpp would use it",
                         vocab->path, token->id);
    return fsdp_gguf_vocab_set(vocab, token->id, token->text, token->size, &like, err);
}

static fsdp_status take_merge(void *context, const fsdp_json *json, const fsdp_file_merge *merge,
                              fsdp_error *err)
{
    (void)json;
    return fsdp_gguf_vocab_add_merge(context, merge, err);
}

/* What the file says of text, for a tokenizer that llama.cpp has. */
static fsdp_status take_unigram(fsdp_gguf_vocab *vocab, const fsdp_tokenizer_json *file,
                                fsdp_error *err)
{
    fsdp_unigram_rules rules;
    fsdp_status st = fsdp_tokenizer_json_unigram(file, &rules, err);
    if (st == FSDP_OK && rules.charsmap)
        st = fsdp_gguf_take_charsmap(vocab, rules.charsmap, rules.charsmap_size, err);
    fsdp_free(rules.charsmap);
    vocab->unigram.is_used = vocab->unigram.adds_space = vocab->unigram.merges_spaces = true;
    vocab->unigram.has_template = true;
    vocab->unigram.cuts_words = rules.cuts_words;
    vocab->unigram.before = rules.before;
    vocab->unigram.after = rules.after;
    vocab->own_ids[FSDP_GGUF_UNK] = file->model.unknown_id;
    vocab->own_ids[FSDP_GGUF_BOS] = rules.before.count > 0 ? rules.before.ids[0] : -1;
    vocab->own_ids[FSDP_GGUF_EOS] = rules.after.count > 0 ? rules.after.ids[0] : -1;
    return st;
}

static fsdp_status take_file_parts(fsdp_gguf_vocab *vocab, const fsdp_tokenizer_json *file,
                                   fsdp_error *err)
{
    vocab->is_unigram = file->model.is_scored;
    vocab->has_bytes = file->model.byte_fallback;
    if (vocab->is_unigram && vocab->family == FSDP_TOKENS_UNIGRAM)
        FSDP_TRY(take_unigram(vocab, file, err));
    FSDP_TRY(fsdp_tokenizer_json_added(file, take_added, vocab, err));
    FSDP_TRY(fsdp_tokenizer_json_tokens(file, take_token, vocab, err));
    if (vocab->rows > 0 && vocab->count > (size_t)vocab->rows)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has %zu tokens, and the model's vocab_size is %" PRId64
                         ": it is the tokenizer of another model",
                         vocab->path, vocab->count, vocab->rows);
    if (strcmp(file->model.type, "WordPiece") == 0)
        return take_wordpiece(vocab, file, err);
    if (vocab->unigram.is_used && file->model.unknown_id >= (int64_t)vocab->count)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': unk_id is %" PRId64 " of %zu tokens",
                         vocab->path, file->model.unknown_id, vocab->count);
    return fsdp_tokenizer_json_merges(file, take_merge, vocab, err);
}

static fsdp_status read_tokenizer(fsdp_gguf_vocab *vocab, const char *text, size_t size,
                                  fsdp_error *err)
{
    fsdp_tokenizer_json file;
    fsdp_status st = fsdp_tokenizer_json_open(&file, text, size, vocab->path, err);
    if (st == FSDP_OK)
        st = take_file_parts(vocab, &file, err);
    fsdp_tokenizer_json_release(&file);
    return st;
}

/* --- tokens next to tokenizer.model and vocab.txt ------------------------------------------------ */

static fsdp_status add_token(fsdp_gguf_vocab *vocab, int64_t id, const char *text, size_t size,
                             bool is_special, fsdp_error *err)
{
    return vocab->is_word_list
               ? add_to_wordpiece(vocab, id, text, size, is_special, err)
               : fsdp_gguf_add_to_sentencepiece(vocab, id, text, size, is_special, err);
}

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
        vocab->scratch.size = 0;
        fsdp_text_add(&vocab->scratch, key, size);
        if (vocab->scratch.failed)
            return fsdp_fail_memory(err, vocab->path);
        FSDP_TRY(fsdp_json_i64(json, &id, err));
        FSDP_TRY(add_token(vocab, id, vocab->scratch.data, size, false, err));
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
        fsdp_added_token token;
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(read_id(json, key, size, &id, err));
        FSDP_TRY(fsdp_read_added_token(json, &vocab->scratch, &token, err));
        FSDP_TRY(add_token(vocab, id, token.text, token.size, token.special, err));
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

static fsdp_status take_word_rule(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_gguf_word_rule rule,
                                  fsdp_error *err)
{
    bool is_set;
    if (fsdp_json_peek(json) != FSDP_JSON_BOOL)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_bool(json, &is_set, err));
    return set_word_rule(vocab, rule, is_set, err);
}

/* The last two members are there for tokenizer.model and vocab.txt; tokenizer.json has its own. */
static fsdp_status read_config(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_named_values *out,
                               fsdp_error *err)
{
    enum {
        ADD_BOS = FSDP_GGUF_SPECIALS,
        ADD_EOS,
        TEMPLATE,
        WORD_RULE,
        DECODER = WORD_RULE + FSDP_GGUF_WORD_RULES,
        SPACE_PREFIX,
        MEMBERS
    };
    static const char *const names[MEMBERS] = {"bos_token",
                                               "eos_token",
                                               "unk_token",
                                               "pad_token",
                                               "sep_token",
                                               "cls_token",
                                               "mask_token",
                                               "add_bos_token",
                                               "add_eos_token",
                                               "chat_template",
                                               "do_lower_case",
                                               "strip_accents",
                                               "tokenize_chinese_chars",
                                               "added_tokens_decoder",
                                               "add_prefix_space"};
    fsdp_json_members members = {.names = names,
                                 .count = vocab->is_sentencepiece || vocab->is_word_list ? MEMBERS
                                                                                         : DECODER};
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
        else if (which >= WORD_RULE && which < DECODER)
            FSDP_TRY(take_word_rule(json, vocab, (fsdp_gguf_word_rule)(which - WORD_RULE), err));
        else if (which == DECODER)
            FSDP_TRY(take_decoder(json, vocab, err));
        else if (which == SPACE_PREFIX)
            FSDP_TRY(take_space_prefix(json, vocab, err));
        else if (vocab->unigram.has_template)
            FSDP_TRY(fsdp_json_skip(json, err)); /* the template counts */
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
    fsdp_status (*read)(fsdp_gguf_vocab *vocab, const char *text, size_t size, fsdp_error *err);
    fsdp_status (*read_json)(fsdp_json *json, fsdp_gguf_vocab *vocab, fsdp_named_values *out,
                             fsdp_error *err); /* in place of read */
} tokenizer_file;

static const tokenizer_file
    tokenizer_json = {"tokenizer.json", LARGEST_FILE, .read = read_tokenizer},
    tokenizer_model = {"tokenizer.model", LARGEST_FILE, .read = fsdp_gguf_take_sentencepiece},
    spiece_model = {"spiece.model", LARGEST_FILE, .read = fsdp_gguf_take_sentencepiece},
    vocab_txt = {"vocab.txt", LARGEST_FILE, .read = take_word_list},
    added_tokens = {"added_tokens.json", LARGEST_CONFIG, .read_json = read_added_list},
    config_json = {"tokenizer_config.json", LARGEST_CONFIG, .read_json = read_config};

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
    if (file->read)
        return file->read(&reader->vocab, text, size, err);
    fsdp_json_init(&json, text, size, reader->vocab.path);
    fsdp_status st = file->read_json(&json, &reader->vocab, reader->out, err);
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

/* The tokens: those of tokenizer.json, else of vocab.txt or tokenizer.model and what adds to them. */
static fsdp_status take_tokens(tokenizer_reader *reader, fsdp_error *err)
{
    bool is_there;
    FSDP_TRY(take_file(reader, &tokenizer_json, &is_there, err));
    if (is_there)
        return FSDP_OK;
    if (reader->vocab.family == FSDP_TOKENS_WORDPIECE)
        FSDP_TRY(take_file(reader, &vocab_txt, &is_there, err));
    if (!is_there)
        FSDP_TRY(take_file(reader, &tokenizer_model, &is_there, err));
    if (!is_there)
        FSDP_TRY(take_file(reader, &spiece_model, &is_there, err));
    return reader->vocab.is_sentencepiece || reader->vocab.is_word_list
               ? take_file(reader, &added_tokens, &is_there, err)
               : FSDP_OK;
}

fsdp_status fsdp_gguf_tokenizer(fsdp_io *io, const char *directory, const fsdp_gguf_tokens *tokens,
                                fsdp_named_values *out, fsdp_gguf_found *found_out, fsdp_error *err)
{
    tokenizer_reader reader = {.io = io, .directory = directory, .out = out};
    bool is_there;
    fsdp_gguf_vocab_init(&reader.vocab, tokens->vocab_size);
    reader.vocab.family = tokens->tokenizer;
    if (tokens->memory > 0)
        reader.vocab.memory = FSDP_GGUF_MEMORY_BESIDE + tokens->memory;
    fsdp_status st = take_tokens(&reader, err);
    if (st == FSDP_OK && reader.vocab.count > 0)
        st = take_file(&reader, &config_json, &is_there, err);
    if (st == FSDP_OK && reader.vocab.is_wordpiece)
        st = spell_wordpieces(&reader.vocab, err);
    if (st == FSDP_OK && reader.vocab.count > 0)
        st = fsdp_gguf_vocab_pairs(&reader.vocab, tokens, out, err);
    if (st == FSDP_OK && reader.vocab.is_wordpiece)
        st = add_word_rules(&reader.vocab, out, err);
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

/* Tokens, scores and merges, and their key-value pairs: see gguf_vocab.h. */
#include "statedict/gguf_model/gguf_vocab.h"

#include "base/core/bytes.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* llama.cpp's converter gives it to rows without a piece. */
enum { PADDING_SCORE = -10000 };

static const char *const keys[FSDP_GGUF_SPECIALS] = {
    [FSDP_GGUF_BOS] = "tokenizer.ggml.bos_token_id",
    [FSDP_GGUF_EOS] = "tokenizer.ggml.eos_token_id",
    [FSDP_GGUF_UNK] = "tokenizer.ggml.unknown_token_id",
    [FSDP_GGUF_PAD] = "tokenizer.ggml.padding_token_id",
    [FSDP_GGUF_SEP] = "tokenizer.ggml.seperator_token_id", /* llama.cpp's spelling */
    [FSDP_GGUF_MASK] = "tokenizer.ggml.mask_token_id"};

void fsdp_gguf_vocab_init(fsdp_gguf_vocab *vocab, int64_t rows)
{
    *vocab = (fsdp_gguf_vocab){.memory = FSDP_GGUF_MEMORY_BESIDE + FSDP_MEMORY_DEFAULT,
                               .path = "",
                               .rows = rows,
                               .space_prefix = -1};
    for (int i = 0; i < FSDP_GGUF_SPECIALS; i++)
        vocab->ids_of[i] = vocab->own_ids[i] = -1;
}

void fsdp_gguf_vocab_release(fsdp_gguf_vocab *vocab)
{
    fsdp_free(vocab->tokens);
    fsdp_free(vocab->merges);
    fsdp_text_release(&vocab->scratch);
    fsdp_name_table_release(&vocab->ids);
    fsdp_arena_release(&vocab->arena);
}

/* --- tokens ----------------------------------------------------------------------------------- */

fsdp_status fsdp_gguf_vocab_set(fsdp_gguf_vocab *vocab, int64_t id, const char *text, size_t size,
                                const fsdp_gguf_token *like, fsdp_error *err)
{
    char shown[100];
    if (id < 0 || id >= vocab->most)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': token '%s' has the number %" PRId64,
                         vocab->path, fsdp_printable(text, size, shown, sizeof shown), id);
    size_t need = (size_t)id + 1, before = vocab->count;
    if ((int64_t)need > vocab->memory / FSDP_GGUF_TOKEN_ROOM)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s' has more than %" PRId64
                         " tokens, which take %d bytes each; allow more memory (--mem)",
                         vocab->path, vocab->memory / FSDP_GGUF_TOKEN_ROOM, FSDP_GGUF_TOKEN_ROOM);
    if (!fsdp_grow(&vocab->tokens, &vocab->capacity, need, sizeof *vocab->tokens))
        return fsdp_fail_memory(err, vocab->path);
    for (; vocab->count < need; vocab->count++)
        vocab->tokens[vocab->count] = (fsdp_gguf_token){.text = NULL};
    fsdp_gguf_token *token = &vocab->tokens[id];
    bool is_new = (size_t)id >= before || !token->text;
    *token = (fsdp_gguf_token){.text = is_new ? fsdp_arena_strndup(&vocab->arena, text, size)
                                              : token->text,
                               .size = is_new ? size : token->size,
                               .score = like->score,
                               .type = like->type};
    if (!token->text)
        return fsdp_fail_memory(err, vocab->path);
    if (!fsdp_name_table_find(&vocab->ids, token->text, token->size) &&
        !fsdp_name_table_put(&vocab->ids, token->text, token->size, (uint64_t)id))
        return fsdp_fail_memory(err, vocab->path);
    return FSDP_OK;
}

/* --- merges ----------------------------------------------------------------------------------- */

static fsdp_status check_room(const fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    const int64_t tokens = (int64_t)vocab->count * FSDP_GGUF_TOKEN_ROOM;
    if ((int64_t)vocab->merge_count < (vocab->memory - tokens) / FSDP_GGUF_MERGE_ROOM)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_LIMIT,
        "'%s' has more than %zu merges, which take %d bytes each; allow more memory (--mem)",
        vocab->path, vocab->merge_count, FSDP_GGUF_MERGE_ROOM);
}

/* llama.cpp merges the pair first whose token has the highest score. That is the first merge of
 * tokenizer.json when a token's score counts down with the merge that makes it, as in SentencePiece's own
 * files. */
static void score_token(fsdp_gguf_vocab *vocab, const fsdp_file_merge *merge)
{
    const uint64_t *id = fsdp_name_table_find(&vocab->ids, merge->text, merge->size);
    fsdp_gguf_token *token = id ? &vocab->tokens[*id] : NULL;
    if (token && token->type == FSDP_GGUF_NORMAL && token->score == FSDP_GGUF_NO_SCORE)
        token->score = -(double)vocab->merge_count;
}

fsdp_status fsdp_gguf_vocab_add_merge(fsdp_gguf_vocab *vocab, const fsdp_file_merge *merge,
                                      fsdp_error *err)
{
    FSDP_TRY(check_room(vocab, err));
    char *text = fsdp_arena_alloc(&vocab->arena, merge->size + 2, 1);
    if (!text || !fsdp_grow(&vocab->merges, &vocab->merge_capacity, vocab->merge_count + 1,
                            sizeof *vocab->merges))
        return fsdp_fail_memory(err, vocab->path);
    memcpy(text, merge->text, merge->first_size);
    text[merge->first_size] = ' ';
    memcpy(text + merge->first_size + 1, merge->text + merge->first_size,
           merge->size - merge->first_size);
    if (vocab->has_bytes && !vocab->is_unigram)
        score_token(vocab, merge);
    vocab->merges[vocab->merge_count++] = text;
    return FSDP_OK;
}

/* --- the model Unigram ------------------------------------------------------------------------ */

/* The size of a trie, the trie, and texts that end with 0. In the list of a pair each byte is a value. */
fsdp_status fsdp_gguf_take_charsmap(fsdp_gguf_vocab *vocab, const void *data, size_t size,
                                    fsdp_error *err)
{
    const char *bytes = data;
    const uint64_t head = sizeof(uint32_t);
    if (size <= head || fsdp_load_u32(bytes) + head >= size || bytes[size - 1] != '\0')
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': precompiled_charsmap is not a trie of characters and their "
                         "replacements",
                         vocab->path);
    if ((int64_t)size > vocab->memory / (int64_t)sizeof(fsdp_value))
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s' has a precompiled_charsmap of %zu bytes, which take %zu each; allow "
                         "more memory (--mem)",
                         vocab->path, size, sizeof(fsdp_value));
    vocab->unigram.charsmap = fsdp_arena_strndup(&vocab->arena, bytes, size);
    vocab->unigram.charsmap_size = size;
    return vocab->unigram.charsmap ? FSDP_OK : fsdp_fail_memory(err, vocab->path);
}

static fsdp_status add_flag(fsdp_named_values *out, const char *name, bool flag, fsdp_error *err)
{
    fsdp_value value = fsdp_value_bool(flag);
    return fsdp_named_values_add(out, name, &value, err);
}

static fsdp_status add_charsmap(const fsdp_gguf_unigram *unigram, fsdp_named_values *out,
                                fsdp_error *err)
{
    fsdp_value list = {.kind = FSDP_VALUE_NULL};
    FSDP_TRY(fsdp_value_set_items(&list, FSDP_VALUE_LIST, unigram->charsmap_size, err));
    for (size_t i = 0; i < unigram->charsmap_size; i++)
        list.as.list.items[i] = fsdp_value_i64((uint8_t)unigram->charsmap[i]);
    return fsdp_named_values_add(out, "tokenizer.ggml.precompiled_charsmap", &list, err);
}

/* Spaces that llama.cpp merges begin with one, whatever add_space_prefix says. */
static fsdp_status add_unigram(const fsdp_gguf_vocab *vocab, fsdp_named_values *out,
                               fsdp_error *err)
{
    const fsdp_gguf_unigram *unigram = &vocab->unigram;
    if (unigram->merges_spaces && !unigram->adds_space)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has a tokenizer that removes extra spaces and adds none before text "
                         "(add_dummy_prefix is false), but llama.cpp adds one",
                         vocab->path);
    FSDP_TRY(add_flag(out, "tokenizer.ggml.add_space_prefix", unigram->adds_space, err));
    FSDP_TRY(add_flag(out, "tokenizer.ggml.remove_extra_whitespaces", unigram->merges_spaces, err));
    return unigram->charsmap ? add_charsmap(unigram, out, err) : FSDP_OK;
}

/* Tokens around the text, of which llama.cpp has one at each end: no first one and </s> where no key says it.
 */
static fsdp_status add_ends(const fsdp_gguf_vocab *vocab, int64_t bos, int64_t eos,
                            fsdp_named_values *out, fsdp_error *err)
{
    const fsdp_template_ids *before = &vocab->unigram.before, *after = &vocab->unigram.after;
    const bool begins = before->count > 0, ends = after->count > 0;
    if (!vocab->unigram.has_template)
        return FSDP_OK;
    if (before->count > 1 || (begins && before->ids[0] != bos) || after->count > 1 ||
        (ends && after->ids[0] != eos))
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' has a tokenizer.json whose template adds other tokens than bos_token "
            "before text and eos_token after it, and llama.cpp adds no others",
            vocab->path);
    if (begins)
        FSDP_TRY(add_flag(out, "tokenizer.ggml.add_bos_token", true, err));
    return ends ? FSDP_OK : add_flag(out, "tokenizer.ggml.add_eos_token", false, err);
}

/* --- pairs ------------------------------------------------------------------------------------ */

/* "<0x0A>" */
bool fsdp_gguf_is_byte(const char *text, size_t size)
{
    return size == 6 && memcmp(text, "<0x", 3) == 0 && text[5] == '>' &&
           strspn(text + 3, "0123456789ABCDEFabcdef") == 2;
}

/* A vocabulary that is padded has tokens of no text for the rest of its rows: "[PAD7]". */
static fsdp_status pad(fsdp_gguf_vocab *vocab, fsdp_error *err)
{
    bool is_known = vocab->rows > 0 && vocab->rows <= FSDP_GGUF_TOKENS_MOST;
    size_t rows = is_known ? (size_t)vocab->rows : 0;
    bool has_pieces = vocab->is_sentencepiece || vocab->unigram.is_used;
    double score = has_pieces ? PADDING_SCORE : FSDP_GGUF_NO_SCORE;
    for (size_t id = 0; id < vocab->count || id < rows; id++) {
        char name[40];
        if (id < vocab->count && vocab->tokens[id].text)
            continue;
        snprintf(name, sizeof name, "%s[PAD%zu]", vocab->is_wordpiece ? FSDP_GGUF_WORD_SIGN : "",
                 id);
        fsdp_gguf_token like = {.score = score, .type = FSDP_GGUF_UNUSED};
        FSDP_TRY(fsdp_gguf_vocab_set(vocab, (int64_t)id, name, strlen(name), &like, err));
    }
    return FSDP_OK;
}

static fsdp_status begin_list(fsdp_value *list, size_t count, fsdp_error *err)
{
    *list = (fsdp_value){.kind = FSDP_VALUE_NULL};
    return fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err);
}

static fsdp_status add_tokens(const fsdp_gguf_vocab *vocab, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    FSDP_TRY(begin_list(&list, vocab->count, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < vocab->count && st == FSDP_OK; i++)
        st = fsdp_value_set_bytes(&list.as.list.items[i], FSDP_VALUE_STRING, vocab->tokens[i].text,
                                  vocab->tokens[i].size, err);
    if (st == FSDP_OK)
        return fsdp_named_values_add(out, "tokenizer.ggml.tokens", &list, err);
    fsdp_value_release(&list);
    return st;
}

static fsdp_status add_types(const fsdp_gguf_vocab *vocab, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    bool has_bytes = vocab->has_bytes || vocab->is_unigram;
    int64_t unknown =
        vocab->unigram.is_used ? vocab->own_ids[FSDP_GGUF_UNK] : vocab->ids_of[FSDP_GGUF_UNK];
    FSDP_TRY(begin_list(&list, vocab->count, err));
    for (size_t i = 0; i < vocab->count; i++) {
        const fsdp_gguf_token *token = &vocab->tokens[i];
        fsdp_gguf_token_type type = token->type;
        if (has_bytes && fsdp_gguf_is_byte(token->text, token->size))
            type = FSDP_GGUF_BYTE;
        if (has_bytes && (int64_t)i == unknown)
            type = FSDP_GGUF_UNKNOWN;
        list.as.list.items[i] = fsdp_value_i64(type);
    }
    return fsdp_named_values_add(out, "tokenizer.ggml.token_type", &list, err);
}

static fsdp_status add_scores(const fsdp_gguf_vocab *vocab, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    FSDP_TRY(begin_list(&list, vocab->count, err));
    for (size_t i = 0; i < vocab->count; i++)
        list.as.list.items[i] = fsdp_value_f64((double)(float)vocab->tokens[i].score);
    return fsdp_named_values_add(out, "tokenizer.ggml.scores", &list, err);
}

static fsdp_status add_merges(const fsdp_gguf_vocab *vocab, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    FSDP_TRY(begin_list(&list, vocab->merge_count, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < vocab->merge_count && st == FSDP_OK; i++)
        st = fsdp_value_set_bytes(&list.as.list.items[i], FSDP_VALUE_STRING, vocab->merges[i],
                                  strlen(vocab->merges[i]), err);
    if (st == FSDP_OK)
        return fsdp_named_values_add(out, "tokenizer.ggml.merges", &list, err);
    fsdp_value_release(&list);
    return st;
}

/* The number that tokenizer_config.json names, else config.json, else tokenizer.model. */
static int64_t special_id(const fsdp_gguf_vocab *vocab, const fsdp_gguf_tokens *tokens,
                          fsdp_gguf_special which)
{
    int64_t id = vocab->ids_of[which];
    if (id < 0 && which == FSDP_GGUF_BOS)
        id = tokens->bos;
    if (id < 0 && which == FSDP_GGUF_EOS)
        id = tokens->eos;
    if (id < 0 && which == FSDP_GGUF_PAD && vocab->unigram.is_used)
        id = tokens->pad;
    if (which == FSDP_GGUF_UNK && vocab->unigram.is_used)
        return vocab->own_ids[which]; /* the one with which text is encoded */
    bool has_pieces = vocab->is_sentencepiece || vocab->unigram.is_used;
    bool is_none = id < 0 || (has_pieces && id >= (int64_t)vocab->count);
    return is_none ? vocab->own_ids[which] : id;
}

static fsdp_status add_specials(const fsdp_gguf_vocab *vocab, const fsdp_gguf_tokens *tokens,
                                fsdp_named_values *out, fsdp_error *err)
{
    for (int i = 0; i < FSDP_GGUF_SPECIALS; i++) {
        int64_t id = special_id(vocab, tokens, (fsdp_gguf_special)i);
        fsdp_value value = fsdp_value_i64(id);
        bool is_written = keys[i] && (i != FSDP_GGUF_MASK || vocab->is_wordpiece);
        if (id >= 0 && is_written)
            FSDP_TRY(fsdp_named_values_add(out, keys[i], &value, err));
    }
    return add_ends(vocab, special_id(vocab, tokens, FSDP_GGUF_BOS),
                    special_id(vocab, tokens, FSDP_GGUF_EOS), out, err);
}

/* Whether tokens are merged, or chosen, by their scores. */
static bool is_scored(const fsdp_gguf_vocab *vocab)
{
    return vocab->is_unigram || vocab->has_bytes || vocab->is_sentencepiece;
}

/* llama.cpp knows the kinds of tokenizers by these names. */
static const char *model_name(const fsdp_gguf_vocab *vocab)
{
    if (vocab->is_wordpiece)
        return FSDP_GGUF_WORDPIECE;
    if (vocab->unigram.is_used)
        return "t5";
    return is_scored(vocab) ? "llama" : "gpt2";
}

fsdp_status fsdp_gguf_vocab_pairs(fsdp_gguf_vocab *vocab, const fsdp_gguf_tokens *tokens,
                                  fsdp_named_values *out, fsdp_error *err)
{
    const char *pre = is_scored(vocab) || vocab->is_wordpiece ? "default" : tokens->pre;
    if (vocab->family == FSDP_TOKENS_WORDPIECE && !vocab->is_wordpiece)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': the tokenizer is not of the type WordPiece, but llama.cpp runs "
                         "models of this type with no other",
                         vocab->path);
    FSDP_TRY(pad(vocab, err));
    FSDP_TRY(fsdp_named_values_add_text(out, "tokenizer.ggml.model", model_name(vocab), err));
    FSDP_TRY(fsdp_named_values_add_text(out, "tokenizer.ggml.pre", pre, err));
    FSDP_TRY(add_tokens(vocab, out, err));
    if (is_scored(vocab))
        FSDP_TRY(add_scores(vocab, out, err));
    FSDP_TRY(add_types(vocab, out, err));
    if (vocab->merge_count > 0)
        FSDP_TRY(add_merges(vocab, out, err));
    if (vocab->unigram.is_used)
        FSDP_TRY(add_unigram(vocab, out, err));
    else if (vocab->space_prefix >= 0)
        FSDP_TRY(add_flag(out, "tokenizer.ggml.add_space_prefix", vocab->space_prefix > 0, err));
    return add_specials(vocab, tokens, out, err);
}

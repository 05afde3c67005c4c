/*
 * The tokenizer of a model as key-value pairs of GGUF, by way of a vocabulary: see gguf_values.h.
 * tokenizer.json has the tokens and merges, tokenizer_config.json the special ones and the chat template. A
 * directory without tokenizer.json has the tokens in tokenizer.model, spiece.model or vocab.txt,
 * added_tokens.json and tokenizer_config.json.
 */
#include "base/core/bytes.h"
#include "base/core/mem.h"
#include "base/data/json.h"
#include "base/data/name_table.h"
#include "base/text.h"
#include "formats/sentencepiece.h"
#include "formats/source.h"
#include "formats/tokenizer_json.h"
#include "statedict/gguf_model/gguf_vocab.h"
#include <fsdp/checkpoint.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* === the vocabulary =========================================================================== */

/* NO_SCORE: of a token that no merge makes; those of merges are above it. */
enum { TOKENS_MOST = 4 << 20, NO_SCORE = -1000000 };

/* Bytes of a token, and of a merge, in all lists and copies that are made of it. */
enum { TOKEN_ROOM = 512, MERGE_ROOM = 256, MEMORY_BESIDE = 32 << 20 };
enum { LARGEST_FILE = 256 << 20, LARGEST_CONFIG = 16 << 20 };

/* llama.cpp's converter gives them to rows without a piece, and to tokens that are added to the pieces. */
enum { PADDING_SCORE = -10000, ADDED_SCORE = -1000 };

enum {
    WORD_SIGN = sizeof FSDP_GGUF_WORD_SIGN - 1,
    CONTINUATION = sizeof FSDP_GGUF_CONTINUATION - 1
};

typedef struct token_row {
    char *text; /* NULL: no token has this number */
    size_t size;
    double score;
    fsdp_gguf_token_type type;
} token_row;

/* What llama.cpp computes for the model Unigram, as SentencePiece does. */
typedef struct unigram_rules {
    bool is_used; /* the tokens are those of such a model */
    bool adds_space, merges_spaces;
    const char *charsmap; /* replacements of characters, in the arena; NULL: none */
    size_t charsmap_size;
    bool cuts_words;   /* no token is of several words, as llama.cpp does not know */
    bool has_template; /* a tokenizer.json says which tokens are around the text: */
    fsdp_template_ids before, after;
} unigram_rules;

/* What tokenizer_config.json says of a WordPiece tokenizer, in the order of its members there. */
typedef enum word_rule { LOWERCASE, STRIPS_ACCENTS, CUTS_CHINESE, WORD_RULES } word_rule;

typedef struct vocabulary {
    const char *path; /* of the file that is read, for messages */
    fsdp_arena arena;
    fsdp_text scratch;   /* of the token that is read */
    fsdp_name_table ids; /* of tokens */
    token_row *tokens;
    size_t count, capacity;
    char **merges;
    size_t merge_count, merge_capacity;
    int64_t memory;          /* that tokens may take (TOKEN_ROOM) */
    int64_t most;            /* tokens have lower numbers: the files that were read bound them */
    fsdp_token_model family; /* that llama.cpp has for models of this family */
    int64_t rows; /* tokens that config.json says the model has; below 1: it does not say */
    bool is_unigram,
        has_bytes;         /* of tokenizer.json: the model "Unigram"; tokens <0x00> for bytes */
    bool is_sentencepiece; /* of tokenizer.model: its tokens have their types and scores */
    bool is_wordpiece;     /* of tokenizer.json or of vocab.txt, which has no rules: is_word_list */
    bool is_word_list;
    fsdp_wordpiece_rules words;
    bool is_tiktoken; /* tokenizer.model is of another kind, which was not read */
    int space_prefix; /* whether text gets a space before it; -1: as llama.cpp does without a word */
    unigram_rules unigram;
    int64_t ids_of[FSDP_GGUF_SPECIALS];  /* that tokenizer_config.json names; -1: none */
    int64_t own_ids[FSDP_GGUF_SPECIALS]; /* that the file of the tokens names itself; -1: none */
} vocabulary;

static const char *const keys[FSDP_GGUF_SPECIALS] = {
    [FSDP_GGUF_BOS] = "tokenizer.ggml.bos_token_id",
    [FSDP_GGUF_EOS] = "tokenizer.ggml.eos_token_id",
    [FSDP_GGUF_UNK] = "tokenizer.ggml.unknown_token_id",
    [FSDP_GGUF_PAD] = "tokenizer.ggml.padding_token_id",
    [FSDP_GGUF_SEP] = "tokenizer.ggml.seperator_token_id", /* llama.cpp's spelling */
    [FSDP_GGUF_MASK] = "tokenizer.ggml.mask_token_id"};

/* --- tokens ----------------------------------------------------------------------------------- */

/* Gives the token of this number the score and type of `like`, and this text (copied) unless it has one. */
static fsdp_status set_token(vocabulary *vocab, int64_t id, const char *text, size_t size,
                             const token_row *like, fsdp_error *err)
{
    char shown[100];
    if (id < 0 || id >= vocab->most)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': token '%s' has the number %" PRId64,
                         vocab->path, fsdp_printable(text, size, shown, sizeof shown), id);
    size_t need = (size_t)id + 1, before = vocab->count;
    if ((int64_t)need > vocab->memory / TOKEN_ROOM)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s' has more than %" PRId64
                         " tokens, which take %d bytes each; allow more memory (--mem)",
                         vocab->path, vocab->memory / TOKEN_ROOM, TOKEN_ROOM);
    if (!fsdp_grow(&vocab->tokens, &vocab->capacity, need, sizeof *vocab->tokens))
        return fsdp_fail_memory(err, vocab->path);
    for (; vocab->count < need; vocab->count++)
        vocab->tokens[vocab->count] = (token_row){.text = NULL};
    token_row *token = &vocab->tokens[id];
    bool is_new = (size_t)id >= before || !token->text;
    *token =
        (token_row){.text = is_new ? fsdp_arena_strndup(&vocab->arena, text, size) : token->text,
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

/* "<0x0A>" */
static bool is_byte(const char *text, size_t size)
{
    return size == 6 && memcmp(text, "<0x", 3) == 0 && text[5] == '>' &&
           strspn(text + 3, "0123456789ABCDEFabcdef") == 2;
}

/* --- merges ----------------------------------------------------------------------------------- */

static fsdp_status check_room(const vocabulary *vocab, fsdp_error *err)
{
    const int64_t tokens = (int64_t)vocab->count * TOKEN_ROOM;
    if ((int64_t)vocab->merge_count < (vocab->memory - tokens) / MERGE_ROOM)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_LIMIT,
        "'%s' has more than %zu merges, which take %d bytes each; allow more memory (--mem)",
        vocab->path, vocab->merge_count, MERGE_ROOM);
}

/* llama.cpp merges the pair first whose token has the highest score. That is the first merge of
 * tokenizer.json when a token's score counts down with the merge that makes it, as in SentencePiece's own
 * files. */
static void score_token(vocabulary *vocab, const fsdp_file_merge *merge)
{
    const uint64_t *id = fsdp_name_table_find(&vocab->ids, merge->text, merge->size);
    token_row *token = id ? &vocab->tokens[*id] : NULL;
    if (token && token->type == FSDP_GGUF_NORMAL && token->score == NO_SCORE)
        token->score = -(double)vocab->merge_count;
}

/* Adds a merge, after all tokens. FSDP_ERR_LIMIT: it takes more memory than the tokens leave. */
static fsdp_status add_merge(vocabulary *vocab, const fsdp_file_merge *merge, fsdp_error *err)
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

/* Keeps a copy of the replacements of characters: the size of a trie, the trie, and texts that end with 0. In
 * the list of a pair each byte is a value. FSDP_ERR_DAMAGED: llama.cpp does not load them. */
static fsdp_status take_charsmap(vocabulary *vocab, const void *data, size_t size, fsdp_error *err)
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

static fsdp_status add_charsmap(const unigram_rules *unigram, fsdp_named_values *out,
                                fsdp_error *err)
{
    fsdp_value list = {.kind = FSDP_VALUE_NULL};
    FSDP_TRY(fsdp_value_set_items(&list, FSDP_VALUE_LIST, unigram->charsmap_size, err));
    for (size_t i = 0; i < unigram->charsmap_size; i++)
        list.as.list.items[i] = fsdp_value_i64((uint8_t)unigram->charsmap[i]);
    return fsdp_named_values_add(out, "tokenizer.ggml.precompiled_charsmap", &list, err);
}

/* Spaces that llama.cpp merges begin with one, whatever add_space_prefix says. */
static fsdp_status add_unigram(const vocabulary *vocab, fsdp_named_values *out, fsdp_error *err)
{
    const unigram_rules *unigram = &vocab->unigram;
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
static fsdp_status add_ends(const vocabulary *vocab, int64_t bos, int64_t eos,
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

/* A vocabulary that is padded has tokens of no text for the rest of its rows: "[PAD7]". */
static fsdp_status pad(vocabulary *vocab, fsdp_error *err)
{
    bool is_known = vocab->rows > 0 && vocab->rows <= TOKENS_MOST;
    size_t rows = is_known ? (size_t)vocab->rows : 0;
    bool has_pieces = vocab->is_sentencepiece || vocab->unigram.is_used;
    double score = has_pieces ? PADDING_SCORE : NO_SCORE;
    for (size_t id = 0; id < vocab->count || id < rows; id++) {
        char name[40];
        if (id < vocab->count && vocab->tokens[id].text)
            continue;
        snprintf(name, sizeof name, "%s[PAD%zu]", vocab->is_wordpiece ? FSDP_GGUF_WORD_SIGN : "",
                 id);
        token_row like = {.score = score, .type = FSDP_GGUF_UNUSED};
        FSDP_TRY(set_token(vocab, (int64_t)id, name, strlen(name), &like, err));
    }
    return FSDP_OK;
}

static fsdp_status begin_list(fsdp_value *list, size_t count, fsdp_error *err)
{
    *list = (fsdp_value){.kind = FSDP_VALUE_NULL};
    return fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err);
}

/* The tokens, or the merges. */
static fsdp_status add_texts(const vocabulary *vocab, bool merges, fsdp_named_values *out,
                             fsdp_error *err)
{
    fsdp_value list;
    size_t count = merges ? vocab->merge_count : vocab->count;
    FSDP_TRY(begin_list(&list, count, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < count && st == FSDP_OK; i++) {
        const char *text = merges ? vocab->merges[i] : vocab->tokens[i].text;
        size_t size = merges ? strlen(text) : vocab->tokens[i].size;
        st = fsdp_value_set_bytes(&list.as.list.items[i], FSDP_VALUE_STRING, text, size, err);
    }
    if (st == FSDP_OK)
        return fsdp_named_values_add(
            out, merges ? "tokenizer.ggml.merges" : "tokenizer.ggml.tokens", &list, err);
    fsdp_value_release(&list);
    return st;
}

static fsdp_status add_types(const vocabulary *vocab, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    bool has_bytes = vocab->has_bytes || vocab->is_unigram;
    int64_t unknown =
        vocab->unigram.is_used ? vocab->own_ids[FSDP_GGUF_UNK] : vocab->ids_of[FSDP_GGUF_UNK];
    FSDP_TRY(begin_list(&list, vocab->count, err));
    for (size_t i = 0; i < vocab->count; i++) {
        const token_row *token = &vocab->tokens[i];
        fsdp_gguf_token_type type = token->type;
        if (has_bytes && is_byte(token->text, token->size))
            type = FSDP_GGUF_BYTE;
        if (has_bytes && (int64_t)i == unknown)
            type = FSDP_GGUF_UNKNOWN;
        list.as.list.items[i] = fsdp_value_i64(type);
    }
    return fsdp_named_values_add(out, "tokenizer.ggml.token_type", &list, err);
}

static fsdp_status add_scores(const vocabulary *vocab, fsdp_named_values *out, fsdp_error *err)
{
    fsdp_value list;
    FSDP_TRY(begin_list(&list, vocab->count, err));
    for (size_t i = 0; i < vocab->count; i++)
        list.as.list.items[i] = fsdp_value_f64((double)(float)vocab->tokens[i].score);
    return fsdp_named_values_add(out, "tokenizer.ggml.scores", &list, err);
}

/* The number that tokenizer_config.json names, else config.json, else tokenizer.model. */
static int64_t special_id(const vocabulary *vocab, const fsdp_gguf_tokens *tokens,
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

static fsdp_status add_specials(const vocabulary *vocab, const fsdp_gguf_tokens *tokens,
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
static bool is_scored(const vocabulary *vocab)
{
    return vocab->is_unigram || vocab->has_bytes || vocab->is_sentencepiece;
}

/* llama.cpp knows the kinds of tokenizers by these names. */
static const char *model_name(const vocabulary *vocab)
{
    if (vocab->is_wordpiece)
        return FSDP_GGUF_WORDPIECE;
    if (vocab->unigram.is_used)
        return "t5";
    return is_scored(vocab) ? "llama" : "gpt2";
}

/* Adds tokenizer.ggml.* to out. Rows that have no token get one of the type UNUSED. */
static fsdp_status add_pairs(vocabulary *vocab, const fsdp_gguf_tokens *tokens,
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
    FSDP_TRY(add_texts(vocab, false, out, err));
    if (is_scored(vocab))
        FSDP_TRY(add_scores(vocab, out, err));
    FSDP_TRY(add_types(vocab, out, err));
    if (vocab->merge_count > 0)
        FSDP_TRY(add_texts(vocab, true, out, err));
    if (vocab->unigram.is_used)
        FSDP_TRY(add_unigram(vocab, out, err));
    else if (vocab->space_prefix >= 0)
        FSDP_TRY(add_flag(out, "tokenizer.ggml.add_space_prefix", vocab->space_prefix > 0, err));
    return add_specials(vocab, tokens, out, err);
}

/* === SentencePiece's tokenizer.model ========================================================== */

/* Its pieces as tokens of GGUF, with the types and scores that llama.cpp's converter gives them. */

/* llama.cpp looks for tokens of users in the text itself, where spaces are spaces, and prints them as they
 * are. The result is in the arena; NULL: there is no memory. */
static char *with_spaces(vocabulary *vocab, const char *text, size_t *size)
{
    char *copy = fsdp_arena_strndup(&vocab->arena, text, *size);
    size_t at = 0, out = 0;
    while (copy && at < *size) {
        bool is_space =
            *size - at >= WORD_SIGN && memcmp(text + at, FSDP_GGUF_WORD_SIGN, WORD_SIGN) == 0;
        copy[out++] = is_space ? ' ' : text[at];
        at += is_space ? WORD_SIGN : 1;
    }
    if (copy)
        copy[out] = '\0';
    *size = out;
    return copy;
}

static fsdp_status put_token(vocabulary *vocab, int64_t id, const char *text, size_t size,
                             const token_row *like, fsdp_error *err)
{
    if (like->type == FSDP_GGUF_USER_DEFINED)
        text = with_spaces(vocab, text, &size);
    return text ? set_token(vocab, id, text, size, like, err) : fsdp_fail_memory(err, vocab->path);
}

static fsdp_status take_piece(vocabulary *vocab, size_t number, const fsdp_piece *piece,
                              fsdp_error *err)
{
    char shown[100];
    const token_row like = {.score = (double)piece->score,
                            .type = (fsdp_gguf_token_type)piece->type};
    fsdp_printable(piece->text, piece->size, shown, sizeof shown);
    const uint64_t *same = fsdp_name_table_find(&vocab->ids, piece->text, piece->size);
    if (same)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' is not a model of SentencePiece: piece %zu is '%s', as piece %" PRIu64 " is",
            vocab->path, number, shown, *same);
    if (piece->type == FSDP_PIECE_BYTE && !is_byte(piece->text, piece->size))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is not a model of SentencePiece: piece %zu is a byte and reads '%s'",
                         vocab->path, number, shown);
    return put_token(vocab, (int64_t)number, piece->text, piece->size, &like, err);
}

static fsdp_status check_pieces(const vocabulary *vocab, const fsdp_sentencepiece *model,
                                fsdp_error *err)
{
    bool splits_words = model->model == FSDP_PIECE_WORD || model->model == FSDP_PIECE_CHAR;
    if (splits_words)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' is a model of SentencePiece of the type %s, but llama.cpp runs BPE and unigram",
            vocab->path, model->model == FSDP_PIECE_WORD ? "word" : "char");
    if (vocab->rows > 0 && model->count > (size_t)vocab->rows)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has %zu pieces, and the model's vocab_size is %" PRId64
                         ": it is the tokenizer of another model",
                         vocab->path, model->count, vocab->rows);
    return FSDP_OK;
}

/* What the file says of text, for a tokenizer that llama.cpp has. */
static fsdp_status take_unigram_model(vocabulary *vocab, const fsdp_sentencepiece *model,
                                      fsdp_error *err)
{
    bool has_bytes = false;
    for (size_t i = 0; i < model->count; i++)
        has_bytes = has_bytes || model->pieces[i].type == FSDP_PIECE_BYTE;
    const char *what = has_bytes             ? "bytes in place of unknown characters"
                       : model->keeps_spaces ? "spaces that stay spaces (escape_whitespaces)"
                       : model->ends_words   ? "spaces that end words (treat_whitespace_as_suffix)"
                                             : NULL;
    if (what)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is a unigram model of SentencePiece with %s, which llama.cpp does "
                         "not have in such a model",
                         vocab->path, what);
    vocab->unigram.is_used = true;
    vocab->unigram.adds_space = model->adds_space;
    vocab->unigram.merges_spaces = model->merges_spaces;
    return model->charsmap ? take_charsmap(vocab, model->charsmap, model->charsmap_size, err)
                           : FSDP_OK;
}

static fsdp_status take_model(vocabulary *vocab, const fsdp_sentencepiece *model, fsdp_error *err)
{
    FSDP_TRY(check_pieces(vocab, model, err));
    for (size_t i = 0; i < model->count; i++)
        FSDP_TRY(take_piece(vocab, i, &model->pieces[i], err));
    vocab->is_sentencepiece = true;
    vocab->space_prefix = model->adds_space ? -1 : 0;
    vocab->own_ids[FSDP_GGUF_BOS] = model->bos;
    vocab->own_ids[FSDP_GGUF_EOS] = model->eos;
    vocab->own_ids[FSDP_GGUF_UNK] = model->unk;
    vocab->own_ids[FSDP_GGUF_PAD] = model->pad;
    return vocab->family == FSDP_TOKENS_UNIGRAM && model->model == FSDP_PIECE_UNIGRAM
               ? take_unigram_model(vocab, model, err)
               : FSDP_OK;
}

/* Takes the pieces of a tokenizer.model, and none of one of tiktoken. FSDP_ERR_USAGE: llama.cpp does not run
 * such a model. */
static fsdp_status take_sentencepiece(vocabulary *vocab, const char *data, size_t size,
                                      fsdp_error *err)
{
    fsdp_sentencepiece model;
    vocab->is_tiktoken = fsdp_sentencepiece_is_tiktoken(data, size);
    if (vocab->is_tiktoken)
        return FSDP_OK;
    const int64_t room = vocab->memory / TOKEN_ROOM;
    const size_t most = room < TOKENS_MOST ? (size_t)room : TOKENS_MOST;
    fsdp_status st = fsdp_sentencepiece_read(data, size, vocab->path, most, &model, err);
    if (st == FSDP_ERR_LIMIT && most < TOKENS_MOST)
        st = fsdp_fail(
            err, FSDP_ERR_LIMIT,
            "'%s' has more than %zu pieces, which take %d bytes each; allow more memory (--mem)",
            vocab->path, most, TOKEN_ROOM);
    if (st == FSDP_OK)
        st = take_model(vocab, &model, err);
    fsdp_sentencepiece_release(&model);
    return st;
}

/* --- added tokens ----------------------------------------------------------------------------- */

static bool is_between(const char *text, size_t size, const char *begin, const char *end)
{
    size_t n = strlen(begin);
    return size >= n + strlen(end) && memcmp(text, begin, n) == 0 &&
           fsdp_bytes_end(text, size, end);
}

/* Some models add tokens as plain ones although they control the model; llama.cpp's converter knows them by
 * the same texts. */
static bool looks_special(const char *text, size_t size)
{
    return fsdp_bytes_are(text, size, "<pad>") || fsdp_bytes_are(text, size, "<mask>") ||
           fsdp_bytes_are(text, size, "<2mass>") || fsdp_bytes_are(text, size, "[@BOS@]") ||
           is_between(text, size, "<|", "|>") ||
           is_between(text, size, "<\xEF\xBD\x9C", "\xEF\xBD\x9C>") ||
           is_between(text, size, "<unused", ">");
}

/* Takes a token that another file adds to a tokenizer.model, or puts in place of one of its pieces. A token
 * after the rows of the model is left out, as by llama.cpp's converter. */
static fsdp_status add_to_sentencepiece(vocabulary *vocab, int64_t id, const char *text,
                                        size_t size, bool is_special, fsdp_error *err)
{
    if (vocab->rows > 0 && id >= vocab->rows)
        return FSDP_OK;
    token_row *token = id >= 0 && id < (int64_t)vocab->count ? &vocab->tokens[id] : NULL;
    bool is_same =
        token && token->text && token->size == size && memcmp(token->text, text, size) == 0;
    if (is_same && token->type == FSDP_GGUF_UNKNOWN)
        return FSDP_OK;
    if (token && !is_same)
        token->text = NULL; /* another text takes the place of the piece's */
    is_special = is_special || looks_special(text, size);
    const token_row like = {.score = ADDED_SCORE,
                            .type = is_special ? FSDP_GGUF_CONTROL : FSDP_GGUF_USER_DEFINED};
    return put_token(vocab, id, text, size, &like, err);
}

/* === the files ================================================================================ */

/* --- WordPiece: tokens as llama.cpp spells them, and what vocab.txt says ------------------------ */

static bool begins(const char *text, size_t size, const char *with)
{
    return size >= strlen(with) && memcmp(text, with, strlen(with)) == 0;
}

static fsdp_status take_wordpiece(vocabulary *vocab, const fsdp_tokenizer_json *file,
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
static fsdp_status take_word_list(vocabulary *vocab, const char *text, size_t size, fsdp_error *err)
{
    const token_row like = {.score = NO_SCORE, .type = FSDP_GGUF_NORMAL};
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
        FSDP_TRY(set_token(vocab, id, text, n, &like, err));
        text = line_end + (line_end < end);
    }
    return FSDP_OK;
}

static fsdp_status add_to_wordpiece(vocabulary *vocab, int64_t id, const char *text, size_t size,
                                    bool is_special, fsdp_error *err)
{
    const token_row like = {.score = NO_SCORE,
                            .type = is_special ? FSDP_GGUF_CONTROL : FSDP_GGUF_USER_DEFINED};
    const uint64_t *known = fsdp_name_table_find(&vocab->ids, text, size);
    bool is_taken = id >= 0 && id < (int64_t)vocab->count && vocab->tokens[id].text;
    char shown[100];
    if (known ? (int64_t)*known != id : is_taken)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': the added token '%s' has the number %" PRId64
                         ", but vocab.txt says otherwise",
                         vocab->path, fsdp_printable(text, size, shown, sizeof shown), id);
    return set_token(vocab, id, text, size, &like, err);
}

/* tokenizer.json says it already, and programs differ in which of the two they believe. */
static fsdp_status set_word_rule(vocabulary *vocab, word_rule rule, bool is_set, fsdp_error *err)
{
    static const char *const names[] = {"do_lower_case", "strip_accents", "tokenize_chinese_chars"};
    fsdp_wordpiece_rules *words = &vocab->words;
    if (!vocab->is_wordpiece)
        return FSDP_OK;
    if (rule == CUTS_CHINESE && !is_set)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' says tokenize_chinese_chars false, but llama.cpp makes each of "
                         "these letters a word",
                         vocab->path);
    if (rule == CUTS_CHINESE)
        return FSDP_OK;
    bool is_known = rule == LOWERCASE || words->strips_accents < 0 ? words->lowercase
                                                                   : words->strips_accents > 0;
    if (!vocab->is_word_list)
        return is_known == is_set
                   ? FSDP_OK
                   : fsdp_fail(
                         err, FSDP_ERR_USAGE,
                         "'%s' says %s %s, but tokenizer.json says the opposite; make them agree",
                         vocab->path, names[rule], is_set ? "true" : "false");
    if (rule == LOWERCASE)
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

static bool is_token(const vocabulary *vocab, int64_t id)
{
    return id >= 0 && id < (int64_t)vocab->count && vocab->tokens[id].text;
}

/* llama.cpp has numbers of its own for those that a file does not name. */
static fsdp_status complete_specials(vocabulary *vocab, fsdp_error *err)
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
static fsdp_status spell(vocabulary *vocab, token_row *token, fsdp_error *err)
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

static fsdp_status spell_wordpieces(vocabulary *vocab, fsdp_error *err)
{
    char shown[100];
    FSDP_TRY(complete_specials(vocab, err));
    fsdp_name_table_clear(&vocab->ids);
    for (size_t id = 0; id < vocab->count; id++) {
        token_row *token = &vocab->tokens[id];
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

static fsdp_status add_word_rules(const vocabulary *vocab, fsdp_named_values *out, fsdp_error *err)
{
    const fsdp_wordpiece_rules *words = &vocab->words;
    FSDP_TRY(add_flag(out, FSDP_GGUF_LOWERCASE_KEY, words->lowercase, err));
    return words->strips_accents < 0
               ? FSDP_OK
               : add_flag(out, FSDP_GGUF_STRIPS_KEY, words->strips_accents > 0, err);
}

/* --- tokenizer.json --------------------------------------------------------------------------- */

/* One after the rows of the model is of no use to it, as the token for images of Gemma 3. */
static fsdp_status take_added(void *context, const fsdp_json *json, const fsdp_added_token *added,
                              fsdp_error *err)
{
    vocabulary *vocab = context;
    token_row like = {.score = NO_SCORE,
                      .type = added->special ? FSDP_GGUF_CONTROL : FSDP_GGUF_USER_DEFINED};
    (void)json;
    return vocab->rows > 0 && added->id >= vocab->rows
               ? FSDP_OK
               : set_token(vocab, added->id, added->text, added->size, &like, err);
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
    vocabulary *vocab = context;
    token_row like = {.score = vocab->is_unigram ? token->score : NO_SCORE,
                      .type = FSDP_GGUF_NORMAL};
    (void)json;
    if (token->id >= 0 && token->id < (int64_t)vocab->count && vocab->tokens[token->id].text)
        like.type = vocab->tokens[token->id].type;
    if (vocab->unigram.cuts_words && like.type == FSDP_GGUF_NORMAL && spans_words(token))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': token %" PRId64 " is of several words, which the pre-tokenizer "
                         "keeps apart, but llama.cpp would use it",
                         vocab->path, token->id);
    return set_token(vocab, token->id, token->text, token->size, &like, err);
}

static fsdp_status take_merge(void *context, const fsdp_json *json, const fsdp_file_merge *merge,
                              fsdp_error *err)
{
    (void)json;
    return add_merge(context, merge, err);
}

/* What the file says of text, for a tokenizer that llama.cpp has. */
static fsdp_status take_unigram(vocabulary *vocab, const fsdp_tokenizer_json *file, fsdp_error *err)
{
    fsdp_unigram_rules rules;
    fsdp_status st = fsdp_tokenizer_json_unigram(file, &rules, err);
    if (st == FSDP_OK && rules.charsmap)
        st = take_charsmap(vocab, rules.charsmap, rules.charsmap_size, err);
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

static fsdp_status take_file_parts(vocabulary *vocab, const fsdp_tokenizer_json *file,
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

static fsdp_status read_tokenizer(vocabulary *vocab, const char *text, size_t size, fsdp_error *err)
{
    fsdp_tokenizer_json file;
    fsdp_status st = fsdp_tokenizer_json_open(&file, text, size, vocab->path, err);
    if (st == FSDP_OK)
        st = take_file_parts(vocab, &file, err);
    fsdp_tokenizer_json_release(&file);
    return st;
}

/* --- tokens next to tokenizer.model and vocab.txt ------------------------------------------------ */

static fsdp_status add_token(vocabulary *vocab, int64_t id, const char *text, size_t size,
                             bool is_special, fsdp_error *err)
{
    return vocab->is_word_list ? add_to_wordpiece(vocab, id, text, size, is_special, err)
                               : add_to_sentencepiece(vocab, id, text, size, is_special, err);
}

/* added_tokens.json: {"<tool>": 32000, ...} */
static fsdp_status read_added_list(fsdp_json *json, vocabulary *vocab, fsdp_named_values *out,
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
static fsdp_status take_decoder(fsdp_json *json, vocabulary *vocab, fsdp_error *err)
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
static void find_specials(vocabulary *vocab, const special_name *names)
{
    for (int i = 0; i < FSDP_GGUF_SPECIALS; i++) {
        const uint64_t *id =
            names[i].text ? fsdp_name_table_find(&vocab->ids, names[i].text, names[i].size) : NULL;
        const token_row *token = id ? &vocab->tokens[*id] : NULL;
        bool is_replaced = token && (token->size != names[i].size ||
                                     memcmp(token->text, names[i].text, token->size) != 0);
        if (token && !is_replaced)
            vocab->ids_of[i] = (int64_t)*id;
    }
}

static fsdp_status note_special(fsdp_json *json, vocabulary *vocab, special_name *out,
                                fsdp_error *err)
{
    FSDP_TRY(fsdp_json_string(json, &out->text, &out->size, err));
    out->text = fsdp_arena_strndup(&vocab->arena, out->text, out->size);
    return out->text ? FSDP_OK : fsdp_fail_memory(err, vocab->path);
}

/* "<s>", or {"content": "<s>", ...} */
static fsdp_status take_special(fsdp_json *json, vocabulary *vocab, special_name *out,
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
    return add_flag(out, key, answer, err);
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

static fsdp_status take_space_prefix(fsdp_json *json, vocabulary *vocab, fsdp_error *err)
{
    bool answer;
    if (fsdp_json_peek(json) != FSDP_JSON_BOOL)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_bool(json, &answer, err));
    vocab->space_prefix = answer;
    return FSDP_OK;
}

static fsdp_status take_word_rule(fsdp_json *json, vocabulary *vocab, word_rule rule,
                                  fsdp_error *err)
{
    bool is_set;
    if (fsdp_json_peek(json) != FSDP_JSON_BOOL)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_bool(json, &is_set, err));
    return set_word_rule(vocab, rule, is_set, err);
}

/* The last two members are there for tokenizer.model and vocab.txt; tokenizer.json has its own. */
static fsdp_status read_config(fsdp_json *json, vocabulary *vocab, fsdp_named_values *out,
                               fsdp_error *err)
{
    enum {
        ADD_BOS = FSDP_GGUF_SPECIALS,
        ADD_EOS,
        TEMPLATE,
        WORD_RULE,
        DECODER = WORD_RULE + WORD_RULES,
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
            FSDP_TRY(take_word_rule(json, vocab, (word_rule)(which - WORD_RULE), err));
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

/* --- the directory ---------------------------------------------------------------------------- */

typedef struct tokenizer_file {
    const char *name;
    size_t most; /* bytes */
    fsdp_status (*read)(vocabulary *vocab, const char *text, size_t size, fsdp_error *err);
    fsdp_status (*read_json)(fsdp_json *json, vocabulary *vocab, fsdp_named_values *out,
                             fsdp_error *err); /* in place of read */
} tokenizer_file;

static const tokenizer_file
    tokenizer_json = {"tokenizer.json", LARGEST_FILE, .read = read_tokenizer},
    tokenizer_model = {"tokenizer.model", LARGEST_FILE, .read = take_sentencepiece},
    spiece_model = {"spiece.model", LARGEST_FILE, .read = take_sentencepiece},
    vocab_txt = {"vocab.txt", LARGEST_FILE, .read = take_word_list},
    added_tokens = {"added_tokens.json", LARGEST_CONFIG, .read_json = read_added_list},
    config_json = {"tokenizer_config.json", LARGEST_CONFIG, .read_json = read_config};

typedef struct tokenizer_reader {
    fsdp_io *io;
    const char *directory;
    vocabulary vocab;
    fsdp_named_values *out;
} tokenizer_reader;

/* A token takes a byte at least, so a short file with a large number makes no long list; rows of the model
 * may lack tokens. */
static void bound_tokens(vocabulary *vocab, size_t size)
{
    int64_t most = (int64_t)(vocab->count + size);
    most = most < vocab->rows ? vocab->rows : most;
    vocab->most = most < TOKENS_MOST ? most : TOKENS_MOST;
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
    tokenizer_reader reader = {.io = io,
                               .directory = directory,
                               .out = out,
                               .vocab = {.path = "",
                                         .rows = tokens->vocab_size,
                                         .space_prefix = -1,
                                         .family = tokens->tokenizer}};
    bool is_there;
    vocabulary *vocab = &reader.vocab;
    vocab->memory = MEMORY_BESIDE + (tokens->memory > 0 ? tokens->memory : FSDP_MEMORY_DEFAULT);
    for (int i = 0; i < FSDP_GGUF_SPECIALS; i++)
        vocab->ids_of[i] = vocab->own_ids[i] = -1;
    fsdp_status st = take_tokens(&reader, err);
    if (st == FSDP_OK && vocab->count > 0)
        st = take_file(&reader, &config_json, &is_there, err);
    if (st == FSDP_OK && vocab->is_wordpiece)
        st = spell_wordpieces(vocab, err);
    if (st == FSDP_OK && vocab->count > 0)
        st = add_pairs(vocab, tokens, out, err);
    if (st == FSDP_OK && vocab->is_wordpiece)
        st = add_word_rules(vocab, out, err);
    *found_out = vocab->count > 0     ? FSDP_GGUF_TOKENIZER
                 : vocab->is_tiktoken ? FSDP_GGUF_TIKTOKEN
                                      : FSDP_GGUF_NO_TOKENIZER;
    fsdp_free(vocab->tokens);
    fsdp_free(vocab->merges);
    fsdp_text_release(&vocab->scratch);
    fsdp_name_table_release(&vocab->ids);
    fsdp_arena_release(&vocab->arena);
    return st;
}

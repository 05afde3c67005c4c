/*
 * The pieces of a tokenizer.model as tokens of GGUF, with the types and scores that llama.cpp's converter
 * gives them: see gguf_vocab.h.
 */
#include "statedict/gguf_model/gguf_vocab.h"

#include "base/text.h"
#include "formats/sentencepiece.h"

#include <inttypes.h>
#include <string.h>

/* llama.cpp's converter gives it to tokens that are added to the pieces. */
enum { ADDED_SCORE = -1000 };

/* SentencePiece's sign for a space, U+2581. */
static const char space_sign[] = "\xE2\x96\x81";
enum { SPACE_SIGN = sizeof space_sign - 1 };

/* llama.cpp looks for tokens of users in the text itself, where spaces are spaces, and prints them as they
 * are. The result is in the arena; NULL: there is no memory. */
static char *with_spaces(fsdp_gguf_vocab *vocab, const char *text, size_t *size)
{
    char *copy = fsdp_arena_strndup(&vocab->arena, text, *size);
    size_t at = 0, out = 0;
    while (copy && at < *size) {
        bool is_space = *size - at >= SPACE_SIGN && memcmp(text + at, space_sign, SPACE_SIGN) == 0;
        copy[out++] = is_space ? ' ' : text[at];
        at += is_space ? SPACE_SIGN : 1;
    }
    if (copy)
        copy[out] = '\0';
    *size = out;
    return copy;
}

static fsdp_status put_token(fsdp_gguf_vocab *vocab, int64_t id, const char *text, size_t size,
                             const fsdp_gguf_token *like, fsdp_error *err)
{
    if (like->type == FSDP_GGUF_USER_DEFINED)
        text = with_spaces(vocab, text, &size);
    return text ? fsdp_gguf_vocab_set(vocab, id, text, size, like, err)
                : fsdp_fail_memory(err, vocab->path);
}

static fsdp_status take_piece(fsdp_gguf_vocab *vocab, size_t number, const fsdp_piece *piece,
                              fsdp_error *err)
{
    char shown[100];
    const fsdp_gguf_token like = {.score = (double)piece->score,
                                  .type = (fsdp_gguf_token_type)piece->type};
    fsdp_printable(piece->text, piece->size, shown, sizeof shown);
    const uint64_t *same = fsdp_name_table_find(&vocab->ids, piece->text, piece->size);
    if (same)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' is not a model of SentencePiece: piece %zu is '%s', as piece %" PRIu64 " is",
            vocab->path, number, shown, *same);
    if (piece->type == FSDP_PIECE_BYTE && !fsdp_gguf_is_byte(piece->text, piece->size))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is not a model of SentencePiece: piece %zu is a byte and reads '%s'",
                         vocab->path, number, shown);
    return put_token(vocab, (int64_t)number, piece->text, piece->size, &like, err);
}

static fsdp_status check_model(const fsdp_gguf_vocab *vocab, const fsdp_sentencepiece *model,
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
static fsdp_status take_unigram(fsdp_gguf_vocab *vocab, const fsdp_sentencepiece *model,
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
    return model->charsmap
               ? fsdp_gguf_take_charsmap(vocab, model->charsmap, model->charsmap_size, err)
               : FSDP_OK;
}

static fsdp_status take_model(fsdp_gguf_vocab *vocab, const fsdp_sentencepiece *model,
                              fsdp_error *err)
{
    FSDP_TRY(check_model(vocab, model, err));
    for (size_t i = 0; i < model->count; i++)
        FSDP_TRY(take_piece(vocab, i, &model->pieces[i], err));
    vocab->is_sentencepiece = true;
    vocab->space_prefix = model->adds_space ? -1 : 0;
    vocab->own_ids[FSDP_GGUF_BOS] = model->bos;
    vocab->own_ids[FSDP_GGUF_EOS] = model->eos;
    vocab->own_ids[FSDP_GGUF_UNK] = model->unk;
    vocab->own_ids[FSDP_GGUF_PAD] = model->pad;
    return vocab->family == FSDP_TOKENS_UNIGRAM && model->model == FSDP_PIECE_UNIGRAM
               ? take_unigram(vocab, model, err)
               : FSDP_OK;
}

fsdp_status fsdp_gguf_take_sentencepiece(fsdp_gguf_vocab *vocab, const char *data, size_t size,
                                         fsdp_error *err)
{
    fsdp_sentencepiece model;
    vocab->is_tiktoken = fsdp_sentencepiece_is_tiktoken(data, size);
    if (vocab->is_tiktoken)
        return FSDP_OK;
    const int64_t room = vocab->memory / FSDP_GGUF_TOKEN_ROOM;
    const size_t most = room < FSDP_GGUF_TOKENS_MOST ? (size_t)room : FSDP_GGUF_TOKENS_MOST;
    fsdp_status st = fsdp_sentencepiece_read(data, size, vocab->path, most, &model, err);
    if (st == FSDP_ERR_LIMIT && most < FSDP_GGUF_TOKENS_MOST)
        st = fsdp_fail(
            err, FSDP_ERR_LIMIT,
            "'%s' has more than %zu pieces, which take %d bytes each; allow more memory (--mem)",
            vocab->path, most, FSDP_GGUF_TOKEN_ROOM);
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

fsdp_status fsdp_gguf_add_to_sentencepiece(fsdp_gguf_vocab *vocab, int64_t id, const char *text,
                                           size_t size, bool is_special, fsdp_error *err)
{
    if (vocab->rows > 0 && id >= vocab->rows)
        return FSDP_OK;
    fsdp_gguf_token *token = id >= 0 && id < (int64_t)vocab->count ? &vocab->tokens[id] : NULL;
    bool is_same =
        token && token->text && token->size == size && memcmp(token->text, text, size) == 0;
    if (is_same && token->type == FSDP_GGUF_UNKNOWN)
        return FSDP_OK;
    if (token && !is_same)
        token->text = NULL; /* another text takes the place of the piece's */
    is_special = is_special || looks_special(text, size);
    const fsdp_gguf_token like = {.score = ADDED_SCORE,
                                  .type = is_special ? FSDP_GGUF_CONTROL : FSDP_GGUF_USER_DEFINED};
    return put_token(vocab, id, text, size, &like, err);
}

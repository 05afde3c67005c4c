/* Opens tokenizers; encodes and decodes. See tokenizer.h. */
#include "runtime/tokens/tokenizer_internal.h"

#include "base/core/mem.h"
#include "base/io/io.h"

#include <string.h>

/* Larger than any that people use by far. */
enum { MOST_TEXT = 1 << 30 };

static const char BYTES[] = "bytes";

fsdp_status fsdp_tokenizer_parse(const char *text, size_t size, const char *origin,
                                 fsdp_tokenizer **tokenizer_out, fsdp_error *err)
{
    *tokenizer_out = NULL;
    fsdp_tokenizer *tokenizer = fsdp_alloc(1, sizeof *tokenizer);
    if (tokenizer)
        tokenizer->text = fsdp_strndup(text, size);
    if (!tokenizer || !tokenizer->text) {
        fsdp_tokenizer_free(tokenizer);
        return fsdp_fail_memory(err, "a tokenizer");
    }
    tokenizer->text_size = size;
    tokenizer->is_bytes = strcmp(tokenizer->text, BYTES) == 0;
    fsdp_status status =
        tokenizer->is_bytes ? FSDP_OK : fsdp_tokenizer_read(tokenizer, origin, err);
    if (status == FSDP_OK)
        *tokenizer_out = tokenizer;
    else
        fsdp_tokenizer_free(tokenizer);
    return status;
}

static fsdp_status read_whole(fsdp_file *file, const char *path, char **text_out, size_t *size_out,
                              fsdp_error *err)
{
    int64_t size = 0;
    int result = file->ops->size(file, &size);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot find the size of '%s'", path);
    if (size > MOST_TEXT)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' is too large for a tokenizer", path);
    *text_out = fsdp_realloc(NULL, (size_t)size, 1);
    *size_out = (size_t)size;
    if (!*text_out)
        return fsdp_fail_memory(err, "a tokenizer");
    return fsdp_io_read(file, path, *text_out, *size_out, 0, err);
}

static fsdp_status open_file(const char *path, fsdp_tokenizer **tokenizer_out, fsdp_error *err)
{
    fsdp_file *file;
    char *text = NULL;
    size_t size = 0;
    FSDP_TRY(fsdp_io_open(NULL, path, FSDP_IO_READ, &file, err));
    fsdp_status status = read_whole(file, path, &text, &size, err);
    fsdp_status closed = fsdp_io_close(&file, path, status == FSDP_OK ? err : NULL);
    status = status == FSDP_OK ? closed : status;
    if (status == FSDP_OK)
        status = fsdp_tokenizer_parse(text, size, path, tokenizer_out, err);
    fsdp_free(text);
    return status;
}

fsdp_status fsdp_tokenizer_open(const char *path, fsdp_tokenizer **tokenizer_out, fsdp_error *err)
{
    *tokenizer_out = NULL;
    if (strcmp(path, BYTES) == 0)
        return fsdp_tokenizer_parse(BYTES, strlen(BYTES), BYTES, tokenizer_out, err);
    fsdp_io *io = fsdp_io_posix();
    fsdp_file_info info;
    if (io->ops->info(io, path, &info) != 0 || info.kind != FSDP_FILE_DIRECTORY)
        return open_file(path, tokenizer_out, err);
    char *inside = fsdp_path_join(path, "tokenizer.json");
    if (!inside)
        return fsdp_fail_memory(err, "a path");
    fsdp_status status = open_file(inside, tokenizer_out, err);
    fsdp_free(inside);
    return status;
}

void fsdp_tokenizer_free(fsdp_tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    fsdp_free(tokenizer->text);
    fsdp_vocab_release(&tokenizer->bpe.vocab);
    fsdp_pair_table_release(&tokenizer->bpe.merges);
    if (tokenizer->unicode)
        fsdp_unicode_release(tokenizer->unicode);
    fsdp_free(tokenizer->unicode);
    fsdp_added_tokens_release(&tokenizer->added);
    fsdp_added_tokens_release(&tokenizer->added_normalized);
    fsdp_free(tokenizer);
}

int64_t fsdp_tokenizer_vocab(const fsdp_tokenizer *tokenizer)
{
    return tokenizer->is_bytes ? 256 : fsdp_vocab_end(&tokenizer->bpe.vocab);
}

const char *fsdp_tokenizer_text(const fsdp_tokenizer *tokenizer, size_t *size_out)
{
    *size_out = tokenizer->text_size;
    return tokenizer->text;
}

int64_t fsdp_tokenizer_end_of_text(const fsdp_tokenizer *tokenizer)
{
    static const char *const names[] = {"<|endoftext|>", "<|end_of_text|>", "</s>"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const fsdp_token *token =
            fsdp_vocab_find(&tokenizer->bpe.vocab, names[i], strlen(names[i]));
        if (token && token->is_special)
            return token->id;
    }
    return -1;
}

/* --- encode --- */

typedef struct encoding {
    const fsdp_tokenizer *tokenizer;
    fsdp_merging merging;
    fsdp_text spaced, normal; /* a piece with a space before it; a normalized piece */
    fsdp_ids *ids;
} encoding;

/* Cuts a piece by the steps of the pre-tokenizer from this one on, and merges the words. */
static fsdp_status add_piece(encoding *encoder, int step, const char *piece, size_t size,
                             fsdp_error *err)
{
    const fsdp_tokenizer *tokenizer = encoder->tokenizer;
    if (step == tokenizer->rules.step_count)
        return fsdp_bpe_add_word(&tokenizer->bpe, &encoder->merging, piece, size, encoder->ids,
                                 err);
    const fsdp_split_step *rule = &tokenizer->rules.steps[step];
    if (rule->adds_space && piece[0] != ' ') {
        encoder->spaced.size = 0; /* the last step alone adds one: no other piece is in use */
        fsdp_text_add(&encoder->spaced, " ", 1);
        fsdp_text_add(&encoder->spaced, piece, size);
        if (encoder->spaced.failed)
            return fsdp_fail_memory(err, "a piece of text");
        piece = encoder->spaced.data;
        size = encoder->spaced.size;
    }
    fsdp_split split = fsdp_split_of(rule->pattern);
    if (!split)
        return add_piece(encoder, step + 1, piece, size, err);
    for (const char *end = piece + size; piece < end;) {
        size_t word = split(tokenizer->unicode, piece, end);
        FSDP_TRY(add_piece(encoder, step + 1, piece, word, err));
        piece += word;
    }
    return FSDP_OK;
}

static fsdp_status add_plain(encoding *encoder, const char *text, size_t size, fsdp_error *err)
{
    return size > 0 ? add_piece(encoder, 0, text, size, err) : FSDP_OK;
}

typedef fsdp_status (*add_between)(encoding *encoder, const char *text, size_t size,
                                   fsdp_error *err);

/* The ids of the added tokens in the text, and of the text between them. */
static fsdp_status add_with_tokens(encoding *encoder, const fsdp_added_tokens *tokens,
                                   const char *text, size_t size, add_between between,
                                   fsdp_error *err)
{
    fsdp_added_match match = {0};
    size_t taken = 0;
    for (size_t at = 0;
         fsdp_added_tokens_next(tokens, encoder->tokenizer->unicode, text, size, &at, &match);) {
        if (taken < match.begin)
            FSDP_TRY(between(encoder, text + taken, match.begin - taken, err));
        FSDP_TRY(fsdp_ids_add(encoder->ids, match.id, err));
        taken = match.end;
    }
    return between(encoder, text + taken, size - taken, err);
}

static fsdp_status add_normalized(encoding *encoder, const char *text, size_t size, fsdp_error *err)
{
    const fsdp_tokenizer *tokenizer = encoder->tokenizer;
    if (tokenizer->rules.normalizes && !fsdp_unicode_is_normal(tokenizer->unicode, text, size)) {
        encoder->normal.size = 0;
        FSDP_TRY(fsdp_unicode_add_normal(tokenizer->unicode, text, size, &encoder->normal, err));
        text = encoder->normal.data;
        size = encoder->normal.size;
    }
    return add_with_tokens(encoder, &tokenizer->added_normalized, text, size, add_plain, err);
}

static fsdp_status add_all(fsdp_ids *ids, const fsdp_template_ids *more, fsdp_error *err)
{
    for (int i = 0; i < more->count; i++)
        FSDP_TRY(fsdp_ids_add(ids, more->ids[i], err));
    return FSDP_OK;
}

static fsdp_status encode_bytes(const char *text, size_t size, fsdp_ids *ids, fsdp_error *err)
{
    if (size > SIZE_MAX - ids->count ||
        !fsdp_grow(&ids->ids, &ids->capacity, ids->count + size, sizeof *ids->ids))
        return fsdp_fail_memory(err, "token ids");
    for (size_t i = 0; i < size; i++)
        ids->ids[ids->count + i] = (unsigned char)text[i];
    ids->count += size;
    return FSDP_OK;
}

static fsdp_status encode_text(encoding *encoder, const char *text, size_t size, bool with_special,
                               fsdp_error *err)
{
    const fsdp_tokenizer *tokenizer = encoder->tokenizer;
    size_t good = fsdp_utf8_check(text, size);
    if (good < size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the text is not UTF-8 at byte %zu", good);
    if (with_special)
        FSDP_TRY(add_all(encoder->ids, &tokenizer->rules.before, err));
    FSDP_TRY(add_with_tokens(encoder, &tokenizer->added, text, size, add_normalized, err));
    return with_special ? add_all(encoder->ids, &tokenizer->rules.after, err) : FSDP_OK;
}

fsdp_status fsdp_tokenizer_encode(const fsdp_tokenizer *tokenizer, const char *text, size_t size,
                                  bool with_special, fsdp_ids *ids, fsdp_error *err)
{
    if (tokenizer->is_bytes)
        return encode_bytes(text, size, ids, err);
    size_t count = ids->count;
    encoding encoder = {.tokenizer = tokenizer, .ids = ids};
    fsdp_merging_begin(&encoder.merging, size);
    fsdp_status status = encode_text(&encoder, text, size, with_special, err);
    fsdp_merging_release(&encoder.merging);
    fsdp_text_release(&encoder.spaced);
    fsdp_text_release(&encoder.normal);
    if (status != FSDP_OK)
        ids->count = count;
    return status;
}

/* --- decode --- */

static fsdp_status add_token(const fsdp_tokenizer *tokenizer, int64_t id, bool skip_special,
                             fsdp_text *bytes, fsdp_error *err)
{
    if (id < 0 || id >= fsdp_tokenizer_vocab(tokenizer))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the id %lld is not in the vocabulary of %lld ids",
                         (long long)id, (long long)fsdp_tokenizer_vocab(tokenizer));
    char byte = (char)id;
    if (tokenizer->is_bytes) {
        fsdp_text_add(bytes, &byte, 1);
        return FSDP_OK;
    }
    const fsdp_token *token = fsdp_vocab_at(&tokenizer->bpe.vocab, (uint32_t)id);
    if (token && !(skip_special && token->is_special))
        fsdp_text_add(bytes, token->data, token->size);
    return FSDP_OK;
}

fsdp_status fsdp_tokenizer_decode(const fsdp_tokenizer *tokenizer, const int64_t *ids, size_t count,
                                  bool skip_special, fsdp_text *text, fsdp_error *err)
{
    fsdp_text bytes = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < count && status == FSDP_OK; i++)
        status = add_token(tokenizer, ids[i], skip_special, &bytes, err);
    if (status == FSDP_OK) {
        fsdp_utf8_add_lossy(text, bytes.data, bytes.size);
        if (bytes.failed || text->failed)
            status = fsdp_fail_memory(err, "text");
    }
    fsdp_text_release(&bytes);
    return status;
}

/* --- the tokenizer of bytes for other programs --- */

void fsdp_tokenizer_add_bytes_json(fsdp_text *text)
{
    static const char level[] = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                                "\"trim_offsets\":true,\"use_regex\":false}";
    fsdp_text_addf(text, "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,"
                         "\"added_tokens\":[],\"normalizer\":null,");
    fsdp_text_addf(text, "\"pre_tokenizer\":%s,\"post_processor\":%s,\"decoder\":%s,", level, level,
                   level);
    fsdp_text_addf(text, "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
                         "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,"
                         "\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":false,"
                         "\"vocab\":{");
    for (int byte = 0; byte < 256; byte++) {
        char letter[4];
        size_t size = fsdp_utf8_put(fsdp_alphabet_letter((uint8_t)byte), letter);
        fsdp_text_add(text, ",", byte > 0);
        fsdp_text_add_json_string(text, letter, size);
        fsdp_text_addf(text, ":%d", byte);
    }
    fsdp_text_addf(text, "},\"merges\":[]}}\n");
}

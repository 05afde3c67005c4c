/* The tokens of files: text is encoded once into memory, .bin files are read as they are needed. See
 * token_files.h. */
#include "runtime/tokens/token_files.h"

#include "base/core/bytes.h"
#include "base/io/io.h"
#include "runtime/tokens/unicode.h"

#include <inttypes.h>
#include <string.h>

enum { HEADER_BYTES = 1024, HASHED_BYTES = 1 << 20, MOST_READ = 1 << 14, BYTES_AT_ONCE = 1 << 16 };

static fsdp_status fail_id(const fsdp_token_file *file, int64_t position, int64_t id, int64_t vocab,
                           fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' token %" PRId64 ": the id %" PRId64
                     " is not in the vocabulary of %" PRId64 " ids",
                     file->path, position, id, vocab);
}

/* --- text --- */

typedef struct encoding {
    const fsdp_tokenizer *tokenizer;
    int64_t vocab, ends; /* ends: the id that stands between texts, -1: none does */
    bool by_bytes; /* a text may be cut anywhere, so that its ids take little memory at a time */
    fsdp_ids *ids; /* of a piece */
} encoding;

static void store(uint8_t *to, int width, int64_t id)
{
    for (int i = 0; i < width; i++)
        to[i] = (uint8_t)(id >> 8 * i);
}

static int64_t load(const uint8_t *from, int width)
{
    int64_t id = 0;
    for (int i = 0; i < width; i++)
        id |= (int64_t)from[i] << 8 * i;
    return id;
}

static fsdp_status keep_ids(fsdp_token_files *files, const fsdp_ids *ids, fsdp_error *err)
{
    size_t width = (size_t)files->width, used = (size_t)files->tokens * width;
    if (ids->count > (SIZE_MAX - used) / width ||
        !fsdp_grow(&files->memory, &files->memory_capacity, used + ids->count * width, 1))
        return fsdp_fail_memory(err, "the tokens of the data");
    for (size_t i = 0; i < ids->count; i++)
        store(files->memory + used + i * width, files->width, ids->ids[i]);
    files->tokens += (int64_t)ids->count;
    return FSDP_OK;
}

static fsdp_status read_text(fsdp_token_file *file, char **text_out, fsdp_error *err)
{
    fsdp_file *opened;
    *text_out = fsdp_realloc(NULL, (size_t)file->size, 1);
    if (!*text_out)
        return fsdp_fail_memory(err, "the text of the data");
    FSDP_TRY(fsdp_io_open(NULL, file->path, FSDP_IO_READ, &opened, err));
    fsdp_status status = fsdp_io_read(opened, file->path, *text_out, (size_t)file->size, 0, err);
    (void)fsdp_io_close(&opened, file->path, NULL); /* nothing was written that could be lost */
    return status;
}

/* Encodes a piece of a file's text after what is there already. */
static fsdp_status add_piece(fsdp_token_files *files, fsdp_token_file *file, const encoding *how,
                             const char *text, size_t size, fsdp_error *err)
{
    how->ids->count = 0;
    fsdp_status status = fsdp_tokenizer_encode(how->tokenizer, text, size, false, how->ids, err);
    if (status != FSDP_OK) {
        fsdp_error_prefix(err, "'%s'", file->path);
        return status;
    }
    for (size_t i = 0; i < how->ids->count; i++) {
        if (how->ids->ids[i] >= how->vocab)
            return fail_id(file, file->count + (int64_t)i, how->ids->ids[i], how->vocab, err);
    }
    file->count += (int64_t)how->ids->count;
    return keep_ids(files, how->ids, err);
}

static fsdp_status add_text(fsdp_token_files *files, fsdp_token_file *file, const encoding *how,
                            const char *text, fsdp_error *err)
{
    size_t size = (size_t)file->size, good = fsdp_utf8_check(text, size), piece = size;
    if (good < size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' is not UTF-8 at byte %zu", file->path, good);
    file->hash = fsdp_kernels_get()->hash(text, size);
    file->first = files->tokens;
    if (how->by_bytes && size > BYTES_AT_ONCE)
        piece = BYTES_AT_ONCE;
    for (size_t at = 0; at < size; at += piece) {
        size_t now = size - at < piece ? size - at : piece;
        FSDP_TRY(add_piece(files, file, how, text + at, now, err));
    }
    bool is_last = file == &files->items[files->count - 1];
    how->ids->count = 0;
    if (how->ends >= 0 && how->ends < how->vocab && !is_last) {
        FSDP_TRY(fsdp_ids_add(how->ids, how->ends, err));
        file->count++;
    }
    return keep_ids(files, how->ids, err);
}

static fsdp_status add_file(fsdp_token_files *files, fsdp_token_file *file, const encoding *how,
                            fsdp_error *err)
{
    char *text;
    fsdp_status status = read_text(file, &text, err);
    if (status == FSDP_OK)
        status = add_text(files, file, how, text, err);
    fsdp_free(text);
    return status;
}

fsdp_status fsdp_token_files_encode(fsdp_token_files *files, const fsdp_tokenizer *tokenizer,
                                    int64_t vocab, fsdp_error *err)
{
    if (files->are_bin)
        return FSDP_OK;
    int64_t highest = fsdp_tokenizer_vocab(tokenizer);
    files->width = highest <= 1 << 8 ? 1 : highest <= 1 << 16 ? 2 : 4;
    fsdp_ids ids = {0};
    size_t size;
    const encoding how = {.tokenizer = tokenizer,
                          .vocab = vocab,
                          .ends = fsdp_tokenizer_end_of_text(tokenizer),
                          .by_bytes = strcmp(fsdp_tokenizer_text(tokenizer, &size), "bytes") == 0,
                          .ids = &ids};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < files->count && status == FSDP_OK; i++)
        status = add_file(files, &files->items[i], &how, err);
    fsdp_ids_release(&ids);
    return status;
}

/* --- reading --- */

/* The file that holds token `at`. */
static const fsdp_token_file *file_of(const fsdp_token_files *files, int64_t at)
{
    size_t low = 0;
    for (size_t high = files->count; low < high;) {
        size_t middle = (low + high) / 2;
        if (files->items[middle].first <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return &files->items[low - 1];
}

/* Tokens [at, at + count) of a file, counted in it, and the place of their ids. */
typedef struct token_run {
    const fsdp_token_file *file;
    int64_t at, count, vocab;
    int64_t *ids;
} token_run;

static fsdp_status read_pieces(const token_run *run, fsdp_file *opened, fsdp_error *err)
{
    const fsdp_token_file *file = run->file;
    uint8_t piece[MOST_READ];
    for (int64_t done = 0, now; done < run->count; done += now) {
        now = MOST_READ / file->width;
        now = run->count - done < now ? run->count - done : now;
        FSDP_TRY(fsdp_io_read(opened, file->path, piece, (size_t)(now * file->width),
                              HEADER_BYTES + (run->at + done) * file->width, err));
        for (int64_t i = 0; i < now; i++) {
            int64_t id = load(piece + i * file->width, file->width);
            if (id >= run->vocab)
                return fail_id(file, run->at + done + i, id, run->vocab, err);
            run->ids[done + i] = id;
        }
    }
    return FSDP_OK;
}

static fsdp_status read_bin(const token_run *run, fsdp_error *err)
{
    fsdp_file *opened;
    FSDP_TRY(fsdp_io_open(NULL, run->file->path, FSDP_IO_READ, &opened, err));
    fsdp_status status = read_pieces(run, opened, err);
    (void)fsdp_io_close(&opened, run->file->path,
                        NULL); /* nothing was written that could be lost */
    return status;
}

fsdp_status fsdp_token_files_read(const fsdp_token_files *files, int64_t at, int64_t count,
                                  int64_t vocab, int64_t *ids, fsdp_error *err)
{
    for (int64_t i = 0; !files->are_bin && i < count; i++)
        ids[i] = load(files->memory + (at + i) * files->width, files->width);
    for (int64_t done = 0, now; files->are_bin && done < count; done += now) {
        const fsdp_token_file *file = file_of(files, at + done);
        int64_t inside = at + done - file->first, left = file->count - inside;
        now = count - done < left ? count - done : left;
        const token_run run = {file, inside, now, vocab, ids + done};
        FSDP_TRY(read_bin(&run, err));
    }
    return FSDP_OK;
}

/* --- hashes --- */

static fsdp_status hash_opened(const fsdp_token_file *file, fsdp_file *opened, fsdp_hasher *hasher,
                               uint8_t *piece, fsdp_error *err)
{
    for (int64_t at = 0, now; at < file->size; at += now) {
        now = file->size - at < HASHED_BYTES ? file->size - at : HASHED_BYTES;
        FSDP_TRY(fsdp_io_read(opened, file->path, piece, (size_t)now, at, err));
        fsdp_hasher_add(hasher, piece, (size_t)now);
    }
    return FSDP_OK;
}

fsdp_status fsdp_token_file_hash(const fsdp_token_file *file, fsdp_hash *hash_out, fsdp_error *err)
{
    *hash_out = file->hash;
    if (file->width == 0)
        return FSDP_OK;
    fsdp_file *opened;
    FSDP_TRY(fsdp_io_open(NULL, file->path, FSDP_IO_READ, &opened, err));
    fsdp_hasher *hasher = fsdp_hasher_create();
    uint8_t *piece = fsdp_alloc_pages(HASHED_BYTES);
    fsdp_status status = hasher && piece ? hash_opened(file, opened, hasher, piece, err)
                                         : fsdp_fail_memory(err, "a hash");
    if (status == FSDP_OK)
        *hash_out = fsdp_hasher_value(hasher);
    fsdp_hasher_free(hasher);
    fsdp_free(piece);
    (void)fsdp_io_close(&opened, file->path, NULL); /* nothing was written that could be lost */
    return status;
}

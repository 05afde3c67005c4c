/* The data of a training: files, their tokens, and sequences in an order. See token_data.h. */
#include "runtime/tokens/token_data.h"
#include "base/core/bytes.h"
#include "base/core/mem.h"
#include "base/core/mix.h"
#include "base/io/io.h"
#include "kernels/kernels.h"
#include "runtime/tokens/token_order.h"
#include "runtime/tokens/tokenizer.h"
#include "runtime/tokens/unicode.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* === the order of an epoch ==================================================================== */

/*
 * A keyed permutation of [0, count). See token_order.h. A Feistel network permutes the numbers of an
 * even number of bits; one that falls outside of [0, count) is permuted again until it is inside, less
 * than four times on average.
 */

enum { ROUNDS = 6 };

uint64_t fsdp_token_order(uint64_t seed, uint64_t epoch, uint64_t count, uint64_t k)
{
    const uint64_t gamma = 0x9E3779B97F4A7C15u;
    uint64_t key = fsdp_mix(fsdp_mix(seed + gamma) ^ (epoch + 1) * gamma);
    unsigned half = 1;
    while (half < 32 && (count - 1) >> (2 * half))
        half++;
    uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t left = k >> half, right = k & mask;
        for (unsigned round = 0; round < ROUNDS; round++) {
            uint64_t next = left ^ (fsdp_mix(right ^ (key + round * gamma)) & mask);
            left = right;
            right = next;
        }
        k = left << half | right;
    } while (k >= count);
    return k;
}

/* === the files of a path ====================================================================== */

typedef struct fsdp_token_file {
    const char *path;
    const char *name;     /* within the folder that was given */
    int64_t size;         /* bytes */
    int64_t first, count; /* its tokens among all */
    int width;            /* bytes of a token in a .bin file of llm.c; 0: text */
    fsdp_hash hash;       /* of a text file */
} fsdp_token_file;

/* All files of a path, in the order of their paths. Zero-initialise; release when done. */
typedef struct fsdp_token_files {
    fsdp_token_file *items;
    size_t count, capacity;
    int64_t tokens; /* of all files */
    bool are_bin;
    int width;       /* bytes of a token in memory, for text */
    uint8_t *memory; /* the tokens of text files */
    size_t memory_capacity;
    fsdp_arena arena;
} fsdp_token_files;

enum { DEEPEST = 64, HEADER_BYTES = 1024 };

/* Folders that were listed, so that links in a circle end. */
typedef struct data_walk {
    fsdp_token_files *files;
    struct {
        uint64_t device, node;
    } * seen;
    size_t seen_count, seen_capacity;
    const char *pattern; /* of names in the first folder; NULL: all */
} data_walk;

static void token_files_release(fsdp_token_files *files)
{
    fsdp_free(files->items);
    fsdp_free(files->memory);
    fsdp_arena_release(&files->arena);
    *files = (fsdp_token_files){0};
}

/* --- .bin files of llm.c: 256 numbers of 4 bytes, of which 3 say something, then the tokens --- */

static int width_of_magic(uint32_t magic)
{
    return magic == 20240520 ? 2 : magic == 20240801 ? 4 : 0;
}

static fsdp_status check_header(fsdp_token_file *file, const uint8_t *header, fsdp_error *err)
{
    uint32_t version = fsdp_load_u32(header + 4), wanted = file->width == 2 ? 1 : 7;
    if (version != wanted)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "cannot read '%s': its version of llm.c's tokens is %u, and only %u is known",
            file->path, version, wanted);
    file->count = fsdp_load_u32(header + 8);
    int64_t size = HEADER_BYTES + file->count * file->width;
    if (size != file->size)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' has %lld bytes, but its header says %lld tokens of %d bytes: %lld bytes",
            file->path, (long long)file->size, (long long)file->count, file->width,
            (long long)size);
    return FSDP_OK;
}

static bool ends_with_bin(const char *path)
{
    size_t size = strlen(path);
    return size >= 4 && strcmp(path + size - 4, ".bin") == 0;
}

static fsdp_status look_inside(fsdp_token_file *file, fsdp_file *opened, fsdp_error *err)
{
    uint8_t header[HEADER_BYTES] = {0};
    size_t size = file->size < HEADER_BYTES ? (size_t)file->size : HEADER_BYTES;
    FSDP_TRY(fsdp_io_read(opened, file->path, header, size, 0, err));
    file->width = width_of_magic(fsdp_load_u32(header));
    if (file->width == 0 && ends_with_bin(file->path))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "cannot read '%s': it does not begin with the header of llm.c's tokens",
                         file->path);
    if (file->width == 0)
        return FSDP_OK;
    if (size < HEADER_BYTES)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "cannot read '%s': it ends in its header",
                         file->path);
    return check_header(file, header, err);
}

static fsdp_status look_at(fsdp_token_file *file, fsdp_error *err)
{
    fsdp_file *opened;
    FSDP_TRY(fsdp_io_open(NULL, file->path, FSDP_IO_READ, &opened, err));
    int result = opened->ops->size(opened, &file->size);
    fsdp_status status =
        result < 0 ? fsdp_fail_errno(err, -result, "cannot find the size of '%s'", file->path)
                   : look_inside(file, opened, err);
    (void)fsdp_io_close(&opened, file->path, NULL); /* nothing was written that could be lost */
    return status;
}

/* --- folders --- */

static fsdp_status note_file(fsdp_token_files *files, const char *path, size_t folder_size,
                             fsdp_error *err)
{
    char *copy = fsdp_arena_strndup(&files->arena, path, strlen(path));
    if (!copy ||
        !fsdp_grow(&files->items, &files->capacity, files->count + 1, sizeof *files->items))
        return fsdp_fail_memory(err, "the list of data files");
    fsdp_token_file file = {.path = copy, .name = copy + folder_size};
    while (*file.name == '/')
        file.name++;
    files->items[files->count++] = file;
    return FSDP_OK;
}

static fsdp_status note_folder(data_walk *walk, const fsdp_file_info *info, bool *is_new,
                               fsdp_error *err)
{
    *is_new = false;
    for (size_t i = 0; i < walk->seen_count; i++) {
        if (walk->seen[i].device == info->device && walk->seen[i].node == info->node)
            return FSDP_OK;
    }
    if (!fsdp_grow(&walk->seen, &walk->seen_capacity, walk->seen_count + 1, sizeof *walk->seen))
        return fsdp_fail_memory(err, "the list of data folders");
    walk->seen[walk->seen_count].device = info->device;
    walk->seen[walk->seen_count++].node = info->node;
    *is_new = true;
    return FSDP_OK;
}

/* A name as a pattern of '*' and '?'. */
static bool matches(const char *pattern, const char *name)
{
    const char *star = NULL, *again = NULL;
    while (*name) {
        if (*pattern == '*') {
            star = pattern++;
            again = name;
        } else if (*pattern == '?' || *pattern == *name) {
            pattern++;
            name++;
        } else if (star) {
            pattern = star + 1;
            name = ++again;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return *pattern == '\0';
}

static bool is_wanted(void *context, const char *name)
{
    const data_walk *walk = context;
    return name[0] != '.' && (!walk->pattern || matches(walk->pattern, name));
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static fsdp_status add_path(data_walk *walk, const char *path, size_t folder_size, int depth,
                            fsdp_error *err);

static fsdp_status add_folder(data_walk *walk, const char *path, size_t folder_size, int depth,
                              fsdp_error *err)
{
    fsdp_io_names names;
    if (depth == DEEPEST)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' is nested deeper than %d folders", path,
                         DEEPEST);
    FSDP_TRY(fsdp_io_list_names(NULL, path, is_wanted, walk, &names, err));
    walk->pattern = NULL;
    if (names.count > 0) /* the order decides the path of a folder that several links lead to */
        qsort(names.items, names.count, sizeof *names.items, compare_names);
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < names.count && status == FSDP_OK; i++) {
        char *inside = fsdp_path_join(path, names.items[i]);
        status = inside ? add_path(walk, inside, folder_size, depth + 1, err)
                        : fsdp_fail_memory(err, "a path");
        fsdp_free(inside);
    }
    fsdp_io_names_release(&names);
    return status;
}

static fsdp_status add_path(data_walk *walk, const char *path, size_t folder_size, int depth,
                            fsdp_error *err)
{
    fsdp_file_info info;
    fsdp_io *io = fsdp_io_posix();
    int result = io->ops->info(io, path, &info);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot read the data '%s'", path);
    if (info.kind == FSDP_FILE_REGULAR)
        return note_file(walk->files, path, folder_size, err);
    if (info.kind != FSDP_FILE_DIRECTORY)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is neither a file nor a folder", path);
    bool is_new;
    FSDP_TRY(note_folder(walk, &info, &is_new, err));
    return is_new ? add_folder(walk, path, folder_size, depth, err) : FSDP_OK;
}

/* The folder of a pattern: "" before the last '/' is the current one. */
static fsdp_status add_pattern(data_walk *walk, const char *path, fsdp_error *err)
{
    const char *slash = strrchr(path, '/');
    size_t size = slash ? (size_t)(slash - path) : 0;
    char *folder =
        slash == path ? fsdp_strndup("/", 1) : fsdp_strndup(slash ? path : ".", slash ? size : 1);
    if (!folder)
        return fsdp_fail_memory(err, "a path");
    walk->pattern = slash ? slash + 1 : path;
    fsdp_status status = add_folder(walk, folder, strlen(folder), 0, err);
    fsdp_free(folder);
    return status;
}

static bool is_pattern(const char *path)
{
    const char *slash = strrchr(path, '/');
    return strpbrk(slash ? slash : path, "*?") != NULL && !fsdp_io_exists(NULL, path);
}

static int compare_files(const void *a, const void *b)
{
    const fsdp_token_file *x = a, *y = b;
    return strcmp(x->path, y->path);
}

static fsdp_status look_at_all(fsdp_token_files *files, fsdp_error *err)
{
    for (size_t i = 0; i < files->count; i++) {
        fsdp_token_file *file = &files->items[i];
        FSDP_TRY(look_at(file, err));
        if (i == 0)
            files->are_bin = file->width > 0;
        if (files->are_bin != (file->width > 0))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s' holds %s, but '%s' holds %s; name data of one kind",
                             files->items[0].path, files->are_bin ? "tokens" : "text", file->path,
                             files->are_bin ? "text" : "tokens");
        file->first = files->tokens;
        if (fsdp_add_overflow(files->tokens, file->count, &files->tokens))
            return fsdp_fail(err, FSDP_ERR_LIMIT,
                             "cannot count the tokens of '%s': there are too many", file->path);
    }
    return FSDP_OK;
}

/* A file, a folder with all in it (hidden names are left out), or files whose last element matches a
 * pattern of '*' and '?'. Their sizes and kinds are known afterwards, and the counts of .bin files. */
static fsdp_status token_files_find(fsdp_token_files *files, const char *path, fsdp_error *err)
{
    data_walk walk = {.files = files};
    const char *slash = strrchr(path, '/');
    fsdp_file_info info;
    fsdp_io *io = fsdp_io_posix();
    bool is_folder = io->ops->info(io, path, &info) == 0 && info.kind == FSDP_FILE_DIRECTORY;
    size_t folder_size = is_folder ? strlen(path) : slash ? (size_t)(slash - path) : 0;
    fsdp_status status = is_pattern(path) ? add_pattern(&walk, path, err)
                                          : add_path(&walk, path, folder_size, 0, err);
    fsdp_free(walk.seen);
    if (status != FSDP_OK)
        return status;
    if (files->count == 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' has no data files", path);
    qsort(files->items, files->count, sizeof *files->items, compare_files);
    return look_at_all(files, err);
}

/* === the tokens of files ====================================================================== */

/* The tokens of files: text is encoded once into memory, .bin files are read as they are needed. */

enum { HASHED_BYTES = 1 << 20, MOST_READ = 1 << 14, BYTES_AT_ONCE = 1 << 16 };

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

/* Reads and encodes text files; ids are below vocab. Nothing is read of .bin files. */
static fsdp_status token_files_encode(fsdp_token_files *files, const fsdp_tokenizer *tokenizer,
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

/* Tokens [at, at + count) of all files, which must be there. An id at or beyond vocab is FSDP_ERR_DAMAGED. */
static fsdp_status token_files_read(const fsdp_token_files *files, int64_t at, int64_t count,
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

/* The XXH3-128 of a file's bytes; .bin files are read for it. */
static fsdp_status token_file_hash(const fsdp_token_file *file, fsdp_hash *hash_out,
                                   fsdp_error *err)
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

/* === sequences ================================================================================ */

enum { VAL_PART = 20 }; /* one of so many tokens is for validation */

/* Tokens [begin, end) of files. */
typedef struct token_range {
    const fsdp_token_files *files;
    int64_t begin, end, sequences;
} token_range;

struct fsdp_token_data {
    fsdp_token_files files, val_files;
    token_range parts[2];
    bool has_val;
    int64_t vocab, length;
    bool in_order;
    uint64_t seed;
};

static fsdp_status read_files(fsdp_token_files *files, const char *path,
                              const fsdp_token_options *options, int64_t vocab, fsdp_error *err)
{
    FSDP_TRY(token_files_find(files, path, err));
    if (!files->are_bin && !options->tokenizer)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot encode the text '%s': it needs a tokenizer",
                         path);
    FSDP_TRY(token_files_encode(files, options->tokenizer, vocab, err));
    if (files->tokens == 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the data '%s' is empty", path);
    return FSDP_OK;
}

static token_range make_part(const fsdp_token_files *files, int64_t begin, int64_t end,
                             int64_t length)
{
    int64_t sequences = end > begin ? (end - begin - 1) / length : 0;
    return (token_range){files, begin, end, sequences};
}

static fsdp_status divide(fsdp_token_data *data, const fsdp_token_options *options, fsdp_error *err)
{
    int64_t tokens = data->files.tokens, length = data->length;
    int64_t train = data->has_val ? tokens : tokens - tokens / VAL_PART;
    data->parts[FSDP_TOKENS_TRAIN] = make_part(&data->files, 0, train, length);
    data->parts[FSDP_TOKENS_VAL] =
        data->has_val ? make_part(&data->val_files, 0, data->val_files.tokens, length)
                      : make_part(&data->files, train, tokens, length);
    if (data->parts[FSDP_TOKENS_TRAIN].sequences == 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "the data '%s' holds %" PRId64 " tokens%s, a sequence takes %" PRId64
                         " (the context and one more)",
                         options->path, train, data->has_val ? "" : " for training", length + 1);
    if (data->has_val && data->parts[FSDP_TOKENS_VAL].sequences == 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "the data '%s' for validation holds %" PRId64
                         " tokens, a sequence takes %" PRId64,
                         options->val, data->val_files.tokens, length + 1);
    return FSDP_OK;
}

static fsdp_status open_data(fsdp_token_data *data, const fsdp_token_options *options,
                             fsdp_error *err)
{
    FSDP_TRY(read_files(&data->files, options->path, options, data->vocab, err));
    if (data->has_val)
        FSDP_TRY(read_files(&data->val_files, options->val, options, data->vocab, err));
    return divide(data, options, err);
}

fsdp_status fsdp_token_data_open(const fsdp_token_options *options, fsdp_token_data **data_out,
                                 fsdp_error *err)
{
    *data_out = NULL;
    if (!options || !options->path || options->length < 1 || options->length >= INT64_MAX / 16)
        return fsdp_fail(err, FSDP_ERR_USAGE, "data needs a path and a length of at least 1");
    if (options->vocab < 0 || (options->vocab == 0 && !options->tokenizer))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "data needs the size of the vocabulary, or a tokenizer");
    fsdp_token_data *data = fsdp_alloc(1, sizeof *data);
    if (!data)
        return fsdp_fail_memory(err, "the data");
    data->vocab = options->vocab ? options->vocab : fsdp_tokenizer_vocab(options->tokenizer);
    data->length = options->length;
    data->in_order = options->in_order;
    data->seed = options->seed;
    data->has_val = options->val != NULL;
    fsdp_status status = open_data(data, options, err);
    if (status == FSDP_OK)
        *data_out = data;
    else
        fsdp_token_data_close(data);
    return status;
}

void fsdp_token_data_close(fsdp_token_data *data)
{
    if (!data)
        return;
    token_files_release(&data->files);
    token_files_release(&data->val_files);
    fsdp_free(data);
}

int64_t fsdp_token_data_count(const fsdp_token_data *data, fsdp_token_part part)
{
    return data->parts[part].sequences;
}

int64_t fsdp_token_data_tokens(const fsdp_token_data *data, fsdp_token_part part)
{
    return data->parts[part].end - data->parts[part].begin;
}

fsdp_status fsdp_token_data_read(const fsdp_token_data *data, fsdp_token_part part, uint64_t epoch,
                                 int64_t k, int64_t *ids, fsdp_error *err)
{
    const token_range *from = &data->parts[part];
    if (k < 0 || k >= from->sequences)
        return fsdp_fail(err, FSDP_ERR_USAGE, "sequence %" PRId64 " of %" PRId64 " does not exist",
                         k, from->sequences);
    bool shuffles = part == FSDP_TOKENS_TRAIN && !data->in_order;
    int64_t i = shuffles ? (int64_t)fsdp_token_order(data->seed, epoch, (uint64_t)from->sequences,
                                                     (uint64_t)k)
                         : k;
    return token_files_read(from->files, from->begin + i * data->length, data->length + 1,
                            data->vocab, ids, err);
}

/* --- identity --- */

static fsdp_status set_text(fsdp_value *value, const char *text, fsdp_error *err)
{
    if (fsdp_utf8_valid(text, strlen(text)))
        return fsdp_value_set_bytes(value, FSDP_VALUE_STRING, text, strlen(text), err);
    return fsdp_value_set_bytes(value, FSDP_VALUE_BYTES, text, strlen(text), err);
}

static fsdp_status describe_file(const fsdp_token_file *file, fsdp_value *value, fsdp_error *err)
{
    fsdp_hash hash;
    fsdp_text hex = {0};
    FSDP_TRY(token_file_hash(file, &hash, err));
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_DICT, 6, err));
    fsdp_value *items = value->as.list.items;
    FSDP_TRY(set_text(&items[0], "name", err));
    FSDP_TRY(set_text(&items[1], file->name, err));
    FSDP_TRY(set_text(&items[2], "size", err));
    items[3] = fsdp_value_i64(file->size);
    FSDP_TRY(set_text(&items[4], "xxh3", err));
    fsdp_text_add_hex(&hex, hash.bytes, sizeof hash.bytes);
    fsdp_status status = hex.failed ? fsdp_fail_memory(err, "the identity of the data")
                                    : set_text(&items[5], hex.data, err);
    fsdp_text_release(&hex);
    return status;
}

static fsdp_status describe_files(const fsdp_token_files *files, fsdp_value *value, fsdp_error *err)
{
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_LIST, files->count, err));
    for (size_t i = 0; i < files->count; i++)
        FSDP_TRY(describe_file(&files->items[i], &value->as.list.items[i], err));
    return FSDP_OK;
}

static fsdp_status describe(const fsdp_token_data *data, fsdp_value *value, fsdp_error *err)
{
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_DICT, 4, err));
    fsdp_value *items = value->as.list.items;
    FSDP_TRY(set_text(&items[0], "train", err));
    FSDP_TRY(describe_files(&data->files, &items[1], err));
    FSDP_TRY(set_text(&items[2], "val", err));
    return data->has_val ? describe_files(&data->val_files, &items[3], err) : FSDP_OK;
}

fsdp_status fsdp_token_data_identity(const fsdp_token_data *data, fsdp_value *value_out,
                                     fsdp_error *err)
{
    *value_out = (fsdp_value){0};
    fsdp_status status = describe(data, value_out, err);
    if (status != FSDP_OK)
        fsdp_value_release(value_out);
    return status;
}

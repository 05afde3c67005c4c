/* Finds the files of a data path, and what they are. See token_files.h. */
#include "runtime/tokens/token_files.h"

#include "base/core/bytes.h"
#include "base/io/io.h"

#include <stdlib.h>
#include <string.h>

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

void fsdp_token_files_release(fsdp_token_files *files)
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
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' has version %u of llm.c's tokens, %u is known", file->path, version,
                         wanted);
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
                         "'%s' does not begin with the header of llm.c's tokens", file->path);
    if (file->width == 0)
        return FSDP_OK;
    if (size < HEADER_BYTES)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' ends in its header", file->path);
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

static fsdp_status add_file(fsdp_token_files *files, const char *path, size_t folder_size,
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
        return add_file(walk->files, path, folder_size, err);
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
                             "'%s' holds %s and '%s' %s: data is one of the two",
                             files->items[0].path, files->are_bin ? "tokens" : "text", file->path,
                             files->are_bin ? "text" : "tokens");
        file->first = files->tokens;
        if (fsdp_add_overflow(files->tokens, file->count, &files->tokens))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': too many tokens", file->path);
    }
    return FSDP_OK;
}

fsdp_status fsdp_token_files_find(fsdp_token_files *files, const char *path, fsdp_error *err)
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
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "no data files are in '%s'", path);
    qsort(files->items, files->count, sizeof *files->items, compare_files);
    return look_at_all(files, err);
}

/*
 * Fuzz target: a directory of a framework, and the way from it to a checkpoint. Each line of an input is a
 * file below "fuzz": its path, and after a tab what it holds:
 *
 *     s         a safetensors file of one tensor
 *     t         a file of torch.save with a dict
 *     p TEXT    a parameter of Nanotron: its shape, a tab, where its part of 2 x 8 bytes lies in it
 *     TEXT      these bytes
 *
 * A first line "whole" asks for all parts together. The target opens and reads the checkpoint
 * that it finds; the way that begins there ends there.
 */
#include "formats/frameworks.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/torch_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_FILES = 64, LONGEST_PATH = 200, LONGEST_MADE = 2048, DEEPEST = 5 };

typedef struct tree_file {
    fsdp_file base;
    char path[LONGEST_PATH];
    uint8_t made[LONGEST_MADE]; /* what it holds; NULL data: this */
    uint8_t *torch;             /* freed */
    const uint8_t *data;
    size_t size;
} tree_file;

static tree_file files[MOST_FILES];
static size_t file_count;

static void require(bool truth)
{
    if (!truth)
        abort();
}

/* --- a tree in memory --------------------------------------------------------------------------- */

/* The path without "." and "..", as there are no links: "fuzz/a/../b/." is "fuzz/b". */
static void simplify(const char *path, char out[LONGEST_PATH])
{
    size_t size = 0;
    out[0] = '\0';
    for (const char *part = path; *part; part += *part == '/') {
        size_t n = strcspn(part, "/");
        if (n == 2 && memcmp(part, "..", 2) == 0)
            while (size > 0 && out[--size] != '/')
                ;
        else if (n > 0 && !(n == 1 && part[0] == '.') && size + n + 2 < LONGEST_PATH) {
            if (size > 0)
                out[size++] = '/';
            memcpy(out + size, part, n);
            size += n;
        }
        out[size] = '\0';
        part += n;
    }
}

static tree_file *find_file(const char *path)
{
    for (size_t i = 0; i < file_count; i++)
        if (strcmp(files[i].path, path) == 0)
            return &files[i];
    return NULL;
}

/* The rest of the path of a file below "PATH/"; NULL: it is not below. */
static const char *below(const tree_file *file, const char *path)
{
    size_t size = strlen(path);
    while (size > 0 && path[size - 1] == '/')
        size--;
    return strncmp(file->path, path, size) == 0 && file->path[size] == '/' ? file->path + size + 1
                                                                           : NULL;
}

static bool is_directory(const char *path)
{
    for (size_t i = 0; i < file_count; i++)
        if (below(&files[i], path))
            return true;
    return false;
}

static int open_file(fsdp_io *io, const char *typed, unsigned flags, fsdp_file **file_out)
{
    char path[LONGEST_PATH];
    (void)io;
    (void)flags;
    simplify(typed, path);
    tree_file *file = find_file(path);
    *file_out = file ? &file->base : NULL;
    return file ? 0 : is_directory(path) ? -EISDIR : -ENOENT;
}

static ssize_t read_file(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    const tree_file *from = (const tree_file *)file;
    require(offset >= 0);
    if ((size_t)offset >= from->size)
        return 0;
    size_t left = from->size - (size_t)offset;
    size = size < left ? size : left;
    memcpy(data, from->data + offset, size);
    return (ssize_t)size;
}

static int size_of_file(fsdp_file *file, int64_t *size_out)
{
    *size_out = (int64_t)((const tree_file *)file)->size;
    return 0;
}

static int close_file(fsdp_file *file)
{
    (void)file;
    return 0;
}

static int info_of(fsdp_io *io, const char *typed, fsdp_file_info *info_out)
{
    char path[LONGEST_PATH];
    (void)io;
    simplify(typed, path);
    const tree_file *file = find_file(path);
    if (!file && !is_directory(path))
        return -ENOENT;
    *info_out = (fsdp_file_info){.kind = file ? FSDP_FILE_REGULAR : FSDP_FILE_DIRECTORY,
                                 .size = file ? (int64_t)file->size : 0,
                                 .node = file ? (uint64_t)(file - files) + 1 : 0};
    return 0;
}

/* The element of file number `last` below the path, unless a file before it has the same. */
static size_t new_element(size_t last, const char *path, const char **name_out)
{
    const char *name = *name_out = below(&files[last], path);
    size_t size = name ? strcspn(name, "/") : 0;
    for (size_t i = 0; i < last && size > 0; i++) {
        const char *other = below(&files[i], path);
        if (other && strcspn(other, "/") == size && memcmp(other, name, size) == 0)
            return 0;
    }
    return size;
}

static int list_names(fsdp_io *io, const char *typed, int (*visit)(void *user, const char *name),
                      void *user)
{
    char path[LONGEST_PATH];
    (void)io;
    simplify(typed, path);
    int result = find_file(path) ? -ENOTDIR : is_directory(path) ? 0 : -ENOENT;
    for (size_t i = 0; i < file_count && result == 0; i++) {
        const char *name;
        char element[LONGEST_PATH] = "";
        size_t size = new_element(i, path, &name);
        if (size == 0)
            continue;
        memcpy(element, name, size);
        result = visit(user, element);
    }
    return result;
}

static const fsdp_io_ops tree_ops = {.name = "tree",
                                     .open = open_file,
                                     .pread = read_file,
                                     .size = size_of_file,
                                     .info = info_of,
                                     .list = list_names,
                                     .close = close_file};

/* --- inputs ------------------------------------------------------------------------------------- */

typedef struct text_part {
    const char *data;
    size_t size;
} text_part;

/* Up to the mark or the end, and after the mark. */
static text_part take(text_part *from, char mark)
{
    const char *end = from->size > 0 ? memchr(from->data, mark, from->size) : NULL;
    text_part part = {from->data, end ? (size_t)(end - from->data) : from->size};
    size_t taken = part.size + (end != NULL);
    from->data += taken;
    from->size -= taken;
    return part;
}

/* A safetensors file of 2 x 8 bytes. */
static void make_safetensors(tree_file *file, const char *name, text_part shape, text_part pairs)
{
    char header[LONGEST_MADE - 64];
    const char *quote = shape.size > 0 ? "\"" : "";
    int size = snprintf(header, sizeof header,
                        "{\"__metadata__\":{%s%.*s%s%.*s%s},"
                        "\"%s\":{\"dtype\":\"U8\",\"shape\":[2,8],\"data_offsets\":[0,16]}}",
                        shape.size > 0 ? "\"unsharded_shape\":\"" : "", (int)shape.size, shape.data,
                        shape.size > 0 ? "\",\"local_global_slices_pairs\":\"" : "",
                        (int)pairs.size, pairs.data, quote, name);
    if (size >= (int)sizeof header)
        return;
    memset(file->made, 0, sizeof file->made);
    file->made[0] = (uint8_t)(size & 255);
    file->made[1] = (uint8_t)(size >> 8);
    memcpy(file->made + 8, header, (size_t)size);
    file->size = (size_t)size + 8 + 16;
    file->data = file->made;
}

/* {"w": 1}, which has no tensor; the reader of dicts needs no more. */
static void make_torch(tree_file *file)
{
    static const uint8_t pickle[] = "\x80\x02}q\x00X\x01\x00\x00\x00wq\x01K\x01s.";
    file->torch = torch_file(pickle, sizeof pickle - 1, 0, &file->size);
    file->data = file->torch;
    file->size = file->torch ? file->size : 0;
}

static bool is_clean(const char *path)
{
    char simple[LONGEST_PATH];
    simplify(path, simple);
    return strcmp(path, simple) == 0;
}

/* A path that is a file is not a folder, and the other way round. */
static bool is_free(const char *path)
{
    char above[LONGEST_PATH];
    if (!is_clean(path) || find_file(path) || is_directory(path))
        return false;
    strcpy(above, path);
    for (char *slash = strrchr(above, '/'); slash; slash = strrchr(above, '/')) {
        *slash = '\0';
        if (find_file(above))
            return false;
    }
    return true;
}

static void add_file(text_part line)
{
    char path[LONGEST_PATH];
    text_part name = take(&line, '\t');
    snprintf(path, sizeof path, "fuzz/%.*s", name.size < 150 ? (int)name.size : 150, name.data);
    if (file_count == MOST_FILES || !is_free(path))
        return;
    tree_file *file = &files[file_count++];
    file->base.ops = &tree_ops;
    strcpy(file->path, path);
    file->torch = NULL;
    file->data = (const uint8_t *)line.data;
    file->size = line.size;
    const text_part none = {"", 0};
    if (line.size == 1 && line.data[0] == 's')
        make_safetensors(file, "w", none, none);
    else if (line.size == 1 && line.data[0] == 't')
        make_torch(file);
    else if (line.size > 1 && line.data[0] == 'p' && line.data[1] == ' ') {
        line.data += 2;
        line.size -= 2;
        text_part shape = take(&line, '\t');
        make_safetensors(file, "data", shape, line);
    }
}

/* --- what must hold ----------------------------------------------------------------------------- */

static bool is_refusal(fsdp_status status, const fsdp_error *err)
{
    return err->text[0] && err->status == status &&
           (status == FSDP_ERR_NOT_FOUND || status == FSDP_ERR_DAMAGED ||
            status == FSDP_ERR_REFUSED || status == FSDP_ERR_LIMIT || status == FSDP_ERR_USAGE ||
            status == FSDP_ERR_IO);
}

static void hear(void *context, const char *text)
{
    ++*(int *)context;
    require(text[0] != '\0');
}

static int depth_of(const char *path)
{
    int depth = 0;
    for (; *path; path++)
        depth += *path == '/';
    return depth;
}

static fsdp_status resolve(fsdp_io *io, const char *path, bool whole, char **path_out,
                           fsdp_error *err)
{
    int told = 0;
    const fsdp_framework_way way = {.note = hear, .context = &told, .whole = whole};
    fsdp_status status = fsdp_framework_resolve(io, path, &way, path_out, err);
    require(status == FSDP_OK ? !*path_out || told > 0 : !*path_out && is_refusal(status, err));
    return status;
}

static void open_path(fsdp_io *io, const char *path)
{
    fsdp_source *source = NULL;
    fsdp_error err = {0};
    fsdp_status status = fsdp_framework_open(io, path, NULL, &source, &err);
    require(status == FSDP_OK ? source != NULL : !source && is_refusal(status, &err));
    if (source)
        read_source(source);
}

static void find_config(fsdp_io *io, const char *path)
{
    char *dir = NULL;
    fsdp_error err = {0};
    require(fsdp_framework_config(io, path, &dir, &err) == FSDP_OK);
    char where[LONGEST_PATH];
    simplify(dir ? dir : "fuzz", where);
    require(!dir || is_directory(where));
    fsdp_free(dir);
}

static void go(bool whole)
{
    fsdp_io io = {.ops = &tree_ops};
    fsdp_error err = {0};
    char *path = NULL, *again = NULL;
    if (resolve(&io, "fuzz", whole, &path, &err) != FSDP_OK)
        return;
    const char *found = path ? path : "fuzz";
    require(strncmp(found, "fuzz", 4) == 0 && (!path || strncmp(path, "fuzz/", 5) == 0));
    if (depth_of(found) < DEEPEST) {
        require(resolve(&io, found, whole, &again, &err) == FSDP_OK && !again);
        fsdp_free(again);
    }
    find_config(&io, found);
    open_path(&io, found);
    fsdp_free(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    text_part rest = {size > 0 ? (const char *)data : "", size};
    bool whole = size >= 6 && memcmp(data, "whole\n", 6) == 0;
    if (whole)
        (void)take(&rest, '\n');
    file_count = 0;
    while (rest.size > 0)
        add_file(take(&rest, '\n'));
    go(whole);
    for (size_t i = 0; i < file_count; i++)
        free(files[i].torch);
    return 0;
}

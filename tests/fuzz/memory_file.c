/* Files in memory, and what every source must stand: being read through. */
#include "tests/fuzz/memory_file.h"

#include "base/data/box_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 4096, TENSORS_READ = 64, MOST_FILES = 10 };

typedef struct memory_file {
    fsdp_file base;
    const memory_entry *entry;
} memory_file;

static const fsdp_io_ops memory_ops;
static memory_file files[MOST_FILES];
static size_t file_count;
static bool is_folder;

/* NULL: "fuzz" is a folder, or nothing has that name. */
static memory_file *find_file(const char *path)
{
    if (!is_folder)
        return strcmp(path, "fuzz") == 0 ? &files[0] : NULL;
    if (strncmp(path, "fuzz/", 5) != 0)
        return NULL;
    for (size_t i = 0; i < file_count; i++)
        if (!files[i].entry->name || strcmp(files[i].entry->name, path + 5) == 0)
            return &files[i];
    return NULL;
}

static int open_memory(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    (void)io;
    (void)flags;
    memory_file *file = find_file(path);
    *file_out = file ? &file->base : NULL;
    return file ? 0 : -ENOENT;
}

static ssize_t read_memory(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    const memory_entry *entry = ((const memory_file *)file)->entry;
    if (offset < 0)
        abort();
    if ((size_t)offset >= entry->size)
        return 0;
    size_t left = entry->size - (size_t)offset;
    size = size < left ? size : left;
    memcpy(data, entry->data + offset, size);
    return (ssize_t)size;
}

static int size_of_memory(fsdp_file *file, int64_t *size_out)
{
    *size_out = (int64_t)((const memory_file *)file)->entry->size;
    return 0;
}

static int close_memory(fsdp_file *file)
{
    (void)file;
    return 0;
}

/* The rest of the name of a file below "fuzz/FOLDER"; NULL: it is not below. */
static const char *below(const memory_file *file, const char *path)
{
    const char *name = file->entry->name;
    if (!name || strncmp(path, "fuzz", 4) != 0 || (path[4] != '\0' && path[4] != '/'))
        return NULL;
    path += 4 + (path[4] == '/');
    size_t size = strlen(path);
    while (size > 0 && path[size - 1] == '/')
        size--;
    if (size == 0)
        return name;
    return strncmp(name, path, size) == 0 && name[size] == '/' ? name + size + 1 : NULL;
}

static bool is_below(const char *path)
{
    bool is_there = is_folder && strcmp(path, "fuzz") == 0;
    for (size_t i = 0; i < file_count && is_folder && !is_there; i++)
        is_there = below(&files[i], path) != NULL;
    return is_there;
}

/* "fuzz/a/.." is "fuzz", as there are no links. */
static void simplify(const char *path, char *out, size_t room)
{
    size_t size = strlen(path);
    while (size > 3 && strncmp(path + size - 3, "/..", 3) == 0)
        for (size -= 3; size > 0 && path[--size] != '/';)
            continue;
    size = size < room ? size : room - 1;
    memcpy(out, path, size);
    out[size] = '\0';
}

static int info_of_memory(fsdp_io *io, const char *typed, fsdp_file_info *info_out)
{
    char path[512];
    (void)io;
    simplify(typed, path, sizeof path);
    const memory_file *file = find_file(path);
    if (!file && !is_below(path))
        return -ENOENT;
    *info_out = (fsdp_file_info){.kind = file ? FSDP_FILE_REGULAR : FSDP_FILE_DIRECTORY};
    info_out->size = file ? (int64_t)file->entry->size : 0;
    return 0;
}

/* The first element below the path of file `number`, unless a file before it has the same. */
static size_t new_element(size_t number, const char *path, const char **name_out)
{
    const char *name = *name_out = below(&files[number], path);
    size_t size = name ? strcspn(name, "/") : 0;
    for (size_t i = 0; i < number && size > 0; i++) {
        const char *other = below(&files[i], path);
        if (other && strcspn(other, "/") == size && memcmp(other, name, size) == 0)
            return 0;
    }
    return size;
}

static int list_memory(fsdp_io *io, const char *path, int (*visit)(void *user, const char *name),
                       void *user)
{
    enum { LONGEST = 256 };
    (void)io;
    int result = is_below(path) ? 0 : -ENOENT;
    for (size_t i = 0; i < file_count && result == 0; i++) {
        const char *name;
        char element[LONGEST] = "";
        size_t size = new_element(i, path, &name);
        if (size == 0 || size >= LONGEST)
            continue;
        memcpy(element, name, size);
        result = visit(user, element);
    }
    return result;
}

static const fsdp_io_ops memory_ops = {.name = "memory",
                                       .open = open_memory,
                                       .pread = read_memory,
                                       .size = size_of_memory,
                                       .info = info_of_memory,
                                       .list = list_memory,
                                       .close = close_memory};

fsdp_io *memory_folder(const memory_entry *entries, size_t count)
{
    static fsdp_io io = {.ops = &memory_ops};
    if (count > MOST_FILES)
        abort();
    for (size_t i = 0; i < count; i++)
        files[i] = (memory_file){{&memory_ops}, &entries[i]};
    file_count = count;
    is_folder = true;
    return &io;
}

fsdp_io *memory_io(const uint8_t *data, size_t size)
{
    static memory_entry entry;
    entry = (memory_entry){NULL, data, size};
    fsdp_io *io = memory_folder(&entry, 1);
    is_folder = false;
    return io;
}

static void require(bool truth)
{
    if (!truth)
        abort();
}

/* USAGE: a folder that holds several models. */
static bool is_refusal(fsdp_status status, const fsdp_error *err)
{
    return err->text[0] && (status == FSDP_ERR_NOT_FOUND || status == FSDP_ERR_DAMAGED ||
                            status == FSDP_ERR_REFUSED || status == FSDP_ERR_LIMIT ||
                            (status == FSDP_ERR_USAGE && is_folder));
}

/* The first pieces and the last one. */
static void read_tensor(fsdp_source *source, size_t number, fsdp_source_reader *reader)
{
    static uint8_t data[PIECE];
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(source, number);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape), pieces[FSDP_BOX_PIECES];
    int64_t count = fsdp_box_count(&whole);
    int64_t step = PIECE / (int64_t)fsdp_dtype_size(tensor->dtype);
    for (int64_t first = 0; first<count; first = first> 8 * step ? count : first + step) {
        int n = fsdp_box_cut(&whole, first, count - first < step ? count - first : step, pieces);
        for (int i = 0; i < n; i++) {
            fsdp_error err = {0};
            fsdp_status status = fsdp_source_read(source, number, &pieces[i], data, reader, &err);
            require(status == FSDP_OK || is_refusal(status, &err));
            if (status != FSDP_OK)
                return;
        }
    }
}

void read_source(fsdp_source *source)
{
    fsdp_source_reader reader = {0};
    fsdp_source_set_memory(source, 1 << 20, NULL);
    for (size_t i = 0; i < fsdp_source_tensor_count(source) && i < TENSORS_READ; i++)
        read_tensor(source, i, &reader);
    for (size_t i = 0; i < fsdp_source_check_count(source) && i < TENSORS_READ; i++) {
        fsdp_error err = {0};
        fsdp_status status = fsdp_source_check(source, i, &reader, &err);
        require(status == FSDP_OK || is_refusal(status, &err));
    }
    fsdp_source_reader_release(&reader);
    fsdp_source_close(source);
}

void read_everything(fsdp_io *io)
{
    fsdp_source *source = NULL;
    fsdp_error err = {0};
    fsdp_status status = fsdp_source_open(io, "fuzz", NULL, &source, &err);
    require(status == FSDP_OK ? source != NULL : !source && is_refusal(status, &err));
    if (source)
        read_source(source);
}

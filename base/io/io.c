/*
 * Files with loops, paths and messages: the product calls these functions, not the io table. Back ends
 * return errno; this file turns it into the text of an error.
 */
#include "base/io/io.h"

#include "base/data/flow.h"
#include "base/core/mem.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static fsdp_io *or_posix(fsdp_io *io)
{
    return io ? io : fsdp_io_posix();
}

static fsdp_status fail_not_a_file(fsdp_error *err, int errnum, const char *path)
{
    fsdp_status status =
        errnum == EISDIR
            ? fsdp_fail(err, FSDP_ERR_NOT_FOUND, "cannot open '%s': it is a directory", path)
            : fsdp_fail(err, FSDP_ERR_REFUSED, "cannot open '%s': it is not a regular file", path);
    if (err)
        err->errnum = errnum;
    return status;
}

static fsdp_status fail_link(fsdp_error *err, const char *path)
{
    fsdp_fail(err, FSDP_ERR_REFUSED,
              "cannot open '%s': it is a symbolic link, which is not followed by default; follow "
              "links with --follow-links, or make a copy without links with 'cp -rL'",
              path);
    if (err)
        err->errnum = ELOOP;
    return FSDP_ERR_REFUSED;
}

unsigned fsdp_io_read_beneath(const fsdp_io *io)
{
    return FSDP_IO_READ | (io && io->trust & FSDP_TRUST_LINKS ? 0 : FSDP_IO_BENEATH);
}

fsdp_status fsdp_io_check_link(fsdp_io *io, const char *path, fsdp_error *err)
{
    fsdp_file *file = NULL;
    io = or_posix(io);
    if (io->trust & FSDP_TRUST_LINKS)
        return FSDP_OK;
    int result = io->ops->open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file);
    (void)fsdp_io_close(&file, path, NULL);                   /* only opened */
    return result == -ELOOP ? fail_link(err, path) : FSDP_OK; /* other failures are of the reader */
}

fsdp_status fsdp_io_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out,
                         fsdp_error *err)
{
    io = or_posix(io);
    *file_out = NULL;
    int result = io->ops->open(io, path, flags, file_out);
    if (result == 0)
        return FSDP_OK;
    if (result == -EISDIR || result == -EINVAL)
        return fail_not_a_file(err, -result, path);
    if (result == -ELOOP)
        return fail_link(err, path);
    const char *verb = (flags & FSDP_IO_MODE) == FSDP_IO_CREATE ? "create" : "open";
    return fsdp_fail_errno(err, -result, "cannot %s '%s'", verb, path);
}

fsdp_status fsdp_io_read(fsdp_file *file, const char *path, void *data, size_t size, int64_t offset,
                         fsdp_error *err)
{
    for (size_t done = 0; done < size;) {
        int64_t at = offset + (int64_t)done;
        ssize_t n = file->ops->pread(file, (char *)data + done, size - done, at);
        if (n < 0)
            return fsdp_fail_errno(err, (int)-n, "cannot read '%s' at byte %" PRId64, path, at);
        if (n == 0)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s' ends at byte %" PRId64 "; expected %zu bytes at byte %" PRId64
                             "",
                             path, at, size, offset);
        done += (size_t)n;
    }
    fsdp_flow("base/io/io.c", "read '%s': %zu bytes at %" PRId64, path, size, offset);
    return FSDP_OK;
}

fsdp_status fsdp_io_write(fsdp_file *file, const char *path, const void *data, size_t size,
                          int64_t offset, fsdp_error *err)
{
    fsdp_flow("base/io/io.c", "write '%s': %zu bytes at %" PRId64, path, size, offset);
    for (size_t done = 0; done < size;) {
        int64_t at = offset + (int64_t)done;
        ssize_t n = file->ops->pwrite(file, (const char *)data + done, size - done, at);
        if (n <= 0)
            return fsdp_fail_errno(err, n < 0 ? (int)-n : EIO, "cannot write '%s' at byte %" PRId64,
                                   path, at);
        done += (size_t)n;
    }
    return FSDP_OK;
}

fsdp_status fsdp_io_reserve(fsdp_file *file, const char *path, int64_t size, fsdp_error *err)
{
    int result = file->ops->allocate(file, size);
    if (result == -EOPNOTSUPP) {
        int64_t now = 0;
        result = file->ops->size(file, &now);
        if (result == 0 && now < size)
            result = file->ops->resize(file, size);
    }
    if (result == 0)
        return FSDP_OK;
    return fsdp_fail_errno(err, -result, "cannot reserve %" PRId64 " bytes for '%s'", size, path);
}

void fsdp_io_await_sync(fsdp_file *file, int64_t offset, int64_t size)
{
    if (file->ops->await_sync)
        file->ops->await_sync(file, offset, size);
}

void fsdp_io_begin_sync(fsdp_file *file, int64_t offset, int64_t size)
{
    if (file->ops->begin_sync)
        file->ops->begin_sync(file, offset, size);
}

/* A full disk may show at fsync only, where space is allocated late. Every other failure is FSDP_ERR_IO. The
 * file is given up in any case: its data may be lost, and a second fsync would report success. */
static fsdp_status fail_sync(fsdp_error *err, int errnum, const char *path)
{
    fsdp_status status = fsdp_fail_errno(err, errnum, "cannot make '%s' durable", path);
    if (status == FSDP_ERR_NO_SPACE)
        return status;
    if (err)
        err->status = FSDP_ERR_IO;
    return FSDP_ERR_IO;
}

fsdp_status fsdp_io_sync(fsdp_file *file, const char *path, fsdp_error *err)
{
    fsdp_flow("base/io/io.c", "sync '%s'", path);
    int result = file->ops->sync(file);
    return result == 0 ? FSDP_OK : fail_sync(err, -result, path);
}

fsdp_status fsdp_io_close(fsdp_file **file, const char *path, fsdp_error *err)
{
    if (!*file)
        return FSDP_OK;
    int result = (*file)->ops->close(*file);
    *file = NULL;
    return result == 0 ? FSDP_OK : fsdp_fail_errno(err, -result, "cannot close '%s'", path);
}

fsdp_status fsdp_io_sync_dir(fsdp_io *io, const char *path, fsdp_error *err)
{
    fsdp_flow("base/io/io.c", "sync directory '%s'", path);
    io = or_posix(io);
    int result = io->ops->sync_dir(io, path);
    return result == 0 ? FSDP_OK : fail_sync(err, -result, path);
}

fsdp_status fsdp_io_rename(fsdp_io *io, const char *from, const char *to, bool replace,
                           fsdp_error *err)
{
    fsdp_flow("base/io/io.c", "rename '%s' to '%s'", from, to);
    io = or_posix(io);
    int result = io->ops->rename(io, from, to, replace);
    if (result == 0)
        return FSDP_OK;
    return fsdp_fail_errno(err, -result, "cannot rename '%s' to '%s'", from, to);
}

fsdp_status fsdp_io_mkdir(fsdp_io *io, const char *path, fsdp_error *err)
{
    io = or_posix(io);
    int result = io->ops->mkdir(io, path);
    return result == 0 ? FSDP_OK
                       : fsdp_fail_errno(err, -result, "cannot create directory '%s'", path);
}

bool fsdp_io_exists(fsdp_io *io, const char *path)
{
    io = or_posix(io);
    fsdp_file_info info;
    return io->ops->info(io, path, &info) == 0;
}

static fsdp_status read_open_file(fsdp_file *file, const char *path, size_t max_size,
                                  char **data_out, size_t *size_out, fsdp_error *err)
{
    int64_t size = 0;
    int result = file->ops->size(file, &size);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot get the size of '%s'", path);
    if ((uint64_t)size > max_size || (uint64_t)size >= SIZE_MAX)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has %" PRId64 " bytes, at most %zu are allowed",
                         path, size, max_size);
    char *data = fsdp_realloc(NULL, (size_t)size + 1, 1);
    if (!data)
        return fsdp_fail_memory(err, path);
    fsdp_status status = fsdp_io_read(file, path, data, (size_t)size, 0, err);
    if (status != FSDP_OK) {
        fsdp_free(data);
        return status;
    }
    data[size] = '\0';
    *data_out = data;
    *size_out = (size_t)size;
    return FSDP_OK;
}

fsdp_status fsdp_io_read_file(fsdp_io *io, const char *path, size_t max_size, char **data_out,
                              size_t *size_out, fsdp_error *err)
{
    *data_out = NULL;
    *size_out = 0;
    fsdp_file *file = NULL;
    FSDP_TRY(fsdp_io_open(io, path, fsdp_io_read_beneath(io), &file, err));
    fsdp_status status = read_open_file(file, path, max_size, data_out, size_out, err);
    (void)fsdp_io_close(&file, path, NULL); /* nothing was written that could be lost */
    return status;
}

/* A temporary file that a killed writer left is removed first. */
static fsdp_status create_afresh(fsdp_io *io, const char *path, fsdp_file **file_out,
                                 fsdp_error *err)
{
    int result = io->ops->open(io, path, FSDP_IO_CREATE, file_out);
    if (result == 0)
        return FSDP_OK;
    if (result == -EEXIST)
        result = io->ops->unlink(io, path);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot create '%s'", path);
    return fsdp_io_open(io, path, FSDP_IO_CREATE, file_out, err);
}

static fsdp_status write_whole(fsdp_io *io, const char *path, const void *data, size_t size,
                               fsdp_error *err)
{
    fsdp_file *file = NULL;
    FSDP_TRY(create_afresh(io, path, &file, err));
    fsdp_status status = fsdp_io_write(file, path, data, size, 0, err);
    if (status == FSDP_OK)
        status = fsdp_io_sync(file, path, err);
    fsdp_status closed = fsdp_io_close(&file, path, status == FSDP_OK ? err : NULL);
    return status == FSDP_OK ? closed : status;
}

fsdp_status fsdp_io_replace_file(fsdp_io *io, const char *path, const void *data, size_t size,
                                 fsdp_error *err)
{
    io = or_posix(io);
    size_t length = strlen(path);
    char *temporary = fsdp_alloc(length + sizeof ".tmp", 1);
    if (!temporary)
        return fsdp_fail_memory(err, path);
    memcpy(temporary, path, length);
    memcpy(temporary + length, ".tmp", sizeof ".tmp");
    fsdp_status status = write_whole(io, temporary, data, size, err);
    if (status == FSDP_OK)
        status = fsdp_io_rename(io, temporary, path, true, err);
    if (status != FSDP_OK)
        io->ops->unlink(io, temporary);
    fsdp_free(temporary);
    return status;
}

/* --- names of a directory --------------------------------------------------------------------- */

typedef struct name_search {
    bool (*wanted)(void *context, const char *name);
    void *context;
    fsdp_io_names *names;
    bool failed;
} name_search;

static int keep_name(void *context, const char *name)
{
    name_search *search = context;
    fsdp_io_names *names = search->names;
    if (search->wanted && !search->wanted(search->context, name))
        return 0;
    char *copy = fsdp_arena_strndup(&names->arena, name, strlen(name));
    if (!copy || !fsdp_grow(&names->items, &names->capacity, names->count + 1, sizeof copy)) {
        search->failed = true;
        return 1;
    }
    names->items[names->count++] = copy;
    return 0;
}

fsdp_status fsdp_io_list_names(fsdp_io *io, const char *path,
                               bool (*wanted)(void *context, const char *name), void *context,
                               fsdp_io_names *names_out, fsdp_error *err)
{
    *names_out = (fsdp_io_names){0};
    name_search search = {.wanted = wanted, .context = context, .names = names_out};
    io = or_posix(io);
    int result = io->ops->list(io, path, keep_name, &search);
    if (result == 0 && !search.failed)
        return FSDP_OK;
    fsdp_io_names_release(names_out);
    return search.failed ? fsdp_fail_memory(err, path)
                         : fsdp_fail_errno(err, -result, "cannot list '%s'", path);
}

void fsdp_io_names_release(fsdp_io_names *names)
{
    fsdp_free(names->items);
    fsdp_arena_release(&names->arena);
    *names = (fsdp_io_names){0};
}

/* --- trees ------------------------------------------------------------------------------------ */

static fsdp_status fail_too_deep(const char *path, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_REFUSED,
                     "cannot remove '%s': folders are nested more than %d deep", path,
                     FSDP_IO_TREE_DEPTH);
}

static fsdp_status remove_entry(fsdp_io *io, const char *path, int depth, fsdp_error *err);

static fsdp_status remove_children(fsdp_io *io, const char *path, int depth, fsdp_error *err)
{
    fsdp_io_names names;
    fsdp_error reason = {0};
    fsdp_status status = fsdp_io_list_names(io, path, NULL, NULL, &names, &reason);
    if (status != FSDP_OK && reason.errnum == ENOENT)
        return FSDP_OK;
    if (status != FSDP_OK && err)
        *err = reason;
    for (size_t i = 0; i < names.count && status == FSDP_OK; i++) {
        char *child = fsdp_path_join(path, names.items[i]);
        status = child ? remove_entry(io, child, depth + 1, err) : fsdp_fail_memory(err, path);
        fsdp_free(child);
    }
    fsdp_io_names_release(&names);
    return status;
}

/* The result of unlink distinguishes directories from files, since info would follow a symbolic
 * link. */
static fsdp_status remove_entry(fsdp_io *io, const char *path, int depth, fsdp_error *err)
{
    int result = io->ops->unlink(io, path);
    if (result == -EISDIR) {
        if (depth >= FSDP_IO_TREE_DEPTH)
            return fail_too_deep(path, err);
        FSDP_TRY(remove_children(io, path, depth, err));
        result = io->ops->rmdir(io, path);
    }
    if (result < 0 && result != -ENOENT)
        return fsdp_fail_errno(err, -result, "cannot remove '%s'", path);
    return FSDP_OK;
}

fsdp_status fsdp_io_remove_tree(fsdp_io *io, const char *path, fsdp_error *err)
{
    io = or_posix(io);
    if (!io->ops->remove_tree)
        return remove_entry(io, path, 0, err);
    int result = io->ops->remove_tree(io, path);
    if (result == -ELOOP)
        return fail_too_deep(path, err);
    return result == 0 ? FSDP_OK : fsdp_fail_errno(err, -result, "cannot remove '%s'", path);
}

char *fsdp_path_join(const char *dir, const char *name)
{
    size_t dir_length = strlen(dir);
    size_t name_length = strlen(name);
    bool slash = dir_length > 0 && dir[dir_length - 1] != '/';
    char *path = fsdp_alloc(dir_length + name_length + 2, 1);
    if (!path)
        return NULL;
    memcpy(path, dir, dir_length);
    if (slash)
        path[dir_length++] = '/';
    memcpy(path + dir_length, name, name_length + 1);
    return path;
}

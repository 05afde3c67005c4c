/* The io back end that writes only what differs: see io_reuse.h. */
#include "base/io_reuse.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

enum { PIECE_BYTES = 64 << 10 };

typedef struct reuse_io {
    fsdp_io base;
    fsdp_io *inner;
    _Atomic int64_t kept;
} reuse_io;

typedef struct reuse_file {
    fsdp_file base;
    fsdp_file *inner;
    reuse_io *owner;
} reuse_file;

static fsdp_io *inner_io(fsdp_io *io)
{
    return ((reuse_io *)io)->inner;
}

static fsdp_file *inner_file(fsdp_file *file)
{
    return ((reuse_file *)file)->inner;
}

static const fsdp_io_ops reuse_ops;

/* --- files ------------------------------------------------------------------------------------ */

static int open_inner(fsdp_io *inner, const char *path, unsigned flags, fsdp_file **file_out)
{
    int result = inner->ops->open(inner, path, flags, file_out);
    if (result == -EEXIST && (flags & FSDP_IO_MODE) == FSDP_IO_CREATE)
        result = inner->ops->open(inner, path, FSDP_IO_WRITE | FSDP_IO_BENEATH, file_out);
    return result;
}

static int reuse_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    reuse_file *file = fsdp_alloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    file->base.ops = &reuse_ops;
    file->owner = (reuse_io *)io;
    int result = open_inner(inner_io(io), path, flags, &file->inner);
    if (result < 0) {
        fsdp_free(file);
        return result;
    }
    *file_out = &file->base;
    return 0;
}

static ssize_t reuse_pread(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    return inner_file(file)->ops->pread(inner_file(file), data, size, offset);
}

static bool is_there(fsdp_file *inner, const char *data, size_t size, int64_t offset)
{
    char piece[PIECE_BYTES];
    size_t done = 0;
    while (done < size) {
        ssize_t n = inner->ops->pread(inner, piece + done, size - done, offset + (int64_t)done);
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return memcmp(piece, data, size) == 0;
}

static ssize_t reuse_pwrite(fsdp_file *base, const void *data, size_t size, int64_t offset)
{
    reuse_file *file = (reuse_file *)base;
    size_t done = 0;
    while (done < size) {
        const char *piece = (const char *)data + done;
        size_t n = size - done < PIECE_BYTES ? size - done : PIECE_BYTES;
        int64_t at = offset + (int64_t)done;
        if (is_there(file->inner, piece, n, at)) {
            atomic_fetch_add(&file->owner->kept, (int64_t)n);
            done += n;
            continue;
        }
        ssize_t written = file->inner->ops->pwrite(file->inner, piece, n, at);
        if (written <= 0)
            return done > 0 ? (ssize_t)done : written;
        done += (size_t)written;
    }
    return (ssize_t)done;
}

static int reuse_size(fsdp_file *file, int64_t *size_out)
{
    return inner_file(file)->ops->size(inner_file(file), size_out);
}

static int reuse_resize(fsdp_file *file, int64_t size)
{
    int64_t now;
    int result = inner_file(file)->ops->size(inner_file(file), &now);
    if (result < 0 || now >= size)
        return result;
    return inner_file(file)->ops->resize(inner_file(file), size);
}

static int reuse_allocate(fsdp_file *file, int64_t size)
{
    return inner_file(file)->ops->allocate(inner_file(file), size);
}

static int reuse_sync(fsdp_file *file)
{
    return inner_file(file)->ops->sync(inner_file(file));
}

static void reuse_begin_sync(fsdp_file *file, int64_t offset, int64_t size)
{
    if (inner_file(file)->ops->begin_sync)
        inner_file(file)->ops->begin_sync(inner_file(file), offset, size);
}

static void reuse_await_sync(fsdp_file *file, int64_t offset, int64_t size)
{
    if (inner_file(file)->ops->await_sync)
        inner_file(file)->ops->await_sync(inner_file(file), offset, size);
}

static int reuse_close(fsdp_file *file)
{
    int result = inner_file(file)->ops->close(inner_file(file));
    fsdp_free(file);
    return result;
}

static int reuse_lock(fsdp_file *file)
{
    return inner_file(file)->ops->lock(inner_file(file));
}

/* --- names ------------------------------------------------------------------------------------ */

static int reuse_rename(fsdp_io *io, const char *from, const char *to, bool replace)
{
    return inner_io(io)->ops->rename(inner_io(io), from, to, replace);
}

static int reuse_exchange(fsdp_io *io, const char *a, const char *b)
{
    return inner_io(io)->ops->exchange(inner_io(io), a, b);
}

static int reuse_remove(fsdp_io *io, const char *path)
{
    (void)io;
    (void)path;
    return 0;
}

static int reuse_mkdir(fsdp_io *io, const char *path)
{
    int result = inner_io(io)->ops->mkdir(inner_io(io), path);
    return result == -EEXIST ? 0 : result;
}

static int reuse_sync_dir(fsdp_io *io, const char *path)
{
    return inner_io(io)->ops->sync_dir(inner_io(io), path);
}

static int reuse_list(fsdp_io *io, const char *path, int (*visit)(void *user, const char *name),
                      void *user)
{
    return inner_io(io)->ops->list(inner_io(io), path, visit, user);
}

static int reuse_info(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    return inner_io(io)->ops->info(inner_io(io), path, info_out);
}

static int reuse_space(fsdp_io *io, const char *path, fsdp_space *space_out)
{
    return inner_io(io)->ops->space(inner_io(io), path, space_out);
}

static const fsdp_io_ops reuse_ops = {
    .name = "reuse",
    .open = reuse_open,
    .pread = reuse_pread,
    .pwrite = reuse_pwrite,
    .size = reuse_size,
    .resize = reuse_resize,
    .allocate = reuse_allocate,
    .sync = reuse_sync,
    .begin_sync = reuse_begin_sync,
    .await_sync = reuse_await_sync,
    .close = reuse_close,
    .lock = reuse_lock,
    .rename = reuse_rename,
    .exchange = reuse_exchange,
    .unlink = reuse_remove,
    .mkdir = reuse_mkdir,
    .rmdir = reuse_remove,
    .sync_dir = reuse_sync_dir,
    .list = reuse_list,
    .info = reuse_info,
    .space = reuse_space,
    .remove_tree = reuse_remove,
};

fsdp_status fsdp_io_reuse_create(fsdp_io *inner, fsdp_io **io_out, fsdp_error *err)
{
    reuse_io *reuse = fsdp_alloc(1, sizeof *reuse);
    if (!reuse)
        return fsdp_fail_memory(err, "a resumed conversion");
    reuse->base.ops = &reuse_ops;
    reuse->inner = inner;
    *io_out = &reuse->base;
    return FSDP_OK;
}

void fsdp_io_reuse_free(fsdp_io *io)
{
    fsdp_free(io);
}

int64_t fsdp_io_reuse_kept(const fsdp_io *io)
{
    return io ? atomic_load(&((const reuse_io *)io)->kept) : 0;
}

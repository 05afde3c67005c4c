/* The io back end that writes only what differs: see io_reuse.h. */
#include "base/io/io_reuse.h"

#include "base/io/io_pass.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

enum { PIECE_BYTES = 64 << 10 };

typedef struct reuse_io {
    fsdp_io_pass pass;
    _Atomic int64_t kept;
} reuse_io;

static fsdp_io *inner_io(fsdp_io *io)
{
    return ((fsdp_io_pass *)io)->inner;
}

static fsdp_file *inner_file(fsdp_file *file)
{
    return ((fsdp_pass_file *)file)->inner;
}

/* --- files ------------------------------------------------------------------------------------ */

static int reuse_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    int result = fsdp_io_pass_open(io, path, flags, file_out);
    if (result == -EEXIST && (flags & FSDP_IO_MODE) == FSDP_IO_CREATE)
        result = fsdp_io_pass_open(io, path, FSDP_IO_WRITE | FSDP_IO_BENEATH, file_out);
    return result;
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
    fsdp_file *inner = inner_file(base);
    reuse_io *owner = (reuse_io *)((fsdp_pass_file *)base)->owner;
    size_t done = 0;
    while (done < size) {
        const char *piece = (const char *)data + done;
        size_t n = size - done < PIECE_BYTES ? size - done : PIECE_BYTES;
        int64_t at = offset + (int64_t)done;
        if (is_there(inner, piece, n, at)) {
            atomic_fetch_add(&owner->kept, (int64_t)n);
            done += n;
            continue;
        }
        ssize_t written = inner->ops->pwrite(inner, piece, n, at);
        if (written <= 0)
            return done > 0 ? (ssize_t)done : written;
        done += (size_t)written;
    }
    return (ssize_t)done;
}

static int reuse_resize(fsdp_file *file, int64_t size)
{
    int64_t now;
    int result = inner_file(file)->ops->size(inner_file(file), &now);
    if (result < 0 || now >= size)
        return result;
    return inner_file(file)->ops->resize(inner_file(file), size);
}

/* --- names ------------------------------------------------------------------------------------ */

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

fsdp_status fsdp_io_reuse_create(fsdp_io *inner, fsdp_io **io_out, fsdp_error *err)
{
    reuse_io *reuse = fsdp_alloc(1, sizeof *reuse);
    if (!reuse)
        return fsdp_fail_memory(err, "a resumed conversion");
    fsdp_io_pass_begin(&reuse->pass, "reuse", inner);
    fsdp_io_ops *ops = &reuse->pass.ops;
    ops->open = reuse_open;
    ops->pwrite = reuse_pwrite;
    ops->resize = reuse_resize;
    ops->mkdir = reuse_mkdir;
    ops->unlink = ops->rmdir = ops->remove_tree = reuse_remove;
    *io_out = &reuse->pass.base;
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

/* The io back end that hands every call on: see io_pass.h. */
#include "base/io/io_pass.h"

#include <errno.h>

static fsdp_io *inner_io(fsdp_io *io)
{
    return ((fsdp_io_pass *)io)->inner;
}

static fsdp_file *inner_file(fsdp_file *file)
{
    return ((fsdp_pass_file *)file)->inner;
}

/* --- files ------------------------------------------------------------------------------------ */

int fsdp_io_pass_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    fsdp_io_pass *pass = (fsdp_io_pass *)io;
    fsdp_pass_file *file = fsdp_alloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    *file = (fsdp_pass_file){.base.ops = &pass->ops, .owner = pass, .flags = flags};
    int result = pass->inner->ops->open(pass->inner, path, flags, &file->inner);
    if (result < 0) {
        fsdp_free(file);
        return result;
    }
    *file_out = &file->base;
    return 0;
}

static ssize_t pass_pread(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    return inner_file(file)->ops->pread(inner_file(file), data, size, offset);
}

static ssize_t pass_pwrite(fsdp_file *file, const void *data, size_t size, int64_t offset)
{
    return inner_file(file)->ops->pwrite(inner_file(file), data, size, offset);
}

static int pass_size(fsdp_file *file, int64_t *size_out)
{
    return inner_file(file)->ops->size(inner_file(file), size_out);
}

static int pass_resize(fsdp_file *file, int64_t size)
{
    return inner_file(file)->ops->resize(inner_file(file), size);
}

static int pass_allocate(fsdp_file *file, int64_t size)
{
    return inner_file(file)->ops->allocate(inner_file(file), size);
}

static int pass_sync(fsdp_file *file)
{
    return inner_file(file)->ops->sync(inner_file(file));
}

static void pass_begin_sync(fsdp_file *file, int64_t offset, int64_t size)
{
    fsdp_io_begin_sync(inner_file(file), offset, size);
}

static void pass_await_sync(fsdp_file *file, int64_t offset, int64_t size)
{
    fsdp_io_await_sync(inner_file(file), offset, size);
}

static int pass_close(fsdp_file *file)
{
    int result = inner_file(file)->ops->close(inner_file(file));
    fsdp_free(file);
    return result;
}

static int pass_lock(fsdp_file *file)
{
    return inner_file(file)->ops->lock(inner_file(file));
}

/* --- names ------------------------------------------------------------------------------------ */

static int pass_rename(fsdp_io *io, const char *from, const char *to, bool replace)
{
    return inner_io(io)->ops->rename(inner_io(io), from, to, replace);
}

static int pass_exchange(fsdp_io *io, const char *a, const char *b)
{
    return inner_io(io)->ops->exchange(inner_io(io), a, b);
}

static int pass_unlink(fsdp_io *io, const char *path)
{
    return inner_io(io)->ops->unlink(inner_io(io), path);
}

static int pass_mkdir(fsdp_io *io, const char *path)
{
    return inner_io(io)->ops->mkdir(inner_io(io), path);
}

static int pass_rmdir(fsdp_io *io, const char *path)
{
    return inner_io(io)->ops->rmdir(inner_io(io), path);
}

static int pass_sync_dir(fsdp_io *io, const char *path)
{
    return inner_io(io)->ops->sync_dir(inner_io(io), path);
}

static int pass_list(fsdp_io *io, const char *path, int (*visit)(void *context, const char *name),
                     void *context)
{
    return inner_io(io)->ops->list(inner_io(io), path, visit, context);
}

static int pass_info(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    return inner_io(io)->ops->info(inner_io(io), path, info_out);
}

static int pass_space(fsdp_io *io, const char *path, fsdp_space *space_out)
{
    return inner_io(io)->ops->space(inner_io(io), path, space_out);
}

static int pass_remove_tree(fsdp_io *io, const char *path)
{
    return inner_io(io)->ops->remove_tree(inner_io(io), path);
}

static const fsdp_io_ops pass_ops = {
    .open = fsdp_io_pass_open,
    .pread = pass_pread,
    .pwrite = pass_pwrite,
    .size = pass_size,
    .resize = pass_resize,
    .allocate = pass_allocate,
    .sync = pass_sync,
    .begin_sync = pass_begin_sync,
    .await_sync = pass_await_sync,
    .close = pass_close,
    .lock = pass_lock,
    .rename = pass_rename,
    .exchange = pass_exchange,
    .unlink = pass_unlink,
    .mkdir = pass_mkdir,
    .rmdir = pass_rmdir,
    .sync_dir = pass_sync_dir,
    .list = pass_list,
    .info = pass_info,
    .space = pass_space,
    .remove_tree = pass_remove_tree,
};

void fsdp_io_pass_begin(fsdp_io_pass *pass, const char *name, fsdp_io *inner)
{
    *pass = (fsdp_io_pass){.inner = inner, .ops = pass_ops};
    pass->base = (fsdp_io){&pass->ops, inner->trust, inner->host};
    pass->ops.name = name;
    if (!inner->ops->remove_tree)
        pass->ops.remove_tree = NULL;
}

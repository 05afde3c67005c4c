/* The io back end that does nothing: see io_dry.h. */
#include "base/io/io_dry.h"

#include <errno.h>

static const fsdp_io_ops dry_ops;

static int dry_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    (void)io;
    (void)path;
    if ((flags & FSDP_IO_MODE) == FSDP_IO_READ)
        return -ENOENT;
    fsdp_file *file = fsdp_alloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    file->ops = &dry_ops;
    *file_out = file;
    return 0;
}

static ssize_t dry_pread(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    (void)file;
    (void)data;
    (void)size;
    (void)offset;
    return 0;
}

static ssize_t dry_pwrite(fsdp_file *file, const void *data, size_t size, int64_t offset)
{
    (void)file;
    (void)data;
    (void)offset;
    return (ssize_t)size;
}

static int dry_size(fsdp_file *file, int64_t *size_out)
{
    (void)file;
    *size_out = 0;
    return 0;
}

static int dry_resize(fsdp_file *file, int64_t size)
{
    (void)file;
    (void)size;
    return 0;
}

static int dry_on_file(fsdp_file *file)
{
    (void)file;
    return 0;
}

static int dry_close(fsdp_file *file)
{
    fsdp_free(file);
    return 0;
}

static int dry_rename(fsdp_io *io, const char *from, const char *to, bool replace)
{
    (void)io;
    (void)from;
    (void)to;
    (void)replace;
    return 0;
}

static int dry_exchange(fsdp_io *io, const char *a, const char *b)
{
    (void)io;
    (void)a;
    (void)b;
    return -EINVAL;
}

static int dry_on_path(fsdp_io *io, const char *path)
{
    (void)io;
    (void)path;
    return 0;
}

static int dry_list(fsdp_io *io, const char *path, int (*visit)(void *context, const char *name),
                    void *context)
{
    (void)io;
    (void)path;
    (void)visit;
    (void)context;
    return 0;
}

static int dry_info(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    (void)io;
    (void)path;
    (void)info_out;
    return -ENOENT;
}

static int dry_space(fsdp_io *io, const char *path, fsdp_space *space_out)
{
    (void)io;
    (void)path;
    (void)space_out;
    return -ENOSYS;
}

static const fsdp_io_ops dry_ops = {
    .name = "dry",
    .open = dry_open,
    .pread = dry_pread,
    .pwrite = dry_pwrite,
    .size = dry_size,
    .resize = dry_resize,
    .allocate = dry_resize,
    .sync = dry_on_file,
    .close = dry_close,
    .lock = dry_on_file,
    .rename = dry_rename,
    .exchange = dry_exchange,
    .unlink = dry_on_path,
    .mkdir = dry_on_path,
    .rmdir = dry_on_path,
    .sync_dir = dry_on_path,
    .list = dry_list,
    .info = dry_info,
    .space = dry_space,
};

fsdp_io *fsdp_io_dry(void)
{
    static fsdp_io io = {.ops = &dry_ops};
    return &io;
}

/* One file in memory: see io_memory.h. */
#include "base/io/io_memory.h"

#include "base/core/mem.h"

#include <errno.h>
#include <string.h>

typedef struct memory_file {
    fsdp_file file;
    fsdp_memory_io *memory;
} memory_file;

static fsdp_memory_io *memory_of(fsdp_file *file)
{
    return ((memory_file *)file)->memory;
}

static ssize_t memory_pread(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    const fsdp_memory_io *memory = memory_of(file);
    if (offset < 0)
        return -EINVAL;
    if ((size_t)offset >= memory->size)
        return 0;
    size_t left = memory->size - (size_t)offset;
    size = size < left ? size : left;
    memcpy(data, memory->data + offset, size);
    return (ssize_t)size;
}

static int memory_size(fsdp_file *file, int64_t *size_out)
{
    *size_out = (int64_t)memory_of(file)->size;
    return 0;
}

static int memory_close(fsdp_file *file)
{
    fsdp_free(file);
    return 0;
}

static int memory_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    static const fsdp_io_ops ops = {
        .pread = memory_pread, .size = memory_size, .close = memory_close};
    memory_file *file = fsdp_alloc(1, sizeof *file);
    (void)path;
    if (flags & ~(unsigned)(FSDP_IO_READ | FSDP_IO_BENEATH))
        return -EROFS;
    if (!file)
        return -ENOMEM;
    *file = (memory_file){{&ops}, (fsdp_memory_io *)io};
    *file_out = &file->file;
    return 0;
}

static int memory_info(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    (void)path;
    *info_out =
        (fsdp_file_info){.kind = FSDP_FILE_REGULAR, .size = (int64_t)((fsdp_memory_io *)io)->size};
    return 0;
}

static const fsdp_io_ops memory_ops = {.name = "memory", .open = memory_open, .info = memory_info};

void fsdp_memory_io_borrow(fsdp_memory_io *memory, const void *data, size_t size)
{
    *memory = (fsdp_memory_io){.io.ops = &memory_ops, .data = data, .size = size};
}

/* The io back end that reads past the page cache: see io_direct.h. */
#include "base/io/io_direct.h"

#include "base/io/io_pass.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

enum { BLOCK = FSDP_DIRECT_BLOCK, MOST_TRIES = 3 };

typedef struct direct_io {
    fsdp_io_pass pass;
    size_t buffer;
    _Atomic int64_t refusals;
} direct_io;

/* --- opening ---------------------------------------------------------------------------------- */

static bool is_worth_it(fsdp_file *file, unsigned flags)
{
    int64_t size = 0;
    return (flags & FSDP_IO_MODE) == FSDP_IO_READ && file->ops->size(file, &size) == 0 &&
           size >= FSDP_DIRECT_LEAST;
}

/* Opens through the page cache first: that open checks the file, and its result stays when O_DIRECT fails. */
static int direct_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    fsdp_file *other = NULL;
    int result = fsdp_io_pass_open(io, path, flags, file_out);
    if (result < 0 || !is_worth_it(*file_out, flags))
        return result;
    result = fsdp_io_pass_open(io, path, flags | FSDP_IO_DIRECT, &other);
    if (result == -EINVAL) {
        atomic_fetch_add(&((direct_io *)io)->refusals, 1);
        return 0;
    }
    (void)(*file_out)->ops->close(*file_out); /* only read: nothing can be lost */
    *file_out = other;
    return result;
}

/* --- reading ---------------------------------------------------------------------------------- */

/* Reads whole blocks into the buffer until it holds more than `before` bytes: O_DIRECT returns part
 * of a block only at the end of a file. 0 at the end of the file. */
static ssize_t read_blocks(fsdp_file *inner, char *buffer, size_t size, size_t before,
                           int64_t offset)
{
    int64_t end = 0;
    for (int tries = 0; tries < MOST_TRIES; tries++) {
        ssize_t n = inner->ops->pread(inner, buffer, size, offset);
        if (n <= 0 || (size_t)n > before)
            return n;
        int result = inner->ops->size(inner, &end);
        if (result < 0 || offset + (int64_t)before >= end)
            return result;
    }
    return -EIO;
}

static ssize_t direct_pread(fsdp_file *base, void *data, size_t size, int64_t offset)
{
    fsdp_pass_file *file = (fsdp_pass_file *)base;
    size_t most = ((const direct_io *)file->owner)->buffer;
    if (!(file->flags & FSDP_IO_DIRECT) || size == 0)
        return file->inner->ops->pread(file->inner, data, size, offset);
    if (offset < 0)
        return -EINVAL;
    size_t before = (size_t)(offset % BLOCK);
    size_t blocks = size > most - before ? most : (before + size + BLOCK - 1) / BLOCK * BLOCK;
    char *buffer = fsdp_alloc_pages(blocks);
    if (!buffer)
        return -ENOMEM;
    ssize_t n = read_blocks(file->inner, buffer, blocks, before, offset - (int64_t)before);
    if (n > 0) {
        size_t got = (size_t)n - before;
        n = (ssize_t)(got < size ? got : size);
        memcpy(data, buffer + before, (size_t)n);
    }
    fsdp_free(buffer);
    return n;
}

/* --- create and free -------------------------------------------------------------------------- */

fsdp_status fsdp_io_direct_create(fsdp_io *inner, size_t buffer, fsdp_io **io_out, fsdp_error *err)
{
    direct_io *direct = fsdp_alloc(1, sizeof *direct);
    if (!direct)
        return fsdp_fail_memory(err, "reading past the page cache");
    fsdp_io_pass_begin(&direct->pass, "direct", inner);
    direct->pass.ops.open = direct_open;
    direct->pass.ops.pread = direct_pread;
    direct->buffer = buffer < 2 * BLOCK ? 2 * BLOCK : buffer / BLOCK * BLOCK;
    *io_out = &direct->pass.base;
    return FSDP_OK;
}

void fsdp_io_direct_free(fsdp_io *io)
{
    fsdp_free(io);
}

int64_t fsdp_io_direct_refusals(const fsdp_io *io)
{
    return atomic_load(&((const direct_io *)io)->refusals);
}

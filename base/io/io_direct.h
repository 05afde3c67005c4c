/*
 * The io back end that reads past the page cache (O_DIRECT): for reading more than memory holds without
 * pushing out what other programs keep there. Disks then want whole blocks, so the blocks that a range meets
 * are read into a buffer of our own, and the range is copied out of it.
 *
 * Only files that are read and not small go past the cache. Where a file system cannot do it, they are read
 * as ever, and counted.
 */
#ifndef FSDP_IO_DIRECT_H
#define FSDP_IO_DIRECT_H

#include "base/io/io.h"

enum {
    FSDP_DIRECT_BLOCK = 4096,          /* offsets, sizes and addresses are multiples of it */
    FSDP_DIRECT_LEAST = 1 << 20        /* smaller files are not worth it */
};

/* Borrows inner until it is freed. buffer: bytes that a thread reads at once, and takes meanwhile. */
fsdp_status fsdp_io_direct_create(fsdp_io *inner, size_t buffer, fsdp_io **io_out, fsdp_error *err);
/* All its files are closed before. Accepts NULL. */
void fsdp_io_direct_free(fsdp_io *io);

/* How often a file was opened whose file system has no such reading. */
int64_t fsdp_io_direct_refusals(const fsdp_io *io);

#endif

/*
 * The io back end that reads past the page cache (O_DIRECT): it reads more than memory holds without evicting
 * other programs' pages. O_DIRECT reads whole blocks, so a read fills a buffer with the blocks around its
 * range and copies the range out.
 *
 * Writes and files below FSDP_DIRECT_LEAST use the page cache. So do files of a file system without O_DIRECT,
 * which fsdp_io_direct_refusals counts.
 */
#ifndef FSDP_IO_DIRECT_H
#define FSDP_IO_DIRECT_H

#include "base/io/io.h"

enum {
    FSDP_DIRECT_BLOCK = 4096,          /* offsets, sizes and addresses are multiples of it */
    FSDP_DIRECT_LEAST = 1 << 20        /* smaller files use the page cache */
};

/* Borrows inner until it is freed. buffer: bytes that a thread reads at once, and takes meanwhile. */
fsdp_status fsdp_io_direct_create(fsdp_io *inner, size_t buffer, fsdp_io **io_out, fsdp_error *err);
/* All its files are closed before. Accepts NULL. */
void fsdp_io_direct_free(fsdp_io *io);

/* Number of opened files whose file system has no O_DIRECT. */
int64_t fsdp_io_direct_refusals(const fsdp_io *io);

#endif

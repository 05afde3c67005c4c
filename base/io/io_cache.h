/*
 * The io back end that opens a file and lists a directory once, however often it is asked to: several formats
 * look at the same files before one of them describes the checkpoint.
 *
 * It begins to cache when it is created, and ends with fsdp_io_cache_end: data is then read through the inner
 * io. Files that are open at that moment stay valid. Only reads are cached; sizes and times of paths are
 * asked for each time, so that a file that is replaced meanwhile is noticed.
 */
#ifndef FSDP_IO_CACHE_H
#define FSDP_IO_CACHE_H

#include "base/io/io.h"

enum {
    FSDP_IO_CACHE_FILES = 32,          /* open without a user, at most: the least recent is closed */
    FSDP_IO_CACHE_NAMES = 1 << 16      /* names of all listings, at most: larger ones are listed each time */
};

/* Borrows inner until it is freed. Several threads may use the io. */
fsdp_status fsdp_io_cache_create(fsdp_io *inner, fsdp_io **io_out, fsdp_error *err);
/* Closes files that nobody uses and forgets all listings. Nothing is cached from now on. */
void fsdp_io_cache_end(fsdp_io *io);
/* All its files are closed before. Accepts NULL. */
void fsdp_io_cache_free(fsdp_io *io);

#endif

/*
 * A read-only file system of one file in memory, found under every path: for bytes that a file reader parses.
 */
#ifndef FSDP_IO_MEMORY_H
#define FSDP_IO_MEMORY_H

#include "base/io/io.h"

typedef struct fsdp_memory_io {
    fsdp_io io;
    const char *data;
    size_t size;
} fsdp_memory_io;

/* A file of these bytes, which are borrowed. Nothing to release. */
void fsdp_memory_io_borrow(fsdp_memory_io *memory, const void *data, size_t size);

#endif

/*
 * A file system of one file that lies in memory, whatever its path: for what must be read or written
 * like a file and is none. It cannot rename, list or lock.
 */
#ifndef FSDP_IO_MEMORY_H
#define FSDP_IO_MEMORY_H

#include "base/io.h"

typedef struct fsdp_memory_io {
    fsdp_io io;
    char *data;
    size_t size, room;
    bool is_fixed;             /* data is borrowed and only read */
} fsdp_memory_io;

/* An empty file that grows as it is written. */
void fsdp_memory_io_init(fsdp_memory_io *memory);
/* A file of these bytes, which are borrowed. */
void fsdp_memory_io_borrow(fsdp_memory_io *memory, const void *data, size_t size);
void fsdp_memory_io_release(fsdp_memory_io *memory);

#endif

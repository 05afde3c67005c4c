/* An io table of files in memory, for fuzz targets of formats that read files. */
#ifndef FSDP_MEMORY_FILE_H
#define FSDP_MEMORY_FILE_H

#include "base/io/io.h"
#include "formats/source.h"

#include <stddef.h>

typedef struct memory_entry {
    const char *name;          /* NULL: this file is found under every name but those before it */
    const uint8_t *data;
    size_t size;
} memory_entry;

/* One file, which is called "fuzz"; every other name is not there. */
fsdp_io *memory_io(const uint8_t *data, size_t size);
/* "fuzz" is a folder of these files, which are borrowed. */
fsdp_io *memory_folder(const memory_entry *entries, size_t count);

/* Opens "fuzz" as a source and reads all of it; the process ends when something does not make sense. */
void read_everything(fsdp_io *io);
/* Reads all of an open source, and closes it. */
void read_source(fsdp_source *source);

#endif

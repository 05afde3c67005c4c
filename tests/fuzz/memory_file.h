/* An io table with one file in memory, for fuzz targets of formats that read files. */
#ifndef FSDP_FUZZ_MEMORY_FILE_H
#define FSDP_FUZZ_MEMORY_FILE_H

#include "base/io.h"

#include <stddef.h>

/* The one file is called "fuzz"; every other name is not there. */
fsdp_io *memory_io(const uint8_t *data, size_t size);

/* Opens it as a source and reads all of it; the process ends when something does not make sense. */
void read_everything(fsdp_io *io);

#endif

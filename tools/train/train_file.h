/* Small files of a training, whole or appended to. */
#ifndef FSDP_TRAIN_FILE_H
#define FSDP_TRAIN_FILE_H

#include "base/text.h"
#include <fsdp/status.h>
#include <stddef.h>

typedef struct train_part { const void *data; size_t size; } train_part;

/* Writes the parts one after the other; a file appears whole, in place of an older one, or not at all. A
 * pipe or a device is written to as it is. */
fsdp_status train_file_write(const char *path, const train_part *parts, size_t count, fsdp_error *err);
/* Appends the whole text of a file; more than `most` bytes are FSDP_ERR_LIMIT. */
fsdp_status train_file_read(const char *path, size_t most, fsdp_text *text, fsdp_error *err);
/* Removes a directory and the files in it, of which none is a directory. */
fsdp_status train_file_remove_directory(const char *path, fsdp_error *err);

#endif

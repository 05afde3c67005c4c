/* Small files of a training. */
#ifndef FSDP_TRAIN_FILE_H
#define FSDP_TRAIN_FILE_H

#include "base/text.h"
#include <fsdp/status.h>
#include <stddef.h>

/* Appends the whole text of a file; more than `most` bytes are FSDP_ERR_LIMIT. */
fsdp_status train_file_read(const char *path, size_t most, fsdp_text *text, fsdp_error *err);
/* Removes a directory and the files in it, of which none is a directory. */
fsdp_status train_file_remove_directory(const char *path, fsdp_error *err);

#endif

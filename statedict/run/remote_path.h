/* Names of checkpoints that are on no disk of this machine: addresses, and models of Hugging Face. */
#ifndef FSDP_REMOTE_PATH_H
#define FSDP_REMOTE_PATH_H

#include "base/io/io.h"

/* The error about a path that cannot be opened; where nothing is there, also what its name looks like, and
 * the command that gets it. */
fsdp_status fsdp_remote_path_fail(fsdp_io *io, const char *path, int errnum, fsdp_error *err);

#endif

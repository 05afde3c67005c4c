/* Names of checkpoints that are on no disk of this machine: addresses, and models of Hugging Face. */
#ifndef FSDP_REMOTE_PATH_H
#define FSDP_REMOTE_PATH_H

#include "base/io/io.h"

/* Adds to an error about a path that cannot be opened what it looks like, and the command that gets it.
 * Nothing where it looks like a path. */
void fsdp_remote_path_advise(fsdp_io *io, const char *path, fsdp_error *err);

#endif

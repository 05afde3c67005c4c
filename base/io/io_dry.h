/*
 * The io back end that stores nothing: creating and writing succeed, and no file is ever found. Plans run a
 * writer of files on it to learn the offsets it would use.
 */
#ifndef FSDP_IO_DRY_H
#define FSDP_IO_DRY_H

#include "base/io/io.h"

/* One object for the process, never freed. */
fsdp_io *fsdp_io_dry(void);

#endif

/*
 * Files that are only talked about: everything that is created or written succeeds and is forgotten, and
 * nothing is ever there. For plans, which ask a writer of files where it would put things.
 */
#ifndef FSDP_IO_DRY_H
#define FSDP_IO_DRY_H

#include "base/io/io.h"

/* One object for the process, never freed. */
fsdp_io *fsdp_io_dry(void);

#endif

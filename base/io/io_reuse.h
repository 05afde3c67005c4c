/*
 * Writing again what may be there already: files that are created may exist, and of what is written only the
 * bytes that differ are. For work that was cut off and makes the same files again: what it had written is
 * kept, byte for byte compared, and what it had not is filled in.
 *
 * Files never shrink, and nothing is removed: the caller removes what he gives up.
 */
#ifndef FSDP_IO_REUSE_H
#define FSDP_IO_REUSE_H

#include "base/io/io.h"

/* Borrows inner until it is freed. */
fsdp_status fsdp_io_reuse_create(fsdp_io *inner, fsdp_io **io_out, fsdp_error *err);
/* All its files are closed before. Accepts NULL. */
void fsdp_io_reuse_free(fsdp_io *io);
/* Bytes that were not written since they were there. */
int64_t fsdp_io_reuse_kept(const fsdp_io *io);

#endif

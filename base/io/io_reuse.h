/*
 * The io back end that writes only bytes that differ: creating a file that exists opens it, and a write is
 * compared with the bytes there. An interrupted conversion that makes the same files again uses it, so that
 * bytes written before are compared and kept.
 *
 * Files never shrink and are never removed; the caller removes files that it gives up.
 */
#ifndef FSDP_IO_REUSE_H
#define FSDP_IO_REUSE_H

#include "base/io/io.h"

/* Borrows inner until it is freed. */
fsdp_status fsdp_io_reuse_create(fsdp_io *inner, fsdp_io **io_out, fsdp_error *err);
/* All its files are closed before. Accepts NULL. */
void fsdp_io_reuse_free(fsdp_io *io);
/* Number of bytes that were equal and therefore not written. */
int64_t fsdp_io_reuse_kept(const fsdp_io *io);

#endif

/*
 * A cache of the checkpoints whose data this process has verified, so that retention reads each of them once
 * and not at every save. The key is a fingerprint of the files, which changes when a file changes.
 */
#ifndef FSDP_VERIFIED_H
#define FSDP_VERIFIED_H

#include "base/io/io.h"

/* A hash of names, sizes, times and inodes of the files. False when the directory cannot be read. */
typedef struct fsdp_fingerprint { uint64_t parts[2]; } fsdp_fingerprint;
bool fsdp_fingerprint_take(fsdp_io *io, const char *dir, fsdp_fingerprint *print_out);

bool fsdp_verified_has(const fsdp_fingerprint *print);
/* Keeps the last FSDP_VERIFIED_KEPT. */
enum { FSDP_VERIFIED_KEPT = 4096 };
void fsdp_verified_add(const fsdp_fingerprint *print);

#endif

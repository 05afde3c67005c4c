/*
 * What this process has verified: checkpoints whose data was read and was right, remembered by what a change
 * would show in, so that retention reads each of them once and not at every save.
 */
#ifndef FSDP_VERIFIED_H
#define FSDP_VERIFIED_H

#include "base/io/io.h"

/* The names, sizes, times and nodes of a checkpoint's files. False when they cannot be looked at. */
typedef struct fsdp_fingerprint { uint64_t parts[2]; } fsdp_fingerprint;
bool fsdp_fingerprint_take(fsdp_io *io, const char *dir, fsdp_fingerprint *print_out);

bool fsdp_verified_has(const fsdp_fingerprint *print);
/* Keeps the last FSDP_VERIFIED_KEPT. */
enum { FSDP_VERIFIED_KEPT = 4096 };
void fsdp_verified_add(const fsdp_fingerprint *print);

#endif

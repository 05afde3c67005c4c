/*
 * The room runtime/background saves a root while training goes on (async_save.h): async_save.c has the thread
 * and the order of calls, snapshot.c the copy. In come roots between steps, out come checkpoints. It uses the
 * state dicts of runtime/state and the saves of statedict/save; programs call it, no room below does.
 *
 * A snapshot is the copy of a state dict's tensors in one block of memory, which is touched when it is
 * allocated and used again by the next copy.
 */
#ifndef FSDP_SNAPSHOT_H
#define FSDP_SNAPSHOT_H

#include <fsdp/sd.h>

/* Zero-initialise. */
typedef struct fsdp_snapshot {
    unsigned char *pool;
    int64_t room;
} fsdp_snapshot;

/* Makes room for a copy of this rank's tensors. The pool grows only when the state does. */
fsdp_status fsdp_snapshot_reserve(fsdp_snapshot *snapshot, const fsdp_sd *sd, int rank, fsdp_error *err);
/* Copies this rank's tensors into the pool, and points the state dict to the copies; it keeps all else. */
fsdp_status fsdp_snapshot_take(fsdp_snapshot *snapshot, fsdp_sd *sd, int rank, int64_t *bytes_out,
                               fsdp_error *err);
void fsdp_snapshot_release(fsdp_snapshot *snapshot);

#endif

/*
 * The room runtime/background saves a root while training goes on (async_save.h): async_save.c has the thread
 * and the order of calls, snapshot.c the copy. In come roots between steps, out come checkpoints. It uses the
 * state dicts of runtime/state and the saves of statedict/save; programs call it, no room below does.
 *
 * A snapshot is the copy of a state dict's tensors in one block of staging memory, which is touched when it
 * is allocated and used again by the next copy. From a device with memory of its own a stream copies, while
 * the program goes on.
 */
#ifndef FSDP_SNAPSHOT_H
#define FSDP_SNAPSHOT_H

#include "runtime/context/host_view.h"
#include <fsdp/sd.h>

/* Zero-initialise. */
typedef struct fsdp_snapshot {
    const fsdp_host_view *view;        /* which memory is the device's */
    fsdp_stream *stream;               /* NULL: all memory is the host's */
    unsigned char *pool;
    int64_t room;
} fsdp_snapshot;

/* Makes room for a copy of this rank's tensors. The view outlives the snapshot. */
fsdp_status fsdp_snapshot_open(fsdp_snapshot *snapshot, const fsdp_host_view *view, const fsdp_sd *sd,
                               int rank, fsdp_error *err);
/* Copies this rank's tensors into the pool, and points the state dict to the copies; it keeps all else. The
 * stream copies memory of the device, behind `behind`: it stays unchanged until *copied_out is reached. The
 * pool grows only when the state does. */
fsdp_status fsdp_snapshot_take(fsdp_snapshot *snapshot, fsdp_sd *sd, int rank, fsdp_event behind,
                               fsdp_event *copied_out, fsdp_error *err);
int64_t fsdp_snapshot_bytes(const fsdp_sd *sd, int rank);      /* of this rank's tensors */
void fsdp_snapshot_release(fsdp_snapshot *snapshot);           /* waits for its stream */

#endif

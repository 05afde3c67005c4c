/*
 * The room runtime/staging moves a root's state through staging memory: for saves, and back for loads
 * (load_copies.h). In come state dicts whose tensors lie in the device's memory, out come the same dicts with
 * memory that the host can read. Saves of runtime/state and of runtime/background use it.
 *
 * A snapshot is the copy of a state dict's tensors in one pool of staging memory, which is allocated and
 * touched once and used again by the next copy. Host memory, and the model's buffers, are copied at once.
 * From a device with memory of its own a stream copies all else, while the program continues: in one wave,
 * or, when the state is larger than the pool may be, in waves (statedict/sd/waves.h) that take turns in the
 * two halves of the rest. While the save reads a wave, the next one is copied.
 *
 *   pool    | at once | half 0: waves 0, 2, 4 ... | half 1: waves 1, 3, 5 ... |
 */
#ifndef FSDP_SNAPSHOT_H
#define FSDP_SNAPSHOT_H

#include <pthread.h>

#include "runtime/context/host_view.h"
#include "statedict/sd/waves.h"
#include <fsdp/sd.h>

/* The parts of the pool, in bytes. */
typedef struct fsdp_snapshot_plan {
    int64_t at_once, half;
    int64_t room;
} fsdp_snapshot_plan;

/* A tensor that is copied in waves. */
typedef struct fsdp_snapshot_source {
    const void *data;          /* of the device; NULL: copied at once */
    size_t hash;               /* its number among the hashes, if it is hashed */
} fsdp_snapshot_source;

typedef struct fsdp_snapshot_opts {
    const fsdp_host_view *view;        /* which memory is the device's; outlives the snapshot */
    int64_t most;                      /* bytes of the pool; 0: the whole state */
    bool is_still;                     /* the program waits for the save, and only the device's memory is
                                        * copied */
} fsdp_snapshot_opts;

/* Zero-initialise. */
typedef struct fsdp_snapshot {
    fsdp_snapshot_opts opts;
    fsdp_stream *stream;               /* NULL: all memory is the host's */
    unsigned char *pool;
    int64_t room;
    /* of the copy at hand */
    const fsdp_sd *sd;
    int rank;
    fsdp_snapshot_plan plan;
    fsdp_snapshot_source *sources;     /* per entry */
    size_t *first;                     /* entry of each wave */
    fsdp_span *hashed;                 /* device memory to hash */
    size_t source_room, first_room, hashed_room, hashed_count;
    fsdp_hash *hashes;                 /* staging memory, one per span */
    size_t hash_room;
    fsdp_waves waves;
    fsdp_event copied[2];              /* the last wave of each half */
    fsdp_event used;                   /* the stream's last work on the pool */
    /* under the lock, for the program's thread waits for a save's */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool has_lock;
    size_t given;                      /* waves whose copies were given to the stream */
    bool is_ended;                     /* no more are given */
} fsdp_snapshot;

/* A copy takes this rank's tensors of sd, whose memory becomes the pool's; sd keeps all else. */
typedef struct fsdp_snapshot_take {
    fsdp_sd *sd;
    int rank;
    const bool *is_hashed;             /* per entry; NULL: none is */
    fsdp_stream *changes;              /* all earlier work on the state; later changes of its buffers */
} fsdp_snapshot_take;

/* Reserves memory for a copy of this rank's tensors, in a pool of at most opts->most bytes, or of what is
 * copied at once and twice the largest other tensor if that is more. */
fsdp_status fsdp_snapshot_open(fsdp_snapshot *snapshot, const fsdp_snapshot_opts *opts, const fsdp_sd *sd,
                               int rank, fsdp_error *err);
/* Copies what is copied at once, and gives the stream the first wave. The device's memory but for
 * buffers stays unchanged until fsdp_snapshot_last. The pool grows only when the state does. */
fsdp_status fsdp_snapshot_begin(fsdp_snapshot *snapshot, const fsdp_snapshot_take *take, fsdp_error *err);
/* For fsdp_save_call; NULL: everything is copied already. */
fsdp_waves *fsdp_snapshot_waves(fsdp_snapshot *snapshot);
/* The XXH3-128 of this rank's bytes of an entry that is_hashed. The device hashes what it copies in waves, so
 * that no wave is needed but the first, which was entered. */
fsdp_hash fsdp_snapshot_hash(const fsdp_snapshot *snapshot, size_t entry);
/* The event after the last copy. Waits until it is given to the stream, or fsdp_snapshot_end. Any thread. */
fsdp_event fsdp_snapshot_last(fsdp_snapshot *snapshot);
/* The save is over: waves that it did not enter are not copied. */
void fsdp_snapshot_end(fsdp_snapshot *snapshot);

int64_t fsdp_snapshot_bytes(const fsdp_sd *sd, int rank);      /* of this rank's tensors */
void fsdp_snapshot_release(fsdp_snapshot *snapshot);           /* waits for its stream */

#endif

/* An opened checkpoint, as save, load, verify and convert see it. */
#ifndef FSDP_CHECKPOINT_INTERNAL_H
#define FSDP_CHECKPOINT_INTERNAL_H

#include "statedict/manifest/manifest.h"
#include "statedict/transfer/pipeline.h"
#include "statedict/transfer/box_plan.h"
#include <fsdp/filter.h>

struct fsdp_checkpoint {
    fsdp_io *io;
    char *path;
    bool is_one_file;          /* the path is a file of ours (one_file.h), not a directory */
    fsdp_manifest manifest;
    int *owners;               /* per entry, repeated from the manifest's policy */
    fsdp_shard_reader **readers;   /* per file; NULL until needed */
    fsdp_checkpoint_info info;
    struct fsdp_source *source;    /* a checkpoint of another program (foreign.c); NULL: our own */
    size_t *source_tensor;     /* per entry: its tensor there */
    fsdp_filter *may_lack;     /* while it is opened: names of what may be incomplete; NULL: nothing may */
    bool *is_missing;          /* per entry: incomplete (incomplete.h); NULL: all are whole */
    int64_t *source_boxes;     /* per file of it that holds tensors or values: boxes of tensors */
};

/* The path itself, no run; files of ours are opened when they are needed. opts NULL: defaults. */
fsdp_status fsdp_checkpoint_open_as(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                                    fsdp_checkpoint **checkpoint_out, fsdp_error *err);

/* Opens the directory itself (no run), without shard files. */
fsdp_status fsdp_checkpoint_open_manifest(fsdp_io *io, const char *path, fsdp_checkpoint **checkpoint_out,
                                          fsdp_error *err);

/* The same without a look at the sizes of its shard files, which opening them repeats. */
fsdp_status fsdp_checkpoint_open_alone(fsdp_io *io, const char *path, fsdp_checkpoint **checkpoint_out,
                                       fsdp_error *err);

/* Opens shard file `number` and checks its index, unless that was done. Not thread-safe. */
fsdp_status fsdp_checkpoint_need_file(fsdp_checkpoint *checkpoint, int number, fsdp_error *err);
fsdp_status fsdp_checkpoint_need_all(fsdp_checkpoint *checkpoint, fsdp_error *err);

/* The file that holds what a rank stored. */
int fsdp_checkpoint_file_of(const fsdp_checkpoint *checkpoint, int rank);

/* The stored box of a plan: index and manifest must agree. Its file must be open. */
fsdp_status fsdp_checkpoint_stored(const fsdp_checkpoint *checkpoint, size_t entry, int rank, size_t part,
                                   const fsdp_box *box, const fsdp_stored_box **stored_out,
                                   fsdp_shard_reader **reader_out, fsdp_error *err);

/*
 * Workers that fill the same wants together walk over the same blocks in the same order, and each
 * takes the blocks whose number it drew. Nobody waits for anybody.
 */
typedef struct fsdp_turns {
    atomic_llong *next;        /* shared: the next number to draw */
    int64_t mine;              /* drawn by this worker */
    int64_t at;                /* number of the block this worker looks at */
} fsdp_turns;

void fsdp_turns_begin(fsdp_turns *turns, atomic_llong *next);
/* Is the next item this worker's? Always without turns. */
bool fsdp_turns_take(fsdp_turns *turns);
/* Nobody draws a number that counts any more: a worker failed. */
void fsdp_turns_stop(fsdp_turns *turns);

/* Fills wanted boxes of one entry: all of them, or with turns this worker's share. Its files must be
 * open; several threads may do this at once, each with its own getter. */
fsdp_status fsdp_checkpoint_get(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_want *wants,
                                size_t count, fsdp_getter *getter, fsdp_turns *turns, fsdp_error *err);

#endif

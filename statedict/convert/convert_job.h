/*
 * A conversion at work. One loop for every source and every target:
 *
 *   select    open the source, choose entries and their new names, find names of one tensor, describe the
 *             target (selection, ties, relayout)                                          convert_plan.c
 *   plan      divide the memory, count files and bytes, take the plan's hash, refuse what cannot be there or
 *             does not fit; nothing is written yet                                        convert_plan.c
 *   move      a tensor in slabs: read and checked, cast, hashed, written                  convert_move.c
 *   check     what was written is read back and compared                                  convert_move.c
 *   publish   the result takes its name, whole or not at all                              convert.c
 *
 * A *slab* is a run of a tensor's row-major order. The boxes of the target cut it into *pieces*, each a run
 * of its box, so that nothing is written twice and the blocks of the source are read once for all boxes that
 * they overlap. Memory is bounded by the slabs at work (--mem), whatever the checkpoint's size.
 *
 * A source is an opened checkpoint (checkpoint_internal.h). A target is one of the tables below: a native
 * directory, a native checkpoint in one file, or a format of another program (formats/target.h).
 * The calls of convert.h come in; files below DST.tmp-UUID and then DST go out.
 */
#ifndef FSDP_CONVERT_JOB_H
#define FSDP_CONVERT_JOB_H

#include "formats/target.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/commit/commit.h"
#include "statedict/convert/copied.h"
#include "statedict/convert/output_place.h"
#include "statedict/convert/plan_text.h"
#include "statedict/select/cast_box.h"

#include <stdatomic.h>

typedef struct convert_target_ops convert_target_ops;

typedef struct convert_job {
    const convert_target_ops *target;
    fsdp_convert_opts opts;
    const char *to;
    fsdp_io *io;
    fsdp_io *reuse;            /* what is there already is not written again; or NULL */
    const fsdp_target_format *format;  /* NULL: a native directory */
    const fsdp_limits *limits; /* of another program's format; NULL: native, which holds everything */
    fsdp_kind kind;            /* of the target's layout */

    /* select */
    fsdp_checkpoint *from;
    fsdp_mesh *mesh;
    int world;
    fsdp_sd *sd;               /* the target's description */
    size_t *source;            /* per entry of it: entry of the source */
    int *owners;               /* per entry of it: the copy that is stored */
    fsdp_ties ties;            /* names that are left out */
    fsdp_copies copies;        /* files beside the weights */
    bool casts;                /* some tensor gets another dtype */

    /* plan */
    int threads, workers;      /* of an encoded target there is one worker, with threads */
    int64_t slab_bytes, chunk_bytes;
    int64_t tensor_bytes;      /* as they are written */
    char hash[FSDP_PLAN_HASH];

    /* files are written in groups; a rank's boxes lie in the file of its number */
    int file_count, group_files, first_file, end_file;
    bool *is_kept;             /* per file: an earlier conversion finished it; NULL: none */
    void *files;               /* the target's own state */

    /* where the result comes into being: one of the two */
    fsdp_staging staging;
    fsdp_output_place place;

    /* move, check */
    int64_t *first_slab;       /* per entry, and behind the last: slabs are numbered through */
    fsdp_hash *hashes;         /* per slab, of targets whose files hold none */
    fsdp_checkpoint *written;  /* while it is read back */
    size_t *written_entry;     /* per entry: its number there */
    fsdp_cast_sum *cast_sums;  /* per file: what casting did to its values */
    atomic_llong next;         /* unit of work to take */
    int64_t kept_bytes;        /* of finished files */
    fsdp_watch watch;          /* the caller's, which also keeps the lease of a run */
    fsdp_meter meter;
} convert_job;

/* What a target takes beside the slabs. */
typedef struct convert_room {
    int64_t fixed;             /* whatever the budget: descriptions, indexes */
    int64_t per_thread;        /* to put the records of a file together, or to read them back */
    int64_t per_file;          /* that is written */
    int64_t slab_least, slab_most;
} convert_room;

/* A run of a box of the target. */
typedef struct convert_piece {
    size_t entry;
    int rank;                  /* that stores the box, */
    size_t part;               /* as its box of this number */
    int64_t first, count;      /* elements of the box */
    char *data;
} convert_piece;

typedef fsdp_status (*convert_part_visit)(void *user, const char *file, size_t entry, const fsdp_box *box,
                                          fsdp_error *err);
#define CONVERT_NO_PART ((size_t)-1)    /* as an entry: a file, whose parts follow */

/* What the engine asks of a target. */
struct convert_target_ops {
    bool is_ordered;           /* pieces of a box come in order: a worker takes whole tensors */

    /* The description is made: what must be declared beside it. */
    fsdp_status (*declare)(convert_job *job, const fsdp_selection *selection, fsdp_error *err);
    convert_room (*room)(const convert_job *job);
    /* Sets files, bytes_written and bytes_needed of the plan. */
    fsdp_status (*measure)(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err);
    /* Every part of every file, for the plan's text. */
    fsdp_status (*list)(convert_job *job, convert_part_visit visit, void *user, fsdp_error *err);
    /* May the result be there? */
    fsdp_status (*check_place)(const convert_job *job, fsdp_error *err);

    /* A staging place, new or of a conversion that was cut off. */
    fsdp_status (*begin)(convert_job *job, fsdp_error *err);
    /* The files of the group at work are created, filled by several threads, finished, */
    fsdp_status (*create)(convert_job *job, fsdp_error *err);
    fsdp_status (*write)(convert_job *job, const convert_piece *piece, fsdp_error *err);
    fsdp_status (*finish)(convert_job *job, fsdp_error *err);
    /* and read back, by hashes that they hold. NULL: they hold none, slabs are compared (convert_move.c). */
    fsdp_status (*check)(convert_job *job, fsdp_error *err);
    /* Where a piece lies, in a file of the staging place; NULL where only finished files can be kept. */
    fsdp_status (*locate)(const convert_job *job, const convert_piece *piece, fsdp_target_place *place_out,
                          fsdp_error *err);
    fsdp_status (*publish)(convert_job *job, fsdp_error *err);
    /* Removes what was written and neither published nor is to be gone on with; releases. The status may be
     * told better than the work could. */
    fsdp_status (*end)(convert_job *job, fsdp_status status, fsdp_error *err);
};

extern const convert_target_ops fsdp_directory_target;  /* native_target.c: a native directory */
extern const convert_target_ops fsdp_one_file_target;   /* one_file_target.c: a native file */
extern const convert_target_ops fsdp_foreign_target;    /* foreign_target.c */

/* --- convert_plan.c --------------------------------------------------------------------------- */

/* All that comes before the first byte. */
fsdp_status fsdp_convert_prepare(convert_job *job, const char *from, fsdp_convert_plan *plan,
                                 fsdp_error *err);
/* Is there data of the entry? Where the target knows no aliases, they are tensors. */
bool fsdp_convert_has_data(const convert_job *job, size_t entry);
fsdp_dtype fsdp_convert_source_dtype(const convert_job *job, size_t entry);

/* --- convert_move.c --------------------------------------------------------------------------- */

/* Numbers the slabs: the size of one does not change any more. */
fsdp_status fsdp_convert_number_slabs(convert_job *job, fsdp_error *err);
fsdp_status fsdp_convert_move(convert_job *job, fsdp_error *err);
/* Opens the result and compares it, slab by slab. */
fsdp_status fsdp_convert_read_back(convert_job *job, fsdp_error *err);

#endif

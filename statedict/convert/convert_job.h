/*
 * A running conversion. One loop for every source and every target:
 *
 *   derive    open the source, and put stages of derived tensors on it: adapter, map, ... convert_select.c
 *   select    choose entries and their new names, find names of one tensor, describe the
 *             target (selection, ties, relayout)                                          convert_select.c
 *   plan      divide the memory, count files and bytes, compute the plan's hash, check the destination and
 *             its free space; nothing is written yet                                      convert.c
 *   move      each tensor in slabs: read and check, cast, hash, write                     convert.c
 *   check     read the result back and compare it                                         convert.c
 *   publish   rename the whole result to its name                                         convert.c
 *
 * A *slab* is a run of a tensor's row-major order. The boxes of the target cut it into *pieces*, each a run
 * of its box, so that no element is written twice and each block of the source is read once for all boxes
 * that it overlaps. The slabs in memory bound the memory (--mem) for checkpoints of any size.
 *
 * A source is an opened checkpoint (checkpoint_internal.h). A target is one of the tables below: a native
 * directory, a native checkpoint in one file, or a format of another program (formats/target.h).
 * In: the calls of convert.h. Out: files below DST.tmp-UUID, and then DST.
 */
#ifndef FSDP_CONVERT_JOB_H
#define FSDP_CONVERT_JOB_H

#include "formats/target.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/commit/commit.h"
#include "statedict/convert/copied.h"
#include "statedict/convert/output_place.h"
#include "statedict/convert/plan_notes.h"
#include "statedict/convert/plan_file.h"
#include "statedict/models/config.h"
#include "statedict/expect/export_check.h"
#include "statedict/map/map.h"
#include "statedict/select/cast_box.h"
#include "statedict/select/metadata.h"

#include <stdatomic.h>

typedef struct convert_target_ops convert_target_ops;

/* Tied names that are left out, in the order of the source, and the name kept for each; all are new names. */
typedef struct fsdp_ties {
    fsdp_arena arena;
    fsdp_convert_tie *items;
    size_t count, room;
} fsdp_ties;

typedef struct convert_job {
    const convert_target_ops *target;
    fsdp_convert_opts opts;
    const char *to;
    fsdp_io *io;
    fsdp_io *reuse;            /* skips writes of bytes that are in the file already; or NULL */
    const fsdp_format *format;
    fsdp_kind kind;            /* of the target's layout */

    /* select */
    fsdp_checkpoint *from;     /* the source with the stages of derived tensors on it */
    fsdp_mesh *mesh;
    int world;
    fsdp_sd *sd;               /* the target's description */
    size_t *source;            /* per entry of it: entry of the source */
    int *owners;               /* per entry of it: the copy that is stored */
    fsdp_ties ties;            /* names that are left out */
    fsdp_name_list added;      /* names of tied tensors that the source lacks; its last entries */
    fsdp_text rules;           /* that strip names, one after the other */
    const char **rule_list;    /* opts.select.renames, if they are these; NULL: the caller's */
    fsdp_names_known known;    /* of the source's names */
    fsdp_config_file config;   /* of the model, for all who ask about it; known.model_type points into it */
    size_t target_entries;     /* the last ones of from, before those of added, that only the target needs */
    bool unties;               /* an adapter gives the tied output a tensor of its own */
    char *copied_snapshot;     /* opts.copy_from, when it is of a cache; NULL: the caller's */
    fsdp_copies copies;        /* files beside the weights */
    fsdp_export_report seen;   /* of a model that a map renamed */
    fsdp_metadata_choice metadata;     /* texts beside the tensors of the result */
    bool casts;                /* at least one tensor gets another dtype */

    /* plan */
    fsdp_plan_facts facts;     /* that its notes are made of */
    int threads, workers;      /* an encoded target has one worker, with all threads */
    int64_t slab_bytes, chunk_bytes;
    int64_t tensor_bytes;      /* of the target */
    char hash[FSDP_PLAN_HASH];

    /* files are written in groups; a rank's boxes lie in the file of its number */
    int file_count, group_files, first_file, end_file;
    bool *is_kept;             /* per file: finished by an earlier conversion; NULL: none */
    void *files;               /* the target's own state */

    /* the place of the unpublished result: one of the two */
    fsdp_staging staging;
    fsdp_output_place place;

    /* move, check */
    int64_t *first_slab;       /* per entry: number of its first slab; one more at the end */
    fsdp_hash *hashes;         /* per slab, for targets whose files hold no hashes */
    fsdp_checkpoint *written;  /* the result, while it is read back */
    size_t *written_entry;     /* per entry: its number there */
    fsdp_cast_sum *cast_sums;  /* per file: the effect of casting on its values */
    atomic_llong next;         /* unit of work to take */
    int64_t kept_bytes;        /* of finished files */
    fsdp_watch watch;          /* the caller's; also refreshes the lease of a run */
    fsdp_meter meter;
} convert_job;

/* Memory of a target beside the slabs. */
typedef struct convert_room {
    int64_t fixed;             /* independent of the budget: descriptions, indexes */
    int64_t per_thread;        /* to assemble the records of a file, or to read them back */
    int64_t per_file;          /* for each file being written */
    int64_t slab_least, slab_most;
} convert_room;

/* A run of a box of the target. */
typedef struct convert_piece {
    size_t entry;
    int rank;                  /* the rank that stores the box */
    size_t part;               /* the box's number on that rank */
    int64_t first, count;      /* elements of the box */
    char *data;
} convert_piece;

typedef fsdp_status (*convert_part_visit)(void *context, const char *file, size_t entry, const fsdp_box *box,
                                          fsdp_error *err);
#define CONVERT_NO_PART ((size_t)-1)    /* in place of an entry: a file, whose parts follow */

/* The functions of a target. */
struct convert_target_ops {
    bool is_ordered;           /* needs the pieces of a box in order: a worker takes whole tensors */
    /* Declares the entries to the target, after the description was made. */
    fsdp_status (*declare)(convert_job *job, const fsdp_selection *selection, fsdp_error *err);
    convert_room (*room)(const convert_job *job);
    /* Sets files, bytes_written and bytes_needed of the plan. */
    fsdp_status (*measure)(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err);
    /* Visits every part of every file, for the plan's text. */
    fsdp_status (*list)(convert_job *job, convert_part_visit visit, void *context, fsdp_error *err);
    /* Checks that the result may be published at its destination. */
    fsdp_status (*check_place)(const convert_job *job, fsdp_error *err);

    /* Makes a staging place, or takes that of an interrupted conversion. */
    fsdp_status (*begin)(convert_job *job, fsdp_error *err);
    /* Creates the files of the current group; several threads then write them, and finish closes them. */
    fsdp_status (*create)(convert_job *job, fsdp_error *err);
    fsdp_status (*write)(convert_job *job, const convert_piece *piece, fsdp_error *err);
    fsdp_status (*finish)(convert_job *job, fsdp_error *err);
    /* Reads the files back and compares their hashes. NULL: the files hold none, and convert.c compares
     * slabs. */
    fsdp_status (*check)(convert_job *job, fsdp_error *err);
    /* Finds the place of a piece in a file of the staging place; NULL where only finished files are kept. */
    fsdp_status (*locate)(const convert_job *job, const convert_piece *piece, fsdp_target_place *place_out,
                          fsdp_error *err);
    fsdp_status (*publish)(convert_job *job, fsdp_error *err);
    /* Releases the target, and removes the result unless it was published or may be resumed. May return a
     * more exact status than the given one. */
    fsdp_status (*end)(convert_job *job, fsdp_status status, fsdp_error *err);
};

extern const convert_target_ops fsdp_directory_target;  /* native_target.c: a native directory */
extern const convert_target_ops fsdp_one_file_target;   /* native_target.c: a native file */
extern const convert_target_ops fsdp_foreign_target;    /* foreign_target.c */

/* Opens the source, and sets the members of the job below "select" (convert_select.c). */
fsdp_status fsdp_convert_select(convert_job *job, const char *from, fsdp_convert_plan *plan, fsdp_error *err);

#endif

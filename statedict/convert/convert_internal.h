/* A conversion into our own format at work: convert.c moves the tensors, convert_check.c looks at files. */
#ifndef FSDP_CONVERT_INTERNAL_H
#define FSDP_CONVERT_INTERNAL_H

#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/commit/commit.h"
#include "statedict/convert/export_commit.h"
#include "statedict/convert/plan_file.h"
#include "statedict/select/cast_box.h"
#include "statedict/commit/resume.h"

typedef struct convert_job {
    const fsdp_convert_opts *opts;
    fsdp_io *io;
    fsdp_checkpoint *from;
    fsdp_mesh *mesh;
    int world, file_count, threads;
    int64_t slab_bytes, chunk_bytes;
    char hash[FSDP_PLAN_HASH];
    fsdp_sd *sd;    /* the target's description */
    size_t *source; /* per target entry: entry of the source */
    fsdp_ties ties; /* names that are left out */
    int *owners;
    int first_file, end_file, group_files; /* the group at work, and the most files of one */
    fsdp_save_plan *plans;                 /* per file */
    fsdp_shard_writer **writers;
    fsdp_shard_seal *seals;
    fsdp_encoder *encoder;
    fsdp_staging staging;
    fsdp_export_place place; /* instead, for one file: its format is not NULL */
    fsdp_resume notes; /* of finished files, for a conversion that goes on with this one */
    fsdp_io *reuse;    /* what is there already is not written again; or NULL */
    bool *is_kept;     /* per file: another one wrote it */
    bool casts;        /* some tensor gets another dtype */
    fsdp_cast_sum *cast_sums; /* per file, then: what that did to its values */
    int64_t kept_bytes;
    fsdp_watch watch; /* the caller's, which also keeps the lease of a run */
    fsdp_meter meter;
} convert_job;

/* May the result be there? */
fsdp_status fsdp_convert_check_target(const convert_job *job, const char *to, fsdp_error *err);

/* Where a file of the target is written, in fresh memory; NULL when there is none. */
char *fsdp_convert_staged_path(const convert_job *job, int file);
fsdp_shard_id fsdp_convert_file_id(const convert_job *job, int file);

/* --- convert_cast.c ---------------------------------------------------------------------------- */

fsdp_dtype fsdp_convert_source_dtype(const convert_job *job, size_t entry);
/* What was read for some boxes becomes what is written, in the same memory; files: where each belongs. */
fsdp_status fsdp_convert_cast(convert_job *job, size_t entry, const fsdp_want *wants, const int *files,
                              size_t count, fsdp_error *err);
void fsdp_convert_report_casts(const convert_job *job, const fsdp_convert_plan *plan);

/* --- files ------------------------------------------------------------------------------------- */

/* What is noted of a finished file; without casts only the seal. */
typedef struct fsdp_finished_file {
    fsdp_shard_seal seal;
    fsdp_cast_tally tally;
} fsdp_finished_file;
size_t fsdp_convert_note_size(const convert_job *job);

/* For fsdp_parallel over the files of the group at work: each is read back, every block compared by hash. */
fsdp_status fsdp_convert_check_file(void *job, size_t number, fsdp_error *err);

/* Before the first group, in a staging directory that was taken up: which files are whole already. */
fsdp_status fsdp_convert_keep_files(convert_job *job, fsdp_error *err);

/* All files are there: as a checkpoint, or for a place of one file. */
fsdp_status fsdp_convert_publish(convert_job *job, fsdp_error *err);
fsdp_status fsdp_convert_publish_file(convert_job *job, fsdp_error *err);

#endif

/*
 * What the files of an export share: export_plan.c (what is written, and whether it can be), export_slabs.c
 * (how the work is cut), export.c (the work). See export.h.
 */
#ifndef FSDP_EXPORT_INTERNAL_H
#define FSDP_EXPORT_INTERNAL_H

#include "formats/target.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/convert/export.h"
#include "statedict/convert/copied.h"
#include "statedict/convert/export_commit.h"
#include "statedict/convert/plan_file.h"
#include "statedict/select/cast_box.h"

#include <stdatomic.h>

enum { FSDP_EXPORT_SLAB_LEAST = 1 << 20 };

/* One box of one entry, cut into slabs. */
typedef struct export_part {
    size_t entry, box;
    int64_t first_slab;
} export_part;

typedef struct export_job {
    const fsdp_convert_opts *opts;
    fsdp_io *io;
    const fsdp_target_format *format;
    fsdp_checkpoint *from;
    fsdp_mesh *mesh;
    fsdp_sd *sd;    /* the target's description */
    size_t *source; /* per entry of it: entry of the source */
    fsdp_copies copies;
    fsdp_ties names_left; /* tied names that are left out, */
    fsdp_target_tie *ties; /* and the same for the target */
    int world, threads;
    int64_t slab_bytes;
    char hash[FSDP_PLAN_HASH]; /* of the plan */
    fsdp_target_entry *entries;
    fsdp_target_box *boxes; /* of all entries */
    fsdp_arena dims;        /* of boxes */
    size_t box_count;
    export_part *parts;
    size_t part_count;
    fsdp_hash *hashes; /* per slab */
    int64_t slab_count;
    fsdp_export_place place;
    fsdp_io *reuse; /* or NULL: what another one wrote and is the same is not written again */
    fsdp_target *target;
    fsdp_checkpoint *written; /* while it is read back */
    size_t *written_entry;    /* per entry: its number there */
    bool casts;               /* some tensor gets another dtype: */
    fsdp_cast_sum cast_sum;   /* what that did to values */
    int64_t tensor_bytes;     /* as they are written */
    atomic_llong next;        /* slab to take */
    fsdp_meter meter;
} export_job;

/* A slab at hand. */
typedef struct export_slab {
    size_t entry, box_number;
    fsdp_box box; /* in the tensor */
    int64_t first, count;
} export_slab;

/* --- export_plan.c ---------------------------------------------------------------------------- */

/* No work yet: options are checked. Whatever the result, the job is released. */
fsdp_status fsdp_export_job_init(const fsdp_convert_opts *opts, export_job *job, fsdp_error *err);
/* err: of a failure, see fsdp_export_end; or NULL. */
void fsdp_export_job_release(export_job *job, fsdp_error *err);
/* Opens the source, describes the target and checks that it can be written; nothing is. */
fsdp_status fsdp_export_prepare(export_job *job, const char *from, const char *to, fsdp_convert_plan *plan,
                                fsdp_error *err);
fsdp_target_opts fsdp_export_target_opts(const export_job *job);
/* Aliases become tensors: not every format knows them. */
size_t fsdp_export_tensor_of(const fsdp_sd *sd, size_t i);

/* --- export_slabs.c --------------------------------------------------------------------------- */

/* Sets threads and slab_bytes from the memory that may be used. */
void fsdp_export_divide_memory(export_job *job);
fsdp_status fsdp_export_number_slabs(export_job *job, fsdp_error *err);
void fsdp_export_find_slab(const export_job *job, int64_t number, export_slab *slab_out);
size_t fsdp_export_slab_size(const export_job *job, const export_slab *slab);

/* --- export_cast.c ---------------------------------------------------------------------------- */

fsdp_dtype fsdp_export_source_dtype(const export_job *job, size_t entry);
/* Bytes of an element on its way: of the wider of both types. */
size_t fsdp_export_element_room(const export_job *job, size_t entry);
/* Reads a slab of the source into data and casts it there; what that did is set in the tally. */
fsdp_status fsdp_export_read(export_job *job, const export_slab *slab, char *data, fsdp_getter *getter,
                             fsdp_cast_tally *tally, fsdp_error *err);

#endif

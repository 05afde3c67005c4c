/* What a path that is to be loaded may mean: one checkpoint, or a run's steps from the newest on. */
#ifndef FSDP_CANDIDATES_H
#define FSDP_CANDIDATES_H

#include "base/io/io.h"
#include <fsdp/checkpoint.h>
#include <fsdp/run.h>

typedef struct fsdp_candidates {
    const char *path;          /* as given; borrowed */
    bool is_run;
    fsdp_run_steps steps;      /* of a run */
    size_t next;
    char *single;              /* of anything else */
} fsdp_candidates;

enum { FSDP_CANDIDATE_PATH = 4096 };   /* the longest path that Linux opens */

/* Plain bytes, so that rank 0 can tell the others. */
typedef struct fsdp_candidate {
    char path[FSDP_CANDIDATE_PATH];
    int64_t step;              /* that the name of a run's directory says, else FSDP_STEP_NONE */
    bool is_last;
} fsdp_candidate;

fsdp_status fsdp_candidates_list(const char *path, fsdp_io *io, const fsdp_watch *watch,
                                 fsdp_candidates *list_out, fsdp_error *err);
void fsdp_candidates_release(fsdp_candidates *list);

/* The newest that was not taken yet. FSDP_ERR_NOT_FOUND when a run holds none. */
fsdp_status fsdp_candidates_next(fsdp_candidates *list, fsdp_candidate *candidate_out, fsdp_error *err);

/* A step of a run that could not be loaded is not passed over when it is of a format version to come. */
fsdp_status fsdp_candidate_refuse_newer(const fsdp_candidates *list, const fsdp_candidate *failed,
                                        fsdp_io *io, fsdp_error *err);

/* A step directory that was renamed is not the step that its name says: FSDP_ERR_DAMAGED. */
fsdp_status fsdp_candidate_check_step(const fsdp_candidate *candidate, int64_t stored_step, fsdp_error *err);

#endif

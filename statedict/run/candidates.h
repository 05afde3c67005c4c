/* The checkpoints that a load of a path tries in turn: the steps of a run, newest first, or one
 * checkpoint. */
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
    char *single;              /* any other path */
} fsdp_candidates;

enum { FSDP_CANDIDATE_PATH = 4096 };   /* the longest path that Linux opens */

/* No pointers inside, so that rank 0 can broadcast it. */
typedef struct fsdp_candidate {
    char path[FSDP_CANDIDATE_PATH];
    int64_t step;              /* from the name step-N; FSDP_NO_STEP for other names */
    bool is_last;
} fsdp_candidate;

fsdp_status fsdp_candidates_list(const char *path, fsdp_io *io, const fsdp_watch *watch,
                                 fsdp_candidates *list_out, fsdp_error *err);
void fsdp_candidates_release(fsdp_candidates *list);

/* The newest candidate not returned yet. FSDP_ERR_NOT_FOUND when a run holds none. */
fsdp_status fsdp_candidates_next(fsdp_candidates *list, fsdp_candidate *candidate_out, fsdp_error *err);

/* FSDP_ERR_REFUSED when the failed step of a run has a later format version: the load does not skip it. */
fsdp_status fsdp_candidate_refuse_newer(const fsdp_candidates *list, const fsdp_candidate *failed,
                                        fsdp_io *io, fsdp_error *err);

/* FSDP_ERR_DAMAGED when the manifest has another step than the name: the directory was renamed. */
fsdp_status fsdp_candidate_check_step(const fsdp_candidate *candidate, int64_t stored_step, fsdp_error *err);

#endif

/* Parts of a save that other files use: a step of a run (run_save.c), and the full state on rank 0
 * (gather.c). */
#ifndef FSDP_SAVE_INTERNAL_H
#define FSDP_SAVE_INTERNAL_H

#include "statedict/commit/commit.h"
#include <fsdp/checkpoint.h>

/* fsdp_sd_save; after success *lease_out is the lease of the run that DIR is a step of, on rank 0;
 * else NULL. */
fsdp_status fsdp_sd_save_step(const fsdp_sd *sd, fsdp_ctl *ctl, const char *dir,
                              const fsdp_save_opts *opts, fsdp_lease **lease_out, fsdp_error *err);

/* FSDP_STEP_NONE: none was given. */
static inline int64_t fsdp_save_step(const fsdp_save_opts *opts)
{
    return opts->step ? *opts->step : FSDP_STEP_NONE;
}

/* A rank was lost before anything was published: adds to the error what that means. */
void fsdp_save_report_unchanged(fsdp_error *err);

typedef struct fsdp_gather {
    int64_t memory;            /* equal on all ranks */
    bool is_described;         /* the ranks have compared their state dicts already */
    fsdp_slab_visit visit;     /* on rank 0 */
    void *user;
} fsdp_gather;

/*
 * Collective. fsdp_sd_gather with the outcome of what each rank did before it; nothing moves unless every
 * rank brings FSDP_OK. A failure of visit is returned on rank 0 alone, which brings it to the next round.
 */
fsdp_status fsdp_gather_slabs(const fsdp_sd *sd, fsdp_ctl *ctl, const fsdp_gather *how, fsdp_status mine,
                              fsdp_error *err);

#endif

/* Saving a step of a run for run_save.c, which goes on under the same lease. */
#ifndef FSDP_SAVE_INTERNAL_H
#define FSDP_SAVE_INTERNAL_H

#include "statedict/commit/commit.h"
#include <fsdp/checkpoint.h>

/* fsdp_sd_save; after success *lease_out is the lease of the run that DIR is a step of, on rank 0;
 * else NULL. */
fsdp_status fsdp_sd_save_step(const fsdp_sd *sd, fsdp_ctl *ctl, const char *dir,
                              const fsdp_save_opts *opts, fsdp_lease **lease_out, fsdp_error *err);

/* A rank was lost before anything was published: adds to the error what that means. */
void fsdp_save_tell_nothing_saved(fsdp_error *err);

#endif

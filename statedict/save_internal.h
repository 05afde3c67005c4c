/* Saving with a last question before the checkpoint is published, for run_save.c. */
#ifndef FSDP_SAVE_INTERNAL_H
#define FSDP_SAVE_INTERNAL_H

#include <fsdp/checkpoint.h>

/* Asked on rank 0 when everything is written and nothing published yet; a failure stops the save. */
typedef struct fsdp_save_guard {
    void *user;
    fsdp_status (*confirm)(void *user, fsdp_error *err);
} fsdp_save_guard;

/* fsdp_sd_save; guard may be NULL. */
fsdp_status fsdp_sd_save_guarded(const fsdp_sd *sd, fsdp_ctl *ctl, const char *dir,
                                 const fsdp_save_opts *opts, const fsdp_save_guard *guard,
                                 fsdp_error *err);

#endif

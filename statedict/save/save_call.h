/* Saves for the rooms above, which prepare them: see save_internal.h. */
#ifndef FSDP_SAVE_CALL_H
#define FSDP_SAVE_CALL_H

#include "statedict/sd/waves.h"
#include <fsdp/checkpoint.h>

/* A save that begins with the outcome of this rank so far, so that preparing takes no round of its own. */
typedef struct fsdp_save_call {
    const fsdp_sd *sd;         /* NULL after a failure */
    fsdp_ctl *ctl;
    const char *dir;           /* NULL after a failure */
    const fsdp_save_opts *opts;
    fsdp_status mine;          /* no rank writes unless all pass FSDP_OK */
    fsdp_waves *waves;         /* of sd; NULL: all its tensors have memory of their own */
} fsdp_save_call;

/* Collective. fsdp_sd_save and, with a step, fsdp_run_save. */
fsdp_status fsdp_save_begun(const fsdp_save_call *call, fsdp_error *err);
fsdp_status fsdp_run_save_begun(const fsdp_save_call *call, int64_t step, fsdp_error *err);

#endif

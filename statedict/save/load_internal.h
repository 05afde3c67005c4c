/* Between loading (load.c) and roots, whose state dict depends on what a checkpoint has. */
#ifndef FSDP_LOAD_INTERNAL_H
#define FSDP_LOAD_INTERNAL_H

#include <fsdp/checkpoint.h>

/* Both are local. They are called on every rank, once per checkpoint that is tried: of a run, a damaged one
 * is followed by the next older one. */
typedef struct fsdp_load_hooks {
    void *context;
    /* What is to be loaded of a checkpoint with these entries. *sd_out stays the hooks' until the call
     * returns, or `want` is called again. */
    fsdp_status (*want)(void *context, const fsdp_sd *stored, fsdp_sd **sd_out, fsdp_error *err);
    /* All of it has come. stored is still there. */
    fsdp_status (*take)(void *context, const fsdp_checkpoint_info *info, fsdp_error *err);
} fsdp_load_hooks;

/* Collective. fsdp_sd_load of what the hooks want: the checkpoint is opened, and its description read, once.
 * */
fsdp_status fsdp_load_hooked(const fsdp_load_hooks *hooks, fsdp_ctl *ctl, const char *path,
                             const fsdp_load_opts *opts, fsdp_error *err);

#endif

/* A load whose state dict depends on the content of the checkpoint, for roots (runtime/state). */
#ifndef FSDP_LOAD_INTERNAL_H
#define FSDP_LOAD_INTERNAL_H

#include "statedict/sd/read_device.h"
#include <fsdp/checkpoint.h>

/* Both are local and called on every rank, once per checkpoint that is tried: in a run, the load continues
 * with the next older checkpoint after a damaged one. */
typedef struct fsdp_load_hooks {
    void *context;
    /* Memory that tensors of the state dict may lie in, and the host cannot write; or NULL. */
    const fsdp_read_device *device;
    /* Makes the state dict to load from a checkpoint with these entries. The hooks own *sd_out, which stays
     * valid until the load returns or calls `make_sd` again. */
    fsdp_status (*make_sd)(void *context, const fsdp_sd *stored, fsdp_sd **sd_out, fsdp_error *err);
    /* Called once all entries are loaded; `stored` is still valid. */
    fsdp_status (*take)(void *context, const fsdp_checkpoint_info *info, fsdp_error *err);
} fsdp_load_hooks;

/* Collective. fsdp_sd_load of the state dict that the hooks make. Opens the checkpoint and its manifest
 * once. */
fsdp_status fsdp_load_hooked(const fsdp_load_hooks *hooks, fsdp_ctl *ctl, const char *path,
                             const fsdp_load_opts *opts, fsdp_error *err);

#endif

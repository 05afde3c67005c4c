/*
 * State dicts of a root: names, layouts and the live memory of shards, with no copy and no communication.
 * What they say is saved and loaded by checkpoint.h, at any other world size.
 *
 * Names in checkpoints: model.<name>; optim.state.<name>.step, .exp_avg, ...;
 * optim.param_groups.<name>.lr, ...
 */
#ifndef FSDP_STATE_H
#define FSDP_STATE_H

#include <fsdp/checkpoint.h>
#include <fsdp/optim.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_state_opts {
    bool ignore_frozen;        /* leave out parameters that need no gradient */
    bool no_model, no_optim;
    const char *model_prefix, *optim_prefix;   /* NULL: "model.", "optim."; "" for none */
} fsdp_state_opts;

/*
 * Local. Borrows the memory of shards, moments and buffers: free it before root and optim, and do not use it
 * inside a step. optim and opts may be NULL. Parameters come in the model's order, with their further names
 * as aliases, then persistent buffers, then the optimizer's state.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_state(fsdp_root *root, fsdp_optim *optim,
                                                  const fsdp_state_opts *opts, fsdp_sd **sd_out,
                                                  fsdp_error *err);
/* Local. After sd was loaded into: hyper-parameters and masters follow. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_take_state(fsdp_root *root, fsdp_optim *optim,
                                                       const fsdp_state_opts *opts, const fsdp_sd *sd,
                                                       fsdp_error *err);

/* Collective over the world. As fsdp_sd_save and fsdp_sd_load of the above; optim may be NULL: then the
 * checkpoint has, or may have, no optimizer. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_save(fsdp_root *root, fsdp_optim *optim, const char *dir,
                                                 fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_load(fsdp_root *root, fsdp_optim *optim, const char *path,
                                                 fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

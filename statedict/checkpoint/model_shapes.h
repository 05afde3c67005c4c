/*
 * The shapes of a model (fsdp_open_opts.like) for a checkpoint whose files lack them: FSDP1's local state
 * dicts with use_orig_params hold pieces of parameters under their names.
 */
#ifndef FSDP_MODEL_SHAPES_H
#define FSDP_MODEL_SHAPES_H

#include "formats/source.h"
#include "statedict/checkpoint/checkpoint_internal.h"

typedef struct fsdp_model_shapes {
    const fsdp_checkpoint *checkpoint;
    bool *is_found;            /* by entry: a name that was looked up */
    const fsdp_filter *may_lack;       /* NULL: the source must have every tensor of the model */
    fsdp_source_model model;   /* what the source gets */
} fsdp_model_shapes;

/* Borrows checkpoint and may_lack. The caller releases shapes, after a failure, too; it must not move. */
fsdp_status fsdp_model_shapes_take(const fsdp_checkpoint *checkpoint, const fsdp_filter *may_lack,
                                   fsdp_model_shapes *shapes, fsdp_error *err);
void fsdp_model_shapes_release(fsdp_model_shapes *shapes);

#endif

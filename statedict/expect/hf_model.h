/* The model of a checkpoint, as a conversion to hf would write it: its tensors' names, shapes and dtypes. */
#ifndef FSDP_HF_MODEL_H
#define FSDP_HF_MODEL_H

#include "statedict/checkpoint/checkpoint_internal.h"

typedef struct fsdp_hf_model {
    fsdp_checkpoint *checkpoint;
    char *path;                /* of the checkpoint that was opened */
    fsdp_sd *sd;
    size_t *source;            /* per entry of sd: its number in the checkpoint */
    size_t *one;               /* of hf_model_ties.c: fsdp_same_tensors of the checkpoint; NULL: not yet */
    struct fsdp_hf_model_digest *digests;  /* likewise, per entry of sd */
    int searches;
} fsdp_hf_model;

typedef struct fsdp_hf_model_from {
    const char *path;
    const char *model_type;    /* of its config.json; NULL or "": not known */
    const char *allow_missing; /* as in fsdp_open_opts */
} fsdp_hf_model_from;
/* Release the model also after a failure. */
fsdp_status fsdp_hf_model_open(const fsdp_hf_model_from *from, const fsdp_verify_opts *opts,
                               fsdp_hf_model *model, fsdp_error *err);
/* Fills in sd and source of a checkpoint that is open. below: "model." is stripped, too; NULL: nothing. */
fsdp_status fsdp_hf_model_select(fsdp_hf_model *model, const char *model_type, const char *below,
                                 fsdp_error *err);
void fsdp_hf_model_release(fsdp_hf_model *model);

/* True when tensor i of the model has a further name that `in` holds: an alias, one that lies in the same
 * bytes, or a copy of it, whose elements are read. */
fsdp_status fsdp_hf_model_find_other_name(fsdp_hf_model *model, size_t i, const fsdp_sd *in, int64_t memory,
                                      bool *found_out, fsdp_error *err);

#endif

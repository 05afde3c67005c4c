/*
 * An optimizer as torch.optim saves it: it numbers its parameters in the order of its groups, and FSDP2,
 * set_optimizer_state_dict and DeepSpeed's universal checkpoints ask for their names.
 */
#ifndef FSDP_NUMBERED_OPTIM_H
#define FSDP_NUMBERED_OPTIM_H

#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/select/model_part.h"

typedef struct fsdp_numbered_opts {
    fsdp_names_known known;    /* of the names; model_type decides about the order of parameters */
    bool keeps_order;          /* the source has the model's tensors in its own order */
    bool may_stay;             /* numbers stay where the names cannot be known */
} fsdp_numbered_opts;

/*
 * Replaces the checkpoint by one whose optimizer names its parameters, if it numbers them and is next to a
 * model. *named_out: the number of parameters that got names. The names are those that the groups have
 * (param_names), or follow from the order of the model's parameters in the groups of Trainer, or of those
 * that decay no vector; count and shapes must fit. FSDP_ERR_USAGE: the names cannot be known. After a failure
 * the checkpoint is as it was, or closed and NULL.
 */
fsdp_status fsdp_name_numbered(const fsdp_numbered_opts *opts, fsdp_checkpoint **checkpoint,
                               int64_t *named_out, fsdp_error *err);

#endif

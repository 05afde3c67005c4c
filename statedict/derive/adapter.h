/* Adapters of PEFT, merged into the model that they were trained for. */
#ifndef FSDP_ADAPTER_H
#define FSDP_ADAPTER_H

#include "statedict/checkpoint/checkpoint_internal.h"

typedef struct fsdp_adapter_report {
    int64_t merged;            /* weights with a product added */
    int64_t replaced;          /* tensors that the adapter holds whole */
    bool unties;               /* the output got a tensor of its own, which the base tied to the embedding */
} fsdp_adapter_report;

typedef struct fsdp_adapter_opts {
    const char *path;          /* the directory of the adapter, or a run, of which the newest is taken */
    const fsdp_access *access;
    const fsdp_watch *watch;   /* is told which directory is read, where that is another one */
} fsdp_adapter_opts;

/*
 * Replaces the checkpoint by the model with the adapter of a directory (adapter_config.json and its weights)
 * merged in: LoRA and DoRA, with patterns of ranks and factors, tensors that were trained whole, and weights
 * that are stored transposed. An output that the base ties to its embedding becomes a tensor of its own if
 * the adapter has one of them whole, as in PEFT's merge_and_unload. The checkpoint is closed and NULL after
 * a failure. FSDP_ERR_USAGE names what cannot be merged, FSDP_ERR_DAMAGED what contradicts the settings.
 */
fsdp_status fsdp_adapter_merge(const fsdp_adapter_opts *opts, fsdp_checkpoint **checkpoint,
                               fsdp_adapter_report *report_out, fsdp_error *err);

/* True when a tensor has the name of one of an adapter. */
bool fsdp_sd_has_adapter(const fsdp_sd *sd);

#endif

/* Deep verification beyond the bytes: numbers that are none, and optimizer states without their model.
 * Both are told as findings of the kind FSDP_FINDING_VALUE, which are no damage. */
#ifndef FSDP_STATEDICT_VERIFY_VALUES_H
#define FSDP_STATEDICT_VERIFY_VALUES_H

#include "statedict/checkpoint/checkpoint_internal.h"

#include <fsdp/stats.h>

/* Reads every floating tensor of a checkpoint whose files are all open and undamaged. */
fsdp_status fsdp_values_scan(fsdp_checkpoint *checkpoint, const fsdp_verify_opts *opts, fsdp_meter *meter,
                             int64_t *warnings, fsdp_error *err);
/* Bytes that fsdp_values_scan will read. */
int64_t fsdp_values_bytes(const fsdp_sd *sd);

/* Tells what the stats of one tensor say, if they say anything. */
void fsdp_values_report(const fsdp_verify_opts *opts, const fsdp_entry *entry, const fsdp_stats *stats,
                      int64_t *warnings);

/* Optimizer tensors optim.state.FQN.KEY (or optimizer.state.) whose FQN no tensor has, or another shape. */
void fsdp_values_match(const fsdp_sd *sd, const fsdp_verify_opts *opts, int64_t *warnings);

#endif

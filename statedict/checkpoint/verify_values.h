/* Deep verification of values: NaN and infinite numbers, and optimizer states without their parameters.
 * Findings are of the kind FSDP_FINDING_VALUE and no damage. */
#ifndef FSDP_VERIFY_VALUES_H
#define FSDP_VERIFY_VALUES_H

#include "statedict/checkpoint/checkpoint_internal.h"

#include <fsdp/stats.h>

/* Reads every floating tensor of a checkpoint whose files are all open and undamaged. */
fsdp_status fsdp_values_scan(fsdp_checkpoint *checkpoint, const fsdp_verify_opts *opts, fsdp_meter *meter,
                             int64_t *warnings, fsdp_error *err);
/* The number of bytes that fsdp_values_scan reads. */
int64_t fsdp_values_bytes(const fsdp_sd *sd);

/* Reports the stats of one tensor that has NaN or infinite numbers. */
void fsdp_values_report(const fsdp_verify_opts *opts, const fsdp_entry *entry, const fsdp_stats *stats,
                      int64_t *warnings);

/* Reports optimizer tensors optim.state.FQN.KEY (or optimizer.state.) for whose FQN there is no tensor, or
 * one of another shape. */
void fsdp_values_match(const fsdp_sd *sd, const fsdp_verify_opts *opts, int64_t *warnings);

#endif

/* Checks at the beginning of every collective call that all ranks declare the same state dict. */
#ifndef FSDP_DESCRIBE_H
#define FSDP_DESCRIBE_H

#include "kernels/kernels.h"
#include <fsdp/ctl.h>
#include <fsdp/sd.h>
#include "base/text.h"

/* Hash of everything that all ranks must declare alike: names, dtypes, shapes, layouts, flat buffers
 * and, for saving, values. Memory is left out. */
fsdp_status fsdp_describe_hash(const fsdp_sd *sd, bool with_values, fsdp_hash *hash_out, fsdp_error *err);

/*
 * Collective. `mine` and *err are the outcome of this rank so far, which the same round carries. If ranks
 * differ, all get FSDP_ERR_USAGE with the first entry that differs and the ranks.
 */
fsdp_status fsdp_describe_agree(const fsdp_sd *sd, bool with_values, fsdp_ctl *ctl, fsdp_status mine,
                                fsdp_error *err);

/* Local. Checks that the group is large enough for every layout and that all boxes of this rank have
 * memory. */
fsdp_status fsdp_check_memory(const fsdp_sd *sd, const fsdp_ctl *ctl, fsdp_error *err);

#endif

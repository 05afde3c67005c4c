/* Do all ranks declare the same state dict? Asked at the beginning of every collective call. */
#ifndef FSDP_DESCRIBE_H
#define FSDP_DESCRIBE_H

#include "kernels/kernels.h"
#include <fsdp/ctl.h>
#include <fsdp/sd.h>
#include "base/text.h"

/* Hash of everything every rank must declare alike: names, dtypes, shapes, layouts, flat buffers
 * and, for saving, values. Memory is left out. */
fsdp_status fsdp_describe_hash(const fsdp_sd *sd, bool with_values, fsdp_hash *hash_out, fsdp_error *err);

/*
 * Collective, and takes every rank's outcome so far (mine, *err) with it. Ranks that differ get
 * FSDP_ERR_USAGE naming the first entry that does and the ranks.
 */
fsdp_status fsdp_describe_agree(const fsdp_sd *sd, bool with_values, fsdp_ctl *ctl, fsdp_status mine,
                                fsdp_error *err);

/* Local: the group is large enough for every layout, and this rank brings memory for all its boxes. */
fsdp_status fsdp_check_memory(const fsdp_sd *sd, const fsdp_ctl *ctl, fsdp_error *err);

#endif

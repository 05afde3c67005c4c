/*
 * Checkpoints with missing files. A conversion leaves out the incomplete entries whose names the user allowed
 * to be missing, and takes all others. A file that exists and is damaged stays an error.
 */
#ifndef FSDP_INCOMPLETE_H
#define FSDP_INCOMPLETE_H

#include "statedict/checkpoint/checkpoint_internal.h"

/* Takes opts->allow_missing; opts may be NULL. */
fsdp_status fsdp_incomplete_allow(fsdp_checkpoint *checkpoint, const fsdp_open_opts *opts, fsdp_error *err);

/* Marks an entry as incomplete. */
fsdp_status fsdp_incomplete_mark(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err);

/* Marks the entries of a native checkpoint in files that were not opened. */
fsdp_status fsdp_incomplete_mark_lost(fsdp_checkpoint *checkpoint, fsdp_error *err);
/* True when the shard file is missing. */
bool fsdp_incomplete_is_lost(const fsdp_checkpoint *checkpoint, int file);
/* Marks an entry of which a part lies in a missing file. FSDP_ERR_DAMAGED when it may not be incomplete. */
fsdp_status fsdp_incomplete_lose(fsdp_checkpoint *checkpoint, size_t entry, int file, fsdp_error *err);

#endif

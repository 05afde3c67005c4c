/*
 * Checkpoints that are not whole, since files of them are not there, and what converting makes of them: what
 * the user allowed to be missing is left out, everything else is taken. A file that is there and damaged
 * stays an error.
 */
#ifndef FSDP_INCOMPLETE_H
#define FSDP_INCOMPLETE_H

#include "statedict/checkpoint/checkpoint_internal.h"

/* Takes opts->allow_missing; opts may be NULL. */
fsdp_status fsdp_incomplete_allow(fsdp_checkpoint *checkpoint, const fsdp_open_opts *opts, fsdp_error *err);

/* An entry is incomplete. */
fsdp_status fsdp_incomplete_mark(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err);

/* Of a checkpoint of ours: opens the files that are there, and marks what lies in the others. */
fsdp_status fsdp_incomplete_open(fsdp_checkpoint *checkpoint, fsdp_error *err);
/* Is the shard file not there? */
bool fsdp_incomplete_is_lost(const fsdp_checkpoint *checkpoint, int file);
/* Something of the entry lies in that file. FSDP_ERR_DAMAGED when it may not be incomplete. */
fsdp_status fsdp_incomplete_lose(fsdp_checkpoint *checkpoint, size_t entry, int file, fsdp_error *err);

#endif

/* Checkpoints of other programs as opened checkpoints: listed, compared and converted like our own. */
#ifndef FSDP_FOREIGN_H
#define FSDP_FOREIGN_H

#include "statedict/checkpoint/checkpoint_internal.h"

/* Is the path a file that is none of ours, or a directory without a file of ours? */
bool fsdp_path_is_foreign(fsdp_io *io, const char *path);

/* Opens a path in whichever foreign format it is, or opts (NULL: defaults) say. Its state dict has every
 * tensor whole, on one rank. */
fsdp_status fsdp_foreign_open(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                              fsdp_checkpoint **checkpoint_out, fsdp_error *err);

/* As fsdp_checkpoint_verify, which calls it (verify_foreign.c): checksums where the format has some, and
 * every tensor read. */
fsdp_status fsdp_foreign_verify(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                fsdp_verify_summary *summary_out, fsdp_error *err);

#endif

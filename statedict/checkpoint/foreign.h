/* Checkpoints of other programs as opened checkpoints: listed, compared and converted like native ones. */
#ifndef FSDP_FOREIGN_H
#define FSDP_FOREIGN_H

#include "statedict/checkpoint/checkpoint_internal.h"

/* True when the path is a file that is not native, or a directory without native files. */
bool fsdp_path_is_foreign(fsdp_io *io, const char *path);

/* Opens a path in the format that opts (NULL: defaults) name, or that its bytes show. The state dict has
 * every tensor whole, on one rank. model: that of opts->like, or NULL; borrowed during the call. */
fsdp_status fsdp_foreign_open(fsdp_io *io, const char *path, const fsdp_open_opts *opts,
                              const fsdp_checkpoint *model, fsdp_checkpoint **checkpoint_out,
                              fsdp_error *err);

/* fsdp_checkpoint_verify for checkpoints of other programs (verify_foreign.c): compares the format's
 * checksums, if it has any, and reads every tensor. */
fsdp_status fsdp_foreign_verify(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                fsdp_verify_summary *summary_out, fsdp_error *err);

#endif

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

/* Is one of its files, or the checkpoint itself, in this directory? */
/* Would `path` lie in the directory that is the checkpoint? */
bool fsdp_foreign_takes_in(const fsdp_checkpoint *checkpoint, const char *path);
bool fsdp_foreign_lies_in(const fsdp_checkpoint *checkpoint, const char *dir);

/* Is it one of its files? */
bool fsdp_foreign_reads(const fsdp_checkpoint *checkpoint, const char *path);

/* As fsdp_checkpoint_file_at, which calls it. */
void fsdp_foreign_file_at(const fsdp_checkpoint *checkpoint, int number, fsdp_checkpoint_file *file_out);

/* As fsdp_checkpoint_get, which calls it. A turn is a want. */
fsdp_status fsdp_foreign_get(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_want *wants,
                             size_t count, fsdp_getter *getter, fsdp_turns *turns, fsdp_error *err);

/*
 * Before the first read of a conversion: how much memory unpacking may take, and that spools go beside `to`.
 * Nothing for a checkpoint of our own; neither is fsdp_foreign_announce: see fsdp_source_announce.
 */
fsdp_status fsdp_foreign_set_memory(fsdp_checkpoint *checkpoint, int64_t memory, const char *to,
                                    fsdp_error *err);
/* See fsdp_source_reading_limits. */
void fsdp_foreign_reading_limits(const fsdp_checkpoint *checkpoint, int *threads_out, int64_t *bytes_out);
fsdp_status fsdp_foreign_announce(fsdp_checkpoint *checkpoint, size_t entry, bool repeated, fsdp_error *err);
int64_t fsdp_foreign_spool_bytes(const fsdp_checkpoint *checkpoint);

/* As fsdp_checkpoint_verify, which calls it: checksums where the format has some, and every tensor read. */
fsdp_status fsdp_foreign_verify(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                fsdp_verify_summary *summary_out, fsdp_error *err);

/* Values that only their writer understands become torch.save files (fsdp_source_save_value), as far as those
 * fit into 64 MiB; what differs from rank to rank only where the target is_ours. Nothing for a checkpoint of
 * our own. */
fsdp_status fsdp_foreign_carry_values(fsdp_checkpoint *checkpoint, bool is_ours, fsdp_error *err);

#endif

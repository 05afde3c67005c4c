/*
 * Digest files: PATH.xxh3 next to a checkpoint PATH, for formats that keep no checksums. Local.
 *
 *   fsdp-digests 1 xxh3-128
 *   9d50c4...  10240 "model.safetensors"      XXH3-128 in hex, bytes, name as a JSON string
 *   end 20c1f3...                             XXH3-128 of all lines above
 *
 * Names are sorted and relative: to the checkpoint's directory; of a checkpoint in one file, "." is that file
 * and others are relative to its directory. So both may be moved and renamed together.
 */
#ifndef FSDP_DIGESTS_H
#define FSDP_DIGESTS_H

#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/checkpoint/file_list.h"

/* FSDP_ERR_USAGE for a name that is not UTF-8. */
fsdp_status fsdp_digests_encode(const fsdp_file_list *list, fsdp_text *text, fsdp_error *err);
/* Fills in names, sizes and digests. FSDP_ERR_DAMAGED; FSDP_ERR_REFUSED for a newer version; FSDP_ERR_USAGE
 * for another kind of file. */
fsdp_status fsdp_digests_decode(const char *data, size_t size, const char *path, fsdp_file_list *list,
                                fsdp_error *err);

/* Compares a verified checkpoint with its digest file, if it has one, and reports findings in the summary; or
 * writes the file when opts say so and status, the result so far, is FSDP_OK. Returns the result of both. */
fsdp_status fsdp_digests_verify(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                fsdp_verify_summary *summary, fsdp_status status, fsdp_error *err);
/* Bytes of the files that the digest file of a checkpoint lists; 0 without one that can be used. */
int64_t fsdp_digests_bytes(fsdp_io *io, const char *path);
/* Writes the digest file of a checkpoint, which is read but not verified. A file that is already there is
 * compared: FSDP_DIFFERS when a file of the checkpoint differs. */
fsdp_status fsdp_digests_write(fsdp_io *io, const char *path, const fsdp_verify_opts *opts, fsdp_error *err);

#endif

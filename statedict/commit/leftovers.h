/*
 * Staging directories that killed saves and conversions left next to DIR: the next save removes those of dead
 * processes, and the next conversion may reuse one. See docs/commit.md.
 */
#ifndef FSDP_LEFTOVERS_H
#define FSDP_LEFTOVERS_H

#include "base/io/io.h"

/*
 * Removes the staging directories of dead processes. hash (may be NULL): keeps the one of a conversion with
 * that plan; *kept_out is its path (the caller frees it) and *marker_out its marker, locked, else both NULL.
 */
void fsdp_leftovers_clear(fsdp_io *io, const char *target, const char *parent, const char *hash,
                          char **kept_out, fsdp_file **marker_out);

/* Closes the marker and removes a staging directory after a failure. It is renamed first, so that a half
 * of it is never taken for a staging. err holds the failure; a path that cannot be removed is appended to
 * it. */
void fsdp_leftovers_discard(fsdp_io *io, const char *staging, const char *target, fsdp_file **marker,
                            fsdp_error *err);

/* Makes a staging directory with its marker next to target. The caller frees the path, NULL on failure. */
fsdp_status fsdp_staging_make(fsdp_io *io, const char *target, char **path_out, fsdp_file **marker_out,
                              fsdp_error *err);

#endif

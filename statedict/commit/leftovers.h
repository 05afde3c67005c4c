/*
 * What saves and conversions that were killed left beside DIR, and how the next one deals with it: removed
 * when its maker is known to be dead, or taken up. See docs/commit.md.
 */
#ifndef FSDP_LEFTOVERS_H
#define FSDP_LEFTOVERS_H

#include "base/io/io.h"

/*
 * Removes what the dead left. hash: the staging directory of a conversion with that plan is not removed;
 * *kept_out is its path (in fresh memory) and *marker_out its marker, locked. NULL when there is none.
 */
void fsdp_leftovers_clear(fsdp_io *io, const char *target, const char *parent, const char *hash,
                          char **kept_out, fsdp_file **marker_out);

/* Removes a staging directory that is given up, so that no half of it is ever taken for one, and closes its
 * marker. Where it cannot be removed, err, which says why it is given up, also says what stays. */
void fsdp_leftovers_discard(fsdp_io *io, const char *staging, const char *target, fsdp_file **marker,
                            fsdp_error *err);

/* A staging directory beside target with its marker in it; the path is in fresh memory, NULL on failure. */
fsdp_status fsdp_staging_make(fsdp_io *io, const char *target, char **path_out, fsdp_file **marker_out,
                              fsdp_error *err);

#endif

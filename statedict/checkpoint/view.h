/* Writes the view of a checkpoint that is being saved: every tensor over its stored boxes. */
#ifndef FSDP_STATEDICT_VIEW_H
#define FSDP_STATEDICT_VIEW_H

#include "statedict/manifest/manifest.h"

/* With more mappings a view is too slow to be useful. */
enum { FSDP_VIEW_MAPPINGS = 262144 };

fsdp_status fsdp_view_mappings(const fsdp_manifest *manifest, const int *owners, int64_t *count_out,
                               fsdp_error *err);

/*
 * Writes DIR/index.h5 for the kinds sharded and local. Left out, with a notice, above
 * FSDP_VIEW_MAPPINGS. owners as in fsdp_plan_owners.
 */
fsdp_status fsdp_view_write(fsdp_io *io, const char *dir, const fsdp_manifest *manifest, const int *owners,
                            bool sync, const fsdp_watch *watch, fsdp_error *err);

/* Like fsdp_view_write, into any new file. *written_out is false when the view was left out. */
fsdp_status fsdp_view_write_as(fsdp_io *io, const char *path, const fsdp_manifest *manifest,
                               const int *owners, bool sync, const fsdp_watch *watch, bool *written_out,
                               fsdp_error *err);

/* *same_out is true when DIR/index.h5, which must exist, has the bytes that fsdp_view_write would write.
 * Neither file is in memory as a whole. */
fsdp_status fsdp_view_check(fsdp_io *io, const char *dir, const fsdp_manifest *manifest, const int *owners,
                            bool *same_out, fsdp_error *err);

/* Replaces DIR/index.h5 atomically and durably. *written_out is false when the view is left out (see
 * fsdp_view_write) and nothing was changed. */
fsdp_status fsdp_view_replace(fsdp_io *io, const char *dir, const fsdp_manifest *manifest, const int *owners,
                              const fsdp_watch *watch, bool *written_out, fsdp_error *err);

#endif

/* Writes the view of a checkpoint that is being saved: every tensor over its stored boxes. */
#ifndef FSDP_VIEW_H
#define FSDP_VIEW_H

#include "statedict/manifest/manifest.h"

/* With more mappings a view is too slow to be useful. */
enum { FSDP_VIEW_MAPPINGS = 262144 };

fsdp_status fsdp_view_mappings(const fsdp_manifest *manifest, const int *owners, int64_t *count_out,
                               fsdp_error *err);

typedef struct fsdp_view_opts {
    fsdp_io *io;
    const fsdp_manifest *manifest;
    const int *owners;         /* fsdp_box_plan_owners */
    bool sync;
    const fsdp_watch *watch;   /* gets a notice when the view is left out; may be NULL */
} fsdp_view_opts;

/*
 * Writes DIR/index.h5 for the kinds sharded and local. Left out, with a notice, above
 * FSDP_VIEW_MAPPINGS.
 */
fsdp_status fsdp_view_write(const fsdp_view_opts *opts, const char *dir, fsdp_error *err);

/* *same_out is true when DIR/index.h5, which must exist, has the bytes that fsdp_view_write would write.
 * Neither file is in memory as a whole. */
fsdp_status fsdp_view_check(const fsdp_view_opts *opts, const char *dir, bool *same_out, fsdp_error *err);

/* Puts a new DIR/index.h5 in the place of what is there, in one step that lasts. *written_out is false when
 * the view is left out (see fsdp_view_write) and nothing was changed. */
fsdp_status fsdp_view_replace(const fsdp_view_opts *opts, const char *dir, bool *written_out,
                              fsdp_error *err);

#endif

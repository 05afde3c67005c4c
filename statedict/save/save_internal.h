/*
 * Saving and loading: the collective calls of checkpoint.h and run.h.
 *
 * In: a state dict with memory, a control plane, a path and options. Out: a published checkpoint, or the
 * filled memory. Every rank calls them together; the runtime and the callers of the library do. A local
 * failure goes into the next round, so that all ranks return the same status.
 *
 *   save.c      plans, stages, writes this rank's file, gathers the file records and publishes; streams the
 *               full state of live ranks to rank 0; a step of a run: lease, retention, the hint `latest`
 *   publish.c   view, manifest and rename; also called by convert/
 *   load.c      finds the checkpoint, matches names, plans and reads; the mirror of save.c
 *   full.c      the full state of a stored checkpoint, in memory or streamed
 */
#ifndef FSDP_SAVE_INTERNAL_H
#define FSDP_SAVE_INTERNAL_H

#include "statedict/commit/commit.h"
#include "statedict/save/save_call.h"
#include "statedict/sd/access.h"
#include <fsdp/checkpoint.h>

/* FSDP_NO_STEP: none was given. */
static inline int64_t fsdp_save_step(const fsdp_save_opts *opts)
{
    return opts->step ? *opts->step : FSDP_NO_STEP;
}

/* save.c. Collective, in one round: fsdp_ctl_agree on `mine`, and all ranks give the same path, which may be
 * NULL only where `mine` is a failure. */
fsdp_status fsdp_agree_path(fsdp_ctl *ctl, const char *path, fsdp_status mine, fsdp_error *err);

typedef struct fsdp_gather {
    int64_t memory;            /* equal on all ranks */
    bool is_described;         /* the ranks have compared their state dicts already */
    fsdp_waves *waves;         /* of sd, as in fsdp_save_call */
    fsdp_slab_visit visit;     /* on rank 0 */
    void *context;
} fsdp_gather;

#endif

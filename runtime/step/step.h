/*
 * Units, roots and the training step.
 *
 *   root.c          units and their groups are made; the structure is frozen, memory appears, contexts are
 *                   shared; all ranks must do the same
 *   unit.c          the setters of a unit
 *   root_step.c     the hooks: phases, order, prefetch; a step begins and ends
 *   root_access.c   the first failure stays; parameters without values; the communicator of all ranks; the
 *                   results of a step are given back
 *   param_memory.c  the pointers to parameters that callers get
 *
 * In: the public calls of unit.h and root.h. Out: calls on the groups of runtime/group in the order that
 * docs/flow_step.md describes; for the rooms above, the structs below and the functions at the end.
 * Callers: runtime/optim, runtime/state and runtime/wrap between steps; programs, through public headers.
 */
#ifndef FSDP_STEP_H
#define FSDP_STEP_H

#include "runtime/context/host_view.h"
#include "runtime/group/group.h"
#include <fsdp/root.h>

/* --- units ------------------------------------------------------------------------------------ */

struct fsdp_unshard_handle { fsdp_unit *unit; };

/* When the unit whose backward comes next is gathered: before this one computes, or after that. */
typedef enum fsdp_prefetch_time {
    FSDP_PREFETCH_BEFORE,
    FSDP_PREFETCH_AFTER,
    FSDP_PREFETCH_NEVER
} fsdp_prefetch_time;

/* Units that a hook gathers ahead; owned. */
typedef struct fsdp_unit_list {
    fsdp_unit **units;
    size_t count;
} fsdp_unit_list;

struct fsdp_unit {
    fsdp_model *model;
    fsdp_root *root;                   /* NULL before it was made */
    char *name;                        /* members joined by ", "; "root" */
    char **prefixes;
    size_t member_count;
    fsdp_unit_opts opts;
    char *shard_dims, *replicate_dims; /* copies of the opts' */
    bool is_root;
    fsdp_param **params;
    size_t param_count, param_room;
    fsdp_group *groups;
    size_t group_count;
    fsdp_group_settings settings;
    fsdp_unshard_handle handle;

    bool is_async;                     /* gathers run on the compute stream */
    int max_inputs;                    /* of reductions in flight */
    fsdp_unit_list forward_prefetch, backward_prefetch;
    fsdp_prefetch_time backward_prefetch_time;
    bool prefetches_next;              /* the unit that followed in the first forward is gathered ahead */
    bool was_seen;                     /* it had a forward */
    fsdp_phase phase;
    bool *to_run, *to_return;          /* members whose forward, backward is to come; NULL for one member */
    bool *has_run;                     /* members that ran in the last forward; the same */
    size_t to_run_count, to_return_count;
};

/* --- roots ------------------------------------------------------------------------------------ */

struct fsdp_finalize_handle {
    fsdp_root *root;
    bool was_reset;                    /* its end of backward was dropped */
};

/* Copies of a root's state that a stream makes while the program continues. */
typedef struct fsdp_root_copies {
    void *context;
    /* The event after the last one; waits on the host until that is given to its stream. */
    fsdp_event (*last)(void *context);
    struct fsdp_root_copies *next;
} fsdp_root_copies;

/* Norms that clippings have measured, and the factor that steps of optimizers still multiply by
 * (runtime/optim/optim.c). */
enum { FSDP_KEPT_NORMS = 2 };
typedef struct fsdp_kept_norm {
    fsdp_event known;                  /* then the total of its power sums is in staging memory */
    double p;
} fsdp_kept_norm;

typedef struct fsdp_clipping {
    double *numbers;                   /* of the device: sums of tensors, of ranks, and the factor */
    size_t number_count;
    double *factor;                    /* the last one */
    double *totals;                    /* staging memory: of the kept norms */
    fsdp_kept_norm norms[FSDP_KEPT_NORMS];
    uint64_t count;                    /* of norms so far, which take turns */
    double max_norm;
    bool skips;
    double host_factor;                /* for shards that the host steps, next to a GPU */
    bool is_pending;                   /* steps of these gradients take the factor */
    uint64_t backwards;                /* at the measurement of gradients that wait for it */
    bool is_unsettled;                 /* steps were counted that the device may have skipped */
} fsdp_clipping;

struct fsdp_root {
    int holders;                       /* optimizers and savers, which free it, too; the last one ends it */
    void (*end_owner)(void *owner);    /* called when the root has ended; or NULL */
    void *owner;
    fsdp_model *model;
    fsdp_world *world;
    fsdp_context *context;
    fsdp_root *next_sharing;           /* of the context's */
    fsdp_unit **units;                 /* root first */
    size_t unit_count;
    fsdp_group **groups;               /* of all units, in that order */
    size_t group_count;
    fsdp_unit *unit;
    fsdp_block *buffers;
    fsdp_host_view view;               /* of shards, buffers and optimizers' state */
    fsdp_root_copies *copies;          /* of them, a list: each saver's */
    int64_t step;
    uint64_t backwards;                /* that have ended: newer ones bring other gradients */
    bool is_in_forward, is_in_backward;
    bool is_unfinished;                /* a backward has ended whose reductions were not waited for */
    bool is_evaluating;                /* forwards have no backward: their order is not noted */
    bool is_summoned;                  /* whole parameters are out (wrap_summon.c): no step begins */
    fsdp_unit *last_seen;              /* the last one that had its first forward */
    fsdp_model *declared;              /* as the caller declared it: `model`, unless the FSDP1 face wrapped
                                        * it */
    bool steps_runs;                   /* optimizers step declared parameters, not the flat ones they lie
                                        * in */
    bool is_last_backward, is_manual, has_post_optim_event;
    fsdp_event post_optim_event;
    fsdp_finalize_handle handle;
    struct fsdp_optim *optims;         /* their masters follow values that are set */
    fsdp_clipping clipping;
    fsdp_text events;                  /* of this step, a line each; with --check only */
    fsdp_error pending;                /* a pointer asked for in a wrong state: of the next call */
    fsdp_error failure;                /* the first failure: of every later call */
};

/* --- for the rooms above ---------------------------------------------------------------------- */

fsdp_root *fsdp_root_hold(fsdp_root *root);    /* one more fsdp_root_free ends it */
/* At the beginning of every call on a root: an earlier failure, or the pending error, which is cleared. */
fsdp_status fsdp_root_ready(fsdp_root *root, fsdp_error *err);
/* At its end: errors of streams. A failure of any kind is kept, with the name of the public call before its
 * text, and aborts the root's communicators. */
fsdp_status fsdp_root_done(fsdp_root *root, const char *call, fsdp_status status, fsdp_error *err);
/* FSDP_ERR_USAGE for `call`, which reads the reduced gradients, before the compute stream has waited for all
 * of them. */
fsdp_status fsdp_root_check_reduced(const fsdp_root *root, const char *call, fsdp_error *err);
/* FSDP_ERR_USAGE for `call` while parameters of the unit, or NULL: of the root, have no values. */
fsdp_status fsdp_root_check_values(const fsdp_root *root, const fsdp_unit *unit, const char *call,
                                   fsdp_error *err);
void fsdp_root_note_values(const fsdp_root *root);     /* all have them */

/* The copies are the caller's, until they leave the root. */
void fsdp_root_add_copies(fsdp_root *root, fsdp_root_copies *copies);
void fsdp_root_remove_copies(fsdp_root *root, const fsdp_root_copies *copies);
/* The stream waits for copies of the root's state, before it changes what they copy. */
void fsdp_root_wait_copied(const fsdp_root *root, fsdp_stream *stream);

/* The host's view of shards, buffers and optimizers' state (host_view.h), in the order of the compute stream.
 * fsdp_root_view: the host's address, between a load and a store. */
fsdp_status fsdp_root_load_view(fsdp_root *root, fsdp_error *err);
fsdp_status fsdp_root_load_buffers(fsdp_root *root, fsdp_error *err);  /* of the view, these alone */
fsdp_status fsdp_root_store_view(fsdp_root *root, fsdp_error *err);
static inline void *fsdp_root_view(const fsdp_root *root, const void *data)
{
    return fsdp_host_view_at(&root->view, data);
}

/* A floating type, or FSDP_DTYPE_NONE; option: its name, for the error. */
fsdp_status fsdp_option_check_float(const char *option, fsdp_dtype dtype, fsdp_error *err);

/* The communicator of the widest mesh of the root's units, which contains the others; NULL when that mesh was
 * not connected. The second, for collectives of the host, waits first for the streams' work on it. */
fsdp_ordered_comm *fsdp_root_find_widest(const fsdp_root *root);
fsdp_status fsdp_root_widest_comm(fsdp_root *root, fsdp_ordered_comm **ordered_out, fsdp_error *err);
/* The communicator of all ranks of the world, which `call` needs. NULL, and no error, in a world of one. */
fsdp_status fsdp_root_world_comm(fsdp_root *root, const char *call, fsdp_ordered_comm **ordered_out,
                                 fsdp_error *err);
/* A world rank's position in the communicator: meshes may order their ranks differently. */
int fsdp_ordered_comm_position(const fsdp_ordered_comm *ordered, int rank);

#endif

/*
 * Groups: the parameters of a unit that lie on one mesh, usually all of them. A group is what is gathered and
 * reduced; the groups of a unit are gathered in order, and reduced in reverse.
 *
 *   group_trace.c   events
 *   group_mesh.c    roles of mesh dims, communicators, where buffers come from
 *   group_gather.c  shards -> gathered parameters, and back, also of the caller's own bytes; with --check:
 *                   wrong uses of gathered parameters and gradients; groups are made, laid out, freed
 *   group_reduce.c  gradients -> sharded gradients: packed for a reduction, or read where they lie; the
 *                   factors of a mean; sums that wait for replicas; gradients without synchronisation
 *
 * In: parameters of runtime/param, a context of runtime/context, the settings and the phase that runtime/step
 * sets. Out: param->data, param->shard_grad, and work on streams; every function returns without waiting for
 * it. Callers: runtime/step, which decides when; runtime/optim and runtime/state give gathered parameters and
 * gradients back between steps. docs/flow_step.md has the order of all this.
 *
 * The functions are collective among the ranks of the group. A failure leaves the group as it is:
 * fsdp_group_drop brings it back to sharded.
 */
#ifndef FSDP_GROUP_H
#define FSDP_GROUP_H

#include "kernels/kernels.h"
#include "runtime/context/context.h"
#include "runtime/context/work.h"
#include "runtime/param/param.h"

/* The phase and the gathered state of a unit and of each of its groups. */
typedef enum fsdp_phase { FSDP_IDLE, FSDP_FORWARD, FSDP_PRE_BACKWARD, FSDP_POST_BACKWARD } fsdp_phase;
typedef enum fsdp_group_state { FSDP_IS_SHARDED, FSDP_IS_SHARDED_AGAIN, FSDP_IS_UNSHARDED } fsdp_group_state;

/* Settings of a unit that its groups follow. They are the unit's; setters change them between calls. */
typedef struct fsdp_group_settings {
    bool reduces, all_reduces, reshards_after_backward, unshards_in_backward, keeps_storage;
    bool forces_sum, reduces_unused, is_separate, takes_comm_memory, offloads;
    int reshard_after_forward;         /* AUTO until the root is made */
    fsdp_dtype reduce_dtype;           /* NONE: each parameter's own */
    double divide_factor;              /* 0: the number of ranks */
    fsdp_all_reduce_hook all_reduce_hook;
    void *all_reduce_hook_context;
    fsdp_custom_collective *custom_gather, *custom_reduce, *custom_all_reduce;     /* or NULL */
} fsdp_group_settings;

/* A gather that was issued and whose parameters were not made yet. */
typedef struct fsdp_gather {
    fsdp_block *block;                 /* NULL: none */
    fsdp_event event;
    int parts;                         /* ranks that take part */
    bool is_async;
    bool is_of_slices;                 /* of the slices that an int reshard kept, not of the shards */
    bool is_late;                      /* the collective runs when the parameters are made, not before */
} fsdp_gather;

/* The place of a parameter's gradient in the flat output of a reduction. */
typedef struct fsdp_reduced_part {
    fsdp_param *param;
    int64_t at, count;                 /* padded */
} fsdp_reduced_part;

typedef struct fsdp_reduced {
    fsdp_block *block;                 /* NULL: none */
    fsdp_reduced_part *parts;
    size_t count;
    fsdp_dtype dtype;
} fsdp_reduced;

struct fsdp_group {
    fsdp_unit *unit;                   /* owner; the room never looks into it */
    const char *name;                  /* the unit's */
    const fsdp_group_settings *settings;       /* the unit's */
    fsdp_context *context;
    fsdp_text *events;                 /* the root's, with --check; else NULL */

    fsdp_param **params;
    size_t count;
    fsdp_mesh_roles roles;             /* of the mesh, several dims that shard, or replicate, seen as one */
    fsdp_mesh *made_mesh;               /* that mesh when it was made here, else NULL */
    /* NULL in groups of one rank. `again` connects the ranks of an int reshard, `reduce` is a second
     * communicator for reductions or the same as `shard`. */
    fsdp_ordered_comm *shard, *replicate, *again, *reduce;
    int shard_size, shard_rank, replicate_size, again_size, again_rank;
    int *ranks;                        /* memory for connecting, where no rank may fail alone */

    fsdp_dtype gather_dtype;           /* of gathers: U8 when data dtypes are mixed */
    fsdp_block *shards;                /* the padded shards of all */

    fsdp_group_state state;
    fsdp_phase phase;
    fsdp_gather gather;
    fsdp_block *unsharded;
    fsdp_hash *gathered;               /* of each parameter when it was gathered; NULL without --check */
    fsdp_span *gathered_spans;         /* whose hashes they are */
    fsdp_block *again_shard;           /* this rank's part of the int reshard */
    fsdp_event resharded;              /* when it was made */
    fsdp_group *next_gather;           /* to be gathered after this one's backward; or NULL */
    fsdp_rect_list rects_in, rects_out, rects_reduce;
    size_t *order;                     /* places in the context's forward order, last one last */
    size_t order_count, order_room;

    fsdp_reduced partial;              /* HSDP: reduced and not yet added up over replicas */
    fsdp_block **grads;                /* blocks that sharded gradients lie in */
    size_t grad_count, grad_room;
    fsdp_event reduced;                /* when the last reduction is complete */
};

/* --- group_mesh.c ----------------------------------------------------------------------------- */

/* Names of mesh dims as fsdp_unit_opts has them. unit: for errors. */
typedef struct fsdp_dim_names {
    const char *unit, *shard, *replicate;
} fsdp_dim_names;
/* Local. Has the mesh these dims, and do they go with reshard_after_forward? */
fsdp_status fsdp_mesh_check_dims(const fsdp_mesh *mesh, const fsdp_dim_names *names,
                                 int reshard_after_forward, fsdp_error *err);
/* Local. Sets the roles, on a mesh of the group's own where several dims are seen as one. */
fsdp_status fsdp_group_choose_mesh(fsdp_group *group, const fsdp_mesh *mesh, const fsdp_dim_names *names,
                                   fsdp_error *err);
/* Collective over the world: the group's communicators. */
fsdp_status fsdp_group_connect(fsdp_group *group, fsdp_error *err);
/* Collective over the world: reductions on a communicator of their own, or no longer. */
fsdp_status fsdp_group_separate_reduce(fsdp_group *group, fsdp_error *err);

/* --- group_gather.c: groups are made, laid out, freed ----------------------------------------- */

/* Local. The parameters among these that lie on the mesh and have no group become the group's. */
fsdp_status fsdp_group_take_params(fsdp_group *group, fsdp_param *const *params, size_t count,
                                   const fsdp_mesh *mesh, fsdp_error *err);
/* Local. Layouts and sizes of the parameters, and their shards, zeroed. */
fsdp_status fsdp_group_allocate(fsdp_group *group, fsdp_error *err);
/* Gives back everything that a step has made: gathers, gathered parameters, gradients of any kind. */
void fsdp_group_drop(fsdp_group *group);
/* Shards are all that the group has of a step. */
bool fsdp_group_is_at_rest(const fsdp_group *group);
/* A group at rest continues with another context; the streams of the old one are drained. */
void fsdp_group_enter(fsdp_group *group, fsdp_context *context);
void fsdp_group_release(fsdp_group *group);    /* its blocks were given back */

/* --- group_gather.c --------------------------------------------------------------------------- */

fsdp_status fsdp_group_unshard(fsdp_group *group, bool is_async, fsdp_error *err);     /* issues */
fsdp_status fsdp_group_wait_unshard(fsdp_group *group, fsdp_error *err);
fsdp_status fsdp_group_reshard(fsdp_group *group, fsdp_error *err);
/* Frees a gather that no call waits for. */
void fsdp_group_drop_gather(fsdp_group *group);
/* Frees a gather after a wait of the compute stream: shards and slices that it reads may change then. */
void fsdp_group_cancel_gather(fsdp_group *group);

/* --- group_reduce.c --------------------------------------------------------------------------- */

/* Gradients of this backward are kept for a later one. */
fsdp_status fsdp_group_keep_grads(fsdp_group *group, fsdp_error *err);
/* Gradients of this backward are added to those that were kept. */
void fsdp_group_add_to_kept(fsdp_group *group);
fsdp_status fsdp_group_reduce(fsdp_group *group, fsdp_error *err);
/* The compute stream waits for the last reduction. */
void fsdp_group_wait_reduced(fsdp_group *group);
/* The host waits for the gradients that the last reduction has copied to its memory. */
fsdp_status fsdp_group_await_offloaded(const fsdp_group *group, fsdp_error *err);
void fsdp_group_drop_grads(fsdp_group *group);         /* the reduced ones */

/* A block for the parameter's gradient, which other ranks can read where reductions are made directly. */
fsdp_status fsdp_param_take_grad(fsdp_param *param, fsdp_error *err);

/* --- group_gather.c ---------------------------------------------------------------------------- */

/* With --check: a gradient that the caller will overwrite is NaN until then. */
void fsdp_param_spoil_grad(const fsdp_param *param);

/* --- group_trace.c ---------------------------------------------------------------------------- */

void fsdp_trace_group(const fsdp_group *group, const char *event);    /* with its phase */

/* --- the mean of gradients (group_reduce.c) --------------------------------------------------------- */

/* The divisors of a reduction: before and after the sum. 1: none. */
typedef struct fsdp_divide {
    double before, after;
    fsdp_reduce_op scatter_op, all_op;
    double premul;                     /* of PREMUL_SUM: each input is multiplied by it */
    double alone;                      /* a group of one rank: its copy is divided by this */
} fsdp_divide;
/* The divisor before the sum, when all are divided by factor: about its square root, so that sums of f16
 * neither overflow nor vanish. */
double fsdp_divide_before_sum(double factor);
fsdp_divide fsdp_divide_for(const fsdp_group *group, fsdp_dtype reduce_dtype);

/* --- streams and memory of a group ------------------------------------------------------------------ */

static inline fsdp_stream *fsdp_group_stream(const fsdp_group *group, int which)
{
    return group->context->streams[which];
}

/* Kernels that step shards and scale sharded gradients, for the compute stream: the device's; or the host's,
 * which run at once on a device with memory of its own, where these are offloaded. */
static inline const fsdp_device_kernels *fsdp_group_kernels(const fsdp_group *group)
{
    return group->settings->offloads ? &fsdp_device_host_kernels : group->context->device->ops->kernels;
}

/* last_use: of the block, on any stream. */
static inline void fsdp_group_give(const fsdp_group *group, fsdp_block *block, fsdp_event last_use)
{
    fsdp_memory_give(&group->context->memory, block, last_use);
}

#endif

/*
 * The inside of models, units and roots. What they are to the outside is in model.h, unit.h, root.h; how a
 * step goes through these files is in docs/flow_step.md.
 *
 *   model.c         parameters as they are declared
 *   unit.c          units are made; unit_set.c: their setters
 *   param_layout.c  what this rank holds of a parameter
 *   root.c          the structure is frozen, memory appears; root_groups.c: who gathers and reduces with whom
 *   root_context.c  what units share; root_check.c: do all ranks do the same?
 *   root_step.c     a step begins and ends
 *   unit_hooks.c    the hooks: states, order, prefetch
 *   unit_gather.c   shards -> gathered parameters, and back
 *   unit_reduce.c   gradients -> sharded gradients (unit_reduce.h: with which files)
 *
 * A *group* is the part of a unit that lies on one mesh: usually all of it. Groups are what is gathered and
 * reduced; a unit's are gathered in order, and reduced in reverse.
 */
#ifndef FSDP_UNIT_INTERNAL_H
#define FSDP_UNIT_INTERNAL_H

#include "kernels/tensor.h"
#include "runtime/unit/memory.h"
#include "runtime/launch/world_internal.h"
#include <fsdp/root.h>
#include <fsdp/text.h>

enum { FSDP_PARAM_DIMS = 8, FSDP_MAX_EXTENSION_INPUTS = 8 };

typedef struct fsdp_group fsdp_group;
typedef struct fsdp_context fsdp_context;

/* Rectangles for a stream, and when it is done with them. */
typedef struct fsdp_rect_list {
    fsdp_rect *items;
    size_t count, room;
    fsdp_event last;
} fsdp_rect_list;

/* --- parameters (model.c, param_layout.c) ------------------------------------------------------- */

typedef struct fsdp_tensor_place {     /* tensor parallelism */
    char dim[FSDP_MAX_MESH_NAME + 1];
    fsdp_placement placement;
} fsdp_tensor_place;

struct fsdp_param {
    fsdp_model *model;
    char *name;
    char **aliases;
    size_t alias_count;
    fsdp_dtype dtype, data_dtype, grad_dtype;
    fsdp_dtype asked_grad_dtype;       /* NONE: as the data */
    int ndim;
    int64_t shape[FSDP_PARAM_DIMS];
    bool is_buffer, is_persistent, requires_grad;
    bool lacks_value;                  /* nobody gave it one (root_values.c) */
    fsdp_tensor_place places[FSDP_MAX_MESH_DIMS];
    int place_count;
    fsdp_extension *extension;         /* or NULL */
    fsdp_grad_hook hook;
    void *hook_user;
    fsdp_unit *unit;                   /* NULL: of none yet, or left out (ignored) */
    bool is_ignored;
    fsdp_unit *ignored_by;             /* the unit whose opts said so; NULL: the FSDP1 face did */
    fsdp_group *group;
    fsdp_param_place cut;

    /* What this rank holds, since the root was made. */
    const fsdp_mesh *mesh;
    fsdp_layout layout;
    fsdp_box data_box, shard_box;      /* in the tensor */
    int64_t outer, n, rest;            /* of the data: dims before the one that is cut, it, those behind */
    int64_t chunk, rows;               /* rows of the cut dim per rank, and this rank's */
    int64_t padded;                    /* elements of a padded shard: outer * chunk * rest */
    void *shard;
    void *data;                        /* while gathered */
    fsdp_block *grad;                  /* of this backward */
    bool has_grad;
    fsdp_block *kept;                  /* of earlier backwards, in kept_dtype: what it is reduced in */
    fsdp_dtype kept_dtype;
    void *shard_grad;                  /* in a block of the group */
    bool is_reduced;                   /* it got something, and its hook has not seen that */

    /* A parameter that another one holds (wrap.h): which, and from which element on. */
    fsdp_param *flat;
    int64_t flat_at;
    void *summoned, *summoned_grad;    /* of one that holds others: whole, in the stored dtype; or NULL */
};

/* What this rank has of a parameter that lies in a flat one: elements [first, first + count) of it, which
 * begin `at` elements behind the beginning of the flat one's shard. */
typedef struct fsdp_flat_run {
    int64_t first, count, at;
} fsdp_flat_run;
fsdp_flat_run fsdp_param_flat_run(const fsdp_param *param);

struct fsdp_model {
    fsdp_world *world;
    fsdp_param **params;
    size_t count, room;
    fsdp_unit **units;
    size_t unit_count, unit_room;
    fsdp_root *root;
};

/* Fills in what depends on the mesh: layout, boxes, sizes. The group has its communicators. */
fsdp_status fsdp_param_lay_out(fsdp_param *param, fsdp_error *err);
/* The number of elements of the data, of this rank's rows, and of the data with every shard padded. */
int64_t fsdp_param_count(const fsdp_param *param);
int64_t fsdp_param_own_count(const fsdp_param *param);
int64_t fsdp_param_padded_count(const fsdp_param *param, int parts);
/* Is the name `prefix`, or that of something in the module `prefix`? In "" is everything. */
bool fsdp_name_is_below(const char *name, const char *prefix);
/* The same of one of its names, the parameter's own or an alias. */
bool fsdp_param_is_below(const fsdp_param *param, const char *prefix);

/* --- groups ----------------------------------------------------------------------------------- */

typedef enum fsdp_phase { FSDP_IDLE, FSDP_FORWARD, FSDP_PRE_BACKWARD, FSDP_POST_BACKWARD } fsdp_phase;
typedef enum fsdp_group_state { FSDP_IS_SHARDED, FSDP_IS_SHARDED_AGAIN, FSDP_IS_UNSHARDED } fsdp_group_state;

/* A gather that was issued and whose parameters were not made yet. */
typedef struct fsdp_gather {
    fsdp_block *block;                 /* NULL: none */
    fsdp_event event;
    int parts;                         /* ranks that take part */
    bool is_async;
    bool is_of_slices;                 /* of what an int reshard kept, not of the shards */
    bool is_late;                      /* the ranks meet when the parameters are made, not before */
} fsdp_gather;

/* Where the gradients of one reduction lie in its flat output. */
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
    fsdp_unit *unit;
    fsdp_param **params;
    size_t count;
    const fsdp_mesh *mesh;             /* with the dims that shard, or replicate, seen as one each */
    fsdp_mesh *own_mesh;               /* the same when it was made for that, else NULL */
    int shard_dim, replicate_dim;      /* of the mesh; -1: none */
    unsigned tensor_dims;              /* bits of the others */
    /* NULL for groups of one rank. `again` belongs to an int reshard, `reduce` one of its own for
     * reductions or the same as `shard`. */
    fsdp_ordered_comm *shard, *replicate, *again, *reduce;
    int shard_size, shard_rank, replicate_size, again_size, again_rank;
    int *ranks;                        /* room for connecting, where no rank may fail alone */

    fsdp_dtype wire;                   /* of gathers: U8 when data dtypes are mixed */
    fsdp_block *shards;                /* the padded shards of all */

    fsdp_group_state state;
    fsdp_phase phase;
    fsdp_gather gather;
    fsdp_block *unsharded;
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

/* --- units ------------------------------------------------------------------------------------ */

struct fsdp_unshard_handle { fsdp_unit *unit; };

/* When the unit whose backward comes next is gathered: before this one's mathematics, or after them. */
typedef enum fsdp_prefetch_time {
    FSDP_PREFETCH_BEFORE,
    FSDP_PREFETCH_AFTER,
    FSDP_PREFETCH_NEVER
} fsdp_prefetch_time;

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
    fsdp_unshard_handle handle;

    bool reduces, all_reduces, reshards_after_backward, unshards_in_backward, keeps_storage, is_async;
    bool forces_sum, reduces_unused, is_separate, takes_comm_memory;
    int reshard_after_forward;         /* AUTO until the root is made */
    double divide_factor;              /* 0: the number of ranks */
    int max_inputs;
    fsdp_unit **forward_prefetch, **backward_prefetch;
    size_t forward_prefetch_count, backward_prefetch_count;
    fsdp_all_reduce_hook all_reduce_hook;
    void *all_reduce_hook_user;
    fsdp_custom_collective *custom_gather, *custom_reduce, *custom_all_reduce;     /* or NULL */
    fsdp_prefetch_time backward_prefetch_time;
    bool prefetches_next;              /* the unit that followed in the first forward is gathered ahead */
    bool was_seen;                     /* it had a forward */
    fsdp_phase phase;
    bool *to_run, *to_return;          /* members whose forward, backward is to come; NULL for one member */
    bool *has_run;                     /* members that ran in the last forward; the same */
    size_t to_run_count, to_return_count;
};

void fsdp_unit_free(fsdp_unit *unit);  /* accepts NULL */
/* Do the meshes of its parameters have what its options name? (root_groups.c) */
fsdp_status fsdp_unit_check_meshes(const fsdp_unit *unit, fsdp_error *err);
/* A floating type, or FSDP_DTYPE_NONE; `option` is what was to be that. */
fsdp_status fsdp_option_check_float(const char *option, fsdp_dtype dtype, fsdp_error *err);
/* Who is asked first for buffers of a collective of the unit. custom: what runs it, or NULL; ordered: its
 * communicator, or NULL. */
fsdp_lender fsdp_unit_lender(const fsdp_unit *unit, const fsdp_custom_collective *custom,
                             const fsdp_ordered_comm *ordered);

/* --- roots ------------------------------------------------------------------------------------ */

enum {
    FSDP_STREAM_COMPUTE,
    FSDP_STREAM_COPY_IN,
    FSDP_STREAM_ALL_GATHER,
    FSDP_STREAM_REDUCE,
    FSDP_STREAM_ALL_REDUCE,
    FSDP_STREAMS
};

enum { FSDP_MOST_GATHERS = 2 };

/* A block that work on another stream still uses. */
typedef struct fsdp_used_block {
    fsdp_block *block;                 /* NULL: none */
    fsdp_event event;
} fsdp_used_block;

/* What the units of a root share, and several roots may (pipeline stages). */
struct fsdp_context {
    fsdp_root *roots;                  /* that share it, by next_sharing */
    fsdp_world *world;
    fsdp_device *device;
    fsdp_stream *streams[FSDP_STREAMS];
    fsdp_memory_pool memory;
    fsdp_gather deferred;              /* of the last gather in forward: freed by the next one */
    fsdp_event deferred_event;         /* its copy-out */
    fsdp_used_block *inputs;           /* of reductions, oldest first */
    int input_count, max_inputs, input_room;
    fsdp_used_block all_reduced;       /* what the last all-reduce was taken in, when gradients are cast */
    fsdp_group **order;                /* groups in the order of their forwards */
    size_t order_count, order_room;
    fsdp_root *finalizing;             /* whose asynchronous end of backward was not waited for */
    bool limits_gathers;               /* at most FSDP_MOST_GATHERS in flight */
    int gather_count;                  /* issued, and their parameters not made yet */
    fsdp_event freed[FSDP_MOST_GATHERS];       /* the last reshards, oldest first */
    int freed_count;
};

struct fsdp_finalize_handle {
    fsdp_root *root;
    bool was_reset;                    /* what it was of is gone */
};

struct fsdp_root {
    fsdp_model *model;
    fsdp_world *world;
    fsdp_context *context;
    fsdp_root *next_sharing;           /* of the context's */
    fsdp_unit **units;                 /* root first */
    size_t unit_count;
    fsdp_unit *unit;
    fsdp_block *buffers;
    int64_t step;
    uint64_t backwards;                /* that have ended: newer ones bring other gradients */
    bool is_in_forward, is_in_backward;
    bool is_unfinished;                /* a backward ended whose reductions nobody has waited for */
    bool is_evaluating;                /* forwards have no backward: their order is not noted */
    bool is_summoned;                  /* whole parameters are out (wrap_summon.c): no step begins */
    fsdp_unit *last_seen;              /* the last one that had its first forward */
    fsdp_model *declared;              /* as the caller declared it: `model`, unless the FSDP1 face wrapped it
                                        * */
    bool steps_runs;                   /* optimizers step declared parameters, not the flat ones they lie in
                                        * */
    bool is_last_backward, is_manual, has_post_optim_event;
    fsdp_event post_optim_event;
    fsdp_finalize_handle handle;
    struct fsdp_optim *optims;         /* their masters follow values that are set */
    fsdp_text events;                  /* of this step, a line each; with --check only */
    fsdp_error complaint;              /* a pointer asked for in a wrong state: of the next call */
    fsdp_error failure;                /* the first failure: of every later call */
};

/* At the beginning of every call on a root: an earlier failure or complaint. */
fsdp_status fsdp_root_ready(fsdp_root *root, fsdp_error *err);
/* At its end: errors of streams; a failure of any kind is kept, and the other ranks are told. */
fsdp_status fsdp_root_done(fsdp_root *root, fsdp_status status, fsdp_error *err);
/* Refuses `what`, which reads the reduced gradients, before the compute stream has waited for all of them. */
fsdp_status fsdp_root_check_reduced(const fsdp_root *root, const char *what, fsdp_error *err);
/* Refuses `call` while parameters have no values (root_values.c); unit: NULL, or only of this one. */
fsdp_status fsdp_root_check_values(const fsdp_root *root, const fsdp_unit *unit, const char *call,
                                   fsdp_error *err);
void fsdp_root_note_values(const fsdp_root *root);     /* all have them */
/* For --check (root_check.c). */
void fsdp_root_note_event(fsdp_root *root, const fsdp_trace_event *event);
/* The host may touch what the compute stream has made so far. */
fsdp_status fsdp_context_sync(fsdp_context *context, fsdp_error *err);

/* --- unit_gather.c ---------------------------------------------------------------------------- */

fsdp_status fsdp_group_unshard(fsdp_group *group, bool is_async, fsdp_error *err);     /* issues */
fsdp_status fsdp_group_wait_unshard(fsdp_group *group, fsdp_error *err);
fsdp_status fsdp_group_reshard(fsdp_group *group, fsdp_error *err);
/* Gives back a gather that nobody took. */
void fsdp_group_drop_gather(fsdp_group *group);
/* Gives back the gather that waits in the context. */
void fsdp_context_flush_gather(fsdp_context *context);

/* --- reductions (unit_reduce.c, unit_keep.c, unit_direct.c, unit_divide.c) ---------------------- */

fsdp_status fsdp_group_post_backward(fsdp_group *group, fsdp_error *err);
/* Who lends memory for gradients: so that other ranks can read them (unit_direct.c). */
fsdp_lender fsdp_group_grad_lender(const fsdp_group *group);
/* Reductions are complete, as far as the compute stream is concerned. */
void fsdp_group_wait_reduced(fsdp_group *group);
/* Waits, in the compute stream, until no more than `most` inputs of reductions are in flight. */
void fsdp_context_limit_inputs(fsdp_context *context, int most);
void fsdp_context_give_all_reduced(fsdp_context *context);
void fsdp_group_drop_grads(fsdp_group *group);         /* the reduced ones */
void fsdp_group_drop_kept(fsdp_group *group);          /* those of a step under way */

/* How a mean of gradients is taken (unit_divide.c). Divisors are 1 for none. */
typedef struct fsdp_divide {
    double before, after;
    fsdp_reduce_op scatter_op, all_op;
    double premul;                     /* of PREMUL_SUM: what each input is multiplied by */
    double alone;                      /* a group of one rank: its copy is divided by this */
} fsdp_divide;
/* By what to divide before the sum, when all are divided by factor: by about its square root, so that sums of
 * f16 neither overflow nor vanish. */
double fsdp_divide_before_sum(double factor);
fsdp_divide fsdp_divide_for(const fsdp_group *group, fsdp_dtype reduce_dtype);

/* --- unit_hooks.c ----------------------------------------------------------------------------- */

/* What end_backward does for a unit whose post_backward did not come. */
fsdp_status fsdp_unit_complete_backward(fsdp_unit *unit, fsdp_error *err);
/* What end_forward does for a unit whose members ran in part. */
fsdp_status fsdp_unit_complete_forward(fsdp_unit *unit, fsdp_error *err);

/* Gathers the group whose backward comes next, when it is not gathered before this one's mathematics. */
fsdp_status fsdp_group_prefetch_next(fsdp_group *group, fsdp_error *err);

void fsdp_trace_unit(const fsdp_group *group, const char *event);     /* with its state */
void fsdp_trace_collective(const fsdp_group *group, const fsdp_ordered_comm *ordered,
                           const fsdp_collective *call, const char *stream);
/* On a stream; bytes -1: none to tell. */
void fsdp_trace_work(const fsdp_group *group, const char *event, const char *stream, int64_t bytes);

#endif

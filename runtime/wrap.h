/*
 * Wraps a model as PyTorch's FullyShardedDataParallel does, over the same engine as units (unit.h). This API
 * is for programs that use sharding strategies, wrap policies and flat parameters, and for checkpoints that
 * FSDP1 users know. docs/runtime.md lists the differences from PyTorch.
 *
 * The caller declares a model (model.h) and makes no units. fsdp_wrap_create makes one unit per module that
 * the policy selects, and one of the rest. A flat parameter holds the parameters of a unit: it is a 1-D
 * tensor that is cut into one chunk per rank, and a cut may be inside a parameter. The handles of
 * fsdp_model_add stay valid:
 *
 *   fsdp_param_data, fsdp_param_grad     the parameter's part of the gathered flat parameter; the first call
 *                                        always zeroes a gradient, also that of fsdp_param_grad_raw
 *   fsdp_param_shard                     the parameter's part of this rank's chunk: a range of its elements
 *                                        in row-major order, which need not be whole rows. The box is that
 *                                        range: one dim, (first, count), count 0 for none
 *   fsdp_param_shard_grad                the reduced gradient of that range
 *   layout, of fsdp_param_describe       NULL, because no box describes the range
 *
 * Hooks of gradients (fsdp_param_set_post_accumulate_hook) belong to the flat parameter.
 *
 * All other calls take the root, fsdp_wrap_root: initial values (root_init.h), optimizers, clipping and loss
 * scaling (optim.h), steps (root.h, unit.h), state dicts and checkpoints (state.h). They show declared
 * parameters with their declared names, shapes and dtypes, so that either API loads the other's checkpoints
 * at any world size. PyTorch's FSDP1 calls have these counterparts:
 *
 *   FULL_STATE_DICT, rank0_only          fsdp_state_opts.full_state_dict, with cpu_offload
 *   SHARDED_STATE_DICT, LOCAL_           sharded; checkpoints of kind FSDP_SHARDED, FSDP_LOCAL
 *   optim_state_dict                     fsdp_root_get_state of FSDP_STATE_OPTIM
 *   shard_full_, flatten_sharded_,       fsdp_root_set_state, full_state_dict or not, broadcast_from_rank0
 *   scatter_full_optim_state_dict
 *   sync_module_states                   fsdp_root_sync_from_rank0
 *
 * With use_orig_params the groups of an optimizer match declared parameters, and frozen or unmatched ones are
 * not stepped; otherwise they match flat parameters. A flat parameter has one gradient, which the first step
 * of any part of it drops, so that all of it must belong to one optimizer.
 *
 * Calls are local unless they are marked collective: then all ranks of the world make them in the same order.
 * All ranks wrap alike. One thread at a time uses an fsdp_wrap.
 */
#ifndef FSDP_WRAP_H
#define FSDP_WRAP_H

#include <fsdp/root.h>
#include <fsdp/sd.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_wrap fsdp_wrap;

/* --- how a unit is sharded -------------------------------------------------------------------- */

typedef enum fsdp_wrap_strategy {
    FSDP_WRAP_FULL_SHARD = 0,    /* resharded after forward, gathered again in backward */
    FSDP_WRAP_SHARD_GRAD_OP,     /* gathered from forward to the end of backward; a backward that
                                  * accumulates (no_sync) does not reshard it */
    FSDP_WRAP_NO_SHARD,          /* whole on every rank, gradients are all-reduced */
    FSDP_WRAP_HYBRID_SHARD,      /* FULL_SHARD in rows of the mesh, replicated over its columns */
    FSDP_WRAP_HYBRID_SHARD_ZERO2 /* SHARD_GRAD_OP in rows of the mesh, replicated likewise */
} fsdp_wrap_strategy;

/* The time at which the unit whose backward is expected next is gathered. A wrong prediction costs a gather;
 * results do not change. */
typedef enum fsdp_wrap_prefetch {
    FSDP_WRAP_BACKWARD_PRE = 0,  /* before this unit computes: most overlap, most memory */
    FSDP_WRAP_BACKWARD_POST,     /* after this unit is resharded, before it reduces */
    FSDP_WRAP_BACKWARD_NONE
} fsdp_wrap_prefetch;

typedef struct fsdp_wrap_unit_opts {
    fsdp_wrap_strategy strategy;
    fsdp_wrap_prefetch backward_prefetch;
    bool forward_prefetch;     /* gathers the next unit ahead, in the order of the first forward: for models
                                * whose order never changes */
    fsdp_dtype param_dtype;    /* of gathered parameters; NONE: as stored */
    fsdp_dtype reduce_dtype;   /* NONE: param_dtype (unlike units, which take the stored dtype) */
    bool offload_params;       /* shards and gradients live in host memory */
} fsdp_wrap_unit_opts;

/* --- which modules are units ------------------------------------------------------------------ */

/* A module: a prefix of parameters' names ("layers.0.attn"). */
typedef struct fsdp_wrap_module {
    const char *name;          /* "" for the root, which no policy is asked about */
    const char *type;          /* as returned by type_of, else "" */
    int64_t unwrapped;         /* elements below it that no inner unit has */
    bool is_list;              /* only modules named 0, 1, 2, ... and no parameters of its own */
} fsdp_wrap_module;

typedef enum fsdp_wrap_policy_kind {
    FSDP_POLICY_NONE = 0,     /* only the root */
    FSDP_POLICY_ALWAYS,       /* every module but lists */
    FSDP_POLICY_NAMES,        /* the modules with these names; '*' stands for one element: "layers.*" */
    FSDP_POLICY_TYPES,        /* those of these types. A name or type that no module has is FSDP_ERR_USAGE */
    FSDP_POLICY_SIZE,         /* those with min_elements that are not wrapped yet. A list is never a unit
                                * itself; modules of the types named are units as a whole or not at all */
    FSDP_POLICY_CUSTOM        /* those for which `wants` returns true */
} fsdp_wrap_policy_kind;

typedef struct fsdp_wrap_policy {
    fsdp_wrap_policy_kind kind;
    const char *const *names;  /* of NAMES, TYPES and SIZE */
    size_t name_count;
    int64_t min_elements;      /* of SIZE; 0: 100,000,000 */
    void *context;
    /* The type of a module, "Block"; NULL: it has none. May be NULL. */
    const char *(*type_of)(void *context, const char *module);
    /* For CUSTOM: is the module a unit? *opts may be changed for it. */
    bool (*wants)(void *context, const fsdp_wrap_module *module, fsdp_wrap_unit_opts *opts);
    /* With any policy: modules of these types are units of their own that are computed as stored, without
     * param_dtype and reduce_dtype (batch norms). */
    const char *const *full_precision_types;
    size_t full_precision_count;
} fsdp_wrap_policy;

/* --- wrapping --------------------------------------------------------------------------------- */

typedef struct fsdp_wrap_opts {
    const fsdp_mesh *mesh;     /* connected, one dim, or replicas x shards. NULL: all ranks; for hybrid
                                * strategies: hosts x the ranks of a host */
    fsdp_wrap_unit_opts unit;  /* of every unit, unless the policy changes it */
    fsdp_wrap_policy policy;   /* names and types are used until fsdp_wrap_create returns */
    bool use_orig_params;      /* the optimizer sees parameters as they were declared (groups, frozen ones),
                                * and they are at multiples of 16 bytes; otherwise it sees flat ones */
    bool unlimited_gathers;    /* otherwise at most 2 gathers are in flight: the host waits for memory that
                                * was freed, prefetches beyond that are left out [not limit_all_gathers] */
    fsdp_dtype buffer_dtype;   /* of buffers in memory; they are saved as declared. NONE: as declared */
    /* Modules (without the units inside them that NAMES wraps), or single parameters, that stay whole and are
     * neither sharded nor reduced. Only one of the two lists may be given. FSDP_ERR_USAGE for a name that
     * does not exist. */
    const char *const *ignored_modules, *const *ignored_states;
    size_t ignored_module_count, ignored_state_count;
} fsdp_wrap_opts;
/* Wraps the model, which takes no further parameters and units from now on, and allocates all shards
 * (zeroed). A flat parameter has one floating dtype and, without use_orig_params, only trainable
 * parameters or only frozen ones: FSDP_ERR_USAGE names those that do not fit. opts NULL: all zero.
 * Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_wrap_create(fsdp_model *model, const fsdp_wrap_opts *opts,
                                                   fsdp_wrap **wrap_out, fsdp_error *err);
/* Frees the fsdp_wrap, in any order with model and optimizers (root.h). Accepts NULL. */
FSDP_API void fsdp_wrap_free(fsdp_wrap *wrap);

/* Returns the root, which is the fsdp_wrap's and is freed with it. */
FSDP_API fsdp_root *fsdp_wrap_root(fsdp_wrap *wrap);
/* Returns the unit of that module, "" for the root; NULL if the module is not a unit. The model owns it. */
FSDP_API fsdp_unit *fsdp_wrap_unit(fsdp_wrap *wrap, const char *module);
/* Returns the flat parameter of a unit, named MODULE._flat_param; NULL if the unit has none. Its shard,
 * gradient and layout are those of any parameter of one dim. */
FSDP_API fsdp_param *fsdp_wrap_flat_param(fsdp_wrap *wrap, const fsdp_unit *unit);

typedef enum fsdp_wrap_training {
    FSDP_WRAP_IDLE,
    FSDP_WRAP_FORWARD_BACKWARD,
    FSDP_WRAP_SUMMON_FULL_PARAMS
} fsdp_wrap_training;
/* Returns FORWARD_BACKWARD inside a forward or a backward, SUMMON_FULL_PARAMS until fsdp_wrap_summon_end. */
FSDP_API fsdp_wrap_training fsdp_wrap_training_state(const fsdp_wrap *wrap);

/* The place of a parameter in its flat parameter, in elements. */
typedef struct fsdp_wrap_place {
    fsdp_param *flat;          /* NULL: it was ignored, or is a buffer; the rest is zero then */
    int64_t offset, count;     /* in the flat parameter */
    int64_t first, local;      /* this rank's range of it: first element, elements; local 0: none */
    int64_t at;                /* the range's first element in this rank's chunk */
} fsdp_wrap_place;
/* Returns the place of a declared parameter. */
FSDP_API fsdp_wrap_place fsdp_wrap_place_of(const fsdp_param *param);

/* --- training --------------------------------------------------------------------------------- */

/* Sets whether backwards add up gradients without reducing them [no_sync]. Call it between steps. The first
 * backward after it is switched off reduces the sum. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_wrap_set_accumulating(fsdp_wrap *wrap, bool is_accumulating,
                                                             fsdp_error *err);

/* The argument of a communication hook, which replaces the reduction of one unit, with its division. */
typedef struct fsdp_wrap_bucket {
    const char *unit;
    fsdp_dtype dtype;
    void *grad;                /* the whole flat gradient of this rank, padded; scratch if there is a shard */
    int64_t count;
    void *shard;               /* receives this rank's chunk of the mean, as many elements as count over the
                                * ranks; NULL for NO_SHARD: grad becomes the mean */
    fsdp_wrap *wrap;
    /* NULL but on a GPU, whose memory grad and shard are then. There the hook gives work to the stream and
     * returns: collectives by fsdp_collective.stream, kernels and copies by `native`, a cudaStream_t. */
    struct fsdp_stream *stream;
    void *native;
} fsdp_wrap_bucket;
/* Runs on a stream's thread, or with a GPU on the program's thread, once per unit and reduction. All ranks of
 * comm make the same collectives over it. The hook is not called in a unit of one rank. */
typedef fsdp_status (*fsdp_wrap_comm_hook)(void *context, fsdp_comm *comm, const fsdp_wrap_bucket *bucket,
                                           fsdp_error *err);
/* Registers a hook for all units, once, before the first forward. FSDP_ERR_USAGE with hybrid strategies. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_wrap_register_comm_hook(fsdp_wrap *wrap, fsdp_wrap_comm_hook hook,
                                                               void *context, fsdp_error *err);
/* Computes the mean in f16, dividing partly before the sum and partly after it. A hook without a context. */
FSDP_API fsdp_status fsdp_wrap_fp16_compress_hook(void *context, fsdp_comm *comm,
                                                  const fsdp_wrap_bucket *bucket, fsdp_error *err);
/* Computes the mean in bf16, likewise. */
FSDP_API fsdp_status fsdp_wrap_bf16_compress_hook(void *context, fsdp_comm *comm,
                                                  const fsdp_wrap_bucket *bucket, fsdp_error *err);

/* --- whole parameters ------------------------------------------------------------------------- */

typedef struct fsdp_wrap_summon_opts {
    bool only_unit;            /* gathers only the unit, not those below it [not recurse] */
    bool discard_changes;      /* writes no changes back; NO_SHARD units keep them anyway [not writeback] */
    bool rank0_only;           /* only rank 0 gets the parameters; on the others fsdp_param_data is NULL */
    bool offload_to_cpu;       /* gathers into host memory */
    bool with_grads;           /* also gathers reduced gradients: fsdp_param_grad, NULL if there is none */
} fsdp_wrap_summon_opts;

/*
 * Gathers parameters, between steps, in their stored dtype; fsdp_param_data returns them until
 * fsdp_wrap_summon_end. unit NULL: the root. At the end each rank writes its own range of the changed values
 * to its shard, without communication: change the values alike on all ranks, or on each rank only its own
 * range. f32 masters of narrow parameters follow. opts may be NULL. Until the end no optimizer is made or
 * steps. Collective.
 *
 * FSDP_ERR_USAGE, as in PyTorch: rank0_only without discard_changes; with_grads without use_orig_params or
 * with offload_to_cpu; offload_to_cpu of a NO_SHARD unit. Also: inside a step, and twice.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_wrap_summon_full_params(fsdp_wrap *wrap, fsdp_unit *unit,
                                                               const fsdp_wrap_summon_opts *opts,
                                                               fsdp_error *err);
/* Writes changes to the shards, as described above, and frees the gathered parameters. FSDP_ERR_USAGE if no
 * parameters are gathered by fsdp_wrap_summon_full_params. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_wrap_summon_end(fsdp_wrap *wrap, fsdp_error *err);

/* --- keys of optimizer state ------------------------------------------------------------------ */

/* The parameters that the optimizer was given, by position: names of declared parameters, or of flat ones
 * without use_orig_params. The groups follow one another. */
typedef struct fsdp_wrap_optim_input {
    const char *const *names;
    size_t count;
} fsdp_wrap_optim_input;

typedef enum fsdp_wrap_key_type { FSDP_WRAP_PARAM_NAME = 0, FSDP_WRAP_PARAM_ID } fsdp_wrap_key_type;

/* Makes a dict of optimizer state (FSDP_STATE_OPTIM, nested_optim, optim_prefix "") with other keys: names,
 * or positions in input (0, 1, ...). The caller frees the dict, which borrows the memory of sd's tensors.
 * Keys that are of that type already do not change; the state of names that input lacks is left out. The
 * lists `params` get the same keys, and are sorted. FSDP_ERR_USAGE for keys of both types, and for a position
 * that input does not have. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_wrap_rekey_optim_state(const fsdp_sd *sd, fsdp_wrap_key_type type,
                                                              const fsdp_wrap_optim_input *input,
                                                              fsdp_sd **sd_out, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

/*
 * State dicts of a root and its optimizers, whichever API made the root: the counterpart of PyTorch's
 * get_state_dict and set_state_dict. Names do not depend on how the model is sharded, so that one world can
 * set the dict that another one got.
 *
 *   model.<name>                       parameters, their further names as aliases, persistent buffers
 *   optim.state.<name>.<kind>          step (a 0-d f32 tensor), exp_avg, exp_avg_sq, momentum_buffer, master
 *   optim.param_groups.<name>.<hyper>  lr, betas, eps, weight_decay, ... per parameter; with nested_optim
 *   optim.param_groups                 one list of a dict per group instead, {lr, ..., params: [names]}
 *
 * In a *sharded* dict the tensors are the live memory of this rank's shards; in a *full* dict they are whole.
 * docs/runtime.md, "State dicts", describes the steps; checkpoint.h saves and loads dicts at any world size.
 */
#ifndef FSDP_STATE_H
#define FSDP_STATE_H

#include <fsdp/checkpoint.h>
#include <fsdp/optim.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The part of the state that a call gets or sets. */
typedef enum fsdp_state_part {
    FSDP_STATE_ALL = 0,
    FSDP_STATE_MODEL,          /* without optimizers [get_model_state_dict] */
    FSDP_STATE_OPTIM           /* without the model [get_optimizer_state_dict] */
} fsdp_state_part;

/* All zero: everything, sharded, strict. The names in brackets are those of PyTorch's StateDictOptions. */
typedef struct fsdp_state_opts {
    fsdp_state_part part;
    /* The optimizers whose state it is; NULL: all of the root, in the order in which they were made. Several
     * are merged, and have no parameter in common. */
    fsdp_optim *const *optims;
    size_t optim_count;
    bool ignore_frozen;                /* leaves out parameters that need no gradient: get does not return
                                        * them, set does not change or miss them [ignore_frozen_params] */
    bool full_state_dict;              /* whole tensors, see below */
    bool cpu_offload;                  /* get: copies instead of live memory; only rank 0 gets a full dict,
                                        * the others get an empty one. set: no effect */
    bool broadcast_from_rank0;         /* set, with full_state_dict: rank 0 has the dict; that of the others
                                        * is not used, and may be NULL */
    bool partial;                      /* set: names may be missing, and model names unexpected [not strict]
                                        * */
    bool nested_optim;                 /* get: hyper-parameters as one list; set accepts both forms [not
                                        * flatten_optimizer_state_dict] */
    const char *model_prefix, *optim_prefix;   /* NULL: "model.", "optim."; "" for none */

    /* Limits the dict to entries below these modules; NULL: all of the model. */
    const char *const *submodules;
    size_t submodule_count;
    bool drop_submodule_prefixes;      /* names lack their prefixes [not keep_submodule_prefixes] */

    /* Returns the name of a parameter or buffer in state dicts, which must live until the next call of it;
     * NULL: its name in the model. rename NULL: all names are those of the model. */
    const char *(*rename)(void *context, const char *name);
    void *context;
} fsdp_state_opts;

/* --- in memory -------------------------------------------------------------------------------- */

/*
 * Gets the state dict of this rank, between steps; gathered parameters are resharded. opts NULL: all zero.
 * The caller frees the dict (fsdp_sd_free); after a failure *sd_out is NULL.
 *
 * Sharded: local, without a copy. The dict borrows the memory of shards, moments and buffers: use it neither
 * inside a step nor after root and optimizers were freed. Parameters in flat ones (wrap.h) are ranges of
 * their elements; buffers that are kept in another dtype than the declared one are copies.
 *
 * full_state_dict: collective over the world. Tensors are gathered one by one through one bounded buffer
 * into memory of the dict. If the dicts of ranks differ, the error names the first name that differs.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_get_state(fsdp_root *root, const fsdp_state_opts *opts,
                                                      fsdp_sd **sd_out, fsdp_error *err);

/*
 * Copies `sd` into the root's parameters and optimizer state. Call it between steps: before backward, or
 * after the optimizer's step. Shapes and dtypes must be the same. A failure of a check changes nothing. If
 * fsdp_sd_load has loaded tensors into a dict of fsdp_root_get_state, they are not copied again, and this
 * call sets hyper-parameters and masters.
 *
 * Sharded: local. Each tensor must have the parameter's layout; a whole one is refused.
 *
 * full_state_dict: local. Each tensor is whole on every rank, with the same values, and each rank copies its
 * part of it. With broadcast_from_rank0: collective over the world; rank 0 sends one tensor at a time through
 * one bounded buffer.
 *
 * A parameter with several names may be in the dict under any of them; if the tensors of these differ, that
 * of the first name is used. State of optimizers may be named by any name of its parameter, or by the
 * parameter's number in the optimizer, as in Optimizer.state_dict(); `step` may be a number or a 0-d tensor;
 * a missing `master` is set from the parameter. Hyper-parameters may have either form. A flat parameter
 * (wrap.h) has one step, so that those of its parameters must be equal. Names outside both prefixes belong to
 * the caller and are ignored.
 *
 * Unless partial is set, state that the optimizers here cannot continue is FSDP_ERR_USAGE: state that they do
 * not keep, such as max_exp_avg_sq, and hyper-parameters that change steps, such as amsgrad and Adam's
 * decoupled_weight_decay=False with a decay. A momentum needs an optimizer that was made with one.
 *
 * *report lists names, also after a failure: missing ones, which are an error unless partial is set, and
 * unexpected ones, which are an error below model_prefix unless partial is set. report may be NULL; the
 * caller releases it by fsdp_load_report_release.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_set_state(fsdp_root *root, const fsdp_sd *sd,
                                                      const fsdp_state_opts *opts, fsdp_load_report *report,
                                                      fsdp_error *err);

/* --- checkpoints ------------------------------------------------------------------------------ */

/*
 * Saves and loads have all options of checkpoint.h, and save and load extra entries of the caller, such as
 * the position in the data: a state dict with names that neither the model nor the optimizers have.
 *
 *   fsdp_root_save_opts opts = {.save.step = &step, .into_run = true, .extra = extra};
 *                                                                     extra has "data.epoch"
 *   FSDP_TRY(fsdp_root_save(root, "run", &opts, err));
 *   ...
 *   fsdp_root_load_opts opts = {.extra = extra, .step = &step};
 *   FSDP_TRY(fsdp_root_load(root, "run", &opts, err));
 */
typedef struct fsdp_root_save_opts {
    fsdp_state_opts state;     /* the state to save, and its names. full_state_dict, cpu_offload and
                                * broadcast_from_rank0 are FSDP_ERR_USAGE, because save.kind decides how the
                                * state is stored. FSDP_LOCAL stores flat parameters (wrap.h) as they are, and
                                * excludes hybrid strategies */
    fsdp_save_opts save;       /* kind, step, compress, overwrite, retain, ... */
    bool into_run;             /* dir is a run: fsdp_run_save saves the checkpoint RUN/step-N. Needs
                                * save.step; nothing is overwritten */
    const fsdp_sd *extra;      /* also saved: values, and tensors, whose memory is borrowed. May be NULL */
} fsdp_root_save_opts;

/* Saves the sharded dict as fsdp_sd_save does: after a failure no new checkpoint exists, and an old one is
 * untouched. opts NULL: all zero, which saves the model and all optimizers of the root. Collective over
 * the world. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_save(fsdp_root *root, const char *dir,
                                                 const fsdp_root_save_opts *opts, fsdp_error *err);

typedef struct fsdp_root_load_opts {
    fsdp_state_opts state;     /* as above */
    fsdp_load_opts load;       /* check, cast, watch, ... partial is set here or in state. The report has
                                * names as fsdp_root_set_state does, also when they caused the failure; and
                                * the path. include and exclude are FSDP_ERR_USAGE: state has submodules */
    fsdp_sd *extra;            /* also loaded: tensors into their memory (allocated by that state dict if they
                                * have none), values are replaced. A name that the checkpoint lacks is
                                * missing; if partial is set, its entry does not change. May be NULL */
    int64_t *step;             /* becomes the checkpoint's step, FSDP_NO_STEP if it has none. May be NULL */
} fsdp_root_load_opts;

/* Loads the state that fsdp_root_set_state sets from a checkpoint of any mesh, of either API and of any
 * format that is read (PyTorch's, saved under "model" and "optim"); each rank reads its part. If path is a
 * run, loads its newest good checkpoint. opts NULL: all zero. If names, shapes or dtypes do not match,
 * nothing changes; after a failed read the contents are undefined. Collective over the world. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_load(fsdp_root *root, const char *path,
                                                 const fsdp_root_load_opts *opts, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif

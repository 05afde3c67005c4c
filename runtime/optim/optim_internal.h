/*
 * Private interface of optimizers: state per parameter, in the order of the model. optim.c makes it, steps,
 * describes it for saving and loading (state_internal.h), clips gradients and scales losses.
 *
 * In: a root and its gradients, after a backward. Out: changed shards and moments, in the compute stream.
 * Programs call optim.h between steps; state/ and wrap/ call this header.
 */
#ifndef FSDP_OPTIM_INTERNAL_H
#define FSDP_OPTIM_INTERNAL_H

#include "runtime/step/step.h"
#include <fsdp/optim.h>

typedef enum fsdp_optim_kind { FSDP_OPTIM_ADAMW, FSDP_OPTIM_SGD } fsdp_optim_kind;

/* moments[0] is exp_avg or momentum_buffer, moments[1] exp_avg_sq. */
enum { FSDP_MOMENTS = 2 };
/* A part of a shard that is stepped with a group's hyper-parameters (a flat parameter has several). */
typedef struct fsdp_optim_run {
    const fsdp_param *view;            /* the declared parameter */
    int64_t first, count;
    size_t group;
} fsdp_optim_run;

typedef struct fsdp_optim_state {
    fsdp_param *param;
    size_t group;
    fsdp_optim_run *runs;              /* NULL: the whole shard with `group` */
    size_t run_count;
    fsdp_dtype moment_dtype;
    float step;                        /* taken so far; a 0-d tensor in state dicts */
    bool is_unsettled;                 /* the last one may have been skipped (clip_settle) */
    void *moments[FSDP_MOMENTS];       /* NULL: the optimizer has no such moment */
    float *master;                     /* a copy in f32; NULL: the parameter is precise enough */
} fsdp_optim_state;

typedef struct fsdp_optim_params {     /* of a group */
    double lr, weight_decay;
} fsdp_optim_params;

struct fsdp_optim {
    fsdp_root *root;
    fsdp_optim_kind kind;
    fsdp_adamw_opts adamw;
    fsdp_sgd_opts sgd;
    fsdp_optim_params *groups;
    size_t group_count;
    fsdp_optim_state *states;
    size_t count;
    fsdp_optim_tensors *step_tensors;  /* the lists of a step, which streams read: one item per run */
    fsdp_adamw_step *adamw_steps;      /* or sgd_steps */
    fsdp_sgd_step *sgd_steps;
    int64_t bytes;                     /* counted as FSDP_MEMORY_OPTIM */
    struct fsdp_optim *next;           /* of the same root */
};

/* Finds the group that steps a declared parameter: the state's parameter, or one inside it if that is flat;
 * false: none does. */
bool fsdp_optim_group_of(const fsdp_optim_state *state, const fsdp_param *param, size_t *group_out);
/* The name of a moment: "exp_avg", ...; NULL when the optimizer has no such. */
const char *fsdp_optim_moment_name(const fsdp_optim *optim, int moment);
/* Sets a master from its parameter, which was changed by loading or by hand, element by element. Both are in
 * the host's view, between a load and a store of it. */
void fsdp_optim_refresh_master(fsdp_optim_state *state);
/* Does the same in the device's memory, through a bounded piece of staging memory, and waits. */
fsdp_status fsdp_optim_refresh_unviewed(fsdp_optim_state *state, fsdp_error *err);
/* Sets the masters of this parameter in all optimizers; NULL: of all parameters. They are
 * in the host's view. */
void fsdp_root_refresh_masters(fsdp_root *root, const fsdp_param *param);
/* Does the same for one parameter, in the device's memory. */
fsdp_status fsdp_root_refresh_unviewed(fsdp_root *root, const fsdp_param *param, fsdp_error *err);
/* True when gradients wait for an optimizer of the root; group: only those of the group, NULL: all. */
bool fsdp_root_awaits_step(const fsdp_root *root, const fsdp_group *group);
/* fsdp_optim_describe_state for a state of the optimizer. */
size_t fsdp_optim_state_tensors(const fsdp_optim *optim, fsdp_optim_state *state,
                                fsdp_optim_tensor tensors_out[FSDP_OPTIM_TENSORS]);

#endif

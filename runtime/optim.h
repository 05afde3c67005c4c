/*
 * Steps optimizers on the shards of a root, clips and scales its gradients, and computes learning-rate
 * schedules.
 *
 * The state of a parameter is in the same kind of memory as its shard: moments have its layout, the step is a
 * 0-d f32 tensor. In state dicts they are optim.state.<name>.step, .exp_avg, .exp_avg_sq, .momentum_buffer
 * and .master. Calls are local unless they are marked collective; one thread at a time uses a root and its
 * optimizers.
 */
#ifndef FSDP_OPTIM_H
#define FSDP_OPTIM_H

#include <fsdp/root.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_optim fsdp_optim;

/* A group has hyper-parameters for its parameters. A parameter belongs to the first group whose `match`
 * returns true. */
typedef struct fsdp_optim_group {
    bool (*match)(void *context, const fsdp_param *param);        /* NULL: all */
    void *context;
    double lr;                 /* 0: the optimizer's */
    double weight_decay;       /* 0: none, even if the optimizer has one */
} fsdp_optim_group;

/* A 0 stands for the default in the comment. For a real zero, pass a number too small to matter (1e-300).
 * Opts may be NULL: all defaults. */
typedef struct fsdp_adamw_opts {
    double lr, beta1, beta2, eps;      /* 1e-3, 0.9, 0.999, 1e-8 */
    double weight_decay;       /* 0: none. PyTorch's default is 0.01 */
    bool maximize;
    bool step_in_param_dtype;  /* bf16 and f16 parameters have no f32 master */
    fsdp_dtype moment_dtype;   /* NONE: f32 where there is a master, else the parameter's */
    const fsdp_optim_group *groups;    /* NULL: one of all parameters. Copied */
    size_t group_count;
} fsdp_adamw_opts;
/* Creates an AdamW optimizer, which the caller frees. Frozen parameters get no state. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_adamw_create(fsdp_root *root, const fsdp_adamw_opts *opts,
                                                    fsdp_optim **optim_out, fsdp_error *err);

typedef struct fsdp_sgd_opts {
    double lr;                 /* 1e-3 */
    double momentum, dampening, weight_decay;  /* 0: none */
    bool nesterov, maximize;
    bool step_in_param_dtype;
    fsdp_dtype moment_dtype;
    const fsdp_optim_group *groups;
    size_t group_count;
} fsdp_sgd_opts;
/* Creates an SGD optimizer, which the caller frees. Frozen parameters get no state. FSDP_ERR_USAGE for
 * numbers that SGD does not accept. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_sgd_create(fsdp_root *root, const fsdp_sgd_opts *opts,
                                                  fsdp_optim **optim_out, fsdp_error *err);
/* Frees an optimizer. Accepts NULL. */
FSDP_API void fsdp_optim_free(fsdp_optim *optim);

/* Steps every parameter of the optimizer that has a sharded gradient, and drops the gradient. The gradients
 * of other optimizers of the root are kept until those step. Reshards units of stepped parameters that are
 * gathered or being gathered, because their gathered data is from before the step. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_optim_step(fsdp_optim *optim, fsdp_error *err);

/* Returns the number of groups; 1, of all parameters, if the options had none. */
FSDP_API size_t fsdp_optim_group_count(const fsdp_optim *optim);
/* Returns the learning rate of a group; NaN: there is no such group. */
FSDP_API double fsdp_optim_lr(const fsdp_optim *optim, size_t group);
/* Sets the learning rate of a group, the same on all ranks. FSDP_ERR_USAGE: there is no such group, or lr
 * is negative or not finite. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_optim_set_lr(fsdp_optim *optim, size_t group, double lr,
                                                    fsdp_error *err);

/* Updates f32 masters after the program has changed shards itself: a master that does not round to its
 * parameter is set from it. Call it between steps. Calls that set or load values do this for all optimizers
 * of the root. */
FSDP_API void fsdp_optim_refresh_masters(fsdp_optim *optim);

/* One tensor of what an optimizer keeps for a parameter. */
enum { FSDP_OPTIM_TENSORS = 4 };
typedef struct fsdp_optim_tensor {
    const char *name;          /* "step", "exp_avg", "exp_avg_sq", "momentum_buffer", "master" */
    fsdp_dtype dtype;
    int ndim;                  /* step: 0; the others have the parameter's shape and layout */
    const int64_t *shape;
    fsdp_layout layout;
    void *data;                /* live: this rank's part, packed */
} fsdp_optim_tensor;
/* Lists the tensors that the optimizer keeps for a parameter, also before the first step. Returns their
 * number; 0: no state of this parameter. */
FSDP_API size_t fsdp_optim_describe_state(const fsdp_optim *optim, const fsdp_param *param,
                                          fsdp_optim_tensor tensors_out[FSDP_OPTIM_TENSORS]);

/* --- gradients -------------------------------------------------------------------------------- */

typedef struct fsdp_clip_opts {
    double max_norm;           /* 0 or infinity: only measure */
    double norm_type;          /* default 2; infinity: the largest */
    bool error_if_nonfinite;   /* a norm that is not finite is FSDP_ERR_DAMAGED, and no gradient changes;
                                * without norm_out the steps change nothing, instead of the error */
} fsdp_clip_opts;
/* Measures the norm and clips the gradients, between end_backward and the step. *norm_out gets the norm of
 * all gradients as one vector, the same on every rank. Multiplies the gradients by min(1, max_norm / (norm +
 * 1e-6)). opts NULL: all zero, which only measures. Collective over all ranks of the root's meshes.
 *
 * norm_out NULL: the host does not wait for a GPU. The gradients stay as they are; the optimizers' steps
 * multiply them, without rounding those of bf16 and f16 first, and must come before the next backward; a root
 * without an optimizer is FSDP_ERR_USAGE. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_clip_grad_norm(fsdp_root *root, const fsdp_clip_opts *opts,
                                                           double *norm_out, fsdp_error *err);

/* Returns the norm of the last clipping; ago 1: of the one before it. Waits until it is known: after the next
 * step was given to a GPU, the norm of the step before usually is. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_root_grad_norm(fsdp_root *root, int ago, double *norm_out,
                                                      fsdp_error *err);

/* Loss scaling for f16: multiply the loss by fsdp_scaler_scale, then call fsdp_scaler_step instead of
 * fsdp_optim_step. All ranks agree whether any gradient is not finite, so that the calls marked so are
 * collective over all ranks of the root's meshes. */
typedef struct fsdp_scaler fsdp_scaler;
typedef struct fsdp_scaler_opts {
    double init_scale, growth_factor, backoff_factor;  /* 0: 65536, 2, 0.5 */
    int64_t growth_interval;                           /* 0: 2000 */
} fsdp_scaler_opts;
/* Creates a scaler, which the caller frees. opts NULL: all defaults. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_scaler_create(const fsdp_scaler_opts *opts, fsdp_scaler **scaler_out,
                                                     fsdp_error *err);
/* Frees a scaler. Accepts NULL. */
FSDP_API void fsdp_scaler_free(fsdp_scaler *scaler);
/* Returns the scale of the next backward, the same on every rank. */
FSDP_API double fsdp_scaler_scale(const fsdp_scaler *scaler);
/* Divides the sharded gradients by the scale, before they are clipped, at most once after a backward; without
 * this call the step divides them. One root at a time uses the scaler. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_scaler_unscale(fsdp_scaler *scaler, fsdp_root *root, fsdp_error *err);
/* Steps the optimizer, unless a gradient of the root is not finite, and then adapts the scale. With several
 * optimizers the scale is adapted after all have stepped, or, if one has not, with the gradients of the next
 * backward. *skipped_out (may be NULL) tells whether the step was left out. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_scaler_step(fsdp_scaler *scaler, fsdp_optim *optim, bool *skipped_out,
                                                   fsdp_error *err);

/* --- schedules: a factor for the learning rate of a step (0 is the first) ---------------------- */

typedef enum fsdp_schedule_kind {
    FSDP_SCHEDULE_CONSTANT = 0,        /* stays at 1 */
    FSDP_SCHEDULE_LINEAR,              /* falls to `end` in equal parts */
    FSDP_SCHEDULE_COSINE               /* falls to `end` along half a cosine */
} fsdp_schedule_kind;

/* The factor rises in equal parts to 1, which it reaches in step warmup - 1; then `kind` decides. From step
 * `total` on it is `end`, or 1 for CONSTANT. */
typedef struct fsdp_schedule {
    fsdp_schedule_kind kind;
    int64_t warmup, total;
    double end;
} fsdp_schedule;
/* Returns the factor of a step, by which the caller multiplies its learning rate (fsdp_optim_set_lr). */
FSDP_API double fsdp_schedule_factor(const fsdp_schedule *schedule, int64_t step);

#ifdef __cplusplus
}
#endif
#endif

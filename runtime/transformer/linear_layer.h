/*
 * Parameters of units as f32 computation sees them, and linear layers of them, forward and backward. In:
 * gathered parameters of any floating dtype, arrays of kernels/nn.h; out: arrays, gradients of parameters.
 * Models call it between the hooks of a unit: those of this room, and the MLP of tests.
 */
#ifndef FSDP_LINEAR_LAYER_H
#define FSDP_LINEAR_LAYER_H

#include "kernels/nn.h"
#include <fsdp/unit.h>

/* Memory for f32 copies of parameters that are gathered in another dtype. */
typedef struct fsdp_f32_params {
    fsdp_nn *nn;               /* the caller's; its `finish` reports what layers lacked */
    float *weight, *bias;      /* NULL: all parameters are f32 */
    float *weight_grad;        /* NULL: all gradients are f32 */
    int64_t count;             /* elements of all */
} fsdp_f32_params;

/* Local, once the root is made. casts_grads: gradients have the dtype of gathered parameters. FSDP_ERR_USAGE
 * on a device whose memory the host does not reach. */
FSDP_CHECKED fsdp_status fsdp_f32_params_init(fsdp_f32_params *params, fsdp_nn *nn, const fsdp_model *model,
                                              bool casts_grads, fsdp_error *err);
void fsdp_f32_params_release(fsdp_f32_params *params);

/* A gathered parameter in f32: its data, or a copy in `room`. NULL: see fsdp_param_error. */
const float *fsdp_param_f32(fsdp_param *param, float *room);

/* y = x W + b. W is stored out x in, as PyTorch's Linear has it. */
typedef struct fsdp_linear {
    fsdp_param *weight, *bias; /* bias NULL: none */
    int64_t in, out;           /* of this rank's part */
    bool is_in_by_out;         /* W is stored in x out */
} fsdp_linear;

FSDP_CHECKED fsdp_status fsdp_linear_forward(const fsdp_f32_params *params, const fsdp_linear *layer,
                                             const float *x, float *y, int64_t rows, fsdp_error *err);

typedef struct fsdp_linear_grad {
    const float *x, *dy;
    float *dx;                 /* NULL: none */
    bool adds_dx;              /* to dx, else over it */
    bool adds;                 /* to the gradients that earlier calls of this backward gave; FSDP_ERR_USAGE
                                * unless they are f32 */
    int64_t rows;
} fsdp_linear_grad;
/* Gives the gradients of the weight, the bias and the input. */
FSDP_CHECKED fsdp_status fsdp_linear_backward(const fsdp_f32_params *params, const fsdp_linear *layer,
                                              const fsdp_linear_grad *call, fsdp_error *err);
/* Gives the gradient of the bias alone. */
FSDP_CHECKED fsdp_status fsdp_linear_bias_grad(const fsdp_f32_params *params, const fsdp_linear *layer,
                                               const fsdp_linear_grad *call, fsdp_error *err);

#endif

/*
 * One step of an optimizer on a shard, by PyTorch's single-tensor formulas. Factors that depend only on
 * hyper-parameters are computed here in f64; the loops over elements are in real_loops.h.
 */
#include "kernels/train/tensor.h"

#include "kernels/cast/blocks.h"
#include "kernels/train/factors.h"

#include <math.h>

/* A tensor that the step changes; data NULL: the optimizer has none. */
typedef struct operand {
    void *data;
    fsdp_dtype dtype;
    fsdp_room *room;
    void *numbers; /* of this block */
} operand;

static void begin_block(operand *tensor, fsdp_real real, size_t first, size_t n)
{
    if (tensor->data)
        tensor->numbers = fsdp_real_edit(real, fsdp_element(tensor->data, tensor->dtype, first),
                                         tensor->dtype, n, tensor->room);
}

static void end_block(const operand *tensor, fsdp_real real, size_t first, size_t n)
{
    if (tensor->data)
        fsdp_real_store(real, tensor->numbers, fsdp_element(tensor->data, tensor->dtype, first),
                        tensor->dtype, n);
}

/* The weights that the step updates: the master weights, if there are any. */
static operand weights_of(const fsdp_optim_tensors *tensors, fsdp_room *room)
{
    if (tensors->master)
        return (operand){.data = tensors->master, .dtype = FSDP_F32, .room = room};
    return (operand){.data = tensors->param, .dtype = tensors->param_type, .room = room};
}

/* Rounds master weights, if there are any, into the parameter. */
static void store_param(const fsdp_optim_tensors *tensors, fsdp_real real, const void *numbers,
                        size_t first, size_t n)
{
    if (tensors->master)
        fsdp_real_store(real, numbers, fsdp_element(tensors->param, tensors->param_type, first),
                        tensors->param_type, n);
}

fsdp_adamw_factors fsdp_adamw_factors_of(const fsdp_adamw_step *step)
{
    double bias1 = 1 - pow(step->beta1, (double)step->step);
    double bias2 = 1 - pow(step->beta2, (double)step->step);
    return (fsdp_adamw_factors){
        .grad_scale = step->maximize ? -step->grad_scale : step->grad_scale,
        .keep = 1 - step->lr * step->weight_decay,
        .weight1 = 1 - step->beta1,
        .beta2 = step->beta2,
        .weight2 = 1 - step->beta2,
        .step_size = step->lr / bias1,
        .root_bias2 = sqrt(bias2),
        .eps = step->eps,
        .clip = step->clip,
    };
}

/* Multiplies by the factor of clipping; false: the step is skipped. */
static bool take_clip(double *grad_scale, const double *clip)
{
    if (clip && *clip == FSDP_SKIPPED)
        return false;
    if (clip)
        *grad_scale *= *clip;
    return true;
}

void fsdp_tensor_adamw(const fsdp_optim_tensors *tensors, const fsdp_adamw_step *step)
{
    fsdp_adamw_factors factors = fsdp_adamw_factors_of(step);
    if (!take_clip(&factors.grad_scale, step->clip))
        return;
    fsdp_room rooms[4];
    operand weights = weights_of(tensors, &rooms[0]);
    operand mean = {.data = tensors->moments[0], .dtype = tensors->moment_type, .room = &rooms[1]};
    operand square = {
        .data = tensors->moments[1], .dtype = tensors->moment_type, .room = &rooms[2]};
    fsdp_real real = fsdp_real_of(weights.dtype);
    for (size_t first = 0; first < tensors->count; first += FSDP_LOOP_BLOCK) {
        size_t n = fsdp_block_size(first, tensors->count);
        const void *g = fsdp_element_const(tensors->grad, tensors->grad_type, first);
        begin_block(&weights, real, first, n);
        begin_block(&mean, real, first, n);
        begin_block(&square, real, first, n);
        real.loops->adamw(weights.numbers,
                          fsdp_real_read(real, g, tensors->grad_type, n, &rooms[3]), mean.numbers,
                          square.numbers, n, &factors);
        end_block(&weights, real, first, n);
        end_block(&mean, real, first, n);
        end_block(&square, real, first, n);
        store_param(tensors, real, weights.numbers, first, n);
    }
}

fsdp_sgd_factors fsdp_sgd_factors_of(const fsdp_sgd_step *step)
{
    return (fsdp_sgd_factors){
        .grad_scale = step->maximize ? -step->grad_scale : step->grad_scale,
        .weight_decay = step->weight_decay,
        .momentum = step->momentum,
        .weight = 1 - step->dampening,
        .lr = step->lr,
        .has_momentum = step->momentum != 0,
        .is_first = step->is_first,
        .nesterov = step->nesterov,
        .clip = step->clip,
    };
}

void fsdp_tensor_sgd(const fsdp_optim_tensors *tensors, const fsdp_sgd_step *step)
{
    fsdp_sgd_factors factors = fsdp_sgd_factors_of(step);
    if (!take_clip(&factors.grad_scale, step->clip))
        return;
    fsdp_room rooms[3];
    operand weights = weights_of(tensors, &rooms[0]);
    operand velocity = {.dtype = tensors->moment_type, .room = &rooms[1]};
    if (factors.has_momentum)
        velocity.data = tensors->moments[0];
    fsdp_real real = fsdp_real_of(weights.dtype);
    for (size_t first = 0; first < tensors->count; first += FSDP_LOOP_BLOCK) {
        size_t n = fsdp_block_size(first, tensors->count);
        const void *g = fsdp_element_const(tensors->grad, tensors->grad_type, first);
        begin_block(&weights, real, first, n);
        begin_block(&velocity, real, first, n);
        real.loops->sgd(weights.numbers, fsdp_real_read(real, g, tensors->grad_type, n, &rooms[2]),
                        velocity.numbers, n, &factors);
        end_block(&weights, real, first, n);
        end_block(&velocity, real, first, n);
        store_param(tensors, real, weights.numbers, first, n);
    }
}

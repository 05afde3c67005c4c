/* The loops of a training step over f32, in plain C. */
typedef float real;
#include "kernels/real_loops.h"

const fsdp_loops fsdp_loops_f32_c = {
    .begin_sum = begin_sum,
    .add_sum = add_sum,
    .raise = raise_to,
    .multiply = multiply,
    .divide = divide,
    .settle = settle,
    .is_finite = is_finite,
    .power_sum = power_sum,
    .adamw = adamw,
    .sgd = sgd,
};

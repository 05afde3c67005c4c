/* The loops of a training step over f32, in plain C. */
typedef float real;
#include "kernels/train/bf16_loops.h"

const fsdp_loops fsdp_loops_f32_c = {
    .sum = sum,
    .sum_bf16 = sum_bf16,
    .raise = raise_to,
    .multiply = multiply,
    .divide = divide,
    .is_finite = is_finite,
    .power_sum = power_sum,
    .adamw = adamw,
    .sgd = sgd,
};

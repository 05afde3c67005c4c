/* The loops of a training step over f64, in plain C. */
typedef double real;
#include "kernels/train/real_loops.h"

const fsdp_loops fsdp_loops_f64_c = {
    .sum = sum,
    .raise = raise_to,
    .multiply = multiply,
    .divide = divide,
    .is_finite = is_finite,
    .power_sum = power_sum,
    .adamw = adamw,
    .sgd = sgd,
};

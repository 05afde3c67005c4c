/* The loops of a training step over f64, compiled for AVX2. */
typedef double real;
#include "kernels/real_loops.h"

const fsdp_loops fsdp_loops_f64_avx2 = {
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

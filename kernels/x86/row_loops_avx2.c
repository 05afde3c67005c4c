/* The loops of models, compiled for AVX2. */
#include "kernels/nn/row_loops.h"

const fsdp_nn_loops fsdp_nn_loops_avx2 = FSDP_NN_LOOPS("avx2");

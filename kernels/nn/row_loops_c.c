/* The loops of models, in plain C. */
#include "kernels/nn/row_loops.h"

const fsdp_nn_loops fsdp_nn_loops_c = FSDP_NN_LOOPS("c");

/* Softmax and cross entropy of rows of logits; the gradient takes their place. */
#include "kernels/nn/nn_cpu.h"

#include <math.h>

static void cross_entropy_rows(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_cross_entropy *call = context;
    const fsdp_nn_loops *loops = cpu->loops;
    for (int64_t row = part.first; row < part.last; row++) {
        float *logits = call->logits + row * call->columns;
        const int64_t target = call->targets[row];
        float largest = loops->largest(logits, call->columns);
        double right = (double)logits[target];
        double sum = loops->exponentials(call->keeps_logits ? NULL : logits, logits, call->columns,
                                         1.0f, largest);
        if (call->losses)
            call->losses[row] = log(sum) + ((double)largest - right);
        if (call->keeps_logits)
            continue;
        float right_exp = logits[target];
        loops->multiply(logits, call->columns, (float)(call->scale / sum));
        logits[target] = (float)(call->scale * ((double)right_exp / sum - 1));
    }
}

void fsdp_nn_cpu_cross_entropy(fsdp_nn *nn, const fsdp_nn_cross_entropy *call)
{
    fsdp_nn_cut cut = {.count = call->rows, .grain = 1, .work = call->columns};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, cut, cross_entropy_rows, call);
}

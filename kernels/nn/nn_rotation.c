/* Rotary positions: pairs of elements of a head, head_dim / 2 apart, rotated by an angle of their
 * position. */
#include "kernels/nn/nn_cpu.h"

static void rotate_rows(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_rotation *call = context;
    const int64_t half = call->head_dim / 2;
    for (int64_t row = part.first; row < part.last; row++) {
        int64_t table = (call->first + row % call->length) * half;
        float *x = call->x + row * call->row;
        for (int64_t head = 0; head < call->heads; head++)
            cpu->loops->rotate(x + head * call->head_dim, call->cos + table, call->sin + table,
                               half, call->backward);
    }
}

void fsdp_nn_cpu_rotate(fsdp_nn *nn, const fsdp_nn_rotation *call)
{
    fsdp_nn_cut cut = {
        .count = call->sequences * call->length, .grain = 1, .work = call->heads * call->head_dim};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, cut, rotate_rows, call);
}

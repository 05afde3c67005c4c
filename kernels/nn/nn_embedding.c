/* Rows of a table by their ids. Gradients are cut along columns, so that rows are added in their order. */
#include "kernels/nn/nn_cpu.h"

#include <string.h>

enum { COLUMN_GRAIN = 16 };

static void embed_rows(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_embedding *call = context;
    const int64_t columns = call->columns;
    for (int64_t row = part.first; row < part.last; row++) {
        const float *from = call->table + call->ids[row] * columns;
        float *out = call->out + row * columns;
        int64_t position = call->first + row % call->length;
        if (call->positions)
            cpu->loops->sum(out, from, call->positions + position * columns, columns);
        else
            memcpy(out, from, (size_t)columns * sizeof *out);
    }
}

void fsdp_nn_cpu_embed(fsdp_nn *nn, const fsdp_nn_embedding *call)
{
    fsdp_nn_cut cut = {.count = call->sequences * call->length, .grain = 1, .work = call->columns};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, cut, embed_rows, call);
}

static void embed_grad_columns(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_embedding_grad *call = context;
    const int64_t columns = call->columns, width = part.last - part.first;
    for (int64_t row = 0; row < call->sequences * call->length; row++) {
        const float *dout = call->dout + row * columns + part.first;
        cpu->loops->add(call->dtable + call->ids[row] * columns + part.first, dout, width);
        if (call->dpositions)
            cpu->loops->add(call->dpositions + row % call->length * columns + part.first, dout,
                            width);
    }
}

void fsdp_nn_cpu_embed_grad(fsdp_nn *nn, const fsdp_nn_embedding_grad *call)
{
    fsdp_nn_cut cut = {
        .count = call->columns, .grain = COLUMN_GRAIN, .work = call->sequences * call->length};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, cut, embed_grad_columns, call);
}

/* Norms of rows, and sums of columns, which are cut along columns so that each is summed in row order. */
#include "kernels/nn/nn_cpu.h"

enum { COLUMN_GRAIN = 16 };

static void norm_rows(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    for (int64_t row = part.first; row < part.last; row++)
        cpu->loops->norm(call, row);
}

void fsdp_nn_cpu_norm(fsdp_nn *nn, const fsdp_nn_norm *call)
{
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn,
                    (fsdp_nn_cut){.count = call->rows, .grain = 1, .work = call->columns},
                    norm_rows, call);
}

static void norm_grad_rows(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    for (int64_t row = part.first; row < part.last; row++)
        cpu->loops->norm_grad(call, row);
}

static void norm_grad_columns(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    cpu->loops->norm_grad_columns(call, part.first, part.last);
}

void fsdp_nn_cpu_norm_grad(fsdp_nn *nn, const fsdp_nn_norm_grad *call)
{
    fsdp_nn_cpu *cpu = (fsdp_nn_cpu *)nn;
    fsdp_nn_cpu_run(cpu, (fsdp_nn_cut){.count = call->rows, .grain = 1, .work = call->columns},
                    norm_grad_rows, call);
    if (call->dweight || call->dbias)
        fsdp_nn_cpu_run(
            cpu, (fsdp_nn_cut){.count = call->columns, .grain = COLUMN_GRAIN, .work = call->rows},
            norm_grad_columns, call);
}

typedef struct column_sums_job {
    float *sums;
    const float *x;
    int64_t rows, columns;
} column_sums_job;

static void sum_columns(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const column_sums_job *job = context;
    for (int64_t row = 0; row < job->rows; row++)
        cpu->loops->add(job->sums + part.first, job->x + row * job->columns + part.first,
                        part.last - part.first);
}

void fsdp_nn_cpu_column_sums(fsdp_nn *nn, float *sums, const float *x, int64_t rows,
                             int64_t columns)
{
    column_sums_job job = {sums, x, rows, columns};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn,
                    (fsdp_nn_cut){.count = columns, .grain = COLUMN_GRAIN, .work = rows},
                    sum_columns, &job);
}

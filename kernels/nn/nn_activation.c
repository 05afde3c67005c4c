/* Activations, with or without a gate, and plain sums of arrays. */
#include "kernels/nn/nn_cpu.h"

enum { GRAIN = 64 };

static void activate(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    cpu->loops->activate(call, part.first, part.last);
}

void fsdp_nn_cpu_activate(fsdp_nn *nn, const fsdp_nn_activation *call)
{
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn,
                    (fsdp_nn_cut){.count = call->count, .grain = GRAIN, .work = 1}, activate, call);
}

static void activate_grad(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    cpu->loops->activate_grad(call, part.first, part.last);
}

void fsdp_nn_cpu_activate_grad(fsdp_nn *nn, const fsdp_nn_activation_grad *call)
{
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn,
                    (fsdp_nn_cut){.count = call->count, .grain = GRAIN, .work = 1}, activate_grad,
                    call);
}

typedef struct add_job {
    float *to;
    const float *from;
} add_job;

static void add(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const add_job *job = context;
    cpu->loops->add(job->to + part.first, job->from + part.first, part.last - part.first);
}

void fsdp_nn_cpu_add(fsdp_nn *nn, float *to, const float *from, int64_t count)
{
    add_job job = {to, from};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, (fsdp_nn_cut){.count = count, .grain = GRAIN, .work = 1},
                    add, &job);
}

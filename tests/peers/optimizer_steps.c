/*
 * Steps of an optimizer on numbers from standard input: the parameter, then one gradient per step, all of
 * one type. Writes the parameter after every step. torch_optimizers.py runs it.
 *
 * usage: optimizer_steps adamw f32|f64 COUNT STEPS LR BETA1 BETA2 EPS DECAY MAXIMIZE
 *        optimizer_steps sgd f32|f64 COUNT STEPS LR MOMENTUM DAMPENING DECAY NESTEROV MAXIMIZE
 */
#include "base/core/mem.h"
#include "kernels/train/tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_NUMBER = 5, NUMBERS = 6 };

typedef struct optimizer {
    bool is_adamw;
    fsdp_dtype dtype;
    size_t count;
    fsdp_adamw_step adamw;
    fsdp_sgd_step sgd;
    void *param, *grad, *mean, *square;
} optimizer;

static double number(char **argv, int index)
{
    return strtod(argv[FIRST_NUMBER + index], NULL);
}

static void parse(optimizer *job, char **argv)
{
    job->is_adamw = strcmp(argv[1], "adamw") == 0;
    job->dtype = fsdp_dtype_from_name(argv[2], strlen(argv[2]));
    job->count = strtoul(argv[3], NULL, 10);
    job->adamw = (fsdp_adamw_step){
        .lr = number(argv, 0),
        .beta1 = number(argv, 1),
        .beta2 = number(argv, 2),
        .eps = number(argv, 3),
        .weight_decay = number(argv, 4),
        .maximize = number(argv, 5) != 0,
        .grad_scale = 1,
    };
    if (job->is_adamw)
        return;
    job->sgd = (fsdp_sgd_step){
        .lr = number(argv, 0),
        .momentum = number(argv, 1),
        .dampening = number(argv, 2),
        .weight_decay = number(argv, 3),
        .nesterov = number(argv, 4) != 0,
        .maximize = number(argv, 5) != 0,
        .grad_scale = 1,
    };
}

static void step_once(optimizer *job, int64_t step)
{
    job->adamw.step = step;
    job->sgd.is_first = step == 1;
    const fsdp_optim_tensors tensors = {.param = job->param,
                                        .param_type = job->dtype,
                                        .grad = job->grad,
                                        .grad_type = job->dtype,
                                        .moments = {job->mean, job->square},
                                        .moment_type = job->dtype,
                                        .count = job->count};
    if (job->is_adamw)
        fsdp_tensor_adamw(&tensors, &job->adamw);
    else
        fsdp_tensor_sgd(&tensors, &job->sgd);
}

static bool run(optimizer *job, int64_t steps)
{
    size_t size = fsdp_dtype_size(job->dtype);
    if (!job->param || !job->grad || !job->mean || !job->square ||
        fread(job->param, size, job->count, stdin) != job->count)
        return false;
    for (int64_t step = 1; step <= steps; step++) {
        if (fread(job->grad, size, job->count, stdin) != job->count)
            return false;
        step_once(job, step);
        if (fwrite(job->param, size, job->count, stdout) != job->count)
            return false;
    }
    return fflush(stdout) == 0;
}

int main(int argc, char **argv)
{
    optimizer job = {0};
    if (argc != FIRST_NUMBER + NUMBERS)
        return 2;
    parse(&job, argv);
    size_t size = fsdp_dtype_size(job.dtype);
    job.param = fsdp_alloc(job.count, size);
    job.grad = fsdp_alloc(job.count, size);
    job.mean = fsdp_alloc(job.count, size);
    job.square = fsdp_alloc(job.count, size);
    bool is_done = run(&job, strtol(argv[4], NULL, 10));
    fsdp_free(job.param);
    fsdp_free(job.grad);
    fsdp_free(job.mean);
    fsdp_free(job.square);
    return is_done ? 0 : 1;
}

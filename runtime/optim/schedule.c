/* The factor of a learning rate at a step. See optim.h. */
#include <fsdp/optim.h>

#include <math.h>

/* The progress between the end of the warm-up and the last step, 0 to 1. */
static double progress(const fsdp_schedule *schedule, int64_t step)
{
    if (step >= schedule->total || schedule->total <= schedule->warmup)
        return 1;
    return (double)(step - schedule->warmup) / (double)(schedule->total - schedule->warmup);
}

double fsdp_schedule_factor(const fsdp_schedule *schedule, int64_t step)
{
    if (!schedule)
        return 1;
    const double pi = 3.14159265358979323846;
    if (step < schedule->warmup)
        return (double)(step + 1) / (double)schedule->warmup;
    double rest = 1 - progress(schedule, step);
    if (schedule->kind == FSDP_SCHEDULE_CONSTANT)
        return 1;
    if (schedule->kind == FSDP_SCHEDULE_COSINE)
        rest = (1 - cos(pi * rest)) / 2;
    return schedule->end + (1 - schedule->end) * rest;
}

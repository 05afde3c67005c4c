/* The divisors of a mean of gradients, chosen so that sums do not overflow. See fsdp_divide. */
#include "runtime/group/group_internal.h"

#include <math.h>

double fsdp_divide_before_sum(double factor)
{
    double before = 1;
    while (fmod(factor, before) == 0 && factor / before > before)
        before *= 2;
    return before;
}

/* Narrow types: part of the factor before the sum, the rest after it. */
static fsdp_divide divide_around(double factor)
{
    fsdp_divide divide = {.before = fsdp_divide_before_sum(factor), .alone = 1};
    divide.after = factor / divide.before;
    return divide;
}

static fsdp_divide divide_behind(double factor)
{
    return (fsdp_divide){.before = 1, .after = factor, .alone = 1};
}

/* The reduction divides. A group of one rank has a copy in its place, which divides by `alone`. */
static fsdp_divide divide_within(double factor, int shard_size)
{
    fsdp_divide divide = {.before = 1, .after = 1, .alone = factor};
    if (factor == shard_size) {
        divide.scatter_op = FSDP_REDUCE_AVG;
    } else {
        divide.scatter_op = FSDP_REDUCE_PREMUL_SUM;
        divide.premul = 1 / factor;
    }
    return divide;
}

fsdp_divide fsdp_divide_for(const fsdp_group *group, fsdp_dtype reduce_dtype)
{
    const fsdp_group_settings *settings = group->settings;
    bool is_narrow = reduce_dtype != FSDP_F32 && reduce_dtype != FSDP_BF16;
    double ranks = (double)group->shard_size * group->replicate_size;
    double factor = settings->divide_factor > 0 ? settings->divide_factor : ranks;
    if (is_narrow)
        return divide_around(factor);
    if (settings->forces_sum)
        return divide_behind(factor);
    if (settings->divide_factor > 0)
        return divide_within(factor, group->shard_size);
    fsdp_reduce_op op = ranks > 1 ? FSDP_REDUCE_AVG : FSDP_REDUCE_SUM;
    return (fsdp_divide){.before = 1, .after = 1, .alone = 1, .scatter_op = op, .all_op = op};
}

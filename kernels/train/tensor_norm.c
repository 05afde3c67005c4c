/* Norms of tensors, and clipping by them. See tensor.h. */
#include "kernels/train/tensor.h"

#include "kernels/cast/blocks.h"
#include "kernels/train/factors.h"

#include <math.h>

/* Adds a part to a sum, or keeps the largest one: NaN wins. */
static double take(double total, double part, double p)
{
    if (!isinf(p))
        return total + part;
    return part > total || isnan(part) ? part : total;
}

/*
 * Two levels, so that a GPU, which computes the groups at the same time, needs few additions after each
 * other for the same bits.
 */
double fsdp_tensor_power_sum(const void *data, fsdp_dtype dtype, size_t count, double p)
{
    fsdp_real real = fsdp_real_of(dtype);
    double total = 0, group = 0;
    size_t pieces = 0;
    for (size_t first = 0; first < count; first += FSDP_LOOP_BLOCK) {
        fsdp_room room;
        size_t n = fsdp_block_size(first, count);
        const void *block = fsdp_element_const(data, dtype, first);
        double part = real.loops->power_sum(fsdp_real_read(real, block, dtype, n, &room), n, p);
        group = take(group, part, p);
        if (++pieces == FSDP_POWER_GROUP) {
            total = take(total, group, p);
            group = 0;
            pieces = 0;
        }
    }
    total = take(total, group, p);
    return isnan(total) ? (double)NAN : total;
}

void fsdp_tensor_norm(const fsdp_norm_call *call)
{
    double total = 0;
    for (size_t i = 0; i < call->n; i++)
        total = take(total, call->sums[i], call->p);
    if (call->total_out)
        *call->total_out = isnan(total) ? (double)NAN : total;
    if (call->factor_out)
        *call->factor_out =
            fsdp_clip_factor(fsdp_norm_of(total, call->p), call->max_norm, call->skips);
}

double fsdp_norm_of(double total, double p)
{
    if (p == 2) /* rounded the same everywhere, as pow is not */
        return sqrt(total);
    return isinf(p) ? total : pow(total, 1 / p);
}

double fsdp_clip_factor(double norm, double max_norm, bool skips)
{
    if (skips && !isfinite(norm))
        return FSDP_SKIPPED;
    if (isinf(max_norm))
        return 1;
    double factor = max_norm / (norm + 1e-6);
    return factor < 1 || isnan(factor) ? factor : 1;
}

/* Norms of a piece of a tensor. See tensor.h. */
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

/* Norms of a piece of a tensor. See tensor.h. */
#include "kernels/train/tensor.h"

#include "kernels/cast/blocks.h"

#include <math.h>

double fsdp_tensor_power_sum(const void *data, fsdp_dtype dtype, size_t count, double p)
{
    fsdp_real real = fsdp_real_of(dtype);
    double total = 0;
    for (size_t first = 0; first < count; first += FSDP_LOOP_BLOCK) {
        fsdp_room room;
        size_t n = fsdp_block_size(first, count);
        const void *block = fsdp_element_const(data, dtype, first);
        double part = real.loops->power_sum(fsdp_real_read(real, block, dtype, n, &room), n, p);
        if (!isinf(p))
            total += part;
        else if (part > total || isnan(part))
            total = part;
    }
    return isnan(total) ? (double)NAN : total;
}

/* Numbers of any real floating type plus a factor times f32 numbers, in plain C. See kernels.h. */
#include "kernels/variants.h"

#include <math.h>

enum { BLOCK = 256 };

size_t fsdp_add_scaled_c(void *data, fsdp_dtype type, const float *values, float factor,
                         size_t count)
{
    size_t size = fsdp_dtype_size(type), misfits = 0;
    uint8_t *at = data;
    float sums[BLOCK];
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t n = count - done < BLOCK ? count - done : BLOCK;
        misfits += fsdp_cast_c(sums, FSDP_F32, at + done * size, type, n, FSDP_OVERFLOW_FAIL);
        for (size_t i = 0; i < n; i++) {
            float sum = sums[i] + factor * values[done + i];
            misfits += isfinite(sums[i]) && !isfinite(sum);
            sums[i] = sum;
        }
        misfits += fsdp_cast_c(at + done * size, type, sums, FSDP_F32, n, FSDP_OVERFLOW_FAIL);
    }
    return misfits;
}

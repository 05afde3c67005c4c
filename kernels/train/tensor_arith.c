/* Adding, scaling and checking tensors in place. See tensor.h. */
#include "kernels/train/tensor.h"

#include "kernels/cast/blocks.h"

void fsdp_tensor_add(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                     size_t count)
{
    if (to_type == FSDP_BF16 && from_type == FSDP_BF16) { /* which fold adds in one loop */
        const fsdp_reduction sum = {FSDP_FOLD_SUM, 1, 1};
        fsdp_tensor_fold(to, (const void *[]){to, from}, 2, to_type, count, sum);
        return;
    }
    fsdp_real real = fsdp_real_of(from_type == FSDP_F64 ? from_type : to_type);
    for (size_t first = 0; first < count; first += FSDP_LOOP_BLOCK) {
        fsdp_room rooms[2];
        size_t n = fsdp_block_size(first, count);
        void *data = fsdp_element(to, to_type, first);
        void *sum = fsdp_real_edit(real, data, to_type, n, &rooms[0]);
        const void *more = fsdp_element_const(from, from_type, first);
        const void *numbers[2] = {sum, fsdp_real_read(real, more, from_type, n, &rooms[1])};
        real.loops->sum(sum, numbers, 2, n, 1);
        fsdp_real_store(real, sum, data, to_type, n);
    }
}

static void scale(void *data, fsdp_dtype dtype, size_t count, double by, bool is_divisor)
{
    fsdp_real real = fsdp_real_of(dtype);
    for (size_t first = 0; first < count; first += FSDP_LOOP_BLOCK) {
        fsdp_room room;
        size_t n = fsdp_block_size(first, count);
        void *block = fsdp_element(data, dtype, first);
        void *numbers = fsdp_real_edit(real, block, dtype, n, &room);
        (is_divisor ? real.loops->divide : real.loops->multiply)(numbers, n, by);
        fsdp_real_store(real, numbers, block, dtype, n);
    }
}

void fsdp_tensor_multiply(void *data, fsdp_dtype dtype, size_t count, double factor)
{
    scale(data, dtype, count, factor, false);
}

void fsdp_tensor_divide(void *data, fsdp_dtype dtype, size_t count, double divisor)
{
    scale(data, dtype, count, divisor, true);
}

bool fsdp_tensor_is_finite(const void *data, fsdp_dtype dtype, size_t count)
{
    fsdp_real real = fsdp_real_of(dtype);
    for (size_t first = 0; first < count; first += FSDP_LOOP_BLOCK) {
        fsdp_room room;
        size_t n = fsdp_block_size(first, count);
        const void *block = fsdp_element_const(data, dtype, first);
        if (!real.loops->is_finite(fsdp_real_read(real, block, dtype, n, &room), n))
            return false;
    }
    return true;
}

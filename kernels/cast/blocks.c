/* Blocks of a tensor as real numbers and back. See blocks.h. */
#include "kernels/cast/blocks.h"

fsdp_real fsdp_real_of(fsdp_dtype dtype)
{
    const fsdp_kernels *kernels = fsdp_kernels_get();
    return dtype == FSDP_F64 ? (fsdp_real){FSDP_F64, kernels->f64}
                             : (fsdp_real){FSDP_F32, kernels->f32};
}

/* A piece of a byte buffer may begin anywhere. */
bool fsdp_real_fits(fsdp_real real, const void *data, fsdp_dtype dtype)
{
    return dtype == real.dtype && (uintptr_t)data % fsdp_dtype_size(dtype) == 0;
}

void fsdp_real_load(fsdp_real real, const void *data, fsdp_dtype dtype, size_t count,
                    fsdp_room *room)
{
    fsdp_kernels_get()->cast(room, real.dtype, data, dtype, count, FSDP_OVERFLOW_INF);
}

const void *fsdp_real_read(fsdp_real real, const void *data, fsdp_dtype dtype, size_t count,
                           fsdp_room *room)
{
    if (fsdp_real_fits(real, data, dtype))
        return data;
    fsdp_real_load(real, data, dtype, count, room);
    return room;
}

void *fsdp_real_edit(fsdp_real real, void *data, fsdp_dtype dtype, size_t count, fsdp_room *room)
{
    if (fsdp_real_fits(real, data, dtype))
        return data;
    fsdp_real_load(real, data, dtype, count, room);
    return room;
}

void fsdp_real_store(fsdp_real real, const void *numbers, void *data, fsdp_dtype dtype,
                     size_t count)
{
    if (numbers != data)
        fsdp_kernels_get()->cast(data, dtype, numbers, real.dtype, count, FSDP_OVERFLOW_INF);
}

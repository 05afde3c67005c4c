/*
 * Tensors of any floating type as arrays of real numbers, f32 or f64, a block at a time: where the type is
 * the real one the tensor itself is lent, else the numbers are cast into the caller's room and, after the
 * work, back.
 */
#ifndef FSDP_KERNELS_BLOCKS_H
#define FSDP_KERNELS_BLOCKS_H

#include "kernels/kernels.h"
#include "kernels/loops.h"

typedef struct fsdp_real {
    fsdp_dtype dtype;          /* FSDP_F32 or FSDP_F64 */
    const fsdp_loops *loops;
} fsdp_real;

/* Room for one block of either type. */
typedef union fsdp_room {
    float f32[FSDP_LOOP_BLOCK];
    double f64[FSDP_LOOP_BLOCK];
} fsdp_room;

/* The numbers to compute with in a type: f64 for f64, f32 for all others. */
fsdp_real fsdp_real_of(fsdp_dtype dtype);

static inline void *fsdp_element(void *data, fsdp_dtype dtype, size_t at)
{
    return (char *)data + at * fsdp_dtype_size(dtype);
}

static inline const void *fsdp_element_const(const void *data, fsdp_dtype dtype, size_t at)
{
    return (const char *)data + at * fsdp_dtype_size(dtype);
}

static inline size_t fsdp_block_size(size_t first, size_t count)
{
    return count - first < FSDP_LOOP_BLOCK ? count - first : FSDP_LOOP_BLOCK;
}

/* May count elements at data be used as they are? */
bool fsdp_real_fits(fsdp_real real, const void *data, fsdp_dtype dtype);
/* The numbers, in data or in room. read: not to be changed; edit: fsdp_real_store brings them back. */
const void *fsdp_real_read(fsdp_real real, const void *data, fsdp_dtype dtype, size_t count, fsdp_room *room);
void *fsdp_real_edit(fsdp_real real, void *data, fsdp_dtype dtype, size_t count, fsdp_room *room);
void fsdp_real_load(fsdp_real real, const void *data, fsdp_dtype dtype, size_t count, fsdp_room *room);
void fsdp_real_store(fsdp_real real, const void *numbers, void *data, fsdp_dtype dtype, size_t count);

#endif

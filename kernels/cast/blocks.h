/*
 * Blocks of tensors of any floating type as arrays of f32 or f64. A tensor of that type is used in place;
 * another one is cast into the caller's room and, when it was changed, back.
 *
 * The room kernels/cast takes elements of one floating type and returns them in another, with counts of the
 * values that changed. kernels/train includes this header; other layers call kernels.h and stats.h.
 */
#ifndef FSDP_BLOCKS_H
#define FSDP_BLOCKS_H

#include "kernels/kernels.h"
#include "kernels/loops.h"

typedef struct fsdp_real {
    fsdp_dtype dtype;          /* FSDP_F32 or FSDP_F64 */
    const fsdp_loops *loops;
} fsdp_real;

/* Memory for one block of either type. */
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

/* True when the elements at data can be used in place. */
bool fsdp_real_fits(fsdp_real real, const void *data, fsdp_dtype dtype);
/* The numbers, in data or in room: those of read are constant, fsdp_real_store writes those of edit back. */
const void *fsdp_real_read(fsdp_real real, const void *data, fsdp_dtype dtype, size_t count, fsdp_room *room);
void *fsdp_real_edit(fsdp_real real, void *data, fsdp_dtype dtype, size_t count, fsdp_room *room);
void fsdp_real_load(fsdp_real real, const void *data, fsdp_dtype dtype, size_t count, fsdp_room *room);
void fsdp_real_store(fsdp_real real, const void *numbers, void *data, fsdp_dtype dtype, size_t count);

#endif

/*
 * Strided n-d box copy, which places and gathers every box. Dims that are dense on both
 * sides are merged first, so that a row-contiguous box becomes few memcpy calls; what remains is
 * an odometer over rows of equal units (a dense run, or one element where nothing is dense).
 */
#include "base/data/box_internal.h"
#include "kernels/bytes/copy_plan.h"
#include "kernels/variants.h"

#include <stdbool.h>
#include <string.h>

/* True when the step from one index of outer to the next is the whole extent of the last dim. */
static bool is_dense(const fsdp_copy_plan *plan, int64_t to_stride, int64_t from_stride)
{
    int last = plan->ndim - 1;
    return to_stride == plan->to_strides[last] * plan->len[last] &&
           from_stride == plan->from_strides[last] * plan->len[last];
}

/* Builds the merged dims from the innermost outwards, innermost at index 0. */
static void merge_dims(fsdp_copy_plan *plan, const fsdp_strided_copy *copy)
{
    const int64_t *to_strides = copy->to_strides, *from_strides = copy->from_strides;
    const int64_t *len = copy->len;
    for (int dim = copy->ndim - 1; dim >= 0; dim--) {
        if (len[dim] == 1)
            continue;
        if (plan->ndim > 0 && is_dense(plan, to_strides[dim], from_strides[dim])) {
            plan->len[plan->ndim - 1] *= len[dim];
            continue;
        }
        plan->len[plan->ndim] = len[dim];
        plan->to_strides[plan->ndim] = to_strides[dim];
        plan->from_strides[plan->ndim] = from_strides[dim];
        plan->ndim++;
    }
}

/* A dense innermost dim becomes the unit; then the next one out gives the rows. */
static void absorb_dense_rows(fsdp_copy_plan *plan)
{
    int64_t size = (int64_t)plan->unit;
    if (plan->ndim == 0 || plan->to_strides[0] != size || plan->from_strides[0] != size)
        return;
    plan->unit *= (size_t)plan->len[0];
    plan->ndim--;
    memmove(plan->len, plan->len + 1, (size_t)plan->ndim * sizeof *plan->len);
    memmove(plan->to_strides, plan->to_strides + 1, (size_t)plan->ndim * sizeof(int64_t));
    memmove(plan->from_strides, plan->from_strides + 1, (size_t)plan->ndim * sizeof(int64_t));
}

/* Inlined with a constant unit, the memcpy is one load and one store. */
static inline void copy_units(uint8_t *to, int64_t to_stride, const uint8_t *from,
                              int64_t from_stride, int64_t count, size_t unit)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(to + i * to_stride, from + i * from_stride, unit);
}

static void copy_rows(uint8_t *to, const uint8_t *from, const fsdp_copy_plan *plan)
{
    int64_t count = plan->ndim > 0 ? plan->len[0] : 1;
    int64_t to_stride = plan->ndim > 0 ? plan->to_strides[0] : 0;
    int64_t from_stride = plan->ndim > 0 ? plan->from_strides[0] : 0;
    switch (plan->unit) {
    case 1: copy_units(to, to_stride, from, from_stride, count, 1); break;
    case 2: copy_units(to, to_stride, from, from_stride, count, 2); break;
    case 4: copy_units(to, to_stride, from, from_stride, count, 4); break;
    case 8: copy_units(to, to_stride, from, from_stride, count, 8); break;
    case 16: copy_units(to, to_stride, from, from_stride, count, 16); break;
    default: copy_units(to, to_stride, from, from_stride, count, plan->unit); break;
    }
}

/* Steps the odometer of the dims outside the rows; false after the last position. */
static bool step(const fsdp_copy_plan *plan, int64_t *index, int64_t *to_at, int64_t *from_at)
{
    for (int dim = 1; dim < plan->ndim; dim++) {
        *to_at += plan->to_strides[dim];
        *from_at += plan->from_strides[dim];
        if (++index[dim] < plan->len[dim])
            return true;
        *to_at -= plan->to_strides[dim] * plan->len[dim];
        *from_at -= plan->from_strides[dim] * plan->len[dim];
        index[dim] = 0;
    }
    return false;
}

bool fsdp_copy_plan_make(fsdp_copy_plan *plan_out, const fsdp_strided_copy *copy)
{
    for (int dim = 0; dim < copy->ndim; dim++) {
        if (copy->len[dim] == 0)
            return false;
    }
    plan_out->ndim = 0;
    plan_out->unit = copy->element_size;
    merge_dims(plan_out, copy);
    absorb_dense_rows(plan_out);
    return true;
}

void fsdp_copy_box(const fsdp_strided_copy *copy)
{
    fsdp_copy_plan plan;
    if (!fsdp_copy_plan_make(&plan, copy))
        return;

    int64_t index[FSDP_MAX_DIMS] = {0};
    int64_t to_at = 0, from_at = 0;
    do {
        copy_rows((uint8_t *)copy->to + to_at, (const uint8_t *)copy->from + from_at, &plan);
    } while (step(&plan, index, &to_at, &from_at));
}

size_t fsdp_copy_run(const fsdp_strided_copy *copy)
{
    fsdp_copy_plan plan;
    return fsdp_copy_plan_make(&plan, copy) && plan.ndim == 0 ? plan.unit : 0;
}

/* Byte strides of a packed box; returns the offset of an element. */
static int64_t packed_strides(const fsdp_box *box, const int64_t *lo, size_t element_size,
                              int64_t *strides)
{
    int64_t offset = 0;
    fsdp_box_strides(box->ndim, box->len, strides);
    for (int dim = 0; dim < box->ndim; dim++) {
        strides[dim] *= (int64_t)element_size;
        offset += (lo[dim] - box->lo[dim]) * strides[dim];
    }
    return offset;
}

bool fsdp_shared_copy_make(fsdp_shared_copy *made, const fsdp_box *to_box, void *to,
                           const fsdp_box *from_box, const void *from, size_t element_size)
{
    if (!fsdp_box_intersect(to_box, from_box, &made->shared))
        return false;
    const int64_t *lo = made->shared.lo;
    int64_t to_offset = packed_strides(to_box, lo, element_size, made->to_strides);
    int64_t from_offset = packed_strides(from_box, lo, element_size, made->from_strides);
    made->copy = (fsdp_strided_copy){.to = (uint8_t *)to + to_offset,
                                     .to_strides = made->to_strides,
                                     .from = (const uint8_t *)from + from_offset,
                                     .from_strides = made->from_strides,
                                     .ndim = made->shared.ndim,
                                     .len = made->shared.len,
                                     .element_size = element_size};
    return true;
}

void fsdp_copy_shared(const fsdp_box *to_box, void *to, const fsdp_box *from_box, const void *from,
                      size_t element_size)
{
    fsdp_shared_copy made;
    if (fsdp_shared_copy_make(&made, to_box, to, from_box, from, element_size))
        fsdp_copy_box(&made.copy);
}

void fsdp_copy_large_c(void *to, const void *from, size_t size)
{
    memcpy(to, from, size);
}

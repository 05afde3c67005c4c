/*
 * Strided n-d box copies. A box is rows of units: a long unit is cut into units of 16 bytes as rectangles
 * are, a short one at addresses that are aligned to it is one element, one thread each. See cuda_kernels.h.
 */
#include "kernels/bytes/copy_plan.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/units.cuh"

enum { DIMS = 6 }; /* of one item; a loop of the host goes through the others */

struct box_item {
    uint8_t *to;
    const uint8_t *from;
    uint64_t rows, unit; /* bytes */
    int64_t len[DIMS], to_strides[DIMS], from_strides[DIMS];
    uint32_t first_tile;
    uint16_t ndim, is_element;
};

template <uint32_t MOST> using box_batch = fsdp_batch<no_common, box_item, MOST>;
constexpr uint32_t MANY = fsdp_many<no_common, box_item>();

struct box_row {
    uint8_t *to;
    const uint8_t *from;
};

/* Divisions of 64 bits are slow, and rarely needed. */
FSDP_DEVICE box_row row_at(const box_item &box, uint64_t row)
{
    int64_t to = 0, from = 0;
#pragma unroll 1
    for (uint32_t dim = 0; dim < box.ndim; dim++) {
        uint64_t len = (uint64_t)box.len[dim], rest;
        if ((row | len) >> 32 == 0)
            rest = (uint32_t)row / (uint32_t)len;
        else
            rest = row / len;
        int64_t index = (int64_t)(row - rest * len);
        to += index * box.to_strides[dim];
        from += index * box.from_strides[dim];
        row = rest;
    }
    return {box.to + to, box.from + from};
}

FSDP_DEVICE void copy_element(const box_row &row, uint64_t size)
{
    switch (size) {
    case 16: *(uint4 *)row.to = *(const uint4 *)row.from; break;
    case 8: *(uint64_t *)row.to = *(const uint64_t *)row.from; break;
    case 4: *(uint32_t *)row.to = *(const uint32_t *)row.from; break;
    case 2: *(uint16_t *)row.to = *(const uint16_t *)row.from; break;
    default: *row.to = *row.from; break;
    }
}

FSDP_DEVICE void copy_some(const box_row &row, uint64_t index, uint64_t bytes)
{
    fsdp_unit unit = fsdp_unit_at(index, fsdp_skew(row.to, 1), bytes);
    if (fsdp_unit_is_whole(unit))
        *(uint4 *)(row.to + unit.at) = fsdp_load_16(row.from + unit.at);
    else
        fsdp_copy_part(row.to + unit.at, row.from + unit.at, unit.mask);
}

template <uint32_t MOST> FSDP_KERNEL(FSDP_THREADS, 3) copy_boxes(FSDP_PARAMS(box_batch<MOST>) batch)
{
    const box_item &box = fsdp_find_item(batch.items, batch.n);
    const uint64_t row_units = box.is_element ? 1 : fsdp_row_units(box.unit);
    const fsdp_place begin = fsdp_tile_begin(blockIdx.x - box.first_tile, row_units);
#pragma unroll 1
    for (uint32_t offset = threadIdx.x; offset < FSDP_TILE_UNITS; offset += FSDP_THREADS) {
        fsdp_place place = fsdp_place_behind(begin, offset, row_units);
        if (place.row >= box.rows)
            return;
        box_row row = row_at(box, place.row);
        if (box.is_element)
            copy_element(row, box.unit);
        else
            copy_some(row, place.unit, box.unit);
    }
}

/* --- the host's side -------------------------------------------------------------------------- */

static bool is_element(const box_item &item)
{
    uint64_t bits = (uint64_t)(uintptr_t)item.to | (uint64_t)(uintptr_t)item.from;
    for (int dim = 0; dim < item.ndim; dim++)
        bits |= (uint64_t)item.to_strides[dim] | (uint64_t)item.from_strides[dim];
    bool is_power = (item.unit & (item.unit - 1)) == 0;
    return is_power && item.unit <= FSDP_UNIT && bits % item.unit == 0;
}

static int add_box(fsdp_batches<no_common, box_item> *batches, const fsdp_copy_plan &plan,
                   uint8_t *to, const uint8_t *from)
{
    box_item item = {};
    item.to = to;
    item.from = from;
    item.rows = 1;
    item.unit = plan.unit;
    item.ndim = (uint16_t)(plan.ndim < DIMS ? plan.ndim : (int)DIMS);
    for (int dim = 0; dim < item.ndim; dim++) {
        item.rows *= (uint64_t)plan.len[dim];
        item.len[dim] = plan.len[dim];
        item.to_strides[dim] = plan.to_strides[dim];
        item.from_strides[dim] = plan.from_strides[dim];
    }
    item.is_element = is_element(item);
    uint64_t row_units = item.is_element ? 1 : fsdp_row_units(item.unit);
    return batches->add(item, fsdp_unit_tiles(item.rows * row_units));
}

/* Steps the odometer of the dims that an item has no space for; false after the last position. */
static bool step(const fsdp_copy_plan &plan, int64_t *index)
{
    for (int dim = DIMS; dim < plan.ndim; dim++) {
        if (++index[dim] < plan.len[dim])
            return true;
        index[dim] = 0;
    }
    return false;
}

static int add_boxes(fsdp_batches<no_common, box_item> *batches, const fsdp_strided_copy &copy)
{
    fsdp_copy_plan plan;
    int64_t index[FSDP_MAX_DIMS] = {};
    int error = FSDP_CUDA_OK;
    if (!fsdp_copy_plan_make(&plan, &copy))
        return FSDP_CUDA_OK;
    do {
        int64_t to = 0, from = 0;
        for (int dim = DIMS; dim < plan.ndim; dim++) {
            to += index[dim] * plan.to_strides[dim];
            from += index[dim] * plan.from_strides[dim];
        }
        error = add_box(batches, plan, (uint8_t *)copy.to + to, (const uint8_t *)copy.from + from);
    } while (!error && step(plan, index));
    return error;
}

int fsdp_cuda_copy_box(const fsdp_strided_copy *copies, size_t n, void *stream)
{
    fsdp_batches<no_common, box_item> batches(
        {copy_boxes<FSDP_FEW>, copy_boxes<MANY>, FSDP_THREADS, stream}, {});
    for (size_t i = 0; i < n; i++) {
        int error = add_boxes(&batches, copies[i]);
        if (error)
            return error;
    }
    return batches.launch();
}

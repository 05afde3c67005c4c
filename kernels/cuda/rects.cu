/*
 * Rectangles of elements: chunk-cat, copy-out, casts and zeros, any mixture in one launch. Elements that
 * keep their type are copied as bytes. See cuda_kernels.h.
 */
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/numbers.cuh"

/* Width and pitches count bytes where the types are 0, as in copies, else elements. */
struct rect_item {
    uint8_t *to;
    const uint8_t *from; /* NULL: zeros */
    int64_t rows, width, to_pitch, from_pitch;
    uint32_t first_tile;
    uint8_t to_type, from_type;
};

template <uint32_t MOST> using rect_batch = fsdp_batch<no_common, rect_item, MOST>;

/* --- copies ----------------------------------------------------------------------------------- */

/* All loads come before the stores, so that several are under way. */
FSDP_DEVICE void copy_tile(const rect_item &rect, uint32_t tile)
{
    uint64_t row_units = fsdp_row_units<FSDP_PIECE>((uint64_t)rect.width);
    fsdp_place begin = fsdp_tile_begin(tile, row_units);
    uint8_t *to[FSDP_UNITS_EACH];
    uint4 data[FSDP_UNITS_EACH];
#pragma unroll
    for (int i = 0; i < FSDP_UNITS_EACH; i++) {
        uint32_t offset = threadIdx.x + (uint32_t)i * FSDP_THREADS;
        fsdp_place place = fsdp_place_behind(begin, offset, row_units);
        to[i] = nullptr;
        data[i] = {0, 0, 0, 0};
        if (place.row >= (uint64_t)rect.rows)
            continue;
        uint8_t *row = rect.to + (int64_t)place.row * rect.to_pitch;
        fsdp_unit unit = fsdp_unit_at<FSDP_PIECE>(place.unit, fsdp_skew<FSDP_PIECE>(row, 1),
                                                  (uint64_t)rect.width);
        const uint8_t *from =
            rect.from ? rect.from + (int64_t)place.row * rect.from_pitch + unit.at : nullptr;
        if (!fsdp_unit_is_whole<FSDP_PIECE>(unit)) {
            fsdp_copy_piece(row + unit.at, from, unit.mask);
            continue;
        }
        to[i] = row + unit.at;
        if (from)
            data[i] = fsdp_load_16(from);
    }
#pragma unroll
    for (int i = 0; i < FSDP_UNITS_EACH; i++) {
        if (to[i])
            *(uint4 *)to[i] = data[i];
    }
}

/* --- casts ------------------------------------------------------------------------------------ */

FSDP_DEVICE void cast_unit(const rect_item &rect, uint8_t *to, const uint8_t *from, fsdp_unit unit)
{
    if (rect.from_type == FSDP_F64) {
        double numbers[FSDP_UNIT];
        fsdp_read(numbers, from, FSDP_F64, unit);
        fsdp_write(to, rect.to_type, unit, numbers);
        return;
    }
    float numbers[FSDP_UNIT];
    fsdp_read(numbers, from, rect.from_type, unit);
    fsdp_write(to, rect.to_type, unit, numbers);
}

FSDP_DEVICE void cast_tile(const rect_item &rect, uint32_t tile)
{
    uint64_t row_units = fsdp_row_units<FSDP_UNIT>((uint64_t)rect.width);
    fsdp_place begin = fsdp_tile_begin(tile, row_units);
    uint32_t to_size = fsdp_type_size(rect.to_type), from_size = fsdp_type_size(rect.from_type);
#pragma unroll 1
    for (uint32_t offset = threadIdx.x; offset < FSDP_TILE_UNITS; offset += FSDP_THREADS) {
        fsdp_place place = fsdp_place_behind(begin, offset, row_units);
        if (place.row >= (uint64_t)rect.rows)
            return;
        uint8_t *to = rect.to + (int64_t)place.row * rect.to_pitch * to_size;
        const uint8_t *from = rect.from + (int64_t)place.row * rect.from_pitch * from_size;
        fsdp_unit unit = fsdp_unit_at<FSDP_UNIT>(place.unit, fsdp_skew<FSDP_UNIT>(to, to_size),
                                                 (uint64_t)rect.width);
        if (unit.mask != 0)
            cast_unit(rect, to, from, unit);
    }
}

template <uint32_t MOST> FSDP_KERNEL(FSDP_THREADS, 3) copy_rects(FSDP_PARAMS(rect_batch<MOST>) batch)
{
    const rect_item &rect = fsdp_find_item(batch.items, batch.n);
    if (rect.to_type == FSDP_DTYPE_NONE)
        copy_tile(rect, blockIdx.x - rect.first_tile);
    else
        cast_tile(rect, blockIdx.x - rect.first_tile);
}

/* --- the host's side -------------------------------------------------------------------------- */

static rect_item copy_item(const fsdp_rect &rect)
{
    int64_t size = (int64_t)fsdp_dtype_size(rect.to_type);
    rect_item item = {
        (uint8_t *)rect.to,   (const uint8_t *)rect.from, rect.rows, rect.width * size,
        rect.to_pitch * size, rect.from_pitch * size,     0,         FSDP_DTYPE_NONE,
        FSDP_DTYPE_NONE};
    bool is_dense = item.to_pitch == item.width && (!item.from || item.from_pitch == item.width);
    if (is_dense) {
        item.width *= item.rows;
        item.rows = 1;
    }
    return item;
}

static rect_item cast_item(const fsdp_rect &rect)
{
    rect_item item = {(uint8_t *)rect.to,
                      (const uint8_t *)rect.from,
                      rect.rows,
                      rect.width,
                      rect.to_pitch,
                      rect.from_pitch,
                      0,
                      (uint8_t)rect.to_type,
                      (uint8_t)rect.from_type};
    if (item.to_pitch == item.width && item.from_pitch == item.width) {
        item.width *= item.rows;
        item.rows = 1;
    }
    return item;
}

static uint64_t tiles_of(const rect_item &item)
{
    uint64_t width = (uint64_t)item.width, rows = (uint64_t)item.rows;
    return fsdp_unit_tiles(rows * (item.to_type == FSDP_DTYPE_NONE
                                       ? fsdp_row_units<FSDP_PIECE>(width)
                                       : fsdp_row_units<FSDP_UNIT>(width)));
}

int fsdp_cuda_rects(const fsdp_rect *rects, size_t n, void *stream)
{
    constexpr uint32_t MANY = fsdp_many<no_common, rect_item>();
    fsdp_batches<no_common, rect_item> batches(
        {copy_rects<FSDP_FEW>, copy_rects<MANY>, FSDP_THREADS, stream}, {});
    for (size_t i = 0; i < n; i++) {
        const fsdp_rect &rect = rects[i];
        if (rect.rows <= 0 || rect.width <= 0)
            continue;
        bool is_copy = !rect.from || rect.to_type == rect.from_type;
        rect_item item = is_copy ? copy_item(rect) : cast_item(rect);
        int error = batches.add(item, tiles_of(item));
        if (error)
            return error;
    }
    return batches.launch();
}

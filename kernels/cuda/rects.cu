/*
 * Rectangles of elements: chunk-cat, copy-out, casts and zeros, any mixture in one launch. Elements that
 * keep their type are copied as bytes. See cuda_kernels.h.
 */
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/numbers.cuh"

/* A tile is 1,024 units of a rectangle, 4 of each thread. */
enum { CAST_UNIT = 4 /* elements */ };

/* Width and pitches count bytes where the types are 0, as in copies, else elements. */
struct rect_item {
    uint8_t *to;
    const uint8_t *from; /* NULL: zeros */
    int64_t rows, width, to_pitch, from_pitch;
    uint32_t first_tile;
    uint8_t to_type, from_type;
    bool is_aligned; /* rows begin and end at multiples of a unit, or a single one begins so */
};

template <uint32_t MOST> using rect_batch = fsdp_batch<no_common, rect_item, MOST>;

/* A row has one unit more where it may begin in the middle of one. */
static inline __host__ __device__ uint64_t units_of_row(const rect_item &rect)
{
    const uint64_t unit = rect.to_type == FSDP_DTYPE_NONE ? (int)FSDP_UNIT : (int)CAST_UNIT;
    const uint64_t skew = rect.is_aligned ? 0 : unit - 1;
    return ((uint64_t)rect.width + skew + unit - 1) / unit;
}

/* True when the tile has only whole units, at aligned addresses. */
FSDP_DEVICE bool is_plain(const rect_item &rect, uint32_t tile, uint32_t unit)
{
    const uint64_t whole = (uint64_t)rect.rows * ((uint64_t)rect.width / unit);
    return rect.is_aligned && ((uint64_t)tile + 1) * FSDP_TILE_UNITS <= whole;
}

/* The places of this thread's units in a tile. */
struct tile_places {
    fsdp_place places[FSDP_UNITS_EACH];

    __device__ __forceinline__ tile_places(const rect_item &rect, uint32_t tile)
    {
        const uint64_t row_units = units_of_row(rect);
        const fsdp_place begin = fsdp_tile_begin(tile, row_units);
#pragma unroll
        for (uint32_t i = 0; i < FSDP_UNITS_EACH; i++)
            places[i] = fsdp_place_behind(begin, threadIdx.x + i * FSDP_THREADS, row_units);
    }

    __device__ __forceinline__ int64_t offset(int i, int64_t pitch, int unit) const
    {
        return (int64_t)places[i].row * pitch + (int64_t)places[i].unit * unit;
    }
};

/* --- copies ----------------------------------------------------------------------------------- */

FSDP_DEVICE void copy_whole(const rect_item &rect, const tile_places &at)
{
    uint4 data[FSDP_UNITS_EACH] = {};
    if (rect.from) {
#pragma unroll
        for (int i = 0; i < FSDP_UNITS_EACH; i++)
            data[i] = *(const uint4 *)(rect.from + at.offset(i, rect.from_pitch, FSDP_UNIT));
    }
#pragma unroll
    for (int i = 0; i < FSDP_UNITS_EACH; i++)
        *(uint4 *)(rect.to + at.offset(i, rect.to_pitch, FSDP_UNIT)) = data[i];
}

/* Loads come before stores here, too: rows at any address have mostly whole units. */
FSDP_DEVICE void copy_units(const rect_item &rect, const tile_places &at)
{
    uint8_t *to[FSDP_UNITS_EACH] = {};
    const uint8_t *from[FSDP_UNITS_EACH] = {};
    fsdp_vectors data[FSDP_UNITS_EACH] = {};
#pragma unroll
    for (int i = 0; i < FSDP_UNITS_EACH; i++) {
        const fsdp_place &place = at.places[i];
        if (place.row >= (uint64_t)rect.rows)
            continue;
        uint8_t *row = rect.to + (int64_t)place.row * rect.to_pitch;
        fsdp_unit unit = fsdp_unit_at(place.unit, fsdp_skew(row, 1), (uint64_t)rect.width);
        from[i] = rect.from ? rect.from + (int64_t)place.row * rect.from_pitch + unit.at : nullptr;
        if (!fsdp_unit_is_whole(unit)) {
            fsdp_copy_part(row + unit.at, from[i], unit.mask);
            continue;
        }
        to[i] = row + unit.at;
        if (from[i])
            data[i] = fsdp_load_around(from[i], FSDP_UNIT);
    }
#pragma unroll
    for (int i = 0; i < FSDP_UNITS_EACH; i++) {
        if (to[i])
            *(uint4 *)to[i] = fsdp_take_16(data[i], from[i]);
    }
}

FSDP_DEVICE void copy_tile(const rect_item &rect, uint32_t tile)
{
    const tile_places at(rect, tile);
    if (is_plain(rect, tile, FSDP_UNIT))
        copy_whole(rect, at);
    else
        copy_units(rect, at);
}

/* --- casts ------------------------------------------------------------------------------------ */

template <uint32_t TO, uint32_t FROM>
FSDP_DEVICE bool cast_whole(const rect_item &rect, const tile_places &at)
{
    fsdp_vector<FROM, CAST_UNIT> data[FSDP_UNITS_EACH];
#pragma unroll
    for (int i = 0; i < FSDP_UNITS_EACH; i++)
        fsdp_load(&data[i], rect.from, at.offset(i, rect.from_pitch, CAST_UNIT));
#pragma unroll
    for (int i = 0; i < FSDP_UNITS_EACH; i++) {
        float numbers[CAST_UNIT];
#pragma unroll
        for (int k = 0; k < CAST_UNIT; k++)
            numbers[k] = fsdp_get(data[i], k);
        fsdp_store<TO, CAST_UNIT>(rect.to, at.offset(i, rect.to_pitch, CAST_UNIT), numbers);
    }
    return true;
}

template <uint32_t FROM> FSDP_DEVICE bool cast_from(const rect_item &rect, const tile_places &at)
{
    switch (rect.to_type) {
    case FSDP_F32: return cast_whole<FSDP_F32, FROM>(rect, at);
    case FSDP_BF16: return cast_whole<FSDP_BF16, FROM>(rect, at);
    case FSDP_F16: return cast_whole<FSDP_F16, FROM>(rect, at);
    case FSDP_F8_E4M3FN: return cast_whole<FSDP_F8_E4M3FN, FROM>(rect, at);
    case FSDP_F8_E5M2: return cast_whole<FSDP_F8_E5M2, FROM>(rect, at);
    default: return false;
    }
}

/* False when whole tiles are not cast with these types. */
FSDP_DEVICE bool cast_plain(const rect_item &rect, const tile_places &at)
{
    switch (rect.from_type) {
    case FSDP_F32: return cast_from<FSDP_F32>(rect, at);
    case FSDP_BF16: return cast_from<FSDP_BF16>(rect, at);
    case FSDP_F16: return cast_from<FSDP_F16>(rect, at);
    case FSDP_F8_E4M3FN: return cast_from<FSDP_F8_E4M3FN>(rect, at);
    case FSDP_F8_E5M2: return cast_from<FSDP_F8_E5M2>(rect, at);
    default: return false;
    }
}

FSDP_DEVICE void cast_element(const rect_item &rect, int64_t to, int64_t from)
{
    if (rect.from_type == FSDP_F64)
        fsdp_write(rect.to, rect.to_type, to, fsdp_read<double>(rect.from, FSDP_F64, from));
    else
        fsdp_write(rect.to, rect.to_type, to, fsdp_read<float>(rect.from, rect.from_type, from));
}

/* 4 elements of a row that begin at a vector of the memory that is written, where its address is one of an
 * element. Of the first and the last unit of a row, some are not there. */
struct cast_unit {
    int64_t at, to, from; /* the first element: in the row, and in both tensors */
    bool is_whole;
};

FSDP_DEVICE cast_unit cast_unit_at(const rect_item &rect, const fsdp_place &place)
{
    const uint32_t size = fsdp_type_size(rect.to_type);
    const int64_t to = (int64_t)place.row * rect.to_pitch,
                  from = (int64_t)place.row * rect.from_pitch;
    const uint32_t skew = fsdp_skew(rect.to + to * (int64_t)size, size) % CAST_UNIT;
    const int64_t at = (int64_t)place.unit * CAST_UNIT - (int64_t)skew;
    return {at, to + at, from + at, at >= 0 && at + CAST_UNIT <= rect.width};
}

FSDP_DEVICE void cast_elements(const rect_item &rect, const cast_unit &unit)
{
#pragma unroll 1
    for (int i = 0; i < CAST_UNIT; i++) {
        if (unit.at + i >= 0 && unit.at + i < rect.width)
            cast_element(rect, unit.to + i, unit.from + i);
    }
}

/* Whole units, whose source may have any address: shards of odd numbers of ranks begin everywhere. */
template <uint32_t TO, uint32_t FROM>
FSDP_DEVICE bool cast_shifted(const rect_item &rect, const tile_places &at)
{
    fsdp_source<FROM, CAST_UNIT, true> data[FSDP_UNITS_EACH] = {};
    int64_t to[FSDP_UNITS_EACH], from[FSDP_UNITS_EACH];
    bool is_whole[FSDP_UNITS_EACH] = {};
#pragma unroll
    for (int i = 0; i < FSDP_UNITS_EACH; i++) {
        if (at.places[i].row >= (uint64_t)rect.rows)
            continue;
        const cast_unit unit = cast_unit_at(rect, at.places[i]);
        if (!unit.is_whole)
            continue;
        is_whole[i] = true;
        to[i] = unit.to;
        from[i] = unit.from;
        data[i].load(rect.from, unit.from);
    }
#pragma unroll
    for (int i = 0; i < FSDP_UNITS_EACH; i++) {
        if (!is_whole[i])
            continue;
        const fsdp_vector<FROM, CAST_UNIT> vector = data[i].take(rect.from, from[i]);
        float numbers[CAST_UNIT];
#pragma unroll
        for (int k = 0; k < CAST_UNIT; k++)
            numbers[k] = fsdp_get(vector, k);
        fsdp_store<TO, CAST_UNIT>(rect.to, to[i], numbers);
    }
    return true;
}

/* False when all units of such a tile are cast one element at a time. */
FSDP_DEVICE bool cast_units(const rect_item &rect, const tile_places &at)
{
    if (!fsdp_is_aligned(rect.to, fsdp_type_size(rect.to_type)))
        return false;
    switch (fsdp_types(rect.to_type, rect.from_type)) {
    case fsdp_types(FSDP_F32, FSDP_BF16): return cast_shifted<FSDP_F32, FSDP_BF16>(rect, at);
    case fsdp_types(FSDP_F32, FSDP_F16): return cast_shifted<FSDP_F32, FSDP_F16>(rect, at);
    case fsdp_types(FSDP_BF16, FSDP_F32): return cast_shifted<FSDP_BF16, FSDP_F32>(rect, at);
    case fsdp_types(FSDP_F16, FSDP_F32): return cast_shifted<FSDP_F16, FSDP_F32>(rect, at);
    default: return false;
    }
}

FSDP_DEVICE void cast_tile(const rect_item &rect, uint32_t tile)
{
    const tile_places at(rect, tile);
    if (is_plain(rect, tile, CAST_UNIT) && cast_plain(rect, at))
        return;
    const bool casts_whole = cast_units(rect, at);
    const uint64_t row_units = units_of_row(rect);
    const fsdp_place begin = fsdp_tile_begin(tile, row_units);
#pragma unroll 1
    for (uint32_t offset = threadIdx.x; offset < FSDP_TILE_UNITS; offset += FSDP_THREADS) {
        const fsdp_place place = fsdp_place_behind(begin, offset, row_units);
        if (place.row >= (uint64_t)rect.rows)
            return;
        const cast_unit unit = cast_unit_at(rect, place);
        if (!casts_whole || !unit.is_whole)
            cast_elements(rect, unit);
    }
}

template <uint32_t MOST>
FSDP_KERNEL(FSDP_THREADS, 4)
copy_rects(FSDP_PARAMS(rect_batch<MOST>) batch)
{
    const rect_item &rect = fsdp_find_item(batch.items, batch.n);
    const uint32_t tile = blockIdx.x - rect.first_tile;
    if (rect.to_type == FSDP_DTYPE_NONE)
        copy_tile(rect, tile);
    else
        cast_tile(rect, tile);
}

/* --- the host's side -------------------------------------------------------------------------- */

/* Rows without gaps between them are one row. */
static rect_item joined(rect_item item)
{
    if (item.to_pitch == item.width && (!item.from || item.from_pitch == item.width)) {
        item.width *= item.rows;
        item.rows = 1;
    }
    return item;
}

/* `unit`: elements, or bytes, whose size in the two tensors is that of their vectors. */
static bool is_aligned(const rect_item &item, int64_t unit, uint64_t to_size, uint64_t from_size)
{
    const uint64_t to = (uint64_t)(uintptr_t)item.to, from = (uint64_t)(uintptr_t)item.from;
    bool are_rows = item.rows == 1 || (item.width % unit == 0 && item.to_pitch % unit == 0 &&
                                       (!item.from || item.from_pitch % unit == 0));
    return are_rows && to % ((uint64_t)unit * to_size) == 0 &&
           from % ((uint64_t)unit * from_size) == 0;
}

static rect_item copy_item(const fsdp_rect &rect)
{
    int64_t size = (int64_t)fsdp_dtype_size(rect.to_type);
    rect_item item = joined({(uint8_t *)rect.to, (const uint8_t *)rect.from, rect.rows,
                             rect.width * size, rect.to_pitch * size, rect.from_pitch * size, 0,
                             FSDP_DTYPE_NONE, FSDP_DTYPE_NONE, false});
    item.is_aligned = is_aligned(item, FSDP_UNIT, 1, 1);
    return item;
}

static rect_item cast_item(const fsdp_rect &rect)
{
    rect_item item = joined({(uint8_t *)rect.to, (const uint8_t *)rect.from, rect.rows, rect.width,
                             rect.to_pitch, rect.from_pitch, 0, (uint8_t)rect.to_type,
                             (uint8_t)rect.from_type, false});
    item.is_aligned =
        is_aligned(item, CAST_UNIT, fsdp_type_size(item.to_type), fsdp_type_size(item.from_type));
    return item;
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
        int error = batches.add(item, fsdp_unit_tiles((uint64_t)item.rows * units_of_row(item)));
        if (error)
            return error;
    }
    return batches.launch();
}

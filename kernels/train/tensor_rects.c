/*
 * Rectangles of elements: the copies of a training step. Rows without a cast use the box copy kernel, or
 * bypass the caches when there is much to copy; rows with a cast use the cast kernel, short ones packed into
 * a block first. Rectangles that are columns of one tensor are copied together, row by row, so that its
 * memory is visited once, in order. See rects.h.
 */
#include "kernels/train/tensor.h"

#include "kernels/cast/blocks.h"

#include <string.h>

enum {
    SHORT_ROW = 128, /* elements; of a cast */
    PACK_BYTES = 8192,
    LARGE = 8 << 20,      /* bytes: more than a core's share of the caches */
    LARGE_LIST = 1 << 20, /* of a step, whose other tensors have filled the caches */
    LONG_ROW = 4096,      /* bytes, worth a copy past the caches */
    COLUMN_ROW = 256      /* bytes; shorter rows are faster many at a time */
};

void fsdp_tensor_copy(void *to, const void *from, size_t size, size_t together)
{
    if (together >= LARGE && size >= LONG_ROW)
        fsdp_kernels_get()->copy_large(to, from, size);
    else
        memcpy(to, from, size);
}

/* --- one rectangle ---------------------------------------------------------------------------- */

/* Both sides have one dtype. */
static void copy_rows(const fsdp_rect *rect)
{
    int64_t size = (int64_t)fsdp_dtype_size(rect->to_type);
    const int64_t to_strides[2] = {rect->to_pitch * size, size};
    const int64_t from_strides[2] = {rect->from_pitch * size, size};
    const int64_t len[2] = {rect->rows, rect->width};
    fsdp_copy_box(
        &(fsdp_strided_copy){rect->to, to_strides, rect->from, from_strides, 2, len, (size_t)size});
}

static void copy_long_rows(const fsdp_rect *rect)
{
    size_t size = fsdp_dtype_size(rect->to_type), row = (size_t)rect->width * size;
    for (int64_t i = 0; i < rect->rows; i++)
        fsdp_kernels_get()->copy_large(
            (char *)rect->to + (size_t)(i * rect->to_pitch) * size,
            (const char *)rect->from + (size_t)(i * rect->from_pitch) * size, row);
}

static void clear_rows(const fsdp_rect *rect)
{
    size_t size = fsdp_dtype_size(rect->to_type);
    size_t row = (size_t)rect->width * size, pitch = (size_t)rect->to_pitch * size;
    if (row == pitch) {
        memset(rect->to, 0, row * (size_t)rect->rows);
        return;
    }
    for (int64_t i = 0; i < rect->rows; i++)
        memset((char *)rect->to + (size_t)i * pitch, 0, row);
}

static void cast(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type, int64_t n)
{
    fsdp_kernels_get()->cast(to, to_type, from, from_type, (size_t)n, FSDP_OVERFLOW_INF);
}

/* Packs many rows, casts them in one call and unpacks them. */
static void cast_short_rows(const fsdp_rect *rect)
{
    uint8_t packed[PACK_BYTES], done[PACK_BYTES];
    int64_t most = PACK_BYTES / (int64_t)sizeof(double) / rect->width;
    for (int64_t first = 0; first < rect->rows; first += most) {
        int64_t rows = rect->rows - first < most ? rect->rows - first : most;
        fsdp_rect pack = *rect, unpack = *rect;
        pack.rows = unpack.rows = rows;
        pack.from =
            fsdp_element_const(rect->from, rect->from_type, (size_t)(first * rect->from_pitch));
        pack.to = packed;
        pack.to_type = rect->from_type;
        unpack.from = done;
        unpack.to = fsdp_element(rect->to, rect->to_type, (size_t)(first * rect->to_pitch));
        pack.to_pitch = unpack.from_pitch = rect->width;
        copy_rows(&pack);
        cast(done, rect->to_type, packed, rect->from_type, rows * rect->width);
        copy_rows(&unpack);
    }
}

static void cast_rows(const fsdp_rect *rect)
{
    bool is_dense = rect->to_pitch == rect->width && rect->from_pitch == rect->width;
    int64_t rows = is_dense ? 1 : rect->rows;
    int64_t width = is_dense ? rect->rows * rect->width : rect->width;
    if (!is_dense && rect->width < SHORT_ROW) {
        cast_short_rows(rect);
        return;
    }
    size_t to_pitch = (size_t)rect->to_pitch * fsdp_dtype_size(rect->to_type);
    size_t from_pitch = (size_t)rect->from_pitch * fsdp_dtype_size(rect->from_type);
    for (int64_t i = 0; i < rows; i++)
        cast((char *)rect->to + (size_t)i * to_pitch, rect->to_type,
             (const char *)rect->from + (size_t)i * from_pitch, rect->from_type, width);
}

static size_t row_bytes(const fsdp_rect *rect)
{
    return (size_t)rect->width * fsdp_dtype_size(rect->to_type);
}

/* is_large: of a list that caches do not hold. */
static void copy_rect(const fsdp_rect *rect, bool is_large)
{
    if (rect->rows <= 0 || rect->width <= 0)
        return;
    if (!rect->from)
        clear_rows(rect);
    else if (rect->to_type != rect->from_type)
        cast_rows(rect);
    else if (is_large && row_bytes(rect) >= LONG_ROW)
        copy_long_rows(rect);
    else if (rect->rows == 1)
        memcpy(rect->to, rect->from, row_bytes(rect));
    else
        copy_rows(rect);
}

/* --- lists ------------------------------------------------------------------------------------ */

static bool is_large_list(const fsdp_rect *rects, size_t n)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n && bytes < LARGE_LIST; i++)
        if (rects[i].rows > 0 && rects[i].width > 0)
            bytes += (size_t)rects[i].rows * row_bytes(&rects[i]);
    return bytes >= LARGE_LIST;
}

/* True when `next` starts where the rows of `one` end, in a tensor whose rows are longer. */
static bool are_columns(const fsdp_rect *one, const fsdp_rect *next)
{
    if (!one->from || !next->from || one->rows != next->rows || one->rows <= 1 || one->width <= 0 ||
        row_bytes(one) < COLUMN_ROW || one->to_type != next->to_type ||
        one->from_type != next->from_type)
        return false;
    size_t to_size = fsdp_dtype_size(one->to_type), from_size = fsdp_dtype_size(one->from_type);
    bool in_source = one->from_pitch == next->from_pitch && one->from_pitch > one->width &&
                     (const char *)one->from + (size_t)one->width * from_size == next->from;
    bool in_target = one->to_pitch == next->to_pitch && one->to_pitch > one->width &&
                     (char *)one->to + (size_t)one->width * to_size == next->to;
    return in_source || in_target;
}

static void copy_columns(const fsdp_rect *rects, size_t n, bool is_large)
{
    for (int64_t row = 0; row < rects[0].rows; row++) {
        for (size_t i = 0; i < n; i++) {
            fsdp_rect part = rects[i];
            part.rows = 1;
            part.to = fsdp_element(part.to, part.to_type, (size_t)(row * part.to_pitch));
            part.from =
                fsdp_element_const(part.from, part.from_type, (size_t)(row * part.from_pitch));
            part.to_pitch = part.from_pitch = part.width;
            copy_rect(&part, is_large);
        }
    }
}

fsdp_rect fsdp_rect_line(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                         int64_t count)
{
    return (fsdp_rect){.to = to,
                       .from = from,
                       .to_type = to_type,
                       .from_type = from_type,
                       .rows = 1,
                       .width = count,
                       .to_pitch = count,
                       .from_pitch = count};
}

void fsdp_rects_copy(const fsdp_rect *rects, size_t n)
{
    bool is_large = is_large_list(rects, n);
    for (size_t i = 0, columns; i < n; i += columns) {
        columns = 1;
        while (i + columns < n && are_columns(&rects[i + columns - 1], &rects[i + columns]))
            columns++;
        if (columns > 1)
            copy_columns(&rects[i], columns, is_large);
        else
            copy_rect(&rects[i], is_large);
    }
}

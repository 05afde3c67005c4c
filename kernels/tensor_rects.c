/*
 * Rectangles of elements: the copies of a training step. Rows of one type are copied by the kernel that
 * copies boxes; rows to be cast go through the cast kernel, short ones packed into a block first.
 */
#include "kernels/tensor.h"

#include "kernels/blocks.h"

#include <string.h>

enum { SHORT_ROW = 128, PACK_BYTES = 8192 };

static void copy_rows(void *to, int64_t to_pitch, const void *from, int64_t from_pitch,
                      int64_t rows, int64_t width, fsdp_dtype dtype)
{
    int64_t size = (int64_t)fsdp_dtype_size(dtype);
    const int64_t to_strides[2] = {to_pitch * size, size};
    const int64_t from_strides[2] = {from_pitch * size, size};
    const int64_t len[2] = {rows, width};
    fsdp_kernels_get()->copy_box(to, to_strides, from, from_strides, 2, len, (size_t)size);
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

/* Many rows are packed, cast and spread at once. */
static void cast_short_rows(const fsdp_rect *rect)
{
    uint8_t packed[PACK_BYTES], done[PACK_BYTES];
    int64_t most = PACK_BYTES / (int64_t)sizeof(double) / rect->width;
    for (int64_t first = 0; first < rect->rows; first += most) {
        int64_t rows = rect->rows - first < most ? rect->rows - first : most;
        const void *from =
            fsdp_element_const(rect->from, rect->from_type, (size_t)(first * rect->from_pitch));
        void *to = fsdp_element(rect->to, rect->to_type, (size_t)(first * rect->to_pitch));
        copy_rows(packed, rect->width, from, rect->from_pitch, rows, rect->width, rect->from_type);
        cast(done, rect->to_type, packed, rect->from_type, rows * rect->width);
        copy_rows(to, rect->to_pitch, done, rect->width, rows, rect->width, rect->to_type);
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
    for (int64_t i = 0; i < rows; i++)
        cast(fsdp_element(rect->to, rect->to_type, (size_t)(i * rect->to_pitch)), rect->to_type,
             fsdp_element_const(rect->from, rect->from_type, (size_t)(i * rect->from_pitch)),
             rect->from_type, width);
}

void fsdp_rects_copy(const fsdp_rect *rects, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const fsdp_rect *rect = &rects[i];
        if (rect->rows <= 0 || rect->width <= 0)
            continue;
        if (!rect->from)
            clear_rows(rect);
        else if (rect->to_type == rect->from_type)
            copy_rows(rect->to, rect->to_pitch, rect->from, rect->from_pitch, rect->rows,
                      rect->width, rect->to_type);
        else
            cast_rows(rect);
    }
}

/* Blocks of ggml's quantized types as f32, and f32 as blocks. See derived.h. */
#include "statedict/derive/derived.h"

#include "kernels/quants.h"

#include <inttypes.h>
#include <string.h>

static int64_t values_of(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info ? (int64_t)info->values : 1;
}

/* --- blocks -> f32 ------------------------------------------------------------------------------ */

/* The blocks that a run of values needs, and where the first value is in them. */
static fsdp_box blocks_of(const fsdp_box *piece, int64_t values, int64_t *skip_out)
{
    int last = piece->ndim - 1;
    fsdp_box blocks = *piece;
    blocks.lo[last] = piece->lo[last] / values;
    blocks.len[last] = (piece->lo[last] + piece->len[last] - 1) / values - blocks.lo[last] + 1;
    *skip_out = piece->lo[last] - blocks.lo[last] * values;
    return blocks;
}

/* Decodes values [skip, skip + count) of a row of blocks. */
static void decode_row(fsdp_dtype dtype, const char *blocks, int64_t skip, int64_t count, float *to)
{
    int64_t values = values_of(dtype);
    float some[FSDP_QUANT_VALUES];
    while (count > 0) {
        int64_t n = values - skip < count ? values - skip : count;
        fsdp_blocks_to_f32(dtype, blocks, 1, some);
        memcpy(to, some + skip, (size_t)n * sizeof *to);
        blocks += fsdp_dtype_size(dtype);
        to += n;
        count -= n;
        skip = 0;
    }
}

/* Whole blocks are decoded together. */
static void decode(fsdp_dtype dtype, const fsdp_box *piece, const fsdp_box *blocks, int64_t skip,
                   const char *data, float *to)
{
    int last = piece->ndim - 1;
    int64_t width = piece->len[last], row_blocks = blocks->len[last];
    int64_t rows = fsdp_box_count(piece) / width;
    if (skip == 0 && width == row_blocks * values_of(dtype)) {
        fsdp_blocks_to_f32(dtype, data, (size_t)(rows * row_blocks), to);
        return;
    }
    for (int64_t row = 0; row < rows; row++, to += width)
        decode_row(dtype, data + row * row_blocks * (int64_t)fsdp_dtype_size(dtype), skip, width,
                   to);
}

/* Elements of a piece whose blocks fit in a buffer. Narrow rows need a block for few values. */
static int64_t piece_of(const fsdp_box *box, fsdp_dtype dtype)
{
    int64_t width = box->len[box->ndim - 1], values = values_of(dtype);
    int64_t row_bytes = (width / values + 2) * (int64_t)fsdp_dtype_size(dtype);
    int64_t rows = FSDP_DERIVED_RUN / row_bytes;
    return rows > 0 ? rows * width
                    : FSDP_DERIVED_RUN / (int64_t)fsdp_dtype_size(dtype) * values / 2;
}

static fsdp_status read_values(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                               void *data, fsdp_error *err)
{
    const fsdp_derived *part = tensor->parts[0];
    fsdp_derived_pieces pieces = {.box = box, .most = piece_of(box, part->dtype)};
    fsdp_box piece;
    float *to = data;
    int64_t skip;
    void *buffer;
    FSDP_TRY(fsdp_derived_take(reader, &buffer, err));
    fsdp_status st = FSDP_OK;
    while (st == FSDP_OK && fsdp_derived_next(&pieces, &piece)) {
        fsdp_box blocks = blocks_of(&piece, values_of(part->dtype), &skip);
        st = fsdp_derived_read(part, reader, &blocks, buffer, err);
        if (st == FSDP_OK)
            decode(part->dtype, &piece, &blocks, skip, buffer, to);
        to += fsdp_box_count(&piece);
    }
    fsdp_derived_give(reader);
    return st;
}

static const fsdp_derived_ops values_ops = {read_values, 1};

/* --- f32 -> blocks ------------------------------------------------------------------------------ */

static fsdp_status read_blocks(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                               void *data, fsdp_error *err)
{
    int last = box->ndim - 1;
    int64_t values = values_of(tensor->dtype);
    fsdp_derived_pieces pieces = {.box = box, .most = FSDP_DERIVED_RUN / 4 / values};
    fsdp_box piece;
    char *to = data;
    void *buffer;
    FSDP_TRY(fsdp_derived_take(reader, &buffer, err));
    fsdp_status st = FSDP_OK;
    while (st == FSDP_OK && fsdp_derived_next(&pieces, &piece)) {
        int64_t count = fsdp_box_count(&piece);
        fsdp_box wanted = piece;
        wanted.lo[last] *= values;
        wanted.len[last] *= values;
        st = fsdp_derived_read(tensor->parts[0], reader, &wanted, buffer, err);
        if (st == FSDP_OK && fsdp_blocks_from_f32(tensor->dtype, buffer, (size_t)count, to) > 0)
            st = fsdp_fail(err, FSDP_ERR_DAMAGED, "a value is too large for %s",
                           fsdp_dtype_name(tensor->dtype));
        to += count * (int64_t)fsdp_dtype_size(tensor->dtype);
    }
    fsdp_derived_give(reader);
    return st;
}

static const fsdp_derived_ops blocks_ops = {read_blocks, 1};

/* --- nodes -------------------------------------------------------------------------------------- */

/* Another dtype, and another length of the last dim. */
static fsdp_status make(fsdp_arena *arena, const fsdp_derived *like, int64_t last,
                        const fsdp_derived **out, fsdp_error *err)
{
    int64_t shape[FSDP_MAX_DIMS];
    const fsdp_derived *part = like->parts[0];
    fsdp_derived wanted = *like, *made = NULL;
    memcpy(shape, part->shape, (size_t)part->ndim * sizeof *shape);
    shape[part->ndim - 1] = last;
    wanted.ndim = part->ndim;
    wanted.shape = shape;
    wanted.part_count = 1;
    FSDP_TRY(fsdp_derived_make(arena, &wanted, &made, err));
    *out = made;
    return FSDP_OK;
}

fsdp_status fsdp_derive_values(fsdp_arena *arena, const fsdp_derived *part,
                               const fsdp_derived **out, fsdp_error *err)
{
    int64_t last;
    if (values_of(part->dtype) == 1 || part->ndim == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s has no blocks", fsdp_dtype_name(part->dtype));
    if (fsdp_mul_overflow(part->shape[part->ndim - 1], values_of(part->dtype), &last))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the tensor is too large");
    const fsdp_derived like = {.ops = &values_ops, .dtype = FSDP_F32, .parts = &part};
    return make(arena, &like, last, out, err);
}

static bool fits_blocks(const fsdp_derived *part, fsdp_dtype dtype)
{
    return fsdp_blocks_can_encode(dtype) && part->ndim > 1 &&
           part->shape[part->ndim - 1] % values_of(dtype) == 0;
}

fsdp_status fsdp_derive_blocks(fsdp_arena *arena, const fsdp_derived *part, fsdp_dtype dtype,
                               const fsdp_derived **out, fsdp_error *err)
{
    char text[128];
    if (!fits_blocks(part, dtype))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s cannot be cut into blocks of %s",
                         fsdp_derived_text(part, text, sizeof text), fsdp_dtype_name(dtype));
    FSDP_TRY(fsdp_derive_cast(arena, part, FSDP_F32, &part, err));
    const fsdp_derived like = {.ops = &blocks_ops, .dtype = dtype, .parts = &part};
    return make(arena, &like, part->shape[part->ndim - 1] / values_of(dtype), out, err);
}

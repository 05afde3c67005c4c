/* Quantized weights as f32: see derived_scaled.h. */
#include "statedict/derive/derived_scaled.h"

#include "kernels/kernels.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { PIECE_FLOATS = FSDP_DERIVED_PIECE / 4, TOGETHER = 16 };

/* --- scales of blocks --------------------------------------------------------------------------------- */

/* The scales that a box of the weight needs. */
static fsdp_box scales_of(const fsdp_box *box, const int64_t *blocks)
{
    fsdp_box scales = {.ndim = box->ndim};
    for (int d = 0; d < box->ndim; d++) {
        scales.lo[d] = box->lo[d] / blocks[d];
        scales.len[d] = (box->lo[d] + box->len[d] - 1) / blocks[d] - scales.lo[d] + 1;
    }
    return scales;
}

/* A row's scales, one for each block; `skip` values of the first block lie before the row. */
static void multiply_row(float *values, int64_t count, const float *scales, int64_t block,
                         int64_t skip)
{
    for (int64_t at = 0; at < count; scales++, skip = 0) {
        int64_t end = block - skip < count - at ? at + block - skip : count;
        for (; at + TOGETHER <= end; at += TOGETHER)
            for (int i = 0; i < TOGETHER; i++) /* a constant number becomes vectors */
                values[at + i] *= *scales;
        for (; at < end; at++)
            values[at] *= *scales;
    }
}

/* Multiplies the rows of a piece; the last dim of both is walked inside. */
static void multiply(const fsdp_box *piece, const int64_t *blocks, const fsdp_box *scale_box,
                     const float *scales, float *values)
{
    int last = piece->ndim - 1;
    int64_t at[FSDP_MAX_DIMS] = {0}, rows = 1;
    for (int d = 0; d < last; d++)
        rows *= piece->len[d];
    for (int64_t row = 0; row < rows; row++) {
        int64_t first = 0;
        for (int d = 0; d < last; d++)
            first =
                first * scale_box->len[d] + (piece->lo[d] + at[d]) / blocks[d] - scale_box->lo[d];
        const float *of_row = scales + first * scale_box->len[last];
        multiply_row(values, piece->len[last], of_row, blocks[last],
                     piece->lo[last] - scale_box->lo[last] * blocks[last]);
        values += piece->len[last];
        for (int d = last - 1; d >= 0 && ++at[d] == piece->len[d]; d--)
            at[d] = 0;
    }
}

/* The largest number of 8 bits is 57344: with it the product of a larger scale is infinite. */
static fsdp_status check_scales(const float *scales, int64_t count, fsdp_error *err)
{
    enum { LARGEST_F8 = 57344 };
    for (int64_t i = 0; i < count; i++)
        if (!(fabsf(scales[i]) <= FLT_MAX / LARGEST_F8))
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "a scale is %g: its products are not finite in f32", scales[i]);
    return FSDP_OK;
}

static fsdp_status read_block_scaled(const fsdp_derived *tensor, fsdp_reader *reader,
                                     const fsdp_box *box, void *data, fsdp_error *err)
{
    const int64_t *blocks = tensor->more;
    fsdp_derived_pieces pieces = {.box = box, .most = FSDP_DERIVED_RUN / 4};
    fsdp_box piece;
    float *to = data;
    void *scales;
    FSDP_TRY(fsdp_derived_take(reader, &scales, err));
    fsdp_status st = FSDP_OK;
    while (st == FSDP_OK && fsdp_derived_next(&pieces, &piece)) {
        fsdp_box scale_box = scales_of(&piece, blocks);
        st = fsdp_derived_read(tensor->parts[0], reader, &piece, to, err);
        if (st == FSDP_OK)
            st = fsdp_derived_read(tensor->parts[1], reader, &scale_box, scales, err);
        if (st == FSDP_OK)
            st = check_scales(scales, fsdp_box_count(&scale_box), err);
        if (st == FSDP_OK)
            multiply(&piece, blocks, &scale_box, scales, to);
        to += fsdp_box_count(&piece);
    }
    fsdp_derived_give(reader);
    return st;
}

static const fsdp_derived_ops block_scaled_ops = {read_block_scaled, 1};

static bool fits(const fsdp_derived *weight, const fsdp_derived *scales, const int64_t *blocks)
{
    if (weight->ndim != scales->ndim || weight->ndim == 0)
        return false;
    for (int d = 0; d < weight->ndim; d++) {
        int64_t rows = weight->shape[d], block = blocks[d];
        if (block <= 0 || rows / block + (rows % block != 0) != scales->shape[d])
            return false;
    }
    return true;
}

fsdp_status fsdp_derive_block_scaled(fsdp_arena *arena, const fsdp_derived *weight,
                                     const fsdp_derived *scales, const int64_t *blocks,
                                     const fsdp_derived **out, fsdp_error *err)
{
    const fsdp_derived *parts[2];
    fsdp_derived *made = NULL;
    char w[128], s[128];
    if (!fits(weight, scales, blocks))
        return fsdp_fail(err, FSDP_ERR_USAGE, "scales of %s do not fit a weight of %s",
                         fsdp_derived_text(scales, s, sizeof s),
                         fsdp_derived_text(weight, w, sizeof w));
    int64_t *kept = fsdp_arena_alloc(arena, (size_t)weight->ndim, sizeof *kept);
    if (!kept)
        return fsdp_fail_memory(err, "scales");
    memcpy(kept, blocks, (size_t)weight->ndim * sizeof *kept);
    FSDP_TRY(fsdp_derive_cast(arena, weight, FSDP_F32, &parts[0], err));
    FSDP_TRY(fsdp_derive_cast(arena, scales, FSDP_F32, &parts[1], err));
    fsdp_derived like = {.ops = &block_scaled_ops,
                         .dtype = FSDP_F32,
                         .ndim = weight->ndim,
                         .shape = weight->shape,
                         .parts = parts,
                         .part_count = 2,
                         .more = kept};
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}

/* --- MXFP4 ---------------------------------------------------------------------------------------------- */

enum { GROUP = 32, GROUP_BYTES = 16, BIAS = 127, NO_NUMBER = 255 };

static const float four_bits[16] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                    -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

/* Numbers [first, first + count) of a row whose groups begin at `bytes`. False when one is not finite: the
 * largest exponent stands for no number. */
static bool unpack_row(const uint8_t *bytes, const uint8_t *exponents, int64_t first, int64_t count,
                       float *to)
{
    bool are_finite = true;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = first + i;
        uint8_t pair = bytes[at / 2];
        int half = at % 2 == 0 ? pair & 15 : pair >> 4, exponent = exponents[at / GROUP];
        to[i] = ldexpf(four_bits[half], exponent - BIAS);
        are_finite = are_finite && exponent != NO_NUMBER && isfinite(to[i]);
    }
    return are_finite;
}

/* The groups that a piece needs: of the exponents, and with one dim more of the bytes. */
static void groups_of(const fsdp_box *piece, fsdp_box *exponents_out, fsdp_box *bytes_out)
{
    int last = piece->ndim - 1;
    *exponents_out = *piece;
    exponents_out->lo[last] = piece->lo[last] / GROUP;
    exponents_out->len[last] =
        (piece->lo[last] + piece->len[last] - 1) / GROUP - exponents_out->lo[last] + 1;
    *bytes_out = *exponents_out;
    bytes_out->ndim++;
    bytes_out->lo[last + 1] = 0;
    bytes_out->len[last + 1] = GROUP_BYTES;
}

static fsdp_status unpack(const fsdp_box *piece, const fsdp_box *groups, const uint8_t *bytes,
                          const uint8_t *exponents, float *to, fsdp_error *err)
{
    int last = piece->ndim - 1;
    bool are_finite = true;
    int64_t width = groups->len[last], rows = fsdp_box_count(groups) / width;
    int64_t first = piece->lo[last] - groups->lo[last] * GROUP;
    for (int64_t row = 0; row < rows; row++)
        are_finite = unpack_row(bytes + row * width * GROUP_BYTES, exponents + row * width, first,
                                piece->len[last], to + row * piece->len[last]) &&
                     are_finite;
    return are_finite ? FSDP_OK
                      : fsdp_fail(err, FSDP_ERR_DAMAGED,
                                  "a group's exponent makes a number that is not "
                                  "finite");
}

/* Elements of a piece whose groups fit in half a buffer; rows may begin and end within a group. */
static int64_t piece_of(const fsdp_box *box)
{
    int64_t width = box->len[box->ndim - 1], groups = width / GROUP + 2;
    int64_t rows = FSDP_DERIVED_PIECE / 2 / GROUP_BYTES / groups;
    return rows == 0 || width * rows > PIECE_FLOATS ? PIECE_FLOATS : width * rows;
}

static fsdp_status read_mxfp4(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                              void *data, fsdp_error *err)
{
    fsdp_derived_pieces pieces = {.box = box, .most = piece_of(box)};
    fsdp_box piece, groups, bytes_box;
    float *to = data;
    void *buffer;
    FSDP_TRY(fsdp_derived_take(reader, &buffer, err));
    uint8_t *bytes = buffer, *exponents = bytes + FSDP_DERIVED_PIECE / 2;
    fsdp_status st = FSDP_OK;
    while (st == FSDP_OK && fsdp_derived_next(&pieces, &piece)) {
        groups_of(&piece, &groups, &bytes_box);
        st = fsdp_derived_read(tensor->parts[0], reader, &bytes_box, bytes, err);
        if (st == FSDP_OK)
            st = fsdp_derived_read(tensor->parts[1], reader, &groups, exponents, err);
        if (st == FSDP_OK)
            st = unpack(&piece, &groups, bytes, exponents, to, err);
        to += fsdp_box_count(&piece);
    }
    fsdp_derived_give(reader);
    return st;
}

static const fsdp_derived_ops mxfp4_ops = {read_mxfp4, 1};

fsdp_status fsdp_derive_mxfp4(fsdp_arena *arena, const fsdp_derived *weight,
                              const fsdp_derived *exponents, const fsdp_derived **out,
                              fsdp_error *err)
{
    int ndim = exponents->ndim;
    int64_t shape[FSDP_MAX_DIMS];
    fsdp_derived *made = NULL;
    char w[128], e[128];
    bool fit = ndim > 0 && weight->ndim == ndim + 1 && weight->dtype == FSDP_U8 &&
               exponents->dtype == FSDP_U8 && weight->shape[ndim] == GROUP_BYTES &&
               memcmp(weight->shape, exponents->shape, (size_t)ndim * sizeof *shape) == 0;
    if (!fit || fsdp_mul_overflow(exponents->shape[ndim - 1], GROUP, &shape[ndim - 1]))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s and %s are not MXFP4 blocks and their scales",
                         fsdp_derived_text(weight, w, sizeof w),
                         fsdp_derived_text(exponents, e, sizeof e));
    memcpy(shape, exponents->shape, (size_t)(ndim - 1) * sizeof *shape);
    fsdp_derived like = {.ops = &mxfp4_ops,
                         .dtype = FSDP_F32,
                         .ndim = ndim,
                         .shape = shape,
                         .parts = (const fsdp_derived *const[]){weight, exponents},
                         .part_count = 2};
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}

/* Quantized weights as plain ones, and blocks and vectors as a target needs them: see element_types.h. */
#include "statedict/derive/element_types.h"
#include "base/text.h"
#include "kernels/quants.h"
#include "statedict/derive/derived.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/select/selection.h"
#include "statedict/select/vectors.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

/* === blocks of ggml's types =================================================================== */

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
static fsdp_status make_node(fsdp_arena *arena, const fsdp_derived *like, int64_t last,
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
    return make_node(arena, &like, last, out, err);
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
    return make_node(arena, &like, part->shape[part->ndim - 1] / values_of(dtype), out, err);
}

/* === weights and their scales ================================================================= */

/* Derived tensors: numbers that are stored as small ones and scales. */

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
static int64_t group_piece_of(const fsdp_box *box)
{
    int64_t width = box->len[box->ndim - 1], groups = width / GROUP + 2;
    int64_t rows = FSDP_DERIVED_PIECE / 2 / GROUP_BYTES / groups;
    return rows == 0 || width * rows > PIECE_FLOATS ? PIECE_FLOATS : width * rows;
}

static fsdp_status read_mxfp4(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *box,
                              void *data, fsdp_error *err)
{
    fsdp_derived_pieces pieces = {.box = box, .most = group_piece_of(box)};
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

/* === quantization_config ====================================================================== */

/* The blocks of a weight that have one scale, as quantization_config of config.json gives them. */

typedef struct fsdp_quant_blocks {
    int64_t size[2];    /* rows and columns, if they are given */
    bool is_given;      /* weight_block_size, or block_structure of compressed-tensors */
    bool is_none;       /* weight_block_size is null: there are no blocks */
    const char *member; /* that gives the size */
} fsdp_quant_blocks;

static const char whole_size[] = "weight_block_size", group_size[] = "block_structure";

/* "[128, 128]"; FSDP_ERR_USAGE where another member has another size. */
static fsdp_status read_size(const fsdp_value *value, const char *member, const char *path,
                             fsdp_quant_blocks *blocks, fsdp_error *err)
{
    int64_t pair[2] = {0};
    for (size_t i = 0; value->kind == FSDP_VALUE_LIST && i < 2 && i < value->as.list.count; i++)
        if (value->as.list.items[i].kind == FSDP_VALUE_I64)
            pair[i] = value->as.list.items[i].as.i64;
    if (value->kind != FSDP_VALUE_LIST || value->as.list.count != 2 || pair[0] < 1 || pair[1] < 1)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': %s is not a pair of positive numbers, the size of blocks", path,
                         member);
    if (blocks->is_given && (pair[0] != blocks->size[0] || pair[1] != blocks->size[1]))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has blocks of %" PRId64 " x %" PRId64 " and of %" PRId64
                         " x %" PRId64 ", but --dequant takes one size",
                         path, blocks->size[0], blocks->size[1], pair[0], pair[1]);
    *blocks = (fsdp_quant_blocks){.size = {pair[0], pair[1]}, .is_given = true, .member = member};
    return FSDP_OK;
}

/* Groups of compressed-tensors have their sizes some levels below. */
static fsdp_status read_quantization(const fsdp_value *object, const char *path,
                                     fsdp_quant_blocks *blocks, fsdp_error *err)
{
    for (size_t i = 0; i < object->as.list.count; i += 2) {
        const fsdp_value *key = &object->as.list.items[i], *value = key + 1;
        const char *member =
            fsdp_bytes_are(key->as.bytes.data, key->as.bytes.size, whole_size)   ? whole_size
            : fsdp_bytes_are(key->as.bytes.data, key->as.bytes.size, group_size) ? group_size
                                                                                 : NULL;
        if (member && value->kind == FSDP_VALUE_NULL)
            blocks->is_none |= member == whole_size;
        else if (member)
            FSDP_TRY(read_size(value, member, path, blocks, err));
        else if (value->kind == FSDP_VALUE_DICT)
            FSDP_TRY(read_quantization(value, path, blocks, err));
    }
    return FSDP_OK;
}

/* FSDP_ERR_DAMAGED: the size is not a pair of positive numbers; FSDP_ERR_USAGE: there are several sizes. */
static fsdp_status read_block_size(const fsdp_config_file *config, fsdp_quant_blocks *blocks,
                                   fsdp_error *err)
{
    FSDP_TRY(fsdp_config_check(config, err));
    /* the model itself, and its part for text */
    const fsdp_value *models[] = {&config->json, fsdp_config_at(&config->json, "text_config")};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const fsdp_value *object = fsdp_config_at(models[i], "quantization_config");
        if (object && object->kind == FSDP_VALUE_DICT)
            FSDP_TRY(read_quantization(object, fsdp_config_name(config), blocks, err));
    }
    return FSDP_OK;
}

/* === weights ================================================================================== */

enum { USUAL_BLOCK = 128 }; /* of transformers, where config.json says nothing */

typedef struct dequant_job {
    const fsdp_dequant_opts *opts;
    fsdp_derivation *derivation;
    fsdp_checkpoint *base;
    const fsdp_sd *sd;
    fsdp_quant_blocks blocks; /* of config.json */
    bool lacks_memory;        /* a name could not be made, so what sibling() said does not count */
    fsdp_dequant_report report;
} dequant_job;

/* --- names -------------------------------------------------------------------------------------- */

static bool ends(const fsdp_entry *entry, const char *end)
{
    return fsdp_bytes_end(entry->name, entry->name_size, end);
}

/* The entry whose name is this one's with another end; -1: none. */
static int64_t sibling(dequant_job *job, const fsdp_entry *entry, const char *cut, const char *end)
{
    fsdp_text name = {0};
    fsdp_text_add(&name, entry->name, entry->name_size - strlen(cut));
    fsdp_text_addf(&name, "%s", end);
    job->lacks_memory = job->lacks_memory || name.failed;
    int64_t found = name.failed ? -1 : fsdp_sd_find(job->sd, name.data, name.size);
    fsdp_text_release(&name);
    return found >= 0 && fsdp_sd_at(job->sd, (size_t)found)->kind != FSDP_ENTRY_VALUE ? found : -1;
}

static bool is_f8(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info->is_float && info->size == 1 && dtype != FSDP_F8_E8M0FNU;
}

/* The scales of a weight of 8 bits, as transformers and DeepSeek, compressed-tensors, and DeepSeek's own
 * files name them; -1: none. Two of them would be two weights. */
static fsdp_status find_scales(dequant_job *job, const fsdp_entry *weight, int64_t *out,
                               fsdp_error *err)
{
    static const char *const ways[][2] = {{"", "_scale_inv"}, {"", "_scale"}, {"weight", "scale"}};
    *out = -1;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        bool is_way = !ways[i][0][0] || ends(weight, ".weight");
        int64_t found = is_way ? sibling(job, weight, ways[i][0], ways[i][1]) : -1;
        char one[200], other[200];
        if (found >= 0 && *out >= 0) {
            const fsdp_entry *first = fsdp_sd_at(job->sd, (size_t)*out);
            const fsdp_entry *second = fsdp_sd_at(job->sd, (size_t)found);
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "it has two scales, '%s' and '%s'",
                             fsdp_printable(first->name, first->name_size, one, sizeof one),
                             fsdp_printable(second->name, second->name_size, other, sizeof other));
        }
        *out = found >= 0 ? found : *out;
    }
    return FSDP_OK;
}

/* Scales of activations and of the cache, which only a quantized model uses. */
static bool is_of_activations(dequant_job *job, const fsdp_entry *entry)
{
    static const char *const names[] = {".input_scale", ".output_scale", ".activation_scale",
                                        ".q_scale",     ".k_scale",      ".v_scale"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int64_t weight = ends(entry, names[i]) ? sibling(job, entry, names[i], ".weight") : -1;
        if (ends(entry, names[i]) &&
            (i > 2 || (weight >= 0 && is_f8(fsdp_sd_at(job->sd, (size_t)weight)->dtype))))
            return true;
    }
    return false;
}

/* True when the entry belongs to a quantized weight and goes with it. */
static bool is_beside_weight(dequant_job *job, const fsdp_entry *entry)
{
    static const char *const scale_ends[][2] = {
        {"_scale_inv", ""}, {"_scale", ""}, {".scale", ".weight"}};
    for (size_t i = 0; i < 3; i++) {
        int64_t weight = ends(entry, scale_ends[i][0])
                             ? sibling(job, entry, scale_ends[i][0], scale_ends[i][1])
                             : -1;
        if (weight >= 0 && is_f8(fsdp_sd_at(job->sd, (size_t)weight)->dtype))
            return true;
    }
    return (ends(entry, "_scales") && sibling(job, entry, "_scales", "_blocks") >= 0) ||
           is_of_activations(job, entry);
}

/* --- fp8 ---------------------------------------------------------------------------------------- */

/* The scales have one row for `size` rows of the weight, in the last two dims, and one for each in others. */
static bool fit_blocks(const fsdp_derived *weight, const fsdp_derived *scales,
                       const int64_t size[2], int64_t *blocks_out)
{
    for (int d = 0; d < weight->ndim; d++) {
        int behind = weight->ndim - 1 - d;
        int64_t rows = weight->shape[d], block = behind < 2 ? size[1 - behind] : 1;
        if (rows / block + (rows % block != 0) != scales->shape[d])
            return false;
        blocks_out[d] = block;
    }
    return true;
}

/* In each dim there is one scale, or one for each row. */
static bool fit_rows(const fsdp_derived *weight, const fsdp_derived *scales, int64_t *blocks_out)
{
    for (int d = 0; d < weight->ndim; d++) {
        int64_t rows = weight->shape[d];
        if (scales->shape[d] != 1 && scales->shape[d] != rows)
            return false;
        blocks_out[d] = scales->shape[d] == rows ? 1 : rows;
    }
    return true;
}

/* Finds the rows of the weight for a row of the scales. */
static bool find_blocks(const dequant_job *job, const fsdp_derived *weight,
                        const fsdp_derived *scales, int64_t *blocks_out)
{
    static const int64_t usual[2] = {USUAL_BLOCK, USUAL_BLOCK};
    if (weight->ndim != scales->ndim || weight->ndim == 0)
        return false;
    if (job->blocks.is_given)
        return fit_blocks(weight, scales, job->blocks.size, blocks_out);
    return fit_rows(weight, scales, blocks_out) ||
           (!job->blocks.is_none && fit_blocks(weight, scales, usual, blocks_out));
}

/* A scale of a tensor, or scales of its rows, get the dims that they lack. */
static fsdp_status fit_dims(const dequant_job *job, const fsdp_derived *weight,
                            const fsdp_derived **scales, fsdp_error *err)
{
    int64_t shape[FSDP_MAX_DIMS];
    const fsdp_derived *given = *scales;
    bool is_one = fsdp_shape_count(given->ndim, given->shape) == 1;
    bool is_rows = given->ndim == 1 && weight->ndim > 0 && given->shape[0] == weight->shape[0];
    if (given->ndim == weight->ndim || (!is_one && !is_rows))
        return FSDP_OK;
    for (int d = 0; d < weight->ndim; d++)
        shape[d] = d == 0 && is_rows ? given->shape[0] : 1;
    return fsdp_derive_reshape(fsdp_derivation_arena(job->derivation), given, weight->ndim, shape,
                               scales, err);
}

static fsdp_status refuse_scales(const dequant_job *job, const fsdp_derived *weight,
                                 const fsdp_derived *scales, fsdp_error *err)
{
    char w[128], s[128];
    const fsdp_quant_blocks *blocks = &job->blocks;
    fsdp_derived_text(scales, s, sizeof s);
    fsdp_derived_text(weight, w, sizeof w);
    if (blocks->is_given)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "scales of %s do not fit a weight of %s in blocks of %" PRId64
                         " x %" PRId64 ", which config.json has (%s)",
                         s, w, blocks->size[0], blocks->size[1], blocks->member);
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "scales of %s do not fit a weight of %s: %s", s, w,
                     blocks->is_none
                         ? "config.json has no blocks (weight_block_size is null)"
                         : "they are not those of the tensor, of rows, or of blocks of 128 x 128, "
                           "and config.json names no other size (weight_block_size)");
}

static fsdp_status scale_weight(const dequant_job *job, size_t number, int64_t scales_number,
                                const fsdp_derived **out, fsdp_error *err)
{
    fsdp_arena *arena = fsdp_derivation_arena(job->derivation);
    const fsdp_derived *weight = NULL, *scales = NULL;
    int64_t blocks[FSDP_MAX_DIMS];
    FSDP_TRY(fsdp_derive_stored(arena, job->base, number, &weight, err));
    FSDP_TRY(fsdp_derive_stored(arena, job->base, (size_t)scales_number, &scales, err));
    const fsdp_derived *given = scales;
    FSDP_TRY(fit_dims(job, weight, &scales, err));
    return find_blocks(job, weight, scales, blocks)
               ? fsdp_derive_block_scaled(arena, weight, scales, blocks, out, err)
               : refuse_scales(job, weight, given, err);
}

/* --- MXFP4 -------------------------------------------------------------------------------------- */

static fsdp_status unpack_blocks(const dequant_job *job, size_t number, int64_t scales_number,
                                 const fsdp_derived **out, fsdp_error *err)
{
    fsdp_arena *arena = fsdp_derivation_arena(job->derivation);
    const fsdp_derived *blocks = NULL, *exponents = NULL;
    int order[FSDP_MAX_DIMS];
    FSDP_TRY(fsdp_derive_stored(arena, job->base, number, &blocks, err));
    FSDP_TRY(fsdp_derive_stored(arena, job->base, (size_t)scales_number, &exponents, err));
    FSDP_TRY(fsdp_derive_mxfp4(arena, blocks, exponents, out, err));
    int ndim = (*out)->ndim;
    for (int d = 0; d < ndim; d++)
        order[d] = d < ndim - 2 || ndim < 2 ? d : 2 * ndim - 3 - d;
    return fsdp_derive_permute(arena, *out, order, out, err);
}

/* --- the whole ---------------------------------------------------------------------------------- */

static fsdp_status add_weight(dequant_job *job, size_t number, fsdp_derived_name name,
                              const fsdp_derived *weight, fsdp_error *err)
{
    FSDP_TRY(fsdp_derive_cast(fsdp_derivation_arena(job->derivation), weight, job->opts->dtype,
                              &weight, err));
    job->report.weights++;
    return fsdp_derivation_replace(job->derivation, number, name, weight, err);
}

static fsdp_status add_tensor(dequant_job *job, size_t number, fsdp_error *err)
{
    static const char blocks[] = "_blocks";
    const fsdp_entry *entry = fsdp_sd_at(job->sd, number);
    fsdp_derived_name name = {entry->name, entry->name_size};
    const fsdp_derived *weight = NULL;
    int64_t packed = ends(entry, blocks) ? sibling(job, entry, blocks, "_scales") : -1;
    if (is_beside_weight(job, entry)) {
        job->report.scales++;
        return FSDP_OK;
    }
    if (packed >= 0) {
        FSDP_TRY(unpack_blocks(job, number, packed, &weight, err));
        name.size -= sizeof blocks - 1;
        return add_weight(job, number, name, weight, err);
    }
    if (fsdp_dtype_describe(entry->dtype)->values > 1) {
        fsdp_arena *arena = fsdp_derivation_arena(job->derivation);
        FSDP_TRY(fsdp_derive_stored(arena, job->base, number, &weight, err));
        FSDP_TRY(fsdp_derive_values(arena, weight, &weight, err));
        return add_weight(job, number, name, weight, err);
    }
    if (ends(entry, ".qweight"))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "it is quantized by GPTQ or AWQ, which --dequant does not support");
    if (!is_f8(entry->dtype))
        return fsdp_derivation_keep(job->derivation, number, err);
    int64_t scales;
    FSDP_TRY(find_scales(job, entry, &scales, err));
    if (scales < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "it has 8 bits but no scales; cast it as it is with --dtype");
    FSDP_TRY(scale_weight(job, number, scales, &weight, err));
    return add_weight(job, number, name, weight, err);
}

static fsdp_status add_entry(dequant_job *job, size_t number, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(job->sd, number);
    if (entry->kind != FSDP_ENTRY_TENSOR)
        return fsdp_derivation_keep(job->derivation, number, err);
    fsdp_status st = add_tensor(job, number, err);
    char shown[200];
    if (job->lacks_memory)
        return fsdp_fail_memory(err, "a name");
    if (st == FSDP_ERR_USAGE || st == FSDP_ERR_DAMAGED)
        fsdp_error_prefix(err, "'%s'",
                          fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    return st;
}

fsdp_status fsdp_dequantize(const fsdp_dequant_opts *opts, fsdp_checkpoint **checkpoint,
                            fsdp_dequant_report *report_out, fsdp_error *err)
{
    dequant_job job = {.opts = opts, .base = *checkpoint, .sd = (*checkpoint)->manifest.sd};
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(job.base, &job.derivation, err));
    const char *path = opts->config ? opts->config->path : NULL;
    fsdp_status st = fsdp_derivation_note_file(job.derivation, path, err);
    if (st == FSDP_OK && opts->config)
        st = read_block_size(opts->config, &job.blocks, err);
    for (size_t i = 0; i < fsdp_sd_count(job.sd) && st == FSDP_OK; i++)
        st = add_entry(&job, i, err);
    if (st == FSDP_OK && job.report.weights == 0)
        st = fsdp_fail(err, FSDP_ERR_USAGE,
                       "'%s' has no quantized weights that --dequant supports: fp8 with scales, "
                       "MXFP4, blocks of GGUF",
                       job.base->path);
    *report_out = job.report;
    if (st == FSDP_OK)
        return fsdp_derivation_finish(job.derivation, checkpoint, err);
    fsdp_derivation_cancel(job.derivation);
    return st;
}

/* === the types of a target ==================================================================== */

typedef enum type_change { CHANGE_NONE, CHANGE_DECODE, CHANGE_ENCODE, CHANGE_WIDEN } type_change;

static bool is_float(const fsdp_entry *entry)
{
    return fsdp_dtype_describe(entry->dtype)->is_float;
}

static bool is_matrix_of_blocks(const fsdp_entry *entry, fsdp_dtype blocks)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(blocks);
    return info && is_float(entry) && !fsdp_is_vector(entry) &&
           entry->shape[entry->ndim - 1] % (int64_t)info->values == 0;
}

static type_change change_of(const fsdp_target_types *types, const fsdp_entry *entry,
                             bool state_is_optim)
{
    const fsdp_format *target = types->target;
    if (entry->kind != FSDP_ENTRY_TENSOR || fsdp_entry_is_optim(entry, state_is_optim))
        return CHANGE_NONE;
    if (fsdp_dtype_describe(entry->dtype)->values > 1)
        return !target->writer->holds_dtype(entry->dtype) ? CHANGE_DECODE : CHANGE_NONE;
    bool has_rule = types->casts && fsdp_cast_rules_have(types->casts, entry);
    if (is_matrix_of_blocks(entry, types->blocks) && !has_rule)
        return CHANGE_ENCODE;
    bool is_f32 = target->caps.f32_weights ||
                  (target->caps.f32_vectors && fsdp_is_vector(entry) && entry->dtype != FSDP_F64);
    return is_f32 && is_float(entry) && entry->dtype != FSDP_F32 ? CHANGE_WIDEN : CHANGE_NONE;
}

static fsdp_status add_changed(const fsdp_target_types *types, type_change change,
                               fsdp_derivation *derivation, size_t number, fsdp_error *err)
{
    fsdp_checkpoint *base = fsdp_derivation_base(derivation);
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    const fsdp_entry *entry = fsdp_sd_at(base->manifest.sd, number);
    const fsdp_derived *tensor = NULL;
    FSDP_TRY(fsdp_derive_stored(arena, base, number, &tensor, err));
    if (change == CHANGE_DECODE)
        FSDP_TRY(fsdp_derive_values(arena, tensor, &tensor, err));
    else if (change == CHANGE_ENCODE)
        FSDP_TRY(fsdp_derive_blocks(arena, tensor, types->blocks, &tensor, err));
    else
        FSDP_TRY(fsdp_derive_cast(arena, tensor, FSDP_F32, &tensor, err));
    return fsdp_derivation_replace(derivation, number,
                                   (fsdp_derived_name){entry->name, entry->name_size}, tensor, err);
}

static fsdp_type_report count_changes(const fsdp_target_types *types, const fsdp_sd *sd)
{
    bool state_is_optim = fsdp_sd_state_is_optim(sd);
    fsdp_type_report report = {0};
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        type_change change = change_of(types, fsdp_sd_at(sd, i), state_is_optim);
        report.decoded += change == CHANGE_DECODE;
        report.encoded += change == CHANGE_ENCODE;
        report.widened += change == CHANGE_WIDEN;
    }
    return report;
}

fsdp_status fsdp_derive_target_types(const fsdp_target_types *types, fsdp_checkpoint **checkpoint,
                                     fsdp_type_report *report_out, fsdp_error *err)
{
    const fsdp_sd *sd = (*checkpoint)->manifest.sd;
    bool state_is_optim = fsdp_sd_state_is_optim(sd);
    fsdp_derivation *derivation = NULL;
    fsdp_checkpoint *base = *checkpoint;
    *report_out = count_changes(types, sd);
    if (report_out->decoded + report_out->encoded + report_out->widened == 0)
        return FSDP_OK;
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(base, &derivation, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(sd) && st == FSDP_OK; i++) {
        type_change change = change_of(types, fsdp_sd_at(sd, i), state_is_optim);
        st = change ? add_changed(types, change, derivation, i, err)
                    : fsdp_derivation_keep(derivation, i, err);
    }
    if (st == FSDP_OK)
        return fsdp_derivation_finish(derivation, checkpoint, err);
    fsdp_derivation_cancel(derivation);
    return st;
}

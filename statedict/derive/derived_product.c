/* Products of adapters, and rows of given lengths: see derived_product.h. */
#include "statedict/derive/derived_product.h"

#include "kernels/kernels.h"
#include "kernels/matrix.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { PIECE_FLOATS = FSDP_DERIVED_PIECE / 4 };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* --- products --------------------------------------------------------------------------------------- */

/* The buffers of one read of a product. */
typedef struct product_buffers {
    void *product, *weight, *b, *a, *scratch;
} product_buffers;
enum { PRODUCT_BUFFERS = sizeof(product_buffers) / sizeof(void *) };

typedef struct product_read {
    const fsdp_derived *tensor;
    fsdp_derived_reader *reader;
    product_buffers buffers;
    int64_t rank;
} product_read;

static void multiply(const product_read *read, int64_t rows, int64_t columns)
{
    const product_buffers *buffers = &read->buffers;
    fsdp_matrix_product product = {.c = buffers->product,
                                   .c_row = columns,
                                   .a = {buffers->b, read->rank, 1},
                                   .b = {buffers->a, columns, 1},
                                   .m = rows,
                                   .n = columns,
                                   .k = read->rank};
    fsdp_matrix_scratch scratch = {buffers->scratch, (float *)buffers->scratch + PIECE_FLOATS / 4};
    fsdp_matrix_multiply(&product, &scratch);
}

/* The weight plus the factor times the product, as PEFT adds them. The matrix b is not needed any more. */
static fsdp_status add(const product_read *read, size_t count, fsdp_error *err)
{
    const fsdp_kernels *kernels = fsdp_kernels_get();
    fsdp_dtype dtype = read->tensor->dtype;
    float *sum = read->buffers.b, factor = (float)read->tensor->factor;
    const float *product = read->buffers.product;
    kernels->cast(sum, FSDP_F32, read->buffers.weight, dtype, count, FSDP_OVERFLOW_INF);
    for (size_t i = 0; i < count; i++)
        sum[i] += factor * product[i];
    if (kernels->cast(read->buffers.weight, dtype, sum, FSDP_F32, count, FSDP_OVERFLOW_FAIL) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "a sum does not fit in %s", fsdp_dtype_name(dtype));
}

/* Fills buffers->weight with a tile of the result. */
static fsdp_status make_tile(const product_read *read, const fsdp_box *tile, fsdp_error *err)
{
    const fsdp_derived *tensor = read->tensor;
    const product_buffers *buffers = &read->buffers;
    int64_t rows = tile->len[0], columns = tile->len[1];
    fsdp_box b_box = {.ndim = 2, .lo = {tile->lo[0], 0}, .len = {rows, read->rank}};
    fsdp_box a_box = {.ndim = 2, .lo = {0, tile->lo[1]}, .len = {read->rank, columns}};
    FSDP_TRY(fsdp_derived_read(tensor->parts[0], read->reader, tile, buffers->weight, err));
    FSDP_TRY(fsdp_derived_read(tensor->parts[1], read->reader, &b_box, buffers->b, err));
    FSDP_TRY(fsdp_derived_read(tensor->parts[2], read->reader, &a_box, buffers->a, err));
    multiply(read, rows, columns);
    return add(read, (size_t)(rows * columns), err);
}

static fsdp_status take_buffers(product_read *read, fsdp_error *err)
{
    void **buffers[PRODUCT_BUFFERS] = {&read->buffers.product, &read->buffers.weight,
                                       &read->buffers.b, &read->buffers.a, &read->buffers.scratch};
    for (int i = 0; i < PRODUCT_BUFFERS; i++)
        FSDP_TRY(fsdp_derived_take(read->reader, buffers[i], err));
    return FSDP_OK;
}

/* Tiles are as large as all buffers allow. */
static fsdp_status read_tiles(product_read *read, const fsdp_box *box, void *data, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(read->tensor->dtype);
    int64_t most = size > 4 ? PIECE_FLOATS / 2 : PIECE_FLOATS;
    int64_t columns = least(box->len[1], least(most, PIECE_FLOATS / read->rank));
    int64_t rows = least(most / columns, PIECE_FLOATS / read->rank);
    for (int64_t i = 0; i < box->len[0]; i += rows)
        for (int64_t j = 0; j < box->len[1]; j += columns) {
            fsdp_box tile = {
                .ndim = 2,
                .lo = {box->lo[0] + i, box->lo[1] + j},
                .len = {least(rows, box->len[0] - i), least(columns, box->len[1] - j)}};
            FSDP_TRY(make_tile(read, &tile, err));
            fsdp_copy_shared(box, data, &tile, read->buffers.weight, size);
        }
    return FSDP_OK;
}

static fsdp_status read_product(const fsdp_derived *tensor, fsdp_derived_reader *reader,
                                const fsdp_box *box, void *data, fsdp_error *err)
{
    product_read read = {.tensor = tensor, .reader = reader, .rank = tensor->parts[1]->shape[1]};
    int level = reader->level;
    fsdp_status st = take_buffers(&read, err);
    if (st == FSDP_OK)
        st = read_tiles(&read, box, data, err);
    while (reader->level > level)
        fsdp_derived_give(reader);
    return st;
}

static const fsdp_derived_ops product_ops = {read_product, PRODUCT_BUFFERS};

static fsdp_status refuse_pair(const fsdp_derived *weight, const fsdp_low_rank *pair,
                               fsdp_error *err)
{
    char w[128], b[128], a[128];
    return fsdp_fail(err, FSDP_ERR_USAGE, "an adapter of %s times %s does not fit a weight of %s",
                     fsdp_derived_text(pair->b, b, sizeof b),
                     fsdp_derived_text(pair->a, a, sizeof a),
                     fsdp_derived_text(weight, w, sizeof w));
}

fsdp_status fsdp_derive_low_rank(fsdp_arena *arena, const fsdp_derived *weight,
                                 const fsdp_low_rank *pair, const fsdp_derived **out,
                                 fsdp_error *err)
{
    const fsdp_derived *parts[3] = {weight};
    fsdp_derived *made = NULL;
    bool fits = weight->ndim == 2 && pair->b->ndim == 2 && pair->a->ndim == 2 &&
                pair->b->shape[0] == weight->shape[0] && pair->a->shape[1] == weight->shape[1] &&
                pair->b->shape[1] == pair->a->shape[0] && pair->a->shape[0] > 0;
    if (!fits || pair->a->shape[0] > PIECE_FLOATS)
        return refuse_pair(weight, pair, err);
    FSDP_TRY(fsdp_derive_cast(arena, pair->b, FSDP_F32, &parts[1], err));
    FSDP_TRY(fsdp_derive_cast(arena, pair->a, FSDP_F32, &parts[2], err));
    fsdp_derived like = {.ops = &product_ops,
                         .dtype = weight->dtype,
                         .ndim = 2,
                         .shape = weight->shape,
                         .parts = parts,
                         .part_count = 3,
                         .factor = pair->factor};
    if (!fsdp_dtype_describe(weight->dtype)->is_float)
        return fsdp_fail(err, FSDP_ERR_USAGE, "an adapter cannot be added to %s",
                         fsdp_dtype_name(weight->dtype));
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}

/* --- rows of given lengths ---------------------------------------------------------------------------- */

static void scale_row(const float *row, int64_t width, float magnitude, const fsdp_box *piece,
                      float *to)
{
    double square = 0;
    for (int64_t j = 0; j < width; j++)
        square += (double)row[j] * row[j];
    float factor = magnitude / (float)sqrt(square);
    for (int64_t j = 0; j < piece->len[1]; j++)
        to[j] = row[piece->lo[1] + j] * factor;
}

/* Whole rows are read, since their lengths count all columns. */
static fsdp_status read_rows(const fsdp_derived *tensor, fsdp_derived_reader *reader,
                             const fsdp_box *piece, float *buffer, float *to, fsdp_error *err)
{
    int64_t width = tensor->shape[1], rows = piece->len[0];
    const fsdp_box whole = {.ndim = 2, .lo = {piece->lo[0], 0}, .len = {rows, width}};
    float *magnitudes = buffer + rows * width;
    fsdp_box some = {.ndim = 1, .lo = {piece->lo[0]}, .len = {rows}};
    FSDP_TRY(fsdp_derived_read(tensor->parts[0], reader, &whole, buffer, err));
    FSDP_TRY(fsdp_derived_read(tensor->parts[1], reader, &some, magnitudes, err));
    for (int64_t i = 0; i < rows; i++)
        scale_row(buffer + i * width, width, magnitudes[i], piece, to + i * piece->len[1]);
    return FSDP_OK;
}

static fsdp_status read_row_lengths(const fsdp_derived *tensor, fsdp_derived_reader *reader,
                                    const fsdp_box *box, void *data, fsdp_error *err)
{
    int64_t most = PIECE_FLOATS / (tensor->shape[1] + 1);
    float *to = data;
    void *buffer;
    FSDP_TRY(fsdp_derived_take(reader, &buffer, err));
    fsdp_status st = FSDP_OK;
    for (int64_t i = 0; i < box->len[0] && st == FSDP_OK; i += most) {
        fsdp_box piece = *box;
        piece.lo[0] += i;
        piece.len[0] = least(most, box->len[0] - i);
        st = read_rows(tensor, reader, &piece, buffer, to, err);
        to += piece.len[0] * piece.len[1];
    }
    fsdp_derived_give(reader);
    return st;
}

static const fsdp_derived_ops row_length_ops = {read_row_lengths, 1};

fsdp_status fsdp_derive_row_lengths(fsdp_arena *arena, const fsdp_derived *weight,
                                    const fsdp_derived *magnitudes, const fsdp_derived **out,
                                    fsdp_error *err)
{
    const fsdp_derived *parts[2] = {weight};
    fsdp_derived *made = NULL;
    char text[128];
    if (weight->ndim != 2 || weight->dtype != FSDP_F32 || weight->shape[1] >= PIECE_FLOATS ||
        fsdp_shape_count(magnitudes->ndim, magnitudes->shape) != weight->shape[0])
        return fsdp_fail(err, FSDP_ERR_USAGE, "magnitudes of %s do not fit the weight",
                         fsdp_derived_text(magnitudes, text, sizeof text));
    FSDP_TRY(fsdp_derive_reshape(arena, magnitudes, 1, weight->shape, &parts[1], err));
    FSDP_TRY(fsdp_derive_cast(arena, parts[1], FSDP_F32, &parts[1], err));
    fsdp_derived like = {.ops = &row_length_ops,
                         .dtype = FSDP_F32,
                         .ndim = 2,
                         .shape = weight->shape,
                         .parts = parts,
                         .part_count = 2};
    FSDP_TRY(fsdp_derived_make(arena, &like, &made, err));
    *out = made;
    return FSDP_OK;
}

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

/*
 * A tile of a product is made and added in the first cache: as many rows as the kernel makes together, and
 * some columns. The weights of a run of rows are read to where the sums belong, and each tile is added to
 * them there. The matrix a is packed once for all rows.
 */
enum {
    TILE_ROWS = FSDP_TILE_ROWS,
    TILE_COLUMNS = 32 * FSDP_TILE_COLUMNS,
    MOST_PACKED = PIECE_FLOATS / FSDP_TILE_COLUMNS /* the largest rank that fits in a tile */
};

/* The buffers of one read of a product. */
typedef struct product_buffers {
    void *a, *packed, *b, *weight; /* packed: or the kernel's working memory, if a is not packed */
} product_buffers;
enum { PRODUCT_BUFFERS = sizeof(product_buffers) / sizeof(void *) };

typedef struct product_read {
    const fsdp_derived *tensor;
    fsdp_reader *reader;
    product_buffers buffers;
    int64_t rank, columns; /* of a */
} product_read;

/* Columns of a, of which a and packed have capacity for so many. */
static int64_t columns_within(int64_t rank)
{
    return rank > MOST_PACKED ? PIECE_FLOATS / rank
                              : PIECE_FLOATS / rank / FSDP_TILE_COLUMNS * FSDP_TILE_COLUMNS;
}

static fsdp_matrix columns_of_a(const product_read *read, int64_t column)
{
    return (fsdp_matrix){(const float *)read->buffers.a + column, read->columns, 1};
}

static void pack(const product_read *read)
{
    for (int64_t j = 0; read->rank <= MOST_PACKED && j < read->columns; j += TILE_COLUMNS)
        fsdp_matrix_pack((float *)read->buffers.packed + j * read->rank, columns_of_a(read, j),
                         read->rank, least(TILE_COLUMNS, read->columns - j));
}

static void multiply(const product_read *read, const float *b, int64_t rows, int64_t column,
                     float *out)
{
    float *packed = read->buffers.packed;
    bool is_packed = read->rank <= MOST_PACKED;
    const fsdp_matrix_scratch scratch = {packed, packed + PIECE_FLOATS / 4};
    const fsdp_matrix_product product = {.c = out,
                                         .c_row = TILE_COLUMNS,
                                         .a = {b, read->rank, 1},
                                         .b = columns_of_a(read, column),
                                         .m = rows,
                                         .n = least(TILE_COLUMNS, read->columns - column),
                                         .k = read->rank,
                                         .packed = is_packed ? packed + column * read->rank : NULL};
    fsdp_matrix_multiply(&product, &scratch);
}

/* Adds the factor times the product to rows of weights, as PEFT does. b begins with the first of them. */
static fsdp_status add(const product_read *read, const float *b, int64_t rows, char *weights,
                       fsdp_error *err)
{
    const fsdp_kernels *kernels = fsdp_kernels_get();
    fsdp_dtype dtype = read->tensor->dtype;
    int64_t size = (int64_t)fsdp_dtype_size(dtype), columns = read->columns;
    float tile[TILE_ROWS * TILE_COLUMNS], factor = (float)read->tensor->factor;
    size_t misfits = 0;
    for (int64_t j = 0; j < columns; j += TILE_COLUMNS)
        for (int64_t i = 0; i < rows; i += TILE_ROWS) {
            int64_t count = least(TILE_ROWS, rows - i);
            multiply(read, b + i * read->rank, count, j, tile);
            for (int64_t row = 0; row < count; row++)
                misfits += kernels->add_scaled(weights + ((i + row) * columns + j) * size, dtype,
                                               tile + row * TILE_COLUMNS, factor,
                                               (size_t)least(TILE_COLUMNS, columns - j));
        }
    return misfits == 0 ? FSDP_OK
                        : fsdp_fail(err, FSDP_ERR_DAMAGED, "a sum does not fit in %s",
                                    fsdp_dtype_name(dtype));
}

/* Makes rows of the box, all of its columns or some: those are made next to it and copied. */
static fsdp_status make_rows(const product_read *read, const fsdp_box *box, char *data,
                             const fsdp_box *rows, const float *b, fsdp_error *err)
{
    int64_t size = (int64_t)fsdp_dtype_size(read->tensor->dtype);
    bool is_whole = rows->len[1] == box->len[1];
    char *to =
        is_whole ? data + (rows->lo[0] - box->lo[0]) * box->len[1] * size : read->buffers.weight;
    FSDP_TRY(fsdp_derived_read(read->tensor->parts[0], read->reader, rows, to, err));
    FSDP_TRY(add(read, b, rows->len[0], to, err));
    if (!is_whole)
        fsdp_copy_shared(box, data, rows, to, (size_t)size);
    return FSDP_OK;
}

/* Makes the columns of the box for which a was read. */
static fsdp_status make_columns(const product_read *read, const fsdp_box *box, char *data,
                                int64_t column, fsdp_error *err)
{
    int64_t row_bytes = read->columns * (int64_t)fsdp_dtype_size(read->tensor->dtype);
    int64_t run = FSDP_DERIVED_RUN / row_bytes / TILE_ROWS * TILE_ROWS;
    int64_t end = box->lo[0] + box->len[0], together = PIECE_FLOATS / read->rank;
    const float *b = read->buffers.b;
    for (int64_t first = box->lo[0], next; first < end; first = next) {
        next = least(first + together, end);
        fsdp_box b_box = {.ndim = 2, .lo = {first, 0}, .len = {next - first, read->rank}};
        FSDP_TRY(
            fsdp_derived_read(read->tensor->parts[1], read->reader, &b_box, read->buffers.b, err));
        for (int64_t row = first, count; row < next; row += count) {
            count = least(run > 0 ? run : 1, next - row);
            fsdp_box rows = {.ndim = 2, .lo = {row, column}, .len = {count, read->columns}};
            FSDP_TRY(make_rows(read, box, data, &rows, b + (row - first) * read->rank, err));
        }
    }
    return FSDP_OK;
}

static fsdp_status take_buffers(product_read *read, fsdp_error *err)
{
    void **buffers[PRODUCT_BUFFERS] = {&read->buffers.a, &read->buffers.packed, &read->buffers.b,
                                       &read->buffers.weight};
    for (int i = 0; i < PRODUCT_BUFFERS; i++)
        FSDP_TRY(fsdp_derived_take(read->reader, buffers[i], err));
    return FSDP_OK;
}

static fsdp_status make_box(product_read *read, const fsdp_box *box, void *data, fsdp_error *err)
{
    int64_t most = least(columns_within(read->rank), FSDP_DERIVED_PIECE / 8), end = box->len[1];
    for (int64_t j = 0; j < end; j += read->columns) {
        read->columns = least(most, end - j);
        fsdp_box a_box = {.ndim = 2, .lo = {0, box->lo[1] + j}, .len = {read->rank, read->columns}};
        FSDP_TRY(
            fsdp_derived_read(read->tensor->parts[2], read->reader, &a_box, read->buffers.a, err));
        pack(read);
        FSDP_TRY(make_columns(read, box, data, box->lo[1] + j, err));
    }
    return FSDP_OK;
}

static fsdp_status read_product(const fsdp_derived *tensor, fsdp_reader *reader,
                                const fsdp_box *box, void *data, fsdp_error *err)
{
    product_read read = {.tensor = tensor, .reader = reader, .rank = tensor->parts[1]->shape[1]};
    int level = reader->buffers.used;
    fsdp_status st = take_buffers(&read, err);
    if (st == FSDP_OK)
        st = make_box(&read, box, data, err);
    while (reader->buffers.used > level)
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

/* False for a row without a length, or with one that f32 does not hold. */
static bool scale_row(const float *row, int64_t width, float magnitude, const fsdp_box *piece,
                      float *to)
{
    double square = 0;
    for (int64_t j = 0; j < width; j++)
        square += (double)row[j] * row[j];
    float length = (float)sqrt(square), factor = magnitude / length;
    for (int64_t j = 0; j < piece->len[1]; j++)
        to[j] = row[piece->lo[1] + j] * factor;
    return isfinite(length) && isfinite(factor);
}

/* Whole rows are read, since their lengths count all columns. */
static fsdp_status read_rows(const fsdp_derived *tensor, fsdp_reader *reader, const fsdp_box *piece,
                             float *buffer, float *to, fsdp_error *err)
{
    int64_t width = tensor->shape[1], rows = piece->len[0];
    const fsdp_box whole = {.ndim = 2, .lo = {piece->lo[0], 0}, .len = {rows, width}};
    float *magnitudes = buffer + rows * width;
    fsdp_box some = {.ndim = 1, .lo = {piece->lo[0]}, .len = {rows}};
    FSDP_TRY(fsdp_derived_read(tensor->parts[0], reader, &whole, buffer, err));
    FSDP_TRY(fsdp_derived_read(tensor->parts[1], reader, &some, magnitudes, err));
    for (int64_t i = 0; i < rows; i++)
        if (!scale_row(buffer + i * width, width, magnitudes[i], piece, to + i * piece->len[1]))
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "row %" PRId64
                             " cannot be scaled to the length %g: the row is zero or not finite",
                             piece->lo[0] + i, magnitudes[i]);
    return FSDP_OK;
}

static fsdp_status read_row_lengths(const fsdp_derived *tensor, fsdp_reader *reader,
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

/*
 * C = A B in blocks. For every block of columns and of the inner dimension B is packed into panels of a
 * tile's width; then each block of rows of A is multiplied by each panel, so that a block of A stays in the
 * second cache and a panel in the first. A is read in place when its inner dimension is contiguous, else it
 * is packed per tile.
 */
#include "kernels/matrix.h"

#include <string.h>

enum { TILE_ROWS = FSDP_TILE_ROWS, TILE_COLUMNS = FSDP_TILE_COLUMNS };

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static fsdp_matrix part_of(fsdp_matrix whole, int64_t row, int64_t column)
{
    whole.data += row * whole.row + column * whole.column;
    return whole;
}

void fsdp_matrix_transpose(float *to, int64_t to_row, const float *from, int64_t from_row,
                           int64_t rows, int64_t columns)
{
    fsdp_matrix_variant_get()->transpose(to, to_row, from, from_row, rows, columns);
}

/* --- packing ---------------------------------------------------------------------------------- */

enum {
    TOGETHER = 8
}; /* rows: enough neighbouring lines of a panel, and streams that are foreseen */

/*
 * Rows of k x n, cut into panels of a tile's width; the last one is filled up with zeros. Some rows are
 * packed together, since panels lie so far apart that their lines take each other's place in the first
 * cache. The rows after them are fetched ahead: each may lie on a page of its own.
 */
static void pack_rows_of_b(float *to, fsdp_matrix b, int64_t k, int64_t n)
{
    int64_t whole = n / TILE_COLUMNS * TILE_COLUMNS, panel = k * TILE_COLUMNS;
    float *last = to + whole * k;
    if (whole < n)
        memset(last, 0, (size_t)panel * sizeof *to);
    for (int64_t p = 0; p < k; p += TOGETHER) {
        int64_t rows = smaller(k - p, TOGETHER), ahead = smaller(TOGETHER, k - p - rows);
        const float *from = b.data + p * b.row;
        for (int64_t j = 0; j < whole; j += TILE_COLUMNS) {
            float *packed = to + j * k + p * TILE_COLUMNS;
            for (int64_t i = 0; i < ahead; i++)
                __builtin_prefetch(from + (rows + i) * b.row + j, 0, 2);
            for (int64_t i = 0; i < rows; i++)
                memcpy(packed + i * TILE_COLUMNS, from + i * b.row + j, TILE_COLUMNS * sizeof *to);
        }
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = whole; j < n; j++)
                last[(p + i) * TILE_COLUMNS + j - whole] = from[i * b.row + j];
    }
}

/* Packs like pack_rows_of_b, for a B whose columns are contiguous. */
static void pack_columns_of_b(float *to, fsdp_matrix b, int64_t k, int64_t n)
{
    for (int64_t j = 0; j < n; j += TILE_COLUMNS, to += k * TILE_COLUMNS) {
        int64_t columns = smaller(n - j, TILE_COLUMNS);
        if (columns < TILE_COLUMNS)
            memset(to, 0, (size_t)(k * TILE_COLUMNS) * sizeof *to);
        fsdp_matrix_transpose(to, TILE_COLUMNS, b.data + j * b.column, b.column, columns, k);
    }
}

static void pack_b(float *to, fsdp_matrix b, int64_t k, int64_t n)
{
    if (b.column == 1)
        pack_rows_of_b(to, b, k, n);
    else
        pack_columns_of_b(to, b, k, n);
}

/* Splits rows evenly: a last tile of few rows has too few sums to hide the latency of its multiply-adds. */
typedef struct row_split {
    int64_t count, rows;
} row_split;

static row_split split_rows(int64_t rows)
{
    return (row_split){(rows + TILE_ROWS - 1) / TILE_ROWS, rows};
}

static int64_t first_row(row_split split, int64_t tile)
{
    return split.rows * tile / split.count;
}

/* Copies neighbours in memory eight at a time. The next copy overwrites the elements that are too many, the
 * next tile those of the last copy; at the end of the scratch they lie in its spare room. */
static void pack_neighbours(float *tile, const float *from, int64_t step, int64_t rows, int64_t k)
{
    for (int64_t p = 0; p < k; p++)
        memcpy(tile + p * rows, from + p * step, FSDP_MATRIX_SPARE * sizeof *tile);
}

/* A tile's rows together, element by element of the inner dimension. whole: rows of A from here on. */
static void pack_rows(float *to, fsdp_matrix a, row_split split, int64_t k, int64_t whole)
{
    for (int64_t t = 0; t < split.count; t++) {
        int64_t first = first_row(split, t), rows = first_row(split, t + 1) - first;
        const float *from = a.data + first * a.row;
        float *tile = to + first * k;
        if (a.row == 1 && first + FSDP_MATRIX_SPARE <= whole) {
            pack_neighbours(tile, from, a.column, rows, k);
            continue;
        }
        for (int64_t p = 0; p < k; p++)
            for (int64_t i = 0; i < rows; i++)
                tile[p * rows + i] = from[i * a.row + p * a.column];
    }
}

/* --- blocks ----------------------------------------------------------------------------------- */

typedef struct block {
    const fsdp_matrix_variant *variant;
    float *c;
    int64_t c_row, k;
    fsdp_matrix a;
    bool a_is_packed, adds;
    const float *bias; /* with the last block of the inner dimension */
} block;

/* Makes a tile of fewer columns in a buffer and copies it to C. */
static void make_narrow_tile(const block *work, fsdp_tile tile, int64_t columns)
{
    float beside[TILE_ROWS * TILE_COLUMNS] = {0}, bias[TILE_COLUMNS] = {0};
    float *c = tile.c;
    int64_t c_row = tile.c_row;
    for (int64_t i = 0; tile.adds && i < tile.rows; i++)
        memcpy(beside + i * TILE_COLUMNS, c + i * c_row, (size_t)columns * sizeof *c);
    if (tile.bias)
        tile.bias = memcpy(bias, tile.bias, (size_t)columns * sizeof *bias);
    tile.c = beside;
    tile.c_row = TILE_COLUMNS;
    work->variant->tile(&tile);
    for (int64_t i = 0; i < tile.rows; i++)
        memcpy(c + i * c_row, beside + i * TILE_COLUMNS, (size_t)columns * sizeof *c);
}

/* Fetches the elements of C of the next tile, while the current one is made. */
static void foresee_tile(const block *work, int64_t first, int64_t rows, int64_t column)
{
    for (int64_t i = 0; i < rows; i++) {
        const float *c = work->c + (first + i) * work->c_row + column;
        __builtin_prefetch(c, 1);
        __builtin_prefetch(c + TILE_COLUMNS - 1, 1);
    }
}

static void multiply_panel(const block *work, row_split split, const float *b, int64_t column,
                           int64_t columns)
{
    for (int64_t t = 0; t < split.count; t++) {
        int64_t first = first_row(split, t), rows = first_row(split, t + 1) - first;
        fsdp_tile tile = {.c = work->c + first * work->c_row + column,
                          .c_row = work->c_row,
                          .a = work->a.data + first * (work->a_is_packed ? work->k : work->a.row),
                          .a_row = work->a_is_packed ? 1 : work->a.row,
                          .a_inner = work->a_is_packed ? rows : work->a.column,
                          .b = b,
                          .rows = rows,
                          .k = work->k,
                          .adds = work->adds,
                          .bias = work->bias ? work->bias + column : NULL};
        int64_t next = t + 1 < split.count ? first + rows : 0;
        foresee_tile(work, next, rows, t + 1 < split.count ? column : column + TILE_COLUMNS);
        if (columns == TILE_COLUMNS)
            work->variant->tile(&tile);
        else
            make_narrow_tile(work, tile, columns);
    }
}

/* All rows of C against one packed block of B, n columns wide; `room` is for packed rows of A. */
static void multiply_block(block work, int64_t m, int64_t n, const float *packed, float *room)
{
    const fsdp_matrix a = work.a;
    float *c = work.c;
    for (int64_t i = 0; i < m; i += FSDP_MATRIX_ROWS) {
        row_split split = split_rows(smaller(m - i, FSDP_MATRIX_ROWS));
        work.a = part_of(a, i, 0);
        work.c = c + i * work.c_row;
        work.a_is_packed = a.column != 1;
        if (work.a_is_packed) {
            pack_rows(room, work.a, split, work.k, m - i);
            work.a.data = room;
        }
        const float *b = packed;
        for (int64_t j = 0; j < n; j += TILE_COLUMNS, b += work.k * TILE_COLUMNS)
            multiply_panel(&work, split, b, j, smaller(n - j, TILE_COLUMNS));
    }
}

/* Columns of a block of B: a short inner dimension leaves space for more. */
static int64_t width_for(int64_t k)
{
    int64_t inner = k < TILE_COLUMNS ? TILE_COLUMNS : smaller(k, FSDP_MATRIX_INNER);
    return FSDP_MATRIX_INNER * FSDP_MATRIX_COLUMNS / inner / TILE_COLUMNS * TILE_COLUMNS;
}

/* Computes the product of matrices without an inner dimension. */
static void multiply_nothing(const fsdp_matrix_product *product)
{
    for (int64_t i = 0; i < product->m; i++) {
        float *c = product->c + i * product->c_row;
        for (int64_t j = 0; j < product->n; j++)
            c[j] = (product->adds ? c[j] : 0) + (product->bias ? product->bias[j] : 0);
    }
}

/* Cuts the inner dimension into blocks of about the same size. */
static int64_t blocks_of(int64_t k)
{
    return (k + FSDP_MATRIX_INNER - 1) / FSDP_MATRIX_INNER;
}

void fsdp_matrix_pack(float *to, fsdp_matrix b, int64_t k, int64_t n)
{
    int64_t steps = blocks_of(k), panels = (n + TILE_COLUMNS - 1) / TILE_COLUMNS;
    for (int64_t t = 0, p = 0, end; t < steps; t++, p = end) {
        end = k * (t + 1) / steps;
        pack_b(to + p * panels * TILE_COLUMNS, part_of(b, p, 0), end - p, n);
    }
}

void fsdp_matrix_multiply(const fsdp_matrix_product *product, const fsdp_matrix_scratch *scratch)
{
    float *c = product->c;
    int64_t n = product->n, k = product->k;
    if (k == 0)
        multiply_nothing(product);
    int64_t steps = blocks_of(k), panels = (n + TILE_COLUMNS - 1) / TILE_COLUMNS;
    int64_t width = product->packed ? n : width_for(k);
    for (int64_t j = 0; j < n; j += width) {
        int64_t columns = smaller(n - j, width);
        for (int64_t t = 0, p = 0, end; t < steps; t++, p = end) {
            end = k * (t + 1) / steps;
            block work = {.variant = fsdp_matrix_variant_get(),
                          .c = c + j,
                          .c_row = product->c_row,
                          .k = end - p,
                          .a = part_of(product->a, 0, p),
                          .adds = p > 0 || product->adds};
            const float *packed = scratch->b;
            if (product->bias && end == k)
                work.bias = product->bias + j;
            if (product->packed)
                packed = product->packed + p * panels * TILE_COLUMNS;
            else
                pack_b(scratch->b, part_of(product->b, p, j), work.k, columns);
            multiply_block(work, product->m, columns, packed, scratch->a);
        }
    }
}

/* Tiles of a product, and transposition, in plain C. See matrix.h. */
#include "kernels/matrix.h"

#include <math.h>

static void multiply_tile(const fsdp_tile *tile)
{
    for (int64_t i = 0; i < tile->rows; i++) {
        float *c = tile->c + i * tile->c_row;
        const float *a = tile->a + i * tile->a_row, *b = tile->b;
        float sums[FSDP_TILE_COLUMNS];
        for (int j = 0; j < FSDP_TILE_COLUMNS; j++)
            sums[j] = tile->adds ? c[j] : 0;
        for (int64_t p = 0; p < tile->k; p++, b += FSDP_TILE_COLUMNS)
            for (int j = 0; j < FSDP_TILE_COLUMNS; j++)
                sums[j] = fmaf(a[p * tile->a_inner], b[j], sums[j]);
        for (int j = 0; j < FSDP_TILE_COLUMNS; j++)
            c[j] = tile->bias ? sums[j] + tile->bias[j] : sums[j];
    }
}

static void transpose(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows,
                      int64_t columns)
{
    for (int64_t j = 0; j < columns; j++)
        for (int64_t i = 0; i < rows; i++)
            to[j * to_row + i] = from[i * from_row + j];
}

const fsdp_matrix_variant fsdp_matrix_c = {
    .name = "c", .tile = multiply_tile, .transpose = transpose};

/* Tiles of a product, and transposition, with AVX2 and fused multiply-adds. See matrix.h. */
#include "kernels/matrix.h"

#include <immintrin.h>

enum { LANES = 8 };

/* --- tiles ------------------------------------------------------------------------------------ */

/* Inlined with a constant number of rows, so that all sums stay in registers. */
__attribute__((always_inline)) static inline void multiply_rows(const fsdp_tile *tile, int rows)
{
    __m256 low[FSDP_TILE_ROWS], high[FSDP_TILE_ROWS];
    const float *a = tile->a, *b = tile->b;
    const int64_t a_row = tile->a_row, a_inner = tile->a_inner;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        const float *c = tile->c + i * tile->c_row;
        low[i] = tile->adds ? _mm256_loadu_ps(c) : _mm256_setzero_ps();
        high[i] = tile->adds ? _mm256_loadu_ps(c + LANES) : _mm256_setzero_ps();
    }
    for (int64_t p = tile->k; p > 0; p--) {
        __m256 b_low = _mm256_loadu_ps(b), b_high = _mm256_loadu_ps(b + LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            __m256 one = _mm256_broadcast_ss(a + i * a_row);
            low[i] = _mm256_fmadd_ps(one, b_low, low[i]);
            high[i] = _mm256_fmadd_ps(one, b_high, high[i]);
        }
        a += a_inner;
        b += FSDP_TILE_COLUMNS;
    }
    if (tile->bias) {
        __m256 bias_low = _mm256_loadu_ps(tile->bias),
               bias_high = _mm256_loadu_ps(tile->bias + LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            low[i] = _mm256_add_ps(low[i], bias_low);
            high[i] = _mm256_add_ps(high[i], bias_high);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        float *c = tile->c + i * tile->c_row;
        _mm256_storeu_ps(c, low[i]);
        _mm256_storeu_ps(c + LANES, high[i]);
    }
}

static void multiply_tile(const fsdp_tile *tile)
{
    switch (tile->rows) {
    case 1: multiply_rows(tile, 1); return;
    case 2: multiply_rows(tile, 2); return;
    case 3: multiply_rows(tile, 3); return;
    case 4: multiply_rows(tile, 4); return;
    case 5: multiply_rows(tile, 5); return;
    default: multiply_rows(tile, FSDP_TILE_ROWS); return;
    }
}

/* --- transposition ---------------------------------------------------------------------------- */

static inline void transpose_square(float *to, int64_t to_row, const float *from, int64_t from_row)
{
    __m256 r[LANES], s[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++)
        r[i] = _mm256_loadu_ps(from + i * from_row);
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 2) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < LANES; i += 4) {
        r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 2; i++) {
        _mm256_storeu_ps(to + i * to_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

static void transpose(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows,
                      int64_t columns)
{
    int64_t whole_rows = rows / LANES * LANES, whole_columns = columns / LANES * LANES;
    for (int64_t j = 0; j < whole_columns; j += LANES)
        for (int64_t i = 0; i < whole_rows; i += LANES)
            transpose_square(to + j * to_row + i, to_row, from + i * from_row + j, from_row);
    fsdp_matrix_c.transpose(to + whole_columns * to_row, to_row, from + whole_columns, from_row,
                            rows, columns - whole_columns);
    fsdp_matrix_c.transpose(to + whole_rows, to_row, from + whole_rows * from_row, from_row,
                            rows - whole_rows, whole_columns);
}

const fsdp_matrix_variant fsdp_matrix_avx2 = {
    .name = "avx2", .tile = multiply_tile, .transpose = transpose};

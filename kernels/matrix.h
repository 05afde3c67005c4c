/*
 * Products of f32 matrices, C = A B, in blocks that stay in the caches; kernels/train/matrix.c. The code of a
 * tile of C depends on the processor (kernels/train/matrix_tile.c, kernels/x86/matrix_avx2.c), its bits do
 * not: every element is one chain of fused multiply-adds in the order of the inner dimension.
 */
#ifndef FSDP_MATRIX_H
#define FSDP_MATRIX_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FSDP_TILE_ROWS = 6,        /* with two vectors of columns: twelve sums in registers */
    FSDP_TILE_COLUMNS = 16
};

/* A matrix in memory with strides: element (i, j) is data[i * row + j * column]. */
typedef struct fsdp_matrix { const float *data; int64_t row, column; } fsdp_matrix;

/* Working memory that products of any size share: packed blocks, and capacity for a transposed result. */
typedef struct fsdp_matrix_scratch { float *a, *b; } fsdp_matrix_scratch;
enum {
    FSDP_MATRIX_INNER = 384,   /* of a block */
    FSDP_MATRIX_ROWS = 96,
    FSDP_MATRIX_COLUMNS = 1024, /* wide, since packed rows of A are used for each */
    FSDP_MATRIX_SPARE = 8,     /* elements after a packed block of A */
    FSDP_MATRIX_A_BYTES = (FSDP_MATRIX_ROWS * FSDP_MATRIX_INNER + FSDP_MATRIX_SPARE) * 4,
    FSDP_MATRIX_B_BYTES = FSDP_MATRIX_INNER * FSDP_MATRIX_COLUMNS * 4
};

/* C, m x n with rows c_row elements apart, becomes the product of A, m x k, and B, k x n. C overlaps
 * neither. The chains start from zero, or from what is in C; a bias is added at their end. */
typedef struct fsdp_matrix_product {
    float *c;
    int64_t c_row;
    fsdp_matrix a, b;
    int64_t m, n, k;
    bool adds;
    const float *bias;         /* of each column; NULL: none */
    const float *packed;       /* B, as fsdp_matrix_pack leaves it, in place of b; NULL: b */
} fsdp_matrix_product;
/* scratch: FSDP_MATRIX_A_BYTES and FSDP_MATRIX_B_BYTES; b is not used when B is packed. */
void fsdp_matrix_multiply(const fsdp_matrix_product *product, const fsdp_matrix_scratch *scratch);

/* Packs B, k x n, for products with several A. `to` has k times n elements, n rounded up to whole tiles. */
void fsdp_matrix_pack(float *to, fsdp_matrix b, int64_t k, int64_t n);

/* to[j * to_row + i] = from[i * from_row + j] */
void fsdp_matrix_transpose(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows,
                           int64_t columns);

/* --- per processor ----------------------------------------------------------------------------- */

typedef struct fsdp_tile {
    float *c;                  /* rows (at most FSDP_TILE_ROWS) x FSDP_TILE_COLUMNS */
    int64_t c_row;
    const float *a;            /* element (i, p) is a[i * a_row + p * a_inner] */
    int64_t a_row, a_inner;
    const float *b;            /* k rows of FSDP_TILE_COLUMNS elements, packed */
    int64_t rows, k;
    bool adds;                 /* the sums start from the values in c; else from zero */
    const float *bias;         /* of each column, added at the end; NULL: none */
} fsdp_tile;

typedef struct fsdp_matrix_variant {
    const char *name;
    void (*tile)(const fsdp_tile *tile);
    void (*transpose)(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows,
                      int64_t columns);
} fsdp_matrix_variant;

extern const fsdp_matrix_variant fsdp_matrix_c;
#if defined(__x86_64__)
extern const fsdp_matrix_variant fsdp_matrix_avx2;
#endif
/* The best for this processor; FSDP_KERNELS=c forces the plain one. */
const fsdp_matrix_variant *fsdp_matrix_variant_get(void);

#endif

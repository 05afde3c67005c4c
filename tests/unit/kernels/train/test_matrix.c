/*
 * Products with a B that was packed before: the same bits as from B itself, of every size around a tile and
 * around a block of the inner dimension. tests/unit/kernels/nn compares products with plain sums.
 */
#include "kernels/matrix.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

typedef struct some_floats {
    float *data;
    size_t bytes;
} some_floats;

static some_floats make(int64_t count)
{
    some_floats made = {.bytes = (size_t)count * sizeof(float)};
    made.data = malloc(made.bytes + 1);
    cr_assert(made.data);
    for (int64_t i = 0; i < count; i++)
        made.data[i] = (float)(i * 7919 % 1009) / 64 - 7;
    return made;
}

static int64_t whole_tiles(int64_t n)
{
    return (n + FSDP_TILE_COLUMNS - 1) / FSDP_TILE_COLUMNS * FSDP_TILE_COLUMNS;
}

static void compare(int64_t m, int64_t n, int64_t k, bool adds)
{
    some_floats a = make(m * k), b = make(k * n), plain = make(m * n), other = make(m * n);
    some_floats packed = make(k * whole_tiles(n));
    fsdp_matrix_scratch scratch = {malloc(FSDP_MATRIX_A_BYTES), malloc(FSDP_MATRIX_B_BYTES)};
    fsdp_matrix_product product = {.c = plain.data,
                                   .c_row = n,
                                   .a = {a.data, k, 1},
                                   .b = {b.data, n, 1},
                                   .m = m,
                                   .n = n,
                                   .k = k,
                                   .adds = adds};
    cr_assert(scratch.a && scratch.b);
    fsdp_matrix_multiply(&product, &scratch);
    fsdp_matrix_pack(packed.data, product.b, k, n);
    product.packed = packed.data;
    product.b = (fsdp_matrix){0};
    product.c = other.data;
    fsdp_matrix_multiply(&product, &(fsdp_matrix_scratch){.a = scratch.a});
    cr_assert_arr_eq(plain.data, other.data, plain.bytes, "%lld x %lld, %lld", (long long)m,
                     (long long)n, (long long)k);
    float *all[] = {a.data, b.data, plain.data, other.data, packed.data, scratch.a, scratch.b};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

Test(matrix, a_packed_matrix_gives_the_same_bits)
{
    static const int64_t sizes[] = {1, 5, 6, 7, 15, 16, 17, 100};
    static const int64_t inner[] = {1, 16, 383, 384, 385, 1000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++)
            for (size_t p = 0; p < sizeof inner / sizeof *inner; p++)
                compare(sizes[i], sizes[j], inner[p], (i + j) % 2 == 1);
    compare(6, 3000, 500, false); /* wider than a block of B that is not packed before */
}

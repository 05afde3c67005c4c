/* Strided box copy against one that moves one element at a time; bytes outside stay as they were. */
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { ARENA = 1 << 16, MOST_DIMS = 5 };

static void copy_by_element(uint8_t *to, const int64_t *to_strides, const uint8_t *from,
                            const int64_t *from_strides, int ndim, const int64_t *len, size_t size)
{
    if (ndim == 0) {
        memcpy(to, from, size);
        return;
    }
    for (int64_t i = 0; i < len[0]; i++)
        copy_by_element(to + i * to_strides[0], to_strides + 1, from + i * from_strides[0],
                        from_strides + 1, ndim - 1, len + 1, size);
}

/* Strides of a box in a larger array: each dim is padded by up to 2 at random. */
static int64_t random_strides(int64_t *strides, int ndim, const int64_t *len, size_t size)
{
    int64_t extent = (int64_t)size;
    for (int dim = ndim - 1; dim >= 0; dim--) {
        strides[dim] = extent;
        extent *= len[dim] + (rand() % 2 ? 0 : rand() % 3);
    }
    return extent;
}

static void swap_dims(int64_t *strides, int64_t *other_strides, int64_t *len, int a, int b)
{
    int64_t *all[3] = {strides, other_strides, len};
    for (int i = 0; i < 3; i++) {
        int64_t before = all[i][a];
        all[i][a] = all[i][b];
        all[i][b] = before;
    }
}

static void copy_one_random_box(const uint8_t *from)
{
    static const size_t sizes[] = {1, 2, 3, 4, 6, 8, 16};
    static uint8_t to[ARENA], expected[ARENA];
    int64_t len[MOST_DIMS], to_strides[MOST_DIMS], from_strides[MOST_DIMS];
    size_t size = sizes[rand() % 7];
    int ndim = rand() % (MOST_DIMS + 1);
    for (int dim = 0; dim < ndim; dim++)
        len[dim] = rand() % 20 == 0 ? 0 : 1 + rand() % 5;
    random_strides(to_strides, ndim, len, size);
    random_strides(from_strides, ndim, len, size);
    if (ndim > 1 && rand() % 3 == 0)
        swap_dims(to_strides, from_strides, len, rand() % ndim, rand() % ndim);
    memset(to, 0xa5, sizeof to);
    memset(expected, 0xa5, sizeof expected);
    size_t shift = (size_t)(rand() % 9);
    const uint8_t *source = from + rand() % 9;
    copy_by_element(expected + shift, to_strides, source, from_strides, ndim, len, size);
    fsdp_copy_box(
        &(fsdp_strided_copy){to + shift, to_strides, source, from_strides, ndim, len, size});
    cr_assert_arr_eq(to, expected, sizeof to, "%d dims of %zu bytes", ndim, size);
}

Test(kernels_copy, random_boxes_equal_the_copy_by_element)
{
    static uint8_t from[ARENA];
    srand(3);
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)rand();
    for (int i = 0; i < 6000; i++)
        copy_one_random_box(from);
}

Test(kernels_copy, negative_and_zero_strides_are_followed)
{
    const int32_t from[4] = {1, 2, 3, 4};
    int32_t to[8] = {0};
    const int64_t to_strides[2] = {16, 4}, from_strides[2] = {0, -4}, len[2] = {2, 4};
    fsdp_copy_box(&(fsdp_strided_copy){to, to_strides, from + 3, from_strides, 2, len, 4});
    const int32_t expected[8] = {4, 3, 2, 1, 4, 3, 2, 1};
    cr_assert_arr_eq(to, expected, sizeof to);
}

Test(kernels_copy, a_scalar_is_one_element)
{
    const double from = 1.5;
    double to = 0;
    fsdp_copy_box(&(fsdp_strided_copy){&to, NULL, &from, NULL, 0, NULL, sizeof to});
    cr_assert_eq(to, 1.5);
}

Test(kernels_copy, all_dims_of_the_largest_rank_are_walked)
{
    int64_t len[FSDP_MAX_DIMS], to_strides[FSDP_MAX_DIMS], from_strides[FSDP_MAX_DIMS];
    uint16_t from[256], to[256] = {0};
    for (int i = 0; i < 256; i++)
        from[i] = (uint16_t)i;
    /* Eight dims of two, transposed, among dims of one. */
    enum { APART = FSDP_MAX_DIMS / 8 };
    for (int dim = 0; dim < FSDP_MAX_DIMS; dim++) {
        len[dim] = dim % APART == 0 ? 2 : 1;
        to_strides[dim] = 2 << dim / APART;
        from_strides[dim] = 2 << (7 - dim / APART);
    }
    fsdp_copy_box(&(fsdp_strided_copy){to, to_strides, from, from_strides, FSDP_MAX_DIMS, len, 2});
    cr_assert_eq(to[1], 128);
    cr_assert_eq(to[128], 1);
    cr_assert_eq(to[0x0f], 0xf0);
    cr_assert_eq(to[0x35], 0xac);
}

Test(kernels_copy, an_empty_box_touches_nothing)
{
    const int64_t strides[2] = {8, 1}, len[2] = {3, 0};
    uint8_t to = 7;
    fsdp_copy_box(&(fsdp_strided_copy){&to, strides, NULL, strides, 2, len, 1});
    cr_assert_eq(to, 7);
}

Test(kernels_copy, large_copies_write_what_memcpy_writes)
{
    static uint8_t from[ARENA], to[ARENA], expected[ARENA];
    const fsdp_kernels *tables[8];
    size_t count = fsdp_kernels_all(tables, 8);
    srand(4);
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)rand();
    for (int i = 0; i < 2000; i++) {
        size_t at = (size_t)(rand() % 200), source = (size_t)(rand() % 200);
        size_t size = (size_t)(rand() % (i % 2 ? 300 : 5000));
        memset(to, 0xa5, sizeof to);
        memset(expected, 0xa5, sizeof expected);
        memcpy(expected + at, from + source, size);
        tables[(size_t)i % count]->copy_large(to + at, from + source, size);
        cr_assert_arr_eq(to, expected, sizeof to, "%zu bytes from %zu to %zu", size, source, at);
    }
}

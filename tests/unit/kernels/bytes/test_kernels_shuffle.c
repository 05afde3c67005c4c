/* Byte shuffle against HDF5's definition: byte i of all elements stands together, then byte i + 1. */
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 16 * 300, GUARD = 0xa5 };

static void check(const fsdp_kernels *kernels, const uint8_t *from, size_t count,
                  size_t element_size, size_t shift)
{
    uint8_t to[MOST + 32], back[MOST + 32];
    size_t size = count * element_size;
    memset(to, GUARD, sizeof to);
    memset(back, GUARD, sizeof back);
    kernels->shuffle(to + shift, from, size, element_size);
    for (size_t i = 0; i < count; i++) {
        for (size_t byte = 0; byte < element_size; byte++)
            cr_assert_eq(to[shift + byte * count + i], from[i * element_size + byte],
                         "%s: byte %zu of element %zu of %zu, size %zu", kernels->name, byte, i,
                         count, element_size);
    }
    kernels->unshuffle(back + shift, to + shift, size, element_size);
    cr_assert_arr_eq(back + shift, from, size, "%s: %zu elements of %zu", kernels->name, count,
                     element_size);
    cr_assert_eq(to[shift + size], GUARD);
    cr_assert_eq(back[shift + size], GUARD);
}

Test(kernels_shuffle, bytes_of_equal_place_stand_together_and_come_back)
{
    static const size_t sizes[] = {1, 2, 3, 4, 8, 16};
    const fsdp_kernels *tables[8];
    size_t table_count = fsdp_kernels_all(tables, 8);
    uint8_t from[MOST + 8];
    srand(5);
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)rand();
    for (size_t t = 0; t < table_count; t++) {
        for (size_t s = 0; s < 6; s++) {
            for (size_t count = 0; count < 300; count++)
                check(tables[t], from + count % 5, count, sizes[s], count % 7);
        }
    }
}

/* Longer than one pass of the plain version. */
Test(kernels_shuffle, long_arrays_are_equal_in_all_variants)
{
    enum { COUNT = 5003 };
    const fsdp_kernels *tables[8];
    size_t table_count = fsdp_kernels_all(tables, 8);
    static uint8_t from[8 * COUNT], to[8 * COUNT], back[8 * COUNT];
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t t = 0; t < table_count; t++) {
        for (size_t n = 2; n <= 8; n *= 2) {
            tables[t]->shuffle(to, from, n * COUNT, n);
            for (size_t i = 0; i < n * COUNT; i++)
                cr_assert_eq(to[i % n * COUNT + i / n], from[i]);
            tables[t]->unshuffle(back, to, n * COUNT, n);
            cr_assert_arr_eq(back, from, n * COUNT);
        }
    }
}

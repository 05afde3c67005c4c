/* CRC-32: zlib's values for all sizes and places, by every variant; joining is as good as continuing. */
#include "kernels/kernels.h"
#include "kernels/variants.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum { MOST = 1500, PLACES = 17 };

static uint8_t bytes[MOST + PLACES + 64];

static void fill(void)
{
    srand(7);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(rand() >> 8);
}

static void expect_zlib(fsdp_crc32_add *add, const char *name)
{
    for (size_t place = 0; place < PLACES; place++)
        for (size_t size = 0; size <= MOST; size++) {
            uint32_t expected = (uint32_t)crc32_z(0x12345678, bytes + place, size);
            cr_assert_eq(~add(~(uint32_t)0x12345678, bytes + place, size), expected,
                         "%s, %zu bytes at %zu", name, size, place);
        }
}

Test(kernels_crc32, the_published_check_value)
{
    cr_assert_eq(fsdp_crc32(0, "123456789", 9), 0xcbf43926);
    cr_assert_eq(fsdp_crc32(0, "", 0), 0);
}

Test(kernels_crc32, plain_is_as_zlib)
{
    fill();
    expect_zlib(fsdp_crc32_add_c, "c");
}

Test(kernels_crc32, the_variant_of_this_processor_is_as_zlib)
{
    fill();
    expect_zlib(fsdp_crc32_add_get(), "chosen");
}

Test(kernels_crc32, pieces_go_on_and_join)
{
    fill();
    uint32_t whole = fsdp_crc32(0, bytes, MOST);
    for (size_t cut = 0; cut <= MOST; cut++) {
        uint32_t first = fsdp_crc32(0, bytes, cut);
        cr_assert_eq(fsdp_crc32(first, bytes + cut, MOST - cut), whole);
        cr_assert_eq(fsdp_crc32_join(first, fsdp_crc32(0, bytes + cut, MOST - cut), MOST - cut),
                     whole);
    }
}

Test(kernels_crc32, joining_over_more_than_4_gib_is_as_zlib)
{
    static const uint64_t sizes[] = {1, 255, 65536, (uint64_t)1 << 31, ((uint64_t)1 << 40) + 12345};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        cr_assert_eq(fsdp_crc32_join(0xdeadbeef, 0x1234567, sizes[i]),
                     (uint32_t)crc32_combine(0xdeadbeef, 0x1234567, (z_off_t)sizes[i]));
}

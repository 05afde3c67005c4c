/* Comparing elements: equality, counts, and the element that is shown. */
#include <criterion/criterion.h>

#include "kernels/kernels.h"
#include "statedict/diff/diff_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static fsdp_diff_found compare(fsdp_dtype a_type, const void *a, fsdp_dtype b_type, const void *b,
                               int64_t count, double atol, double rtol, int64_t ulp)
{
    fsdp_diff_rule rule = {a_type, b_type, atol, rtol, ulp};
    fsdp_diff_found found = {0};
    fsdp_diff_data(&rule, a, b, 0, count, &found);
    return found;
}

static int64_t differing_f32(uint32_t a, uint32_t b, double atol, double rtol, int64_t ulp)
{
    return compare(FSDP_F32, &a, FSDP_F32, &b, 1, atol, rtol, ulp).differing;
}

Test(diff, without_tolerances_bits_decide)
{
    const uint32_t zero = 0, minus_zero = 0x80000000, nan = 0x7FC00000, other_nan = 0x7FC00001;
    cr_assert_eq(differing_f32(nan, nan, 0, 0, 0), 0);
    cr_assert_eq(differing_f32(nan, other_nan, 0, 0, 0), 1);
    cr_assert_eq(differing_f32(zero, minus_zero, 0, 0, 0), 1);
    cr_assert_eq(differing_f32(zero, minus_zero, 1e-300, 0, 0), 0);
    cr_assert_eq(differing_f32(nan, zero, INFINITY, 0, 0), 1);
    cr_assert_eq(compare(FSDP_F32, &nan, FSDP_F32, &zero, 1, 0, 0, 0).max_abs, INFINITY);
    cr_assert_eq(differing_f32(0x7F800000, 0xFF800000, 1e300, 0, 0), 1, "infinities of both signs");
}

Test(diff, tolerances_include_their_bounds)
{
    const float a[] = {1, 100, -8}, b[] = {1.5F, 101, -8.25F};
    cr_assert_eq(compare(FSDP_F32, a, FSDP_F32, b, 3, 0.5, 0, 0).differing, 1);
    cr_assert_eq(compare(FSDP_F32, a, FSDP_F32, b, 3, 0.49, 0, 0).differing, 2);
    cr_assert_eq(compare(FSDP_F32, a, FSDP_F32, b, 3, 0, 0.01, 0).differing, 2);
    cr_assert_eq(compare(FSDP_F32, a, FSDP_F32, b, 3, 0.25, 0.01, 0).differing, 1);
}

static int by_value(const void *left, const void *right)
{
    const double *a = left, *b = right;
    return (a[0] > b[0]) - (a[0] < b[0]);
}

/* Neighbouring values of every type are one step apart, the next ones two. */
static void check_steps(fsdp_dtype dtype)
{
    static double values[65536][2]; /* value, code */
    size_t size = fsdp_dtype_size(dtype), count = 0;
    for (uint32_t code = 0; code < (size == 1 ? 256U : 65536U); code++) {
        double value;
        fsdp_kernels_get()->cast(&value, FSDP_F64, &code, dtype, 1, FSDP_OVERFLOW_INF);
        if (isnan(value) || (value == 0 && signbit(value)))
            continue;
        values[count][0] = value;
        values[count++][1] = code;
    }
    qsort(values, count, sizeof values[0], by_value);
    for (size_t i = 2; i < count; i++) {
        uint32_t far = (uint32_t)values[i - 2][1], near = (uint32_t)values[i - 1][1];
        uint32_t here = (uint32_t)values[i][1];
        cr_assert_eq(compare(dtype, &near, dtype, &here, 1, 0, 0, 1).differing, 0, "%s %zu",
                     fsdp_dtype_name(dtype), i);
        cr_assert_eq(compare(dtype, &far, dtype, &here, 1, 0, 0, 1).differing, 1);
        cr_assert_eq(compare(dtype, &far, dtype, &here, 1, 0, 0, 2).differing, 0);
    }
}

Test(diff, a_step_is_the_next_number_of_the_type)
{
    const fsdp_dtype types[] = {FSDP_F16,         FSDP_BF16,        FSDP_F8_E4M3FN, FSDP_F8_E5M2,
                                FSDP_F8_E4M3FNUZ, FSDP_F8_E5M2FNUZ, FSDP_F8_E8M0FNU};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        check_steps(types[i]);
    const float one = 1, next = nextafterf(1, 2);
    cr_assert_eq(compare(FSDP_F32, &one, FSDP_F32, &next, 1, 0, 0, 1).differing, 0);
    const double tiny = 5e-324, minus_tiny = -5e-324;
    cr_assert_eq(compare(FSDP_F64, &tiny, FSDP_F64, &minus_tiny, 1, 0, 0, 1).differing, 1);
    cr_assert_eq(compare(FSDP_F64, &tiny, FSDP_F64, &minus_tiny, 1, 0, 0, 2).differing, 0);
}

Test(diff, floating_types_compare_by_value)
{
    const float a[] = {1, -2.5F, 0, NAN, 3.14159F};
    const uint16_t b[] = {0x3F80, 0xC020, 0x8000, 0x7FC0, 0x4049}; /* bf16; the last is rounded */
    fsdp_diff_found found = compare(FSDP_F32, a, FSDP_BF16, b, 5, 0, 0, 0);
    cr_assert_eq(found.differing, 1);
    cr_assert_eq(found.at, 4);
    cr_assert_eq(compare(FSDP_F32, a, FSDP_BF16, b, 5, 0, 4e-3, 0).differing, 0);
    cr_assert_eq(compare(FSDP_F32, a, FSDP_BF16, b, 5, 0, 0, 100).differing, 1,
                 "no steps between types");
}

Test(diff, a_complex_element_counts_once)
{
    const float a[] = {1, 2, 3, 4}, b[] = {1.5F, 2.5F, 3, 4};
    fsdp_diff_found found = compare(FSDP_C64, a, FSDP_C64, b, 2, 0, 0, 0);
    cr_assert_eq(found.differing, 1);
    cr_assert_eq(found.at, 0);
}

Test(diff, a_quantized_block_counts_once_and_shows_its_numbers)
{
    uint8_t a[3 * 34] = {0}, b[3 * 34] = {0};
    char text[FSDP_DIFF_ELEMENT];
    for (size_t i = 34; i < 68; i++)
        a[i] = b[i] = 0x3C; /* a scale of 1.06, 32 times 60 */
    b[40] = 62;
    b[41] = 61;
    fsdp_diff_found found = compare(FSDP_Q8_0, a, FSDP_Q8_0, b, 3, 0, 0, 0);
    fsdp_diff_rule rule = {FSDP_Q8_0, FSDP_Q8_0, 0, 0, 0};
    cr_assert_eq(found.differing, 1);
    cr_assert_eq(found.at, 1);
    cr_assert_eq(found.max_abs, 2 * 1.05859375);
    cr_assert_eq(fsdp_diff_bits(&rule, &found), 0);
    fsdp_diff_spell(FSDP_Q8_0, found.to, text);
    cr_assert_str_eq(text, "65.63281");
    cr_assert_eq(compare(FSDP_Q8_0, a, FSDP_Q8_0, b, 3, 2.2, 0, 0).differing, 0);
    cr_assert_eq(compare(FSDP_Q8_0, a, FSDP_Q8_0, a, 3, 0, 0, 0).differing, 0);
}

Test(diff, blocks_of_other_bits_differ_although_their_numbers_do_not)
{
    const uint8_t a[34] = {0}, b[34] = {0, 0, 5}; /* the scale is 0 */
    cr_assert_eq(compare(FSDP_Q8_0, a, FSDP_Q8_0, b, 1, 0, 0, 0).differing, 1);
    cr_assert_eq(compare(FSDP_Q8_0, a, FSDP_Q8_0, b, 1, 1e-9, 0, 0).differing, 0);
}

Test(diff, large_integers_are_told_apart)
{
    const int64_t a[] = {INT64_MAX, 0, INT64_MIN}, b[] = {INT64_MAX - 1, 0, INT64_MIN};
    char text[FSDP_DIFF_ELEMENT];
    fsdp_diff_found found = compare(FSDP_I64, a, FSDP_I64, b, 3, 0, 0, 0);
    cr_assert_eq(found.differing, 1);
    cr_assert_eq(found.max_abs, 1);
    fsdp_diff_spell(FSDP_I64, found.to, text);
    cr_assert_str_eq(text, "9223372036854775806");
    const uint64_t low = 0, high = UINT64_MAX;
    found = compare(FSDP_U64, &low, FSDP_U64, &high, 1, 0, 0, 0);
    fsdp_diff_spell(FSDP_U64, found.to, text);
    cr_assert_str_eq(text, "18446744073709551615");
    cr_assert_eq(found.max_abs, 0x1p64);
}

Test(diff, the_worst_element_is_shown)
{
    static float a[5000], b[5000];
    char from[FSDP_DIFF_ELEMENT], to[FSDP_DIFF_ELEMENT];
    b[17] = 0.25F;
    b[4321] = -2;
    b[4500] = 2;
    fsdp_diff_found found = compare(FSDP_F32, a, FSDP_F32, b, 5000, 0, 0, 0);
    fsdp_diff_spell(FSDP_F32, found.from, from);
    fsdp_diff_spell(FSDP_F32, found.to, to);
    cr_assert_eq(found.differing, 3);
    cr_assert_eq(found.at, 4321, "the first of two that differ as much, not %" PRId64, found.at);
    cr_assert_eq(found.max_abs, 2);
    cr_assert_str_eq(from, "0.0");
    cr_assert_str_eq(to, "-2.0");
}

/* The result does not depend on the cuts of a tensor or on the order of its pieces. */
Test(diff, the_order_of_slabs_does_not_matter)
{
    enum { COUNT = 4000 };
    static double a[COUNT], b[COUNT];
    fsdp_diff_rule rule = {FSDP_F64, FSDP_F64, 0, 0, 0};
    srand(3);
    for (int i = 0; i < COUNT; i++)
        b[i] = rand() % 5 == 0 ? rand() % 7 : 0;
    fsdp_diff_found whole = compare(FSDP_F64, a, FSDP_F64, b, COUNT, 0, 0, 0), sum = {0};
    for (int64_t end = COUNT; end > 0;) {
        int64_t first = end - 1 - rand() % 300;
        fsdp_diff_found part = {0};
        first = first < 0 ? 0 : first;
        fsdp_diff_data(&rule, a + first, b + first, first, end - first, &part);
        fsdp_diff_merge(&sum, &part);
        end = first;
    }
    cr_assert(whole.differing > 100);
    cr_assert_eq(sum.differing, whole.differing);
    cr_assert_eq(sum.at, whole.at);
    cr_assert_eq(sum.max_abs, whole.max_abs);
    cr_assert_eq(memcmp(sum.to, whole.to, sizeof sum.to), 0);
}

Test(diff, spelled_numbers_come_back)
{
    char text[FSDP_DIFF_ELEMENT];
    srand(5);
    for (int i = 0; i < 20000; i++) {
        uint32_t bits = (uint32_t)rand() * 2654435761U;
        uint8_t bytes[8] = {0};
        float value;
        memcpy(&value, &bits, sizeof value);
        memcpy(bytes, &bits, sizeof bits);
        if (isnan(value))
            continue;
        fsdp_diff_spell(FSDP_F32, bytes, text);
        float back = strtof(text, NULL);
        cr_assert_eq(memcmp(&back, &value, sizeof back), 0, "%s", text);
    }
}

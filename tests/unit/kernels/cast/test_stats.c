/* Range, mean and the numbers that are none. */
#include <criterion/criterion.h>

#include <fsdp/stats.h>

#include <math.h>

Test(stats, every_kind_of_number_is_counted)
{
    const float data[] = {1, -3, 0, NAN, INFINITY, -INFINITY, 6};
    fsdp_stats stats = {0};
    fsdp_stats_add(&stats, FSDP_F32, data, 3);
    fsdp_stats_add(&stats, FSDP_F32, data + 3, 4);
    cr_assert_eq(stats.finite, 4);
    cr_assert_eq(stats.nans, 1);
    cr_assert_eq(stats.infinities, 2);
    cr_assert_eq(stats.zeros, 1);
    cr_assert_eq(stats.min, -3);
    cr_assert_eq(stats.max, 6);
    cr_assert_eq(stats.sum, 4);
}

Test(stats, only_floats_have_them)
{
    const int data[] = {1, 2};
    fsdp_stats stats = {0};
    fsdp_stats_add(&stats, FSDP_I32, data, 2);
    cr_assert_eq(stats.finite, 0);
}

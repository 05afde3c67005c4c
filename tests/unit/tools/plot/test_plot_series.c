/* Numbers by step in bins: no minimum and no maximum is lost, whatever the order of steps. */
#include "tools/plot/plot.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

/* A value of a step, with a spike at two of them. */
static double value_of(int64_t step, int64_t low_at, int64_t high_at)
{
    return step == low_at ? -5 : step == high_at ? 5 : sin((double)step);
}

/* All points in the order of steps, each a point that was added; returns their number. */
static int check_points(const plot_series *series, int64_t low_at, int64_t high_at)
{
    plot_point points[PLOT_BIN_POINTS];
    int64_t before = -1;
    int all = 0, found = 0;
    for (int i = 0; i < PLOT_BINS; i++) {
        int count = plot_bin_points(&series->bins[i], points);
        for (int k = 0; k < count; k++, all++) {
            cr_assert_gt(points[k].step, before);
            before = points[k].step;
            cr_assert_eq(points[k].value, value_of(points[k].step, low_at, high_at));
            found += points[k].step == low_at || points[k].step == high_at;
        }
    }
    cr_expect_eq(found, 2, "a spike is lost");
    return all;
}

static void check_order(int64_t first, int64_t count, int64_t stride, bool falling)
{
    plot_series *series = calloc(1, sizeof *series);
    int64_t low_at = first + count / 3 * stride, high_at = first + count / 2 * stride;
    for (int64_t i = 0; i < count; i++) {
        int64_t step = first + (falling ? count - 1 - i : i) * stride;
        plot_series_add(series, step, value_of(step, low_at, high_at));
    }
    int points = check_points(series, low_at, high_at);
    cr_expect(points <= PLOT_BINS * PLOT_BIN_POINTS && points >= (count < 200 ? count : 200));
    cr_expect_eq(series->count, count);
    cr_expect_eq(series->first, first);
    cr_expect_eq(series->last.step, first + (count - 1) * stride);
    cr_expect(series->low == -5 && series->high == 5);
    free(series);
}

Test(plot_series, spikes_stay)
{
    static const int64_t counts[] = {4, 100, PLOT_BINS, PLOT_BINS + 1, 100000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        check_order(1, counts[i], 1, false);
        check_order(0, counts[i], 1, true);
        check_order(1000000007, counts[i], 10, false);
        check_order(INT64_MAX - counts[i] * 7, counts[i], 7, true);
    }
}

Test(plot_series, the_whole_range_fits)
{
    plot_series *series = calloc(1, sizeof *series);
    plot_series_add(series, INT64_MAX, 1);
    plot_series_add(series, 0, 2);
    plot_series_add(series, INT64_MAX / 2, 3);
    cr_expect_eq(series->count, 3);
    cr_expect_eq(series->last.value, 1);
    cr_expect(series->low == 1 && series->high == 3);
    free(series);
}

Test(plot_series, a_step_without_a_number_breaks_the_line)
{
    plot_series *series = calloc(1, sizeof *series);
    int broken = 0;
    for (int64_t step = 0; step < 10 * PLOT_BINS; step++)
        plot_series_add(series, step, step == 5000 ? NAN : 1);
    for (int i = 0; i < PLOT_BINS; i++)
        broken += series->bins[i].broken;
    cr_expect_eq(broken, 1);
    cr_expect_eq(series->count, 10 * PLOT_BINS - 1);
    free(series);
}

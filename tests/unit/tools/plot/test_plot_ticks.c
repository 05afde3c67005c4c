/* Round numbers along an axis: they cover every range, in few distinct labels. */
#include "tools/plot/plot.h"

#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static const char *labels(plot_ticks ticks, char out[512])
{
    char label[PLOT_TICK_LABEL];
    *out = 0;
    for (int i = 0; i < ticks.count; i++) {
        strcat(out, i > 0 ? " " : "");
        strcat(out, plot_tick_label(&ticks, i, label));
    }
    return out;
}

Test(plot_ticks, labels_are_round)
{
    static const struct {
        double low, high;
        const char *labels;
    } cases[] = {
        {1.63, 5.52, "1 2 3 4 5 6"},
        {0, 3e-3, "0 0.001 0.002 0.003"},
        {0, 6e-4, "0 0.0002 0.0004 0.0006"},
        {0, 2.5e-6, "0 5e-7 1e-6 1.5e-6 2e-6 2.5e-6"},
        {0, 11800, "0 5k 10k 15k"},
        {0, 90000, "0 20k 40k 60k 80k 100k"},
        {12000, 14000, "12.0k 12.5k 13.0k 13.5k 14.0k"},
        {0, 3.1e6, "0 1M 2M 3M 4M"},
        {0, 9e9, "0 2G 4G 6G 8G 10G"},
        {1e6, 1e6 + 4, "1000000 1000001 1000002 1000003 1000004"},
        {-0.3, 0.2, "-0.3 -0.2 -0.1 0 0.1 0.2"},
        {-1e20, 1e20, "-1e20 -5e19 0 5e19 1e20"},
        {2, 2, "1.8 1.9 2.0 2.1 2.2"},
        {0, 0, "-1.0 -0.5 0 0.5 1.0"},
    };
    char text[512];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_expect_str_eq(labels(plot_ticks_between(cases[i].low, cases[i].high, 6), text),
                         cases[i].labels, "%g to %g: %s", cases[i].low, cases[i].high, text);
}

Test(plot_ticks, steps_are_whole)
{
    static const struct {
        double low, high;
        const char *labels;
    } cases[] = {
        {1, 300, "0 50 100 150 200 250 300"},
        {1, 3, "1 2 3"},
        {1, 1, "1 2"},
        {0, 25000, "0 5k 10k 15k 20k 25k"},
    };
    char text[512];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_expect_str_eq(labels(plot_ticks_of_steps(cases[i].low, cases[i].high, 7), text),
                         cases[i].labels, "%g to %g: %s", cases[i].low, cases[i].high, text);
}

/* Any two doubles, of any sizes: the ticks end, cover both, rise, and differ in their labels. */
Test(plot_ticks, every_range_is_covered)
{
    static const double values[] = {
        0,       1,        -1,  1.0000001, 0.1,  1e-9,     -1e-9,     3e-308, 5e-324, 1e300, -1e300,
        DBL_MAX, -DBL_MAX, NAN, INFINITY,  1e15, 1e15 + 1, 123456789, 0.3,    -7e-7,  9.2e18};
    const size_t count = sizeof values / sizeof *values;
    for (size_t i = 0; i < count * count; i++) {
        double low = fmin(values[i / count], values[i % count]);
        double high = fmax(values[i / count], values[i % count]);
        plot_ticks ticks = plot_ticks_between(low, high, 6);
        char label[PLOT_TICK_LABEL], before[PLOT_TICK_LABEL] = "";
        cr_assert(ticks.count >= 2 && ticks.count <= 6, "%g to %g: %d", low, high, ticks.count);
        low = isnan(low) ? 0 : fmax(low, -1e300);
        high = isnan(high) ? 0 : fmin(high, 1e300);
        double slack = (plot_tick(&ticks, 1) - plot_tick(&ticks, 0)) * 1e-6;
        cr_expect(plot_tick(&ticks, 0) <= low + slack, "%g to %g begins at %g", low, high,
                  plot_tick(&ticks, 0));
        cr_expect(plot_tick(&ticks, ticks.count - 1) >= high - slack, "%g to %g ends at %g", low,
                  high, plot_tick(&ticks, ticks.count - 1));
        for (int k = 0; k < ticks.count; k++) {
            plot_tick_label(&ticks, k, label);
            cr_expect(strcmp(label, before) != 0, "%g to %g: %s twice", low, high, label);
            strcpy(before, label);
        }
    }
}

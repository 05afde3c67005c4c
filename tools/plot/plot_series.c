/* Numbers by step, in bounded memory: see plot_series.h. */
#include "tools/plot/plot_series.h"

#include <math.h>
#include <string.h>

static void put(plot_bin *bin, plot_point point)
{
    if (!bin->used) {
        bin->first = bin->low = bin->high = bin->last = point;
        bin->used = true;
        return;
    }
    if (point.step < bin->first.step)
        bin->first = point;
    if (point.step >= bin->last.step)
        bin->last = point;
    if (point.value < bin->low.value)
        bin->low = point;
    if (point.value > bin->high.value)
        bin->high = point;
}

static plot_bin *bin_of(plot_series *series, int64_t step)
{
    return &series->bins[(step - series->base) >> series->shift];
}

static void put_all(plot_series *series, const plot_bin *from)
{
    const plot_point points[] = {from->first, from->low, from->high, from->last};
    for (int i = 0; i < PLOT_BIN_POINTS; i++)
        put(bin_of(series, points[i].step), points[i]);
}

/* Reserves memory for a step outside of the bins. Below them is then as much room again, so that steps in
 * falling order do not move all bins each time. */
static void make_room(plot_series *series, int64_t step)
{
    const plot_series old = *series;
    int64_t range = step < old.base ? old.end - step : 0;
    if (step < old.base)
        series->base = step > range ? step - range : 0;
    else
        series->end = step;
    while ((series->end - series->base) >> series->shift >= PLOT_BINS)
        series->shift++;
    memset(series->bins, 0, sizeof series->bins);
    for (int i = 0; i < PLOT_BINS; i++) {
        if (old.bins[i].used)
            put_all(series, &old.bins[i]);
        if (old.bins[i].broken)
            bin_of(series, old.base + ((int64_t)i << old.shift))->broken = true;
    }
}

void plot_series_add(plot_series *series, int64_t step, double value)
{
    if (!series->started) {
        series->started = true;
        series->base = series->end = step;
    }
    if (step < series->base || (step - series->base) >> series->shift >= PLOT_BINS)
        make_room(series, step);
    series->end = step > series->end ? step : series->end;
    if (!isfinite(value)) {
        bin_of(series, step)->broken = true;
        return;
    }
    put(bin_of(series, step), (plot_point){step, value});
    if (series->count == 0 || step >= series->last.step)
        series->last = (plot_point){step, value};
    if (series->count == 0 || step < series->first)
        series->first = step;
    series->low = series->count == 0 ? value : fmin(series->low, value);
    series->high = series->count == 0 ? value : fmax(series->high, value);
    series->count++;
}

int plot_bin_points(const plot_bin *bin, plot_point points[PLOT_BIN_POINTS])
{
    const bool low_first = bin->low.step <= bin->high.step;
    const plot_point all[] = {bin->first, low_first ? bin->low : bin->high,
                              low_first ? bin->high : bin->low, bin->last};
    int count = 0;
    for (int i = 0; i < PLOT_BIN_POINTS && bin->used; i++) {
        if (count == 0 || all[i].step > points[count - 1].step)
            points[count++] = all[i];
    }
    return count;
}

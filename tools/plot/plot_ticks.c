/* Round numbers along an axis: see plot_ticks.h. */
#include "tools/plot/plot_ticks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double LARGEST = 1e300, LEAST_PART = 1e-9;
static const int UNITS[] = {1, 2, 5};
enum { UNIT_COUNT = 3, LOWEST_EXPONENT = -300, MOST_DECIMALS = 4 };

static double power(int exponent)
{
    return pow(10, exponent);
}

/* x / (unit * 10^exponent); a division by 1e-3 has no error that a product with 0.001 has. */
static double in_units(double x, int unit, int exponent)
{
    return (exponent < 0 ? x * power(-exponent) : x / power(exponent)) / unit;
}

/* Below and above: an integer that is off by rounding alone counts as that integer. */
static double whole_below(double x)
{
    double nearest = round(x);
    return fabs(x - nearest) <= fabs(x) * LEAST_PART * 1e-3 ? nearest : floor(x);
}

static double whole_above(double x)
{
    return -whole_below(-x);
}

static double within_limits(double x)
{
    return isnan(x) ? 0 : fmin(fmax(x, -LARGEST), LARGEST);
}

static void widen(double *low, double *high)
{
    double largest = fmax(fabs(*low), fabs(*high));
    if (*high - *low > largest * LEAST_PART && *high - *low > 1 / LARGEST)
        return;
    double by = largest > 1 / LARGEST * 1e9 ? largest * 0.1 : 1;
    *low -= by;
    *high += by;
}

static plot_ticks choose(double low, double high, int most, int least_exponent)
{
    plot_ticks ticks = {.unit = 1};
    int exponent = (int)floor(log10((high - low) / most)) - 1;
    exponent = exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent;
    for (exponent = exponent < least_exponent ? least_exponent : exponent;; exponent++) {
        for (int i = 0; i < UNIT_COUNT; i++) {
            double first = whole_below(in_units(low, UNITS[i], exponent));
            double last = whole_above(in_units(high, UNITS[i], exponent));
            if (last - first > most - 1)
                continue;
            ticks = (plot_ticks){first, UNITS[i], exponent, (int)(last - first) + 1};
            return ticks;
        }
    }
}

plot_ticks plot_ticks_between(double low, double high, int most)
{
    low = within_limits(low);
    high = within_limits(high);
    widen(&low, &high);
    return choose(low, high, most, LOWEST_EXPONENT);
}

plot_ticks plot_ticks_of_steps(double low, double high, int most)
{
    low = within_limits(low);
    high = within_limits(high);
    if (high - low < 1)
        high = low + 1;
    widen(&low, &high);
    return choose(low, high, most, 0);
}

double plot_tick(const plot_ticks *ticks, int i)
{
    double units = (ticks->first + i) * ticks->unit;
    return ticks->exponent < 0 ? units / power(-ticks->exponent) : units * power(ticks->exponent);
}

/* "2.50e-07" becomes "2.5e-7". */
static void tidy_exponent(char *text)
{
    char *e = strchr(text, 'e'), *digits = e ? e + 2 : NULL, *end = e;
    char exponent[PLOT_TICK_LABEL];
    if (!e)
        return;
    while (*digits == '0' && digits[1])
        digits++;
    snprintf(exponent, sizeof exponent, "e%s%s", e[1] == '-' ? "-" : "", digits);
    if (memchr(text, '.', (size_t)(e - text))) {
        while (end[-1] == '0')
            end--;
        if (end[-1] == '.')
            end--;
    }
    memmove(end, exponent, strlen(exponent) + 1);
}

const char *plot_tick_label(const plot_ticks *ticks, int i, char out[PLOT_TICK_LABEL])
{
    static const struct {
        double least;
        int exponent;
        const char *suffix;
    } scales[] = {{1e9, 9, "G"}, {1e6, 6, "M"}, {1e4, 3, "k"}};
    double value = plot_tick(ticks, i);
    double largest = fmax(fabs(plot_tick(ticks, 0)), fabs(plot_tick(ticks, ticks->count - 1)));
    int decimals = ticks->exponent < 0 ? -ticks->exponent : 0;
    if (value == 0) {
        return strcpy(out, "0");
    }
    if (decimals > MOST_DECIMALS || largest >= 1e15) {
        int digits = (int)floor(log10(fabs(value)) + LEAST_PART) - ticks->exponent;
        snprintf(out, PLOT_TICK_LABEL, "%.*e", digits < 0 ? 0 : digits > 15 ? 15 : digits, value);
        tidy_exponent(out);
        return out;
    }
    for (size_t k = 0; k < sizeof scales / sizeof *scales; k++) {
        int left = scales[k].exponent - ticks->exponent;
        if (largest < scales[k].least || left > 2)
            continue;
        snprintf(out, PLOT_TICK_LABEL, "%.*f%s", left < 0 ? 0 : left,
                 value / power(scales[k].exponent), scales[k].suffix);
        return out;
    }
    snprintf(out, PLOT_TICK_LABEL, "%.*f", decimals, value);
    return out;
}

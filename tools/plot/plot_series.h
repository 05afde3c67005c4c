/*
 * Numbers by step, in bounded memory. The steps are cut into bins of one width, a power of two that grows
 * with the range of steps. Each bin keeps its first, last, smallest and largest number.
 * A picture that is no wider than PLOT_BINS / 2 pixels loses no minimum and no maximum.
 */
#ifndef FSDP_PLOT_SERIES_H
#define FSDP_PLOT_SERIES_H

#include <stdbool.h>
#include <stdint.h>

enum { PLOT_BINS = 1024, PLOT_BIN_POINTS = 4 };

typedef struct plot_point { int64_t step; double value; } plot_point;

typedef struct plot_bin {
    plot_point first, low, high, last;
    bool used;                 /* it has numbers */
    bool broken;               /* it has a step without a number: no line leads beyond it */
} plot_bin;

/* Zero-initialise. */
typedef struct plot_series {
    plot_bin bins[PLOT_BINS];
    int64_t base, end;         /* the first step of the first bin, and the largest step */
    int shift;                 /* a bin has 2^shift steps */
    int64_t count;             /* of numbers that were added */
    int64_t first;             /* the smallest step with a number */
    plot_point last;           /* the number of the largest step */
    double low, high;          /* of all numbers */
    bool started;
} plot_series;

/* step >= 0, in any order. A value that is not finite counts as a step without a number. */
void plot_series_add(plot_series *series, int64_t step, double value);

/* The points of a bin that are to be joined, by their steps, each once. Returns their number. */
int plot_bin_points(const plot_bin *bin, plot_point points[PLOT_BIN_POINTS]);

#endif

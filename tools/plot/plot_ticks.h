/* Round numbers along an axis, and their labels. */
#ifndef FSDP_PLOT_TICKS_H
#define FSDP_PLOT_TICKS_H

/* Tick i, of count, stands at (first + i) * unit * 10^exponent; unit is 1, 2 or 5. */
typedef struct plot_ticks {
    double first;              /* an integer */
    int unit, exponent, count;
} plot_ticks;

enum { PLOT_TICK_LABEL = 32 };

/* At most `most` ticks, which is at least 3. The first is not above low, the last not below high. A range
 * that is empty, or too narrow for distinct doubles, is widened. Numbers beyond 1e300 count as 1e300, a nan
 * as 0. */
plot_ticks plot_ticks_between(double low, double high, int most);
/* Like plot_ticks_between, in whole numbers. */
plot_ticks plot_ticks_of_steps(double low, double high, int most);

double plot_tick(const plot_ticks *ticks, int i);
/* "0.002", "12.5k", "5e-7": all labels of an axis have as many decimals. Returns out. */
const char *plot_tick_label(const plot_ticks *ticks, int i, char out[PLOT_TICK_LABEL]);

#endif

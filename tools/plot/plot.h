/*
 * fsdp-plot: the metrics of trainings (RUN/metrics.jsonl) as one picture.
 *
 *   plot_run_read (a file into series of bounded size) -> plot_draw (series into the text of an SVG)
 *
 * In come paths of runs, out comes the text; the tool writes it. Only fsdp-plot calls this room.
 * docs/man/fsdp-train.1.scd says what the lines hold. An unknown event and an unknown member are not errors,
 * a line that is not a JSON object with a step is.
 */
#ifndef FSDP_PLOT_H
#define FSDP_PLOT_H

#include "base/text.h"

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* --- series ---------------------------------------------------------------------------------- */

/*
 * Numbers by step, in bounded memory. The steps are cut into bins of one width, a power of two that grows
 * with the range of steps. Each bin keeps its first, last, smallest and largest number.
 * A picture that is no wider than PLOT_BINS / 2 pixels loses no minimum and no maximum.
 */
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

/* --- ticks ----------------------------------------------------------------------------------- */

/* Round numbers along an axis, and their labels.
 * Tick i, of count, stands at (first + i) * unit * 10^exponent; unit is 1, 2 or 5. */
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

/* --- runs ------------------------------------------------------------------------------------ */

typedef enum plot_kind {
    PLOT_LOSS, PLOT_LR, PLOT_GRAD_NORM, PLOT_TOK_S,    /* of a step's line: a panel each */
    PLOT_EVAL, PLOT_SAVE, PLOT_RESTART,                /* events: held-out losses, marks */
    PLOT_KINDS, PLOT_PANELS = PLOT_EVAL
} plot_kind;

typedef struct plot_run {
    const char *path, *name;   /* as given, and its last part or all of it; borrowed */
    int64_t lines;             /* that were read */
    bool is_cut;               /* the last line has no end: it is left out */
    plot_series series[PLOT_KINDS];
} plot_run;

/* path: a run, or a file of metrics. run is zeroed but for path and name. */
fsdp_status plot_run_read(plot_run *run, fsdp_error *err);

/* At least one of the runs has a step. text.failed: out of memory. */
void plot_draw(plot_run *const *runs, size_t count, fsdp_text *text);

#endif

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
#include "tools/plot/plot_series.h"

#include <fsdp/status.h>
#include <stddef.h>

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

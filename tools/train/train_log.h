/*
 * Files of RUN next to its checkpoints, written by rank 0: metrics.jsonl, one JSON object per step and event;
 * main.log, the lines of the terminal; TensorBoard's events. Every object has `step`; a resume removes those
 * after its step.
 */
#ifndef FSDP_TRAIN_LOG_H
#define FSDP_TRAIN_LOG_H

#include "base/text.h"

#include <fsdp/status.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct train_events train_events;      /* a file of TensorBoard */

typedef struct train_log {
    FILE *metrics, *lines;     /* NULL: not open, nothing is written */
    train_events *events;      /* NULL: none */
    const char *run;
    bool is_quiet;             /* train_log_say writes to main.log only */
    bool prints_json;          /* objects of the metrics are printed, too */
    bool drops_lines;          /* save.on_error continue: counts lines that cannot be written */
    int64_t dropped;
    fsdp_error failure;        /* the first, which ends writing; train_agree returns it on all ranks */
} train_log;

typedef struct train_step_line {
    int64_t step;              /* from 1 */
    double loss;               /* before the update */
    double grad_norm;          /* before clipping */
    double lr;
    int64_t tokens;            /* of all steps so far */
    const char *batch;         /* hash of the step's ids */
    double ms, tok_s;
} train_step_line;

/* Creates RUN if it is not there, and makes it this job's until the log is closed: FSDP_ERR_EXISTS, another
 * training writes to it. */
fsdp_status train_log_lock(train_log *log, const char *run, fsdp_error *err);
/* After the lock: keeps of the metrics the objects up to `step`. FSDP_ERR_EXISTS: the file is another
 * program's. */
fsdp_status train_log_open(train_log *log, int64_t step, bool tensorboard, fsdp_error *err);
void train_log_close(train_log *log);  /* accepts a zeroed one */

void train_log_step(train_log *log, const train_step_line *line);
/* An object {"event": NAME, "step": N, MEMBERS}; members is JSON text without braces, "" for none. */
void train_log_event(train_log *log, const char *name, int64_t step, const char *members);
void train_log_scalar(train_log *log, int64_t step, const char *tag, double value);
/* A line on standard error and in main.log; --quiet keeps the second one's. */
void train_log_say(train_log *log, const char *format, ...) FSDP_PRINTF(2, 3);
void train_log_warn(train_log *log, const char *format, ...) FSDP_PRINTF(2, 3);

/* JSON has no nan and no infinities: null. */
void train_add_number(fsdp_text *text, double value);

#endif

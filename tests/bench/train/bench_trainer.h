/*
 * bench train measures steps of fsdp-train: GPT-2 with new values on random ids, by the code of
 * tools/train and runtime/transformer, in turns with PyTorch; and saves in the background of that training.
 * In come row_options and trainer_options, out come rows.
 *
 *   bench_trainer_options.c    options -> trainer_options
 *   bench_trainer_steps.c      trainer_options, a world -> trainer_run; a step
 *   bench_trainer.c            rows train-N and train-peak
 *   bench_trainer_saves.c      rows async-stall and async-cost
 */
#ifndef FSDP_BENCH_TRAINER_H
#define FSDP_BENCH_TRAINER_H

#include "tests/bench/rows.h"
#include "tools/train/train.h"

struct trainer_options {
    const char *first;         /* the first option of train alone that was given; NULL: none */
    int64_t layers, width, heads, vocab;
    int64_t batch, length;     /* of a step: sequences of all ranks, tokens of each */
    int turns;
    const char *llmc;          /* train_gpt2 of llm.c; NULL: not measured */
};

extern const struct argp trainer_argp;
trainer_options trainer_options_default(void);
/* Takes the options that step has, too, and ends the program where they make no model. */
void trainer_options_finish(trainer_options *trainer, const row_options *opts);

typedef struct trainer_run {
    const row_options *opts;
    const trainer_options *trainer;
    train_options training;
    train_job job;
    train_batch batch;
    int64_t batches;           /* so many had ids of their own */
} trainer_run;

/* Threads of all ranks together, and of a peer. */
int bench_trainer_threads(const row_options *opts);
/* Collective. opts and trainer are set; after a failure, too, bench_trainer_end. */
fsdp_status bench_trainer_begin(trainer_run *run, fsdp_world *world, fsdp_error *err);
void bench_trainer_end(trainer_run *run);
/* Collective. One step of all ranks, with a batch of its own. */
fsdp_status bench_trainer_step(trainer_run *run, bench_times *times, fsdp_error *err);
/* Collective. */
fsdp_status bench_trainer_saves(trainer_run *run, fsdp_error *err);

#endif

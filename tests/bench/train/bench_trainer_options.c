/* Options of bench train. See bench_trainer.h. */
#include "tests/bench/train/bench_trainer.h"
#include "tests/bench/train/bench_step.h"

enum { KEY_HEADS = 0x2200, KEY_VOCAB, KEY_BATCH, KEY_LENGTH, KEY_TURNS, KEY_LLMC, KEY_BEHIND };

static const struct argp_option options[] = {
    {"heads", KEY_HEADS, "N", 0, "train: heads of a layer (default: 12)", 3},
    {"vocab", KEY_VOCAB, "N", 0, "train: ids (default: 50257)", 3},
    {"batch", KEY_BATCH, "N", 0, "train: sequences of a step, of all ranks (default: 8)", 3},
    {"length", KEY_LENGTH, "N", 0, "train: tokens of a sequence (default: 64)", 3},
    {"turns", KEY_TURNS, "N", 0, "train: steps, of which two do not count (default: 10)", 3},
    {"llmc", KEY_LLMC, "PROGRAM", 0, "train: llm.c's train_gpt2, to compare with", 3},
    {0}};

enum { MOST_TURNS = BENCH_MAX_ROUNDS, LEAST_TURNS = 3, MOST = 1 << 24, LONGEST = 1024 };

trainer_options trainer_options_default(void)
{
    return (trainer_options){.layers = 12,
                             .width = 768,
                             .heads = 12,
                             .vocab = 50257,
                             .batch = 8,
                             .length = 64,
                             .turns = 10};
}

void trainer_options_finish(trainer_options *trainer, const row_options *opts)
{
    if (opts->step->layers > 0)
        trainer->layers = opts->step->layers;
    if (opts->step->width > 0)
        trainer->width = opts->step->width;
    if (trainer->width % trainer->heads != 0)
        cli_usage_error("--width %lld is no multiple of --heads %lld", (long long)trainer->width,
                        (long long)trainer->heads);
    if (trainer->llmc && !opts->against)
        cli_usage_error("--llmc means nothing without --against");
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    trainer_options *trainer = state->input;
    if (key >= KEY_HEADS && key < KEY_BEHIND && !trainer->first)
        trainer->first = options[key - KEY_HEADS].name;
    switch (key) {
    case KEY_HEADS: trainer->heads = cli_parse_integer("--heads", arg, 1, MOST); return 0;
    case KEY_VOCAB: trainer->vocab = cli_parse_integer("--vocab", arg, 1, MOST); return 0;
    case KEY_BATCH: trainer->batch = cli_parse_integer("--batch", arg, 1, MOST); return 0;
    case KEY_LENGTH: trainer->length = cli_parse_integer("--length", arg, 1, LONGEST); return 0;
    case KEY_TURNS:
        trainer->turns = (int)cli_parse_integer("--turns", arg, LEAST_TURNS, MOST_TURNS);
        return 0;
    case KEY_LLMC: trainer->llmc = arg; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

const struct argp trainer_argp = {.options = options, .parser = parse};

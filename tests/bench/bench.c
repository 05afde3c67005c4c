/* bench_rows: measures the library next to what the plain file system, memcpy or another library does with
 * the same bytes. `./dev bench` runs it; docs/performance.md describes its rows. */
#include "tests/bench/train/bench_step.h"
#include "tests/bench/train/bench_trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- options -------------------------------------------------------------------------------------------- */

enum {
    KEY_SEED = 0x2000,
    KEY_DEADLINE,
    KEY_SIZE,
    KEY_DIR,
    KEY_ROUNDS,
    KEY_PEER,
    KEY_OPS,
    KEY_SIZES,
    KEY_DTYPE,
    KEY_BUFFERS,
    KEY_AGAINST,
    KEY_CASES,
    KEY_NP,
    KEY_THREADS,
    KEY_COMM,
    KEY_DEVICE,
    KEY_TRACE,
    KEY_CHECK,
    KEY_END
};

static const struct argp_option options[] = {
    {"deadline", KEY_DEADLINE, "S", 0, "save: how long a rank waits for others (300)", 0},
    {"seed", KEY_SEED, "S", 0, "seed of the values (default: 0)", 0},
    {"size", KEY_SIZE, "SIZE", 0, "bytes of the state (default: 1G)", 0},
    {"dir", KEY_DIR, "DIR", 0, "where files are written (default: .)", 0},
    {"rounds", KEY_ROUNDS, "N", 0, "repetitions, at least 5 (default: 5)", 0},
    {"peer", KEY_PEER, "PROGRAM", 0, "whom to compare with, as a program", 0},
    {"ops", KEY_OPS, "OPS", 0, "collectives: of ag, rs and ar (default: ag,rs,ar)", 0},
    {"sizes", KEY_SIZES, "SIZES", 0, "collectives: whole tensors (64K,1M,16M,256M)", 0},
    {"dtype", KEY_DTYPE, "T", 0, "collectives: of the elements (default: f32)", 0},
    {"buffers", KEY_BUFFERS, "KIND", 0, "collectives: pool (default) or private", 0},
    {"against", KEY_AGAINST, "NAME", 0, "collectives: openmpi or gloo; step, train: torch", 0},
    {"cases", KEY_CASES, "NAMES", 0, "convert: some cases, such as dcp-hf,peak", 0},
    {"np", KEY_NP, "N", 0, "ranks are N processes", 1},
    {"threads", KEY_THREADS, "N", 0, "ranks are N threads", 1},
    {"comm", KEY_COMM, "NAME", 0, "auto (default), self, threads, shm, mpi, tcp or nccl", 1},
    {"device", KEY_DEVICE, "NAME", 0, "cpu, cpu-async, cuda or cuda:N", 1},
    {"trace", KEY_TRACE, "FILE", 0, "write events to FILE; %r is the rank", 1},
    {"check", KEY_CHECK, NULL, 0, "check who owns which buffer", 1},
    {0}};

typedef fsdp_status (*command_run)(const row_options *opts, fsdp_error *err);

/* Sets of commands, for the ones that use an option. */
typedef enum command_set {
    FOR_MEASURE = 1,
    FOR_PEERS = 2,
    FOR_SAVE = 4,
    FOR_RANKS = 8, /* started by fsdp_launch: its options are good */
    FOR_COLLECTIVES = 16,
    FOR_STEP = 32,
    FOR_TRAIN = 64,
    FOR_CONVERT = 128
} command_set;

static const struct {
    const char *name;
    command_run run;
    unsigned set;
} commands[] = {
    {"save", bench_measure, FOR_MEASURE | FOR_SAVE},
    {"load", bench_measure, FOR_MEASURE},
    {"reshard", bench_measure, FOR_MEASURE},
    {"many", bench_measure, FOR_MEASURE},
    {"compress", bench_measure, FOR_MEASURE | FOR_PEERS},
    {"manifest", bench_measure, FOR_MEASURE},
    {"convert", bench_measure, FOR_MEASURE | FOR_PEERS | FOR_CONVERT},
    {"collectives", bench_collectives, FOR_RANKS | FOR_COLLECTIVES | FOR_PEERS},
    {"unshard", bench_unshard, FOR_RANKS},
    {"chunk-cat", bench_copies, FOR_RANKS},
    {"copy-out", bench_copies, FOR_RANKS},
    {"cast", bench_copies, FOR_RANKS},
    {"step", bench_step, FOR_RANKS | FOR_STEP | FOR_PEERS},
    {"train", bench_trainer, FOR_RANKS | FOR_TRAIN | FOR_PEERS},
};
enum { COMMANDS = sizeof commands / sizeof *commands };
static const char command_list[] =
    "save, load, reshard, many, compress, manifest, convert, collectives, unshard, "
    "chunk-cat, copy-out, cast, step, train";

static const char *command_names[COMMANDS + 1];
static const cli_words words[] = {{NULL, command_names}, {0}};

static int find_command(const char *name)
{
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0)
            return i;
    cli_usage_error("there is no command '%s'; %s", name, command_list);
}

/* --seed is for all. */
static const struct {
    int key;
    const char *name;
    unsigned heeded;
} scopes[] = {
    {KEY_DEADLINE, "deadline", FOR_SAVE | FOR_RANKS},
    {KEY_SIZE, "size", FOR_MEASURE},
    {KEY_DIR, "dir", FOR_MEASURE | FOR_TRAIN},
    {KEY_ROUNDS, "rounds", FOR_MEASURE | FOR_RANKS},
    {KEY_PEER, "peer", FOR_PEERS},
    {KEY_OPS, "ops", FOR_COLLECTIVES},
    {KEY_SIZES, "sizes", FOR_COLLECTIVES},
    {KEY_DTYPE, "dtype", FOR_COLLECTIVES},
    {KEY_BUFFERS, "buffers", FOR_COLLECTIVES},
    {KEY_AGAINST, "against", FOR_COLLECTIVES | FOR_STEP | FOR_TRAIN},
    {KEY_CASES, "cases", FOR_CONVERT},
    {KEY_NP, "np", FOR_RANKS},
    {KEY_THREADS, "threads", FOR_RANKS},
    {KEY_COMM, "comm", FOR_RANKS},
    {KEY_DEVICE, "device", FOR_RANKS},
    {KEY_TRACE, "trace", FOR_RANKS},
    {KEY_CHECK, "check", FOR_RANKS},
};

/* An option that the command would ignore is a usage error, since the user expects an effect. */
static void check_scopes(const row_options *opts)
{
    unsigned set = commands[find_command(opts->command)].set;
    for (size_t i = 0; i < sizeof scopes / sizeof *scopes; i++)
        if ((opts->given & UINT64_C(1) << (scopes[i].key - KEY_SEED)) && !(scopes[i].heeded & set))
            cli_usage_error("--%s has no meaning for %s", scopes[i].name, opts->command);
    if (opts->step->first && !(set & FOR_STEP))
        cli_usage_error("--%s has no meaning for %s", opts->step->first, opts->command);
    if (opts->step->first_shared && !(set & (FOR_STEP | FOR_TRAIN)))
        cli_usage_error("--%s has no meaning for %s", opts->step->first_shared, opts->command);
    if (opts->trainer->first && !(set & FOR_TRAIN))
        cli_usage_error("--%s has no meaning for %s", opts->trainer->first, opts->command);
}

static void check_torch(const row_options *opts)
{
    if (opts->against && strcmp(opts->against, "torch") != 0)
        cli_usage_error("--against '%s': %s has torch", opts->against, opts->command);
}

static void check_step(row_options *opts)
{
    check_torch(opts);
    step_options_finish(opts->step);
    if (!(opts->given & UINT64_C(1) << (KEY_SEED - KEY_SEED)))
        opts->seed = 1;
}

static void parse_argument(row_options *opts, const char *arg)
{
    if (opts->command)
        cli_usage_error(commands[find_command(opts->command)].set & FOR_MEASURE
                            ? "%s takes --dir, not '%s'"
                            : "%s takes no '%s'",
                        opts->command, arg);
    opts->command = commands[find_command(arg)].name;
}

static void check_arguments(row_options *opts)
{
    if (!opts->command)
        cli_usage_error("COMMAND is missing: %s", command_list);
    check_scopes(opts);
    unsigned set = commands[find_command(opts->command)].set;
    if (opts->deadline && !(set & FOR_RANKS))
        opts->deadline_ms = 1000 * (int)cli_parse_integer("--deadline", opts->deadline, 1, 1 << 20);
    if (set & FOR_COLLECTIVES)
        bench_check_collectives(opts);
    if (set & FOR_CONVERT)
        bench_check_convert(opts);
    if (set & FOR_STEP)
        check_step(opts);
    if (set & FOR_TRAIN) {
        check_torch(opts);
        trainer_options_finish(opts->trainer, opts);
    }
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    row_options *opts = state->input;
    if (key >= KEY_SEED && key < KEY_END)
        opts->given |= UINT64_C(1) << (key - KEY_SEED);
    switch (key) {
    case ARGP_KEY_INIT:
        for (int i = 0; i < 2; i++)
            state->child_inputs[i] = &opts->common;
        state->child_inputs[2] = opts->step;
        state->child_inputs[3] = opts->trainer;
        return 0;
    case KEY_SEED: opts->seed = (uint64_t)cli_parse_integer("--seed", arg, 0, INT64_MAX); return 0;
    case KEY_DEADLINE: opts->deadline = arg; return 0;
    case KEY_SIZE: opts->size = cli_parse_size("--size", arg); return 0;
    case KEY_DIR: opts->dir = arg; return 0;
    case KEY_ROUNDS: opts->rounds = (int)cli_parse_integer("--rounds", arg, 5, 98); return 0;
    case KEY_PEER: opts->peer = arg; return 0;
    case KEY_OPS: opts->ops = arg; return 0;
    case KEY_SIZES: opts->sizes = arg; return 0;
    case KEY_DTYPE: opts->dtype = arg; return 0;
    case KEY_BUFFERS: opts->buffers = arg; return 0;
    case KEY_AGAINST: opts->against = arg; return 0;
    case KEY_CASES: opts->cases = arg; return 0;
    case KEY_NP:
    case KEY_THREADS: opts->counts_ranks = true; return 0; /* fsdp_launch takes these */
    case KEY_COMM:
    case KEY_DEVICE:
    case KEY_TRACE:
    case KEY_CHECK: return 0;
    case ARGP_KEY_ARG: parse_argument(opts, arg); return 0;
    case ARGP_KEY_END: check_arguments(opts); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {{&cli_work_argp, 0, NULL, 0},
                                             {&cli_general_argp, 0, NULL, 0},
                                             {&step_argp, 0, NULL, 0},
                                             {&trainer_argp, 0, NULL, 0},
                                             {0}};
static const struct argp argp = {.options = options, .parser = parse, .children = children};

static const cli_tool tool = {
    .name = "bench_rows",
    .args = "COMMAND",
    .summary = "Measures checkpoints and training: save, load, reshard, many, compress, manifest, "
               "convert, collectives, unshard, chunk-cat, copy-out, cast, step, train.",
    .examples = "  ./dev bench load --json --dir /scratch   next to the plain file system\n"
                "  ./dev bench collectives --np 2 --against openmpi\n"
                "  ./dev bench step --threads 4 --layers 4 --width 64\n"
                "  ./dev bench train --against torch        GPT-2, next to PyTorch\n",
    .argp = &argp,
    .words = words};

int main(int argc, char **argv)
{
    step_options step = step_options_default();
    trainer_options trainer = trainer_options_default();
    row_options opts = {.step = &step,
                        .trainer = &trainer,
                        .argc = argc,
                        .argv = argv,
                        .size = (int64_t)1 << 30,
                        .rounds = 5,
                        .dir = ".",
                        .ops = "ag,rs,ar",
                        .sizes = "64K,1M,16M,256M",
                        .dtype = "f32",
                        .buffers = "pool"};
    fsdp_error err = {0};
    for (int i = 0; i < COMMANDS; i++)
        command_names[i] = commands[i].name;
    cli_begin(&tool, argc, argv, &opts);
    bench_exit(commands[find_command(opts.command)].run(&opts, &err), &err);
}

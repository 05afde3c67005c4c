/*
 * fsdp-bench: makes synthetic checkpoints, proves every element of them, and measures the library
 * beside what the plain file system, memcpy or another library does with the same bytes.
 */
#include "tests/bench/train/bench_step.h"
#include "tests/bench/train/bench_trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- options -------------------------------------------------------------------------------------------- */

enum {
    KEY_MODEL = 0x2000,
    KEY_SCALE,
    KEY_WORLD,
    KEY_SAVES,
    KEY_SEED,
    KEY_KIND,
    KEY_COMPRESS,
    KEY_NO_SYNC,
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
    {"model", KEY_MODEL, "MODEL", 0, "make: gpt2, llama-1b, llama-8b or moe (40,000 tensors)", 0},
    {"scale", KEY_SCALE, "F", 0, "make: about F times the parameters, same names", 0},
    {"world-size", KEY_WORLD, "N", 0, "make: ranks, as threads (default: 1; mpirun's)", 0},
    {"saves", KEY_SAVES, "K", 0, "make: K more saves into the run directory DIR", 0},
    {"kind", KEY_KIND, "KIND", 0, "make: sharded (default), full or local", 0},
    {"compress", KEY_COMPRESS, "zstd[:L]", 0, "make: byte shuffle + zstd, level L (default: 0)", 0},
    {"no-sync", KEY_NO_SYNC, NULL, 0, "make: leave durability to the operating system", 0},
    {"deadline", KEY_DEADLINE, "S", 0, "make, save: how long a rank waits for others (300)", 0},
    {"seed", KEY_SEED, "S", 0, "seed of the values (default: 0)", 0},
    {"size", KEY_SIZE, "SIZE", 0, "others: bytes of the state (default: 1G)", 0},
    {"dir", KEY_DIR, "DIR", 0, "others: where files are written (default: .)", 0},
    {"rounds", KEY_ROUNDS, "N", 0, "others: repetitions, at least 5 (default: 5)", 0},
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

typedef fsdp_status (*command_run)(const bench_options *opts, fsdp_error *err);

/* Sets of commands, for the ones that use an option. */
typedef enum command_set {
    FOR_MAKE = 1,
    FOR_MEASURE = 2,
    FOR_PEERS = 4,
    FOR_SAVE = 8,
    FOR_RANKS = 16, /* started by fsdp_launch: its options are good */
    FOR_COLLECTIVES = 32,
    FOR_STEP = 64,
    FOR_TRAIN = 128,
    FOR_CONVERT = 256
} command_set;

static const struct {
    const char *name;
    command_run run;
    unsigned set;
    bool takes_path;
} commands[] = {
    {"make", bench_make, FOR_MAKE, true},
    {"check", bench_check, 0, true},
    {"save", bench_measure, FOR_MEASURE | FOR_SAVE, false},
    {"load", bench_measure, FOR_MEASURE, false},
    {"reshard", bench_measure, FOR_MEASURE, false},
    {"many", bench_measure, FOR_MEASURE, false},
    {"compress", bench_measure, FOR_MEASURE | FOR_PEERS, false},
    {"manifest", bench_measure, FOR_MEASURE, false},
    {"convert", bench_measure, FOR_MEASURE | FOR_PEERS | FOR_CONVERT, false},
    {"collectives", bench_collectives, FOR_RANKS | FOR_COLLECTIVES | FOR_PEERS, false},
    {"unshard", bench_unshard, FOR_RANKS, false},
    {"chunk-cat", bench_copies, FOR_RANKS, false},
    {"copy-out", bench_copies, FOR_RANKS, false},
    {"cast", bench_copies, FOR_RANKS, false},
    {"step", bench_step, FOR_RANKS | FOR_STEP | FOR_PEERS, false},
    {"train", bench_trainer, FOR_RANKS | FOR_TRAIN | FOR_PEERS, false},
};
enum { COMMANDS = sizeof commands / sizeof *commands };
static const char command_list[] =
    "make, check, save, load, reshard, many, compress, manifest, convert, collectives, unshard, "
    "chunk-cat, copy-out, cast, step, train";

static const char *command_names[COMMANDS + 1];
static const cli_words words[] = {{NULL, command_names}, {"model", bench_models}, {0}};

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
    {KEY_MODEL, "model", FOR_MAKE},
    {KEY_SCALE, "scale", FOR_MAKE},
    {KEY_WORLD, "world-size", FOR_MAKE},
    {KEY_SAVES, "saves", FOR_MAKE},
    {KEY_KIND, "kind", FOR_MAKE},
    {KEY_COMPRESS, "compress", FOR_MAKE},
    {KEY_NO_SYNC, "no-sync", FOR_MAKE},
    {KEY_DEADLINE, "deadline", FOR_MAKE | FOR_SAVE | FOR_RANKS},
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
static void check_scopes(const bench_options *opts)
{
    unsigned set = commands[find_command(opts->command)].set;
    for (size_t i = 0; i < sizeof scopes / sizeof *scopes; i++)
        if ((opts->given & UINT64_C(1) << (scopes[i].key - KEY_MODEL)) && !(scopes[i].heeded & set))
            cli_usage_error("--%s means nothing to %s", scopes[i].name, opts->command);
    if (opts->step->first && !(set & FOR_STEP))
        cli_usage_error("--%s means nothing to %s", opts->step->first, opts->command);
    if (opts->step->first_shared && !(set & (FOR_STEP | FOR_TRAIN)))
        cli_usage_error("--%s means nothing to %s", opts->step->first_shared, opts->command);
    if (opts->trainer->first && !(set & FOR_TRAIN))
        cli_usage_error("--%s means nothing to %s", opts->trainer->first, opts->command);
}

static void check_torch(const bench_options *opts)
{
    if (opts->against && strcmp(opts->against, "torch") != 0)
        cli_usage_error("--against '%s': %s has torch", opts->against, opts->command);
}

static void check_step(bench_options *opts)
{
    check_torch(opts);
    step_options_finish(opts->step);
    if (!(opts->given & UINT64_C(1) << (KEY_SEED - KEY_MODEL)))
        opts->seed = 1;
}

static void parse_argument(bench_options *opts, const char *arg)
{
    if (!opts->command)
        opts->command = commands[find_command(arg)].name;
    else if (!opts->path)
        opts->path = arg;
    else
        cli_usage_error("'%s' is too many", arg);
}

/* As many as fsdp_ctl_run_threads connects. */
enum { MOST_RANKS = 1024 };

/* At this scale the largest model still has less than 2^63 bytes. */
enum { MOST_SCALE = 1000000 };

static void check_make(const bench_options *opts)
{
    int ranks = bench_mpi_world();
    if (!opts->model)
        cli_usage_error("--model is missing: gpt2, llama-1b, llama-8b or moe");
    if (opts->scale <= 0 || opts->scale > MOST_SCALE)
        cli_usage_error("--scale must be more than 0 and at most %.0f", (double)MOST_SCALE);
    if (ranks > 0 && opts->world > 0 && opts->world != ranks)
        cli_usage_error("--world-size %d, but mpirun started %d ranks", opts->world, ranks);
}

static void check_arguments(bench_options *opts)
{
    if (!opts->command)
        cli_usage_error("COMMAND is missing: %s", command_list);
    check_scopes(opts);
    unsigned set = commands[find_command(opts->command)].set;
    bool takes_path = commands[find_command(opts->command)].takes_path;
    if (takes_path && !opts->path)
        cli_usage_error("%s needs a DIR", opts->command);
    if (!takes_path && opts->path)
        cli_usage_error(set & FOR_MEASURE ? "%s takes --dir, not '%s'" : "%s takes no '%s'",
                        opts->command, opts->path);
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
    if (strcmp(opts->command, "make") == 0)
        check_make(opts);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    bench_options *opts = state->input;
    if (key >= KEY_MODEL && key < KEY_END)
        opts->given |= UINT64_C(1) << (key - KEY_MODEL);
    switch (key) {
    case ARGP_KEY_INIT:
        for (int i = 0; i < 2; i++)
            state->child_inputs[i] = &opts->common;
        state->child_inputs[2] = opts->step;
        state->child_inputs[3] = opts->trainer;
        return 0;
    case KEY_MODEL: opts->model = arg; return 0;
    case KEY_SCALE: opts->scale = cli_parse_real("--scale", arg); return 0;
    case KEY_WORLD:
        opts->world = (int)cli_parse_integer("--world-size", arg, 1, MOST_RANKS);
        return 0;
    case KEY_SAVES: opts->saves = (int)cli_parse_integer("--saves", arg, 1, 1 << 20); return 0;
    case KEY_SEED: opts->seed = (uint64_t)cli_parse_integer("--seed", arg, 0, INT64_MAX); return 0;
    case KEY_KIND: opts->kind = cli_parse_kind(arg); return 0;
    case KEY_COMPRESS:
        opts->compress = true;
        opts->level = cli_parse_compress(arg);
        return 0;
    case KEY_NO_SYNC: opts->skip_fsync = true; return 0;
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
    .name = "fsdp-bench",
    .args = "COMMAND [DIR]",
    .summary = "Makes, proves and measures checkpoints, and measures training: make, check, save, "
               "load, reshard, many, compress, manifest, convert, collectives, unshard, chunk-cat, "
               "copy-out, cast, step, train.",
    .examples = "  fsdp-bench make --model gpt2 --scale 0.1 --world-size 4 step-1\n"
                "  mpirun -n 4 fsdp-bench make --model llama-1b --saves 3 run\n"
                "  fsdp-bench check step-1                  every element and value\n"
                "  fsdp-bench load --json --dir /scratch    beside the plain file system\n"
                "  fsdp-bench collectives --np 2 --against openmpi\n"
                "  fsdp-bench step --threads 4 --layers 4 --width 64\n"
                "  fsdp-bench train --against torch         GPT-2, beside PyTorch\n",
    .argp = &argp,
    .words = words};

int main(int argc, char **argv)
{
    step_options step = step_options_default();
    trainer_options trainer = trainer_options_default();
    bench_options opts = {.step = &step,
                          .trainer = &trainer,
                          .argc = argc,
                          .argv = argv,
                          .scale = 1,
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

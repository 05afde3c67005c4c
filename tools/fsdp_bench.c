/* fsdp-bench: makes synthetic checkpoints, and proves every element of them. */
#include "tools/bench/bench.h"

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
    KEY_DEADLINE
};

static const struct argp_option options[] = {
    {"model", KEY_MODEL, "MODEL", 0, "make: gpt2, llama-1b, llama-8b or moe (40,000 tensors)", 0},
    {"scale", KEY_SCALE, "F", 0, "make: about F times the parameters, same names", 0},
    {"world-size", KEY_WORLD, "N", 0, "make: ranks, as threads (default: 1; mpirun's)", 0},
    {"saves", KEY_SAVES, "K", 0, "make: K more saves into the run directory DIR", 0},
    {"kind", KEY_KIND, "KIND", 0, "make: sharded (default), full or local", 0},
    {"compress", KEY_COMPRESS, "zstd[:L]", 0, "make: byte shuffle + zstd, level L (default: 0)", 0},
    {"no-sync", KEY_NO_SYNC, NULL, 0, "make: leave durability to the operating system", 0},
    {"deadline", KEY_DEADLINE, "S", 0, "make: how long a rank waits for others (300)", 0},
    {"seed", KEY_SEED, "S", 0, "seed of the values (default: 0)", 0},
    {0}};

static const char *const commands[] = {"make", "check", NULL};
static const char command_list[] = "make, check";
static const cli_words words[] = {{NULL, commands}, {"model", bench_models}, {0}};

static void parse_argument(bench_options *opts, const char *arg)
{
    if (opts->path)
        cli_usage_error("'%s' is too many", arg);
    if (opts->command) {
        opts->path = arg;
        return;
    }
    for (int i = 0; commands[i] && !opts->command; i++)
        opts->command = strcmp(arg, commands[i]) == 0 ? commands[i] : NULL;
    if (!opts->command)
        cli_usage_error("there is no command '%s'; %s", arg, command_list);
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

static void check_arguments(const bench_options *opts)
{
    if (!opts->command)
        cli_usage_error("COMMAND is missing: %s", command_list);
    bool makes = strcmp(opts->command, "make") == 0;
    /* An option that the command would ignore is a usage error, since the user expects an effect. */
    if (opts->of_make && !makes)
        cli_usage_error("--%s has no meaning for %s", opts->of_make, opts->command);
    if (!opts->path)
        cli_usage_error("%s needs a DIR", opts->command);
    if (makes)
        check_make(opts);
}

static const char *name_of(int key)
{
    for (const struct argp_option *option = options; option->name; option++)
        if (option->key == key)
            return option->name;
    return NULL;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    bench_options *opts = state->input;
    if (name_of(key) && key != KEY_SEED && !opts->of_make)
        opts->of_make = name_of(key);
    switch (key) {
    case ARGP_KEY_INIT:
        for (int i = 0; i < 2; i++)
            state->child_inputs[i] = &opts->common;
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
    case KEY_DEADLINE:
        opts->deadline_ms = 1000 * (int)cli_parse_integer("--deadline", arg, 1, 1 << 20);
        return 0;
    case ARGP_KEY_ARG: parse_argument(opts, arg); return 0;
    case ARGP_KEY_END: check_arguments(opts); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {
    {&cli_work_argp, 0, NULL, 0}, {&cli_general_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {.options = options, .parser = parse, .children = children};

static const cli_tool tool = {
    .name = "fsdp-bench",
    .args = "COMMAND DIR",
    .summary = "Makes synthetic checkpoints, and proves every element of them: make, check.",
    .examples = "  fsdp-bench make --model gpt2 --scale 0.1 --world-size 4 step-1\n"
                "  mpirun -n 4 fsdp-bench make --model llama-1b --saves 3 run\n"
                "  fsdp-bench check step-1                  every element and value\n",
    .argp = &argp,
    .words = words};

int main(int argc, char **argv)
{
    bench_options opts = {.scale = 1};
    fsdp_error err = {0};
    cli_begin(&tool, argc, argv, &opts);
    fsdp_status st =
        strcmp(opts.command, "make") == 0 ? bench_make(&opts, &err) : bench_check(&opts, &err);
    bench_exit(st, &err);
}

/* Options of bench step. See bench_step.h. */
#include "tests/bench/train/bench_step.h"

#include <stdlib.h>
#include <string.h>

enum {
    KEY_LAYERS = 0x2100,
    KEY_WIDTH,
    KEY_OUT,
    KEY_ROWS,
    KEY_STEPS,
    KEY_OPTIM,
    KEY_LR,
    KEY_MESH,
    KEY_RESHARD,
    KEY_PREFETCH_FORWARD,
    KEY_PREFETCH_BACKWARD,
    KEY_ACCUMULATE,
    KEY_PARAM_DTYPE,
    KEY_REDUCE_DTYPE,
    KEY_DIVIDE,
    KEY_FORCE_SUM,
    KEY_CLIP,
    KEY_OFFLOAD,
    KEY_SAVE,
    KEY_LOAD,
    KEY_BEHIND
};

static const struct argp_option options[] = {
    {"layers", KEY_LAYERS, "N", 0, "step, train: layers of the model (default: 3, 12)", 2},
    {"width", KEY_WIDTH, "N", 0, "step, train: inputs of each layer (default: 8, 768)", 2},
    {"out", KEY_OUT, "N", 0, "step: outputs of the last layer (default: 8)", 2},
    {"rows", KEY_ROWS, "N", 0, "step: rows of a rank's microbatch (default: 4)", 2},
    {"steps", KEY_STEPS, "N", 0, "step: steps (default: 20)", 2},
    {"optim", KEY_OPTIM, "NAME", 0, "step: adamw (default) or sgd", 2},
    {"lr", KEY_LR, "F", 0, "step: learning rate (default: 1e-3)", 2},
    {"mesh", KEY_MESH, "MESH", 0, "step: dp=N (all ranks), rep=,dp= or dp=,tp=", 2},
    {"reshard", KEY_RESHARD, "MODE", 0, "step: auto (default), true, false or a number", 2},
    {"prefetch-forward", KEY_PREFETCH_FORWARD, "D", 0, "step: units gathered ahead (0)", 2},
    {"prefetch-backward", KEY_PREFETCH_BACKWARD, "D", 0, "step: the same (0: the next one)", 2},
    {"accumulate", KEY_ACCUMULATE, "M", 0, "step: microbatches of a step (default: 1)", 2},
    {"param-dtype", KEY_PARAM_DTYPE, "T", 0, "step: of gathered parameters (default: f32)", 2},
    {"reduce-dtype", KEY_REDUCE_DTYPE, "T", 0, "step: of reductions (default: f32)", 2},
    {"divide", KEY_DIVIDE, "F", 0, "step: gradients are divided by (default: ranks)", 2},
    {"force-sum", KEY_FORCE_SUM, NULL, 0, "step: reductions are sums", 2},
    {"clip", KEY_CLIP, "F", 0, "step: largest norm of the gradients", 2},
    {"offload", KEY_OFFLOAD, NULL, 0, "step: shards lie in host memory", 2},
    {"save", KEY_SAVE, "DIR", 0, "step: a checkpoint of the end", 2},
    {"load", KEY_LOAD, "DIR", 0, "step: begin with a checkpoint", 2},
    {0}};

enum { MOST_LAYERS = 10000, MOST_STEPS = 1 << 30, MOST_RANKS = 1024 };
static const int64_t most_width = INT64_C(1) << 24;

step_options step_options_default(void)
{
    return (step_options){.steps = 20,
                          .accumulate = 1,
                          .out = 8,
                          .rows = 4,
                          .lr = 1e-3,
                          .replicas = 1,
                          .parts = 1,
                          .reshard = FSDP_RESHARD_AUTO};
}

void step_options_finish(step_options *opts)
{
    opts->layers = opts->layers > 0 ? opts->layers : 3;
    opts->width = opts->width > 0 ? opts->width : 8;
}

/* --- values ----------------------------------------------------------------------------------- */

/* "rep=2,dp=2": names in this order, dp among them. */
static void parse_mesh(step_options *opts, const char *arg)
{
    static const char *const names[] = {"rep=", "dp=", "tp="};
    int sizes[3] = {1, 0, 1}, next = 0;
    for (const char *at = arg;; at++) {
        while (next < 3 && strncmp(at, names[next], strlen(names[next])) != 0)
            next++;
        if (next == 3)
            cli_usage_error("--mesh '%s': there are dp=N, rep=N,dp=N and dp=N,tp=N", arg);
        at += strlen(names[next]);
        char *end;
        long size = strtol(at, &end, 10);
        if (end == at || size < 1 || size > MOST_RANKS || (*end && *end != ','))
            cli_usage_error("--mesh '%s': a number of ranks from 1 to %d is needed", arg,
                            MOST_RANKS);
        sizes[next++] = (int)size;
        at = end;
        if (!*at)
            break;
    }
    if (sizes[1] == 0)
        cli_usage_error("--mesh '%s': dp is missing", arg);
    opts->replicas = sizes[0];
    opts->shards = sizes[1];
    opts->parts = sizes[2];
}

static int parse_reshard(const char *arg)
{
    if (strcmp(arg, "auto") == 0)
        return FSDP_RESHARD_AUTO;
    if (strcmp(arg, "true") == 0)
        return FSDP_RESHARD_ALWAYS;
    if (strcmp(arg, "false") == 0)
        return FSDP_RESHARD_NEVER;
    return (int)cli_parse_integer("--reshard", arg, 2, MOST_RANKS);
}

static fsdp_dtype parse_dtype(const char *option, const char *arg)
{
    static const char *const names[] = {"f32", "bf16", "f16", NULL};
    const char *name = fsdp_dtype_name(fsdp_dtype_from_typed(arg, strlen(arg)));
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_BF16, FSDP_F16};
    return dtypes[cli_parse_word(option, strcmp(name, "?") == 0 ? arg : name, names)];
}

static double parse_positive(const char *option, const char *arg)
{
    double value = cli_parse_real(option, arg);
    if (value <= 0)
        cli_usage_error("%s must be more than 0", option);
    return value;
}

static int parse_count(const char *option, const char *arg, int64_t least, int64_t most)
{
    return (int)cli_parse_integer(option, arg, least, most);
}

/* --- parsing ---------------------------------------------------------------------------------- */

static error_t parse_shape(step_options *opts, int key, char *arg)
{
    switch (key) {
    case KEY_LAYERS: opts->layers = parse_count("--layers", arg, 1, MOST_LAYERS); return 0;
    case KEY_WIDTH: opts->width = cli_parse_integer("--width", arg, 1, most_width); return 0;
    case KEY_OUT: opts->out = cli_parse_integer("--out", arg, 1, most_width); return 0;
    case KEY_ROWS: opts->rows = cli_parse_integer("--rows", arg, 1, most_width); return 0;
    case KEY_STEPS: opts->steps = parse_count("--steps", arg, 0, MOST_STEPS); return 0;
    case KEY_MESH: parse_mesh(opts, arg); return 0;
    case KEY_SAVE: opts->save = arg; return 0;
    case KEY_LOAD: opts->load = arg; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse_mode(step_options *opts, int key, char *arg)
{
    static const char *const optims[] = {[STEP_ADAMW] = "adamw", [STEP_SGD] = "sgd", NULL};
    switch (key) {
    case KEY_OPTIM: opts->optim = (step_optim)cli_parse_word("--optim", arg, optims); return 0;
    case KEY_LR: opts->lr = cli_parse_real("--lr", arg); return 0;
    case KEY_RESHARD: opts->reshard = parse_reshard(arg); return 0;
    case KEY_PREFETCH_FORWARD:
        opts->prefetch_forward = parse_count("--prefetch-forward", arg, 0, MOST_LAYERS);
        return 0;
    case KEY_PREFETCH_BACKWARD:
        opts->prefetch_backward = parse_count("--prefetch-backward", arg, 0, MOST_LAYERS);
        return 0;
    case KEY_ACCUMULATE:
        opts->accumulate = parse_count("--accumulate", arg, 1, MOST_STEPS);
        return 0;
    case KEY_PARAM_DTYPE: opts->param_dtype = parse_dtype("--param-dtype", arg); return 0;
    case KEY_REDUCE_DTYPE: opts->reduce_dtype = parse_dtype("--reduce-dtype", arg); return 0;
    case KEY_DIVIDE: opts->divide = parse_positive("--divide", arg); return 0;
    case KEY_FORCE_SUM: opts->force_sum = true; return 0;
    case KEY_CLIP: opts->clip = parse_positive("--clip", arg); return 0;
    case KEY_OFFLOAD: opts->offload = true; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    step_options *opts = state->input;
    const char **first = key <= KEY_WIDTH ? &opts->first_shared : &opts->first;
    if (key >= KEY_LAYERS && key < KEY_BEHIND && !*first)
        *first = options[key - KEY_LAYERS].name;
    error_t found = parse_shape(opts, key, arg);
    return found == ARGP_ERR_UNKNOWN ? parse_mode(opts, key, arg) : found;
}

const struct argp step_argp = {.options = options, .parser = parse};

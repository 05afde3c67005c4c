/* The command line of fsdp-train: its own options, and one per key of the configuration. See train.h. */
#include "tools/train/train.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* === files that it may replace ================================================================ */

/* An empty file, as mktemp makes them, holds nothing that could be lost. */
static bool is_array(const char *begin, size_t size)
{
    return size == 0 || (size >= 6 && memcmp(begin, "\x93NUMPY", 6) == 0);
}

/* The size of the header in 8 bytes, then a JSON object: no header has 4 GiB. */
static bool is_safetensors(const char *begin, size_t size)
{
    static const char high[4];
    return size == 0 || (size > 8 && memcmp(begin + 4, high, sizeof high) == 0 && begin[8] == '{');
}

static bool is_same_file(const struct stat *a, const char *path)
{
    struct stat b;
    return path && *path && stat(path, &b) == 0 && a->st_dev == b.st_dev && a->st_ino == b.st_ino;
}

/* Whether output lies in the file or directory `input`, which may be NULL or "". */
static bool is_part_of(const char *output, const char *input)
{
    struct stat info;
    char place[PATH_MAX];
    if (stat(output, &info) != 0 || !S_ISREG(info.st_mode))
        return false;
    if (is_same_file(&info, input))
        return true;
    char *slash = realpath(output, place) ? strrchr(place, '/') : NULL;
    if (!slash)
        return false;
    slash[slash == place] = '\0'; /* "/" stays */
    return stat(place, &info) == 0 && is_same_file(&info, input);
}

static fsdp_status check_output(const train_options *opts, const char *output,
                                const cli_output_kind *kind, fsdp_error *err)
{
    const char *const inputs[] = {opts->config_path,
                                  opts->tokens,
                                  opts->batches,
                                  opts->data,
                                  opts->eval,
                                  opts->sample,
                                  opts->init,
                                  opts->resume_path,
                                  opts->config.data.path,
                                  opts->config.data.val,
                                  opts->config.data.tokenizer};
    if (!output)
        return FSDP_OK;
    FSDP_TRY(cli_check_output(output, kind, NULL, err));
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        if (is_part_of(output, inputs[i]))
            return fsdp_fail(err, FSDP_ERR_EXISTS,
                             "cannot write '%s': this command reads it ('%s')", output, inputs[i]);
    return FSDP_OK;
}

/* Outputs of the command replace files of their own kind only, and none of its inputs: FSDP_ERR_EXISTS. */
static fsdp_status check_outputs(const train_options *opts, fsdp_error *err)
{
    static const cli_output_kind array = {"an array of NumPy (.npy)", is_array};
    static const cli_output_kind tensors = {"a safetensors file", is_safetensors};
    FSDP_TRY(check_output(opts, opts->logits_out, &array, err));
    FSDP_TRY(check_output(opts, opts->out, &array, err));
    return check_output(opts, opts->dump_grads, &tensors, err);
}

/* === the command line ========================================================================= */

enum {
    KEY_RUN = 0x2000,
    KEY_INIT,
    KEY_RESUME,
    KEY_ALLOW,
    KEY_PRINT,
    KEY_BATCHES,
    KEY_STEPS,
    KEY_DUMP,
    KEY_EVAL,
    KEY_TOKENS,
    KEY_LOGITS,
    KEY_DATA,
    KEY_SAMPLE,
    KEY_PROMPT,
    KEY_TEMPERATURE,
    KEY_TOP_K,
    KEY_TOP_P,
    KEY_SEED,
    KEY_OUT,
    KEY_TOKENIZE,
    KEY_SPECIAL,
    KEY_DECODE,
    KEY_NP,
    KEY_THREADS,
    KEY_COMM,
    KEY_DEADLINE,
    KEY_DEVICE,
    KEY_TRACE,
    KEY_CHECK,
    KEY_CONFIG
};

enum { OWN_OPTIONS = 31, MOST_KEYS = 64 };

static const struct argp_option own_options[OWN_OPTIONS] = {
    {"run", KEY_RUN, "DIR", 0, "the run: checkpoints, metrics.jsonl, main.log", 0},
    {"init", KEY_INIT, "SRC", 0, "first values: a Hugging Face directory or a checkpoint", 0},
    {"resume", KEY_RESUME, "auto|no|PATH", 0,
     "auto (default): resume from the run's newest checkpoint that is whole", 0},
    {"allow-change", KEY_ALLOW, "WHAT,...", 0, "resume with other data, optim or batch", 0},
    {"print-config", KEY_PRINT, NULL, 0, "print all keys with their values and end", 0},
    {"batches", KEY_BATCHES, "F.npy", 0, "i64 [N, B, S+1]: the ids of each step", 0},
    {"steps", KEY_STEPS, "N", 0, "steps of the whole training (train.steps)", 0},
    {"dump-grads", KEY_DUMP, "F.safetensors", 0, "write the gradients of step 1, before clipping",
     0},
    {"eval", KEY_EVAL, "SRC", 0, "evaluate a checkpoint, run or Hugging Face directory", 1},
    {"sample", KEY_SAMPLE, "SRC", 0, "continue a prompt", 1},
    {"tokens", KEY_TOKENS, "F.npy", 0, "eval, sample: i64 [B, S] ids", 1},
    {"logits-out", KEY_LOGITS, "F.npy", 0, "eval: f32 [B, S, V]", 1},
    {"data", KEY_DATA, "PATH", 0, "eval: text or token files to find the loss of", 1},
    {"prompt", KEY_PROMPT, "TEXT", 0, "sample: text to continue", 1},
    {"count", 'n', "N", 0, "sample: new tokens (default 64)", 1},
    {"temperature", KEY_TEMPERATURE, "T", 0, "sample: 0 is greedy (default 0.8)", 1},
    {"top-k", KEY_TOP_K, "K", 0, "sample: of the K likeliest only (default 40; 0: all)", 1},
    {"top-p", KEY_TOP_P, "P", 0, "sample: of the likeliest that make up P (default 1)", 1},
    {"seed", KEY_SEED, "N", 0, "sample: seed of the draws (default 1)", 1},
    {"out", KEY_OUT, "F.npy", 0, "sample: write the new ids, i64 [B, N]", 1},
    {"tokenize", KEY_TOKENIZE, "TOKENIZER", 0,
     "one JSON string per line in, its ids out: bytes, tokenizer.json or a directory", 2},
    {"special", KEY_SPECIAL, NULL, 0, "tokenize: with the tokens that begin and end a text", 2},
    {"decode", KEY_DECODE, NULL, 0, "tokenize: ids in, text out", 2},
    {"np", KEY_NP, "N", 0, "ranks are N processes", 3},
    {"threads", KEY_THREADS, "N", 0, "ranks are N threads", 3},
    {"comm", KEY_COMM, "NAME", 0, "auto (default), self, threads, shm, mpi, tcp or nccl", 3},
    {"device", KEY_DEVICE, "NAME", 0, "cpu, cpu-async, cuda or cuda:N", 3},
    {"deadline", KEY_DEADLINE, "SECONDS", 0, "longest wait for another rank (default 30)", 3},
    {"trace", KEY_TRACE, "FILE", 0, "an event per line; %r is the rank", 3},
    {"check", KEY_CHECK, NULL, 0, "check buffers and calls of all ranks (slower)", 3},
};

/* Own options, then one per key: made when first asked for, since their names are the keys'. */
static struct argp_option options[OWN_OPTIONS + MOST_KEYS];

static void make_options(void)
{
    const char *name, *help;
    size_t own = 0;
    for (; own_options[own].key; own++)
        options[own] = own_options[own];
    for (size_t i = 0;
         own + i + 1 < sizeof options / sizeof *options && (name = train_config_key_at(i, &help));
         i++)
        options[own + i] = (struct argp_option){name, KEY_CONFIG + (int)i, "VALUE", 0, help, 4};
}

/* --- parsing ------------------------------------------------------------------------------------- */

static void parse_resume(train_options *opts, const char *arg)
{
    opts->resume = strcmp(arg, "auto") == 0 ? TRAIN_RESUME_AUTO
                   : strcmp(arg, "no") == 0 ? TRAIN_RESUME_NO
                                            : TRAIN_RESUME_PATH;
    opts->resume_path = arg;
}

static void parse_changes(train_options *opts, const char *arg)
{
    static const char *const words[] = {"data", "optim", "batch"};
    while (*arg) {
        size_t size = strcspn(arg, ","), i = 0;
        while (i < 3 && (strlen(words[i]) != size || strncmp(words[i], arg, size) != 0))
            i++;
        if (i == 3)
            cli_usage_error("--allow-change takes data, optim, batch, not '%.*s'", (int)size, arg);
        opts->allowed_changes |= 1u << i;
        arg += size + (arg[size] == ',');
    }
}

static void set_key(train_options *opts, const char *name, const char *value)
{
    opts->settings[opts->setting_count++] = (train_setting){name, value};
}

static bool parse_training(train_options *opts, int key, char *arg)
{
    switch (key) {
    case KEY_RUN: opts->run = arg; return true;
    case KEY_INIT: opts->init = arg; return true;
    case KEY_RESUME: parse_resume(opts, arg); return true;
    case KEY_ALLOW: parse_changes(opts, arg); return true;
    case KEY_PRINT: opts->print_config = true; return true;
    case KEY_BATCHES: opts->batches = arg; return true;
    case KEY_STEPS: set_key(opts, "train.steps", arg); return true;
    case KEY_DUMP: opts->dump_grads = arg; return true;
    case KEY_DEADLINE: opts->deadline = arg; return true;
    default: return false;
    }
}

static bool parse_use(train_options *opts, int key, char *arg)
{
    switch (key) {
    case KEY_EVAL: opts->eval = arg; return true;
    case KEY_SAMPLE: opts->sample = arg; return true;
    case KEY_TOKENS: opts->tokens = arg; return true;
    case KEY_LOGITS: opts->logits_out = arg; return true;
    case KEY_DATA: opts->data = arg; return true;
    case KEY_PROMPT: opts->prompt = arg; return true;
    case 'n': opts->count = cli_parse_integer("-n", arg, 0, 1 << 24); return true;
    case KEY_TEMPERATURE: opts->temperature = cli_parse_real("--temperature", arg); return true;
    case KEY_TOP_K: opts->top_k = cli_parse_integer("--top-k", arg, 0, INT64_MAX); return true;
    case KEY_TOP_P: opts->top_p = cli_parse_real("--top-p", arg); return true;
    case KEY_SEED: opts->seed = cli_parse_integer("--seed", arg, 0, INT64_MAX); return true;
    case KEY_OUT: opts->out = arg; return true;
    case KEY_TOKENIZE: opts->tokenize = arg; return true;
    case KEY_SPECIAL: opts->special = true; return true;
    case KEY_DECODE: opts->decode = true; return true;
    default: return false;
    }
}

static bool is_launch_key(int key)
{
    return key >= KEY_NP && key <= KEY_CHECK;
}

/* --- options of other work ----------------------------------------------------------------------- */

enum { TRAINING = 1, EVAL = 2, SAMPLE = 4, TOKENIZE = 8, ALL = 15 };

static unsigned work_of_own(int key)
{
    switch (key) {
    case KEY_RUN:
    case KEY_INIT:
    case KEY_RESUME:
    case KEY_ALLOW:
    case KEY_PRINT:
    case KEY_BATCHES:
    case KEY_STEPS:
    case KEY_DUMP: return TRAINING;
    case KEY_TOKENS: return EVAL | SAMPLE;
    case KEY_LOGITS:
    case KEY_DATA: return EVAL;
    case KEY_PROMPT:
    case 'n':
    case KEY_TEMPERATURE:
    case KEY_TOP_K:
    case KEY_TOP_P:
    case KEY_SEED:
    case KEY_OUT: return SAMPLE;
    case KEY_SPECIAL:
    case KEY_DECODE: return TOKENIZE;
    default: return ALL;
    }
}

/* A model runs on ranks, with a tokenizer and data; an evaluation also in batches. */
static unsigned work_of_setting(const char *name)
{
    static const struct {
        const char *begin;
        unsigned work;
    } kept[] = {{"parallel.", TRAINING | EVAL | SAMPLE},
                {"data.", TRAINING | EVAL | SAMPLE},
                {"train.threads", TRAINING | EVAL | SAMPLE},
                {"train.dtype", TRAINING | EVAL | SAMPLE},
                {"train.batch", TRAINING | EVAL},
                {"train.micro", TRAINING | EVAL}};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        if (strncmp(name, kept[i].begin, strlen(kept[i].begin)) == 0)
            return kept[i].work;
    return TRAINING;
}

/* Options that the work of this command would not look at. */
static void refuse_others(const train_options *opts)
{
    static const char *const names[] = {"--eval", "--sample", "--tokenize"};
    const int use = opts->eval ? 0 : opts->sample ? 1 : opts->tokenize ? 2 : -1;
    for (size_t i = 0; i < opts->given_count; i++) {
        const train_given *given = &opts->given[i];
        const char *place = given->work & SAMPLE
                                ? given->work & EVAL ? "--eval or --sample" : "--sample"
                            : given->work & EVAL ? "--eval"
                                                 : "--tokenize";
        if (given->work & (use < 0 ? TRAINING : (unsigned)EVAL << use))
            continue;
        if (given->work & TRAINING)
            cli_usage_error("--%s %s %s", given->name,
                            given->work == TRAINING ? "is for training, not for"
                                                    : "cannot be combined with",
                            names[use]);
        cli_usage_error("--%s needs %s", given->name, place);
    }
}

bool train_option_is_given(const train_options *opts, const char *name)
{
    for (size_t i = 0; i < opts->given_count; i++)
        if (strcmp(opts->given[i].name, name) == 0)
            return true;
    return false;
}

static void check(const train_options *opts)
{
    int uses = !!opts->eval + !!opts->sample + !!opts->tokenize;
    if (uses > 1)
        cli_usage_error("--eval, --sample and --tokenize cannot be combined");
    refuse_others(opts);
    if (opts->logits_out && !opts->tokens)
        cli_usage_error("--logits-out needs --eval and --tokens");
    if (train_option_is_given(opts, "comm") && train_option_is_given(opts, "parallel.comm"))
        cli_usage_error("--comm and --parallel.comm cannot be combined");
    if (opts->eval && !opts->tokens == !opts->data)
        cli_usage_error("--eval needs --tokens or --data");
    if (!(opts->top_p > 0 && opts->top_p <= 1))
        cli_usage_error("--top-p must be more than 0 and at most 1");
    if (opts->sample && opts->prompt && opts->tokens)
        cli_usage_error("--prompt and --tokens cannot be combined");
    if (uses == 0 && !opts->run && !opts->print_config)
        cli_usage_error("--run is missing");
}

static const char *name_of(int key)
{
    const char *help;
    for (const struct argp_option *option = own_options; option->name; option++)
        if (option->key == key)
            return option->name;
    return key >= KEY_CONFIG ? train_config_key_at((size_t)(key - KEY_CONFIG), &help) : NULL;
}

static void note_given(train_options *opts, int key)
{
    const char *name = name_of(key);
    if (name)
        opts->given[opts->given_count++] =
            (train_given){name, key >= KEY_CONFIG ? work_of_setting(name) : work_of_own(key)};
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    train_options *opts = state->input;
    note_given(opts, key);
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = &opts->common;
        return 0;
    }
    if (key == ARGP_KEY_END) {
        check(opts);
        return 0;
    }
    if (key == ARGP_KEY_ARG) {
        if (opts->config_path)
            cli_usage_error("one CONFIG is expected, '%s' is too many", arg);
        opts->config_path = arg;
        return 0;
    }
    if (key >= KEY_CONFIG && name_of(key)) {
        set_key(opts, name_of(key), arg);
        return 0;
    }
    if (parse_training(opts, key, arg) || parse_use(opts, key, arg) || is_launch_key(key))
        return 0;
    return ARGP_ERR_UNKNOWN;
}

static const struct argp_child children[] = {{&cli_general_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {.options = options, .parser = parse, .children = children};

static const cli_tool train_tool = {
    .name = "fsdp-train",
    .args = "[CONFIG]",
    .summary =
        "Trains a transformer in shards, saves while it trains, and resumes from there on any "
        "number of ranks.",
    .examples =
        "  fsdp-train --run runs/a --data.path text/ --np 2     train a small GPT-2 of bytes\n"
        "  fsdp-train a.conf --run runs/a --np 4                resume, on other ranks\n"
        "  fsdp-train --eval runs/a --data held-out.txt         its loss and perplexity\n"
        "  fsdp-train --sample runs/a --prompt 'Once upon' -n 200\n",
    .argp = &argp};

/* --- the configuration --------------------------------------------------------------------------- */

static fsdp_status check_config(const train_config *config, fsdp_error *err)
{
    enum { LEAST = 1 << 20 };
    if (config->parallel.device != TRAIN_CPU)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "parallel.device is cuda, but models are computed on the host only so far; use cpu");
    if (config->save.keep_last == 1)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "save.keep_last is 1; keep at least 2, in case one is damaged, or 0 for all");
    if (config->save.mem > 0 && config->save.mem < LEAST)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "save.mem of %lld bytes is too small: a thread reads and writes 1 MiB at "
                         "a time; set at least 1M, or 0 for the library's default",
                         (long long)config->save.mem);
    return FSDP_OK;
}

/* Keys of the command line win, so they are set when the file was read. */
static fsdp_status read_config(train_options *opts, fsdp_error *err)
{
    char origin[96];
    train_config_init(&opts->config);
    if (opts->config_path)
        FSDP_TRY(train_config_read(&opts->config, opts->config_path, err));
    for (size_t i = 0; i < opts->setting_count; i++) {
        const train_setting *setting = &opts->settings[i];
        snprintf(origin, sizeof origin, "--%s", setting->name);
        FSDP_TRY(train_config_set(&opts->config, setting->name, setting->value, origin, err));
    }
    FSDP_TRY(check_config(&opts->config, err));
    if (opts->batches && !opts->config.has_steps)
        FSDP_TRY(train_ids_count(opts->batches, 3, &opts->config.train.steps, err));
    return FSDP_OK;
}

/* Saves put the run's name after its parent's: "." and ".." have none. */
static const char *name_run(const char *run)
{
    size_t end = strlen(run), begin;
    while (end > 1 && run[end - 1] == '/')
        end--;
    for (begin = end; begin > 0 && run[begin - 1] != '/';)
        begin--;
    const bool has_name = end - begin > 2 || strspn(run + begin, ".") < end - begin;
    const char *named = has_name ? NULL : realpath(run, NULL);
    return named ? named : run;
}

fsdp_status train_options_parse(train_options *opts, int argc, char **argv, fsdp_error *err)
{
    *opts = (train_options){.count = 64,
                            .temperature = 0.8,
                            .top_k = 40,
                            .top_p = 1,
                            .seed = 1,
                            .argc = argc,
                            .argv = argv};
    opts->settings = calloc((size_t)argc + 1, sizeof *opts->settings);
    opts->given = calloc((size_t)argc + 1, sizeof *opts->given);
    if (!opts->settings || !opts->given)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    make_options();
    cli_begin(&train_tool, argc, argv, opts);
    if (opts->run)
        opts->run = name_run(opts->run);
    FSDP_TRY(read_config(opts, err));
    return check_outputs(opts, err);
}

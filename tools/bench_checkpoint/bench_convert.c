/*
 * Rows of fsdp-bench convert: fsdp-convert and fsdp-ls as programs, beside `cp` of what they read,
 * and beside the program that people use for it today, when --peer names one (tests/peers/
 * convert_peer does). Nothing is synced on either side. A case has up to three rows:
 *
 *   NAME            ours without verification, beside cp
 *   NAME-verified   ours as it comes, beside cp
 *   NAME-peer       ours as it comes, beside the peer
 */
#include "tools/bench/bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SAVED_BY = 4, FROM = 8, MOST_ARGUMENTS = 16, PEAK_FACTOR = 8 };

enum { OPTIONS = 5 };

/* One case: source, target, options. make_source makes a source when the first case needs it. */
typedef struct convert_case {
    const char *work, *source, *result;
    const char *options[OPTIONS]; /* of fsdp-convert, ended by NULL; the first NULL: fsdp-ls */
    double copy_goal;             /* 0: no row beside cp */
    const char *task;             /* of the peer; NULL: no row beside it */
    double peer_goal;
    bool once; /* the peer needs minutes */
} convert_case;

static const convert_case cases[] = {
    {"dcp-hf", "dcp-4", "hf", {"--to", "hf"}, 0.80, NULL, 0, false},
    {"dcp-torch", "dcp-4", "one.pt", {"--to", "torch"}, 0.80, "dcp-to-torch-save", 5, false},
    {"dcp-native", "dcp-8", "native", {"--to", "fsdp", "--world-size", "6"}, 0.80, NULL, 0, false},
    {"native-dcp", "native-8", "dcp", {"--to", "dcp", "--world-size", "6"}, 0.80, NULL, 0, false},
    {"torch-safetensors",
     "torch.pt",
     "one.safetensors",
     {"--to", "safetensors"},
     0.80,
     "torch-to-safetensors",
     1.5,
     false},
    {"columns-hf", "columns", "hf", {"--to", "hf"}, 0, "consolidate", 8, false},
    {"dcp-list", "dcp-many", "", {NULL}, 0, "unpickle", 10, false},
    {"dcp-many", "dcp-many", "native", {"--to", "fsdp"}, 0, "load-and-save", 15, true},
};

typedef struct convert_job {
    const bench_options *opts;
    const convert_case *kind;
    char dir[BENCH_PATH], tools[BENCH_PATH]; /* tools: where fsdp-convert lies */
    char from[BENCH_PATH], to[BENCH_PATH];
    int64_t peak_kib;
} convert_job;

/* --- programs --------------------------------------------------------------------------------- */

typedef struct command {
    const char *words[MOST_ARGUMENTS];
    int count;
} command;

static void add_word(command *line, const char *word)
{
    line->words[line->count++] = word; /* the last one stays NULL: cases are short */
}

static fsdp_status run_command(void *context, bench_child_result *result, fsdp_error *err)
{
    const command *line = context;
    char *argv[MOST_ARGUMENTS], none[2];
    memcpy(argv, line->words, sizeof argv);
    bench_clock began = bench_now();
    FSDP_TRY(bench_run_program(argv, none, sizeof none, err));
    bench_add_time(&result->times, &began);
    return FSDP_OK;
}

/* times NULL: it is no part of a contest. */
static fsdp_status run(convert_job *job, command *line, bench_times *times, int64_t *peak_kib,
                       fsdp_error *err)
{
    bench_child_result result;
    FSDP_TRY(cli_check_stop(err));
    if (times)
        FSDP_TRY(bench_settle(job->dir, err));
    FSDP_TRY(bench_in_child(run_command, line, &result, err));
    if (times) {
        times->cpu[times->count] = result.times.cpu[0];
        times->seconds[times->count++] = result.times.seconds[0];
    }
    if (peak_kib && result.peak_kib > *peak_kib)
        *peak_kib = result.peak_kib;
    return FSDP_OK;
}

/* fsdp-convert FROM TO with options that end with NULL. */
static fsdp_status convert(convert_job *job, const char *from, const char *to,
                           const char *const *options, bench_times *times, fsdp_error *err)
{
    char tool[BENCH_PATH], memory[32], threads[16];
    command line = {0};
    int64_t bytes = job->opts->common.memory;
    bench_path(tool, job->tools, "fsdp-convert");
    snprintf(memory, sizeof memory, "--mem=%" PRId64, bytes > 0 ? bytes : FSDP_MEMORY_DEFAULT);
    snprintf(threads, sizeof threads, "--jobs=%d",
             job->opts->common.jobs > 0 ? job->opts->common.jobs : bench_cores());
    add_word(&line, tool);
    add_word(&line, from);
    add_word(&line, to);
    while (*options)
        add_word(&line, *options++);
    add_word(&line, memory);
    add_word(&line, threads);
    add_word(&line, "--no-sync");
    add_word(&line, "--quiet");
    return run(job, &line, times, &job->peak_kib, err);
}

/* --- sources ---------------------------------------------------------------------------------- */

typedef struct native_source {
    const convert_job *job;
    const char *path;
    int world;
    int64_t bytes; /* 0: 40,000 tensors */
} native_source;

static fsdp_status save_native(void *context, bench_child_result *result, fsdp_error *err)
{
    const native_source *source = context;
    bench_model model;
    bench_state_opts state = {.world = source->world,
                              .weights_only = source->bytes > 0,
                              .no_groups = true,
                              .seed = source->job->opts->seed,
                              .step = BENCH_STEP};
    (void)result;
    FSDP_TRY(source->bytes > 0 ? bench_model_init_plain(&model, BENCH_TENSORS, source->bytes, err)
                               : bench_model_init(&model, "moe", 0.0002, err));
    fsdp_status st = bench_save_model(source->job->opts, &model, &state, source->path, err);
    bench_model_release(&model);
    return st;
}

static fsdp_status make_native(const convert_job *job, const char *path, int world, int64_t bytes,
                               fsdp_error *err)
{
    native_source source = {job, path, world, bytes};
    bench_child_result ignored;
    return access(path, F_OK) == 0 ? FSDP_OK : bench_in_child(save_native, &source, &ignored, err);
}

static fsdp_status ask_peer(convert_job *job, const char *task, const char *from, const char *to,
                            bench_times *times, fsdp_error *err)
{
    command line = {0};
    add_word(&line, job->opts->peer);
    add_word(&line, task);
    add_word(&line, from);
    add_word(&line, to);
    return run(job, &line, times, NULL, err);
}

/* Makes what the case converts, unless a case before it has. */
static fsdp_status make_source(convert_job *job, fsdp_error *err)
{
    static const char *const to_dcp[] = {"--to", "dcp", NULL};
    static const char *const to_torch[] = {"--to", "torch", NULL};
    static const char *const tensors_to_dcp[] = {"--to", "dcp", "--drop", "values", NULL};
    const char *name = job->kind->source;
    char native[BENCH_PATH];
    bool is_many = strcmp(name, "dcp-many") == 0;
    int world = strstr(name, "-8") ? FROM : SAVED_BY;
    bench_path(job->from, job->dir, name);
    bench_path(native, job->dir, is_many ? "native-many" : world == FROM ? "native-8" : "native-4");
    if (access(job->from, F_OK) == 0)
        return FSDP_OK;
    FSDP_TRY(make_native(job, native, world, is_many ? 0 : job->opts->size, err));
    if (is_many)
        return convert(job, native, job->from, tensors_to_dcp, NULL, err);
    if (strncmp(name, "dcp", 3) == 0)
        return convert(job, native, job->from, to_dcp, NULL, err);
    if (strcmp(name, "torch.pt") == 0)
        return convert(job, native, job->from, to_torch, NULL, err);
    if (strcmp(name, "columns") == 0)
        return ask_peer(job, "make-columns", native, job->from, NULL, err);
    return FSDP_OK;
}

/* --- comparisons ------------------------------------------------------------------------------ */

typedef struct convert_times {
    bench_times fast, verified, copy, peer;
} convert_times;

static fsdp_status run_ours(convert_job *job, bool verify, bench_times *times, fsdp_error *err)
{
    command line = {0};
    char tool[BENCH_PATH];
    if (job->kind->options[0]) {
        const char *options[OPTIONS + 1] = {NULL};
        size_t count = 0;
        for (; job->kind->options[count]; count++)
            options[count] = job->kind->options[count];
        options[count] = verify ? NULL : "--no-verify";
        FSDP_TRY(convert(job, job->from, job->to, options, times, err));
        return bench_remove(job->to, err);
    }
    bench_path(tool, job->tools, "fsdp-ls");
    add_word(&line, tool);
    add_word(&line, job->from);
    return run(job, &line, times, &job->peak_kib, err);
}

static fsdp_status run_copy(convert_job *job, bench_times *times, fsdp_error *err)
{
    command line = {.words = {"cp", "-r", "--reflink=never", job->from, job->to}, .count = 5};
    FSDP_TRY(run(job, &line, times, NULL, err));
    return bench_remove(job->to, err);
}

/* The peer prints the seconds and processor seconds of its work, without what it takes to start. */
static fsdp_status run_peer(convert_job *job, bench_times *times, fsdp_error *err)
{
    char output[80],
        *argv[] = {strdup(job->opts->peer), strdup(job->kind->task), job->from, job->to, NULL};
    double seconds = 0, cpu = 0;
    fsdp_status st = bench_settle(job->dir, err);
    if (st == FSDP_OK)
        st = bench_run_program(argv, output, sizeof output, err);
    if (st == FSDP_OK && sscanf(output, "%lf %lf", &seconds, &cpu) != 2)
        st = fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' printed '%s'", argv[0], output);
    free(argv[0]);
    free(argv[1]);
    if (st != FSDP_OK)
        return st;
    times->cpu[times->count] = cpu;
    times->seconds[times->count++] = seconds;
    return bench_remove(job->to, err);
}

static fsdp_status run_round(convert_job *job, convert_times *times, int round, fsdp_error *err)
{
    const convert_case *kind = job->kind;
    bool asks_peer = kind->task && job->opts->peer && (!kind->once || round == 0);
    if (kind->copy_goal > 0) {
        FSDP_TRY(run_ours(job, false, &times->fast, err));
        FSDP_TRY(run_copy(job, &times->copy, err));
    }
    FSDP_TRY(run_ours(job, true, &times->verified, err));
    return asks_peer ? run_peer(job, &times->peer, err) : FSDP_OK;
}

/* goal 0: none. */
static fsdp_status print_row(const convert_job *job, const char *suffix, const bench_times *ours,
                             const bench_times *against, const char *what, double goal)
{
    bench_row row = {.ours = ours, .plain = against, .peak_kib = job->peak_kib, .met = true};
    snprintf(row.work, sizeof row.work, "%s%s", job->kind->work, suffix);
    snprintf(row.against, sizeof row.against, "%s", what);
    if (goal > 0)
        bench_want_ratio(&row, goal);
    else
        snprintf(row.goal, sizeof row.goal, "none");
    return bench_print_row(job->opts, &row);
}

static fsdp_status print_rows(const convert_job *job, const convert_times *times)
{
    const convert_case *kind = job->kind;
    if (kind->copy_goal > 0) {
        FSDP_TRY(
            print_row(job, "", &times->fast, &times->copy, "cp --reflink=never", kind->copy_goal));
        FSDP_TRY(
            print_row(job, "-verified", &times->verified, &times->copy, "cp --reflink=never", 0));
    }
    if (!kind->task)
        return FSDP_OK;
    if (times->peer.count > 0)
        return print_row(job, "-peer", &times->verified, &times->peer, kind->task, kind->peer_goal);
    return print_row(job, "-peer", &times->verified, NULL, "no peer: --peer PROGRAM", 0);
}

static fsdp_status measure_case(convert_job *job, const convert_case *kind, fsdp_error *err)
{
    convert_times times = {0}, warm_up = {0};
    job->kind = kind;
    if (strcmp(kind->source, "columns") == 0 && !job->opts->peer)
        return FSDP_OK; /* only the peer can write it */
    FSDP_TRY(make_source(job, err));
    bench_path(job->to, job->dir, "to-");
    strncat(job->to, kind->result, sizeof job->to - strlen(job->to) - 1);
    job->peak_kib = 0;
    FSDP_TRY(run_round(job, &warm_up, -1, err));
    for (int round = 0; round < job->opts->rounds; round++)
        FSDP_TRY(run_round(job, &times, round, err));
    return print_rows(job, &times);
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Conversions of eight times the size, each of a result before it. */
typedef struct peak_case {
    const char *work, *from, *to;
    const char *options[OPTIONS + 2];
} peak_case;

static const peak_case peak_cases[] = {
    {"peak-dcp-columns", "native-peak", "dcp-columns", {"--to", "dcp", "--shard-dim", "1"}},
    {"peak-columns-hf", "dcp-columns", "to-hf", {"--to", "hf"}},
    {"peak-columns-native",
     "dcp-columns",
     "native-rows",
     {"--to", "fsdp", "--shard-dim", "0", "--world-size", "6"}},
    {"peak-native-columns", "native-peak", "native-columns", {"--shard-dim", "1"}},
    {"peak-compress", "native-peak", "compressed", {"--shard-dim", "1", "--compress", "zstd"}},
    {"peak-decompress", "compressed", "plain-again", {"--shard-dim", "0"}},
};

static fsdp_status measure_peak(convert_job *job, const peak_case *what, fsdp_error *err)
{
    int64_t memory = job->opts->common.memory > 0 ? job->opts->common.memory : FSDP_MEMORY_DEFAULT;
    int64_t limit_kib = (memory >> 10) + (32 << 10);
    bench_times times = {0};
    job->peak_kib = 0;
    bench_path(job->from, job->dir, what->from);
    bench_path(job->to, job->dir, what->to);
    FSDP_TRY(convert(job, job->from, job->to, what->options, &times, err));
    bench_row row = {.ours = &times, .peak_kib = job->peak_kib};
    row.met = row.peak_kib <= limit_kib;
    snprintf(row.work, sizeof row.work, "%s", what->work);
    snprintf(row.goal, sizeof row.goal, "peak <= %" PRId64 " KiB", limit_kib);
    snprintf(row.against, sizeof row.against, "peak %" PRId64 " KiB, of %d x --size", row.peak_kib,
             PEAK_FACTOR);
    return bench_print_row(job->opts, &row);
}

static fsdp_status measure_peaks(convert_job *job, fsdp_error *err)
{
    static const convert_case kind = {.work = "peak"};
    size_t count = sizeof peak_cases / sizeof *peak_cases;
    job->kind = &kind;
    bench_path(job->from, job->dir, peak_cases[0].from);
    FSDP_TRY(make_native(job, job->from, SAVED_BY, job->opts->size * PEAK_FACTOR, err));
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(measure_peak(job, &peak_cases[i], err));
    for (size_t i = 0; i < count; i++) {
        bench_path(job->to, job->dir, peak_cases[i].to);
        FSDP_TRY(bench_remove(job->to, err));
    }
    bench_path(job->from, job->dir, peak_cases[0].from);
    return bench_remove(job->from, err);
}

/* fsdp-convert and fsdp-ls lie beside this program. */
static fsdp_status find_tools(convert_job *job, fsdp_error *err)
{
    ssize_t size = readlink("/proc/self/exe", job->tools, sizeof job->tools - 1);
    job->tools[size > 0 ? size : 0] = '\0';
    char *slash = strrchr(job->tools, '/');
    if (!slash)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "cannot tell where this program lies");
    *slash = '\0';
    return FSDP_OK;
}

fsdp_status bench_convert_rows(const bench_options *opts, const char *dir, fsdp_error *err)
{
    convert_job job = {.opts = opts};
    snprintf(job.dir, sizeof job.dir, "%s", dir);
    FSDP_TRY(find_tools(&job, err));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        FSDP_TRY(measure_case(&job, &cases[i], err));
    return measure_peaks(&job, err);
}

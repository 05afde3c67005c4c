/*
 * Rows of bench convert: fsdp-convert and fsdp-ls as programs, against `cp` of what they read
 * or write, and next to the program that people use for it today, when --peer names one (tests/peers/
 * convert_peer does). Nothing is synced on either side. A case has up to three rows:
 *
 *   NAME            ours without verification, against its ceiling
 *   NAME-verified   ours as it comes, against its ceiling
 *   NAME-peer       ours as it comes, next to the peer
 */
#include "tests/bench/checkpoint/bench_convert.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { PEAK_FACTOR = 8, OPTIONS = 7 };

/* The work next to which a case's first rows stand. */
typedef enum convert_ceiling {
    CP_OF_SOURCE,
    CP_OF_RESULT,
    THE_PEER /* a program that does not verify either */
} convert_ceiling;

/* One case: source, target, options. The first case that needs a source makes it. */
typedef struct convert_case {
    const char *work, *source, *result;
    const char *options[OPTIONS];   /* of fsdp-convert, ended by NULL; the first NULL: fsdp-ls */
    const char *option, *of_source; /* one more option, which another source is for; or NULL */
    convert_ceiling ceiling;
    double goal;      /* against the ceiling; 0: no row against it */
    const char *task; /* of the peer; NULL: no row next to it */
    double peer_goal;
    bool once;        /* the peer needs minutes */
    bool bounds_peak; /* the goal is also the memory of --mem, and what a program needs without */
} convert_case;

static const convert_case cases[] = {
    {.work = "dcp-hf", .source = "dcp-4", .result = "hf", .options = {"--to", "hf"}, .goal = 0.80},
    {.work = "dcp-torch",
     .source = "dcp-4",
     .result = "one.pt",
     .options = {"--to", "torch"},
     .goal = 0.80,
     .task = "dcp-to-torch-save",
     .peer_goal = 5},
    {.work = "dcp-native",
     .source = "dcp-8",
     .result = "native",
     .options = {"--to", "fsdp", "--world-size", "6"},
     .goal = 0.80},
    {.work = "native-dcp",
     .source = "native-8",
     .result = "dcp",
     .options = {"--to", "dcp", "--world-size", "6"},
     .goal = 0.80},
    {.work = "torch-safetensors",
     .source = "torch.pt",
     .result = "one.safetensors",
     .options = {"--to", "safetensors"},
     .goal = 0.80,
     .task = "torch-to-safetensors",
     .peer_goal = 1.5},
    {.work = "columns-hf",
     .source = "columns",
     .result = "hf",
     .options = {"--to", "hf"},
     .task = "consolidate",
     .peer_goal = 8},
    {.work = "dcp-list", .source = "dcp-many", .result = "", .task = "unpickle", .peer_goal = 10},
    {.work = "dcp-many",
     .source = "dcp-many",
     .result = "native",
     .options = {"--to", "fsdp"},
     .task = "load-and-save",
     .peer_goal = 15,
     .once = true},
    {.work = "zero-hf",
     .source = "zero",
     .result = "hf",
     .options = {"--to", "hf"},
     .ceiling = THE_PEER,
     .goal = 10,
     .task = "zero_to_fp32",
     .bounds_peak = true},
    {.work = "megatron-hf",
     .source = "megatron",
     .result = "hf",
     .options = {"--to", "hf"},
     .option = "--copy-from",
     .of_source = "config",
     .goal = 0.60},
    {.work = "lora-merge",
     .source = "llama",
     .result = "hf",
     .options = {"--to", "hf"},
     .option = "--adapter",
     .of_source = "adapter",
     .ceiling = CP_OF_RESULT,
     .goal = 0.50},
    {.work = "dequant",
     .source = "fp8",
     .result = "hf",
     .options = {"--to", "hf", "--dequant", "bf16"},
     .ceiling = CP_OF_RESULT,
     .goal = 0.50},
    {.work = "gguf-q8",
     .source = "llama",
     .result = "model.gguf",
     .options = {"--to", "gguf", "--dtype", "q8_0"},
     .goal = 0.50},
};

/* A case that is measured, and its paths. */
typedef struct case_run {
    convert_job *job;
    const convert_case *kind;
    char from[BENCH_PATH], to[BENCH_PATH];
    char kept[BENCH_PATH];  /* CP_OF_RESULT: a result that cp copies */
    char other[BENCH_PATH]; /* the source that the last option names */
} case_run;

/* --- comparisons ------------------------------------------------------------------------------ */

typedef struct convert_times {
    bench_times fast, verified, ceiling, peer;
} convert_times;

static fsdp_status convert_to(case_run *run, const char *to, bool verify, bench_times *times,
                              fsdp_error *err)
{
    const convert_case *kind = run->kind;
    const convert_call call = {.from = run->from,
                               .to = to,
                               .options = kind->options,
                               .last = kind->option,
                               .path = kind->option ? run->other : NULL,
                               .skip_verify = !verify};
    return bench_convert_run(run->job, &call, times, err);
}

static fsdp_status run_ours(case_run *run, bool verify, bench_times *times, fsdp_error *err)
{
    if (!run->kind->options[0])
        return bench_convert_list(run->job, run->from, times, err);
    FSDP_TRY(convert_to(run, run->to, verify, times, err));
    return bench_remove(run->to, err);
}

static fsdp_status run_peer(case_run *run, bench_times *times, fsdp_error *err)
{
    const char *const words[3] = {run->kind->task, run->from, run->to};
    FSDP_TRY(bench_convert_ask_peer(run->job, words, times, err));
    return bench_remove(run->to, err);
}

static fsdp_status run_ceiling(case_run *run, bench_times *times, fsdp_error *err)
{
    if (run->kind->ceiling == THE_PEER)
        return run_peer(run, times, err);
    const char *from = run->kind->ceiling == CP_OF_RESULT ? run->kept : run->from;
    FSDP_TRY(bench_convert_copy(run->job, from, run->to, times, err));
    return bench_remove(run->to, err);
}

static fsdp_status run_round(case_run *run, convert_times *times, int round, fsdp_error *err)
{
    const convert_case *kind = run->kind;
    bool asks_peer = kind->peer_goal > 0 && run->job->opts->peer && (!kind->once || round == 0);
    if (kind->goal > 0) {
        FSDP_TRY(run_ours(run, false, &times->fast, err));
        FSDP_TRY(run_ceiling(run, &times->ceiling, err));
    }
    FSDP_TRY(run_ours(run, true, &times->verified, err));
    return asks_peer ? run_peer(run, &times->peer, err) : FSDP_OK;
}

/* --- rows ------------------------------------------------------------------------------------- */

/* The memory of --mem, and what a program needs besides. */
static int64_t limit_kib_of(const convert_job *job)
{
    int64_t memory = job->opts->common.memory > 0 ? job->opts->common.memory : FSDP_MEMORY_DEFAULT;
    return (memory >> 10) + (32 << 10);
}

static void want_peak(const convert_job *job, bench_row *row)
{
    int64_t limit_kib = limit_kib_of(job);
    size_t size = strlen(row->goal);
    snprintf(row->goal + size, sizeof row->goal - size, "%speak <= %" PRId64 " KiB",
             size > 0 ? ", " : "", limit_kib);
    row->met = row->met && row->peak_kib <= limit_kib;
}

/* goal 0: none. */
static fsdp_status print_row(const case_run *run, const char *suffix, const bench_times *ours,
                             const bench_times *against, const char *what, double goal)
{
    bench_row row = {.ours = ours, .plain = against, .peak_kib = run->job->peak_kib, .met = true};
    snprintf(row.work, sizeof row.work, "%s%s", run->kind->work, suffix);
    snprintf(row.against, sizeof row.against, "%s", what);
    if (goal > 0)
        bench_want_ratio(&row, goal);
    else
        snprintf(row.goal, sizeof row.goal, "none");
    if (goal > 0 && run->kind->bounds_peak)
        want_peak(run->job, &row);
    return bench_print_row(run->job->opts, &row);
}

static fsdp_status print_without_peer(const case_run *run, const char *suffix,
                                      const bench_times *ours)
{
    return print_row(run, suffix, ours, NULL, "no peer: --peer PROGRAM", 0);
}

static fsdp_status print_rows(const case_run *run, const convert_times *times)
{
    static const char *const ceilings[] = {"cp --reflink=never",
                                           "cp --reflink=never of the result"};
    const convert_case *kind = run->kind;
    if (kind->goal > 0) {
        const char *what = kind->ceiling == THE_PEER ? kind->task : ceilings[kind->ceiling];
        FSDP_TRY(print_row(run, "", &times->fast, &times->ceiling, what, kind->goal));
        FSDP_TRY(print_row(run, "-verified", &times->verified, &times->ceiling, what, 0));
    }
    if (kind->peer_goal == 0)
        return FSDP_OK;
    if (times->peer.count > 0)
        return print_row(run, "-peer", &times->verified, &times->peer, kind->task, kind->peer_goal);
    return print_without_peer(run, "-peer", &times->verified);
}

/* --- cases ------------------------------------------------------------------------------------ */

static fsdp_status prepare(case_run *run, fsdp_error *err)
{
    convert_job *job = run->job;
    const convert_case *kind = run->kind;
    FSDP_TRY(bench_convert_make_source(job, kind->source, err));
    if (kind->option)
        FSDP_TRY(bench_convert_make_source(job, kind->of_source, err));
    bench_path(run->from, job->dir, kind->source);
    bench_path(run->other, job->dir, kind->option ? kind->of_source : "");
    bench_path(run->kept, job->dir, "kept-");
    bench_path(run->to, job->dir, "to-");
    strncat(run->kept, kind->result, sizeof run->kept - strlen(run->kept) - 1);
    strncat(run->to, kind->result, sizeof run->to - strlen(run->to) - 1);
    if (kind->ceiling == CP_OF_RESULT)
        FSDP_TRY(convert_to(run, run->kept, true, NULL, err));
    job->peak_kib = 0;
    return FSDP_OK;
}

static fsdp_status measure_case(convert_job *job, const convert_case *kind, fsdp_error *err)
{
    convert_times times = {0}, warm_up = {0};
    case_run run = {.job = job, .kind = kind};
    if (bench_convert_needs_peer(kind->source) && !job->opts->peer)
        return print_without_peer(&run, kind->goal > 0 ? "" : "-peer", &times.fast);
    FSDP_TRY(prepare(&run, err));
    FSDP_TRY(run_round(&run, &warm_up, -1, err));
    for (int round = 0; round < job->opts->rounds; round++)
        FSDP_TRY(run_round(&run, &times, round, err));
    FSDP_TRY(bench_remove(run.kept, err));
    return print_rows(&run, &times);
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Conversions of eight times the size, each of a result before it. */
typedef struct peak_case {
    const char *work, *from, *to;
    const char *options[OPTIONS];
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
    char from[BENCH_PATH], to[BENCH_PATH];
    bench_times times = {0};
    job->peak_kib = 0;
    bench_path(from, job->dir, what->from);
    bench_path(to, job->dir, what->to);
    const convert_call call = {.from = from, .to = to, .options = what->options};
    FSDP_TRY(bench_convert_run(job, &call, &times, err));
    bench_row row = {.ours = &times, .peak_kib = job->peak_kib, .met = true};
    snprintf(row.work, sizeof row.work, "%s", what->work);
    want_peak(job, &row);
    snprintf(row.against, sizeof row.against, "peak %" PRId64 " KiB, of %d x --size", row.peak_kib,
             PEAK_FACTOR);
    return bench_print_row(job->opts, &row);
}

static fsdp_status measure_peaks(convert_job *job, fsdp_error *err)
{
    enum { SAVED_BY = 4 };
    size_t count = sizeof peak_cases / sizeof *peak_cases;
    char path[BENCH_PATH];
    bench_path(path, job->dir, peak_cases[0].from);
    FSDP_TRY(bench_convert_make_plain(job, path, SAVED_BY, job->opts->size * PEAK_FACTOR, err));
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(measure_peak(job, &peak_cases[i], err));
    FSDP_TRY(bench_remove(path, err));
    for (size_t i = 0; i < count; i++) {
        bench_path(path, job->dir, peak_cases[i].to);
        FSDP_TRY(bench_remove(path, err));
    }
    return FSDP_OK;
}

/* --- the command ------------------------------------------------------------------------------- */

static const char peaks[] = "peak";

/* True when the list, with commas, has the name; NULL has every one. */
static bool lists(const char *list, const char *name)
{
    size_t size = strlen(name);
    for (const char *word = list; word; word = strchr(word, ',')) {
        word += *word == ',';
        if (strcspn(word, ",") == size && memcmp(word, name, size) == 0)
            return true;
    }
    return !list;
}

static bool is_case(const char *name, size_t size)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strlen(cases[i].work) == size && memcmp(cases[i].work, name, size) == 0)
            return true;
    return size == sizeof peaks - 1 && memcmp(name, peaks, size) == 0;
}

void bench_check_convert(const row_options *opts)
{
    for (const char *word = opts->cases; word; word = strchr(word, ',')) {
        word += *word == ',';
        int size = (int)strcspn(word, ",");
        if (!is_case(word, (size_t)size))
            cli_usage_error("--cases: there is no case '%.*s'", size, word);
    }
}

fsdp_status bench_convert_rows(const row_options *opts, const char *dir, fsdp_error *err)
{
    convert_job job = {.opts = opts};
    snprintf(job.dir, sizeof job.dir, "%s", dir);
    bench_find_peer("../bin", job.tools);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (lists(opts->cases, cases[i].work))
            FSDP_TRY(measure_case(&job, &cases[i], err));
    return lists(opts->cases, peaks) ? measure_peaks(&job, err) : FSDP_OK;
}

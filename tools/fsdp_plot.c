/* fsdp-plot: what trainings wrote into metrics.jsonl, as a picture (SVG). */
#include "tools/cli/cli.h"
#include "tools/plot/plot.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { RUNS_MOST = 64 };

typedef struct plot_options {
    cli_common common;
    const char *output;
    bool overwrite;
    const char *paths[RUNS_MOST];
    size_t count;
} plot_options;

/* --- options ------------------------------------------------------------------------------------- */

enum { KEY_OUTPUT = 'o', KEY_OVERWRITE = 0x2000 };

static const struct argp_option options[] = {
    {"output", KEY_OUTPUT, "FILE", 0, "the picture; an older one of this tool is replaced", 0},
    {"overwrite", KEY_OVERWRITE, NULL, CLI_NEVER_GUESSED, "replace FILE whatever it is", 0},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    plot_options *opts = state->input;
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &opts->common; return 0;
    case KEY_OUTPUT: opts->output = arg; return 0;
    case KEY_OVERWRITE: opts->overwrite = true; return 0;
    case ARGP_KEY_ARG:
        if (opts->count == RUNS_MOST)
            cli_usage_error("at most %d runs fit into a picture", RUNS_MOST);
        opts->paths[opts->count++] = arg;
        return 0;
    case ARGP_KEY_END:
        if (opts->count == 0)
            cli_usage_error("RUN is missing");
        if (!opts->output || !*opts->output)
            cli_usage_error("-o FILE is missing");
        if (opts->common.json && cli_is_stdout(opts->output))
            cli_usage_error("-o %s and --json cannot be combined: both write to standard output",
                            opts->output);
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {{&cli_general_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {.options = options, .parser = parse, .children = children};

static const cli_tool tool = {
    .name = "fsdp-plot",
    .args = "RUN... -o FILE",
    .summary =
        "Draws loss, learning rate, norm of gradients and speed of trainings as one picture.",
    .examples = "  fsdp-plot runs/a -o a.svg                     also while the training runs\n"
                "  fsdp-plot runs/a runs/b -o both.svg           compare\n",
    .runs_alone = true,
    .argp = &argp};

/* The picture may replace an older one, but not the numbers that it is drawn from. */
static fsdp_status refuse_input(const plot_options *opts, fsdp_error *err)
{
    char path[PATH_MAX];
    struct stat output, info;
    if (stat(opts->output, &output) != 0)
        return FSDP_OK;
    for (size_t i = 0; i < opts->count; i++) {
        if (stat(opts->paths[i], &info) != 0)
            continue;
        snprintf(path, sizeof path, "%s%s", opts->paths[i],
                 S_ISDIR(info.st_mode) ? "/metrics.jsonl" : "");
        if (stat(path, &info) == 0 && info.st_dev == output.st_dev && info.st_ino == output.st_ino)
            return fsdp_fail(err, FSDP_ERR_USAGE, "cannot write '%s': it holds the numbers to draw",
                             opts->output);
    }
    return FSDP_OK;
}

/* --- report -------------------------------------------------------------------------------------- */

static void add_last(fsdp_text *text, const char *name, const plot_series *series)
{
    fsdp_text_addf(text, ", \"%s\": ", name);
    if (series->count > 0)
        fsdp_text_add_f64(text, series->last.value);
    else
        fsdp_text_addf(text, "null");
}

static void add_run_json(fsdp_text *text, const plot_run *run)
{
    const plot_series *series = run->series, *loss = &series[PLOT_LOSS];
    fsdp_text_addf(text, "{\"run\": ");
    fsdp_text_add_json_shown(text, run->path, strlen(run->path));
    fsdp_text_addf(text,
                   ", \"lines\": %" PRId64 ", \"steps\": %" PRId64 ", \"last_step\": ", run->lines,
                   loss->count);
    fsdp_text_addf(text, loss->count > 0 ? "%" PRId64 : "null", loss->last.step);
    add_last(text, "loss", loss);
    add_last(text, "held_out_loss", &series[PLOT_EVAL]);
    fsdp_text_addf(text, ", \"saves\": %" PRId64 ", \"restarts\": %" PRId64 ", \"is_cut\": %s}",
                   series[PLOT_SAVE].count, series[PLOT_RESTART].count,
                   run->is_cut ? "true" : "false");
}

static fsdp_status print(const plot_options *opts, plot_run *const *runs)
{
    fsdp_text text = {0};
    char number[CLI_NUMBER];
    if (opts->common.json) {
        fsdp_text_addf(&text, "{\"schema\": 1, \"output\": ");
        fsdp_text_add_json_shown(&text, opts->output, strlen(opts->output));
        fsdp_text_addf(&text, ", \"runs\": [");
    }
    for (size_t i = 0; i < opts->count; i++) {
        const plot_series *series = runs[i]->series;
        if (opts->common.json) {
            fsdp_text_addf(&text, i > 0 ? ",\n " : "\n ");
            add_run_json(&text, runs[i]);
            continue;
        }
        cli_add_message(&text, runs[i]->path);
        fsdp_text_addf(&text, ": %s, ", cli_plural(series[PLOT_LOSS].count, "step", number));
        fsdp_text_addf(&text, "%s, ", cli_plural(series[PLOT_SAVE].count, "save", number));
        fsdp_text_addf(&text, "%s\n", cli_plural(series[PLOT_RESTART].count, "restart", number));
    }
    if (opts->common.json)
        fsdp_text_addf(&text, "]}\n");
    if (!opts->common.json && (opts->common.quiet || cli_is_stdout(opts->output)))
        text.size = 0;
    return cli_put_all(&text);
}

/* --- the work ------------------------------------------------------------------------------------ */

/* The last part of a path; all of it where another run has that part, too. */
static const char *short_name(const plot_options *opts, size_t which)
{
    const char *path = opts->paths[which], *slash = strrchr(path, '/');
    if (!slash || !slash[1])
        return path;
    for (size_t i = 0; i < opts->count; i++) {
        const char *other = strrchr(opts->paths[i], '/');
        if (i != which && strcmp(other ? other + 1 : opts->paths[i], slash + 1) == 0)
            return path;
    }
    return slash + 1;
}

static fsdp_status read_runs(const plot_options *opts, plot_run **runs, fsdp_error *err)
{
    int64_t steps = 0;
    for (size_t i = 0; i < opts->count; i++) {
        runs[i] = calloc(1, sizeof *runs[i]);
        if (!runs[i])
            return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for the runs");
        runs[i]->path = opts->paths[i];
        runs[i]->name = short_name(opts, i);
        FSDP_TRY(plot_run_read(runs[i], err));
        FSDP_TRY(cli_check_stop(err));
        if (runs[i]->is_cut && !opts->common.quiet)
            cli_say("note", "'%s': the last line is incomplete and is left out", opts->paths[i]);
        steps += runs[i]->series[PLOT_LOSS].count;
    }
    if (steps == 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' has no step%s", opts->paths[0],
                         opts->count > 1 ? ", nor have the others" : " yet");
    return FSDP_OK;
}

static fsdp_status plot(const plot_options *opts, plot_run **runs, fsdp_error *err)
{
    fsdp_text text = {0};
    FSDP_TRY(refuse_input(opts, err));
    FSDP_TRY(cli_check_output(opts->output, &cli_picture, &opts->overwrite, err));
    FSDP_TRY(read_runs(opts, runs, err));
    plot_draw(runs, opts->count, &text);
    fsdp_status st = cli_write_picture(opts->output, &text, err);
    fsdp_text_release(&text);
    return st == FSDP_OK ? print(opts, runs) : st;
}

int main(int argc, char **argv)
{
    plot_options opts = {0};
    plot_run *runs[RUNS_MOST] = {0};
    fsdp_error err = {0};
    cli_begin(&tool, argc, argv, &opts);
    fsdp_status st = plot(&opts, runs, &err);
    for (size_t i = 0; i < opts.count; i++)
        free(runs[i]);
    return cli_end(st, &err);
}

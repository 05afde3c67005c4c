/* fsdp-gc: which checkpoints of a run stay, and finishing what a killed save or delete left after. */
#include "tools/cli/cli.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_KEPT = 2, KEPT_DEFAULT = 3 };

typedef struct gc_options {
    cli_common common;
    fsdp_retention policy;
    int64_t *pins;
    bool *pin_met; /* per pin: the run has that step */
    bool yes;
    const char *run;
} gc_options;

typedef struct gc_report {
    const gc_options *options;
    fsdp_text text;
    int64_t kept, removed;
} gc_report;

/* --- options ---------------------------------------------------------------------------------- */

enum { KEY_YES = 0x2000, KEY_LAST, KEY_EVERY, KEY_PIN };

static const struct argp_option options[] = {
    {"yes", KEY_YES, NULL, CLI_NEVER_GUESSED, "delete; without it nothing is touched", 0},
    {"keep-last", KEY_LAST, "N", 0, "keep the newest N that verify (default 3, at least 2)", 0},
    {"keep-every", KEY_EVERY, "N", 0, "keep every step that N divides", 0},
    {"pin", KEY_PIN, "STEP", 0, "keep this step, too; may be repeated", 0},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    gc_options *opts = state->input;
    fsdp_retention *policy = &opts->policy;
    switch (key) {
    case ARGP_KEY_INIT:
        opts->pins = calloc((size_t)state->argc + 1, sizeof *opts->pins);
        policy->pins = opts->pins;
        opts->pin_met = calloc((size_t)state->argc + 1, sizeof *opts->pin_met);
        state->child_inputs[0] = state->child_inputs[1] = &opts->common;
        return opts->pins && opts->pin_met ? 0 : ENOMEM;
    case KEY_YES: opts->yes = true; return 0;
    case KEY_LAST:
        policy->keep_last = (int)cli_parse_integer("--keep-last", arg, LEAST_KEPT, INT32_MAX);
        return 0;
    case KEY_EVERY:
        policy->keep_every = cli_parse_integer("--keep-every", arg, 1, INT64_MAX);
        return 0;
    case KEY_PIN:
        opts->pins[policy->pin_count++] = cli_parse_integer("--pin", arg, 0, INT64_MAX);
        return 0;
    case ARGP_KEY_ARG:
        if (opts->run)
            cli_usage_error("one RUN is expected, '%s' is too many", arg);
        opts->run = arg;
        return 0;
    case ARGP_KEY_END:
        if (!opts->run)
            cli_usage_error("RUN is missing");
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {
    {&cli_buffers_argp, 0, NULL, 0}, {&cli_general_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {.options = options, .parser = parse, .children = children};

static const cli_tool tool = {
    .name = "fsdp-gc",
    .args = "RUN",
    .summary = "Deletes old checkpoints of a run directory and leftovers of interrupted saves.",
    .examples = "  fsdp-gc runs/gpt2                             list what it would delete; delete "
                "nothing\n"
                "  fsdp-gc runs/gpt2 --keep-last 5 --yes         delete all but the newest five\n"
                "  fsdp-gc runs/gpt2 --keep-every 5000 --pin 300 rules add up: any may keep\n",
    .runs_alone = true,
    .argp = &argp};

/* --- report ----------------------------------------------------------------------------------- */

static void add_action_json(gc_report *report, const fsdp_retain_action *action)
{
    fsdp_text *text = &report->text;
    fsdp_text_addf(text, "%s\n {\"name\": ", report->kept + report->removed > 0 ? "," : "");
    fsdp_text_add_json_shown(text, action->name, strlen(action->name));
    fsdp_text_addf(text, ", \"remove\": %s, \"reason\": ", action->remove ? "true" : "false");
    fsdp_text_add_json_shown(text, action->reason, strlen(action->reason));
    fsdp_text_addf(text, "}");
}

static void add_action(gc_report *report, const fsdp_retain_action *action)
{
    fsdp_text *text = &report->text;
    fsdp_text_addf(text, "%-7s %s  (", action->remove ? "remove" : "keep", action->name);
    cli_add_message(text, action->reason);
    fsdp_text_addf(text, ")\n");
}

static void note_pins(const gc_report *report, const char *name)
{
    const fsdp_retention *policy = &report->options->policy;
    char pinned[CLI_NUMBER];
    for (size_t i = 0; i < policy->pin_count; i++) {
        snprintf(pinned, sizeof pinned, "step-%08" PRId64, policy->pins[i]);
        report->options->pin_met[i] = report->options->pin_met[i] || strcmp(pinned, name) == 0;
    }
}

/* Warns about a pin without a step: its number is probably mistyped, and the step meant would be removed. */
static void warn_about_pins(const gc_report *report)
{
    const fsdp_retention *policy = &report->options->policy;
    for (size_t i = 0; i < policy->pin_count; i++) {
        if (!report->options->pin_met[i])
            cli_say("warn", "--pin %" PRId64 ": the run has no such step", policy->pins[i]);
    }
}

static void on_action(void *context, const fsdp_retain_action *action)
{
    gc_report *report = context;
    note_pins(report, action->name);
    if (report->options->common.json)
        add_action_json(report, action);
    else if (!report->options->common.quiet)
        add_action(report, action);
    (void)cli_put(&report->text); /* a closed output must not stop a delete half-way */
    if (action->remove)
        report->removed++;
    else
        report->kept++;
}

static void add_end_json(gc_report *report, fsdp_status status, const fsdp_error *err)
{
    fsdp_text *text = &report->text;
    fsdp_text_addf(text, "],\n \"kept\": %" PRId64 ", \"removed\": %" PRId64, report->kept,
                   report->removed);
    if (status != FSDP_OK) {
        fsdp_text_addf(text, ", ");
        cli_add_json_error(text, status, err);
    }
    fsdp_text_addf(text, "}\n");
}

static fsdp_status print_end(gc_report *report, fsdp_status status, const fsdp_error *err)
{
    const gc_options *opts = report->options;
    fsdp_text *text = &report->text;
    if (opts->common.json)
        add_end_json(report, status, err);
    else if (!opts->common.quiet && opts->yes)
        fsdp_text_addf(text, "removed %" PRId64 ", kept %" PRId64 "\n", report->removed,
                       report->kept);
    else if (!opts->common.quiet)
        fsdp_text_addf(text, "%" PRId64 " would go, %" PRId64 " stay; nothing was touched%s\n",
                       report->removed, report->kept, report->removed ? " (--yes deletes)" : "");
    return cli_put_end(text); /* also after a signal: what is gone is said to be gone */
}

static fsdp_status collect(const gc_options *opts, fsdp_error *err)
{
    gc_report report = {.options = opts};
    fsdp_retain_opts retain = {.apply = opts->yes,
                               .report = on_action,
                               .report_context = &report,
                               .threads = opts->common.jobs,
                               .memory = opts->common.memory,
                               .watch = cli_watch(&opts->common)};
    FSDP_TRY(cli_check_not_checkpoint(opts->run, err));
    if (opts->common.json) {
        fsdp_text_addf(&report.text, "{\"schema\": 1, \"run\": ");
        fsdp_text_add_json_shown(&report.text, opts->run, strlen(opts->run));
        fsdp_text_addf(&report.text, ", \"dry_run\": %s, \"actions\": [",
                       opts->yes ? "false" : "true");
    }
    fsdp_status st = fsdp_run_retain(opts->run, &opts->policy, &retain, err);
    if (report.kept + report.removed == 0) {
        fsdp_text_release(&report.text);
        return st != FSDP_OK
                   ? st
                   : fsdp_fail(err, FSDP_ERR_NOT_FOUND, "run '%s' holds no checkpoint", opts->run);
    }
    fsdp_status put = print_end(&report, st, err);
    if (st == FSDP_OK && !opts->common.quiet)
        warn_about_pins(&report);
    return st != FSDP_OK ? st : put;
}

int main(int argc, char **argv)
{
    gc_options opts = {.policy.keep_last = KEPT_DEFAULT};
    fsdp_error err = {0};
    cli_begin(&tool, argc, argv, &opts);
    fsdp_status st = collect(&opts, &err);
    free(opts.pins);
    free(opts.pin_met);
    return cli_end(st, &err);
}

/*
 * fsdp-verify: are checkpoints whole and undamaged? In a run directory it verifies every step; --latest
 * finds the newest good one.
 */
#include "tools/cli/cli.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct verify_options {
    cli_common common;
    fsdp_verify_level level;
    bool quick, deep, repair, latest, write_digests;
    const char *like, *variant;
    const char **paths;
    int path_count;
} verify_options;

/* Kinds of findings, and the lines of one kind that people get of a checkpoint. */
enum { KINDS = FSDP_FINDING_UNCHANGED + 1, LINES_MOST = 20 };

/* Holds the output so far, and the worst outcome. */
typedef struct verify_report {
    const verify_options *options;
    fsdp_text text;
    bool has_paths, has_findings; /* something stands before in the JSON lists */
    int64_t verified;             /* checkpoints of the run at hand */
    int64_t told[KINDS];          /* findings of the checkpoint at hand */
    fsdp_like_summary like;
    char *path; /* the checkpoint that was verified; NULL: the given one */
    fsdp_status worst;
} verify_report;

/* --- options ---------------------------------------------------------------------------------- */

enum {
    KEY_QUICK = 0x2000,
    KEY_DEEP,
    KEY_REPAIR,
    KEY_LATEST,
    KEY_WRITE_DIGESTS,
    KEY_LIKE,
    KEY_VARIANT
};

static const struct argp_option options[] = {
    {"quick", KEY_QUICK, NULL, 0, "check manifest, file sizes and shard indexes only", 0},
    {"deep", KEY_DEEP, NULL, 0, "also check the view, NaN and Inf, optimizer against model", 0},
    {"repair", KEY_REPAIR, NULL, 0, "rewrite a lost or wrong index.h5, if data is good", 0},
    {"like", KEY_LIKE, "MODEL", 0,
     "also check that every tensor of MODEL (a checkpoint, or its config.json) is there, with its "
     "shape and values that training leaves",
     0},
    {"write-digests", KEY_WRITE_DIGESTS, NULL, 0,
     "write PATH.xxh3 next to a good checkpoint, for later calls to compare", 0},
    {"variant", KEY_VARIANT, "NAME", 0, "read the files model.NAME.safetensors of PATH", 0},
    {"latest", KEY_LATEST, NULL, 0, "print the newest good checkpoint of the run PATH", 0},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    verify_options *opts = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        opts->paths = calloc((size_t)state->argc + 1, sizeof *opts->paths);
        for (int i = 0; i < 2; i++)
            state->child_inputs[i] = &opts->common;
        return opts->paths ? 0 : ENOMEM;
    case KEY_QUICK: opts->quick = true; return 0;
    case KEY_DEEP: opts->deep = true; return 0;
    case KEY_REPAIR: opts->repair = true; return 0;
    case KEY_LATEST: opts->latest = true; return 0;
    case KEY_LIKE: opts->like = arg; return 0;
    case KEY_VARIANT: opts->variant = arg; return 0;
    case KEY_WRITE_DIGESTS: opts->write_digests = true; return 0;
    case ARGP_KEY_ARG: opts->paths[opts->path_count++] = arg; return 0;
    case ARGP_KEY_END:
        if (opts->path_count == 0)
            cli_usage_error("PATH is missing");
        if (opts->quick && opts->deep)
            cli_usage_error("--quick and --deep cannot be combined");
        if (opts->repair && (opts->quick || opts->latest))
            cli_usage_error("--repair reads all data of PATH and cannot be combined with --%s",
                            opts->quick ? "quick" : "latest");
        if (opts->write_digests && (opts->quick || opts->latest))
            cli_usage_error(
                "--write-digests reads all data of PATH and cannot be combined with --%s",
                opts->quick ? "quick" : "latest");
        if (opts->latest && opts->like)
            cli_usage_error(
                "--latest prints a path, but --like verifies; call them one after the other");
        if (opts->like && opts->variant)
            cli_usage_error(
                "--like compares the plain files and cannot be combined with --variant");
        if (opts->latest && opts->path_count > 1)
            cli_usage_error("--latest takes one run, '%s' is too many", opts->paths[1]);
        opts->level = opts->quick  ? FSDP_VERIFY_QUICK
                      : opts->deep ? FSDP_VERIFY_DEEP
                                   : FSDP_VERIFY_DATA;
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {
    {&cli_work_argp, 0, NULL, 0}, {&cli_general_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {.options = options, .parser = parse, .children = children};

static const cli_tool tool = {
    .name = "fsdp-verify",
    .args = "PATH...",
    .summary = "Checks that a checkpoint, or every one of a run, is whole and undamaged.",
    .examples = "  fsdp-verify step-00001200            every block against its checksum\n"
                "  fsdp-verify --quick runs/*/step-*    sizes and indexes, no data\n"
                "  fsdp-verify --latest runs/gpt2       newest good checkpoint, alone on stdout\n"
                "  fsdp-verify --json step-00001200     findings for programs\n"
                "  fsdp-verify --like base-model out    out has every tensor of that model\n"
                "  fsdp-verify --repair step-00001200   index.h5 again from data that is good\n"
                "  fsdp-verify --write-digests model.safetensors    for later calls, in "
                "model.safetensors.xxh3\n",
    .argp = &argp};

static const char *level_name(fsdp_verify_level level)
{
    switch (level) {
    case FSDP_VERIFY_QUICK: return "quick";
    case FSDP_VERIFY_DATA: return "data";
    case FSDP_VERIFY_DEEP: return "deep";
    }
    return "unknown";
}

/* --- one checkpoint --------------------------------------------------------------------------- */

static void add_text_member(fsdp_text *text, const char *name, const char *value)
{
    fsdp_text_addf(text, "\"%s\": ", name);
    fsdp_text_add_json_shown(text, value, strlen(value));
}

static const char *const kind_names[KINDS] = {"damage",  "value", "fixed",    "code",
                                              "missing", "extra", "shape",    "not_finite",
                                              "zero",    "twin",  "unchanged"};

static const char *mark_of(const fsdp_finding *finding)
{
    switch (finding->kind) {
    case FSDP_FINDING_VALUE: return "warn  ";
    case FSDP_FINDING_FIXED: return "fixed ";
    case FSDP_FINDING_CODE: return "code  ";
    default: break;
    }
    return finding->unreadable ? "error " : "bad   ";
}

static void add_finding_json(verify_report *report, const fsdp_finding *finding)
{
    fsdp_text *text = &report->text;
    fsdp_text_addf(text, "%s\n   {", report->has_findings ? "," : "");
    add_text_member(text, "file", finding->file);
    fsdp_text_addf(text, ", ");
    add_text_member(text, "tensor", finding->tensor);
    if (finding->block >= 0)
        fsdp_text_addf(text, ", \"block\": %" PRId64 ", ", finding->block);
    else
        fsdp_text_addf(text, ", \"block\": null, ");
    add_text_member(text, "text", finding->text);
    fsdp_text_addf(text, ", \"kind\": \"%s\"", kind_names[finding->kind]);
    fsdp_text_addf(text, "%s}", finding->unreadable ? ", \"unreadable\": true" : "");
    report->has_findings = true;
}

static void on_finding(void *context, const fsdp_finding *finding)
{
    verify_report *report = context;
    if (report->options->common.json) {
        add_finding_json(report, finding);
        return;
    }
    bool is_like = finding->kind >= FSDP_FINDING_MISSING;
    if (report->told[finding->kind]++ >= LINES_MOST && is_like)
        return;
    cli_progress_clear();
    fsdp_text_addf(&report->text, "%s", mark_of(finding));
    cli_add_message(&report->text, finding->text);
    fsdp_text_addf(&report->text, "\n");
}

/* The rest of findings of which there are too many to read. */
static void add_more(verify_report *report)
{
    for (int kind = FSDP_FINDING_MISSING; kind < KINDS; kind++)
        if (report->told[kind] > LINES_MOST)
            fsdp_text_addf(&report->text,
                           "bad   and %" PRId64 " more of the kind '%s'; --json has them all\n",
                           report->told[kind] - LINES_MOST, kind_names[kind]);
}

static void begin_path(verify_report *report, const char *path)
{
    fsdp_text *text = &report->text;
    memset(report->told, 0, sizeof report->told);
    report->like = (fsdp_like_summary){0};
    if (!report->options->common.json)
        return;
    fsdp_text_addf(text, "%s\n  {", report->has_paths ? "," : "");
    add_text_member(text, "path", path);
    fsdp_text_addf(text, ", \"level\": \"%s\", \"findings\": [",
                   level_name(report->options->level));
    report->has_paths = true;
    report->has_findings = false;
}

/* PATH.xxh3, as JSON or as text for people. */
static void add_digest_path(verify_report *report, const char *path)
{
    fsdp_text file = {0};
    path = report->path ? report->path : path;
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/')
        size--;
    fsdp_text_add(&file, path, size);
    fsdp_text_addf(&file, ".xxh3");
    if (file.failed)
        report->text.failed = true;
    else if (report->options->common.json)
        fsdp_text_add_json_shown(&report->text, file.data, file.size);
    else
        cli_add_message(&report->text, file.data);
    fsdp_text_release(&file);
}

static void end_path_json(verify_report *report, const char *path,
                          const fsdp_verify_summary *summary, fsdp_status status,
                          const fsdp_error *err)
{
    fsdp_text *text = &report->text;
    fsdp_text_addf(text, "],\n   \"good\": %s, \"files\": %" PRId64 ", \"tensors\": %" PRId64,
                   status == FSDP_OK ? "true" : "false", summary->files, summary->tensors);
    fsdp_text_addf(text, ", \"blocks\": %" PRId64 ", \"bytes\": %" PRId64, summary->blocks,
                   summary->bytes);
    fsdp_text_addf(text, ", \"checked_bytes\": %" PRId64, summary->checked_bytes);
    fsdp_text_addf(text, ", \"digests\": ");
    if (summary->digest_files > 0)
        add_digest_path(report, path);
    else
        fsdp_text_addf(text, "null");
    fsdp_text_addf(text, ", \"digests_written\": %s", summary->digests_written ? "true" : "false");
    fsdp_text_addf(text, ", \"code_files\": %" PRId64, summary->code_files);
    if (report->like.model[0]) {
        fsdp_text_addf(text, ",\n   \"like\": {");
        add_text_member(text, "model", report->like.model);
        fsdp_text_addf(text, ", \"expected\": %" PRId64 ", \"found\": %" PRId64,
                       report->like.expected, report->like.found);
        fsdp_text_addf(text, ", \"findings\": %" PRId64 "}", report->like.findings);
    }
    if (status != FSDP_OK && status != FSDP_DIFFERS) {
        fsdp_text_addf(text, ", ");
        cli_add_json_error(text, status, err);
    }
    fsdp_text_addf(text, "}");
}

static void add_good(verify_report *report, const char *path, const fsdp_verify_summary *summary,
                     double seconds)
{
    fsdp_text *text = &report->text;
    char number[CLI_NUMBER];
    fsdp_text_addf(text, "ok    ");
    cli_add_message(text, path);
    fsdp_text_addf(text, ": %s", cli_plural(summary->files, "file", number));
    fsdp_text_addf(text, ", %s", cli_plural(summary->tensors, "tensor", number));
    if (summary->blocks > 0) {
        fsdp_text_addf(text, ", %s", cli_plural(summary->blocks, "block", number));
        fsdp_text_addf(text, ", %s", cli_bytes(summary->bytes, number));
        fsdp_text_addf(text, " in %.2f s (%s)", seconds, cli_rate(summary->bytes, seconds, number));
        if (summary->checked_bytes == 0 && !summary->digests_written)
            fsdp_text_addf(text, ", no checksums in this format: structure only");
    } else {
        fsdp_text_addf(text, ", sizes and indexes");
    }
    if (summary->digest_files > 0) {
        fsdp_text_addf(text, summary->digests_written ? ", wrote "
                             : report->options->quick ? ", sizes as in "
                                                      : ", checked against ");
        add_digest_path(report, path);
    }
    if (report->like.model[0]) {
        fsdp_text_addf(text, ", all %s of ", cli_plural(report->like.expected, "tensor", number));
        cli_add_message(text, report->like.model);
    }
    if (summary->warnings > 0)
        fsdp_text_addf(text, ", %s", cli_plural(summary->warnings, "warning", number));
    if (summary->code_files > 0)
        fsdp_text_addf(text, ", %s with code", cli_plural(summary->code_files, "file", number));
    if (report->options->repair && summary->fixed == 0)
        fsdp_text_addf(text, ", nothing to repair");
    fsdp_text_addf(text, "\n");
}

static void add_bad(verify_report *report, const char *path, const fsdp_verify_summary *summary)
{
    char number[CLI_NUMBER];
    add_more(report);
    fsdp_text_addf(&report->text, "bad   ");
    cli_add_message(&report->text, path);
    fsdp_text_addf(&report->text, ": %s%s\n", cli_plural(summary->findings, "finding", number),
                   report->options->repair ? ", nothing was repaired" : "");
}

static void end_path(verify_report *report, const char *path, const fsdp_verify_summary *summary,
                     fsdp_status status, const fsdp_error *err, double seconds)
{
    cli_progress_clear();
    if (report->options->common.json)
        end_path_json(report, path, summary, status, err);
    else if (status == FSDP_OK)
        add_good(report, path, summary, seconds);
    else if (status == FSDP_DIFFERS)
        add_bad(report, path, summary);
    if (report->options->common.quiet && !report->options->common.json)
        report->text.size = 0;
}

/* Damage is an answer (1); a checkpoint that could not be verified is worse and keeps its exit code. */
static fsdp_status worse(fsdp_status a, fsdp_status b)
{
    return a > b ? a : b;
}

/* Verifies the checkpoint that other tools would open. verify repeats and reports damage that
 * resolve found. */
static fsdp_status verify_resolved(verify_report *report, const char *path,
                                   const fsdp_verify_opts *opts, fsdp_verify_summary *summary_out,
                                   fsdp_error *err)
{
    char *resolved = NULL;
    fsdp_error found = {0};
    FSDP_TRY(cli_check_not_inside(path, err));
    const fsdp_open_opts open = {.whole = true, .access = *cli_access()};
    fsdp_status status = fsdp_checkpoint_resolve(path, &open, &opts->watch, &resolved, &found);
    if (status == FSDP_ERR_NOT_FOUND || status == FSDP_ERR_REFUSED || status == FSDP_ERR_USAGE) {
        *err = found;
        return status;
    }
    if (status != FSDP_OK) {
        fsdp_status verified = fsdp_checkpoint_verify(path, opts, summary_out, err);
        if (verified != FSDP_ERR_NOT_FOUND)
            return verified;
        *err = found; /* the path leads to no checkpoint, and this is why */
        return status;
    }
    report->path = resolved;
    return fsdp_checkpoint_verify(resolved, opts, summary_out, err);
}

/* The model of a checkpoint that is whole. */
static fsdp_status verify_like(verify_report *report, const char *path,
                               const fsdp_verify_opts *opts, fsdp_verify_summary *summary,
                               fsdp_error *err)
{
    const char *checkpoint = report->path ? report->path : path;
    fsdp_status status =
        fsdp_checkpoint_verify_like(checkpoint, report->options->like, opts, &report->like, err);
    summary->findings += report->like.findings;
    return status;
}

/* True when retention, in the job that owns the run, has removed the checkpoint meanwhile. */
static bool is_gone(const char *path)
{
    struct stat info;
    return lstat(path, &info) != 0 && errno == ENOENT;
}

/* A step is not named by the user: a link in its place is followed on request only. */
static fsdp_status check_link(const char *path, fsdp_error *err)
{
    struct stat info;
    if (cli_access()->follow_links || lstat(path, &info) != 0 || !S_ISLNK(info.st_mode))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_REFUSED,
                     "cannot open '%s': it is a symbolic link, which is not followed by default; "
                     "follow links with --follow-links, or make a copy without links with 'cp -rL'",
                     path);
}

/* Drops findings about a step that was removed meanwhile; before: the report without them. */
static void forget_path(verify_report *report, const verify_report *before,
                        const fsdp_run_step *step)
{
    cli_progress_clear();
    report->text.size = before->text.size;
    report->has_paths = before->has_paths;
    if (!report->options->common.quiet)
        cli_say("note", "%s was removed meanwhile and is not verified", step->name);
}

/* step: of a run, or NULL. */
static fsdp_status verify_checkpoint(verify_report *report, const char *path,
                                     const fsdp_run_step *step)
{
    const cli_common *common = &report->options->common;
    fsdp_error err = {0};
    fsdp_verify_summary summary = {0};
    fsdp_verify_opts opts = {.level = report->options->level,
                             .digests = report->options->write_digests ? FSDP_DIGESTS_WRITE
                                                                       : FSDP_DIGESTS_USE,
                             .access = *cli_access(),
                             .repair = report->options->repair,
                             .variant = report->options->variant,
                             .threads = common->jobs,
                             .memory = common->memory,
                             .finding = on_finding,
                             .finding_context = report,
                             .watch = cli_watch(common)};
    double began = cli_now();
    const verify_report before = *report;
    begin_path(report, path);
    fsdp_status status = step ? check_link(path, &err) : FSDP_OK;
    if (status == FSDP_OK)
        status = verify_resolved(report, path, &opts, &summary, &err);
    if (report->options->like && status == FSDP_OK)
        status = verify_like(report, path, &opts, &summary, &err);
    if (step && status != FSDP_OK && status != FSDP_ERR_CANCELLED && is_gone(path)) {
        fsdp_string_free(report->path);
        report->path = NULL;
        forget_path(report, &before, step);
        return FSDP_OK;
    }
    report->verified++;
    if (step && step->state != FSDP_STEP_NEWER && status == FSDP_ERR_NOT_FOUND) {
        /* a step without a whole checkpoint is damage, unless its format is newer than this version */
        on_finding(report,
                   &(fsdp_finding){.file = "", .tensor = "", .block = -1, .text = err.text});
        summary.findings++;
        status = FSDP_DIFFERS;
    }
    end_path(report, path, &summary, status, &err, cli_now() - began);
    fsdp_string_free(report->path);
    report->path = NULL;
    if (status != FSDP_OK && status != FSDP_DIFFERS && status != FSDP_ERR_CANCELLED)
        cli_report(&err);
    report->worst = worse(report->worst, status);
    if (status == FSDP_ERR_CANCELLED)
        return status;
    fsdp_text out = report->text;
    report->text = (fsdp_text){0};
    return cli_put_all(&out);
}

/* --- runs ------------------------------------------------------------------------------------- */

/* NULL for what is a step. */
static const char *leftover_of(const fsdp_run_step *step)
{
    switch (step->state) {
    case FSDP_STEP_STAGING:
        return step->at_work ? "a save in progress" : "an interrupted save; fsdp-gc removes it";
    case FSDP_STEP_DELETING:
        return step->at_work ? "a delete in progress" : "an interrupted delete; fsdp-gc removes it";
    case FSDP_STEP_REPLACED: return "set aside by an overwrite; fsdp-gc restores or removes it";
    case FSDP_STEP_GOOD:
    case FSDP_STEP_BROKEN:
    case FSDP_STEP_NEWER: break;
    }
    return NULL;
}

static fsdp_status verify_step(verify_report *report, const char *run, const fsdp_run_step *step)
{
    fsdp_text path = {0};
    const char *leftover = leftover_of(step);
    if (leftover) {
        if (!report->options->common.quiet)
            cli_say(step->at_work ? "note" : "warn", "%s: %s", step->name, leftover);
        return FSDP_OK;
    }
    fsdp_text_addf(&path, "%s/%s", run, step->name);
    fsdp_status st = path.failed ? FSDP_ERR_LIMIT : verify_checkpoint(report, path.data, step);
    fsdp_text_release(&path);
    return st;
}

static void report_run(verify_report *report, const char *run, fsdp_status status,
                       const fsdp_error *err)
{
    begin_path(report, run);
    end_path(report, run, &(fsdp_verify_summary){0}, status, err, 0);
    cli_report(err);
    report->worst = worse(report->worst, status);
}

static fsdp_status verify_run(verify_report *report, const char *run)
{
    fsdp_run_steps steps = {0};
    fsdp_error err = {0};
    fsdp_status st = fsdp_run_list(run, cli_access(), &steps, &err);
    if (st != FSDP_OK) {
        report_run(report, run, st, &err);
        return FSDP_OK;
    }
    report->verified = 0;
    for (size_t i = 0; i < steps.count && st == FSDP_OK; i++)
        st = verify_step(report, run, &steps.items[i]);
    fsdp_run_steps_release(&steps);
    if (st == FSDP_OK && report->verified == 0)
        report_run(report, run,
                   fsdp_fail(&err, FSDP_ERR_NOT_FOUND, "run '%s' holds no checkpoint", run), &err);
    return st;
}

static fsdp_status verify_paths(const verify_options *opts)
{
    verify_report report = {.options = opts};
    fsdp_status st = FSDP_OK;
    if (opts->common.json)
        fsdp_text_addf(&report.text, "{\"schema\": 1, \"paths\": [");
    for (int i = 0; i < opts->path_count && st == FSDP_OK; i++)
        st = cli_is_run(opts->paths[i]) ? verify_run(&report, opts->paths[i])
                                        : verify_checkpoint(&report, opts->paths[i], NULL);
    if (opts->common.json)
        fsdp_text_addf(&report.text, "]}\n");
    fsdp_status put = cli_put_all(&report.text);
    if (st == FSDP_OK)
        st = put;
    return st == FSDP_OK ? report.worst : st;
}

/* --- the newest good one ---------------------------------------------------------------------- */

/* Keeps the text of the first fault in an fsdp_error. */
static void keep_fault(void *context, const fsdp_finding *finding)
{
    fsdp_error *fault = context;
    if (finding->kind == FSDP_FINDING_DAMAGE && fault->status == FSDP_OK)
        (void)fsdp_fail(fault, FSDP_DIFFERS, "%s", finding->text);
}

static fsdp_status check_latest(const verify_options *opts, const fsdp_watch *watch,
                                const char *path, fsdp_error *err)
{
    fsdp_error fault = {0};
    const fsdp_verify_opts verify = {.level = opts->level,
                                     .digests = FSDP_DIGESTS_USE,
                                     .threads = opts->common.jobs,
                                     .memory = opts->common.memory,
                                     .finding = keep_fault,
                                     .finding_context = &fault,
                                     .watch = *watch,
                                     .access = *cli_access()};
    fsdp_status st = fsdp_checkpoint_verify(path, &verify, NULL, err);
    if (st != FSDP_DIFFERS)
        return st;
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "'%s' is the newest that opens, but it does not verify: %s", path, fault.text);
}

/* A run of another program means its newest step that opens; older ones are not tried. */
static fsdp_status find_latest(const verify_options *opts, const fsdp_watch *watch, char **path_out,
                               fsdp_error *err)
{
    const char *run = opts->paths[0];
    if (!cli_is_run(run) && access(run, F_OK) == 0) {
        const fsdp_open_opts open = {.whole = true, .access = *cli_access()};
        FSDP_TRY(fsdp_checkpoint_resolve(run, &open, watch, path_out, err));
        if (strcmp(*path_out, run) != 0)
            return check_latest(opts, watch, *path_out, err);
        fsdp_string_free(*path_out);
        *path_out = NULL;
    }
    return fsdp_run_latest(run, opts->level, watch, cli_access(), path_out, err);
}

static fsdp_status print_latest(const verify_options *opts, fsdp_error *err)
{
    fsdp_watch watch = cli_watch(&opts->common);
    fsdp_text text = {0};
    char *path = NULL;
    FSDP_TRY(cli_check_not_checkpoint(opts->paths[0], err));
    fsdp_status st = find_latest(opts, &watch, &path, err);
    if (st != FSDP_OK) {
        fsdp_string_free(path);
        return st;
    }
    if (opts->common.json) {
        fsdp_text_addf(&text, "{\"schema\": 1, ");
        add_text_member(&text, "latest", path);
        fsdp_text_addf(&text, "}\n");
    } else if (isatty(STDOUT_FILENO)) {
        cli_add_message(&text, path);
        fsdp_text_addf(&text, "\n");
    } else {
        fsdp_text_addf(&text, "%s\n", path); /* byte for byte: for "$(...)" */
    }
    fsdp_string_free(path);
    cli_progress_clear();
    return cli_put_all(&text);
}

int main(int argc, char **argv)
{
    verify_options opts = {0};
    fsdp_error err = {0};
    cli_begin(&tool, argc, argv, &opts);
    fsdp_status st = opts.latest ? print_latest(&opts, &err) : verify_paths(&opts);
    free(opts.paths);
    return cli_end(st, &err);
}

/*
 * fsdp-convert: the same state in another format, kind, world size, mesh or sharding, offline. The work is
 * fsdp_checkpoint_convert's; this file plans, runs and reports. See convert_tool.h.
 */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <string.h>
#include <unistd.h>

static void add_replaced(fsdp_text *text, const char *path)
{
    fsdp_text_addf(text, "  '");
    cli_add_message(text, path);
    fsdp_text_addf(text, "' exists and is replaced\n");
}

static fsdp_status print_plan(const convert_options *opts, const fsdp_checkpoint_info *info,
                              const fsdp_convert_plan *plan, const fsdp_error *failure)
{
    fsdp_text text = {0};
    if (opts->common.json) {
        convert_add_json(&text, opts, info, plan, &(convert_outcome){.failure = failure});
    } else if (!opts->common.quiet) {
        convert_add_plan(&text, opts, info, plan);
        if (!failure && opts->convert.overwrite && access(opts->to, F_OK) == 0)
            add_replaced(&text, opts->to);
        fsdp_text_addf(&text, "  nothing written (plan only)\n");
    }
    return cli_put_all(&text);
}

typedef struct digest_list {
    fsdp_text *text;
    bool json;
} digest_list;

static void take_digest(void *context, const char *name, const uint8_t digest[32])
{
    const digest_list *list = context;
    convert_add_digest(list->text, list->json, name, digest);
}

/* A failure here leaves the result in place: it is already published. */
static fsdp_status digest_files(convert_options *opts, fsdp_text *text, fsdp_error *err)
{
    digest_list list = {text, opts->common.json};
    fsdp_status st = FSDP_OK;
    if (!opts->digest && !opts->write_digests)
        return FSDP_OK;
    if (opts->write_digests)
        st = fsdp_convert_write_digests(opts->to, &opts->convert, err);
    if (st != FSDP_OK) {
        fsdp_error_prefix(err, "'%s' is written, but its digests are not", opts->to);
        return st;
    }
    if (opts->digest)
        st = fsdp_convert_digests(opts->to, &opts->convert, take_digest, &list, err);
    if (st != FSDP_OK)
        fsdp_error_prefix(err, "'%s' is written, but its digests could not be computed", opts->to);
    return st;
}

static fsdp_status convert(convert_options *opts, const fsdp_checkpoint_info *info,
                           const fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_text text = {0};
    convert_outcome outcome = {0};
    double began = cli_now();
    if (opts->verbose && !opts->common.json) {
        convert_add_plan(&text, opts, info, plan);
        FSDP_TRY(cli_put_all(&text));
    } else {
        convert_report_notes(opts, plan);
    }
    FSDP_TRY(fsdp_checkpoint_convert(info->path, opts->to, &opts->convert, err));
    opts->convert.resume = false; /* nothing is left to go on with */
    outcome.seconds = cli_now() - began;
    fsdp_status st = digest_files(opts, &outcome.digests, err);
    outcome.failure = st == FSDP_OK ? NULL : err;
    cli_progress_clear();
    if (opts->common.json)
        convert_add_json(&text, opts, info, plan, &outcome);
    else if (!opts->common.quiet)
        convert_add_done(&text, opts, info, plan, &outcome);
    if (!opts->common.json && outcome.digests.size > 0)
        fsdp_text_add(&text, outcome.digests.data, outcome.digests.size);
    text.failed = text.failed || outcome.digests.failed;
    fsdp_text_release(&outcome.digests);
    fsdp_status put = cli_put_end(&text); /* a signal comes too late: DST is there */
    return st == FSDP_OK ? put : st;
}

/* Suggests --overwrite when a plan with it succeeds; else reports why DST cannot be replaced. */
static void name_overwrite(const convert_options *opts, const char *from, fsdp_error *err)
{
    fsdp_convert_opts overwriting = opts->convert;
    fsdp_convert_plan plan = {0};
    fsdp_error found = *err, other = {0};
    overwriting.overwrite = true;
    overwriting.watch = (fsdp_watch){0}; /* notices were given */
    fsdp_status st = fsdp_checkpoint_convert_plan(from, opts->to, &overwriting, &plan, &other);
    fsdp_convert_plan_release(&plan);
    if (st == FSDP_OK)
        fsdp_fail(err, FSDP_ERR_EXISTS, "%s; --overwrite replaces it", found.text);
    else if (st == FSDP_ERR_EXISTS)
        *err = other;
}

/* Keeps the kind full when options only compress or filter a full checkpoint. */
static void choose_kind(convert_options *opts, const fsdp_checkpoint_info *info)
{
    fsdp_convert_opts *convert = &opts->convert;
    bool is_cut = convert->world > 0 || convert->mesh || opts->dim_given;
    if (!opts->order && !opts->kind_given && info->kind == FSDP_FULL && !is_cut)
        convert->kind = FSDP_FULL;
}

static fsdp_status plan_and_convert(convert_options *opts, const fsdp_checkpoint_info *info,
                                    fsdp_convert_plan *plan, fsdp_error *err)
{
    choose_kind(opts, info);
    fsdp_status st = fsdp_checkpoint_convert_plan(info->path, opts->to, &opts->convert, plan, err);
    if (st == FSDP_ERR_EXISTS && !opts->convert.overwrite)
        name_overwrite(opts, info->path, err);
    if (st != FSDP_OK)
        convert_name_drops(opts, info->path, err);
    if (st == FSDP_OK && opts->plan_out)
        st = fsdp_checkpoint_convert_plan_write(info->path, opts->to, &opts->convert,
                                                opts->plan_out, err);
    if (st == FSDP_ERR_DAMAGED && plan->model_missing > 0)
        cli_forget_run(); /* its checkpoint is whole, and the model in it is not */
    if (opts->plan && plan->files > 0) {
        fsdp_status printed = print_plan(opts, info, plan, st == FSDP_OK ? NULL : err);
        return st == FSDP_OK ? printed : st;
    }
    return st == FSDP_OK ? convert(opts, info, plan, err) : st;
}

/* Takes the options from the plan, except those about how the work is done, which the command line has. */
static fsdp_status take_order(convert_options *opts, fsdp_error *err)
{
    const fsdp_convert_opts given = opts->convert;
    FSDP_TRY(fsdp_convert_order_open(opts->apply, cli_access(), &opts->order, err));
    fsdp_convert_opts *convert = &opts->order->opts;
    convert->skip_verify = given.skip_verify;
    convert->skip_fsync = given.skip_fsync;
    convert->resume = given.resume;
    convert->direct = given.direct;
    convert->bytes_per_second = given.bytes_per_second;
    convert->threads = opts->common.jobs;
    convert->memory = opts->common.memory;
    opts->convert = *convert;
    opts->from = opts->order->from;
    opts->to = opts->order->to;
    return fsdp_convert_order_check(opts->order, err);
}

/* Adds the option's name to an error of opening, which does not know it. */
static void name_allow_missing(const convert_options *opts, fsdp_error *err)
{
    static const char end[] = "is missing";
    size_t size = strlen(err->text), n = sizeof end - 1;
    fsdp_error found = *err;
    if (!opts->convert.open.allow_missing && size > n && strcmp(err->text + size - n, end) == 0)
        fsdp_fail(err, found.status, "%s; --allow-missing REGEX converts the rest", found.text);
}

static fsdp_status run(convert_options *opts, fsdp_error *err)
{
    fsdp_convert_plan plan = {0};
    if (opts->apply)
        FSDP_TRY(take_order(opts, err));
    opts->convert.watch = cli_watch(&opts->common);
    opts->convert.cast = &opts->cast;
    opts->convert.open.whole = fsdp_convert_takes_whole(&opts->convert);
    opts->convert.open.memory = opts->convert.memory;
    fsdp_status st = cli_open_checkpoint(opts->from, &opts->convert.open, &opts->convert.watch,
                                         &opts->source, err);
    if (st != FSDP_OK) {
        name_allow_missing(opts, err);
        return st;
    }
    st = plan_and_convert(opts, fsdp_checkpoint_describe(opts->source), &plan, err);
    fsdp_convert_plan_release(&plan);
    fsdp_checkpoint_close(opts->source);
    opts->source = NULL;
    return st;
}

/* Exit status 75 asks a batch system to run the command again. */
static int end_for_resume(void)
{
    cli_progress_clear();
    cli_say("stop", "by signal %d; finished work is kept, and --resume continues it",
            cli_stopped());
    cli_log_end(FSDP_ERR_CANCELLED);
    return FSDP_ERR_CANCELLED;
}

int main(int argc, char **argv)
{
    convert_options opts = {0};
    fsdp_error err = {0};
    convert_options_read(argc, argv, &opts);
    fsdp_status st = run(&opts, &err);
    bool resumes = st == FSDP_ERR_CANCELLED && cli_stopped() && opts.convert.resume &&
                   fsdp_convert_keeps_work(opts.convert.format);
    convert_name_source(&opts, &err);
    convert_options_release(&opts);
    return resumes ? end_for_resume() : cli_end(st, &err);
}

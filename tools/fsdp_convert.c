/*
 * fsdp-convert: the same state in another format, kind, world size, mesh or sharding, offline. The library's
 * conversion does the work; this file opens it, runs it and reports. See convert_tool.h.
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

static fsdp_status print_plan(const convert_options *opts, const fsdp_convert_plan *plan,
                              const fsdp_error *failure)
{
    fsdp_text text = {0};
    if (opts->common.json) {
        convert_add_json(&text, opts, plan, &(convert_outcome){.failure = failure});
    } else if (!opts->common.quiet) {
        convert_add_plan(&text, opts, plan);
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

static fsdp_status run_and_report(convert_options *opts, const fsdp_convert_plan *plan,
                                  fsdp_error *err)
{
    fsdp_text text = {0};
    convert_outcome outcome = {0};
    digest_list list = {&outcome.digests, opts->common.json};
    double began = cli_now();
    if (opts->verbose && !opts->common.json) {
        convert_add_plan(&text, opts, plan);
        FSDP_TRY(cli_put_all(&text));
    } else if (!opts->common.quiet && !opts->common.json) {
        convert_say_notes(plan);
    }
    FSDP_TRY(fsdp_conversion_run(opts->conversion, err));
    opts->convert.resume = false; /* nothing is left to continue with */
    outcome.seconds = cli_now() - began;
    fsdp_status st = FSDP_OK; /* the result stays, whatever becomes of its digests */
    if (opts->write_digests)
        st = fsdp_conversion_write_digests(opts->conversion, err);
    if (st == FSDP_OK && opts->digest)
        st = fsdp_conversion_result(opts->conversion, take_digest, &list, err);
    outcome.failure = st == FSDP_OK ? NULL : err;
    cli_progress_clear();
    if (opts->common.json)
        convert_add_json(&text, opts, plan, &outcome);
    else if (!opts->common.quiet)
        convert_add_done(&text, opts, plan, &outcome);
    if (!opts->common.json && !opts->common.quiet)
        convert_add_next(&text, plan);
    if (!opts->common.json && outcome.digests.size > 0)
        fsdp_text_add(&text, outcome.digests.data, outcome.digests.size);
    text.failed = text.failed || outcome.digests.failed;
    fsdp_text_release(&outcome.digests);
    fsdp_status put = cli_put_end(&text); /* a signal comes too late: DST is there */
    return st == FSDP_OK ? put : st;
}

/* Adds to a failure of the plan what the command line can do about it. */
static void explain(const convert_options *opts, const fsdp_convert_plan *plan, fsdp_error *err)
{
    const fsdp_error found = *err;
    if (plan && plan->may_overwrite)
        fsdp_fail(err, FSDP_ERR_EXISTS, "%s; replace it with --overwrite", found.text);
    convert_name_drops(opts, err);
    if (found.status == FSDP_ERR_DAMAGED && plan && plan->model_missing > 0)
        cli_forget_run(); /* its checkpoint is whole, and the model in it is not */
}

/* Adds the option to the error that a file of a native checkpoint is missing. */
static void name_allow_missing(const convert_options *opts, fsdp_error *err)
{
    static const char end[] = "' is missing";
    size_t size = strlen(err->text), n = sizeof end - 1;
    fsdp_error found = *err;
    if (found.status == FSDP_ERR_DAMAGED && !opts->convert.open.allow_missing && size > n &&
        strcmp(err->text + size - n, end) == 0)
        fsdp_fail(err, found.status, "%s; convert the rest with --allow-missing REGEX", found.text);
}

static fsdp_status open_conversion(convert_options *opts, fsdp_error *err)
{
    fsdp_convert_opts *convert = &opts->convert;
    convert->watch = cli_watch(&opts->common);
    convert->cast = &opts->cast;
    convert->open.access = *cli_access();
    convert->keep_full = !convert_is_given(opts, "kind") && !convert_is_given(opts, "shard-dim");
    if (opts->apply)
        return fsdp_conversion_apply(opts->apply, convert, &opts->conversion, err);
    FSDP_TRY(cli_begin_source(opts->from, err));
    return fsdp_conversion_open(opts->from, opts->to, convert, &opts->conversion, err);
}

static fsdp_status run(convert_options *opts, fsdp_error *err)
{
    fsdp_status st = open_conversion(opts, err);
    const fsdp_convert_plan *plan = fsdp_conversion_plan(opts->conversion);
    if (plan && opts->apply) {
        opts->to = plan->to;
        opts->convert = *plan->opts;
    } else if (plan) {
        opts->convert.kind = plan->opts->kind;
    }
    if (st != FSDP_OK && (!plan || !plan->source))
        name_allow_missing(opts, err);
    if (st != FSDP_OK)
        explain(opts, plan, err);
    if (st == FSDP_OK && opts->plan_out)
        st = fsdp_conversion_write_plan(opts->conversion, opts->plan_out, err);
    if (opts->plan && plan && plan->files > 0) {
        fsdp_status printed = print_plan(opts, plan, st == FSDP_OK ? NULL : err);
        return st == FSDP_OK ? printed : st;
    }
    return st == FSDP_OK ? run_and_report(opts, plan, err) : st;
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
    const fsdp_convert_plan *plan = fsdp_conversion_plan(opts.conversion);
    bool resumes = st == FSDP_ERR_CANCELLED && cli_stopped() && opts.convert.resume && plan &&
                   plan->keeps_work;
    convert_name_source(&opts, &err);
    convert_options_release(&opts);
    return resumes ? end_for_resume() : cli_end(st, &err);
}

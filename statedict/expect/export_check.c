/* The comparison before a conversion: see export_check.h. */
#include "statedict/expect/export_check.h"

#include "statedict/expect/expect.h"
#include <fsdp/filter.h>

#include <stdio.h>
#include <string.h>

typedef struct export_job {
    const fsdp_export_check *check;
    fsdp_export_report *report;
    fsdp_filter *allowed;
    fsdp_name_list lost, shapes, beyond;
    char shape[256]; /* of the first that has another one */
} export_job;

static void note_shape(export_job *job, const fsdp_expected *expected, const fsdp_entry *entry)
{
    char name[100], own[64], other[64];
    if (job->shape[0])
        return;
    snprintf(job->shape, sizeof job->shape, "'%s' is %s, and there %s",
             fsdp_printable(expected->name, expected->name_size, name, sizeof name),
             fsdp_tensor_shape_text(entry, own, sizeof own),
             fsdp_shape_text(expected->ndim, expected->shape, other, sizeof other));
}

static fsdp_status take_fault(void *context, fsdp_expect_fault fault, const fsdp_expected *expected,
                              const fsdp_entry *entry, fsdp_error *err)
{
    export_job *job = context;
    fsdp_name_list *list = &job->lost;
    if (fault == FSDP_EXPECT_SHAPE)
        note_shape(job, expected, entry);
    if (fault == FSDP_EXPECT_SHAPE || fault == FSDP_EXPECT_BEYOND)
        list = fault == FSDP_EXPECT_SHAPE ? &job->shapes : &job->beyond;
    else if (fault == FSDP_EXPECT_EXTRA)
        list = &job->report->extra;
    else if (job->allowed && fsdp_filter_selects(job->allowed, expected->name, expected->name_size))
        list = &job->report->missing;
    bool fine = entry ? fsdp_names_add(list, entry->name, entry->name_size)
                      : fsdp_names_add(list, expected->name, expected->name_size);
    return fine ? FSDP_OK : fsdp_fail_memory(err, "a list of names");
}

/* "llama of 'base/config.json'"; a checkpoint may carry its config itself. */
static const char *model_text(const export_job *job, char out[FSDP_ERROR_TEXT])
{
    const fsdp_export_check *check = job->check;
    if (strcmp(check->config, check->from) == 0)
        snprintf(out, FSDP_ERROR_TEXT, "%s of its own config", job->report->model);
    else
        snprintf(out, FSDP_ERROR_TEXT, "%s of '%s'", job->report->model, check->config);
    return out;
}

/* True when all that is missing was left out as another name of a tensor. */
static bool are_tied(const export_job *job)
{
    const fsdp_export_check *check = job->check;
    for (size_t i = 0; i < job->lost.count; i++) {
        bool is_tied = false;
        for (size_t t = 0; t < check->tie_count; t++)
            is_tied = is_tied || (strlen(job->lost.items[i]) == check->ties[t].dropped_size &&
                                  memcmp(job->lost.items[i], check->ties[t].dropped,
                                         check->ties[t].dropped_size) == 0);
        if (!is_tied)
            return false;
    }
    return true;
}

/* config.json and the tensors are of two models where a shape differs, or where it has fewer layers. */
static bool is_another(const export_job *job)
{
    return job->shapes.count + job->beyond.count > 0;
}

static const char *advice(const export_job *job)
{
    return is_another(job) ? "; --copy-from takes the config of the same model"
           : are_tied(job) ? ", tied in the source: --tied keep writes every name"
                           : "; --allow-missing REGEX converts the rest";
}

static fsdp_status fail_with_lists(const export_job *job, const char *model, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "'%s' is not %sthe %s", job->check->from,
                   is_another(job) ? "" : "all of ", model);
    if (job->shape[0])
        fsdp_text_addf(&text, ": %s", job->shape);
    (void)fsdp_names_append(&job->shapes, "of another shape", &text);
    (void)fsdp_names_append(&job->beyond, "behind its last layer or expert", &text);
    (void)fsdp_names_append(&job->lost, "missing", &text);
    fsdp_text_addf(&text, "%s", advice(job));
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a message")
                                 : fsdp_fail(err, FSDP_ERR_DAMAGED, "%s", text.data);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status judge(const export_job *job, const fsdp_expect_counts *counts, fsdp_error *err)
{
    char model[FSDP_ERROR_TEXT];
    const char *from = job->check->from;
    (void)model_text(job, model);
    if (job->lost.count > 0 && counts->found == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "no tensor of '%s' has a name of the %s, such as '%s': --rename gives "
                         "them names, --no-copy leaves the config out",
                         from, model, job->lost.items[0]);
    return job->lost.count > 0 || is_another(job) ? fail_with_lists(job, model, err) : FSDP_OK;
}

static fsdp_status compare(export_job *job, const fsdp_expect *expect, fsdp_error *err)
{
    fsdp_expect_counts counts = {0};
    snprintf(job->report->model, sizeof job->report->model, "%s", fsdp_expect_name(expect));
    if (job->check->allow_missing)
        FSDP_TRY(fsdp_filter_create(job->check->allow_missing, NULL, &job->allowed, err));
    fsdp_error odd = {0};
    fsdp_status st = fsdp_expect_compare(expect, job->check->sd, take_fault, job, &counts, &odd);
    if (st != FSDP_OK)
        return fsdp_fail(err, st, "%s%s", odd.text,
                         st == FSDP_ERR_USAGE ? "; --no-copy leaves the config out" : "");
    if (job->check->may_be_unnamed && counts.found == 0) {
        job->report->model[0] = '\0';
        return FSDP_OK;
    }
    job->report->expected = counts.expected;
    job->report->lost = job->lost.count;
    return judge(job, &counts, err);
}

fsdp_status fsdp_export_compare(const fsdp_export_check *check, fsdp_export_report *report_out,
                                fsdp_error *err)
{
    export_job job = {.check = check, .report = report_out};
    fsdp_expect *expect = NULL;
    *report_out = (fsdp_export_report){0};
    fsdp_status st = fsdp_expect_config(check->text, check->size, check->config, &expect, err);
    if (st == FSDP_ERR_USAGE)
        return FSDP_OK; /* nothing is known of the model */
    if (st == FSDP_ERR_DAMAGED && err) {
        const fsdp_error odd = *err;
        fsdp_fail(err, st, "%s; --no-copy leaves the config out", odd.text);
    }
    if (st == FSDP_OK)
        st = compare(&job, expect, err);
    fsdp_names_release(&job.lost);
    fsdp_names_release(&job.shapes);
    fsdp_names_release(&job.beyond);
    fsdp_filter_free(job.allowed);
    fsdp_expect_free(expect);
    return st;
}

void fsdp_export_report_release(fsdp_export_report *report)
{
    fsdp_names_release(&report->missing);
    fsdp_names_release(&report->extra);
}

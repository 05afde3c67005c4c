/* The comparison before a conversion: see export_check.h. */
#include "statedict/expect/export_check.h"

#include "base/text.h"
#include "statedict/expect/expect.h"
#include "statedict/expect/hf_model.h"
#include "statedict/models/config.h"
#include <fsdp/filter.h>

#include <stdio.h>
#include <string.h>

typedef struct export_job {
    const fsdp_export_check *check;
    fsdp_export_report *report;
    fsdp_filter *allowed;
    fsdp_hf_model *wanted; /* the weights of a directory; NULL: config.json is asked for */
    fsdp_name_list lost, shapes, beyond;
    char shape[256]; /* of the first that has another one */
    int64_t lost_elements, extra_elements;
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

/* Buffers that some versions of transformers store. */
static bool is_buffer(const fsdp_expected *expected)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(expected->dtype);
    return fsdp_bytes_end(expected->name, expected->name_size, "inv_freq") ||
           fsdp_bytes_end(expected->name, expected->name_size, "masked_bias") ||
           (info && !info->is_float && info->values == 1);
}

/* Elements of all; at the bound the sum stays there. */
static void add_elements(int ndim, const int64_t *shape, int64_t *sum)
{
    int64_t count = 1;
    for (int d = 0; d < ndim; d++)
        if (fsdp_mul_overflow(count, shape[d], &count))
            count = INT64_MAX;
    if (fsdp_add_overflow(*sum, count, sum))
        *sum = INT64_MAX;
}

static bool is_dropped_tie(const fsdp_export_check *check, const char *name, size_t size)
{
    for (size_t i = 0; i < check->tie_count; i++)
        if (size == check->ties[i].dropped_size && memcmp(name, check->ties[i].dropped, size) == 0)
            return true;
    return false;
}

/* True for a tensor of the directory that need not be there under this name. */
static fsdp_status may_lack(const export_job *job, const fsdp_expected *expected, bool *may_out,
                            fsdp_error *err)
{
    *may_out = job->wanted && (is_buffer(expected) ||
                               is_dropped_tie(job->check, expected->name, expected->name_size));
    if (*may_out || !job->wanted)
        return FSDP_OK;
    int64_t at = fsdp_sd_find(job->wanted->sd, expected->name, expected->name_size);
    return at < 0 ? FSDP_OK
                  : fsdp_hf_model_find_other_name(job->wanted, (size_t)at, job->check->sd,
                                                  job->check->memory, may_out, err);
}

static fsdp_status take_missing(export_job *job, const fsdp_expected *expected, fsdp_error *err)
{
    bool may;
    fsdp_name_list *list = &job->lost;
    FSDP_TRY(may_lack(job, expected, &may, err));
    if (may)
        return FSDP_OK;
    if (job->allowed && fsdp_filter_selects(job->allowed, expected->name, expected->name_size))
        list = &job->report->missing;
    else
        add_elements(expected->ndim, expected->shape, &job->lost_elements);
    return fsdp_names_add(list, expected->name, expected->name_size)
               ? FSDP_OK
               : fsdp_fail_memory(err, "a list of names");
}

static fsdp_status take_fault(void *context, fsdp_expect_fault fault, const fsdp_expected *expected,
                              const fsdp_entry *entry, fsdp_error *err)
{
    export_job *job = context;
    if (fault == FSDP_EXPECT_MISSING)
        return take_missing(job, expected, err);
    fsdp_name_list *list = fault == FSDP_EXPECT_SHAPE    ? &job->shapes
                           : fault == FSDP_EXPECT_BEYOND ? &job->beyond
                                                         : &job->report->extra;
    if (fault == FSDP_EXPECT_SHAPE)
        note_shape(job, expected, entry);
    else if (entry->kind == FSDP_ENTRY_TENSOR)
        add_elements(entry->ndim, entry->shape, &job->extra_elements);
    return fsdp_names_add(list, entry->name, entry->name_size)
               ? FSDP_OK
               : fsdp_fail_memory(err, "a list of names");
}

/* "llama of 'base/config.json'"; a checkpoint may carry its config itself. */
static const char *model_text(const export_job *job, char out[FSDP_ERROR_TEXT])
{
    const fsdp_export_check *check = job->check;
    const char *path = check->config->path;
    if (job->wanted)
        snprintf(out, FSDP_ERROR_TEXT, "model of '%s'", check->weights);
    else if (!path || strcmp(path, check->from) == 0)
        snprintf(out, FSDP_ERROR_TEXT, "%s of its own config", job->report->model);
    else
        snprintf(out, FSDP_ERROR_TEXT, "%s of '%s'", job->report->model, path);
    return out;
}

/* True when all that is missing was left out as another name of a tensor. */
static bool are_tied(const export_job *job)
{
    for (size_t i = 0; i < job->lost.count; i++)
        if (!is_dropped_tie(job->check, job->lost.items[i], strlen(job->lost.items[i])))
            return false;
    return true;
}

/* config.json and the tensors are of two models where a shape differs, or where it has fewer layers. */
static bool is_another(const export_job *job)
{
    return job->shapes.count + job->beyond.count > 0;
}

static const char *advice(const export_job *job)
{
    return is_another(job) ? "; use --copy-from with the config of the same model"
           : are_tied(job) ? ", tied in the source; use --tied keep to write every name"
                           : "; convert the rest with --allow-missing REGEX";
}

/* What to do about a config.json that makes no sense. */
static const char *config_advice(const export_job *job)
{
    return job->check->is_copied ? "leave the config out with --no-copy"
                                 : "use --copy-from with the config of the same model";
}

static fsdp_status fail_with_lists(const export_job *job, const char *model, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "'%s' is not %sthe %s", job->check->from,
                   is_another(job) ? "" : "all of ", model);
    if (job->shape[0])
        fsdp_text_addf(&text, ": %s", job->shape);
    (void)fsdp_names_append(&job->shapes, "of another shape", &text);
    (void)fsdp_names_append(&job->beyond, "after its last layer or expert", &text);
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
    if (job->wanted && !is_another(job) && job->lost_elements == job->extra_elements)
        return FSDP_OK; /* the same model, as far as its names tell */
    if (job->lost.count > 0 && counts->found == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "no tensor of '%s' has a name of the %s, such as '%s'; rename them with "
                         "--rename, or %s",
                         from, model, job->lost.items[0], config_advice(job));
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
        return fsdp_fail(err, st, "%s%s%s", odd.text, st == FSDP_ERR_USAGE ? "; " : "",
                         st == FSDP_ERR_USAGE ? config_advice(job) : "");
    if (job->check->may_be_unnamed && counts.found == 0) {
        job->report->model[0] = '\0';
        return FSDP_OK;
    }
    job->report->expected = counts.expected;
    job->report->lost = job->lost.count;
    return judge(job, &counts, err);
}

static fsdp_status compare_config(export_job *job, bool *is_known_out, fsdp_error *err)
{
    const fsdp_export_check *check = job->check;
    fsdp_expect *expect = NULL;
    fsdp_config_file config = *check->config;
    config.path = config.path ? config.path : check->from;
    config.kind.is_quantized = config.kind.is_quantized && !check->is_dequantized;
    config.is_untied = check->is_untied;
    fsdp_status st = fsdp_expect_config(&config, &expect, err);
    *is_known_out = st != FSDP_ERR_USAGE || fsdp_config_has_tensors(&config);
    if (!*is_known_out)
        return FSDP_OK;
    if ((st == FSDP_ERR_DAMAGED || st == FSDP_ERR_USAGE) && err) {
        const fsdp_error odd = *err;
        fsdp_fail(err, st, "%s; %s", odd.text, config_advice(job));
    }
    if (st == FSDP_OK)
        st = compare(job, expect, err);
    fsdp_expect_free(expect);
    return st;
}

/* Weights that cannot be read say nothing, nor do quantized ones, whose tensors are others. */
static fsdp_status compare_weights(export_job *job, fsdp_error *err)
{
    const fsdp_export_check *check = job->check;
    const fsdp_verify_opts opts = {.access = check->access};
    const fsdp_hf_model_from open = {.path = check->weights};
    fsdp_hf_model wanted = {0};
    fsdp_expect *expect = NULL;
    const fsdp_model_kind *kind = &check->config->kind;
    if (kind->is_quantized || fsdp_hf_model_open(&open, &opts, &wanted, NULL) != FSDP_OK) {
        fsdp_hf_model_release(&wanted);
        return FSDP_OK;
    }
    const fsdp_expect_sd from = {.sd = wanted.sd,
                                 .path = check->weights,
                                 .may_lack_head = kind->is_tied,
                                 .layers = kind->layers,
                                 .further_layers = kind->further_layers};
    job->wanted = &wanted;
    fsdp_status st = fsdp_expect_from(&from, &expect, err);
    if (st == FSDP_OK)
        st = compare(job, expect, err);
    if (job->report->model[0])
        snprintf(job->report->model, sizeof job->report->model, "%s",
                 kind->type[0] ? kind->type : "model");
    job->wanted = NULL;
    fsdp_expect_free(expect);
    fsdp_hf_model_release(&wanted);
    return st;
}

fsdp_status fsdp_export_compare(const fsdp_export_check *check, fsdp_export_report *report_out,
                                fsdp_error *err)
{
    export_job job = {.check = check, .report = report_out};
    bool is_known = false;
    *report_out = (fsdp_export_report){0};
    fsdp_status st = compare_config(&job, &is_known, err);
    if (st == FSDP_OK && !is_known && check->weights)
        st = compare_weights(&job, err);
    fsdp_names_release(&job.lost);
    fsdp_names_release(&job.shapes);
    fsdp_names_release(&job.beyond);
    fsdp_filter_free(job.allowed);
    return st;
}

void fsdp_export_report_release(fsdp_export_report *report)
{
    fsdp_names_release(&report->missing);
    fsdp_names_release(&report->extra);
}

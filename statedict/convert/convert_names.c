/*
 * Names for loaders: what programs put around the names of a model (the key above it, elements of wrappers)
 * is stripped for targets that hold a model. The stripping is a list of rename rules, so that plans and
 * fsdp-diff know it. With a config.json, the result must have the tensors of its model. See convert_job.h.
 */
#include "statedict/convert/convert_job.h"

#include "formats/source.h"
#include "statedict/select/model_part.h"

#include <string.h>

static fsdp_status take_rules(convert_job *job, size_t count, fsdp_error *err)
{
    const char *at = job->rules.data;
    job->rule_list = fsdp_alloc(count, sizeof *job->rule_list);
    if (!job->rule_list)
        return fsdp_fail_memory(err, "rules of names");
    for (size_t i = 0; i < count; i++, at += strlen(at) + 1)
        job->rule_list[i] = at;
    job->opts.select.renames = job->rule_list;
    job->opts.select.rename_count = count;
    return FSDP_OK;
}

/* The config.json that the person names, or that lies beside the weights. One that cannot be read is no
 * reason to refuse the weights: nothing is known then. */
static void read_model_type(convert_job *job)
{
    fsdp_model_kind_find(job->io, job->opts.copy_from, job->from->path, &job->model_kind);
    if (job->model_kind.type[0])
        job->known.model_type = job->model_kind.type;
}

fsdp_status fsdp_convert_fit_names(convert_job *job, fsdp_error *err)
{
    const fsdp_select_opts *select = &job->opts.select;
    fsdp_parts parts;
    size_t count = 0;
    bool is_plain = job->limits && job->limits->plain_names;
    bool is_model = job->limits && job->limits->for_loaders &&
                    (select->only == FSDP_ONLY_DEFAULT || select->only == FSDP_ONLY_MODEL);
    job->known.paths = job->from->source != NULL;
    job->known.only_tensors = strcmp(fsdp_checkpoint_describe(job->from)->format, "deepspeed") == 0;
    if ((is_model || is_plain) && !job->known.paths)
        read_model_type(job);
    if ((!is_model && !is_plain) || select->keep_names || select->rename_count > 0)
        return FSDP_OK;
    FSDP_TRY(fsdp_parts_find(job->from->manifest.sd, job->known, select->part, &parts, err));
    FSDP_TRY(fsdp_parts_add_rules(&parts, &job->rules, &count, err));
    if (is_plain)
        FSDP_TRY(fsdp_parts_add_optim_rule(&parts, &job->rules, &count, err));
    return count > 0 ? take_rules(job, count, err) : FSDP_OK;
}

/* --- the names that the config asks for --------------------------------------------------------- */

static bool drops_tensors(const fsdp_select_opts *select)
{
    for (size_t i = 0; i < select->drop_count; i++) {
        const char *drop = select->drops[i];
        if (strcmp(drop, "values") != 0 && strcmp(drop, "opaque") != 0 &&
            strcmp(drop, "optim") != 0)
            return true;
    }
    return false;
}

/* An adapter has no tensor of the model that a config beside it may describe. It is known by the name of its
 * file, or by its tensors. */
static bool is_adapter(const convert_job *job)
{
    const fsdp_source *source = job->from->source;
    const char *path = source && fsdp_source_file_count(source) > 0
                           ? fsdp_source_file_path(source, 0)
                           : job->from->path;
    const char *slash = strrchr(path, '/');
    if (strncmp(slash ? slash + 1 : path, "adapter", 7) == 0)
        return true;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
        if (entry->kind != FSDP_ENTRY_VALUE && !memmem(entry->name, entry->name_size, ".lora_", 6))
            return false;
    }
    return true;
}

/* True when the person asked for the whole model under the names of its loader. */
static bool is_whole_model(const convert_job *job)
{
    const fsdp_select_opts *select = &job->opts.select;
    return job->limits && job->limits->for_loaders && !select->include && !select->exclude &&
           !select->part && !select->keep_names && select->only != FSDP_ONLY_OPTIM &&
           select->only != FSDP_ONLY_ALL && !drops_tensors(select) && !is_adapter(job);
}

fsdp_status fsdp_convert_check_names(const convert_job *job, fsdp_export_report *report_out,
                                     fsdp_error *err)
{
    fsdp_export_check check = {.from = job->from->path,
                               .sd = job->sd,
                               .allow_missing = job->opts.open.allow_missing,
                               .ties = job->ties.items,
                               .tie_count = job->ties.count};
    char *text = NULL;
    *report_out = (fsdp_export_report){0};
    if (!is_whole_model(job))
        return FSDP_OK;
    FSDP_TRY(fsdp_copies_config(&job->copies, &text, &check.size, &check.config, err));
    check.text = text;
    fsdp_status st = text ? fsdp_export_compare(&check, report_out, err) : FSDP_OK;
    fsdp_free(text);
    return st;
}

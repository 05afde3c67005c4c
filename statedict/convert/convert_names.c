/*
 * Names for loaders: what programs put around the names of a model (the key above it, elements of wrappers)
 * is stripped for targets that hold a model. The stripping is a list of rename rules, so that plans and
 * fsdp-diff know it. With a config.json, the result must have the tensors of its model. See convert_job.h.
 */
#include "statedict/convert/convert_job.h"

#include "formats/source.h"
#include "statedict/expect/hf_model.h"
#include "statedict/select/drop_rules.h"
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

fsdp_status fsdp_convert_fit_names(convert_job *job, fsdp_error *err)
{
    const fsdp_select_opts *select = &job->opts.select;
    fsdp_parts parts;
    size_t count = 0;
    bool is_plain = job->format->caps.plain_names;
    bool is_model = job->format->caps.model_part &&
                    (select->only == FSDP_ONLY_DEFAULT || select->only == FSDP_ONLY_MODEL);
    job->known.paths = job->from->source != NULL;
    job->known.only_tensors =
        fsdp_format_from(fsdp_checkpoint_describe(job->from)->format)->caps.only_tensors;
    if ((is_model || is_plain) && !job->known.paths && job->config.kind.type[0])
        job->known.model_type = job->config.kind.type;
    bool is_named = is_plain || (is_model && job->format->caps.for_loaders);
    if (!is_named || select->keep_names || select->rename_count > 0)
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
            strcmp(drop, "optim") != 0 && !fsdp_drop_is_of_metadata(drop))
            return true;
    }
    return false;
}

/* An adapter has no tensor of the model that a config beside it may describe. It is known by the name of its
 * file, or by its tensors. */
static bool is_adapter(const fsdp_checkpoint *from, const fsdp_sd *sd)
{
    const fsdp_source *source = from->source;
    const char *path = source && fsdp_source_file_count(source) > 0
                           ? fsdp_source_file_path(source, 0)
                           : from->path;
    const char *slash = strrchr(path, '/');
    if (strncmp(slash ? slash + 1 : path, "adapter", 7) == 0)
        return true;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_VALUE && !memmem(entry->name, entry->name_size, ".lora_", 6))
            return false;
    }
    return true;
}

/* True when the person asked for the whole model. */
static bool asks_for_model(const convert_job *job)
{
    const fsdp_select_opts *select = &job->opts.select;
    return !select->include && !select->exclude && !select->part && !select->keep_names &&
           select->only != FSDP_ONLY_OPTIM && !drops_tensors(select);
}

/* The model of the checkpoint beside the check's config, with names below a further one. */
static fsdp_status see_below(convert_job *job, fsdp_export_check *check,
                             fsdp_checkpoint *checkpoint, const char *below, fsdp_error *err)
{
    fsdp_hf_model model = {.checkpoint = checkpoint, .path = checkpoint->path};
    fsdp_export_report_release(&job->seen);
    fsdp_status st = fsdp_hf_model_select(&model, NULL, below, err);
    check->sd = model.sd;
    if (st == FSDP_OK)
        st = fsdp_export_compare(check, &job->seen, err);
    model.checkpoint = NULL; /* it stays the caller's */
    model.path = NULL;
    fsdp_hf_model_release(&model);
    return st;
}

fsdp_status fsdp_convert_see_model(void *context, const fsdp_map_request *request,
                                   fsdp_checkpoint *checkpoint, const char *below, fsdp_error *err)
{
    convert_job *job = context;
    const fsdp_config_file *config = request->config;
    fsdp_export_check check = {.config = config,
                               .is_dequantized = job->opts.dequant != NULL,
                               .from = checkpoint->path,
                               .allow_missing = job->opts.open.allow_missing,
                               .may_be_unnamed = below != NULL};
    bool is_checked_later = job->format->caps.for_loaders;
    if (!config || is_checked_later || !asks_for_model(job) ||
        is_adapter(checkpoint, checkpoint->manifest.sd))
        return FSDP_OK;
    fsdp_status st = see_below(job, &check, checkpoint, NULL, err);
    check.may_be_unnamed = false;
    if (st == FSDP_OK && !job->seen.model[0] && below)
        st = see_below(job, &check, checkpoint, below, err);
    return st;
}

/* A file of safetensors has no config next to it; one next to a directory of weights says what it holds. */
static const fsdp_config_file *find_config(const convert_job *job)
{
    fsdp_file_info info;
    const fsdp_convert_opts *opts = &job->opts;
    bool has_own_names = opts->select.rename_count == 0 && !opts->map;
    if (job->format->caps.for_loaders)
        return job->copies.config;
    return has_own_names && job->format->caps.checks_config && job->from->source &&
                   job->io->ops->info(job->io, job->from->path, &info) >= 0 &&
                   info.kind == FSDP_FILE_DIRECTORY && job->config.path
               ? &job->config
               : NULL;
}

fsdp_status fsdp_convert_check_names(convert_job *job, fsdp_export_report *report_out,
                                     fsdp_error *err)
{
    const bool is_copied = job->format->caps.for_loaders;
    fsdp_export_check check = {.config = find_config(job),
                               .is_dequantized = is_copied && job->opts.dequant,
                               .is_untied = is_copied && job->copies.unties,
                               .weights = job->opts.copy_from,
                               .access = job->opts.open.access,
                               .memory =
                                   job->opts.memory > 0 ? job->opts.memory : FSDP_MEMORY_DEFAULT,
                               .from = job->from->path,
                               .sd = job->sd,
                               .allow_missing = job->opts.open.allow_missing,
                               .ties = job->ties.items,
                               .tie_count = job->ties.count,
                               .may_be_unnamed = !is_copied};
    *report_out = job->seen;
    job->seen = (fsdp_export_report){0};
    bool is_whole = asks_for_model(job) && job->opts.select.only != FSDP_ONLY_ALL;
    if (report_out->model[0] || !is_whole || !check.config || is_adapter(job->from, job->sd))
        return FSDP_OK;
    return fsdp_export_compare(&check, report_out, err);
}

/*
 * Names for loaders: what programs put around the names of a model (the key above it, elements of wrappers)
 * is stripped for targets that hold a model. The stripping is a list of rename rules, so that plans and
 * fsdp-diff know it. See convert_job.h.
 */
#include "statedict/convert/convert_job.h"

#include "formats/frameworks.h"
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

/* The model_type of the config.json that the person names or that lies beside the weights. One that cannot be
 * read is no reason to refuse the weights: nothing is known then. */
static fsdp_status read_model_type(convert_job *job, fsdp_error *err)
{
    enum { CONFIG_MOST = 1 << 24 };
    const char *dir = job->opts.copy_from;
    char *beside = NULL, *text = NULL;
    size_t size;
    fsdp_model_config config;
    if (!dir)
        FSDP_TRY(fsdp_framework_config(job->io, job->from->path, &beside, err));
    dir = dir ? dir : beside;
    char *path = dir ? fsdp_path_join(dir, "config.json") : NULL;
    fsdp_free(beside);
    if (path && fsdp_io_read_file(job->io, path, CONFIG_MOST, &text, &size, NULL) == FSDP_OK &&
        fsdp_model_config_read(text, size, path, &config, NULL) == FSDP_OK &&
        config.model_type[0]) {
        memcpy(job->model_type, config.model_type, sizeof job->model_type);
        job->known.model_type = job->model_type;
    }
    fsdp_free(text);
    fsdp_free(path);
    return FSDP_OK;
}

fsdp_status fsdp_convert_fit_names(convert_job *job, fsdp_error *err)
{
    const fsdp_select_opts *select = &job->opts.select;
    fsdp_parts parts;
    size_t count = 0;
    bool is_model = job->limits && job->limits->for_loaders &&
                    (select->only == FSDP_ONLY_DEFAULT || select->only == FSDP_ONLY_MODEL);
    job->known.paths = job->from->source != NULL;
    if (is_model && !job->known.paths)
        FSDP_TRY(read_model_type(job, err));
    if (!is_model || select->keep_names || select->rename_count > 0)
        return FSDP_OK;
    FSDP_TRY(fsdp_parts_find(job->from->manifest.sd, job->known, select->part, &parts, err));
    FSDP_TRY(fsdp_parts_add_rules(&parts, &job->rules, &count, err));
    return count > 0 ? take_rules(job, count, err) : FSDP_OK;
}

/*
 * Names for loaders: what programs put around the names of a model (the key above it, elements of wrappers)
 * is stripped for targets that hold a model. The stripping is a list of rename rules, so that plans and
 * fsdp-diff know it. See convert_job.h.
 */
#include "statedict/convert/convert_job.h"

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
    bool is_model = job->limits && job->limits->for_loaders &&
                    (select->only == FSDP_ONLY_DEFAULT || select->only == FSDP_ONLY_MODEL);
    if (!is_model || select->keep_names || select->rename_count > 0)
        return FSDP_OK;
    FSDP_TRY(fsdp_parts_find(job->from->manifest.sd, job->from->source != NULL, select->part,
                             &parts, err));
    FSDP_TRY(fsdp_parts_add_rules(&parts, &job->rules, &count, err));
    return count > 0 ? take_rules(job, count, err) : FSDP_OK;
}

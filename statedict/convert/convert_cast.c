/* Casting in a conversion into our own format: see convert.c. The casting itself is recast.c's. */
#include "statedict/convert/convert_internal.h"

fsdp_dtype fsdp_convert_source_dtype(const convert_job *job, size_t entry)
{
    return fsdp_sd_at(job->from->manifest.sd, job->source[entry])->dtype;
}

fsdp_status fsdp_convert_cast(convert_job *job, size_t entry, const fsdp_want *wants,
                              const int *files, size_t count, fsdp_error *err)
{
    const fsdp_entry *tensor = fsdp_sd_at(job->sd, entry);
    fsdp_dtype from = fsdp_convert_source_dtype(job, entry);
    for (size_t i = 0; i < count && from != tensor->dtype; i++) {
        fsdp_cast_tally tally = {0};
        fsdp_recast_box box = {.name = tensor->name,
                               .name_size = tensor->name_size,
                               .box = &wants[i].box,
                               .from = from,
                               .to = tensor->dtype,
                               .source = wants[i].data};
        FSDP_TRY(fsdp_recast(&box, job->opts->select.on_overflow, &tally, err));
        fsdp_cast_sum_add(&job->cast_sums[files[i]], &tally);
    }
    return FSDP_OK;
}

void fsdp_convert_report_casts(const convert_job *job, const fsdp_convert_plan *plan)
{
    fsdp_cast_tally sum = {0};
    for (int file = 0; file < job->file_count && job->casts; file++) {
        fsdp_cast_tally tally = fsdp_cast_sum_get(&job->cast_sums[file]);
        fsdp_cast_tally_add(&sum, &tally);
    }
    fsdp_cast_report_fill(job->opts->cast, &sum, plan);
}

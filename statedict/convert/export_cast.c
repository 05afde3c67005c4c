/* Reading for an export, and casting what was read: see export.c. The casting itself is recast.c's. */
#include "statedict/convert/export_internal.h"

fsdp_dtype fsdp_export_source_dtype(const export_job *job, size_t entry)
{
    const fsdp_sd *from = job->from->manifest.sd;
    return fsdp_sd_at(from, fsdp_export_tensor_of(from, job->source[entry]))->dtype;
}

size_t fsdp_export_element_room(const export_job *job, size_t entry)
{
    return fsdp_recast_size(fsdp_export_source_dtype(job, entry), job->entries[entry].dtype);
}

fsdp_status fsdp_export_read(export_job *job, const export_slab *slab, char *data,
                             fsdp_getter *getter, fsdp_cast_tally *tally, fsdp_error *err)
{
    const fsdp_target_entry *entry = &job->entries[slab->entry];
    fsdp_dtype from = fsdp_export_source_dtype(job, slab->entry);
    size_t tensor = fsdp_export_tensor_of(job->from->manifest.sd, job->source[slab->entry]);
    fsdp_want want = {slab->box, from, fsdp_recast_source(data, slab->count, from, entry->dtype)};
    FSDP_TRY(fsdp_checkpoint_get(job->from, tensor, &want, 1, getter, NULL, err));
    fsdp_recast_box box = {.name = entry->name,
                           .name_size = entry->name_size,
                           .box = &slab->box,
                           .from = from,
                           .to = entry->dtype,
                           .source = want.data};
    return fsdp_recast(&box, job->opts->select.on_overflow, tally, err);
}

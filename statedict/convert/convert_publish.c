/* The end of a conversion into our own format: a directory with a manifest, or one file that holds it. */
#include "statedict/convert/convert_internal.h"

#include "statedict/checkpoint/one_file.h"
#include "statedict/save/publish.h"

static fsdp_manifest target_manifest(const convert_job *job)
{
    fsdp_manifest manifest = job->from->manifest;
    manifest.kind = job->opts->kind;
    manifest.world = job->world;
    manifest.owners = FSDP_OWNERS_BALANCED;
    manifest.compressed = job->opts->compress;
    manifest.sd = job->sd;
    manifest.file_count = job->file_count;
    return manifest;
}

fsdp_status fsdp_convert_publish(convert_job *job, fsdp_error *err)
{
    fsdp_publication publication = {.staging = &job->staging,
                                    .manifest = target_manifest(job),
                                    .seals = job->seals,
                                    .owners = job->owners,
                                    .with_view = !job->opts->no_view,
                                    .watch = &job->watch};
    return fsdp_publish(&publication, err);
}

/* The data was read back; here it is that the file is found to be a checkpoint. */
static fsdp_status check_one_file(const convert_job *job, fsdp_error *err)
{
    fsdp_checkpoint *written = NULL;
    FSDP_TRY(fsdp_checkpoint_open(job->place.path, job->io, &written, err));
    bool same =
        written->is_one_file && fsdp_sd_count(written->manifest.sd) == fsdp_sd_count(job->sd);
    fsdp_checkpoint_close(written);
    return same ? FSDP_OK
                : fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' does not come back as it was written",
                            job->place.path);
}

fsdp_status fsdp_convert_publish_file(convert_job *job, fsdp_error *err)
{
    const fsdp_shard_seal *seal = &job->seals[0];
    fsdp_manifest manifest = target_manifest(job);
    fsdp_manifest_file file = {seal->size, seal->index_offset, seal->index_size, seal->index_hash};
    manifest.files = &file;
    FSDP_TRY(fsdp_one_file_append(job->io, job->place.path, &manifest, job->place.durable, err));
    if (!job->opts->no_verify)
        FSDP_TRY(check_one_file(job, err));
    return fsdp_export_publish(&job->place, err);
}

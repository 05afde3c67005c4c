/* A conversion into a native checkpoint in one file ("fsdp-file"): a full shard file that holds its manifest
 * (one_file.h). It is staged and published like a file for other programs. See convert_job.h. */
#include "statedict/convert/native_target.h"

#include "statedict/checkpoint/one_file.h"

static fsdp_status check_place(const convert_job *job, fsdp_error *err)
{
    return fsdp_output_check(&job->place, job->from, job->to, err);
}

static fsdp_status begin(convert_job *job, fsdp_error *err)
{
    if (job->opts.resume)
        fsdp_notice(&job->opts.watch,
                    "an interrupted conversion to format %s cannot be resumed: starting anew",
                    job->format->name);
    return fsdp_output_begin(&job->place, job->to, err);
}

/* Opens the result as a checkpoint; its data was compared before. */
static fsdp_status check_whole(const convert_job *job, fsdp_error *err)
{
    fsdp_checkpoint *written = NULL;
    FSDP_TRY(fsdp_checkpoint_open(job->place.path, &(fsdp_open_opts){.access.disk = job->io},
                                  &written, err));
    bool same =
        written->is_one_file && fsdp_sd_count(written->manifest.sd) == fsdp_sd_count(job->sd);
    fsdp_checkpoint_close(written);
    return same ? FSDP_OK
                : fsdp_fail(err, FSDP_ERR_IO, "'%s' differs from the bytes written",
                            job->place.path);
}

static fsdp_status publish(convert_job *job, fsdp_error *err)
{
    const fsdp_file_record *record = ((const native_files *)job->files)->records;
    fsdp_manifest manifest = fsdp_native_manifest(job);
    fsdp_manifest_file file = {record->size, record->index_offset, record->index_size,
                               record->index_hash};
    manifest.files = &file;
    FSDP_TRY(fsdp_one_file_append(job->io, job->place.path, &manifest, job->place.durable, err));
    if (!job->opts.skip_verify)
        FSDP_TRY(check_whole(job, err));
    return fsdp_output_publish(&job->place, err);
}

static fsdp_status end(convert_job *job, fsdp_status status, fsdp_error *err)
{
    fsdp_native_release(job);
    fsdp_output_end(&job->place, status == FSDP_OK ? NULL : err);
    return status;
}

const convert_target_ops fsdp_one_file_target = {.is_ordered = true,
                                                 .declare = fsdp_native_declare,
                                                 .room = fsdp_native_room,
                                                 .measure = fsdp_native_measure,
                                                 .list = fsdp_native_list,
                                                 .check_place = check_place,
                                                 .begin = begin,
                                                 .create = fsdp_native_create,
                                                 .write = fsdp_native_write,
                                                 .finish = fsdp_native_finish,
                                                 .check = fsdp_native_check,
                                                 .publish = publish,
                                                 .end = end};

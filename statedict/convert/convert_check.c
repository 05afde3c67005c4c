/*
 * Files that a conversion wrote: read back before they are published, or found by one that goes on with what
 * another one left. See convert.c.
 */
#include "statedict/convert/convert_internal.h"

#include "base/core/pool.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/checkpoint/foreign.h"

#include <string.h>

char *fsdp_convert_staged_path(const convert_job *job, int file)
{
    char name[FSDP_SHARD_NAME_SIZE];
    if (job->place.format)
        return fsdp_strndup(job->place.path, strlen(job->place.path));
    fsdp_shard_name(file, job->file_count, name);
    return fsdp_path_join(job->staging.path, name);
}

fsdp_shard_id fsdp_convert_file_id(const convert_job *job, int file)
{
    fsdp_shard_id id = {
        .step = job->from->manifest.step, .rank = (uint32_t)file, .world = (uint32_t)job->world};
    memcpy(id.run, job->from->manifest.run, sizeof id.run);
    return id;
}

/* --- reading back ----------------------------------------------------------------------------- */

static fsdp_status check_block(convert_job *job, fsdp_getter *getter, fsdp_shard_reader *reader,
                               const fsdp_stored_box *box, int64_t block, fsdp_error *err)
{
    int64_t first, count;
    FSDP_TRY(fsdp_check_block(getter, reader, box, block, err));
    fsdp_block_range(box, block, &first, &count);
    return fsdp_meter_add(&job->meter, count * (int64_t)box->element_size, box->name,
                          box->name_size, err);
}

fsdp_status fsdp_convert_check_file(void *user, size_t number, fsdp_error *err)
{
    convert_job *job = user;
    size_t file = (size_t)job->first_file + number;
    fsdp_shard_reader *reader = NULL;
    fsdp_getter getter = {0};
    fsdp_shard_id id = fsdp_convert_file_id(job, (int)file);
    char *path = fsdp_convert_staged_path(job, (int)file);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = fsdp_shard_open(job->io, path, &job->seals[file], &id, &reader, err);
    for (size_t i = 0; st == FSDP_OK && i < fsdp_shard_box_count(reader); i++) {
        const fsdp_stored_box *box = fsdp_shard_box_at(reader, i);
        for (int64_t block = 0; st == FSDP_OK && block < box->block_count; block++)
            st = check_block(job, &getter, reader, box, block, err);
    }
    fsdp_getter_release(&getter);
    fsdp_shard_close(reader);
    fsdp_free(path);
    return st;
}

/* --- going on --------------------------------------------------------------------------------- */

size_t fsdp_convert_note_size(const convert_job *job)
{
    return job->casts ? sizeof(fsdp_finished_file) : sizeof(fsdp_shard_seal);
}

/* A file that was noted as finished is kept when every block of it has its hash. */
static fsdp_status keep_file(void *user, size_t file, fsdp_error *err)
{
    convert_job *job = user;
    fsdp_error why = {0};
    fsdp_finished_file note = {0};
    if (!fsdp_resume_get(&job->notes, (int64_t)file, &note, fsdp_convert_note_size(job)))
        return FSDP_OK;
    job->seals[file] = note.seal;
    fsdp_status st = fsdp_convert_check_file(job, file, &why);
    if (st == FSDP_ERR_CANCELLED && err)
        *err = why;
    job->is_kept[file] = st == FSDP_OK;
    if (st == FSDP_OK && job->casts)
        fsdp_cast_sum_add(&job->cast_sums[file], &note.tally);
    return st == FSDP_ERR_CANCELLED ? st : FSDP_OK;
}

fsdp_status fsdp_convert_keep_files(convert_job *job, fsdp_error *err)
{
    FSDP_TRY(fsdp_parallel(job->threads, (size_t)job->file_count, keep_file, job, err));
    for (int i = 0; i < job->file_count; i++)
        job->kept_bytes += job->is_kept[i] ? job->seals[i].size : 0;
    return FSDP_OK;
}

/* --- where it is to be ------------------------------------------------------------------------ */

static fsdp_status check_file_target(const convert_job *job, const char *to, fsdp_error *err)
{
    int64_t step;
    if (fsdp_dir_is_step(to, &step))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is the name of a step of a run, which is a directory: give the file "
                         "another name",
                         to);
    if (fsdp_foreign_takes_in(job->from, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' would lie in '%s', which is converted: convert to another place", to,
                         job->from->path);
    if (fsdp_foreign_reads(job->from, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is a file of '%s', which is converted: convert to another name", to,
                         job->from->path);
    return fsdp_export_check(&job->place, to, err);
}

fsdp_status fsdp_convert_check_target(const convert_job *job, const char *to, fsdp_error *err)
{
    if (fsdp_paths_are_same(job->io, job->from->path, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' and '%s' are the same checkpoint: convert to another name",
                         job->from->path, to);
    if (job->place.format)
        return check_file_target(job, to, err);
    if (job->from->source && fsdp_foreign_takes_in(job->from, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' would lie in '%s', which is converted: convert to another place", to,
                         job->from->path);
    FSDP_TRY(fsdp_name_check_step(to, job->from->manifest.step, err));
    return fsdp_place_check(job->io, to, job->opts->overwrite, err);
}

/*
 * A conversion into the native format: shard files in a directory, or in one file ("fsdp-file").
 *
 * Files are written in groups whose records fit the budget. A block of the source that two groups need is
 * read twice. An encoded target has one worker, with all threads on each of its slabs, because the order of
 * frames in a file must not depend on the number of workers. See convert_job.h.
 */
#include "base/io/io_reuse.h"
#include "base/core/pool.h"
#include "statedict/checkpoint/one_file.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/convert/convert_job.h"
#include "statedict/save/publish.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

/* === shard files ============================================================================== */

typedef struct native_files {
    fsdp_save_plan *plans; /* per file */
    fsdp_shard_writer **writers;
    fsdp_file_record *records;
    fsdp_encoder *encoder;
    fsdp_resume notes; /* of finished files */
} native_files;

/* --- before the first byte -------------------------------------------------------------------- */

/* Functions of convert_target_ops. */
static fsdp_status native_declare(convert_job *job, const fsdp_selection *selection,
                                  fsdp_error *err)
{
    size_t n = (size_t)job->file_count;
    native_files *files = job->files = fsdp_alloc(1, sizeof *files);
    (void)selection;
    if (!files)
        return fsdp_fail_memory(err, "a conversion");
    files->plans = fsdp_alloc(n, sizeof *files->plans);
    files->writers = fsdp_alloc(n, sizeof *files->writers);
    files->records = fsdp_alloc(n, sizeof *files->records);
    job->is_kept = fsdp_alloc(n, sizeof *job->is_kept);
    return files->plans && files->writers && files->records && job->is_kept
               ? FSDP_OK
               : fsdp_fail_memory(err, "a conversion");
}

static convert_room native_room(const convert_job *job)
{
    enum { CHUNK_LEAST = 64 << 10 };
    const fsdp_manifest *source = &job->from->manifest;
    int64_t records = fsdp_save_plan_room(job->sd, job->kind, 0), indexes = 0;
    for (int i = 0; i < source->file_count; i++)
        indexes += source->files[i].index_size;
    return (convert_room){
        .fixed = fsdp_sd_room(source->sd) + fsdp_sd_room(job->sd) + indexes * 8 / 5,
        .per_thread = 2 * records,
        .per_file = records + (job->opts.compress ? FSDP_OPEN_LAYOUT_BYTES + CHUNK_LEAST : 0),
        .slab_least = FSDP_BLOCK_BYTES,
        .slab_most = 32 << 20};
}

static fsdp_status native_measure(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    (void)err;
    plan->files = job->file_count;
    plan->bytes_written = job->tensor_bytes;
    return FSDP_OK;
}

static fsdp_status plan_file(const convert_job *job, int file, fsdp_save_plan *plan,
                             fsdp_error *err)
{
    fsdp_box_plan_input input = {job->sd, job->kind, job->opts.compress, job->owners, file};
    return fsdp_box_plan_save(&input, plan, err);
}

static fsdp_status list_file(const convert_job *job, int file, convert_part_visit visit,
                             void *context, fsdp_error *err)
{
    fsdp_save_plan plan = {0};
    char name[FSDP_SHARD_NAME_SIZE] = "";
    if (job->format->writes_directory)
        fsdp_shard_name(file, job->file_count, name);
    FSDP_TRY(plan_file(job, file, &plan, err));
    fsdp_status st = visit(context, name, CONVERT_NO_PART, NULL, err);
    for (size_t i = 0; i < plan.box_count && st == FSDP_OK; i++) {
        fsdp_box box = fsdp_shard_box_box(&plan.boxes[i]);
        if (fsdp_sd_at(job->sd, plan.boxes[i].tensor)->kind == FSDP_ENTRY_TENSOR)
            st = visit(context, name, plan.boxes[i].tensor, &box, err);
    }
    fsdp_save_plan_release(&plan);
    return st;
}

static fsdp_status native_list(convert_job *job, convert_part_visit visit, void *context,
                               fsdp_error *err)
{
    for (int file = 0; file < job->file_count; file++)
        FSDP_TRY(list_file(job, file, visit, context, err));
    return FSDP_OK;
}

static fsdp_status check_place(const convert_job *job, fsdp_error *err)
{
    if (fsdp_paths_are_same(job->io, job->from->path, job->to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' and '%s' are the same checkpoint; convert to another path",
                         job->from->path, job->to);
    FSDP_TRY(fsdp_place_check_parent(job->io, job->to, err));
    FSDP_TRY(fsdp_checkpoint_refuse_inside(job->from, job->to, err));
    FSDP_TRY(fsdp_name_check_step(job->to, job->from->manifest.step, err));
    return fsdp_place_check(job->io, job->to, job->opts.overwrite, err);
}

/* --- a group of files ------------------------------------------------------------------------- */

/* The path of a staged file in new memory; NULL without memory. */
static char *staged_path(const convert_job *job, int file)
{
    char name[FSDP_SHARD_NAME_SIZE];
    if (job->place.path)
        return fsdp_strndup(job->place.path, strlen(job->place.path));
    fsdp_shard_name(file, job->file_count, name);
    return fsdp_path_join(job->staging.path, name);
}

static fsdp_shard_id file_id(const convert_job *job, int file)
{
    fsdp_shard_id id = {
        .step = job->from->manifest.step, .rank = (uint32_t)file, .world = (uint32_t)job->world};
    memcpy(id.run, job->from->manifest.run, sizeof id.run);
    return id;
}

static fsdp_status create_file(convert_job *job, int file, fsdp_error *err)
{
    native_files *files = job->files;
    fsdp_save_plan *plan = &files->plans[file];
    FSDP_TRY(plan_file(job, file, plan, err));
    char *path = staged_path(job, file);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    if (job->opts.compress &&
        job->staging.is_taken_up) /* an unfinished compressed file is of no use */
        (void)job->io->ops->unlink(job->io, path);
    fsdp_shard_opts opts = {.io = job->reuse && !job->opts.compress ? job->reuse : job->io,
                            .path = path,
                            .id = file_id(job, file),
                            .encode = job->opts.compress,
                            .level = job->opts.level,
                            .chunk_bytes = job->chunk_bytes,
                            .encoder = files->encoder,
                            .threads = 1,
                            .sync = !job->opts.skip_fsync};
    fsdp_status st =
        fsdp_shard_create(&opts,
                          &(fsdp_shard_layout){plan->datasets, plan->dataset_count, plan->links,
                                               plan->link_count, plan->boxes, plan->box_count},
                          &files->writers[file], err);
    fsdp_free(path);
    return st == FSDP_OK ? fsdp_put_plan(files->writers[file], plan, NULL, NULL, err) : st;
}

static fsdp_status native_create(convert_job *job, fsdp_error *err)
{
    native_files *files = job->files;
    if (job->opts.compress && !files->encoder)
        FSDP_TRY(fsdp_encoder_create(job->threads, job->opts.level, job->chunk_bytes,
                                     &files->encoder, err));
    for (int file = job->first_file; file < job->end_file; file++)
        FSDP_TRY(create_file(job, file, err));
    return FSDP_OK;
}

static fsdp_status native_write(convert_job *job, const convert_piece *piece, fsdp_error *err)
{
    native_files *files = job->files;
    size_t box = fsdp_save_plan_find(&files->plans[piece->rank], piece->entry, piece->part);
    fsdp_shard_piece run = {box, piece->first, piece->count, piece->data};
    return fsdp_shard_write(files->writers[piece->rank], &run, 1, err);
}

/* The journal's record of a finished file; the tally only when tensors are cast. */
typedef struct file_note {
    fsdp_file_record record;
    fsdp_cast_tally tally;
} file_note;

static size_t note_size(const convert_job *job)
{
    return job->casts ? sizeof(file_note) : sizeof(fsdp_file_record);
}

static fsdp_status finish_file(void *context, size_t number, fsdp_error *err)
{
    convert_job *job = context;
    native_files *files = job->files;
    size_t file = (size_t)job->first_file + number;
    fsdp_shard_writer *writer = files->writers[file];
    files->writers[file] = NULL;
    fsdp_status st = fsdp_shard_finish(writer, &files->records[file], err);
    file_note note = {files->records[file], fsdp_cast_sum_get(&job->cast_sums[file])};
    if (st == FSDP_OK)
        fsdp_resume_put(&files->notes, (int64_t)file, &note, note_size(job));
    fsdp_save_plan_release(&files->plans[file]);
    return st;
}

static size_t group_size(const convert_job *job)
{
    return (size_t)(job->end_file - job->first_file);
}

static fsdp_status native_finish(convert_job *job, fsdp_error *err)
{
    return fsdp_parallel(job->threads, group_size(job), finish_file, job, err);
}

/* --- reading back ----------------------------------------------------------------------------- */

static fsdp_status check_box(convert_job *job, fsdp_block_reader *block_reader,
                             fsdp_shard_reader *reader, const fsdp_stored_box *box, fsdp_error *err)
{
    for (int64_t block = 0; block < box->block_count; block++) {
        int64_t first, count;
        FSDP_TRY(fsdp_check_block(block_reader, reader, box, block, err));
        fsdp_block_range(box, block, &first, &count);
        FSDP_TRY(fsdp_meter_add(&job->meter, count * (int64_t)box->element_size, box->name,
                                box->name_size, err));
    }
    return FSDP_OK;
}

/* Compares every block with its hash. */
static fsdp_status check_file(void *context, size_t number, fsdp_error *err)
{
    convert_job *job = context;
    const native_files *files = job->files;
    size_t file = (size_t)job->first_file + number;
    fsdp_shard_reader *reader = NULL;
    fsdp_block_reader block_reader = {0};
    fsdp_shard_id id = file_id(job, (int)file);
    char *path = staged_path(job, (int)file);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = fsdp_shard_open(job->io, path, &files->records[file], &id, &reader, err);
    for (size_t i = 0; st == FSDP_OK && i < fsdp_shard_box_count(reader); i++)
        st = check_box(job, &block_reader, reader, fsdp_shard_box_at(reader, i), err);
    fsdp_block_reader_release(&block_reader);
    fsdp_shard_close(reader);
    fsdp_free(path);
    return st;
}

static fsdp_status native_check(convert_job *job, fsdp_error *err)
{
    return fsdp_parallel(job->threads, group_size(job), check_file, job, err);
}

/* --- begin, publish --------------------------------------------------------------------------- */

/* Keeps a file that was recorded as finished if every block matches its hash. */
static fsdp_status keep_file(void *context, size_t file, fsdp_error *err)
{
    convert_job *job = context;
    native_files *files = job->files;
    fsdp_error why = {0};
    file_note note = {0};
    if (!fsdp_resume_get(&files->notes, (int64_t)file, &note, note_size(job)))
        return FSDP_OK;
    files->records[file] = note.record;
    fsdp_status st = check_file(job, file, &why);
    if (st == FSDP_ERR_CANCELLED && err)
        *err = why;
    job->is_kept[file] = st == FSDP_OK;
    if (st == FSDP_OK)
        fsdp_cast_sum_add(&job->cast_sums[file], &note.tally);
    return st == FSDP_ERR_CANCELLED ? st : FSDP_OK;
}

static fsdp_status keep_files(convert_job *job, fsdp_error *err)
{
    const native_files *files = job->files;
    FSDP_TRY(fsdp_parallel(job->threads, (size_t)job->file_count, keep_file, job, err));
    for (int i = 0; i < job->file_count; i++)
        job->kept_bytes += job->is_kept[i] ? files->records[i].size : 0;
    return fsdp_io_reuse_create(job->io, &job->reuse, err);
}

static fsdp_status begin(convert_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = &job->opts;
    native_files *files = job->files;
    fsdp_staging *staging = &job->staging;
    fsdp_staging_opts how = {.durable = !opts->skip_fsync,
                             .overwrite = opts->overwrite,
                             .hash = opts->resume ? job->hash : NULL,
                             .watch = &opts->watch};
    FSDP_TRY(fsdp_staging_begin(job->io, job->to, &how, staging, err));
    fsdp_resume_begin(&files->notes, job->io, staging->path, job->hash, job->file_count,
                      staging->is_taken_up);
    staging->has_notes = true;
    job->watch = fsdp_staging_watch(staging, &opts->watch);
    if (opts->resume)
        fsdp_resume_notify(&opts->watch, staging->is_taken_up ? staging->path : NULL);
    return staging->is_taken_up ? keep_files(job, err) : FSDP_OK;
}

/* The manifest of the result, without its file records. */
static fsdp_manifest native_manifest(const convert_job *job)
{
    fsdp_manifest manifest = job->from->manifest;
    manifest.kind = job->kind;
    manifest.world = job->world;
    manifest.owners = FSDP_OWNERS_BALANCED;
    manifest.compressed = job->opts.compress;
    manifest.metadata = job->metadata.kept;
    manifest.sd = job->sd;
    manifest.file_count = job->file_count;
    return manifest;
}

static fsdp_status publish(convert_job *job, fsdp_error *err)
{
    const native_files *files = job->files;
    fsdp_publication publication = {.staging = &job->staging,
                                    .manifest = native_manifest(job),
                                    .records = files->records,
                                    .owners = job->owners,
                                    .with_view = !job->opts.skip_view,
                                    .watch = &job->watch};
    return fsdp_publish(&publication, err);
}

/* Closes the files and frees their state; the bytes on the disk stay. */
static void native_release(convert_job *job)
{
    native_files *files = job->files;
    for (int i = 0; files && files->writers && i < job->file_count; i++)
        fsdp_shard_discard(files->writers[i]);
    for (int i = 0; files && files->plans && i < job->file_count; i++)
        fsdp_save_plan_release(&files->plans[i]);
    if (!files)
        return;
    fsdp_encoder_free(files->encoder);
    fsdp_resume_end(&files->notes);
    fsdp_free(files->writers);
    fsdp_free(files->plans);
    fsdp_free(files->records);
    fsdp_free(files);
}

static fsdp_status end(convert_job *job, fsdp_status status, fsdp_error *err)
{
    status = fsdp_staging_judge(&job->staging, status, err);
    native_release(job);
    bool is_kept = job->opts.resume && job->staging.has_notes; /* without them nothing resumes it */
    if (status != FSDP_OK && !is_kept)
        fsdp_staging_abandon(&job->staging, err);
    fsdp_staging_release(&job->staging);
    return status;
}

const convert_target_ops fsdp_directory_target = {.is_ordered = true,
                                                  .declare = native_declare,
                                                  .room = native_room,
                                                  .measure = native_measure,
                                                  .list = native_list,
                                                  .check_place = check_place,
                                                  .begin = begin,
                                                  .create = native_create,
                                                  .write = native_write,
                                                  .finish = native_finish,
                                                  .check = native_check,
                                                  .publish = publish,
                                                  .end = end};

/* === one file ================================================================================= */

/* The file is a full shard file that holds its manifest (one_file.h). It is staged and published like a file
 * for other programs. */

static fsdp_status check_one_file_place(const convert_job *job, fsdp_error *err)
{
    return fsdp_output_check(&job->place, job->from, job->to, err);
}

static fsdp_status begin_one_file(convert_job *job, fsdp_error *err)
{
    if (job->opts.resume)
        fsdp_notice(
            &job->opts.watch,
            "an interrupted conversion to format %s cannot be resumed; starting from the beginning",
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

static fsdp_status publish_one_file(convert_job *job, fsdp_error *err)
{
    const fsdp_file_record *record = ((const native_files *)job->files)->records;
    fsdp_manifest manifest = native_manifest(job);
    fsdp_manifest_file file = {record->size, record->index_offset, record->index_size,
                               record->index_hash};
    manifest.files = &file;
    FSDP_TRY(fsdp_one_file_append(job->io, job->place.path, &manifest, job->place.durable, err));
    if (!job->opts.skip_verify)
        FSDP_TRY(check_whole(job, err));
    return fsdp_output_publish(&job->place, err);
}

static fsdp_status end_one_file(convert_job *job, fsdp_status status, fsdp_error *err)
{
    native_release(job);
    fsdp_output_end(&job->place, status == FSDP_OK ? NULL : err);
    return status;
}

const convert_target_ops fsdp_one_file_target = {.is_ordered = true,
                                                 .declare = native_declare,
                                                 .room = native_room,
                                                 .measure = native_measure,
                                                 .list = native_list,
                                                 .check_place = check_one_file_place,
                                                 .begin = begin_one_file,
                                                 .create = native_create,
                                                 .write = native_write,
                                                 .finish = native_finish,
                                                 .check = native_check,
                                                 .publish = publish_one_file,
                                                 .end = end_one_file};

/* The calls of convert.h, and the loop of a conversion: see convert_job.h. */
#include "statedict/convert/convert_job.h"

#include "base/data/flow.h"
#include "base/io/io_reuse.h"
#include "statedict/convert/convert_io.h"
#include "statedict/convert/plan_notes.h"

#include <string.h>

#include "base/core/given.h"

/* --- the job ---------------------------------------------------------------------------------- */

/* Checks the options. end_job releases the job, also after a failure here. */
static fsdp_status init_job(convert_job *job, const char *to, const fsdp_convert_opts *opts,
                            fsdp_error *err)
{
    *job = (convert_job){.target = &fsdp_directory_target, .to = to};
    job->opts = opts ? *opts : (fsdp_convert_opts){0};
    job->io = fsdp_access_io(&job->opts.open.access);
    job->kind = job->opts.kind;
    FSDP_TRY(fsdp_check_budget(job->opts.threads, job->opts.memory, err));
    if (job->opts.bytes_per_second < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%lld bytes a second is not a valid rate",
                         (long long)job->opts.bytes_per_second);
    if (!job->opts.format || strcmp(job->opts.format, "fsdp") == 0)
        return FSDP_OK;
    job->format = fsdp_target_find(job->opts.format);
    if (!job->format)
        return fsdp_fail(err, FSDP_ERR_USAGE, "there is no format '%.40s' to write",
                         job->opts.format);
    job->place = (fsdp_output_place){.io = job->io,
                                     .format = job->format,
                                     .overwrite = job->opts.overwrite,
                                     .durable = !job->opts.skip_fsync};
    if (job->format->ops) {
        job->target = &fsdp_foreign_target;
        job->limits = &job->format->limits;
        job->kind = FSDP_SHARDED;
        return FSDP_OK;
    }
    job->target = &fsdp_one_file_target;
    job->kind = job->opts.kind = FSDP_FULL;
    return FSDP_OK;
}

/* Closes all files first, because removing a directory needs a descriptor. */
static fsdp_status end_job(convert_job *job, fsdp_status status, fsdp_error *err)
{
    fsdp_checkpoint_close(job->written);
    fsdp_checkpoint_close(job->from);
    status = job->target->end(job, status, err);
    fsdp_io_reuse_free(job->reuse);
    fsdp_copies_release(&job->copies);
    fsdp_export_report_release(&job->seen);
    fsdp_ties_release(&job->ties);
    fsdp_names_release(&job->added);
    fsdp_free(job->rule_list);
    fsdp_free(job->made_config);
    fsdp_free(job->copied_snapshot);
    fsdp_free(job->metadata);
    fsdp_text_release(&job->rules);
    fsdp_free(job->is_kept);
    fsdp_free(job->first_slab);
    fsdp_free(job->hashes);
    fsdp_free(job->written_entry);
    fsdp_free(job->cast_sums);
    fsdp_free(job->owners);
    fsdp_free(job->source);
    fsdp_sd_free(job->sd);
    fsdp_mesh_free(job->mesh);
    return status;
}

/* --- the loop ---------------------------------------------------------------------------------- */

/* Finds the next run of files that were not kept; false after the last. */
static bool next_group(convert_job *job)
{
    int first = job->end_file;
    while (first < job->file_count && job->is_kept && job->is_kept[first])
        first++;
    job->first_file = job->end_file = first;
    while (job->end_file < job->file_count && !(job->is_kept && job->is_kept[job->end_file]) &&
           job->end_file - first < job->group_files)
        job->end_file++;
    return job->end_file > first;
}

static fsdp_status write_group(convert_job *job, fsdp_error *err)
{
    fsdp_flow("statedict/convert/convert.c", "files %d to %d of %d", job->first_file + 1,
              job->end_file, job->file_count);
    job->meter.phase = "write";
    FSDP_TRY(job->target->create(job, err));
    FSDP_TRY(fsdp_convert_move(job, err));
    FSDP_TRY(job->target->finish(job, err));
    if (job->opts.skip_verify)
        return FSDP_OK;
    job->meter.phase = "read back";
    fsdp_flow("statedict/convert/convert.c", "read it back");
    return job->target->check ? job->target->check(job, err) : fsdp_convert_read_back(job, err);
}

static fsdp_status write_target(convert_job *job, fsdp_error *err)
{
    bool is_taken_up = job->staging.is_taken_up || job->place.is_taken_up;
    FSDP_TRY(fsdp_convert_number_slabs(job, err));
    while (next_group(job))
        FSDP_TRY(write_group(job, err));
    if (is_taken_up)
        fsdp_resume_notify_kept(&job->opts.watch, job->kept_bytes + fsdp_io_reuse_kept(job->reuse));
    FSDP_TRY(fsdp_checkpoint_check_unchanged(job->from, err));
    fsdp_flow("statedict/convert/convert.c", "publish");
    return job->target->publish(job, err);
}

static void report_casts(const convert_job *job, const fsdp_convert_plan *plan)
{
    fsdp_cast_tally sum = {0};
    for (int file = 0; file < job->file_count; file++) {
        fsdp_cast_tally tally = fsdp_cast_sum_get(&job->cast_sums[file]);
        fsdp_cast_tally_add(&sum, &tally);
    }
    fsdp_cast_report_fill(job->opts.cast, &sum, plan);
}

static fsdp_status check_source(convert_job *job, const fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_meter_part part = {.meter = &job->meter};
    fsdp_watch watch = fsdp_meter_part_watch(&part);
    int64_t bytes = fsdp_checkpoint_check_bytes(job->from);
    job->meter.phase = "check";
    fsdp_flow("statedict/convert/convert.c", "compare the source with its checksums");
    FSDP_TRY(fsdp_checkpoint_check(job->from, job->threads, &watch, err));
    FSDP_TRY(fsdp_meter_part_end(&part, bytes, err));
    part.done = 0;
    FSDP_TRY(fsdp_convert_compare_digests(job, &watch, err));
    return fsdp_meter_part_end(&part, plan->bytes_checked - bytes, err);
}

static fsdp_status convert(convert_job *job, const char *from, fsdp_convert_plan *plan,
                           fsdp_error *err)
{
    FSDP_TRY(fsdp_convert_prepare(job, from, plan, err));
    job->watch = job->opts.watch;
    /* checks and reading back count as well */
    fsdp_meter_init(&job->meter, &job->watch,
                    plan->bytes_checked + plan->bytes_read +
                        (job->opts.skip_verify ? 0 : job->tensor_bytes));
    if (!job->opts.skip_verify)
        FSDP_TRY(check_source(job, plan, err));
    fsdp_flow("statedict/convert/convert.c", "begin '%s'", job->to);
    FSDP_TRY(job->target->begin(job, err));
    FSDP_TRY(write_target(job, err));
    report_casts(job, plan);
    return FSDP_OK;
}

/* --- the calls -------------------------------------------------------------------------------- */

fsdp_status fsdp_checkpoint_convert(const char *from, const char *to, const fsdp_convert_opts *opts,
                                    fsdp_error *err)
{
    FSDP_NEED(err, from, to);
    convert_job job;
    fsdp_convert_io how;
    fsdp_convert_plan plan = {.free_bytes = -1};
    fsdp_error local = {0};
    err = err ? err : &local;
    fsdp_status st = fsdp_convert_io_begin(&how, opts, err);
    if (st == FSDP_OK) {
        st = init_job(&job, to, &how.opts, err);
        if (st == FSDP_OK)
            st = convert(&job, from, &plan, err);
        st = end_job(&job, st, err);
    }
    fsdp_convert_plan_release(&plan);
    fsdp_convert_io_end(&how);
    return st;
}

fsdp_status fsdp_checkpoint_convert_plan(const char *from, const char *to,
                                         const fsdp_convert_opts *opts, fsdp_convert_plan *plan_out,
                                         fsdp_error *err)
{
    convert_job job;
    FSDP_NEED(err, plan_out);
    *plan_out = (fsdp_convert_plan){.free_bytes = -1};
    FSDP_NEED(err, from, to);
    fsdp_status st = init_job(&job, to, opts, err);
    if (st == FSDP_OK)
        st = fsdp_convert_prepare(&job, from, plan_out, err);
    plan_out->peak_memory += fsdp_convert_io_room(opts);
    return end_job(&job, st, err);
}

fsdp_status fsdp_convert_plan_text(const char *from, const char *to, const fsdp_convert_opts *opts,
                                   const char *path, fsdp_text *text, fsdp_error *err)
{
    convert_job job;
    fsdp_convert_plan plan = {.free_bytes = -1};
    fsdp_status st = init_job(&job, to, opts, err);
    if (st == FSDP_OK)
        st = fsdp_convert_prepare(&job, from, &plan, err);
    if (st == FSDP_OK)
        st = fsdp_plan_check_path(job.from, to, path, err);
    if (st == FSDP_OK)
        st = fsdp_plan_spell(&job, &plan, text, err);
    fsdp_convert_plan_release(&plan);
    return end_job(&job, st, err);
}

/* Two processes may write a plan to one path: each has a temporary name of its own, the last one counts. */
static fsdp_status replace_beside_others(fsdp_io *io, const char *path, const fsdp_text *text,
                                         fsdp_error *err)
{
    char *own;
    FSDP_TRY(fsdp_beside_name(path, FSDP_SUFFIX_STAGING, &own, err));
    fsdp_status st = fsdp_io_replace_file(io, own, text->data, text->size, err);
    if (st == FSDP_OK)
        st = fsdp_io_rename(io, own, path, true, err);
    if (st != FSDP_OK)
        io->ops->unlink(io, own);
    fsdp_free(own);
    return st;
}

fsdp_status fsdp_checkpoint_convert_plan_write(const char *from, const char *to,
                                               const fsdp_convert_opts *opts, const char *path,
                                               fsdp_error *err)
{
    FSDP_NEED(err, from, to, path);
    static const fsdp_convert_opts defaults = {0};
    fsdp_text text = {0};
    opts = opts ? opts : &defaults;
    fsdp_io *io = fsdp_access_io(&opts->open.access);
    fsdp_status st = fsdp_convert_plan_text(from, to, opts, path, &text, err);
    if (st == FSDP_OK)
        st = replace_beside_others(io, path, &text, err);
    fsdp_text_release(&text);
    return st;
}

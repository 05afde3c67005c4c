/* The calls of convert.h, and the loop of a conversion: see convert_job.h. */
#include "statedict/convert/convert_job.h"

#include "base/data/flow.h"
#include "base/io/io_reuse.h"
#include "statedict/convert/convert_io.h"
#include "statedict/convert/plan_notes.h"

/* The next files that lie together and are not there yet; false behind the last. */
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
    fsdp_flow("statedict/convert/convert.c", "files %d to %d of %d", job->first_file + 1, job->end_file,
              job->file_count);
    FSDP_TRY(job->target->create(job, err));
    FSDP_TRY(fsdp_convert_move(job, err));
    FSDP_TRY(job->target->finish(job, err));
    if (job->opts.no_verify)
        return FSDP_OK;
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
        fsdp_resume_tell_kept(&job->opts.watch, job->kept_bytes + fsdp_io_reuse_kept(job->reuse));
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

static fsdp_status convert(convert_job *job, const char *from, fsdp_convert_plan *plan,
                           fsdp_error *err)
{
    FSDP_TRY(fsdp_convert_prepare(job, from, plan, err));
    if (!job->opts.no_verify) {
        fsdp_flow("statedict/convert/convert.c", "compare the source with its checksums");
        FSDP_TRY(fsdp_checkpoint_check(job->from, job->threads, err));
    }
    job->watch = job->opts.watch;
    /* what is read back counts as well */
    fsdp_meter_init(&job->meter, &job->watch,
                    plan->bytes_read + (job->opts.no_verify ? 0 : job->tensor_bytes));
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
    convert_job job;
    fsdp_convert_io how;
    fsdp_convert_plan plan = {.free_bytes = -1};
    fsdp_error local = {0};
    err = err ? err : &local;
    fsdp_status st = fsdp_convert_io_begin(&how, opts, err);
    if (st == FSDP_OK) {
        st = fsdp_convert_job_init(&job, to, &how.opts, err);
        if (st == FSDP_OK)
            st = convert(&job, from, &plan, err);
        st = fsdp_convert_job_end(&job, st, err);
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
    *plan_out = (fsdp_convert_plan){.free_bytes = -1};
    fsdp_status st = fsdp_convert_job_init(&job, to, opts, err);
    if (st == FSDP_OK)
        st = fsdp_convert_prepare(&job, from, plan_out, err);
    plan_out->peak_memory += fsdp_convert_io_room(opts);
    return fsdp_convert_job_end(&job, st, err);
}

fsdp_status fsdp_convert_plan_text(const char *from, const char *to, const fsdp_convert_opts *opts,
                                   const char *path, fsdp_text *text, fsdp_error *err)
{
    convert_job job;
    fsdp_convert_plan plan = {.free_bytes = -1};
    fsdp_status st = fsdp_convert_job_init(&job, to, opts, err);
    if (st == FSDP_OK)
        st = fsdp_convert_prepare(&job, from, &plan, err);
    if (st == FSDP_OK)
        st = fsdp_plan_check_path(job.from, to, path, err);
    if (st == FSDP_OK)
        st = fsdp_plan_spell(&job, &plan, text, err);
    fsdp_convert_plan_release(&plan);
    return fsdp_convert_job_end(&job, st, err);
}

/* A conversion as an object, and its loop: see convert_job.h. */
#include "statedict/convert/convert_job.h"

#include "base/core/given.h"
#include "base/core/pool.h"
#include "base/data/flow.h"
#include "base/io/io_cache.h"
#include "base/io/io_direct.h"
#include "base/io/io_limit.h"
#include "base/io/io_reuse.h"

#include <inttypes.h>
#include <string.h>

/* --- file operations --------------------------------------------------------------------------- */

/* Layers around the given io that bypass the page cache, limit the rate, and open each file once while the
 * conversion is planned. */
typedef struct convert_io {
    fsdp_convert_opts opts;  /* with open.access through all of them */
    fsdp_io *limit, *direct; /* or NULL */
    fsdp_io *cache;          /* the outermost */
} convert_io;

enum { DIRECT_MOST = 16 << 20, BUFFER_MOST = 1 << 20, BUFFER_LEAST = 64 << 10 };

static int threads_of(const fsdp_convert_opts *opts)
{
    return opts->threads > 0 ? opts->threads : fsdp_pool_cores();
}

static int64_t direct_buffer(const fsdp_convert_opts *opts)
{
    int64_t buffer = DIRECT_MOST / threads_of(opts);
    return buffer < BUFFER_LEAST ? BUFFER_LEAST : buffer > BUFFER_MOST ? BUFFER_MOST : buffer;
}

/* Memory of these layers for all threads together. */
static int64_t io_room(const fsdp_convert_opts *opts)
{
    return opts && opts->direct ? direct_buffer(opts) * threads_of(opts) : 0;
}

static fsdp_status make_io(convert_io *how, fsdp_error *err)
{
    fsdp_convert_opts *opts = &how->opts;
    fsdp_io *io = fsdp_access_io(&opts->open.access);
    if (opts->bytes_per_second > 0) {
        fsdp_io_limit_opts limit = {.bytes_per_second = opts->bytes_per_second,
                                    .stopped = opts->watch.stopped,
                                    .context = opts->watch.context};
        FSDP_TRY(fsdp_io_limit_create(io, &limit, &how->limit, err));
        io = how->limit;
    }
    if (opts->direct) {
        FSDP_TRY(fsdp_io_direct_create(io, (size_t)direct_buffer(opts), &how->direct, err));
        io = how->direct;
    }
    FSDP_TRY(fsdp_io_cache_create(io, &how->cache, err));
    opts->open.access.disk = how->cache;
    return FSDP_OK;
}

/* opts NULL: the defaults. The struct must not move until end_io. */
static fsdp_status begin_io(convert_io *how, const fsdp_convert_opts *opts, fsdp_error *err)
{
    *how = (convert_io){.opts = opts ? *opts : (fsdp_convert_opts){0}};
    if (how->opts.bytes_per_second < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%" PRId64 " bytes a second is not a valid rate",
                         how->opts.bytes_per_second);
    return make_io(how, err);
}

/* Call after all files are closed. A notice names files for which the page cache was used nevertheless. */
static void end_io(convert_io *how)
{
    if (how->direct && fsdp_io_direct_refusals(how->direct) > 0)
        fsdp_notice(&how->opts.watch,
                    "the file system cannot bypass the page cache: its files were read through it");
    fsdp_io_cache_free(how->cache);
    fsdp_io_direct_free(how->direct);
    fsdp_io_limit_free(how->limit);
}

/* --- the job ---------------------------------------------------------------------------------- */

/* A conversion runs once, and not after its plan failed. */
typedef enum conversion_state {
    CONVERSION_FAILED,
    CONVERSION_PLANNED,
    CONVERSION_DONE
} conversion_state;

struct fsdp_conversion {
    conversion_state state;
    bool has_ended; /* its target has */
    convert_io how;
    convert_job job;
    fsdp_convert_plan plan;
    fsdp_convert_order *order; /* that it applies, or NULL */
};

/* Checks the options. release_job releases the job, also after a failure here. */
static fsdp_status init_job(convert_job *job, const char *to, const fsdp_convert_opts *opts,
                            fsdp_error *err)
{
    *job = (convert_job){.target = &fsdp_directory_target, .to = to, .opts = *opts};
    job->io = fsdp_access_io(&job->opts.open.access);
    job->kind = job->opts.kind;
    FSDP_TRY(fsdp_check_budget(job->opts.threads, job->opts.memory, err));
    job->format = fsdp_format_to(job->opts.format ? job->opts.format : "fsdp");
    if (!job->format)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%.40s' is not a format that can be written",
                         job->opts.format);
    job->place = (fsdp_output_place){.io = job->io,
                                     .format = job->format,
                                     .overwrite = job->opts.overwrite,
                                     .durable = !job->opts.skip_fsync};
    if (job->format->writer->ops) {
        job->target = &fsdp_foreign_target;
        job->kind = FSDP_SHARDED;
    } else if (!job->format->writes_directory) {
        job->target = &fsdp_one_file_target;
        job->kind = job->opts.kind = FSDP_FULL;
    }
    return FSDP_OK;
}

static void release_job(convert_job *job)
{
    fsdp_checkpoint_close(job->written);
    fsdp_checkpoint_close(job->from);
    fsdp_io_reuse_free(job->reuse);
    fsdp_copies_release(&job->copies);
    fsdp_export_report_release(&job->seen);
    fsdp_ties_release(&job->ties);
    fsdp_names_release(&job->added);
    fsdp_free(job->rule_list);
    fsdp_config_release(&job->config);
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

static void report_casts(const convert_job *job)
{
    fsdp_cast_tally sum = {0};
    for (int file = 0; file < job->file_count; file++) {
        fsdp_cast_tally tally = fsdp_cast_sum_get(&job->cast_sums[file]);
        fsdp_cast_tally_add(&sum, &tally);
    }
    fsdp_cast_report_fill(job->opts.cast, &sum, job->facts.selected.cast);
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

static fsdp_status convert(convert_job *job, const fsdp_convert_plan *plan, fsdp_error *err)
{
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
    report_casts(job);
    return FSDP_OK;
}

/* --- the object ------------------------------------------------------------------------------- */

/* Files that the plan looked at are looked at anew from now on. */
static fsdp_status plan_job(fsdp_conversion *conversion, const char *from, const char *to,
                            fsdp_error *err)
{
    convert_job *job = &conversion->job;
    fsdp_convert_plan *plan = &conversion->plan;
    fsdp_status st = init_job(job, to, &conversion->how.opts, err);
    plan->keeps_work = job->target != &fsdp_one_file_target;
    if (st == FSDP_OK)
        st = fsdp_convert_prepare(job, from, plan, err);
    fsdp_io_cache_end(conversion->how.cache);
    plan->peak_memory += io_room(&conversion->how.opts);
    plan->sd = job->from ? job->from->manifest.sd : NULL;
    plan->source = job->from ? plan->source : NULL; /* a failed derivation has closed it */
    return st;
}

static fsdp_status open_conversion(const char *from, const char *to, const fsdp_convert_opts *opts,
                                   fsdp_conversion **conversion_out, fsdp_error *err)
{
    fsdp_conversion *conversion = fsdp_alloc(1, sizeof *conversion);
    if (!conversion)
        return fsdp_fail_memory(err, "a conversion");
    conversion->plan =
        (fsdp_convert_plan){.to = to, .opts = &conversion->job.opts, .free_bytes = -1};
    conversion->job.target = &fsdp_directory_target;
    *conversion_out = conversion;
    FSDP_TRY(begin_io(&conversion->how, opts, err));
    FSDP_TRY(plan_job(conversion, from, to, err));
    conversion->state = CONVERSION_PLANNED;
    return FSDP_OK;
}

fsdp_status fsdp_conversion_open(const char *from, const char *to, const fsdp_convert_opts *opts,
                                 fsdp_conversion **conversion_out, fsdp_error *err)
{
    FSDP_NEED(err, conversion_out);
    *conversion_out = NULL;
    FSDP_NEED(err, from, to);
    return open_conversion(from, to, opts, conversion_out, err);
}

static void take_how(fsdp_convert_opts *planned, const fsdp_convert_opts *how)
{
    planned->open.access = how->open.access;
    planned->threads = how->threads;
    planned->memory = how->memory;
    planned->bytes_per_second = how->bytes_per_second;
    planned->direct = how->direct;
    planned->skip_fsync = how->skip_fsync;
    planned->skip_verify = how->skip_verify;
    planned->resume = how->resume;
    planned->cast = how->cast;
    planned->watch = how->watch;
}

fsdp_status fsdp_conversion_apply(const char *path, const fsdp_convert_opts *opts,
                                  fsdp_conversion **conversion_out, fsdp_error *err)
{
    static const fsdp_convert_opts defaults = {0};
    FSDP_NEED(err, conversion_out);
    *conversion_out = NULL;
    FSDP_NEED(err, path);
    fsdp_convert_order *order;
    opts = opts ? opts : &defaults;
    FSDP_TRY(fsdp_convert_order_open(path, &opts->open.access, &order, err));
    take_how(&order->opts, opts);
    fsdp_status st = fsdp_convert_order_check_files(order, err);
    if (st == FSDP_OK)
        st = open_conversion(order->from, order->to, &order->opts, conversion_out, err);
    if (st == FSDP_OK) {
        fsdp_conversion *conversion = *conversion_out;
        st = fsdp_convert_order_compare(order, &conversion->job, &conversion->plan, err);
        if (st != FSDP_OK)
            conversion->state = CONVERSION_FAILED;
    }
    if (*conversion_out)
        (*conversion_out)->order = order;
    else
        fsdp_convert_order_close(order);
    return st;
}

const fsdp_convert_plan *fsdp_conversion_plan(const fsdp_conversion *conversion)
{
    return conversion ? &conversion->plan : NULL;
}

fsdp_status fsdp_conversion_write_plan(fsdp_conversion *conversion, const char *path,
                                       fsdp_error *err)
{
    FSDP_NEED(err, conversion, path);
    if (conversion->state != CONVERSION_PLANNED)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the conversion of '%s' has no plan to write",
                         conversion->plan.to);
    return fsdp_plan_write(&conversion->job, &conversion->plan, path, err);
}

fsdp_status fsdp_conversion_run(fsdp_conversion *conversion, fsdp_error *err)
{
    FSDP_NEED(err, conversion);
    convert_job *job = &conversion->job;
    fsdp_error local = {0};
    err = err ? err : &local;
    if (conversion->state != CONVERSION_PLANNED)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the conversion of '%s' %s", conversion->plan.to,
                         conversion->state == CONVERSION_DONE ? "has run already"
                                                              : "cannot run: its plan failed");
    conversion->state = CONVERSION_FAILED;
    fsdp_status st = convert(job, &conversion->plan, err);
    fsdp_checkpoint_close(job->written);
    job->written = NULL;
    if (st != FSDP_OK) { /* removing a directory needs a descriptor */
        fsdp_checkpoint_close(job->from);
        job->from = NULL;
        conversion->plan.source = NULL;
        conversion->plan.sd = NULL;
    }
    conversion->has_ended = true;
    FSDP_TRY(job->target->end(job, st, err));
    conversion->state = CONVERSION_DONE;
    return FSDP_OK;
}

static fsdp_status check_done(const fsdp_conversion *conversion, fsdp_error *err)
{
    return conversion->state == CONVERSION_DONE
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE, "the conversion of '%s' has no result yet",
                           conversion->plan.to);
}

fsdp_status fsdp_conversion_result(fsdp_conversion *conversion, fsdp_file_digest_visit visit,
                                   void *context, fsdp_error *err)
{
    FSDP_NEED(err, conversion);
    FSDP_NEED_CALL(err, visit);
    FSDP_TRY(check_done(conversion, err));
    fsdp_status st = fsdp_convert_digests(&conversion->job, visit, context, err);
    if (st != FSDP_OK)
        fsdp_error_prefix(err, "'%s' is written, but its digests could not be computed",
                          conversion->plan.to);
    return st;
}

fsdp_status fsdp_conversion_write_digests(fsdp_conversion *conversion, fsdp_error *err)
{
    FSDP_NEED(err, conversion);
    FSDP_TRY(check_done(conversion, err));
    fsdp_status st = fsdp_convert_write_digests(&conversion->job, err);
    if (st != FSDP_OK)
        fsdp_error_prefix(err, "'%s' is written, but its digests are not", conversion->plan.to);
    return st;
}

void fsdp_conversion_close(fsdp_conversion *conversion)
{
    if (!conversion)
        return;
    convert_job *job = &conversion->job;
    if (!conversion->has_ended)
        (void)job->target->end(job, FSDP_OK, NULL); /* nothing was begun */
    release_job(job);
    fsdp_plan_release(&conversion->plan);
    end_io(&conversion->how);
    fsdp_convert_order_close(conversion->order);
    fsdp_free(conversion);
}

fsdp_status fsdp_checkpoint_convert(const char *from, const char *to, const fsdp_convert_opts *opts,
                                    fsdp_error *err)
{
    FSDP_NEED(err, from, to);
    fsdp_conversion *conversion = NULL;
    fsdp_status st = fsdp_conversion_open(from, to, opts, &conversion, err);
    if (st == FSDP_OK)
        st = fsdp_conversion_run(conversion, err);
    fsdp_conversion_close(conversion);
    return st;
}

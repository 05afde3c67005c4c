/*
 * Exporting: a checkpoint is written for another program, offline and within a memory budget. See
 * export.h; into our own format it is convert.c.
 *
 *   open -> select (selection.c) -> declare every entry -> workers: take a slab, read it, hash it,
 *   write it -> finish -> read back what was written, slab by slab, and compare -> publish
 *
 * A slab is a run of the row-major order of one box, so it has one place in the target.
 */
#include "statedict/convert/export_internal.h"

#include "base/io/io_reuse.h"
#include "base/core/pool.h"
#include "statedict/convert/export_resume.h"
#include "statedict/checkpoint/foreign.h"

#include <string.h>

/* --- moving ----------------------------------------------------------------------------------- */

static fsdp_export_piece piece_of(const export_job *job, int64_t number, const export_slab *slab)
{
    return (fsdp_export_piece){.target = job->target,
                               .number = number,
                               .entry = slab->entry,
                               .box = slab->box_number,
                               .first = slab->first,
                               .size = fsdp_export_slab_size(job, slab),
                               .element_size = fsdp_dtype_size(job->entries[slab->entry].dtype),
                               .casts = job->casts};
}

static fsdp_status move_slab(export_job *job, int64_t number, char *data, fsdp_getter *getter,
                             fsdp_error *err)
{
    export_slab slab;
    fsdp_export_find_slab(job, number, &slab);
    const fsdp_target_entry *entry = &job->entries[slab.entry];
    fsdp_export_piece piece = piece_of(job, number, &slab);
    fsdp_export_done done = {0};
    bool is_there = fsdp_export_is_there(&job->place, &piece, data, &done);
    if (!is_there)
        FSDP_TRY(fsdp_export_read(job, &slab, data, getter, &done.tally, err));
    if (!is_there && !job->opts->no_verify)
        done.hash = fsdp_kernels_get()->hash(data, piece.size);
    job->hashes[number] = done.hash;
    if (job->casts)
        fsdp_cast_sum_add(&job->cast_sum, &done.tally);
    FSDP_TRY(job->format->ops->write(job->target, slab.entry, slab.box_number, slab.first,
                                     slab.count, data, err));
    if (!is_there && !job->opts->no_verify)
        fsdp_export_note(&job->place, &piece, &done);
    int64_t read = slab.count * (int64_t)fsdp_dtype_size(fsdp_export_source_dtype(job, slab.entry));
    return fsdp_meter_add(&job->meter, read, entry->name, entry->name_size, err);
}

static fsdp_status check_slab(export_job *job, int64_t number, char *data, fsdp_getter *getter,
                              fsdp_error *err)
{
    export_slab slab;
    fsdp_export_find_slab(job, number, &slab);
    const fsdp_target_entry *entry = &job->entries[slab.entry];
    fsdp_want want = {slab.box, entry->dtype, data};
    size_t tensor =
        fsdp_export_tensor_of(job->written->manifest.sd, job->written_entry[slab.entry]);
    FSDP_TRY(fsdp_checkpoint_get(job->written, tensor, &want, 1, getter, NULL, err));
    fsdp_hash hash = fsdp_kernels_get()->hash(data, fsdp_export_slab_size(job, &slab));
    if (memcmp(&hash, &job->hashes[number], sizeof hash) != 0) {
        char name[160];
        return fsdp_fail(
            err, FSDP_ERR_IO, "what was written to '%s' does not come back the same: tensor '%s'",
            job->place.path, fsdp_printable(entry->name, entry->name_size, name, sizeof name));
    }
    return fsdp_meter_add(&job->meter, (int64_t)fsdp_export_slab_size(job, &slab), entry->name,
                          entry->name_size, err);
}

static fsdp_status work(void *user, size_t worker, fsdp_error *err)
{
    export_job *job = user;
    fsdp_getter getter = {0};
    char *data = fsdp_alloc_pages((size_t)job->slab_bytes);
    fsdp_status st = data ? FSDP_OK : fsdp_fail_slab(job->slab_bytes, job->threads, err);
    (void)worker;
    for (int64_t i; st == FSDP_OK && (i = atomic_fetch_add(&job->next, 1)) < job->slab_count;)
        st = job->written ? check_slab(job, i, data, &getter, err)
                          : move_slab(job, i, data, &getter, err);
    if (st != FSDP_OK)
        atomic_store(&job->next, job->slab_count);
    fsdp_getter_release(&getter);
    fsdp_free(data);
    return st;
}

static fsdp_status work_on_all(export_job *job, fsdp_error *err)
{
    atomic_store(&job->next, 0);
    return fsdp_parallel(job->threads, (size_t)job->threads, work, job, err);
}

/* --- reading back ----------------------------------------------------------------------------- */

static fsdp_status fail_differs(const export_job *job, size_t i, const char *what, fsdp_error *err)
{
    char name[160];
    const fsdp_target_entry *entry = &job->entries[i];
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' was written to '%s' %s",
                     fsdp_printable(entry->name, entry->name_size, name, sizeof name),
                     job->place.path, what);
}

/* A dict may come back as names of its own. */
static bool may_spread(const fsdp_value *value)
{
    if (value->kind == FSDP_VALUE_DICT)
        return true;
    for (size_t i = 0; value->kind == FSDP_VALUE_LIST && i < value->as.list.count; i++)
        if (may_spread(&value->as.list.items[i]))
            return true;
    return false;
}

/* A list of values may come back as one. */
static bool may_fold(const fsdp_target_entry *entry)
{
    for (size_t i = 0; i < entry->path_count; i++)
        if (entry->path[i] < 0)
            return true;
    return false;
}

static fsdp_status pair_entry(export_job *job, size_t i, fsdp_error *err)
{
    const fsdp_target_entry *entry = &job->entries[i];
    const fsdp_sd *sd = job->written->manifest.sd;
    bool is_only = job->format->limits.nameless && fsdp_sd_count(sd) == 1;
    int64_t found = is_only ? 0 : fsdp_sd_find(sd, entry->name, entry->name_size);
    if (found < 0 && entry->value && (may_spread(entry->value) || may_fold(entry)))
        return FSDP_OK;
    if (found < 0)
        return fail_differs(job, i, "and is not found there", err);
    const fsdp_entry *back = fsdp_sd_at(sd, (size_t)found);
    job->written_entry[i] = (size_t)found;
    if ((back->kind == FSDP_ENTRY_VALUE) != (entry->value != NULL))
        return fail_differs(job, i, "and comes back as another thing", err);
    if (entry->value)
        return FSDP_OK;
    if (back->dtype != entry->dtype || back->ndim != entry->ndim ||
        memcmp(back->shape, entry->shape, (size_t)entry->ndim * sizeof *entry->shape) != 0)
        return fail_differs(job, i, "and comes back in another type or shape", err);
    return FSDP_OK;
}

static fsdp_status read_back(export_job *job, fsdp_error *err)
{
    size_t count = fsdp_sd_count(job->sd);
    FSDP_TRY(fsdp_checkpoint_open(job->place.path, job->io, &job->written, err));
    job->written_entry = fsdp_alloc(count, sizeof *job->written_entry);
    if (!job->written_entry)
        return fsdp_fail_memory(err, "a conversion");
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(pair_entry(job, i, err));
    FSDP_TRY(fsdp_copies_check(&job->copies, job->io, job->place.path, err));
    return work_on_all(job, err);
}

/* --- the call --------------------------------------------------------------------------------- */

static fsdp_status begin(export_job *job, const char *to, fsdp_error *err)
{
    const fsdp_convert_opts *opts = job->opts;
    job->place.hash = job->hash;
    job->place.resume = opts->resume;
    job->place.unit = job->slab_bytes;
    FSDP_TRY(fsdp_export_begin(&job->place, to, err));
    if (opts->resume) {
        fsdp_resume_tell(&opts->watch, job->place.is_taken_up ? job->place.staging : NULL);
        fsdp_export_agree_on_slabs(&job->place, FSDP_EXPORT_SLAB_LEAST, &job->slab_bytes);
    }
    if (job->place.is_taken_up)
        FSDP_TRY(fsdp_io_reuse_create(job->io, &job->reuse, err));
    return fsdp_export_number_slabs(job, err);
}

static fsdp_status write_target(export_job *job, const char *to, fsdp_error *err)
{
    if (!job->opts->no_verify)
        FSDP_TRY(fsdp_checkpoint_check(job->from, job->threads, err));
    FSDP_TRY(begin(job, to, err));
    FSDP_TRY(fsdp_copies_write(&job->copies, job->io, job->place.path, !job->opts->no_sync, err));
    fsdp_target_opts opts = fsdp_export_target_opts(job);
    FSDP_TRY(job->format->ops->create(&opts, &job->target, err));
    fsdp_status st = work_on_all(job, err);
    fsdp_target *target = job->target;
    job->target = NULL;
    if (st == FSDP_OK)
        return job->format->ops->finish(target, err);
    job->format->ops->discard(target);
    return st;
}

fsdp_status fsdp_export(const char *from, const char *to, const fsdp_convert_opts *opts,
                        fsdp_error *err)
{
    export_job job;
    fsdp_convert_plan plan = {.free_bytes = -1};
    FSDP_TRY(fsdp_export_job_init(opts, &job, err));
    fsdp_status st = fsdp_export_prepare(&job, from, to, &plan, err);
    fsdp_meter_init(&job.meter, &opts->watch,
                    plan.bytes_read + (opts->no_verify ? 0 : job.tensor_bytes));
    if (st == FSDP_OK)
        st = write_target(&job, to, err);
    if (st == FSDP_OK && !opts->no_verify)
        st = read_back(&job, err);
    if (st == FSDP_OK && job.place.is_taken_up)
        fsdp_resume_tell_kept(&opts->watch, fsdp_io_reuse_kept(job.reuse));
    if (st == FSDP_OK)
        st = fsdp_export_publish(&job.place, err);
    fsdp_cast_tally tally = fsdp_cast_sum_get(&job.cast_sum);
    if (st == FSDP_OK)
        fsdp_cast_report_fill(opts->cast, &tally, &plan);
    fsdp_convert_plan_release(&plan);
    fsdp_export_job_release(&job, st == FSDP_OK ? NULL : err);
    return st;
}

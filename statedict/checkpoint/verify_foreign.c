/* Verifies checkpoints of other programs: see foreign.h. verify.c verifies native ones. */
#include "statedict/checkpoint/foreign.h"

#include "base/io/io_cache.h"

#include "statedict/checkpoint/verify_code.h"
#include "statedict/checkpoint/verify_values.h"

typedef struct verify_job {
    const fsdp_verify_opts *opts;
    fsdp_verify_summary summary;
    fsdp_stats stats; /* of the current tensor, when deep */
    fsdp_meter meter;
} verify_job;

/* Damage is a finding; failures that stop the work stay errors. */
static fsdp_status judge(verify_job *job, fsdp_status status, const fsdp_error *found,
                         const char *tensor, fsdp_error *err)
{
    bool unreadable = status == FSDP_ERR_IO;
    if (status == FSDP_OK)
        return FSDP_OK;
    if (status != FSDP_ERR_DAMAGED && !unreadable) {
        if (err)
            *err = *found;
        return status;
    }
    job->summary.findings++;
    job->summary.unreadable += unreadable;
    fsdp_finding finding = {
        .file = "", .tensor = tensor, .block = -1, .text = found->text, .unreadable = unreadable};
    if (job->opts->finding)
        job->opts->finding(job->opts->finding_context, &finding);
    return FSDP_OK;
}

static fsdp_status count_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                              const void *data, fsdp_error *err)
{
    verify_job *job = context;
    int64_t bytes = count * (int64_t)fsdp_dtype_size(entry->dtype);
    (void)first;
    if (job->opts->level >= FSDP_VERIFY_DEEP)
        fsdp_stats_add(&job->stats, entry->dtype, data, count);
    job->summary.blocks++;
    job->summary.bytes += bytes;
    return fsdp_meter_add(&job->meter, bytes, entry->name, entry->name_size, err);
}

static fsdp_status read_all(verify_job *job, fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fsdp_error found = {0};
        char name[160];
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        job->summary.tensors++;
        job->stats = (fsdp_stats){0};
        fsdp_status st =
            fsdp_checkpoint_stream(checkpoint, i, job->opts->memory, count_slab, job, &found);
        fsdp_printable(entry->name, entry->name_size, name, sizeof name);
        FSDP_TRY(judge(job, st, &found, name, err));
        if (st == FSDP_OK)
            fsdp_values_report(job->opts, entry, &job->stats, &job->summary.warnings);
    }
    if (job->opts->level >= FSDP_VERIFY_DEEP)
        fsdp_values_match(sd, job->opts, &job->summary.warnings);
    return FSDP_OK;
}

/* Names the files that run code when a program loads them. */
static fsdp_status report_code(verify_job *job, const fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_source *source = checkpoint->source;
    for (size_t i = 0; i < fsdp_source_file_count(source); i++) {
        fsdp_text names = {0};
        const char *name;
        for (size_t n = 0; (name = fsdp_source_code_at(source, i, n)) != NULL; n++)
            fsdp_text_addf(&names, n > 0 ? ", %s" : "%s", name);
        fsdp_status st = FSDP_OK;
        if (names.failed)
            st = fsdp_fail_memory(err, "a finding");
        else if (names.size > 0)
            st = fsdp_code_report(job->opts, fsdp_source_file_path(source, i), "", &names, err);
        job->summary.code_files += names.size > 0;
        fsdp_text_release(&names);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

static fsdp_status verify_opened(verify_job *job, fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    fsdp_error found = {0};
    job->summary.files = checkpoint->info.file_count;
    FSDP_TRY(report_code(job, checkpoint, err));
    if (job->opts->level < FSDP_VERIFY_DATA)
        return FSDP_OK;
    int64_t check_bytes = fsdp_checkpoint_check_bytes(checkpoint);
    fsdp_meter_part part = {.meter = &job->meter};
    fsdp_watch watch = fsdp_meter_part_watch(&part);
    fsdp_meter_init(&job->meter, &job->opts->watch, check_bytes + checkpoint->info.tensor_bytes);
    job->meter.phase = "check";
    fsdp_status st = fsdp_checkpoint_check(checkpoint, job->opts->threads, &watch, &found);
    job->summary.checked_bytes = fsdp_checkpoint_checked_bytes(checkpoint);
    FSDP_TRY(judge(job, st, &found, "", err));
    FSDP_TRY(fsdp_meter_part_end(&part, check_bytes, err)); /* a fault ends the check */
    job->meter.phase = "read";
    FSDP_TRY(read_all(job, checkpoint, err));
    st = fsdp_checkpoint_check_unchanged(checkpoint, &found);
    return judge(job, st, &found, "", err);
}

fsdp_status fsdp_foreign_verify(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                fsdp_verify_summary *summary_out, fsdp_error *err)
{
    verify_job job = {.opts = opts};
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_error found = {0};
    fsdp_io *cache = NULL;
    const fsdp_open_opts open = {.variant = opts->variant};
    FSDP_TRY(fsdp_io_cache_create(io, &cache, err));
    fsdp_status st = fsdp_foreign_open(cache, path, &open, NULL, &checkpoint, &found);
    fsdp_io_cache_end(cache);
    if (st == FSDP_OK)
        st = verify_opened(&job, checkpoint, err);
    else if (st == FSDP_ERR_DAMAGED)
        st = judge(&job, st, &found, "", err);
    else if (err)
        *err = found;
    fsdp_checkpoint_close(checkpoint);
    fsdp_io_cache_free(cache);
    if (summary_out)
        *summary_out = job.summary;
    if (st != FSDP_OK)
        return st;
    if (job.summary.unreadable > 0)
        return fsdp_fail(err, FSDP_ERR_IO, "not all of '%s' could be read", path);
    if (job.summary.findings > 0)
        return fsdp_fail(err, FSDP_DIFFERS, "'%s' is damaged: %lld faults", path,
                         (long long)job.summary.findings);
    return FSDP_OK;
}

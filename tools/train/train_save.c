/*
 * Checkpoints of a training: RUN/step-N, and another format next to it. A save in the background is begun
 * here and ended by the next one, by the first step after its end, or by the end of the training. See
 * train.h.
 */
#include "tools/train/train.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A checkpoint that is there. */
typedef struct saved_step {
    int64_t step, bytes; /* bytes of this rank */
    double stall_ms, write_ms;
} saved_step;

/* --- another format ------------------------------------------------------------------------------ */

static const char *const formats[] = {NULL, "dcp", "hf"}; /* of save.also */

/* RUN/hf/N or RUN/dcp/N, by rank 0: a directory step-N is always a native checkpoint. Retention removes
 * copies with their steps. */
static fsdp_status convert(const train_job *job, int64_t step, fsdp_error *err)
{
    const char *format = formats[job->config->save.also], *run = job->opts->run;
    char from[PATH_MAX], folder[PATH_MAX], to[PATH_MAX];
    const fsdp_convert_opts opts = {
        .format = format, .overwrite = true, .memory = job->config->save.mem};
    snprintf(from, sizeof from, "%s/step-%08lld", run, (long long)step);
    snprintf(folder, sizeof folder, "%s/%s", run, format);
    if (snprintf(to, sizeof to, "%s/%s/%08lld", run, format, (long long)step) >= (int)sizeof to)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", run);
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return fsdp_fail_errno(err, errno, "cannot create '%s'", folder);
    return fsdp_checkpoint_convert(from, to, &opts, err);
}

/* --- failures ------------------------------------------------------------------------------------ */

/* Failures of a disk, which may pass. */
static bool may_pass(fsdp_status status)
{
    return status == FSDP_ERR_NO_SPACE || status == FSDP_ERR_IO || status == FSDP_ERR_LIMIT;
}

static fsdp_status log_failure(train_job *job, int64_t step, const fsdp_error *why, fsdp_error *err)
{
    fsdp_text members = {0};
    if (job->rank != 0)
        return FSDP_OK;
    train_log_warn(&job->log, "step %lld is not saved: %s", (long long)step, why->text);
    fsdp_text_addf(&members, "\"failed\": %lld, \"error\": ", (long long)job->failed_saves);
    fsdp_text_add_json_string(&members, why->text, strlen(why->text));
    fsdp_status st = members.failed ? fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory") : FSDP_OK;
    if (st == FSDP_OK)
        train_log_event(&job->log, "save", step, members.data);
    fsdp_text_release(&members);
    return st;
}

/* FSDP_OK: the failure is counted, and save.on_error says that the training continues. */
static fsdp_status take_failure(train_job *job, int64_t step, const fsdp_error *why,
                                fsdp_error *err)
{
    if (err)
        *err = *why;
    if (!may_pass(why->status) || job->config->save.on_error == TRAIN_ERROR_STOP)
        return why->status;
    job->failed_saves++;
    return fsdp_ctl_agree(job->ctl, log_failure(job, step, why, err), err);
}

/* --- one save ------------------------------------------------------------------------------------ */

/* async: returns once the state is copied; else when the checkpoint is there. */
static fsdp_status save(train_job *job, const fsdp_sd *values, bool async, fsdp_error *err)
{
    const train_config *config = job->config;
    const fsdp_retention retain = {.keep_last = (int)config->save.keep_last,
                                   .keep_every = config->save.keep_every};
    const fsdp_root_save_opts opts = {.save = {.step = &job->step,
                                               .compress = config->save.compress == TRAIN_ZSTD,
                                               .memory = config->save.mem,
                                               .retain = config->save.keep_last ? &retain : NULL},
                                      .into_run = true,
                                      .extra = values};
    return async ? fsdp_async_save(job->saver, job->opts->run, &opts, err)
                 : fsdp_root_save(job->root, job->opts->run, &opts, err);
}

static fsdp_status begin(train_job *job, bool async, fsdp_error *err)
{
    fsdp_sd *values = NULL;
    fsdp_status st = fsdp_sd_create(&values, err);
    if (st == FSDP_OK)
        st = train_state_add(job, values, err);
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = save(job, values, async, err);
    fsdp_sd_free(values);
    return st;
}

/* Collective. A conversion that fails counts as a save that did. */
static fsdp_status convert_too(train_job *job, int64_t step, fsdp_error *err)
{
    enum { LONGEST_MS = 3600000 }; /* a large model takes longer than the deadline */
    fsdp_error why = {0};
    fsdp_status st = FSDP_OK;
    if (job->config->save.also == TRAIN_ALSO_NONE)
        return FSDP_OK;
    if (job->rank == 0) {
        fsdp_world_begin_busy(job->world, LONGEST_MS);
        st = convert(job, step, &why);
        fsdp_world_end_busy(job->world);
    }
    return fsdp_ctl_agree(job->ctl, st, &why) == FSDP_OK ? FSDP_OK
                                                         : take_failure(job, step, &why, err);
}

static fsdp_status end(train_job *job, const saved_step *saved, fsdp_error *err)
{
    char members[128];
    double bytes = (double)saved->bytes;
    FSDP_TRY(convert_too(job, saved->step, err));
    FSDP_TRY(fsdp_world_sum(job->world, &bytes, 1, err));
    snprintf(members, sizeof members, "\"stall_ms\": %.3f, \"write_ms\": %.3f, \"bytes\": %.0f",
             saved->stall_ms, saved->write_ms, bytes);
    train_log_event(&job->log, "save", saved->step, members);
    return FSDP_OK;
}

/* --- attempts ------------------------------------------------------------------------------------ */

/* Tries until the checkpoint is there. save.on_error may allow to continue without it, but not at the end. */
static fsdp_status save_now(train_job *job, bool is_last, fsdp_error *err)
{
    enum { RETRIES = 3 };
    const int on_error = job->config->save.on_error;
    const int retries = on_error == TRAIN_ERROR_RETRY ? RETRIES : 0;
    const fsdp_memory memory = fsdp_root_memory(job->root);
    const int64_t bytes = memory.now[FSDP_MEMORY_SHARD] + memory.now[FSDP_MEMORY_OPTIM];
    fsdp_error why = {0};
    for (int i = 0; i <= retries; i++) {
        double began = cli_now();
        why = (fsdp_error){0};
        if (begin(job, false, &why) == FSDP_OK) {
            double ms = (cli_now() - began) * 1e3;
            return end(job, &(saved_step){job->step, bytes, ms, ms}, err);
        }
        FSDP_TRY(take_failure(job, job->step, &why, err));
        if (i < retries)
            sleep(1u << i);
    }
    if (on_error == TRAIN_ERROR_CONTINUE && !is_last)
        return FSDP_OK;
    if (err)
        *err = why;
    return why.status;
}

/* --- saves in the background --------------------------------------------------------------------- */

fsdp_status train_save_finish(train_job *job, bool is_last, fsdp_error *err)
{
    fsdp_async_report report;
    fsdp_error why = {0};
    if (!job->is_saving)
        return FSDP_OK;
    job->is_saving = false;
    if (fsdp_async_save_wait(job->saver, &report, &why) == FSDP_OK)
        return end(job, &(saved_step){report.step, report.bytes, report.stall_ms, report.write_ms},
                   err);
    FSDP_TRY(take_failure(job, report.step, &why, err));
    if (job->config->save.on_error == TRAIN_ERROR_RETRY || is_last)
        return save_now(job, is_last, err);
    return FSDP_OK;
}

fsdp_status train_save(train_job *job, bool is_last, fsdp_error *err)
{
    const int64_t failed = job->failed_saves;
    const bool has_changed = job->has_changed;
    fsdp_error why = {0};
    job->has_changed = false;
    FSDP_TRY(train_save_finish(job, false, err));
    if (failed != job->failed_saves && job->config->save.on_error == TRAIN_ERROR_RETRY)
        return FSDP_OK; /* this step was saved in its place */
    /* the saver refuses a model that has the values of the save before */
    if (!job->saver || !has_changed)
        return save_now(job, is_last, err);
    if (begin(job, true, &why) != FSDP_OK) {
        FSDP_TRY(take_failure(job, job->step, &why, err));
        return save_now(job, is_last, err);
    }
    job->is_saving = true;
    return is_last ? train_save_finish(job, true, err) : FSDP_OK;
}

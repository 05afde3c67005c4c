/* Checkpoints of a training: RUN/step-N, and another format beside it. See train.h. */
#include "tools/train/train.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- another format ------------------------------------------------------------------------------ */

/* RUN/hf/step-N or RUN/dcp/step-N, by rank 0. */
static fsdp_status convert(const train_job *job, fsdp_error *err)
{
    static const char *const formats[] = {NULL, "dcp", "hf"};
    const char *format = formats[job->config->save.also], *run = job->opts->run;
    char from[PATH_MAX], folder[PATH_MAX], to[PATH_MAX];
    const fsdp_convert_opts opts = {.format = format, .overwrite = true};
    snprintf(from, sizeof from, "%s/step-%08lld", run, (long long)job->step);
    snprintf(folder, sizeof folder, "%s/%s", run, format);
    if (snprintf(to, sizeof to, "%s/%s/step-%08lld", run, format, (long long)job->step) >=
        (int)sizeof to)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", run);
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return fsdp_fail_errno(err, errno, "cannot create '%s'", folder);
    return fsdp_checkpoint_convert(from, to, &opts, err);
}

/* --- a save -------------------------------------------------------------------------------------- */

/* is_saved: the checkpoint of this step is there, since an earlier attempt failed behind it. */
static fsdp_status save(train_job *job, const fsdp_sd *own, bool *is_saved, fsdp_error *err)
{
    const train_config *config = job->config;
    const fsdp_retention retain = {.keep_last = (int)config->save.keep_last,
                                   .keep_every = config->save.keep_every};
    const fsdp_root_save_opts opts = {.save = {.step = &job->step,
                                               .compress = config->save.compress == TRAIN_ZSTD,
                                               .memory = config->save.mem,
                                               .retain = config->save.keep_last ? &retain : NULL},
                                      .into_run = true,
                                      .extra = own};
    if (!*is_saved)
        FSDP_TRY(fsdp_root_save(job->root, job->opts->run, &opts, err));
    *is_saved = true;
    if (config->save.also == TRAIN_ALSO_NONE)
        return FSDP_OK;
    return fsdp_ctl_agree(job->ctl, job->rank == 0 ? convert(job, err) : FSDP_OK, err);
}

static fsdp_status log_save(train_job *job, double seconds, fsdp_error *err)
{
    char members[128];
    double bytes = 0;
    const fsdp_memory memory = fsdp_root_memory(job->root);
    bytes = (double)(memory.now[FSDP_MEMORY_SHARD] + memory.now[FSDP_MEMORY_OPTIM]);
    FSDP_TRY(train_sum(job, &bytes, 1, err));
    snprintf(members, sizeof members, "\"stall_ms\": %.3f, \"write_ms\": %.3f, \"bytes\": %.0f",
             seconds * 1e3, seconds * 1e3, bytes);
    return train_log_event(&job->log, "save", job->step, members, err);
}

static fsdp_status save_once(train_job *job, bool *is_saved, fsdp_error *err)
{
    fsdp_sd *own = NULL;
    double began = cli_now();
    fsdp_status st = fsdp_sd_create(&own, err);
    if (st == FSDP_OK)
        st = train_state_add(job, own, err);
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = save(job, own, is_saved, err);
    fsdp_sd_free(own);
    return st == FSDP_OK ? log_save(job, cli_now() - began, err) : st;
}

/* --- failures ------------------------------------------------------------------------------------ */

enum { RETRIES = 3 };

/* Failures of a disk, which may pass. */
static bool may_pass(fsdp_status status)
{
    return status == FSDP_ERR_NO_SPACE || status == FSDP_ERR_IO || status == FSDP_ERR_LIMIT;
}

static fsdp_status log_failure(train_job *job, const fsdp_error *why, fsdp_error *err)
{
    fsdp_text members = {0};
    if (job->rank != 0)
        return FSDP_OK;
    train_log_say(&job->log, "step %lld is not saved: %s", (long long)job->step, why->text);
    fsdp_text_addf(&members, "\"failed\": %lld, \"error\": ", (long long)job->failed_saves);
    fsdp_text_add_json_string(&members, why->text, strlen(why->text));
    fsdp_status st = members.failed
                         ? fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory")
                         : train_log_event(&job->log, "save", job->step, members.data, err);
    fsdp_text_release(&members);
    return st;
}

fsdp_status train_save(train_job *job, bool is_last, fsdp_error *err)
{
    const int on_error = job->config->save.on_error;
    const int retries = on_error == TRAIN_ERROR_RETRY ? RETRIES : 0;
    bool is_saved = false;
    fsdp_status st;
    for (int i = 0;; i++) {
        fsdp_error why = {0};
        st = save_once(job, &is_saved, &why);
        if (st == FSDP_OK)
            return FSDP_OK;
        if (err)
            *err = why;
        if (!may_pass(st) || on_error == TRAIN_ERROR_STOP)
            return st;
        job->failed_saves++;
        FSDP_TRY(fsdp_ctl_agree(job->ctl, log_failure(job, &why, err), err));
        if (i >= retries)
            break;
        sleep(1u << i);
    }
    return on_error == TRAIN_ERROR_CONTINUE && !is_last ? FSDP_OK : st;
}

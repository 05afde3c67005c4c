/*
 * Saving into a run: one writer at a time under the run's lease, then retention and the hint. Only
 * what is already saved is ever counted on when something older is deleted.
 */
#include "statedict/commit.h"
#include "statedict/commit_internal.h"
#include "statedict/run_internal.h"

#include "base/mem.h"
#include "statedict/ctl_backend.h"
#include "statedict/pipeline.h"
#include "statedict/save_internal.h"

#include <errno.h>
#include <string.h>

typedef struct run_job {
    fsdp_ctl *ctl;
    const char *run;
    fsdp_io *io;
    fsdp_save_opts opts;
    fsdp_lease *lease;  /* rank 0 */
    int64_t refresh_ms; /* when the lease is to be refreshed again */
    fsdp_error lost;    /* why it could not be */
    fsdp_watch watch;   /* the caller's */
    char name[FSDP_STEP_NAME_SIZE];
    char *path;
} run_job;

/* The run directory must survive a power cut as well as the checkpoint in it, whoever made it. */
static fsdp_status sync_parent(const run_job *job, fsdp_error *err)
{
    char *path = NULL, *parent = NULL;
    FSDP_TRY(fsdp_path_split(job->run, &path, &parent, err));
    fsdp_status st = fsdp_io_sync_dir(job->io, parent, err);
    fsdp_free(path);
    fsdp_free(parent);
    return st;
}

static fsdp_status make_run_directory(const run_job *job, fsdp_error *err)
{
    int errnum = job->io->ops->mkdir(job->io, job->run);
    if (errnum < 0 && errnum != -EEXIST)
        return fsdp_fail_errno(err, -errnum, "cannot create the run directory '%s'", job->run);
    return job->opts.no_sync ? FSDP_OK : sync_parent(job, err);
}

/* Rank 0 holds the lease for all. */
static fsdp_status enter_run(run_job *job, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    fsdp_step_name(job->opts.step, job->name);
    job->path = fsdp_path_join(job->run, job->name);
    if (!job->path)
        st = fsdp_fail_memory(err, "a path");
    if (job->opts.step < 0)
        st = fsdp_fail(err, FSDP_ERR_USAGE, "step %lld is negative", (long long)job->opts.step);
    if (st == FSDP_OK)
        st = fsdp_retention_check(job->opts.retain, err);
    if (st == FSDP_OK && fsdp_ctl_rank(job->ctl) == 0) {
        st = make_run_directory(job, err);
        if (st == FSDP_OK)
            st = fsdp_lease_take(job->io, job->run, &job->lease, err);
    }
    return fsdp_ctl_agree(job->ctl, st, err);
}

enum { REFRESH_MS = FSDP_LEASE_SECONDS * 1000 / 3 };

/* A long save keeps its lease fresh from where progress is told; without the lease it must stop. */
static int keep_lease(void *user, int64_t done, int64_t total, const char *what)
{
    run_job *job = user;
    int64_t now = fsdp_now_ms();
    if (job->lease && now >= job->refresh_ms) {
        job->refresh_ms = now + REFRESH_MS;
        if (fsdp_lease_refresh(job->lease, &job->lost) != FSDP_OK)
            return 1;
    }
    return job->watch.progress ? job->watch.progress(job->watch.user, done, total, what) : 0;
}

/* Rank 0, right before the checkpoint is published: another job may have the run by now. */
static fsdp_status confirm_lease(void *user, fsdp_error *err)
{
    run_job *job = user;
    job->refresh_ms = fsdp_now_ms() + REFRESH_MS;
    return fsdp_lease_refresh(job->lease, err);
}

static void notice(void *user, const char *text)
{
    const run_job *job = user;
    if (job->watch.notice)
        job->watch.notice(job->watch.user, text);
}

/* For people who look into the directory; nothing of ours reads it. */
static fsdp_status write_hint(const run_job *job, fsdp_error *err)
{
    char text[FSDP_STEP_NAME_SIZE + 1];
    char *path = fsdp_path_join(job->run, "latest");
    if (!path)
        return fsdp_fail_memory(err, "a path");
    size_t size = strlen(job->name);
    memcpy(text, job->name, size);
    text[size] = '\n';
    fsdp_status st = fsdp_io_replace_file(job->io, path, text, size + 1, err);
    fsdp_free(path);
    return st;
}

/* What was just saved stays, also when its step is lower than others': somebody went back to it. */
static fsdp_status retain_others(const run_job *job, fsdp_error *err)
{
    const fsdp_retention *asked = job->opts.retain;
    if (!asked)
        return fsdp_run_retain_held(job->lease, job->run, NULL, NULL, NULL, job->io, err);
    fsdp_retention policy = *asked;
    int64_t *pins = fsdp_alloc(asked->pin_count + 1, sizeof *pins);
    if (!pins)
        return fsdp_fail_memory(err, "a list of pinned steps");
    if (asked->pin_count > 0)
        memcpy(pins, asked->pins, asked->pin_count * sizeof *pins);
    pins[policy.pin_count++] = job->opts.step;
    policy.pins = pins;
    fsdp_status st = fsdp_run_retain_held(job->lease, job->run, &policy, NULL, NULL, job->io, err);
    fsdp_free(pins);
    return st;
}

/* The checkpoint is saved: what fails now is told, and does not unsay that. */
static void tidy_run(const run_job *job)
{
    fsdp_error err = {0};
    fsdp_status st = write_hint(job, &err);
    if (st == FSDP_OK)
        st = retain_others(job, &err);
    if (st != FSDP_OK)
        fsdp_notice(&job->opts.watch, "'%s' is saved, but tidying the run failed: %s", job->path,
                    err.text);
}

/* All ranks were stopped: by the caller, or because rank 0 lost the lease. */
static fsdp_status tell_why_cancelled(run_job *job, fsdp_error *err)
{
    fsdp_error cancelled = err ? *err : (fsdp_error){0};
    fsdp_status st = FSDP_OK;
    if (job->lost.status != FSDP_OK)
        st = fsdp_fail(err, FSDP_ERR_EXISTS, "lost the lease of the run while saving: %s",
                       job->lost.text);
    FSDP_TRY(fsdp_ctl_agree(job->ctl, st, err));
    if (err)
        *err = cancelled;
    return FSDP_ERR_CANCELLED;
}

static fsdp_status run_save(run_job *job, const fsdp_sd *sd, fsdp_error *err)
{
    FSDP_TRY(enter_run(job, err));
    job->refresh_ms = fsdp_now_ms() + REFRESH_MS;
    job->watch = job->opts.watch;
    job->opts.watch = (fsdp_watch){.user = job, .progress = keep_lease, .notice = notice};
    fsdp_save_guard guard = {.user = job, .confirm = confirm_lease};
    fsdp_status st = fsdp_sd_save_guarded(sd, job->ctl, job->path, &job->opts, &guard, err);
    if (st == FSDP_ERR_CANCELLED)
        return tell_why_cancelled(job, err);
    FSDP_TRY(st);
    if (fsdp_ctl_rank(job->ctl) == 0)
        tidy_run(job);
    return FSDP_OK;
}

fsdp_status fsdp_run_save(const fsdp_sd *sd, fsdp_ctl *ctl, const char *run, int64_t step,
                          const fsdp_save_opts *opts, fsdp_error *err)
{
    run_job job = {.ctl = ctl, .run = run, .opts = opts ? *opts : fsdp_save_opts_default()};
    job.io = job.opts.io ? job.opts.io : fsdp_io_posix();
    job.opts.step = step;
    job.opts.overwrite = false;
    fsdp_status st = run_save(&job, sd, err);
    fsdp_lease_release(job.lease);
    fsdp_free(job.path);
    return st;
}

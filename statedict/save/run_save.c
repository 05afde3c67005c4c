/*
 * Saves a step of a run: one writer at a time under the lease of the run, then the hint and
 * retention. Retention removes an older step only after the new one is saved.
 */
#include "statedict/commit/commit.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/run/run_internal.h"

#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/core/pool.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/transfer/pipeline.h"
#include "statedict/save/save_internal.h"

#include <errno.h>
#include <string.h>

typedef struct run_job {
    fsdp_ctl *ctl;
    const char *run;
    fsdp_io *io;
    fsdp_save_opts opts;
    int64_t step;      /* which opts point to */
    fsdp_lease *lease; /* rank 0, once the step is saved */
    uintptr_t thread;  /* that may use ctl */
    char name[FSDP_STEP_NAME_SIZE];
    char *path;
} run_job;

/* Syncs the parent of the run: its directory must survive a power cut like the checkpoint in it. */
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
    return job->opts.skip_fsync ? FSDP_OK : sync_parent(job, err);
}

static fsdp_status prepare_run(run_job *job, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    fsdp_step_name(job->step, job->name);
    job->path = fsdp_path_join(job->run, job->name);
    if (!job->path)
        st = fsdp_fail_memory(err, "a path");
    if (job->step == FSDP_NO_STEP)
        st = fsdp_fail(err, FSDP_ERR_USAGE,
                       "a checkpoint of a run is named after its step: give one");
    else if (job->step < 0)
        st = fsdp_fail(err, FSDP_ERR_USAGE, "step %lld is negative", (long long)job->step);
    if (st == FSDP_OK)
        st = fsdp_retention_check(job->opts.retain, err);
    if (st == FSDP_OK && fsdp_ctl_rank(job->ctl) == 0)
        st = make_run_directory(job, err);
    return st;
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

/* The other ranks have returned and wait for rank 0 in their next call: sends them signs of
 * life. */
static int report_to_ranks(void *context, int64_t done, int64_t total, const char *what)
{
    const run_job *job = context;
    const fsdp_watch *watch = &job->opts.watch;
    if (job->thread == fsdp_thread_number())
        fsdp_ctl_report_working(job->ctl, job->ctl->deadline_ms);
    return watch->progress ? watch->progress(watch->context, done, total, what) : 0;
}

/* Pins the step just saved: after a return to an earlier step it may be lower than others. */
static fsdp_status retain_others(run_job *job, fsdp_error *err)
{
    const fsdp_retention *asked = job->opts.retain;
    fsdp_retain_opts opts = {.apply = true,
                             .threads = job->opts.threads,
                             .memory = job->opts.memory,
                             .watch = {.context = job, .progress = report_to_ranks},
                             .access.disk = job->io};
    if (!asked)
        return fsdp_run_retain_held(job->lease, job->run, NULL, &opts, err);
    fsdp_retention policy = *asked;
    int64_t *pins = fsdp_alloc(asked->pin_count + 1, sizeof *pins);
    if (!pins)
        return fsdp_fail_memory(err, "a list of pinned steps");
    if (asked->pin_count > 0)
        memcpy(pins, asked->pins, asked->pin_count * sizeof *pins);
    pins[policy.pin_count++] = job->step;
    policy.pins = pins;
    fsdp_status st = fsdp_run_retain_held(job->lease, job->run, &policy, &opts, err);
    fsdp_free(pins);
    return st;
}

static void notify_untidy(const run_job *job, const char *what, fsdp_status status,
                          const fsdp_error *err)
{
    if (status != FSDP_OK)
        fsdp_notice(&job->opts.watch, "'%s' is saved, but %s failed: %s", job->path, what,
                    err->text);
}

/* The checkpoint is saved: a failure from here on is a notice and not an error. */
static void tidy_run(run_job *job)
{
    fsdp_error err = {0};
    notify_untidy(job, "the hint 'latest'", write_hint(job, &err), &err);
    notify_untidy(job, "tidying the run", retain_others(job, &err), &err);
}

static fsdp_status run_save(run_job *job, const fsdp_save_call *begun, fsdp_error *err)
{
    fsdp_status mine = begun->mine;
    if (mine == FSDP_OK)
        mine = prepare_run(job, err);
    fsdp_save_call call = *begun;
    call.dir = job->path;
    call.opts = &job->opts;
    call.mine = mine;
    FSDP_TRY(fsdp_save_leased(&call, &job->lease, err));
    if (fsdp_ctl_rank(job->ctl) == 0)
        tidy_run(job);
    return FSDP_OK;
}

fsdp_status fsdp_run_save_begun(const fsdp_save_call *call, int64_t step, fsdp_error *err)
{
    run_job job = {.ctl = call->ctl, .run = call->dir, .step = step};
    if (call->opts)
        job.opts = *call->opts;
    job.io = fsdp_access_io(&job.opts.access);
    job.opts.step = &job.step;
    job.thread = fsdp_thread_number();
    job.opts.overwrite = false;
    fsdp_status st = run_save(&job, call, err);
    fsdp_lease_release(job.lease);
    fsdp_free(job.path);
    return st;
}

fsdp_status fsdp_run_save(const fsdp_sd *sd, fsdp_ctl *ctl, const char *run, int64_t step,
                          const fsdp_save_opts *opts, fsdp_error *err)
{
    FSDP_NEED(err, sd, ctl);
    fsdp_status mine = FSDP_GIVEN(err, run);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_run_save");
    fsdp_status st =
        fsdp_run_save_begun(&(fsdp_save_call){sd, ctl, run, opts, mine, NULL}, step, err);
    fsdp_ctl_end_public(ctl, outer);
    return st;
}

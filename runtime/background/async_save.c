/*
 * The room runtime/background saves a root while training continues: one thread per saver, one save
 * in flight. See async_save.h. It uses the state dicts of runtime/state, the copies of
 * runtime/staging and the saves of statedict/save; programs call it, no room below does. Step 2 of
 * a shard's way (docs/flow_save.md).
 *
 * The program's thread makes the copy and hands a job over; the saver's thread runs it. A job
 * belongs to the program's thread while is_busy is false, and to the saver's while it is true; so
 * do the control plane and the copy's waves. The root is touched by the program's thread only.
 */
#include <fsdp/async_save.h>

#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/data/flow.h"
#include "kernels/kernels.h"
#include "runtime/launch/world_internal.h"
#include "runtime/staging/snapshot.h"
#include "runtime/state/state_internal.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/manifest/disk_names.h"
#include "statedict/save/save_call.h"
#include "statedict/sd/meter.h"

enum { NICER = 19 };

/* A rank's model before a save: it differs from the saved one, equals it, or could not be copied from the
 * device. */
enum { MODEL_DIFFERS, MODEL_EQUALS, MODEL_IS_MISSING };

/* A save: the copy, and the caller's options in memory of the job. */
typedef struct async_job {
    fsdp_sd *sd;
    fsdp_arena arena;
    const char *dir, *path; /* as given; of the checkpoint */
    fsdp_save_opts save;
    fsdp_retention retain;
    bool into_run;
    int64_t step;
    const char *model_prefix, *optim_prefix;
    size_t extra_first; /* entries from here on are the caller's */
    fsdp_comm **comms;  /* of the world at the call: the program may add others meanwhile */
    size_t comm_count;
    fsdp_error outcome;
    bool is_returned; /* the outcome, to the program */
} async_job;

struct fsdp_async_saver {
    fsdp_world_child child; /* first */
    fsdp_root *root;
    fsdp_world *world;
    fsdp_async_opts opts;
    fsdp_ctl *ctl;
    fsdp_snapshot snapshot;
    fsdp_root_copies copies;
    unsigned char *all_equal; /* memory for one of each rank */
    async_job job;            /* the last one */
    fsdp_async_report report;
    /* the last checkpoint that was saved */
    bool has_saved;
    int64_t saved_step;
    fsdp_hash saved_digest; /* of this rank's part of the model */
    /* the thread */
    pthread_t thread;
    bool has_lock, has_changed, has_thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_busy, is_ending; /* under the lock */
};

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* --- stale saves ------------------------------------------------------------------------------ */

static bool begins_with(const fsdp_entry *entry, const char *prefix)
{
    size_t size = strlen(prefix);
    return entry->name_size >= size && memcmp(entry->name, prefix, size) == 0;
}

/* Parameters and buffers. Either prefix may be empty. */
static bool is_of_model(const async_job *job, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
    bool is_optim = job->optim_prefix[0] != '\0' && begins_with(entry, job->optim_prefix);
    return i < job->extra_first && entry->kind == FSDP_ENTRY_TENSOR && !is_optim &&
           begins_with(entry, job->model_prefix);
}

/* The hash of this rank's part of the model; *any_out: the state has a model at all. */
static fsdp_hash hash_model(const fsdp_async_saver *saver, bool *any_out)
{
    const async_job *job = &saver->job;
    fsdp_hash both[2] = {0};
    *any_out = false;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        if (!is_of_model(job, i))
            continue;
        *any_out = true;
        both[1] = fsdp_snapshot_hash(&saver->snapshot, i);
        both[0] = fsdp_kernels_get()->hash(both, sizeof both);
    }
    return both[0];
}

/* Every rank fails when one could not copy its state from the device. failure: this rank's own. */
static fsdp_status check_copies(const fsdp_async_saver *saver, const fsdp_error *failure,
                                fsdp_error *err)
{
    if (failure->status != FSDP_OK) {
        *err = *failure;
        return failure->status;
    }
    for (int i = 0; i < saver->world->size; i++)
        if (saver->all_equal[i] == MODEL_IS_MISSING)
            return fsdp_fail(
                err, FSDP_ERR_PEER,
                "rank %d could not copy its state from the device: its message gives the reason",
                i);
    return FSDP_OK;
}

/*
 * Collective. If the step advanced but no parameter changed, the caller is probably saving a
 * different model from the one it trains. The save is refused before anything is written.
 */
static fsdp_status check_stale(fsdp_async_saver *saver, fsdp_hash *digest_out, fsdp_error *err)
{
    async_job *job = &saver->job;
    bool has_model = false, is_stale = true;
    fsdp_error failure = {0};
    fsdp_status copied = fsdp_waves_reach(fsdp_snapshot_waves(&saver->snapshot), 0, &failure);
    for (size_t i = 0; i < job->comm_count && copied == FSDP_OK; i++)
        copied = fsdp_comm_failure(job->comms[i], &failure);
    failure.status = copied;
    unsigned char mine = MODEL_IS_MISSING;
    if (copied == FSDP_OK) {
        *digest_out = hash_model(saver, &has_model);
        bool is_equal = memcmp(digest_out, &saver->saved_digest, sizeof *digest_out) == 0;
        mine = is_equal ? MODEL_EQUALS : MODEL_DIFFERS;
    }
    FSDP_TRY(fsdp_ctl_allgather(saver->ctl, &mine, sizeof mine, saver->all_equal, err));
    FSDP_TRY(check_copies(saver, &failure, err));
    for (int i = 0; i < saver->world->size; i++)
        is_stale &= saver->all_equal[i] == MODEL_EQUALS;
    is_stale &= has_model && saver->has_saved && job->step != saver->saved_step &&
                job->step != FSDP_NO_STEP && saver->saved_step != FSDP_NO_STEP;
    saver->report.is_stale = is_stale;
    if (!is_stale || saver->opts.allow_equal)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "stale: the model of step %lld has exactly the values of step %lld, which was "
                     "saved before: no parameter was trained, or another model is saved "
                     "(fsdp_async_opts: allow_equal)",
                     (long long)job->step, (long long)saver->saved_step);
}

/* --- the thread ------------------------------------------------------------------------------- */

static fsdp_status run_job(fsdp_async_saver *saver, fsdp_error *err)
{
    async_job *job = &saver->job;
    fsdp_hash digest;
    fsdp_flow("runtime/background/async_save.c", "save in the background: rank %d",
              saver->world->rank);
    FSDP_TRY(check_stale(saver, &digest, err));
    const fsdp_save_call call = {job->sd,    saver->ctl, job->dir,
                                 &job->save, FSDP_OK,    fsdp_snapshot_waves(&saver->snapshot)};
    FSDP_TRY(job->into_run ? fsdp_run_save_begun(&call, job->step, err)
                           : fsdp_save_begun(&call, err));
    saver->has_saved = true;
    saver->saved_step = job->step;
    saver->saved_digest = digest;
    return FSDP_OK;
}

/* The threads that a save starts inherit it. */
static void lower_priority(void)
{
    const id_t thread = (id_t)syscall(SYS_gettid);
    (void)setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + NICER);
}

static void *work(void *context)
{
    fsdp_async_saver *saver = context;
    lower_priority();
    pthread_mutex_lock(&saver->lock);
    for (;;) {
        while (!saver->is_busy && !saver->is_ending)
            pthread_cond_wait(&saver->changed, &saver->lock);
        if (!saver->is_busy)
            break;
        pthread_mutex_unlock(&saver->lock);
        double begin = now_ms();
        saver->job.outcome.status = run_job(saver, &saver->job.outcome);
        fsdp_snapshot_end(&saver->snapshot);
        saver->report.write_ms = now_ms() - begin;
        pthread_mutex_lock(&saver->lock);
        saver->is_busy = false;
        pthread_cond_broadcast(&saver->changed);
    }
    pthread_mutex_unlock(&saver->lock);
    return NULL;
}

static void await_idle(fsdp_async_saver *saver)
{
    pthread_mutex_lock(&saver->lock);
    while (saver->is_busy)
        pthread_cond_wait(&saver->changed, &saver->lock);
    pthread_mutex_unlock(&saver->lock);
}

static void start_job(fsdp_async_saver *saver)
{
    pthread_mutex_lock(&saver->lock);
    saver->is_busy = true;
    pthread_cond_broadcast(&saver->changed);
    pthread_mutex_unlock(&saver->lock);
}

/* --- jobs ------------------------------------------------------------------------------------- */

static void release_job(async_job *job)
{
    fsdp_sd_free(job->sd);
    fsdp_arena_release(&job->arena);
    *job = (async_job){0};
}

static const char *keep_text(async_job *job, const char *text)
{
    return fsdp_arena_strndup(&job->arena, text, strlen(text));
}

static bool keep_pins(async_job *job)
{
    const fsdp_retention *given = job->save.retain;
    if (!given)
        return true;
    int64_t *pins = fsdp_arena_alloc(&job->arena, given->pin_count, sizeof *pins);
    if (!pins)
        return false;
    if (given->pin_count > 0)
        memcpy(pins, given->pins, given->pin_count * sizeof *pins);
    job->retain = *given;
    job->retain.pins = pins;
    job->save.retain = &job->retain;
    return true;
}

static bool name_path(async_job *job)
{
    char name[FSDP_STEP_NAME_SIZE];
    fsdp_step_name(job->step, name);
    char *path = fsdp_path_join(job->dir, name);
    job->path = !job->into_run ? job->dir : path ? keep_text(job, path) : NULL;
    fsdp_free(path);
    return job->path != NULL;
}

/* Keeps the caller's options, in memory of the job, whose place is final. */
static fsdp_status keep_options(async_job *job, const char *dir, const fsdp_root_save_opts *opts,
                                fsdp_error *err)
{
    const fsdp_state_opts *state = &opts->state;
    job->save = opts->save;
    job->save.threads = opts->save.threads > 0 ? opts->save.threads : 1;
    job->into_run = opts->into_run;
    job->step = opts->save.step ? *opts->save.step : FSDP_NO_STEP;
    job->save.step = opts->save.step ? &job->step : NULL;
    job->dir = keep_text(job, dir);
    job->model_prefix = keep_text(job, state->model_prefix ? state->model_prefix : "model.");
    job->optim_prefix = keep_text(job, state->optim_prefix ? state->optim_prefix : "optim.");
    if (!job->dir || !job->model_prefix || !job->optim_prefix || !keep_pins(job) || !name_path(job))
        return fsdp_fail_memory(err, "the options of a save");
    return FSDP_OK;
}

/* Which tensors the stale check compares. */
static bool *list_model(async_job *job)
{
    size_t count = fsdp_sd_count(job->sd);
    bool *is_listed = fsdp_arena_alloc(&job->arena, count + 1, sizeof *is_listed);
    for (size_t i = 0; is_listed && i < count; i++)
        is_listed[i] = is_of_model(job, i);
    return is_listed;
}

/* Communicators whose failures leave undefined data in the memory of the device. */
static fsdp_status list_comms(async_job *job, const fsdp_context *context, fsdp_error *err)
{
    const fsdp_world *world = context->world;
    if (!context->device->ops->issue) /* calls of the host have returned their failures */
        return FSDP_OK;
    job->comms = fsdp_arena_alloc(&job->arena, world->comm_count + 1, sizeof(fsdp_comm *));
    if (!job->comms)
        return fsdp_fail_memory(err, "the communicators of a save");
    for (size_t i = 0; i < world->comm_count; i++)
        if (world->comms[i]->comm)
            job->comms[job->comm_count++] = world->comms[i]->comm;
    return FSDP_OK;
}

static fsdp_status make_job(fsdp_async_saver *saver, const char *dir,
                            const fsdp_root_save_opts *opts, fsdp_error *err)
{
    static const fsdp_root_save_opts none = {0};
    async_job *job = &saver->job;
    const fsdp_root_save_opts *given = opts ? opts : &none;
    if (!dir)
        return fsdp_fail(err, FSDP_ERR_USAGE, "fsdp_async_save: 'dir' is NULL");
    fsdp_root *root = saver->root;
    FSDP_TRY(keep_options(job, dir, given, err));
    FSDP_TRY(list_comms(job, root->context, err));
    FSDP_TRY(fsdp_root_saved_state(root, given, &job->sd, err));
    job->extra_first = fsdp_sd_count(job->sd) - (given->extra ? fsdp_sd_count(given->extra) : 0);
    saver->report.bytes = fsdp_snapshot_bytes(job->sd, saver->world->rank);
    const fsdp_snapshot_take take = {.sd = job->sd,
                                     .rank = saver->world->rank,
                                     .is_hashed = list_model(job),
                                     .changes = root->context->streams[FSDP_STREAM_COMPUTE]};
    if (!take.is_hashed)
        return fsdp_fail_memory(err, "the list of a model's tensors");
    return fsdp_snapshot_begin(&saver->snapshot, &take, err);
}

/* The failure of the last save, once. */
static fsdp_status take_failure(fsdp_async_saver *saver, fsdp_error *err)
{
    async_job *job = &saver->job;
    if (job->outcome.status == FSDP_OK || job->is_returned)
        return FSDP_OK;
    job->is_returned = true;
    if (err) {
        *err = job->outcome;
        fsdp_error_prefix(err, "saving '%s' in the background", job->path);
    }
    return job->outcome.status;
}

/* --- the calls -------------------------------------------------------------------------------- */

/* Every rank has the failure of the save before, so that it takes no round. */
fsdp_status fsdp_async_save(fsdp_async_saver *saver, const char *dir,
                            const fsdp_root_save_opts *opts, fsdp_error *err)
{
    FSDP_NEED(err, saver);
    fsdp_error mine = {0};
    double begin = now_ms();
    await_idle(saver);
    FSDP_TRY(take_failure(saver, err));
    double idle = now_ms();
    release_job(&saver->job);
    saver->report = (fsdp_async_report){.wait_ms = idle - begin, .step = FSDP_NO_STEP};
    mine.status = make_job(saver, dir, opts, &mine);
    fsdp_status status = fsdp_ctl_agree(saver->ctl, mine.status, &mine);
    if (status != FSDP_OK) {
        fsdp_snapshot_end(&saver->snapshot);
        release_job(&saver->job);
        if (err)
            *err = mine;
        return status;
    }
    saver->report.path = saver->job.path;
    saver->report.step = saver->job.step;
    saver->report.pool_bytes = saver->snapshot.room;
    saver->report.stall_ms = now_ms() - idle;
    fsdp_world_trace(saver->world, "async_save", saver->report.bytes);
    start_job(saver);
    return FSDP_OK;
}

fsdp_status fsdp_async_save_wait(fsdp_async_saver *saver, fsdp_async_report *report_out,
                                 fsdp_error *err)
{
    if (report_out)
        *report_out = (fsdp_async_report){.step = FSDP_NO_STEP};
    FSDP_NEED(err, saver);
    await_idle(saver);
    fsdp_world_trace(saver->world, "async_save_wait", -1);
    if (report_out)
        *report_out = saver->report;
    return take_failure(saver, err);
}

bool fsdp_async_save_is_done(fsdp_async_saver *saver)
{
    if (!saver)
        return true;
    pthread_mutex_lock(&saver->lock);
    bool is_done = !saver->is_busy;
    pthread_mutex_unlock(&saver->lock);
    return is_done;
}

/* --- creation and end ------------------------------------------------------------------------- */

static void end_thread(fsdp_async_saver *saver)
{
    if (saver->has_thread) {
        pthread_mutex_lock(&saver->lock);
        saver->is_ending = true;
        pthread_cond_broadcast(&saver->changed);
        pthread_mutex_unlock(&saver->lock);
        pthread_join(saver->thread, NULL);
    }
    if (saver->has_changed)
        pthread_cond_destroy(&saver->changed);
    if (saver->has_lock)
        pthread_mutex_destroy(&saver->lock);
}

static void end_saver(fsdp_world_child *child)
{
    fsdp_async_saver *saver = (fsdp_async_saver *)child;
    fsdp_error failure = {0};
    end_thread(saver);
    if (take_failure(saver, &failure) != FSDP_OK)
        fsdp_notice(&saver->job.save.watch, "%s", failure.text);
    release_job(&saver->job);
    fsdp_ctl_free(saver->ctl);
    if (saver->root)
        fsdp_root_remove_copies(saver->root, &saver->copies);
    fsdp_snapshot_release(&saver->snapshot);
    fsdp_free(saver->all_equal);
    fsdp_root_free(saver->root);
    fsdp_free(saver);
}

void fsdp_async_saver_free(fsdp_async_saver *saver)
{
    if (!saver)
        return;
    fsdp_world_disown(saver->world, &saver->child);
    end_saver(&saver->child);
}

static fsdp_event last_copy(void *context)
{
    fsdp_async_saver *saver = context;
    return fsdp_snapshot_last(&saver->snapshot);
}

static fsdp_status prepare_saver(fsdp_async_saver *saver, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    if (saver->opts.pool_bytes < 0)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "fsdp_async_opts: pool_bytes is %lld; give the bytes of the pool, or 0 for the "
            "whole state",
            (long long)saver->opts.pool_bytes);
    saver->all_equal = fsdp_alloc((size_t)saver->world->size, sizeof *saver->all_equal);
    if (!saver->all_equal)
        return fsdp_fail_memory(err, "a saver");
    FSDP_TRY(fsdp_state_get_unviewed(saver->root, NULL, &sd, err));
    const fsdp_snapshot_opts opts = {.view = &saver->root->view, .most = saver->opts.pool_bytes};
    fsdp_status status = fsdp_snapshot_open(&saver->snapshot, &opts, sd, saver->world->rank, err);
    fsdp_sd_free(sd);
    return status;
}

static fsdp_status start_thread(fsdp_async_saver *saver, fsdp_error *err)
{
    int failed = pthread_mutex_init(&saver->lock, NULL);
    saver->has_lock = !failed;
    if (!failed) {
        failed = pthread_cond_init(&saver->changed, NULL);
        saver->has_changed = !failed;
    }
    if (!failed) {
        failed = pthread_create(&saver->thread, NULL, work, saver);
        saver->has_thread = !failed;
    }
    return failed ? fsdp_fail_errno(err, failed, "cannot start the thread of a saver") : FSDP_OK;
}

/* Local, but for a control plane that was made. */
static fsdp_status make_saver(fsdp_root *root, const fsdp_async_opts *opts,
                              fsdp_async_saver **saver_out, fsdp_error *err)
{
    fsdp_async_saver *saver = fsdp_alloc(1, sizeof *saver);
    if (!saver)
        return fsdp_fail_memory(err, "a saver");
    saver->child.end = end_saver;
    saver->root = fsdp_root_hold(root);
    saver->world = root->world;
    saver->report.step = FSDP_NO_STEP;
    if (opts)
        saver->opts = *opts;
    *saver_out = saver;
    return prepare_saver(saver, err);
}

fsdp_status fsdp_async_saver_create(fsdp_root *root, const fsdp_async_opts *opts,
                                    fsdp_async_saver **saver_out, fsdp_error *err)
{
    FSDP_NEED(err, saver_out);
    *saver_out = NULL;
    FSDP_NEED(err, root);
    fsdp_async_saver *saver = NULL;
    fsdp_error mine = {0};
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    mine.status = make_saver(root, opts, &saver, &mine);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_async_saver_create");
    fsdp_status status = fsdp_ctl_agree(ctl, mine.status, &mine);
    if (status == FSDP_OK)
        status = fsdp_world_second_ctl(root->world, &saver->ctl, &mine);
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(ctl, start_thread(saver, &mine), &mine);
    fsdp_ctl_end_public(ctl, outer);
    if (status != FSDP_OK) {
        if (saver)
            end_saver(&saver->child);
        if (err)
            *err = mine;
        return status;
    }
    (void)fsdp_ctl_begin_public(saver->ctl, "fsdp_async_save"); /* all that it is for */
    if (saver->opts.deadline_ms > 0)
        fsdp_ctl_set_deadline(saver->ctl, saver->opts.deadline_ms);
    saver->copies = (fsdp_root_copies){.context = saver, .last = last_copy};
    fsdp_root_add_copies(root, &saver->copies);
    fsdp_world_adopt(root->world, &saver->child);
    *saver_out = saver;
    return FSDP_OK;
}

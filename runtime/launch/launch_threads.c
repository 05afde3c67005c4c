/*
 * Ranks that are threads of this process. See launch_internal.h. It owns pthread.h among the launcher's
 * files.
 *
 * A thread cannot be ended from outside: after a failure the other ranks get an error from their
 * next call, and when some still run at the deadline, the process ends.
 */
#include "runtime/launch/launch_internal.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/mem.h"
#include "runtime/comm_shared/shared_transports.h"
#include "statedict/ctl/ctl_backend.h"

enum { STACK_SIZE = 8 << 20, LATE_MS = 3000, FLUSH_MS = 1000 };

typedef struct thread_group thread_group;

typedef struct thread_rank {
    thread_group *group;
    fsdp_ctl *ctl;
    fsdp_transport *transport;
    bool has_thread;
    pthread_t thread;
} thread_rank;

struct thread_group {
    fsdp_launch_job job;
    int size, started, ended;
    thread_rank *ranks;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int first_code; /* by time */
    int64_t failed_ms;
};

/* Global, because the atexit handler uses them. */
static atomic_int ranks_at_work, ranks_of_job;
static pid_t rank_process;
static _Thread_local int rank_of_thread = -1;

static void *flush_all(void *has_flushed)
{
    fflush(NULL);
    atomic_store((atomic_bool *)has_flushed, true);
    return NULL;
}

/*
 * Ends the process while ranks are running. A thread flushes the program's output first; the wait
 * for it is bounded, because a rank may hold a file's lock for good. Messages of the callers are
 * not bounded: a full pipe of the standard error blocks.
 */
_Noreturn static void leave_at_once(int code)
{
    static atomic_bool has_flushed;
    const struct timespec pause = fsdp_timespec(1);
    const int64_t until = fsdp_now_ms() + FLUSH_MS;
    pthread_t thread;
    if (pthread_create(&thread, NULL, flush_all, &has_flushed) == 0)
        while (!atomic_load(&has_flushed) && fsdp_now_ms() < until)
            nanosleep(&pause, NULL);
    _exit(code);
}

/* exit() of one rank ends the others in the middle of their work: that is a failure, whichever code
 * it names. It is none in processes that a rank has forked. Other threads of the program are no
 * rank: -1. */
static void check_exit(void)
{
    char who[32] = "a thread that is not a rank";
    const int ranks = atomic_load(&ranks_of_job);
    bool is_rank = rank_of_thread >= 0 && ranks > 1;
    if ((!is_rank && atomic_load(&ranks_at_work) < 2) || getpid() != rank_process)
        return;
    if (is_rank)
        snprintf(who, sizeof who, "rank %d", rank_of_thread);
    dprintf(STDERR_FILENO,
            "fsdp: %s called exit in a job of %d --threads: a rank ends by returning\n", who,
            ranks);
    leave_at_once(FSDP_ERR_PEER);
}

static void note_failure(void *listener, int rank, int code)
{
    thread_group *group = listener;
    (void)rank;
    pthread_mutex_lock(&group->lock);
    if (group->first_code == 0) {
        group->first_code = code;
        group->failed_ms = fsdp_now_ms();
        pthread_cond_signal(&group->changed);
    }
    pthread_mutex_unlock(&group->lock);
}

static void *run_thread(void *context)
{
    thread_rank *rank = context;
    thread_group *group = rank->group;
    int number = rank_of_thread = fsdp_ctl_rank(rank->ctl);
    int code = fsdp_launch_rank(&group->job, rank->ctl, rank->transport);
    atomic_fetch_sub(&ranks_at_work, 1);
    if (code != 0)
        note_failure(group, number, code);
    pthread_mutex_lock(&group->lock);
    group->ended++;
    pthread_cond_signal(&group->changed);
    pthread_mutex_unlock(&group->lock);
    return NULL;
}

/* --- starting --------------------------------------------------------------------------------- */

/* The process' stack limit when that is larger. */
static size_t stack_size(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        limit.rlim_cur < STACK_SIZE)
        return STACK_SIZE;
    return (size_t)limit.rlim_cur;
}

static fsdp_status connect_ranks(thread_group *group, fsdp_error *err)
{
    size_t n = (size_t)group->size;
    fsdp_ctl **ctls = fsdp_alloc(n, sizeof *ctls);
    fsdp_transport **transports = fsdp_alloc(n, sizeof *transports);
    fsdp_status status = ctls && transports ? fsdp_ctl_threads(group->size, ctls, err)
                                            : fsdp_fail_memory(err, "threads as ranks");
    if (status == FSDP_OK) {
        status =
            fsdp_transport_threads(group->size, group->job.options->deadline_ms, transports, err);
        for (size_t i = 0; i < n && status != FSDP_OK; i++)
            fsdp_ctl_free(ctls[i]);
    }
    for (size_t i = 0; i < n && status == FSDP_OK; i++) {
        fsdp_shared_observe(transports[i], ctls[i]);
        group->ranks[i] = (thread_rank){.group = group, .ctl = ctls[i], .transport = transports[i]};
    }
    fsdp_free(ctls);
    fsdp_free(transports);
    return status;
}

/* A rank whose thread cannot start leaves at once, so that the others do not wait for it. */
static void start_rank(thread_group *group, thread_rank *rank, const pthread_attr_t *attributes)
{
    fsdp_error err = {0};
    atomic_fetch_add(&ranks_at_work, 1);
    int failed = pthread_create(&rank->thread, attributes, run_thread, rank);
    rank->has_thread = failed == 0;
    group->started += rank->has_thread;
    if (rank->has_thread)
        return;
    atomic_fetch_sub(&ranks_at_work, 1);
    (void)fsdp_fail_errno(&err, failed, "cannot start a thread for rank %d",
                          fsdp_ctl_rank(rank->ctl));
    note_failure(group, fsdp_ctl_rank(rank->ctl), fsdp_error_report(&err));
    rank->transport->ops->close(rank->transport);
    fsdp_ctl_free(rank->ctl);
}

/* --- ending ----------------------------------------------------------------------------------- */

/* Returns how many ranks still run long after a failure, and the code of that. */
static int wait_for_ranks(thread_group *group, int *first_code_out)
{
    const int64_t patience_ms = (int64_t)group->job.options->deadline_ms + LATE_MS;
    bool in_time = true;
    pthread_mutex_lock(&group->lock);
    while (group->ended < group->started && in_time) {
        if (group->first_code == 0) {
            pthread_cond_wait(&group->changed, &group->lock);
            continue;
        }
        struct timespec until = fsdp_timespec(group->failed_ms + patience_ms);
        (void)pthread_cond_timedwait(&group->changed, &group->lock, &until);
        in_time = fsdp_now_ms() < group->failed_ms + patience_ms;
    }
    int at_work = group->started - group->ended;
    *first_code_out = group->first_code;
    pthread_mutex_unlock(&group->lock);
    return at_work;
}

static void abandon(int at_work, int code)
{
    dprintf(STDERR_FILENO,
            "fsdp: %d ranks are still at work after another has failed: ending them\n", at_work);
    leave_at_once(code);
}

/* Installs the handler once per process. */
static int watch_exit(void)
{
    if (rank_process == getpid())
        return 0;
    bool is_watched = rank_process != 0; /* by the process that forked this one */
    rank_process = getpid();
    atomic_store(&ranks_at_work, 0);
    return is_watched || atexit(check_exit) == 0 ? 0 : ENOMEM;
}

static int init_locks(thread_group *group)
{
    pthread_condattr_t attributes;
    int failed = pthread_condattr_init(&attributes);
    if (failed)
        return failed;
    failed = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    if (!failed)
        failed = pthread_cond_init(&group->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    if (!failed && (failed = pthread_mutex_init(&group->lock, NULL)) != 0)
        pthread_cond_destroy(&group->changed);
    return failed;
}

static int run_threads(thread_group *group, const pthread_attr_t *attributes)
{
    fsdp_error err = {0};
    int code = 0;
    if (connect_ranks(group, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    atomic_store(&ranks_of_job, group->size);
    for (int i = 0; i < group->size; i++)
        start_rank(group, &group->ranks[i], attributes);
    int at_work = wait_for_ranks(group, &code);
    if (at_work > 0)
        abandon(at_work, code);
    for (int i = 0; i < group->size; i++)
        if (group->ranks[i].has_thread)
            pthread_join(group->ranks[i].thread, NULL);
    return code;
}

static int fail_setup(const thread_group *group, int failed)
{
    fsdp_error err = {0};
    (void)fsdp_fail_errno(&err, failed, "cannot set up threads for %d ranks", group->size);
    return fsdp_error_report(&err);
}

static int run_group(thread_group *group)
{
    pthread_attr_t attributes;
    int failed = pthread_attr_init(&attributes), code;
    if (failed)
        return fail_setup(group, failed);
    failed = pthread_attr_setstacksize(&attributes, stack_size());
    if (!failed)
        failed = watch_exit();
    if (!failed)
        failed = init_locks(group);
    if (!failed) {
        code = run_threads(group, &attributes);
        pthread_mutex_destroy(&group->lock);
        pthread_cond_destroy(&group->changed);
    } else {
        code = fail_setup(group, failed);
    }
    pthread_attr_destroy(&attributes);
    return code;
}

int fsdp_launch_threads(const fsdp_launch_job *job)
{
    thread_group group = {.job = *job, .size = job->options->threads};
    fsdp_error err = {0};
    group.job.failed = note_failure;
    group.job.listener = &group;
    group.ranks = fsdp_alloc((size_t)group.size, sizeof *group.ranks);
    if (!group.ranks) {
        (void)fsdp_fail_memory(&err, "threads as ranks");
        return fsdp_error_report(&err);
    }
    int code = run_group(&group);
    fsdp_free(group.ranks);
    return code;
}

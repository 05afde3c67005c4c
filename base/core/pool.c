/* Worker threads, the bounded queue, and how many cores there are. See pool.h. */
#include "base/core/pool.h"

#include "base/core/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct queued_job {
    fsdp_job job;
    void *user;
} queued_job;

struct fsdp_pool {
    pthread_mutex_t lock;
    pthread_cond_t not_empty, not_full, idle;
    queued_job *queue; /* ring of `capacity` jobs, the oldest at `first` */
    size_t capacity, first, queued;
    size_t running;
    bool ending;
    fsdp_error error; /* of the first job that failed */
    int threads;
    pthread_t thread[];
};

/* Workers block all signals, so that only the program's own threads handle them. */
static int start_thread(pthread_t *thread, void *(*body)(void *), void *context)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int errnum = pthread_create(thread, NULL, body, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return errnum;
}

/* Runs the job and makes sure that a failure carries its status. */
static void run_job(queued_job job, fsdp_error *err)
{
    fsdp_status status = job.job(job.user, err);
    err->status = status;
}

static void keep_first_error(fsdp_pool *pool, const fsdp_error *err)
{
    if (err->status != FSDP_OK && pool->error.status == FSDP_OK)
        pool->error = *err;
}

/* Called with the lock held; unlocks while the job runs. */
static void take_job(fsdp_pool *pool)
{
    queued_job job = pool->queue[pool->first];
    pool->first = (pool->first + 1) % pool->capacity;
    pool->queued--;
    pthread_cond_signal(&pool->not_full);
    fsdp_error err = {0};
    if (pool->error.status == FSDP_OK) {
        pool->running++;
        pthread_mutex_unlock(&pool->lock);
        run_job(job, &err);
        pthread_mutex_lock(&pool->lock);
        pool->running--;
    }
    keep_first_error(pool, &err);
    if (pool->queued == 0 && pool->running == 0)
        pthread_cond_broadcast(&pool->idle);
}

static void *work(void *context)
{
    fsdp_pool *pool = context;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->queued == 0 && !pool->ending)
            pthread_cond_wait(&pool->not_empty, &pool->lock);
        if (pool->queued == 0)
            break;
        take_job(pool);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static fsdp_pool *alloc_pool(size_t threads, size_t queue)
{
    fsdp_pool *pool = fsdp_alloc(1, sizeof *pool + threads * sizeof pool->thread[0]);
    if (!pool)
        return NULL;
    pool->capacity = queue > 0 ? queue : 1;
    pool->queue = fsdp_alloc(pool->capacity, sizeof *pool->queue);
    if (!pool->queue) {
        fsdp_free(pool);
        return NULL;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->not_empty, NULL);
    pthread_cond_init(&pool->not_full, NULL);
    pthread_cond_init(&pool->idle, NULL);
    return pool;
}

fsdp_status fsdp_pool_create(int threads, size_t queue, fsdp_pool **pool_out, fsdp_error *err)
{
    *pool_out = NULL;
    if (threads < 0)
        threads = 0;
    fsdp_pool *pool = alloc_pool((size_t)threads, queue);
    if (!pool)
        return fsdp_fail_memory(err, "a worker pool");
    for (int i = 0; i < threads; i++) {
        int errnum = start_thread(&pool->thread[i], work, pool);
        if (errnum != 0 && i == 0) {
            fsdp_pool_free(pool);
            fsdp_fail_errno(err, errnum, "cannot start a worker thread");
            if (err)
                err->status = FSDP_ERR_LIMIT;
            return FSDP_ERR_LIMIT;
        }
        if (errnum != 0)
            break; /* fewer threads are slower, not wrong */
        pool->threads++;
    }
    *pool_out = pool;
    return FSDP_OK;
}

void fsdp_pool_submit(fsdp_pool *pool, fsdp_job job, void *context)
{
    queued_job entry = {job, context};
    if (pool->threads == 0) {
        fsdp_error err = {0};
        if (pool->error.status == FSDP_OK)
            run_job(entry, &err);
        keep_first_error(pool, &err);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    while (pool->queued == pool->capacity)
        pthread_cond_wait(&pool->not_full, &pool->lock);
    if (pool->error.status == FSDP_OK) {
        pool->queue[(pool->first + pool->queued) % pool->capacity] = entry;
        pool->queued++;
        pthread_cond_signal(&pool->not_empty);
    }
    pthread_mutex_unlock(&pool->lock);
}

fsdp_status fsdp_pool_wait(fsdp_pool *pool, fsdp_error *err)
{
    pthread_mutex_lock(&pool->lock);
    while (pool->queued > 0 || pool->running > 0)
        pthread_cond_wait(&pool->idle, &pool->lock);
    fsdp_status status = pool->error.status;
    if (err && status != FSDP_OK)
        *err = pool->error;
    pool->error = (fsdp_error){0};
    pthread_mutex_unlock(&pool->lock);
    return status;
}

void fsdp_pool_free(fsdp_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->ending = true;
    pthread_cond_broadcast(&pool->not_empty);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->threads; i++)
        pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->not_empty);
    pthread_cond_destroy(&pool->not_full);
    pthread_cond_destroy(&pool->idle);
    pthread_mutex_destroy(&pool->lock);
    fsdp_free(pool->queue);
    fsdp_free(pool);
}

typedef struct parallel_loop {
    fsdp_status (*job)(void *user, size_t i, fsdp_error *err);
    void *user;
    size_t n;
    _Atomic size_t next;
    atomic_bool failed;
    pthread_mutex_t lock;
    size_t failed_index; /* the error kept is that of the lowest index */
    fsdp_error error;
} parallel_loop;

static void keep_lowest_error(parallel_loop *loop, size_t i, const fsdp_error *err)
{
    pthread_mutex_lock(&loop->lock);
    if (loop->error.status == FSDP_OK || i < loop->failed_index) {
        loop->error = *err;
        loop->failed_index = i;
    }
    pthread_mutex_unlock(&loop->lock);
    atomic_store(&loop->failed, true);
}

static void *run_indexes(void *context)
{
    parallel_loop *loop = context;
    while (!atomic_load(&loop->failed)) {
        size_t i = atomic_fetch_add(&loop->next, 1);
        if (i >= loop->n)
            break;
        fsdp_error err = {0};
        err.status = loop->job(loop->user, i, &err);
        if (err.status != FSDP_OK)
            keep_lowest_error(loop, i, &err);
    }
    return NULL;
}

enum { PARALLEL_THREADS = 64 };

fsdp_status fsdp_parallel(int threads, size_t n,
                          fsdp_status (*job)(void *context, size_t i, fsdp_error *err),
                          void *context, fsdp_error *err)
{
    parallel_loop loop = {.job = job, .user = context, .n = n};
    pthread_mutex_init(&loop.lock, NULL);
    pthread_t helper[PARALLEL_THREADS];
    int helpers = 0;
    while (helpers < threads - 1 && helpers < PARALLEL_THREADS && (size_t)helpers + 1 < n) {
        if (start_thread(&helper[helpers], run_indexes, &loop) != 0)
            break; /* the caller works anyway */
        helpers++;
    }
    run_indexes(&loop);
    for (int i = 0; i < helpers; i++)
        pthread_join(helper[i], NULL);
    pthread_mutex_destroy(&loop.lock);
    if (err && loop.error.status != FSDP_OK)
        *err = loop.error;
    return loop.error.status;
}

static int cores_by_affinity(void)
{
    /* a mask that is too small for the machine is refused with EINVAL */
    for (int cpus = 1024; cpus <= 1 << 18; cpus *= 4) {
        cpu_set_t *set = CPU_ALLOC((size_t)cpus);
        if (!set)
            break;
        size_t size = CPU_ALLOC_SIZE((size_t)cpus);
        int result = sched_getaffinity(0, size, set);
        int errnum = errno;
        int count = result == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (result == 0)
            return count > 0 ? count : 1;
        if (errnum != EINVAL)
            break;
    }
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 && online < INT_MAX ? (int)online : 1;
}

static bool read_small(const char *path, char *data, size_t capacity)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, data, capacity - 1);
    close(fd);
    if (n < 0)
        return false;
    data[n] = '\0';
    return true;
}

/* Cores that a cpu.max file ("QUOTA PERIOD" or "max PERIOD") allows; INT_MAX when it sets no limit. */
static int cores_by_quota(const char *path)
{
    char data[64];
    int64_t quota = 0, period = 0;
    if (!read_small(path, data, sizeof data))
        return INT_MAX;
    if (sscanf(data, "%" SCNd64 " %" SCNd64, &quota, &period) != 2 || quota <= 0 || period <= 0)
        return INT_MAX;
    int64_t cores = quota / period + (quota % period != 0);
    return cores < INT_MAX ? (int)cores : INT_MAX;
}

/* The tightest limit on the way from our group up to the root. */
static int cores_by_cgroup(void)
{
    char groups[4096];
    if (!read_small("/proc/self/cgroup", groups, sizeof groups))
        return INT_MAX;
    char *group = strncmp(groups, "0::", 3) == 0 ? groups : strstr(groups, "\n0::");
    if (!group)
        return INT_MAX;
    group = strchr(group, '/');
    if (!group)
        return INT_MAX;
    group[strcspn(group, "\n")] = '\0';
    int fewest = INT_MAX;
    for (;;) {
        char path[sizeof groups + 32];
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", group);
        int cores = cores_by_quota(path);
        if (cores < fewest)
            fewest = cores;
        char *slash = strrchr(group, '/');
        if (!slash)
            return fewest;
        *slash = '\0';
    }
}

uintptr_t fsdp_thread_number(void)
{
    return (uintptr_t)pthread_self();
}

int fsdp_pool_cores(void)
{
    int affinity = cores_by_affinity();
    int quota = cores_by_cgroup();
    return quota < affinity ? quota : affinity;
}

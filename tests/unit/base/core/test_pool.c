/* The worker pool: everything runs, the queue is bounded, the first error is kept. */
#include "base/core/pool.h"

#include "base/core/mem.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

static fsdp_status count_up(void *user, fsdp_error *err)
{
    (void)err;
    atomic_fetch_add((atomic_int *)user, 1);
    return FSDP_OK;
}

static fsdp_status fail(void *user, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_IO, "job %d failed", *(int *)user);
}

static fsdp_status fail_silently(void *user, fsdp_error *err)
{
    (void)user;
    (void)err;
    return FSDP_ERR_DAMAGED;
}

static fsdp_pool *make_pool(int threads, size_t queue)
{
    fsdp_pool *pool = NULL;
    cr_assert_eq(fsdp_pool_create(threads, queue, &pool, NULL), FSDP_OK);
    return pool;
}

Test(pool, every_job_runs_once_with_any_number_of_threads)
{
    for (int threads = 0; threads <= 4; threads++) {
        atomic_int count = 0;
        fsdp_pool *pool = make_pool(threads, 3);
        for (int round = 1; round <= 3; round++) {
            for (int i = 0; i < 500; i++)
                fsdp_pool_submit(pool, count_up, &count);
            cr_assert_eq(fsdp_pool_wait(pool, NULL), FSDP_OK);
            cr_assert_eq(atomic_load(&count), round * 500);
        }
        fsdp_pool_free(pool);
    }
    fsdp_pool_free(NULL);
}

Test(pool, freeing_waits_for_the_jobs)
{
    atomic_int count = 0;
    fsdp_pool *pool = make_pool(2, 64);
    for (int i = 0; i < 64; i++)
        fsdp_pool_submit(pool, count_up, &count);
    fsdp_pool_free(pool);
    cr_assert_eq(atomic_load(&count), 64);
}

Test(pool, the_first_error_is_returned_once_and_later_jobs_are_dropped)
{
    for (int threads = 0; threads <= 1; threads++) {
        atomic_int count = 0;
        int numbers[] = {7, 8};
        fsdp_error err = {0};
        fsdp_pool *pool = make_pool(threads, 8);
        fsdp_pool_submit(pool, count_up, &count);
        fsdp_pool_submit(pool, fail, &numbers[0]);
        fsdp_pool_submit(pool, fail, &numbers[1]);
        fsdp_pool_submit(pool, count_up, &count);
        cr_assert_eq(fsdp_pool_wait(pool, &err), FSDP_ERR_IO);
        cr_assert_str_eq(err.text, "job 7 failed");
        cr_assert_eq(atomic_load(&count), 1);
        fsdp_pool_submit(pool, count_up, &count);
        cr_assert_eq(fsdp_pool_wait(pool, &err), FSDP_OK);
        cr_assert_eq(atomic_load(&count), 2);
        fsdp_pool_free(pool);
    }
}

Test(pool, a_failure_without_text_is_still_a_failure)
{
    fsdp_error err = {0};
    fsdp_pool *pool = make_pool(1, 1);
    fsdp_pool_submit(pool, fail_silently, NULL);
    cr_assert_eq(fsdp_pool_wait(pool, &err), FSDP_ERR_DAMAGED);
    cr_assert_eq(err.status, FSDP_ERR_DAMAGED);
    fsdp_pool_free(pool);
}

typedef struct late_job {
    atomic_bool has_begun, has_ended;
} late_job;

static fsdp_status end_late(void *user, fsdp_error *err)
{
    late_job *job = user;
    (void)err;
    atomic_store(&job->has_begun, true);
    usleep(20000);
    atomic_store(&job->has_ended, true);
    return FSDP_OK;
}

Test(pool, waiting_ends_after_a_job_that_has_begun)
{
    late_job job = {false};
    fsdp_pool *pool = make_pool(1, 4);
    fsdp_pool_submit(pool, end_late, &job);
    while (!atomic_load(&job.has_begun))
        usleep(1000);
    cr_assert_eq(fsdp_pool_wait(pool, NULL), FSDP_OK);
    cr_assert(atomic_load(&job.has_ended));
    fsdp_pool_free(pool);
}

typedef struct job_gate {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    bool open;
    atomic_int submitted;
    fsdp_pool *pool;
} job_gate;

static fsdp_status wait_at_gate(void *user, fsdp_error *err)
{
    job_gate *gate = user;
    (void)err;
    pthread_mutex_lock(&gate->lock);
    while (!gate->open)
        pthread_cond_wait(&gate->opened, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
    return FSDP_OK;
}

static void *submit_ten(void *user)
{
    job_gate *gate = user;
    for (int i = 0; i < 10; i++) {
        fsdp_pool_submit(gate->pool, wait_at_gate, gate);
        atomic_fetch_add(&gate->submitted, 1);
    }
    return NULL;
}

Test(pool, submitting_blocks_while_the_queue_is_full)
{
    job_gate gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .opened = PTHREAD_COND_INITIALIZER};
    gate.pool = make_pool(1, 2);
    pthread_t thread;
    pthread_create(&thread, NULL, submit_ten, &gate);
    while (atomic_load(&gate.submitted) < 3) /* one runs, two wait in the queue */
        sched_yield();
    usleep(20000);
    int submitted = atomic_load(&gate.submitted);
    pthread_mutex_lock(&gate.lock);
    gate.open = true;
    pthread_cond_broadcast(&gate.opened);
    pthread_mutex_unlock(&gate.lock);
    pthread_join(thread, NULL);
    cr_assert_eq(fsdp_pool_wait(gate.pool, NULL), FSDP_OK);
    cr_assert_eq(submitted, 3);
    cr_assert_eq(atomic_load(&gate.submitted), 10);
    fsdp_pool_free(gate.pool);
}

Test(pool, creation_without_memory_fails_and_leaks_nothing)
{
    for (int64_t n = 0; n < 2; n++) {
        fsdp_pool *pool = NULL;
        fsdp_mem_fail_after(n, false);
        fsdp_status status = fsdp_pool_create(2, 2, &pool, NULL);
        fsdp_mem_fail_after(-1, false);
        cr_assert_eq(status, FSDP_ERR_LIMIT);
        cr_assert_null(pool);
    }
}

static fsdp_status mark_index(void *user, size_t i, fsdp_error *err)
{
    (void)err;
    atomic_fetch_add(&((atomic_int *)user)[i], 1);
    return FSDP_OK;
}

Test(pool, parallel_visits_each_index_once)
{
    for (int threads = -1; threads <= 5; threads++) {
        for (size_t n = 0; n <= 40; n += 8) {
            atomic_int marks[40] = {0};
            cr_assert_eq(fsdp_parallel(threads, n, mark_index, marks, NULL), FSDP_OK);
            for (size_t i = 0; i < 40; i++)
                cr_assert_eq(atomic_load(&marks[i]), i < n);
        }
    }
}

static fsdp_status fail_from_ten_on(void *user, size_t i, fsdp_error *err)
{
    atomic_fetch_add((atomic_int *)user, 1);
    return i < 10 ? FSDP_OK : fsdp_fail(err, FSDP_ERR_IO, "index %zu", i);
}

Test(pool, parallel_stops_at_the_lowest_failure)
{
    for (int threads = 1; threads <= 3; threads++) {
        atomic_int calls = 0;
        fsdp_error err = {0};
        fsdp_status status = fsdp_parallel(threads, 1000000, fail_from_ten_on, &calls, &err);
        cr_assert_eq(status, FSDP_ERR_IO);
        cr_assert_str_eq(err.text, "index 10");
        cr_assert_lt(atomic_load(&calls), 20);
    }
}

/* Index 0 fails after index 1 did. */
static fsdp_status fail_in_turn(void *user, size_t i, fsdp_error *err)
{
    atomic_bool *has_failed = user;
    for (int n = 0; i == 0 && n < 1000 && !atomic_load(has_failed); n++)
        usleep(10000);
    if (i == 0)
        usleep(20000);
    else
        atomic_store(has_failed, true);
    return fsdp_fail(err, FSDP_ERR_IO, "index %zu", i);
}

Test(pool, parallel_keeps_the_failure_of_the_lowest_index)
{
    atomic_bool has_failed = false;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_parallel(2, 2, fail_in_turn, &has_failed, &err), FSDP_ERR_IO);
    cr_assert_str_eq(err.text, "index 0");
}

Test(pool, cores_follow_the_affinity)
{
    cpu_set_t set;
    cr_assert_eq(sched_getaffinity(0, sizeof set, &set), 0);
    int cores = fsdp_pool_cores();
    cr_assert(cores >= 1 && cores <= CPU_COUNT(&set));
    size_t first = 0;
    while (!CPU_ISSET(first, &set))
        first++;
    CPU_ZERO(&set);
    CPU_SET(first, &set);
    cr_assert_eq(sched_setaffinity(0, sizeof set, &set), 0);
    cr_assert_eq(fsdp_pool_cores(), 1);
}

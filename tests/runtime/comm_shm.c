/*
 * Collectives between processes: values from pools, private buffers and both; ranks that are
 * killed, stopped, leave, or run out of memory; and that nothing of them is left.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "tests/support/rounds/comm_rounds.h"
#include "tests/support/ranks/rank_processes.h"
#include "tests/support/sample_state.h"

enum { LONG_MS = 60000, SHORT_MS = 700, COUNT = 400000 };

static int failures;

static void expect(bool holds, const char *what, int rank, const rank_result *result)
{
    if (holds)
        return;
    failures++;
    fprintf(stderr, "%s, rank %d: status %d, '%s', %d files open\n", what, rank,
            (int)result->status, result->err.text, result->fds_left);
}

/* --- leftovers -------------------------------------------------------------------------------- */

/* Memory has no name: no file of /dev/shm is mapped. */
static bool is_mapped_by_name(void)
{
    char line[400];
    bool found = false;
    FILE *all = fopen("/proc/self/maps", "r");
    while (all && fgets(line, sizeof line, all))
        found |= strstr(line, "/dev/shm/") != NULL;
    if (all)
        fclose(all);
    return found;
}

/* Counts the sockets of this test's processes only: other programs of the host may have some. */
static int count_sockets(int rank)
{
    char line[400], name[32];
    int n = 0;
    FILE *all = fopen("/proc/net/unix", "r");
    snprintf(name, sizeof name, "@fsdp-%d-", rank);
    while (all && fgets(line, sizeof line, all))
        n += strstr(line, name) != NULL;
    if (all)
        fclose(all);
    return n;
}

static void expect_nothing_left(const rank_processes *ranks, const rank_result *results,
                                const char *what)
{
    for (int i = 0; i < ranks->size; i++)
        expect(!results[i].is_done || results[i].fds_left <= 0, what, i, &results[i]);
}

/* --- values ----------------------------------------------------------------------------------- */

static fsdp_status run_rounds(rank_process *rank, fsdp_error *err)
{
    FSDP_TRY(run_comm_rounds(rank->comm, rank->user, err));
    if (is_mapped_by_name())
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "memory from /dev/shm");
    return FSDP_OK;
}

static void test_values(void)
{
    test_sampler sampler = {.every = test_sample(1)};
    for (int n = 1; n <= 4; n++) {
        for (int buffers = COMM_MIXED; buffers <= COMM_PRIVATE; buffers++) {
            if (!test_sampler_takes(&sampler))
                continue;
            comm_rounds rounds = {.seed = (uint64_t)(n * 10 + buffers),
                                  .rounds = 25,
                                  .max_count = 300000 / n,
                                  .buffers = (comm_buffers)buffers};
            rank_processes ranks = {
                .size = n, .deadline_ms = LONG_MS, .body = run_rounds, .user = &rounds};
            rank_result results[RANK_PROCESSES_MOST];
            run_rank_processes(&ranks, results);
            for (int i = 0; i < n; i++)
                expect(results[i].status == FSDP_OK, "values", i, &results[i]);
            expect_nothing_left(&ranks, results, "values");
        }
    }
}

/* --- failures --------------------------------------------------------------------------------- */

typedef enum trouble_kind { KILLED, KILLED_IN_WORK, STOPPED, LEAVES, ABORTS, DIFFERS } trouble_kind;

typedef struct trouble {
    trouble_kind kind;
    int rank;
    bool is_private;
    const char *text; /* in everybody's error */
} trouble;

static fsdp_status reduce(rank_process *rank, int64_t count, fsdp_error *err)
{
    const trouble *now = rank->user;
    size_t size = COUNT * sizeof(float);
    float *data = now->is_private ? malloc(size) : fsdp_comm_alloc(rank->comm, size);
    fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                            .dtype = FSDP_F32,
                            .in = data,
                            .out = data,
                            .count = count,
                            .unit = "layers.0"};
    memset(data, 0, size);
    fsdp_status status = fsdp_comm_run(rank->comm, &call, err);
    if (now->is_private)
        free(data);
    else
        fsdp_comm_dealloc(rank->comm, data);
    return status;
}

static void *kill_soon(void *user)
{
    (void)user;
    usleep(5000);
    raise(SIGKILL);
    return NULL;
}

static fsdp_status make_trouble(rank_process *rank, fsdp_error *err)
{
    const trouble *now = rank->user;
    const fsdp_error full = {.status = FSDP_ERR_NO_SPACE, .text = "the disk is full"};
    pthread_t thread;
    switch (now->kind) {
    case KILLED: return (fsdp_status)raise(SIGKILL);
    case KILLED_IN_WORK:
        (void)pthread_create(&thread, NULL, kill_soon, NULL);
        for (;;)
            FSDP_TRY(reduce(rank, COUNT, err));
    case STOPPED: raise(SIGSTOP); return reduce(rank, COUNT, err);
    case LEAVES: return fsdp_fail(err, FSDP_ERR_CANCELLED, "rank %d has left", rank->rank);
    case ABORTS: fsdp_comm_abort(rank->comm, &full); return reduce(rank, COUNT, err);
    case DIFFERS: return reduce(rank, 7, err);
    }
    return FSDP_OK;
}

static fsdp_status run_into_trouble(rank_process *rank, fsdp_error *err)
{
    const trouble *now = rank->user;
    FSDP_TRY(reduce(rank, COUNT, err));
    FSDP_TRY(reduce(rank, COUNT, err));
    if (rank->rank == now->rank)
        return make_trouble(rank, err);
    fsdp_status status;
    do
        status = reduce(rank, COUNT, err);
    while (status == FSDP_OK);
    fsdp_error again = {0};
    if (reduce(rank, 1, &again) != status || strcmp(again.text, err->text) != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "then '%.300s'", again.text);
    return status;
}

static void wait_and_continue(const rank_processes *ranks, int stopped)
{
    int how;
    if (waitpid(ranks->pids[stopped], &how, WUNTRACED) < 0 || !WIFSTOPPED(how))
        fprintf(stderr, "rank %d did not stop\n", stopped);
    usleep((SHORT_MS + 800) * 1000);
    kill(ranks->pids[stopped], SIGCONT);
}

static void test_trouble(const trouble *now)
{
    rank_result results[RANK_PROCESSES_MOST];
    for (int n = 2; n <= 3; n++) {
        trouble copy = *now;
        copy.rank = now->rank % n;
        rank_processes ranks = {.size = n,
                                .deadline_ms = now->kind == STOPPED ? SHORT_MS : LONG_MS,
                                .body = run_into_trouble,
                                .user = &copy};
        start_rank_processes(&ranks);
        if (now->kind == STOPPED)
            wait_and_continue(&ranks, copy.rank);
        finish_rank_processes(&ranks, results);
        char who[16];
        snprintf(who, sizeof who, "rank %d", copy.rank);
        for (int i = 0; i < n; i++) {
            if (i == copy.rank && now->kind <= KILLED_IN_WORK)
                expect(!results[i].is_done, "killed", i, &results[i]);
            else
                expect(results[i].status != FSDP_OK && strstr(results[i].err.text, now->text) &&
                           (strstr(results[i].err.text, who) || i == copy.rank),
                       now->text, i, &results[i]);
        }
        expect_nothing_left(&ranks, results, now->text);
    }
}

static void test_troubles(void)
{
    static const trouble all[] = {
        {KILLED, 0, false, "died"},
        {KILLED, 1, true, "died"},
        {KILLED_IN_WORK, 1, false, "died"},
        {KILLED_IN_WORK, 2, true, "died"},
        {STOPPED, 1, false, "stopped"},
        {STOPPED, 0, true, "stopped"},
        {LEAVES, 1, true, "has left"},
        {ABORTS, 1, false, "the disk is full"},
        {DIFFERS, 1, false, "of 7 f32 for layers.0 (call 3)"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        test_trouble(&all[i]);
}

/* --- hidden memory ---------------------------------------------------------------------------- */

static void see_nothing(void *user, const void *const *inputs)
{
    (void)inputs;
    *(bool *)user = true;
}

static fsdp_status look_at_private_memory(rank_process *rank, fsdp_error *err)
{
    static float data[COUNT];
    bool was_seen = false;
    const fsdp_comm_view view = {.see = see_nothing, .context = &was_seen};
    const fsdp_collective call = {.kind = FSDP_REDUCE_SCATTER,
                                  .dtype = FSDP_F32,
                                  .in = data,
                                  .out = data,
                                  .count = 0,
                                  .view = &view};
    fsdp_status status = fsdp_comm_run(rank->comm, &call, err);
    return was_seen ? fsdp_fail(err, FSDP_ERR_INTERNAL, "it was seen") : status;
}

static void test_private_memory_is_not_seen(void)
{
    rank_result results[RANK_PROCESSES_MOST];
    rank_processes ranks = {.size = 2, .deadline_ms = LONG_MS, .body = look_at_private_memory};
    start_rank_processes(&ranks);
    finish_rank_processes(&ranks, results);
    for (int i = 0; i < 2; i++)
        expect(results[i].status == FSDP_ERR_USAGE &&
                   strstr(results[i].err.text, "is not memory of fsdp_comm_alloc"),
               "private memory", i, &results[i]);
}

/* --- killed while they connect ---------------------------------------------------------------- */

typedef struct early_death {
    int rank;
    unsigned after_us;
} early_death;

static void *kill_later(void *user)
{
    usleep(*(const unsigned *)user);
    raise(SIGKILL);
    return NULL;
}

static void plan_death(int rank, void *user)
{
    early_death *plan = user;
    pthread_t thread;
    if (rank == plan->rank)
        (void)pthread_create(&thread, NULL, kill_later, &plan->after_us);
}

static fsdp_status wait_for_death(rank_process *rank, fsdp_error *err)
{
    trouble pooled = {0};
    rank->user = &pooled;
    for (;;)
        FSDP_TRY(reduce(rank, COUNT, err));
}

static void test_early_deaths(void)
{
    for (unsigned i = 0; i < 12; i++) {
        early_death plan = {.rank = (int)(i % 3), .after_us = i * 150};
        rank_processes ranks = {.size = 3,
                                .deadline_ms = LONG_MS,
                                .before = plan_death,
                                .body = wait_for_death,
                                .user = &plan};
        rank_result results[RANK_PROCESSES_MOST];
        run_rank_processes(&ranks, results);
        for (int r = 0; r < 3; r++)
            expect(r == plan.rank || (results[r].is_done && results[r].status == FSDP_ERR_PEER),
                   "early death", r, &results[r]);
        expect_nothing_left(&ranks, results, "early death");
    }
}

/* --- no memory -------------------------------------------------------------------------------- */

static void fail_allocation(int rank, void *user)
{
    if (rank == 1)
        (void)fsdp_mem_fail_after(*(const int *)user, false);
}

static fsdp_status gather_once(rank_process *rank, fsdp_error *err)
{
    comm_case test = {.kind = FSDP_ALL_GATHER,
                      .dtype = FSDP_F32,
                      .count = 1000,
                      .buffers = COMM_PRIVATE,
                      .seed = 3};
    return run_comm_case(rank->comm, &test, err);
}

static void test_no_memory(void)
{
    bool has_failed = true;
    int n = 0;
    for (; has_failed && n < 100; n++) {
        rank_processes ranks = {.size = 2,
                                .deadline_ms = LONG_MS,
                                .before = fail_allocation,
                                .body = gather_once,
                                .user = &n};
        rank_result results[RANK_PROCESSES_MOST];
        run_rank_processes(&ranks, results);
        has_failed = results[1].status != FSDP_OK;
        for (int r = 0; r < 2; r++)
            expect(results[r].is_done && (results[r].status != FSDP_OK) == has_failed, "no memory",
                   r, &results[r]);
        expect_nothing_left(&ranks, results, "no memory");
    }
    rank_result nothing = {0};
    expect(n > 8 && n < 100, "allocations to fail", n, &nothing);
}

/* --- all killed ------------------------------------------------------------------------------- */

static void test_all_killed(void)
{
    trouble pooled = {0};
    rank_result results[RANK_PROCESSES_MOST], nothing = {0};
    for (unsigned i = 0; i < 4; i++) {
        rank_processes ranks = {
            .size = 3, .deadline_ms = LONG_MS, .body = wait_for_death, .user = &pooled};
        start_rank_processes(&ranks);
        usleep(i * 3000);
        for (int r = 0; r < 3; r++)
            kill(ranks.pids[r], SIGKILL);
        finish_rank_processes(&ranks, results);
        expect_nothing_left(&ranks, results, "all killed");
    }
    for (int r = 0; r < 3; r++)
        expect(count_sockets(r) == 0, "sockets", r, &nothing);
}

int main(void)
{
    test_values();
    test_troubles();
    test_private_memory_is_not_seen();
    test_early_deaths();
    test_no_memory();
    test_all_killed();
    printf("collectives between processes: %d failures\n", failures);
    return failures != 0;
}

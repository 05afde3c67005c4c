/*
 * Two jobs, one place: two processes save into the same run, or as the same checkpoint, at the same
 * time. Exactly one of two that save the same step wins; the other one gets FSDP_ERR_EXISTS and
 * changes nothing. Each of two that save different steps wins or is refused so. A save that was
 * reported is there, bit for bit, and nothing of the refused one.
 *
 * One job stops before its n-th storage call, for every n, until the other one has ended; and both
 * run with random pauses.
 */
#include "tests/support/disk/io_fault.h"
#include "base/io/process.h"
#include "tests/fault/scenario.h"
#include "tests/support/matrix_row.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { USUAL_SAMPLE = 8, WORLD = 2, CHILD_SECONDS = 120, RACES = 400 };

/* Memory that the processes share. */
typedef struct shared {
    atomic_bool waiting[2]; /* job i stands before its call */
    atomic_bool ended[2];
    atomic_llong calls; /* of the job that ended last */
    fsdp_error err[2];
} shared;

typedef struct race {
    const char *name;
    bool in_run;
    int64_t step[2];
    int64_t stop_at; /* job 0 waits there for job 1; 0: both pause at random */
    uint64_t seed;
} race;

typedef struct counts {
    int64_t races, all, won, refused, wrong;
} counts;

static shared *common;
static char folder[100];

/* --- one job ------------------------------------------------------------------------------------ */

typedef struct job {
    const race *race;
    int number;
    atomic_llong calls;
    char path[SCENARIO_PATH];
    fsdp_io *io;
} job;

/* The contents differ from job to job, whatever the step. */
static uint64_t content_of(const race *r, int number)
{
    return (uint64_t)r->step[number] * 10 + (uint64_t)number;
}

static int pause_before_call(void *user, fsdp_io_call call, const char *path)
{
    job *j = user;
    int64_t n = atomic_fetch_add(&j->calls, 1) + 1;
    (void)call;
    (void)path;
    if (j->race->stop_at == 0) {
        uint64_t random =
            (j->race->seed * 2 + (uint64_t)j->number + 1) * (uint64_t)n * 0x9E3779B97F4A7C15u;
        if (random >> 61 == 0)
            usleep((useconds_t)(random >> 40 & 0xFFF));
    } else if (j->number == 0 && n == j->race->stop_at) {
        atomic_store(&common->waiting[0], true);
        while (!atomic_load(&common->ended[1]))
            usleep(200);
    }
    return 0;
}

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    job *j = user;
    test_state state;
    fsdp_save_opts opts = {0};
    opts.access.disk = j->io;
    opts.threads = 1;
    FSDP_TRY(test_state_create(&(state_part){.model = STATE_SMALL,
                                             .world = fsdp_ctl_size(ctl),
                                             .rank = fsdp_ctl_rank(ctl)},
                               true, content_of(j->race, j->number), &state, err));
    fsdp_status st = j->race->in_run ? fsdp_run_save(state.sd, ctl, j->path,
                                                     j->race->step[j->number], &opts, err)
                                     : fsdp_sd_save(state.sd, ctl, j->path, &opts, err);
    test_state_release(&state);
    return st;
}

static pid_t start_job(const race *r, int number)
{
    fflush(NULL);
    pid_t child = fork();
    if (child != 0)
        return child;
    alarm(CHILD_SECONDS);
    job j = {.race = r, .number = number};
    fsdp_fault_plan plan = {
        .at = 1, .forever = true, .action = FSDP_FAULT_CALL, .call = pause_before_call, .user = &j};
    scenario_path(j.path, r->in_run ? "%s/run" : "%s/ck", folder);
    if (fsdp_io_fault_create(NULL, &plan, &j.io, NULL) != FSDP_OK)
        _exit(99);
    /* the job that stands still with the lease continues after this one */
    j.io->host = &(fsdp_host){.lease_wait_ms = 30};
    fsdp_status st = fsdp_ctl_run_threads(WORLD, save_rank, &j, &common->err[number]);
    atomic_store(&common->calls, atomic_load(&j.calls));
    atomic_store(&common->ended[number], true);
    _exit((int)st);
}

static int exit_of(pid_t child)
{
    int status = 0;
    if (waitpid(child, &status, 0) != child)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* --- checking the result ------------------------------------------------------------------------ */

static fsdp_status load(const char *path, uint64_t content, fsdp_error *err)
{
    fsdp_sd *full = NULL;
    FSDP_TRY(fsdp_load_full(path, NULL, &full, err));
    int64_t differing = test_sd_differing(full, 0, content);
    fsdp_sd_free(full);
    return differing == 0 ? FSDP_OK
                          : fsdp_fail(err, FSDP_DIFFERS, "'%s' holds something else", path);
}

static bool is_there(const race *r, int number)
{
    char path[SCENARIO_PATH];
    if (r->in_run)
        scenario_path(path, "%s/run/step-%08" PRId64, folder, r->step[number]);
    else
        scenario_path(path, "%s/ck", folder);
    return load(path, content_of(r, number), NULL) == FSDP_OK;
}

static void tell(const race *r, const char *what, const int *ends)
{
    fprintf(stderr,
            "%s, stop at call %" PRId64 ", seed %" PRIu64
            ": %s: jobs ended with %d (%s) and %d (%s)\n",
            r->name, r->stop_at, r->seed, what, ends[0], common->err[0].text, ends[1],
            common->err[1].text);
}

static void judge(const race *r, const int *ends, counts *c)
{
    int won = 0;
    c->races++;
    for (int i = 0; i < 2; i++) {
        won += ends[i] == 0;
        if (ends[i] != 0 && ends[i] != FSDP_ERR_EXISTS) {
            c->wrong++;
            tell(r, "a job was neither saved nor refused", ends);
        }
        if (is_there(r, i) != (ends[i] == 0)) {
            c->wrong++;
            tell(r, "what is there is not what was reported", ends);
        }
    }
    c->won += won;
    c->refused += 2 - won;
    bool same = !r->in_run || r->step[0] == r->step[1];
    if (won == 0 || (same && won != 1)) {
        c->wrong++;
        tell(r, "not one of them won", ends);
    }
    scenario run = {.work = r->in_run ? WORK_RUN : WORK_FRESH};
    if (scenario_leftovers(&run, fsdp_io_posix(), folder) > 0) {
        c->wrong++;
        tell(r, "something half-written is left", ends);
    }
}

static bool clear_folder(void)
{
    scenario_remove(folder);
    memset(common, 0, sizeof *common);
    return mkdir(folder, 0777) == 0;
}

/* The calls of job 0 alone; 0 when it fails. */
static int64_t count_calls(race r)
{
    r.stop_at = -1;
    return clear_folder() && exit_of(start_job(&r, 0)) == 0 ? atomic_load(&common->calls) : 0;
}

static void run_race(const race *r, counts *c)
{
    if (!clear_folder()) {
        c->wrong++;
        return;
    }
    pid_t jobs[2];
    jobs[0] = start_job(r, 0);
    while (r->stop_at > 0 && !atomic_load(&common->waiting[0]) && !atomic_load(&common->ended[0]))
        usleep(200);
    jobs[1] = start_job(r, 1);
    int ends[2] = {0};
    ends[1] = exit_of(jobs[1]);
    ends[0] = exit_of(jobs[0]);
    judge(r, ends, c);
}

static void run_races(race r, test_sampler *sampler, counts *c)
{
    int64_t calls = count_calls(r);
    c->wrong += calls == 0;
    c->all += calls + RACES;
    for (r.stop_at = 1; r.stop_at <= calls; r.stop_at++) {
        if (test_sampler_takes(sampler))
            run_race(&r, c);
    }
    r.stop_at = 0;
    for (r.seed = 0; r.seed < RACES; r.seed++) {
        if (test_sampler_takes(sampler))
            run_race(&r, c);
    }
}

int main(void)
{
    static const race races[] = {{.name = "same step of a run", .in_run = true, .step = {30, 30}},
                                 {.name = "two steps of a run", .in_run = true, .step = {30, 31}},
                                 {.name = "same checkpoint", .step = {30, 30}}};
    counts c = {0};
    test_sampler sampler = {.every = test_sample(USUAL_SAMPLE)};
    common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (common == MAP_FAILED || !scenario_folder(folder, sizeof folder))
        return 1;
    for (size_t i = 0; i < sizeof races / sizeof races[0]; i++)
        run_races(races[i], &sampler, &c);
    scenario_remove(folder);
    matrix_row row = {"two jobs in one place", "races", c.races, c.all, sampler.every};
    bool is_true = matrix_row_print(
        &row, ": saved %" PRId64 ", refused %" PRId64 " | mixed, lost or both %" PRId64, c.won,
        c.refused, c.wrong);
    bool is_both = c.refused > 0 || sampler.every > USUAL_SAMPLE;
    return is_true && c.races > 0 && is_both && c.wrong == 0 ? 0 : 1;
}

/*
 * The kill matrix: a process that saves or converts is killed at every storage call it makes, every
 * second time in the middle of a write. Afterwards another process finds the old state or the new
 * one bit for bit, and its next save works, the dead one's lease and leftovers notwithstanding.
 */
#include "tests/support/disk/io_fault.h"
#include "tests/fault/scenario.h"
#include "tests/support/matrix_row.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { USUAL_SAMPLE = 45, CHILD_SECONDS = 120 };

typedef struct counts {
    int64_t works, points, killed, old, new, lost, stuck;
} counts;

static char folder[100];

static void copy_tree(const char *from, const char *to)
{
    char command[2 * SCENARIO_PATH + 40];
    scenario_remove(to);
    int length = snprintf(command, sizeof command, "cp -a '%s' '%s'", from, to);
    if (length < 0 || (size_t)length >= sizeof command || system(command) != 0)
        abort();
}

/* 0: it ended by itself with FSDP_OK; SIGKILL: it was killed; else something else happened. */
static int act_in_a_child(const scenario *s, const char *root, const fsdp_fault_plan *plan)
{
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        fsdp_io *io = NULL;
        fsdp_error err = {0};
        alarm(CHILD_SECONDS);
        if (fsdp_io_fault_create(NULL, plan, &io, &err) != FSDP_OK)
            _exit(99);
        fsdp_status st = scenario_act(s, io, root, &err);
        if (st != FSDP_OK)
            fprintf(stderr, "%s: %s\n", s->name, err.text);
        _exit((int)st);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        return -1;
    return WIFSIGNALED(status) ? WTERMSIG(status) : 1000 * WEXITSTATUS(status);
}

static void tell(const scenario *s, int64_t call, const char *what, const fsdp_error *err)
{
    fprintf(stderr, "%s, killed at call %" PRId64 ": %s: %s\n", s->name, call, what, err->text);
}

/* Checks the files that a kill left, and that the next save succeeds. */
static void judge(const scenario *s, const char *root, int64_t call, bool finished, counts *c)
{
    fsdp_error err = {0};
    fsdp_io *io = fsdp_io_posix();
    scenario_found found = scenario_look(s, io, root, &err);
    c->old += found == FOUND_OLD || found == FOUND_NOTHING;
    c->new += found == FOUND_NEW;
    if (!scenario_is_whole(s, found) || (finished && found != FOUND_NEW)) {
        c->lost++;
        tell(s, call, "lost", &err);
    }
    if (scenario_again(s, io, root, &err) != FSDP_OK) {
        c->stuck++;
        tell(s, call, "the next save fails", &err);
    }
}

static void kill_at(const scenario *s, int64_t call, counts *c)
{
    char golden[SCENARIO_PATH], work[SCENARIO_PATH];
    fsdp_fault_plan plan = {.at = call, .action = call % 2 ? FSDP_FAULT_TEAR : FSDP_FAULT_KILL};
    scenario_path(golden, "%s/golden", folder);
    scenario_path(work, "%s/work", folder);
    copy_tree(golden, work);
    int end = act_in_a_child(s, work, &plan);
    if (end != 0 && end != SIGKILL) {
        fprintf(stderr, "%s: killed at call %" PRId64 ", the process ended with %d\n", s->name,
                call, end);
        c->lost++;
    }
    c->killed += end == SIGKILL;
    judge(s, work, call, end == 0, c);
}

/* The number of calls of a run without a fault; -1 when it fails. */
static int64_t count_calls(const scenario *s)
{
    char golden[SCENARIO_PATH], work[SCENARIO_PATH];
    fsdp_io *io = NULL;
    fsdp_error err = {0};
    int64_t calls = -1;
    scenario_path(golden, "%s/golden", folder);
    scenario_path(work, "%s/work", folder);
    copy_tree(golden, work);
    if (fsdp_io_fault_create(NULL, NULL, &io, &err) == FSDP_OK &&
        scenario_act(s, io, work, &err) == FSDP_OK)
        calls = fsdp_io_fault_calls(io);
    else
        fprintf(stderr, "%s: %s\n", s->name, err.text);
    fsdp_io_fault_free(io);
    return calls;
}

static bool run_scenario(const scenario *s, test_sampler *sampler, counts *c)
{
    char golden[SCENARIO_PATH];
    fsdp_error err = {0};
    scenario_path(golden, "%s/golden", folder);
    scenario_remove(golden);
    if (mkdir(golden, 0777) < 0 || scenario_prepare(s, fsdp_io_posix(), golden, &err) != FSDP_OK) {
        fprintf(stderr, "%s: %s\n", s->name, err.text);
        return false;
    }
    int64_t calls = count_calls(s);
    for (int64_t call = 1; call <= calls; call++)
        if (test_sampler_takes(sampler))
            kill_at(s, call, c);
    c->works++;
    c->points += calls;
    return calls > 0;
}

int main(int argc, char **argv)
{
    counts c = {0};
    scenario s;
    test_sampler sampler = {.every = test_sample(USUAL_SAMPLE)};
    bool ok = scenario_folder(folder, sizeof folder);
    for (int i = 0; ok && scenario_next(&i, argc > 1 ? argv[1] : NULL, &s);)
        ok = run_scenario(&s, &sampler, &c);
    matrix_row row = {"killed at a storage call", "points", c.killed, argc > 1 ? 0 : c.points,
                      sampler.every};
    ok = matrix_row_print(&row,
                          " in %" PRId64 " works: old %" PRId64 ", new %" PRId64 " | lost %" PRId64
                          ", next save fails %" PRId64,
                          c.works, c.old, c.new, c.lost, c.stuck) &&
         ok;
    scenario_remove(folder);
    return ok && c.killed > 0 && c.lost == 0 && c.stuck == 0 ? 0 : 1;
}

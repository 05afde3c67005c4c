/* See world_processes.h. */
#include "tests/support/world_processes.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/ctl_pairs.h"

static void stop(const char *what)
{
    perror(what);
    exit(99);
}

void *share_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        stop("memory of several processes");
    return memory;
}

static int count_fds(void)
{
    int n = 0;
    DIR *all = opendir("/proc/self/fd");
    while (all && readdir(all))
        n++;
    if (all)
        closedir(all);
    return n;
}

static fsdp_status connect_and_run(const world_processes *worlds, int number, const int *ends,
                                   fsdp_error *err)
{
    world_rank rank = {.user = worlds->user};
    fsdp_world_parts parts = {
        .local_rank = number, .local_size = worlds->size, .deadline_ms = worlds->deadline_ms};
    FSDP_TRY(take_ctl_pairs(worlds->size, number, ends, &parts.ctl, err));
    fsdp_ctl_set_deadline(parts.ctl, worlds->deadline_ms);
    fsdp_status status = worlds->size > 1
                             ? fsdp_fabric_shm(parts.ctl, worlds->deadline_ms, &parts.fabric, err)
                             : fsdp_fabric_self(&parts.fabric, err);
    if (status != FSDP_OK) {
        fsdp_ctl_free(parts.ctl);
        return status;
    }
    return run_world(&parts, worlds->device, worlds->body, &rank, err);
}

static void run_rank(const world_processes *worlds, int number, const int *ends)
{
    world_outcome *outcome = &worlds->outcomes[number];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(worlds->hangs_after_s > 0 ? worlds->hangs_after_s : 100);
    int fds = count_fds() - worlds->size * (worlds->size - 1); /* but the ends, which close */
    outcome->status = connect_and_run(worlds, number, ends, &outcome->err);
    outcome->fds_left = count_fds() - fds;
    outcome->is_done = true;
    exit(0); /* so that leaks are looked for */
}

void start_world_processes(world_processes *worlds)
{
    int ends[WORLD_PROCESSES_MOST * WORLD_PROCESSES_MOST];
    worlds->outcomes = share_memory(WORLD_PROCESSES_MOST * sizeof *worlds->outcomes);
    if (!make_ctl_pairs(worlds->size, ends))
        stop("a world of processes");
    fflush(NULL);
    for (int i = 0; i < worlds->size; i++) {
        worlds->pids[i] = fork();
        if (worlds->pids[i] == 0)
            run_rank(worlds, i, ends);
        if (worlds->pids[i] < 0)
            stop("fork");
    }
    close_ctl_pairs(worlds->size, ends);
}

/* A rank that ends otherwise than by itself, or in which leaks were found. */
static void note_end(world_outcome *outcome, int rank, int how)
{
    if (WIFEXITED(how) && WEXITSTATUS(how) == 0)
        return;
    outcome->signal = WIFSIGNALED(how) ? WTERMSIG(how) : 0;
    outcome->is_done = false;
    if (outcome->status == FSDP_OK)
        outcome->status = fsdp_fail(&outcome->err, FSDP_ERR_INTERNAL,
                                    "rank %d ended with status %#x", rank, (unsigned)how);
}

void finish_world_processes(world_processes *worlds, world_outcome *outcomes_out)
{
    for (int i = 0; i < worlds->size; i++) {
        int how;
        if (waitpid(worlds->pids[i], &how, 0) < 0)
            stop("waitpid");
        note_end(&worlds->outcomes[i], i, how);
    }
    memcpy(outcomes_out, worlds->outcomes, (size_t)worlds->size * sizeof *outcomes_out);
    munmap(worlds->outcomes, WORLD_PROCESSES_MOST * sizeof *worlds->outcomes);
}

fsdp_status run_world_processes(world_processes *worlds, fsdp_error *err)
{
    world_outcome outcomes[WORLD_PROCESSES_MOST];
    start_world_processes(worlds);
    finish_world_processes(worlds, outcomes);
    for (int i = 0; i < worlds->size; i++) {
        if (outcomes[i].status == FSDP_OK && outcomes[i].fds_left > 0)
            outcomes[i].status = fsdp_fail(&outcomes[i].err, FSDP_ERR_INTERNAL,
                                           "rank %d leaves %d files open", i, outcomes[i].fds_left);
        if (outcomes[i].status != FSDP_OK) {
            *err = outcomes[i].err;
            return outcomes[i].status;
        }
    }
    return FSDP_OK;
}

/* See rank_processes.h. */
#include "tests/support/rank_processes.h"

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

static fsdp_status connect_rank(rank_process *rank, const rank_processes *ranks, const int *ends,
                                fsdp_error *err)
{
    int all[RANK_PROCESSES_MOST];
    for (int i = 0; i < ranks->size; i++)
        all[i] = i;
    FSDP_TRY(take_ctl_pairs(ranks->size, rank->rank, ends, &rank->ctl, err));
    fsdp_ctl_set_deadline(rank->ctl, ranks->deadline_ms);
    FSDP_TRY(fsdp_fabric_shm(rank->ctl, ranks->deadline_ms, &rank->fabric, err));
    return rank->fabric->ops->comm_create(rank->fabric, all, ranks->size, &rank->comm, err);
}

static void run_rank(const rank_processes *ranks, int number, const int *ends)
{
    rank_process rank = {.rank = number,
                         .size = ranks->size,
                         .user = ranks->user,
                         .result = &ranks->results[number]};
    rank_result *result = rank.result;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int fds = count_fds() - ranks->size * (ranks->size - 1); /* but the ends, which close */
    if (ranks->before)
        ranks->before(number, ranks->user);
    result->status = connect_rank(&rank, ranks, ends, &result->err);
    if (result->status == FSDP_OK) {
        result->is_connected = true;
        result->status = ranks->body(&rank, &result->err);
    }
    fsdp_comm_free(rank.comm);
    if (rank.fabric)
        rank.fabric->ops->close(rank.fabric);
    fsdp_ctl_free(rank.ctl);
    result->fds_left = count_fds() - fds;
    result->is_done = true;
    exit(0); /* so that leaks are looked for */
}

void start_rank_processes(rank_processes *ranks)
{
    int ends[RANK_PROCESSES_MOST * RANK_PROCESSES_MOST];
    size_t size = RANK_PROCESSES_MOST * sizeof *ranks->results;
    ranks->results = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (ranks->results == MAP_FAILED || !make_ctl_pairs(ranks->size, ends))
        stop("a world of processes");
    fflush(NULL);
    for (int i = 0; i < ranks->size; i++) {
        ranks->pids[i] = fork();
        if (ranks->pids[i] == 0)
            run_rank(ranks, i, ends);
        if (ranks->pids[i] < 0)
            stop("fork");
    }
    close_ctl_pairs(ranks->size, ends);
}

void finish_rank_processes(rank_processes *ranks, rank_result *results_out)
{
    for (int i = 0; i < ranks->size; i++) {
        int how;
        if (waitpid(ranks->pids[i], &how, 0) < 0)
            stop("waitpid");
        bool is_well = WIFEXITED(how) ? WEXITSTATUS(how) == 0 : WTERMSIG(how) == SIGKILL;
        if (!is_well) {
            fprintf(stderr, "rank %d ended with status %#x\n", i, (unsigned)how);
            ranks->results[i].status = FSDP_ERR_INTERNAL;
        }
    }
    size_t size = RANK_PROCESSES_MOST * sizeof *ranks->results;
    memcpy(results_out, ranks->results, (size_t)ranks->size * sizeof *results_out);
    munmap(ranks->results, size);
}

void run_rank_processes(rank_processes *ranks, rank_result *results_out)
{
    start_rank_processes(ranks);
    finish_rank_processes(ranks, results_out);
}

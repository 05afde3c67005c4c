/* See rank_processes.h. */
#include "tests/support/ranks/rank_processes.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "runtime/comm_shared/shared_transports.h"
#include "tests/support/rounds/ctl_pairs.h"

static fsdp_status connect_rank(rank_process *rank, const rank_processes *ranks, const int *ends,
                                fsdp_error *err)
{
    int all[RANK_PROCESSES_MOST];
    for (int i = 0; i < ranks->size; i++)
        all[i] = i;
    FSDP_TRY(take_ctl_pairs(ranks->size, rank->rank, ends, &rank->ctl, err));
    fsdp_ctl_set_deadline(rank->ctl, ranks->deadline_ms);
    FSDP_TRY(fsdp_transport_shm(rank->ctl, ranks->deadline_ms, &rank->transport, err));
    return rank->transport->ops->comm_create(rank->transport, all, ranks->size, 1, &rank->comm,
                                             err);
}

static void run_rank(int number, const int *ends, const void *user)
{
    const rank_processes *ranks = user;
    rank_process rank = {.rank = number,
                         .size = ranks->size,
                         .user = ranks->user,
                         .result = &ranks->results[number]};
    rank_result *result = rank.result;
    int files = count_files_without_ends(ranks->size);
    if (ranks->before)
        ranks->before(number, ranks->user);
    result->status = connect_rank(&rank, ranks, ends, &result->err);
    if (result->status == FSDP_OK) {
        result->is_connected = true;
        result->status = ranks->body(&rank, &result->err);
    }
    fsdp_comm_free(rank.comm);
    if (rank.transport)
        rank.transport->ops->close(rank.transport);
    fsdp_ctl_free(rank.ctl);
    result->fds_left = count_open_files() - files;
    result->is_done = true;
}

void start_rank_processes(rank_processes *ranks)
{
    ranks->results = share_memory(RANK_PROCESSES_MOST * sizeof *ranks->results);
    fork_ranks(ranks->size, run_rank, ranks, ranks->pids);
}

void finish_rank_processes(rank_processes *ranks, rank_result *results_out)
{
    for (int i = 0; i < ranks->size; i++) {
        int how = wait_for_rank(ranks->pids[i]);
        bool is_well = WIFEXITED(how) ? WEXITSTATUS(how) == 0 : WTERMSIG(how) == SIGKILL;
        if (!is_well) {
            fprintf(stderr, "rank %d ended with status %#x\n", i, (unsigned)how);
            ranks->results[i].status = FSDP_ERR_INTERNAL;
        }
    }
    memcpy(results_out, ranks->results, (size_t)ranks->size * sizeof *results_out);
    munmap(ranks->results, RANK_PROCESSES_MOST * sizeof *ranks->results);
}

void run_rank_processes(rank_processes *ranks, rank_result *results_out)
{
    start_rank_processes(ranks);
    finish_rank_processes(ranks, results_out);
}

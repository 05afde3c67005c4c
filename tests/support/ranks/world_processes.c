/* See world_processes.h. */
#include "tests/support/ranks/world_processes.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/comm_shared/shared_transports.h"
#include "tests/support/rounds/ctl_pairs.h"

static fsdp_status connect_and_run(const world_processes *worlds, int number, const int *ends,
                                   fsdp_error *err)
{
    world_rank rank = {.user = worlds->user};
    fsdp_world_parts parts = {
        .local_rank = number, .local_size = worlds->size, .deadline_ms = worlds->deadline_ms};
    FSDP_TRY(take_ctl_pairs(worlds->size, number, ends, &parts.ctl, err));
    fsdp_ctl_set_deadline(parts.ctl, worlds->deadline_ms);
    fsdp_status status =
        worlds->size > 1 ? fsdp_transport_shm(parts.ctl, worlds->deadline_ms, &parts.transport, err)
                         : fsdp_transport_self(&parts.transport, err);
    if (status != FSDP_OK) {
        fsdp_ctl_free(parts.ctl);
        return status;
    }
    return run_world(&parts, worlds->device, worlds->body, &rank, err);
}

static void run_rank(int number, const int *ends, const void *user)
{
    const world_processes *worlds = user;
    world_outcome *outcome = &worlds->outcomes[number];
    alarm(worlds->hangs_after_s > 0 ? worlds->hangs_after_s : 100);
    int files = count_files_without_ends(worlds->size);
    outcome->status = connect_and_run(worlds, number, ends, &outcome->err);
    outcome->fds_left = count_open_files() - files;
    outcome->is_done = true;
    if (worlds->ends_at_once)
        _exit(0);
}

void start_world_processes(world_processes *worlds)
{
    worlds->outcomes = share_memory(WORLD_PROCESSES_MOST * sizeof *worlds->outcomes);
    fork_ranks(worlds->size, run_rank, worlds, worlds->pids);
}

/* Records a rank that did not end by itself, or that has leaks. */
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
    for (int i = 0; i < worlds->size; i++)
        note_end(&worlds->outcomes[i], i, wait_for_rank(worlds->pids[i]));
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

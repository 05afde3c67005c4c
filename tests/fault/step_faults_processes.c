/*
 * Faults at every collective of a training step, over ranks that are processes: one is killed,
 * stopped, gives up, makes another call, or has no memory. All others get an error that names it
 * and the unit, no rank hangs, nothing leaks, and the next step succeeds. FSDP_TEST_SAMPLE: every
 * n-th case.
 */
#include "tests/fault/step_fault_worlds.h"
#include "tests/support/ranks/world_processes.h"

#include <signal.h>

enum { USUAL_SAMPLE = 25, HANGS_AFTER_S = 50 };

/* A killed rank has nothing to say; all others end by themselves, and leave nothing. */
static bool judge(const step_fault *fault, int rank, world_outcome *outcome, fsdp_text *why)
{
    outcome->err.status = outcome->status;
    if (fault->kind == STEP_FAULT_KILLED && rank == fault->rank) {
        if (outcome->signal != SIGKILL)
            fsdp_text_addf(why, "was not killed");
        return outcome->signal == SIGKILL;
    }
    if (!outcome->is_done || outcome->fds_left > 0) {
        fsdp_text_addf(why, "signal %d, %d files are open, '%s'", outcome->signal,
                       outcome->fds_left, outcome->err.text);
        return false;
    }
    return step_fault_judge(fault, rank, outcome->status, &outcome->err, why);
}

static bool try_fault(const step_world *world, const step_fault *fault, bool *has_failed_out,
                      fsdp_text *why)
{
    world_outcome outcomes[WORLD_PROCESSES_MOST];
    world_processes worlds = {.size = world->ranks,
                              .deadline_ms = STEP_FAULT_DEADLINE_MS,
                              .hangs_after_s = HANGS_AFTER_S,
                              .device = world->device,
                              .body = step_fault_body,
                              .user = (void *)fault};
    start_world_processes(&worlds);
    finish_world_processes(&worlds, outcomes);
    for (int i = 0; i < world->ranks; i++) {
        *has_failed_out = *has_failed_out || outcomes[i].status != FSDP_OK;
        if (!judge(fault, i, &outcomes[i], why)) {
            fsdp_text_addf(why, " (rank %d)", i);
            return false;
        }
    }
    return true;
}

int main(void)
{
    static const step_fault_kind kinds[] = {STEP_FAULT_KILLED, STEP_FAULT_STOPPED,
                                            STEP_FAULT_GIVES_UP, STEP_FAULT_ORDER,
                                            STEP_FAULT_SHAPE};
    const step_fault_runner runner = {.name = "process",
                                      .try = try_fault,
                                      .kinds = kinds,
                                      .kind_count = sizeof kinds / sizeof *kinds,
                                      .usual_sample = USUAL_SAMPLE,
                                      .calls = share_memory(sizeof(step_calls))};
    return step_fault_run_worlds(&runner) ? 0 : 1;
}

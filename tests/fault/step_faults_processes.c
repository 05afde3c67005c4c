/*
 * Faults at every collective of a training step, over ranks that are processes: one is killed,
 * stopped, gives up, makes another call, or has no memory. All others get an error that names it
 * and the unit, nobody hangs, nothing is left, and the next step is well. FSDP_TEST_SAMPLE: every
 * n-th case.
 */
#include "tests/fault/step_fault.h"
#include "tests/support/state.h"
#include "tests/support/world_processes.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>

enum { USUAL_SAMPLE = 25, HANGS_AFTER_S = 50 };

typedef struct step_world {
    int ranks;
    bool has_replicas;
    const char *device;
} step_world;

typedef struct counts {
    int64_t cases, failed, wrong;
} counts;

static step_calls *calls;

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

static void run_fault(const step_world *world, const step_fault *fault, counts *c)
{
    world_outcome outcomes[WORLD_PROCESSES_MOST];
    world_processes worlds = {.size = world->ranks,
                              .deadline_ms = STEP_FAULT_DEADLINE_MS,
                              .hangs_after_s = HANGS_AFTER_S,
                              .device = world->device,
                              .body = step_fault_body,
                              .user = (void *)fault};
    char what[200];
    fsdp_text why = {0};
    bool is_well = true, has_failed = false;
    start_world_processes(&worlds);
    finish_world_processes(&worlds, outcomes);
    for (int i = 0; i < world->ranks && is_well; i++) {
        has_failed = has_failed || outcomes[i].status != FSDP_OK;
        is_well = judge(fault, i, &outcomes[i], &why);
        if (!is_well)
            fsdp_text_addf(&why, " (rank %d)", i);
    }
    c->cases++;
    c->failed += has_failed;
    if (!is_well) {
        c->wrong++;
        step_fault_describe(fault, world->ranks, world->device, what, sizeof what);
        fprintf(stderr, "%s: %s\n", what, why.data);
    }
    fsdp_text_release(&why);
}

/* Which calls there are; also the next step, after the faults. */
static void run_well(const step_world *world, counts *c)
{
    const step_fault none = {.has_replicas = world->has_replicas, .calls = calls};
    *calls = (step_calls){0};
    run_fault(world, &none, c);
}

static void run_at(const step_world *world, step_fault_kind kind, int64_t at, test_sampler *sampler,
                   counts *c)
{
    for (int last = 0; last < 2; last++) {
        const step_fault fault = {.kind = kind,
                                  .rank = last ? world->ranks - 1 : 0,
                                  .at = (int)at,
                                  .has_replicas = world->has_replicas,
                                  .from_comm = at % 2 == 1,
                                  .calls = calls};
        if (test_sampler_takes(sampler))
            run_fault(world, &fault, c);
    }
}

static void run_world_faults(const step_world *world, test_sampler *sampler, counts *c)
{
    static const step_fault_kind kinds[] = {STEP_FAULT_KILLED, STEP_FAULT_STOPPED,
                                            STEP_FAULT_GIVES_UP, STEP_FAULT_ORDER,
                                            STEP_FAULT_SHAPE};
    run_well(world, c);
    int count = calls->count;
    int64_t allocations = calls->allocations;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int at = 0; at < count; at++)
            run_at(world, kinds[k], at, sampler, c);
    for (int pass = 0; pass < 2; pass++)
        run_at(world, STEP_FAULT_SWAPPED, pass, sampler, c);
    run_at(world, STEP_FAULT_GRADIENT, 0, sampler, c);
    for (int64_t at = 0; at < allocations; at++)
        run_at(world, STEP_FAULT_MEMORY, at, sampler, c);
    run_well(world, c);
}

int main(void)
{
    static const step_world worlds[] = {{2, false, "cpu"}, {2, false, "cpu-async"},
                                        {3, false, "cpu"}, {3, false, "cpu-async"},
                                        {4, true, "cpu"},  {4, true, "cpu-async"}};
    counts c = {0};
    test_sampler sampler = {.every = test_sample(USUAL_SAMPLE)};
    calls = share_memory(sizeof *calls);
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        run_world_faults(&worlds[i], &sampler, &c);
    printf("| a rank that is a process fails at a collective of a step | %" PRId64
           " cases (1 of %" PRId64 "), %" PRId64 " failures | wrong %" PRId64 " |\n",
           c.cases, sampler.every, c.failed, c.wrong);
    return c.failed > 0 && c.wrong == 0 ? 0 : 1;
}

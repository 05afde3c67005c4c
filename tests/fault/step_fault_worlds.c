/* See step_fault_worlds.h. */
#include "tests/fault/step_fault_worlds.h"

#include <inttypes.h>
#include <stdio.h>

#include "tests/support/matrix_row.h"
#include "tests/support/sample_state.h"

typedef struct step_run {
    const step_fault_runner *runner;
    const step_world *world;
    test_sampler sampler;
    int64_t cases, failed, wrong;
} step_run;

static void run_fault(step_run *run, const step_fault *fault)
{
    char what[200];
    fsdp_text why = {0};
    bool has_failed = false;
    bool is_well = run->runner->try(run->world, fault, &has_failed, &why);
    bool is_slow = fault->kind == STEP_FAULT_STOPPED || fault->kind == STEP_FAULT_LATE;
    if (is_well && !has_failed && is_slow &&
        !fault->has_replicas) { /* the slow rank waits for that */
        fsdp_text_addf(&why, "no rank has failed");
        is_well = false;
    }
    run->cases++;
    run->failed += has_failed;
    if (!is_well) {
        run->wrong++;
        step_fault_describe(fault, run->world->ranks, run->world->device, what, sizeof what);
        fprintf(stderr, "%s: %s\n", what, why.data);
    }
    fsdp_text_release(&why);
}

/* Which calls there are; also the next step, after the faults. */
static void run_well(step_run *run)
{
    step_calls *calls = run->runner->calls;
    const step_fault none = {.has_replicas = run->world->has_replicas, .calls = calls};
    *calls = (step_calls){0};
    run_fault(run, &none);
}

static void run_of_rank(step_run *run, step_fault_kind kind, int64_t at, int rank)
{
    bool is_any_rank = kind == STEP_FAULT_MEMORY && run->runner->shares_memory;
    const step_fault fault = {.kind = kind,
                              .rank = rank,
                              .at = (int)at,
                              .has_replicas = run->world->has_replicas,
                              .from_comm = !is_any_rank && at % 2 == 1,
                              .calls = run->runner->calls};
    if (test_sampler_takes(&run->sampler))
        run_fault(run, &fault);
}

static void run_at(step_run *run, step_fault_kind kind, int64_t at)
{
    run_of_rank(run, kind, at, 0);
    run_of_rank(run, kind, at, run->world->ranks - 1);
}

static void run_without_memory(step_run *run, int64_t allocations)
{
    bool is_shared = run->runner->shares_memory;
    for (int64_t at = 0; at < (is_shared ? allocations * run->world->ranks : allocations); at++)
        if (is_shared)
            run_of_rank(run, STEP_FAULT_MEMORY, at, 0);
        else
            run_at(run, STEP_FAULT_MEMORY, at);
}

static void run_faults(step_run *run)
{
    const step_fault_runner *runner = run->runner;
    run_well(run);
    int count = runner->calls->count;
    int64_t allocations = runner->calls->allocations;
    for (size_t k = 0; k < runner->kind_count; k++)
        for (int at = 0; at < count; at++)
            run_at(run, runner->kinds[k], at);
    for (int pass = 0; pass < 2; pass++)
        run_at(run, STEP_FAULT_SWAPPED, pass);
    run_at(run, STEP_FAULT_GRADIENT, 0);
    run_without_memory(run, allocations);
    run_well(run);
}

bool step_fault_run_worlds(const step_fault_runner *runner)
{
    static const step_world worlds[] = {{2, false, "cpu"}, {2, false, "cpu-async"},
                                        {3, false, "cpu"}, {3, false, "cpu-async"},
                                        {4, true, "cpu"},  {4, true, "cpu-async"}};
    step_run run = {.runner = runner, .sampler.every = test_sample(runner->usual_sample)};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        run.world = &worlds[i];
        run_faults(&run);
    }
    char what[100];
    snprintf(what, sizeof what, "a rank that is a %s fails at a collective of a step",
             runner->name);
    matrix_row row = {what, "cases", run.cases, run.sampler.seen, run.sampler.every};
    bool is_true =
        matrix_row_print(&row, ", %" PRId64 " failures | wrong %" PRId64, run.failed, run.wrong);
    return is_true && run.failed > 0 && run.wrong == 0;
}

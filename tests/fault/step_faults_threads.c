/*
 * Faults at every collective of a training step, over ranks that are threads: one is late, gives
 * up, makes another call, or has no memory. All get an error that names it and the unit, at once,
 * nobody hangs, nothing is left, and the next step of others is well. FSDP_TEST_SAMPLE: every n-th
 * case. Plain program, so that ThreadSanitizer sees it.
 */
#include "tests/fault/step_fault.h"
#include "tests/support/state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { USUAL_SAMPLE = 40, MOST_RANKS = 4, SECONDS = 250 };

typedef struct step_world {
    int ranks;
    bool has_replicas;
    const char *device;
} step_world;

typedef struct counts {
    int64_t cases, failed, wrong;
} counts;

static step_calls calls;

static void judge_all(const step_world *world, const step_fault *fault, world_result *results,
                      counts *c)
{
    char what[200];
    fsdp_text why = {0};
    bool is_well = true;
    for (int i = 0; i < world->ranks && is_well; i++) {
        results[i].err.status = results[i].status;
        is_well = step_fault_judge(fault, i, results[i].status, &results[i].err, &why);
        if (!is_well)
            fsdp_text_addf(&why, " (rank %d)", i);
    }
    if (!is_well) {
        c->wrong++;
        step_fault_describe(fault, world->ranks, world->device, what, sizeof what);
        fprintf(stderr, "%s: %s\n", what, why.data);
    }
    c->cases++;
    fsdp_text_release(&why);
}

static void run_fault(const step_world *world, const step_fault *fault, counts *c)
{
    world_result results[MOST_RANKS];
    fsdp_error err = {0};
    fsdp_status status = run_worlds_within(world->ranks, world->device, STEP_FAULT_DEADLINE_MS,
                                           step_fault_body, (void *)fault, results, &err);
    c->failed += status != FSDP_OK;
    judge_all(world, fault, results, c);
}

/* Which calls there are; also the next run, after a fault. */
static void run_well(const step_world *world, counts *c)
{
    step_fault none = {.has_replicas = world->has_replicas, .calls = &calls};
    calls = (step_calls){0};
    run_fault(world, &none, c);
}

static void run_at(const step_world *world, step_fault_kind kind, int at, test_sampler *sampler,
                   counts *c)
{
    for (int last = 0; last < 2; last++) {
        const step_fault fault = {.kind = kind,
                                  .rank = last ? world->ranks - 1 : 0,
                                  .at = at,
                                  .has_replicas = world->has_replicas,
                                  .from_comm = at % 2 == 1,
                                  .calls = &calls};
        if (test_sampler_takes(sampler))
            run_fault(world, &fault, c);
    }
}

static bool tells_of_memory(const fsdp_error *err)
{
    return strstr(err->text, "cannot allocate") || strstr(err->text, "no memory");
}

/* Or of a rank that says so. */
static bool is_about_memory(const world_result *results, int ranks, const fsdp_error *err)
{
    char name[16];
    for (int i = 0; i < ranks; i++) {
        snprintf(name, sizeof name, "rank %d", i);
        if (tells_of_memory(&results[i].err) && strstr(err->text, name))
            return true;
    }
    return tells_of_memory(err);
}

/* Threads share their memory: which rank it hits is not known before. */
static void run_without_memory(const step_world *world, int64_t at, counts *c)
{
    world_result results[MOST_RANKS];
    fsdp_error err = {0};
    const step_fault fault = {.kind = STEP_FAULT_MEMORY,
                              .at = (int)at,
                              .has_replicas = world->has_replicas,
                              .calls = &calls};
    c->cases++;
    fsdp_status status = run_worlds_within(world->ranks, world->device, STEP_FAULT_DEADLINE_MS,
                                           step_fault_body, (void *)&fault, results, &err);
    c->failed += status != FSDP_OK;
    for (int i = 0; i < world->ranks; i++) {
        results[i].err.status = results[i].status;
        if (results[i].status == FSDP_OK || is_about_memory(results, world->ranks, &results[i].err))
            continue;
        c->wrong++;
        fprintf(stderr, "%d ranks on %s, allocation %" PRId64 ", rank %d: status %d, '%s'\n",
                world->ranks, world->device, at, i, (int)results[i].status, results[i].err.text);
    }
}

static void run_world_faults(const step_world *world, test_sampler *sampler, counts *c)
{
    static const step_fault_kind kinds[] = {STEP_FAULT_LATE, STEP_FAULT_GIVES_UP, STEP_FAULT_ORDER,
                                            STEP_FAULT_SHAPE};
    run_well(world, c);
    int count = calls.count;
    int64_t allocations = calls.allocations * world->ranks;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int at = 0; at < count; at++)
            run_at(world, kinds[k], at, sampler, c);
    for (int pass = 0; pass < 2; pass++)
        run_at(world, STEP_FAULT_SWAPPED, pass, sampler, c);
    run_at(world, STEP_FAULT_GRADIENT, 0, sampler, c);
    for (int64_t at = 0; at < allocations; at++)
        if (test_sampler_takes(sampler))
            run_without_memory(world, at, c);
    run_well(world, c);
}

int main(void)
{
    static const step_world worlds[] = {{2, false, "cpu"}, {2, false, "cpu-async"},
                                        {3, false, "cpu"}, {3, false, "cpu-async"},
                                        {4, true, "cpu"},  {4, true, "cpu-async"}};
    counts c = {0};
    test_sampler sampler = {.every = test_sample(USUAL_SAMPLE)};
    alarm(sampler.every > 1 ? SECONDS : 0); /* nobody hangs */
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        run_world_faults(&worlds[i], &sampler, &c);
    printf("| a rank that is a thread fails at a collective of a step | %" PRId64
           " cases (1 of %" PRId64 "), %" PRId64 " failures | wrong %" PRId64 " |\n",
           c.cases, sampler.every, c.failed, c.wrong);
    return c.failed > 0 && c.wrong == 0 ? 0 : 1;
}

/*
 * Faults at every collective of a training step, over ranks that are threads: one is late, gives
 * up, makes another call, or has no memory. All get an error that names it and the unit, at once,
 * no rank hangs, nothing leaks, and the next step of other ranks succeeds. FSDP_TEST_SAMPLE: every
 * n-th case. A plain program, for ThreadSanitizer.
 */
#include "tests/fault/step_fault_worlds.h"
#include "tests/support/sample_state.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { USUAL_SAMPLE = 40, SECONDS = 250 };

static bool tells_of_memory(const fsdp_error *err)
{
    return strstr(err->text, "cannot allocate") || strstr(err->text, "no memory");
}

/* Or of a rank that says so. */
static bool is_about_memory(const rank_outcome *outcomes, int ranks, const fsdp_error *err)
{
    char name[16];
    for (int i = 0; i < ranks; i++) {
        snprintf(name, sizeof name, "rank %d", i);
        if (tells_of_memory(&outcomes[i].err) && strstr(err->text, name))
            return true;
    }
    return tells_of_memory(err);
}

/* Threads share their memory: it may have hit any of them. */
static bool judge_memory(const rank_outcome *outcomes, int ranks, fsdp_text *why)
{
    for (int i = 0; i < ranks; i++) {
        const rank_outcome *outcome = &outcomes[i];
        if (outcome->status == FSDP_OK || is_about_memory(outcomes, ranks, &outcome->err))
            continue;
        fsdp_text_addf(why, "rank %d: status %d, '%s'", i, (int)outcome->status, outcome->err.text);
        return false;
    }
    return true;
}

static bool judge_all(const step_world *world, const step_fault *fault, rank_outcome *outcomes,
                      fsdp_text *why)
{
    for (int i = 0; i < world->ranks; i++) {
        rank_outcome *outcome = &outcomes[i];
        outcome->err.status = outcome->status;
        if (!step_fault_judge(fault, i, outcome->status, &outcome->err, why)) {
            fsdp_text_addf(why, " (rank %d)", i);
            return false;
        }
    }
    return true;
}

static bool try_fault(const step_world *world, const step_fault *fault, bool *has_failed_out,
                      fsdp_text *why)
{
    const worlds_setup setup = {
        .ranks = world->ranks, .deadline_ms = STEP_FAULT_DEADLINE_MS, .device = world->device};
    rank_outcome outcomes[STEP_WORLD_MOST];
    fsdp_error err = {0};
    fsdp_status status = run_worlds_within(&setup, step_fault_body, (void *)fault, outcomes, &err);
    *has_failed_out = status != FSDP_OK;
    if (fault->kind == STEP_FAULT_MEMORY)
        return judge_memory(outcomes, world->ranks, why);
    return judge_all(world, fault, outcomes, why);
}

int main(void)
{
    static const step_fault_kind kinds[] = {STEP_FAULT_LATE, STEP_FAULT_GIVES_UP, STEP_FAULT_ORDER,
                                            STEP_FAULT_SHAPE};
    static step_calls calls;
    const step_fault_runner runner = {.name = "thread",
                                      .try = try_fault,
                                      .kinds = kinds,
                                      .kind_count = sizeof kinds / sizeof *kinds,
                                      .shares_memory = true,
                                      .usual_sample = USUAL_SAMPLE,
                                      .calls = &calls};
    alarm(test_sample(USUAL_SAMPLE) > 1 ? SECONDS : 0); /* ends the test when a rank hangs */
    return step_fault_run_worlds(&runner) ? 0 : 1;
}

/*
 * Every fault in every world: the cases of the tests of step faults, of which threads and processes run
 * those that they can have. Each is judged by whoever runs it.
 */
#ifndef FSDP_STEP_FAULT_WORLDS_H
#define FSDP_STEP_FAULT_WORLDS_H

#include "tests/fault/step_fault.h"

typedef struct step_world {
    int ranks;
    bool has_replicas;
    const char *device;
} step_world;

enum { STEP_WORLD_MOST = 4 };  /* ranks */

/* Runs a step with the fault. False, and why, when some rank does not say what it should. */
typedef bool (*step_fault_try)(const step_world *world, const step_fault *fault, bool *has_failed_out,
                               fsdp_text *why_out);

typedef struct step_fault_runner {
    const char *name;          /* of what ranks are */
    step_fault_try try;
    const step_fault_kind *kinds;      /* those that happen at a collective */
    size_t kind_count;
    bool shares_memory;        /* whose allocation it is that fails is not known before */
    int64_t usual_sample;
    step_calls *calls;
} step_fault_runner;

/* Those of FSDP_TEST_SAMPLE; before and after the faults of a world a step without one. Prints what came of
 * it: false when something is wrong. */
bool step_fault_run_worlds(const step_fault_runner *runner);

#endif

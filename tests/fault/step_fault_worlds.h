/*
 * Every fault in every world: the cases of the tests of step faults. Threads and processes each run the
 * cases that are possible there; the runner checks the result.
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

/* Runs the worlds that FSDP_TEST_SAMPLE selects: a step without a fault, the faults, a step without. Prints
 * the results; false when one is wrong. */
bool step_fault_run_worlds(const step_fault_runner *runner);

#endif

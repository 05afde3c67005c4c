/*
 * A training step in which one rank fails at one of its collectives, and what the others must say of it.
 * Every rank runs step_fault_body; its error goes to step_fault_judge.
 *
 * kind               what the rank does in place of collective `at`
 * killed             dies by SIGKILL (processes)
 * stopped            stops by SIGSTOP, until the others have given up (processes)
 * late               sleeps until the others have given up (threads)
 * gives up           returns an error of its own
 * order              makes another call, of another unit
 * shape              makes the same call with another count
 * swapped            (at 0, 1) runs the units in another order in forward, in backward
 * gradient           gives the last unit a gradient less
 * memory             allocation `at` of its step fails
 */
#ifndef FSDP_STEP_FAULT_H
#define FSDP_STEP_FAULT_H

#include "tests/support/ranks/worlds.h"

typedef enum step_fault_kind {
    STEP_FAULT_NONE,
    STEP_FAULT_KILLED,
    STEP_FAULT_STOPPED,
    STEP_FAULT_LATE,
    STEP_FAULT_GIVES_UP,
    STEP_FAULT_ORDER,
    STEP_FAULT_SHAPE,
    STEP_FAULT_SWAPPED,
    STEP_FAULT_GRADIENT,
    STEP_FAULT_MEMORY,
    STEP_FAULT_KINDS
} step_fault_kind;
extern const char *const step_fault_names[STEP_FAULT_KINDS];

/* Worlds have so long a deadline that a test that waits for it is one that hangs. */
enum { STEP_FAULT_CALLS = 16, STEP_FAULT_DEADLINE_MS = 60000 };

/* The calls of a step without a fault, which rank 0 of a first run counts. */
typedef struct step_calls {
    _Atomic int count;
    char units[STEP_FAULT_CALLS][16];
    int64_t allocations;       /* of rank 0 */
} step_calls;

typedef struct step_fault {
    step_fault_kind kind;
    int rank, at;
    bool has_replicas;         /* a mesh of (2, ranks / 2) */
    bool from_comm;            /* buffers in memory of the communicator */
    bool is_launched;          /* each rank has `calls` of its own; else they see the same */
    step_calls *calls;
} step_fault;

/* rank->user: the fault. Also looks for what is left, and whether the failure stays. */
fsdp_status step_fault_body(world_rank *rank, fsdp_error *err);

/* Is that what this rank had to say? Else *why_out. */
bool step_fault_judge(const step_fault *fault, int rank, fsdp_status status, const fsdp_error *err,
                      fsdp_text *why_out);
void step_fault_describe(const step_fault *fault, int ranks, const char *device, char *out, size_t out_size);

#endif

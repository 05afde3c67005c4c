/* Worlds of thread ranks for tests of the runtime, and events as short texts. */
#ifndef FSDP_WORLDS_H
#define FSDP_WORLDS_H

#include "runtime/step/step.h"
#include "runtime/launch/world_internal.h"
#include "tests/support/ranks/rank_outcome.h"
#include "base/text.h"

typedef struct world_rank {
    fsdp_world *world;
    void *user;
    fsdp_text events;          /* the selected ones: "U root|U layers.0|R layers.0|post layers.0|..." */
    bool notes_collectives;    /* "AG layers.0/4" (kind, unit, group size), too */
    bool notes_states;         /* "U root forward": in which state units are gathered */
} world_rank;

typedef fsdp_status (*world_body)(world_rank *rank, fsdp_error *err);

/* Runs body on n threads, each with its world on that device; the first failure. When the environment says
 * FSDP_TEST_RANKS=processes, on n processes with memory of their own, over shared memory. */
fsdp_status run_worlds(int n, const char *device, world_body body, void *user, fsdp_error *err);

typedef struct worlds_setup {
    int ranks, deadline_ms;
    const char *device;
    bool is_unchecked;         /* without --check: the device is not watched */
    bool uses_nccl;            /* collectives of streams go over NCCL */
} worlds_setup;

/* run_worlds with another deadline, and the outcome of each rank. */
fsdp_status run_worlds_within(const worlds_setup *setup, world_body body, void *user,
                              rank_outcome *outcomes_out, fsdp_error *err);

/* The body of a rank's thread or process: makes a world of parts that have a control plane and a transport,
 * runs body in it, and frees it. */
fsdp_status run_world(fsdp_world_parts *parts, const char *device, world_body body, world_rank *rank,
                      fsdp_error *err);

/* Opens the device that stands for cpu-async; NULL: it is that one. tests/cuda/shared_memory_device.c sets it
 * before main. */
extern fsdp_status (*worlds_open_async)(const fsdp_device_rank *rank, fsdp_device **device_out,
                                        fsdp_error *err);

/* Forgets the events so far. */
void forget_events(world_rank *rank);
/* Compares the events since the last call with these, and forgets them. */
fsdp_status expect_events(world_rank *rank, const char *events, fsdp_error *err);
/* The number of times that a text begins an event. */
int count_events(const world_rank *rank, const char *begin);

#endif

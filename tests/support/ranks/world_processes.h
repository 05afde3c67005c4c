/* Worlds of ranks that are processes of this host, over shared memory, for tests of the runtime. */
#ifndef FSDP_WORLD_PROCESSES_H
#define FSDP_WORLD_PROCESSES_H

#include "tests/support/ranks/forked_ranks.h"
#include "tests/support/ranks/worlds.h"

enum { WORLD_PROCESSES_MOST = FORKED_RANKS_MOST };

/* The result of a rank. */
typedef struct world_outcome {
    fsdp_status status;        /* of its body, or of what came before it */
    bool is_done;              /* it ended by itself */
    int signal;                /* or by this one; SIGALRM: it hung */
    int fds_left;              /* more open files at the end than at the start */
    fsdp_error err;
} world_outcome;

typedef struct world_processes {
    int size, deadline_ms;
    unsigned hangs_after_s;    /* 0: 100; a rank that takes longer ends by SIGALRM */
    const char *device;
    bool ends_at_once;         /* without exit handlers, as in Criterion; no check for leaks */
    world_body body;
    void *user;                /* ranks write only to memory of share_memory */
    pid_t pids[WORLD_PROCESSES_MOST];
    world_outcome *outcomes;
} world_processes;

/* Start forks; finish waits, passes the outcomes on and frees them. Both end the program on failure. */
void start_world_processes(world_processes *worlds);
void finish_world_processes(world_processes *worlds, world_outcome *outcomes_out);
/* Start and finish; the failure of the lowest failing rank, also if a signal ended it. */
fsdp_status run_world_processes(world_processes *worlds, fsdp_error *err);

#endif

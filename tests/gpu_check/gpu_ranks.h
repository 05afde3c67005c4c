/* Ranks that are threads of one process and share the GPU. See gpu_check.h. */
#ifndef FSDP_GPU_RANKS_H
#define FSDP_GPU_RANKS_H

#include "tests/gpu_check/gpu_check.h"
#include <fsdp/comm.h>
#include <fsdp/launch.h>

enum { GPU_MOST_RANKS = 8, GPU_CALLS = 100 };

typedef fsdp_status (*gpu_rank_body)(void *context, fsdp_world *world, fsdp_error *err);

typedef struct gpu_ranks {
    int count;
    const char *device, *comm; /* comm NULL: threads */
    int deadline_s;            /* 0: the default */
    gpu_rank_body body;
    void *context;
    fsdp_error errors[GPU_MOST_RANKS]; /* results of the bodies */
    bool has_run;              /* some body was called */
} gpu_ranks;

/* Runs the body on all ranks; the failure of the first rank that failed by itself, else of any. */
fsdp_status gpu_ranks_run(gpu_ranks *ranks, fsdp_error *err);

/* --- a collective: rank_checks.c -------------------------------------------------------------- */

typedef struct gpu_collective {
    const gpu_results *results;
    fsdp_collective_kind kind;
    int64_t count;             /* of a rank's part, f32 */
    bool is_exact;             /* sums are the same in every order */
    double seconds;            /* out: the median of the device's time */
    double host_seconds;       /* out: the mean of the host's time for one of GPU_CALLS calls */
} gpu_collective;

/* A gpu_rank_body, whose context is a gpu_collective: its result is right, and its times. */
fsdp_status gpu_run_collective(void *context, fsdp_world *world, fsdp_error *err);

#endif

/* Ranks that are threads of one process and share the GPU. See gpu_check.h. */
#ifndef FSDP_GPU_RANKS_H
#define FSDP_GPU_RANKS_H

#include "tests/gpu_check/gpu_check.h"
#include <fsdp/launch.h>

enum { GPU_MOST_RANKS = 8 };

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

#endif

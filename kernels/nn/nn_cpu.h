/*
 * The room kernels/nn: the arithmetic of models on the host. In come calls of kernels/nn.h, out come arrays;
 * nn_cpu.c holds the table and is what callers reach, through fsdp_nn_open_cpu only.
 *
 * A call is cut into parts that the threads of a team take one by one (nn_team.c). Every element of a result
 * is made by one part, from its own row or column, so the bits do not depend on the cut.
 */
#ifndef FSDP_NN_CPU_H
#define FSDP_NN_CPU_H

#include "kernels/matrix.h"
#include "kernels/nn/nn_openblas.h"
#include "kernels/nn_loops.h"

typedef struct fsdp_nn_cpu fsdp_nn_cpu;
/* One part of a job: elements [first, last) of what the job counts. */
typedef struct fsdp_nn_part { int64_t first, last; int worker; } fsdp_nn_part;
typedef void (*fsdp_nn_job)(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part);

typedef struct fsdp_nn_team fsdp_nn_team;
/* The caller of run is worker 0. *threads: those wanted, then those it got, which may be fewer.
 * NULL: no memory. */
fsdp_nn_team *fsdp_nn_team_create(int *threads);
void fsdp_nn_team_free(fsdp_nn_team *team);       /* accepts NULL */

/* A worker's memory: packed blocks of products, and capacity for results on the way. */
typedef struct fsdp_nn_worker {
    fsdp_matrix_scratch blocks;
    float *room;
    int64_t capacity;
} fsdp_nn_worker;

struct fsdp_nn_cpu {
    fsdp_nn nn;
    const fsdp_nn_loops *loops;
    const fsdp_nn_openblas *blas;      /* NULL: the products here */
    fsdp_nn_team *team;
    fsdp_nn_worker *workers;
    int threads;
    fsdp_error failure;        /* the first one since finish; its status is FSDP_OK: none */
};

/* Cuts [0, count) at multiples of grain into a part per thread, or into fewer when they are not worth it. */
typedef struct fsdp_nn_cut {
    int64_t count, grain;
    int64_t work;              /* of an item: elements that are read or written once */
    bool uneven;               /* items differ in cost: more parts than threads */
} fsdp_nn_cut;
void fsdp_nn_cpu_run(fsdp_nn_cpu *cpu, fsdp_nn_cut cut, fsdp_nn_job job, const void *call);

#endif

/*
 * bench step trains an MLP over ranks and prints a line per step; its values are the same in any
 * language (docs/performance.md). In come row_options and step_options, out come rows; bench.c calls it.
 *
 *   bench_step_options.c   options -> step_options
 *   bench_step_model.c     step_options, a world -> step_model, whose layers are those of mlp.h
 *   bench_step_memory.c    the expected memory of a step
 *   bench_step.c           trains, prints, measures against PyTorch
 */
#ifndef FSDP_BENCH_STEP_H
#define FSDP_BENCH_STEP_H

#include "tests/bench/rows.h"
#include "tests/bench/mlp.h"

/* --- options ---------------------------------------------------------------------------------- */

typedef enum step_optim { STEP_ADAMW, STEP_SGD } step_optim;

struct step_options {
    const char *first;         /* the first option of step alone that was given; NULL: none */
    const char *first_shared;  /* the first one that train has, too: layers, width */
    int layers, steps, accumulate;
    int64_t width, out, rows;  /* layers, width 0: not given */
    step_optim optim;
    double lr, divide, clip;   /* divide and clip 0: none */
    int replicas, shards, parts;       /* of the mesh: rep, dp, tp; shards 0: all ranks */
    int reshard;               /* as fsdp_unit_opts has it */
    int prefetch_forward, prefetch_backward;
    fsdp_dtype param_dtype, reduce_dtype;
    bool force_sum, offload;
    const char *save, *load;
};

extern const struct argp step_argp;
step_options step_options_default(void);
/* The defaults of step for layers and width. */
void step_options_finish(step_options *opts);

/* --- the model -------------------------------------------------------------------------------- */

typedef struct step_model {
    const step_options *opts;
    fsdp_world *world;
    uint64_t seed;
    int data_rank, data_ranks; /* among the ranks that have rows of their own */
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_optim *optim;
    fsdp_mlp *mlp;
} step_model;

/* Collective; after a failure, too, step_model_free. */
fsdp_status step_model_build(step_model *model, fsdp_error *err);
void step_model_free(step_model *model);
void step_model_fill(step_model *model, int step, int microbatch);

/* --- memory ----------------------------------------------------------------------------------- */

/* The largest number of bytes of each class at any time of a step (trains: there is one), as PyTorch 2.15
 * accounts for them. */
fsdp_status step_memory_expect(const step_model *model, bool trains,
                               int64_t peak_out[FSDP_MEMORY_CLASSES], fsdp_error *err);

#endif

/* Steps of a model whose layers only touch their gradients, so that a step is what the runtime adds to a
 * model's own computation. See gpu_check.h. */
#ifndef FSDP_GPU_STEPS_H
#define FSDP_GPU_STEPS_H

#include "tests/gpu_check/gpu_ranks.h"
#include "tests/support/nets/toy.h"

/* Parameters and AdamW's moments of gpu_state_bytes together, over all ranks. Call toy_free in any case. */
fsdp_status gpu_build_state(toy *net, fsdp_world *world, const gpu_results *results, fsdp_error *err);
fsdp_status gpu_step(toy *net, fsdp_error *err);

/* The host gives a step while the device does the one before, as in training: it is never idle in between. */
typedef struct gpu_step_times {
    void *timers[2], *native;
    int given;                 /* since the device was idle */
    double seconds[GPU_RUNS];
    int count;                 /* known */
} gpu_step_times;

/* Call gpu_close_times in any case. */
fsdp_status gpu_open_times(gpu_step_times *times, toy *net, fsdp_error *err);
void gpu_close_times(gpu_step_times *times);
/* False when there are enough, together with the one that gpu_end_steps adds. */
bool gpu_wants_step(const gpu_step_times *times);
/* Gives a step, and waits for the one before. */
fsdp_status gpu_give_step(gpu_step_times *times, toy *net, fsdp_error *err);
/* Waits for the last one. */
fsdp_status gpu_end_steps(gpu_step_times *times, fsdp_error *err);
/* As many as are wanted, after one that is not counted; the median. */
fsdp_status gpu_time_steps(toy *net, double *seconds_out, fsdp_error *err);

#endif

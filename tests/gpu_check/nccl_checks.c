/*
 * Collectives over NCCL: of two ranks that share the GPU, and of ranks with a GPU each, next to a single GPU
 * (scaling/). See gpu_check.h.
 */
#include "tests/gpu_check/gpu_steps.h"

#include <stdio.h>
#include <string.h>

static const double call_seconds = 30e-6; /* of the host, for a small collective */

/* A machine without NCCL, or with one that serves no two ranks on a GPU, cannot tell anything about it. */
static void end_row(gpu_row *row, const gpu_ranks *run, fsdp_status status, const fsdp_error *err)
{
    if (status == FSDP_ERR_USAGE && !run->has_run)
        gpu_skip_row(row, "ranks over NCCL do not start here (the reason is above): %s", err->text);
    else if (status == FSDP_ERR_USAGE && strstr(err->text, "refuses several ranks on one GPU"))
        gpu_skip_row(row, "%s", err->text);
    else
        gpu_end_row(row, status, err);
}

static fsdp_status run_ranks(gpu_row *row, int ranks, const char *device, gpu_collective *call)
{
    gpu_ranks run = {.count = ranks,
                     .device = device,
                     .comm = "nccl",
                     .body = gpu_run_collective,
                     .context = call};
    fsdp_error err = {0};
    row->size = (double)call->count * ranks * sizeof(float);
    fsdp_status status = gpu_ranks_run(&run, &err);
    end_row(row, &run, status, &err);
    return status;
}

/* --- two ranks on a GPU ----------------------------------------------------------------------- */

static void check_gather(gpu_results *results, gpu_row *row)
{
    gpu_collective call = {.results = results, .kind = FSDP_ALL_GATHER, .count = 1 << 20};
    if (!row || run_ranks(row, 2, results->options.device, &call) != FSDP_OK)
        return;
    row->seconds = call.seconds;
    gpu_rate_row(results, row, 4 * row->size,
                 results->ceilings.device_copy); /* 2 ranks copy 2 parts */
}

static void check_host_time(gpu_results *results, gpu_row *row)
{
    gpu_collective call = {.results = results, .kind = FSDP_ALL_GATHER, .count = 1 << 10};
    if (!row || run_ranks(row, 2, results->options.device, &call) != FSDP_OK)
        return;
    row->seconds = call.host_seconds;
    gpu_rate_row(results, row, 1, 1 / call_seconds);
}

fsdp_status gpu_check_nccl(gpu_results *results, int argument, fsdp_error *err)
{
    (void)argument, (void)err;
    check_gather(results, gpu_add_wanted_row(results, "nccl/2-ranks/all-gather"));
    check_host_time(results, gpu_add_wanted_row(results, "nccl/2-ranks/host-time"));
    return FSDP_OK;
}

/* --- a GPU per rank --------------------------------------------------------------------------- */

/* NULL: it is not wanted, or there are fewer GPUs, which the row says. */
static gpu_row *add_row(gpu_results *results, int gpus, const char *name)
{
    gpu_row *row = gpu_add_wanted_row(results, "scaling/%d-gpus/%s", gpus, name);
    if (!row || results->facts.gpus >= gpus)
        return row;
    gpu_skip_row(row, "it takes %d GPUs, and CUDA shows %d", gpus, results->facts.gpus);
    return NULL;
}

/* Bytes that a GPU sends, and receives, per second: its own part stays. */
static void check_collective(gpu_results *results, int gpus, fsdp_collective_kind kind,
                             const char *name)
{
    const double most = 256 << 20, bytes = (double)results->options.bytes;
    gpu_collective call = {.results = results, .kind = kind, .is_exact = true};
    gpu_row *row = add_row(results, gpus, name);
    call.count = (int64_t)((bytes < most ? bytes : most) / sizeof(float) / gpus);
    if (!row || run_ranks(row, gpus, "cuda", &call) != FSDP_OK)
        return;
    row->seconds = call.seconds;
    gpu_rate_row(results, row, (double)call.count * sizeof(float) * (gpus - 1), 0);
}

typedef struct step_job {
    const gpu_results *results;
    double seconds; /* out: of rank 0 */
} step_job;

static fsdp_status time_steps(void *context, fsdp_world *world, fsdp_error *err)
{
    step_job *job = context;
    double seconds = 0;
    toy net = {0};
    fsdp_status status = gpu_build_state(&net, world, job->results, err);
    if (status == FSDP_OK)
        status = gpu_time_steps(&net, &seconds, err);
    if (fsdp_world_rank(world) == 0)
        job->seconds = seconds;
    toy_free(&net);
    return status;
}

/* The same model on one GPU and on all: each computes as much, and has a share of the state. */
static void check_step(gpu_results *results, int gpus)
{
    step_job alone = {.results = results}, all = alone;
    gpu_ranks one = {.count = 1, .device = "cuda", .body = time_steps, .context = &alone};
    gpu_ranks run = {
        .count = gpus, .device = "cuda", .comm = "nccl", .body = time_steps, .context = &all};
    gpu_row *row = add_row(results, gpus, "step");
    fsdp_error err = {0};
    if (!row)
        return;
    row->size = gpu_state_bytes(results);
    fsdp_status status = gpu_ranks_run(&one, &err);
    if (status == FSDP_OK)
        status = gpu_ranks_run(&run, &err);
    end_row(row, &run, status, &err);
    if (status != FSDP_OK)
        return;
    row->seconds = all.seconds;
    gpu_rate_row(results, row, 1, 1 / alone.seconds);
}

fsdp_status gpu_check_scaling(gpu_results *results, int gpus, fsdp_error *err)
{
    (void)err;
    check_collective(results, gpus, FSDP_ALL_GATHER, "all-gather");
    check_collective(results, gpus, FSDP_REDUCE_SCATTER, "reduce-scatter");
    check_step(results, gpus);
    return FSDP_OK;
}

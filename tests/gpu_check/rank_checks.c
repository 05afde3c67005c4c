/*
 * Ranks that share the GPU: collectives, and ranks that abort or do not come. See gpu_check.h.
 */
#include "tests/gpu_check/gpu_ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/mem.h"
#include "runtime/launch/world_internal.h"

/* --- collectives ------------------------------------------------------------------------------ */

/* One rank's side. */
typedef struct collective_rank {
    const gpu_collective *job;
    fsdp_world *world;
    fsdp_mesh *mesh;
    fsdp_comm *comm;
    fsdp_device *device;
    fsdp_stream *stream;
    void *timer;
    float *in, *out;             /* of the device */
    float *host[GPU_MOST_RANKS]; /* the inputs of all ranks */
    float *found;
} collective_rank;

static bool gathers(const collective_rank *self)
{
    return self->job->kind == FSDP_ALL_GATHER;
}

/* Elements of one rank's input and output. */
static size_t in_count(const collective_rank *self)
{
    return (size_t)(self->job->count * (gathers(self) ? 1 : fsdp_world_size(self->world)));
}

static size_t out_count(const collective_rank *self)
{
    return (size_t)(self->job->count * (gathers(self) ? fsdp_world_size(self->world) : 1));
}

/* Numbers with few bits have the same sum in every order. */
static void fill_input(collective_rank *self, int rank)
{
    float *data = self->host[rank];
    gpu_fill_f32(data, in_count(self), self->job->results->options.seed + (uint64_t)rank, false);
    for (size_t i = 0; self->job->is_exact && i < in_count(self); i++)
        data[i] = truncf(data[i] * 256) / 256 + 0.0F; /* no -0 */
}

static fsdp_status open_rank(collective_rank *self, fsdp_error *err)
{
    const int64_t ranks = fsdp_world_size(self->world);
    const size_t in_size = in_count(self) * sizeof(float),
                 out_size = out_count(self) * sizeof(float);
    FSDP_TRY(fsdp_world_mesh(self->world, 1, &ranks, (const char *[]){"dp"}, &self->mesh, err));
    self->comm = fsdp_world_comm(self->world, self->mesh, 0, 0);
    self->device = self->world->parts.device;
    FSDP_TRY(self->device->ops->stream_create(self->device, "all_gather", &self->stream, err));
    self->timer = gpu_timer_create();
    self->in = self->device->ops->alloc(self->device, in_size);
    self->out = self->device->ops->alloc(self->device, out_size);
    self->found = fsdp_alloc_pages(out_size);
    bool is_whole = self->timer && self->in && self->out && self->found;
    for (int i = 0; i < (int)ranks; i++) {
        self->host[i] = fsdp_alloc_pages(in_size);
        is_whole = is_whole && self->host[i];
        if (self->host[i])
            fill_input(self, i);
    }
    return is_whole ? FSDP_OK : fsdp_fail_memory(err, "the buffers of a collective");
}

static void close_rank(collective_rank *self)
{
    const fsdp_device_ops *ops = self->device ? self->device->ops : NULL;
    if (self->stream)
        ops->stream_free(self->stream);
    if (self->in)
        ops->dealloc(self->device, self->in, in_count(self) * sizeof(float));
    if (self->out)
        ops->dealloc(self->device, self->out, out_count(self) * sizeof(float));
    gpu_timer_free(self->timer);
    fsdp_free(self->found);
    for (int i = 0; i < GPU_MOST_RANKS; i++)
        fsdp_free(self->host[i]);
    fsdp_mesh_free(self->mesh);
}

static fsdp_status call_once(const collective_rank *self, fsdp_error *err)
{
    const fsdp_collective call = {.kind = self->job->kind,
                                  .dtype = FSDP_F32,
                                  .in = self->in,
                                  .out = self->out,
                                  .count = self->job->count,
                                  .unit = "gpu-check",
                                  .stream = self->stream};
    return fsdp_comm_run(self->comm, &call, err);
}

static fsdp_status wait(const collective_rank *self, fsdp_error *err)
{
    return self->device->ops->sync(self->device->ops->record(self->stream), err);
}

/* In the order of ranks, in f32. */
static float expected_at(const collective_rank *self, size_t i)
{
    const size_t count = (size_t)self->job->count;
    const size_t mine = (size_t)fsdp_world_rank(self->world) * count + i;
    if (gathers(self))
        return self->host[i / count][i % count];
    float sum = self->host[0][mine];
    for (int r = 1; r < fsdp_world_size(self->world); r++)
        sum += self->host[r][mine];
    return sum;
}

static fsdp_status see_result(const collective_rank *self, fsdp_error *err)
{
    const fsdp_device_kernels *kernels = self->device->ops->kernels;
    const size_t count = out_count(self);
    kernels->copy(self->stream, self->in, self->host[fsdp_world_rank(self->world)],
                  in_count(self) * sizeof(float));
    FSDP_TRY(wait(self, err));
    FSDP_TRY(call_once(self, err));
    kernels->copy(self->stream, self->found, self->out, count * sizeof(float));
    FSDP_TRY(wait(self, err));
    for (size_t i = 0; i < count; i++) {
        float expected = expected_at(self, i);
        if (memcmp(&expected, &self->found[i], sizeof expected) != 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "rank %d: element %zu is %g, and %g is right",
                             fsdp_world_rank(self->world), i, (double)self->found[i],
                             (double)expected);
    }
    return FSDP_OK;
}

static fsdp_status time_runs(const collective_rank *self, double *seconds, fsdp_error *err)
{
    void *native = self->device->ops->native(self->stream);
    for (int i = 0; i < GPU_RUNS; i++) {
        FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(self->world), err));
        bool is_timed = gpu_timer_begin(self->timer, native);
        FSDP_TRY(call_once(self, err));
        is_timed = gpu_timer_end(self->timer, native) && is_timed;
        FSDP_TRY(wait(self, err));
        seconds[i] = is_timed ? gpu_timer_seconds(self->timer) : -1;
        if (seconds[i] < 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "the device's events do not tell the time");
    }
    return FSDP_OK;
}

/* Of the host, for a call: the stream does the work later. */
static fsdp_status time_calls(const collective_rank *self, double *seconds_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(self->world), err));
    const double began = gpu_now();
    for (int i = 0; i < GPU_CALLS; i++)
        FSDP_TRY(call_once(self, err));
    *seconds_out = (gpu_now() - began) / GPU_CALLS;
    return wait(self, err);
}

fsdp_status gpu_run_collective(void *context, fsdp_world *world, fsdp_error *err)
{
    gpu_collective *job = context;
    collective_rank self = {.job = job, .world = world};
    double seconds[GPU_RUNS], host_seconds = 0;
    fsdp_status status = open_rank(&self, err);
    status = fsdp_ctl_agree(fsdp_world_ctl(world), status, err);
    if (status == FSDP_OK)
        status = see_result(&self, err);
    if (status == FSDP_OK)
        status = time_runs(&self, seconds, err);
    if (status == FSDP_OK)
        status = time_calls(&self, &host_seconds, err);
    if (status == FSDP_OK && fsdp_world_rank(world) == 0) {
        job->seconds = gpu_median(seconds, GPU_RUNS);
        job->host_seconds = host_seconds;
    }
    close_rank(&self);
    return status;
}

/* All ranks' reads and writes: a gather copies every part to every rank, a reduction reads all of them. */
static double traffic(fsdp_collective_kind kind, double part, int ranks)
{
    return kind == FSDP_ALL_GATHER ? 2 * part * ranks * ranks : part * (ranks + 1) * ranks;
}

static void check_collective(gpu_results *results, int ranks, fsdp_collective_kind kind,
                             const char *name)
{
    const double most = 256 << 20, bytes = (double)results->options.bytes;
    gpu_collective job = {.results = results, .kind = kind};
    gpu_ranks run = {.count = ranks,
                     .device = results->options.device,
                     .body = gpu_run_collective,
                     .context = &job};
    gpu_row *row = gpu_add_wanted_row(results, "collective/%d-ranks/%s", ranks, name);
    fsdp_error err = {0};
    if (!row)
        return;
    row->size = bytes < most ? bytes : most;
    job.count = (int64_t)(row->size / sizeof(float) / ranks);
    fsdp_status status = gpu_ranks_run(&run, &err);
    if (status == FSDP_OK) {
        row->seconds = job.seconds;
        gpu_rate_row(results, row, traffic(kind, (double)job.count * sizeof(float), ranks),
                     results->ceilings.device_copy);
    }
    gpu_end_row(row, status, &err);
}

fsdp_status gpu_check_collectives(gpu_results *results, int ranks, fsdp_error *err)
{
    (void)err;
    check_collective(results, ranks, FSDP_ALL_GATHER, "all-gather");
    check_collective(results, ranks, FSDP_REDUCE_SCATTER, "reduce-scatter");
    return FSDP_OK;
}

/* --- ranks that fail -------------------------------------------------------------------------- */

enum { DEADLINE_S = 3 };

static const char *const reason = "rank 1 of gpu-check gives up";

/* Rank 1 aborts, or waits for more than a deadline; the others return what `see` expects. */
static fsdp_status fail_one(void *context, fsdp_world *world, fsdp_error *err)
{
    gpu_collective *job = context;
    collective_rank self = {.job = job, .world = world};
    const fsdp_error why = {.status = FSDP_ERR_CANCELLED, .text = "rank 1 of gpu-check gives up"};
    bool aborts = job->count == GPU_RANK_ABORTS;
    gpu_collective call = *job;
    call.count = 1024;
    self.job = &call;
    fsdp_status status = open_rank(&self, err);
    if (status == FSDP_OK && fsdp_world_rank(world) == 0)
        status = call_once(&self, err);
    else if (status == FSDP_OK && aborts)
        fsdp_comm_abort(self.comm, &why);
    else if (status == FSDP_OK)
        usleep((DEADLINE_S + 2) * 1000 * 1000);
    if (status == FSDP_OK && fsdp_world_rank(world) == 0)
        status = wait(&self, err);
    close_rank(&self);
    return status;
}

fsdp_status gpu_check_failure(gpu_results *results, int how, fsdp_error *err)
{
    gpu_collective job = {.results = results, .kind = FSDP_ALL_GATHER, .count = how};
    gpu_ranks run = {.count = 2,
                     .device = results->options.device,
                     .deadline_s = DEADLINE_S,
                     .body = fail_one,
                     .context = &job};
    bool aborts = how == GPU_RANK_ABORTS;
    gpu_row *row = gpu_add_row(results, "failure/%s", aborts ? "abort" : "deadline");
    int64_t began = fsdp_now_ms();
    (void)gpu_ranks_run(&run, err);
    const fsdp_error *seen = &run.errors[0];
    row->seconds = (double)(fsdp_now_ms() - began) * 1e-3;
    if (seen->status != (aborts ? FSDP_ERR_CANCELLED : FSDP_ERR_PEER))
        gpu_fail_row(row, "rank 0 ends with status %d: %s", seen->status, seen->text);
    else if (!strstr(seen->text, aborts ? reason : "rank 1"))
        gpu_fail_row(row, "rank 0 does not name the reason: %s", seen->text);
    return FSDP_OK;
}

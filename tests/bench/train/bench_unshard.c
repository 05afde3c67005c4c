/*
 * Row unshard: a unit of 10 M parameters is gathered (copy-in, all-gather, copy-out), next to a plain
 * memcpy of its full size on all ranks at once.
 */
#include "tests/bench/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fsdp/root_init.h>

enum { WIDE = 3200, NARROW = 1600, CALLS = 4, PAGE = 4096 };

static const struct {
    const char *name;
    int ndim;
    int64_t shape[2];
} params[] = {{"mlp.up.weight", 2, {WIDE, NARROW}},
              {"mlp.up.bias", 1, {WIDE}},
              {"mlp.down.weight", 2, {NARROW, WIDE}},
              {"mlp.down.bias", 1, {NARROW}}};
enum { PARAMS = sizeof params / sizeof *params };

typedef struct unshard_job {
    const row_options *opts;
    fsdp_world *world;
    fsdp_comm *comm;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_unit *unit;
    unsigned char *from, *to;
    size_t bytes; /* of the whole unit */
} unshard_job;

static fsdp_status prepare(unshard_job *job, fsdp_error *err)
{
    FSDP_TRY(fsdp_world_mesh(job->world, 1, (int64_t[]){fsdp_world_size(job->world)},
                             (const char *[]){"dp"}, &job->mesh, err));
    job->comm = fsdp_world_comm(job->world, job->mesh, 0, 0);
    FSDP_TRY(fsdp_model_create(job->world, &job->model, err));
    fsdp_unit_opts unit = {.mesh = job->mesh};
    for (int i = 0; i < PARAMS; i++) {
        fsdp_param *param;
        FSDP_TRY(fsdp_model_add(job->model,
                                &(fsdp_param_spec){.name = params[i].name,
                                                   .dtype = FSDP_F32,
                                                   .ndim = params[i].ndim,
                                                   .shape = params[i].shape},
                                &param, err));
        job->bytes += sizeof(float) *
                      (size_t)(params[i].shape[0] * (params[i].ndim > 1 ? params[i].shape[1] : 1));
    }
    FSDP_TRY(fsdp_unit_create(job->model, "mlp", &unit, &job->unit, err));
    FSDP_TRY(fsdp_root_create(job->model, &unit, &job->root, err));
    FSDP_TRY(fsdp_root_init_uniform(job->root, job->opts->seed, err));
    job->from = aligned_alloc(PAGE, (job->bytes + PAGE) / PAGE * PAGE);
    job->to = aligned_alloc(PAGE, (job->bytes + PAGE) / PAGE * PAGE);
    if (!job->from || !job->to)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    memset(job->from, 1, job->bytes);
    memset(job->to, 1, job->bytes);
    return FSDP_OK;
}

static fsdp_status unshard_once(const unshard_job *job, fsdp_error *err)
{
    fsdp_unshard_handle *handle = NULL;
    FSDP_TRY(fsdp_unit_unshard(job->unit, false, &handle, err));
    if (handle)
        FSDP_TRY(fsdp_unshard_wait(handle, err));
    return fsdp_unit_reshard(job->unit, err);
}

static fsdp_status copy_once(const unshard_job *job, fsdp_error *err)
{
    (void)err;
    memcpy(job->to, job->from, job->bytes);
    return FSDP_OK;
}

static fsdp_status run(const unshard_job *job,
                       fsdp_status (*once)(const unshard_job *job, fsdp_error *err),
                       bench_times *times, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_agree(fsdp_world_ctl(job->world), cli_check_stop(err), err));
    FSDP_TRY(bench_barrier(job->comm, err));
    bench_clock began = bench_now();
    for (int i = 0; i < CALLS; i++)
        FSDP_TRY(once(job, err));
    FSDP_TRY(bench_barrier(job->comm, err));
    bench_add_time(times, &began);
    times->seconds[times->count - 1] /= CALLS;
    times->cpu[times->count - 1] /= CALLS;
    return FSDP_OK;
}

static fsdp_status measure(const unshard_job *job, fsdp_error *err)
{
    bench_times ours = {0}, plain = {0};
    int ranks = fsdp_world_size(job->world);
    bench_row row = {.ours = &ours, .plain = &plain, .bytes_needed = (int64_t)job->bytes};
    for (int round = -1; round < job->opts->rounds; round++) {
        FSDP_TRY(run(job, unshard_once, &ours, err));
        FSDP_TRY(run(job, copy_once, &plain, err));
        if (round < 0) /* the round that does not count */
            ours.count = plain.count = 0;
    }
    FSDP_TRY(bench_peak_of_ranks(fsdp_world_ctl(job->world), &row.peak_kib, err));
    if (fsdp_world_rank(job->world) != 0)
        return FSDP_OK;
    snprintf(row.work, sizeof row.work, "unshard-%d-10M", ranks);
    snprintf(row.against, sizeof row.against, "memcpy of all of it on every rank at once");
    bench_want_ratio(&row, 0.5);
    return bench_print_row(job->opts, &row);
}

static fsdp_status run_rank(fsdp_world *world, const row_options *opts, fsdp_error *err)
{
    unshard_job job = {.opts = opts, .world = world};
    fsdp_status st = prepare(&job, err);
    st = fsdp_ctl_agree(fsdp_world_ctl(world), st, err);
    if (st == FSDP_OK)
        st = fsdp_ctl_agree(fsdp_world_ctl(world), measure(&job, err), err);
    free(job.from);
    free(job.to);
    fsdp_root_free(job.root);
    fsdp_model_free(job.model);
    fsdp_mesh_free(job.mesh);
    return st;
}

fsdp_status bench_unshard(const row_options *opts, fsdp_error *err)
{
    (void)err;
    bench_launch(opts, run_rank);
}

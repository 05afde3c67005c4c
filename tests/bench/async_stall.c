/*
 * Row async-stall: how long fsdp_async_save stops the training, beside one memcpy of this rank's
 * state into warm memory. Goal: at most 1.5 times. Row async-cost: how much later equal steps of
 * computing end while a save is written in the background, beside the same save done synchronously,
 * the stall not counted. Goal: at most 0.5 times. fsdp_launch takes its options (--np, --threads).
 *
 * usage: async_stall [MIB [ROUNDS [DIR]]]     MIB of parameters, moments included; DIR: where it saves
 */
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    ROWS = 1024,
    COLUMNS = 1024,
    TENSORS = 3,
    ROUNDS_MOST = 100,
    CACHED = 4096,
    STEPS = 20,
    DIR_SIZE = 400
};

typedef struct stall_job {
    fsdp_world *world;
    fsdp_root *root;
    int rounds;
    const char *dir;
    double stall_ms[ROUNDS_MOST], copy_ms[ROUNDS_MOST], cost[ROUNDS_MOST];
} stall_job;

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static int compare(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static double median(double *times, int count)
{
    qsort(times, (size_t)count, sizeof *times, compare);
    return times[count / 2];
}

/* Without values the kernel would map one page of zeros everywhere. */
static fsdp_status fill_state(stall_job *job, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_root_get_state(job->root, NULL, &sd, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        size_t size = (size_t)fsdp_entry_local_bytes(entry, fsdp_world_rank(job->world));
        if (entry->kind == FSDP_ENTRY_TENSOR && size > 0)
            memset(entry->data, 0x3c, size);
    }
    fsdp_sd_free(sd);
    return FSDP_OK;
}

/* Copies every tensor that the rank holds, one behind the other. */
static void copy_plainly(const fsdp_sd *sd, int rank, unsigned char *to)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        size_t size = (size_t)fsdp_entry_local_bytes(entry, rank);
        if (size == 0 || entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        memcpy(to, entry->data, size);
        to += size;
    }
}

static fsdp_status time_copies(stall_job *job, int round, unsigned char *warm, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_root_get_state(job->root, NULL, &sd, err));
    FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(job->world), err));
    double begin = now_ms();
    copy_plainly(sd, fsdp_world_rank(job->world), warm);
    job->copy_ms[round] = now_ms() - begin;
    fsdp_sd_free(sd);
    return FSDP_OK;
}

static fsdp_status time_save(stall_job *job, fsdp_async_saver *saver, int round,
                             fsdp_async_report *report_out, fsdp_error *err)
{
    char path[DIR_SIZE + 40];
    snprintf(path, sizeof path, "%s/async-stall", job->dir);
    const fsdp_root_save_opts opts = {
        .save.overwrite = true, .save.skip_fsync = true, .save.skip_view = true};
    FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(job->world), err));
    FSDP_TRY(fsdp_async_save(saver, path, &opts, err));
    FSDP_TRY(fsdp_async_save_wait(saver, report_out, err));
    job->stall_ms[round] = report_out->stall_ms;
    return FSDP_OK;
}

/* --- async-cost ------------------------------------------------------------------------------- */

/* A step: so many multiplications, in the caches. */
static void compute(double *values)
{
    for (int round = 0; round < 4000; round++)
        for (int i = 0; i < CACHED; i++)
            values[i] = values[i] * 0.999 + 0.001;
}

static double time_steps(fsdp_async_saver *saver, int least, double *values, int *steps_out)
{
    double begin = now_ms();
    int steps = 0;
    for (; steps < least || !fsdp_async_save_is_done(saver); steps++)
        compute(values);
    *steps_out = steps;
    return now_ms() - begin;
}

static fsdp_status time_cost(stall_job *job, fsdp_async_saver *saver, int round, fsdp_error *err)
{
    char path[DIR_SIZE + 40];
    double values[CACHED] = {0};
    int steps;
    const fsdp_root_save_opts opts = {.save.overwrite = true, .save.skip_fsync = true};
    snprintf(path, sizeof path, "%s/async-stall", job->dir);
    double alone = time_steps(NULL, STEPS, values, &steps) / STEPS;
    FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(job->world), err));
    double begin = now_ms();
    FSDP_TRY(fsdp_root_save(job->root, path, &opts, err));
    double sync = now_ms() - begin;
    FSDP_TRY(fsdp_async_save(saver, path, &opts, err));
    double beside = time_steps(saver, 1, values, &steps);
    FSDP_TRY(fsdp_async_save_wait(saver, NULL, err));
    job->cost[round] = (beside - alone * steps) / sync;
    return FSDP_OK;
}

static fsdp_status measure_cost(stall_job *job, fsdp_async_saver *saver, fsdp_error *err)
{
    for (int round = 0; round < job->rounds; round++)
        FSDP_TRY(time_cost(job, saver, round, err));
    double cost = median(job->cost, job->rounds);
    if (fsdp_world_rank(job->world) == 0)
        printf("async-cost: %.2f of the synchronous save (goal: <= 0.50)\n", cost);
    return FSDP_OK;
}

/* --- both ------------------------------------------------------------------------------------- */

static fsdp_status measure(stall_job *job, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_async_report report = {0};
    FSDP_TRY(fill_state(job, err));
    FSDP_TRY(
        fsdp_async_saver_create(job->root, &(fsdp_async_opts){.allow_equal = true}, &saver, err));
    FSDP_TRY(time_save(job, saver, 0, &report, err));
    unsigned char *warm = malloc((size_t)report.bytes);
    if (!warm)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    memset(warm, 1, (size_t)report.bytes);
    fsdp_status status = FSDP_OK;
    for (int round = 0; round < job->rounds && status == FSDP_OK; round++) {
        status = time_copies(job, round, warm, err);
        if (status == FSDP_OK)
            status = time_save(job, saver, round, &report, err);
    }
    free(warm);
    if (status == FSDP_OK)
        status = measure_cost(job, saver, err);
    fsdp_async_saver_free(saver);
    FSDP_TRY(status);
    double stall = median(job->stall_ms, job->rounds), copy = median(job->copy_ms, job->rounds);
    if (fsdp_world_rank(job->world) == 0)
        printf("async-stall: %lld bytes a rank, stall %.3f ms, memcpy %.3f ms, ratio %.2f (goal: "
               "<= 1.50), "
               "write %.0f ms\n",
               (long long)report.bytes, stall, copy, stall / copy, report.write_ms);
    return FSDP_OK;
}

static fsdp_status declare(fsdp_model *model, int count, fsdp_error *err)
{
    const int64_t shape[] = {ROWS, COLUMNS};
    for (int i = 0; i < count; i++) {
        char name[40];
        snprintf(name, sizeof name, "layers.%d.weight", i);
        const fsdp_param_spec spec = {.name = name, .dtype = FSDP_F32, .ndim = 2, .shape = shape};
        FSDP_TRY(fsdp_model_add(model, &spec, NULL, err));
    }
    return FSDP_OK;
}

static fsdp_status run(stall_job *job, int mib, fsdp_error *err)
{
    fsdp_model *model = NULL;
    fsdp_mesh *mesh = NULL;
    fsdp_optim *optim = NULL;
    int count = mib / (TENSORS * 4);
    const int64_t ranks = fsdp_world_size(job->world);
    FSDP_TRY(fsdp_world_mesh(job->world, 1, &ranks, (const char *[]){"dp"}, &mesh, err));
    FSDP_TRY(fsdp_model_create(job->world, &model, err));
    FSDP_TRY(declare(model, count > 0 ? count : 1, err));
    FSDP_TRY(fsdp_root_create(model, &(fsdp_unit_opts){.mesh = mesh}, &job->root, err));
    FSDP_TRY(fsdp_adamw_create(job->root, NULL, &optim, err));
    FSDP_TRY(measure(job, err));
    fsdp_optim_free(optim);
    fsdp_root_free(job->root);
    fsdp_model_free(model);
    fsdp_mesh_free(mesh);
    return FSDP_OK;
}

static int run_rank(void *context, fsdp_world *world, int argc, char **argv)
{
    fsdp_error err = {0};
    stall_job job = {.world = world, .rounds = argc > 2 ? atoi(argv[2]) : 7};
    (void)context;
    job.dir = argc > 3 ? argv[3] : "/tmp";
    if (job.rounds < 1 || job.rounds > ROUNDS_MOST)
        job.rounds = ROUNDS_MOST;
    fsdp_status status = run(&job, argc > 1 ? atoi(argv[1]) : 384, &err);
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
}

int main(int argc, char **argv)
{
    return fsdp_launch(argc, argv, run_rank, NULL);
}

/*
 * Saves of bench train: how long fsdp_async_save stops the training, next to one memcpy of the rank's
 * state into warm memory, and how much longer the steps during it take, against the same save made
 * synchronously. See bench_trainer.h.
 */
#include "tests/bench/train/bench_trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PLAIN_STEPS = 3 };

typedef struct trainer_saves {
    trainer_run *run;
    fsdp_async_saver *saver;
    char dir[BENCH_PATH], path[BENCH_PATH];
    unsigned char *warm;
    int64_t bytes, peak_kib; /* of a rank's state */
} trainer_saves;

/* --- async-stall --------------------------------------------------------------------------------- */

/* Copies the rank's part of every tensor to `to`, one after the other; NULL: only adds up their sizes. */
static int64_t copy_state(const fsdp_sd *sd, int rank, unsigned char *to)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        const int64_t size = fsdp_entry_local_bytes(entry, rank);
        if (to && size > 0)
            memcpy(to + bytes, entry->data, (size_t)size);
        bytes += size;
    }
    return bytes;
}

static fsdp_status make_warm(trainer_saves *saves, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_root_get_state(saves->run->job.root, NULL, &sd, err));
    saves->bytes = copy_state(sd, saves->run->job.rank, NULL);
    fsdp_sd_free(sd);
    saves->warm = malloc((size_t)saves->bytes + 1);
    if (!saves->warm)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    memset(saves->warm, 1, (size_t)saves->bytes);
    return FSDP_OK;
}

static fsdp_status time_copy(trainer_saves *saves, bench_times *times, fsdp_error *err)
{
    const train_job *job = &saves->run->job;
    fsdp_sd *sd = NULL;
    fsdp_status st = fsdp_root_get_state(job->root, NULL, &sd, err);
    st = fsdp_ctl_agree(job->ctl, st, err);
    bench_clock began = bench_now();
    if (st == FSDP_OK)
        copy_state(sd, job->rank, saves->warm);
    fsdp_sd_free(sd);
    FSDP_TRY(st);
    FSDP_TRY(fsdp_ctl_barrier(job->ctl, err));
    bench_add_time(times, &began);
    return FSDP_OK;
}

static fsdp_status time_stall(trainer_saves *saves, bench_times *times, fsdp_error *err)
{
    const fsdp_root_save_opts opts = {
        .save.overwrite = true, .save.skip_fsync = true, .save.skip_view = true};
    FSDP_TRY(fsdp_ctl_barrier(saves->run->job.ctl, err));
    bench_clock began = bench_now();
    FSDP_TRY(fsdp_async_save(saves->saver, saves->path, &opts, err));
    FSDP_TRY(fsdp_ctl_barrier(saves->run->job.ctl, err));
    bench_add_time(times, &began);
    return fsdp_async_save_wait(saves->saver, NULL, err);
}

static fsdp_status measure_stall(trainer_saves *saves, fsdp_error *err)
{
    const double most = 1.5;
    const trainer_run *run = saves->run;
    bench_times stall = {0}, copy = {0};
    for (int round = -1; round < run->opts->rounds; round++) {
        FSDP_TRY(fsdp_ctl_agree(run->job.ctl, cli_check_stop(err), err));
        FSDP_TRY(time_copy(saves, &copy, err));
        FSDP_TRY(time_stall(saves, &stall, err));
        if (round < 0) /* the round that does not count */
            stall.count = copy.count = 0;
    }
    FSDP_TRY(bench_peak_of_ranks(run->job.ctl, &saves->peak_kib, err));
    if (run->job.rank != 0)
        return FSDP_OK;
    bench_row row = {.work = "async-stall",
                     .against = "memcpy of a rank's state into warm memory",
                     .ours = &stall,
                     .plain = &copy,
                     .bytes_needed = saves->bytes,
                     .peak_kib = saves->peak_kib};
    snprintf(row.goal, sizeof row.goal, "<= %.1f x against", most);
    row.met = bench_median(&stall) <= most * bench_median(&copy);
    return bench_print_row(run->opts, &row);
}

/* --- async-cost ---------------------------------------------------------------------------------- */

/* Removes the checkpoint of the round before, and waits until its bytes are written back. */
static fsdp_status clear(const trainer_saves *saves, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    if (saves->run->job.rank == 0) {
        st = bench_remove(saves->path, err);
        if (st == FSDP_OK)
            st = bench_settle(saves->dir, err);
    }
    return fsdp_ctl_agree(saves->run->job.ctl, st, err);
}

static fsdp_status time_sync_save(const trainer_saves *saves, bench_times *times, fsdp_error *err)
{
    const train_job *job = &saves->run->job;
    FSDP_TRY(clear(saves, err));
    FSDP_TRY(fsdp_ctl_barrier(job->ctl, err));
    bench_clock began = bench_now();
    FSDP_TRY(fsdp_root_save(job->root, saves->path, NULL, err));
    FSDP_TRY(fsdp_ctl_barrier(job->ctl, err));
    bench_add_time(times, &began);
    return FSDP_OK;
}

/* The seconds by which steps took longer than `alone` until the save was there on all ranks. */
static fsdp_status add_extra(trainer_saves *saves, double alone, bench_times *extra,
                             fsdp_error *err)
{
    train_job *job = &saves->run->job;
    double sum = 0;
    FSDP_TRY(clear(saves, err));
    FSDP_TRY(fsdp_async_save(saves->saver, saves->path, NULL, err));
    double left;
    do {
        bench_times step = {0};
        FSDP_TRY(bench_trainer_step(saves->run, &step, err));
        sum += bench_median(&step) - alone;
        left = !fsdp_async_save_is_done(saves->saver);
        FSDP_TRY(fsdp_world_sum(job->world, &left, 1, err));
    } while (left > 0);
    FSDP_TRY(fsdp_async_save_wait(saves->saver, NULL, err));
    if (extra->count < BENCH_MAX_ROUNDS)
        extra->seconds[extra->count++] = sum;
    return FSDP_OK;
}

static fsdp_status measure_cost(trainer_saves *saves, fsdp_error *err)
{
    const double most = 0.5;
    trainer_run *run = saves->run;
    bench_times extra = {0}, sync = {0};
    for (int round = 0; round < run->opts->rounds; round++) {
        bench_times alone = {0};
        for (int i = 0; i < PLAIN_STEPS; i++)
            FSDP_TRY(bench_trainer_step(run, &alone, err));
        FSDP_TRY(time_sync_save(saves, &sync, err));
        FSDP_TRY(add_extra(saves, bench_median(&alone), &extra, err));
    }
    if (run->job.rank != 0)
        return FSDP_OK;
    bench_row row = {.work = "async-cost",
                     .against = "the same save made synchronously",
                     .ours = &extra,
                     .plain = &sync,
                     .bytes_needed = saves->bytes,
                     .peak_kib = saves->peak_kib};
    snprintf(row.goal, sizeof row.goal, "<= %.1f x against", most);
    row.met = bench_median(&extra) <= most * bench_median(&sync);
    return bench_print_row(run->opts, &row);
}

/* --- both ---------------------------------------------------------------------------------------- */

static fsdp_status measure(trainer_saves *saves, fsdp_error *err)
{
    const train_job *job = &saves->run->job;
    /* Only bytes and time are measured: two saves may hold equal values. */
    const fsdp_async_opts opts = {.allow_equal = true};
    FSDP_TRY(fsdp_async_saver_create(job->root, &opts, &saves->saver, err));
    FSDP_TRY(fsdp_ctl_agree(job->ctl, make_warm(saves, err), err));
    FSDP_TRY(fsdp_ctl_agree(job->ctl, measure_stall(saves, err), err));
    return fsdp_ctl_agree(job->ctl, measure_cost(saves, err), err);
}

fsdp_status bench_trainer_saves(trainer_run *run, fsdp_error *err)
{
    trainer_saves saves = {.run = run};
    FSDP_TRY(bench_make_directory(run->job.ctl, run->opts->dir, saves.dir, err));
    bench_path(saves.path, saves.dir, "state");
    fsdp_status st = measure(&saves, err);
    fsdp_async_saver_free(saves.saver);
    free(saves.warm);
    if (run->job.rank == 0 && bench_remove(saves.dir, NULL) != FSDP_OK)
        cli_say("warn", "'%s' could not be removed", saves.dir);
    return st;
}
